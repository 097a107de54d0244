# SPDX-License-Identifier: Apache-2.0
"""DTensors beside plain tensors: what this rank holds, and the same part of the other."""

from __future__ import annotations

import typing


def same_part(reference: typing.Any, other: typing.Any) -> tuple[typing.Any, typing.Any]:
    """Plain tensors of two, at least one of which is a DTensor: this rank's part of both, where the placements say
    which part that is. What is partial, or sharded by more than one mesh dimension in another order, is put together
    first, which all ranks have to do (DTensor.full_tensor)."""
    one, two = _is_dtensor(reference), _is_dtensor(other)
    if one and two and reference.placements == other.placements and reference.device_mesh == other.device_mesh:
        if not any(placement.is_partial() for placement in other.placements):
            return reference.to_local(), other.to_local()
    if one and two:
        return reference.full_tensor(), other.full_tensor()
    held, whole = (reference, other) if one else (other, reference)
    local, part = _part(held, whole)
    return (local, part) if one else (part, local)


def _is_dtensor(value: object) -> bool:
    return hasattr(value, "placements") and hasattr(value, "to_local")


def _part(held: typing.Any, whole: typing.Any) -> tuple[typing.Any, typing.Any]:
    known = all(type(placement).__name__ in ("Shard", "Replicate") for placement in held.placements)
    if not known or not hasattr(whole, "__getitem__") or tuple(whole.shape) != tuple(held.shape):
        return held.full_tensor(), whole
    first, size = [0] * held.ndim, list(held.shape)
    coordinate = held.device_mesh.get_coordinate()
    for at, ranks, placement in zip(coordinate, held.device_mesh.shape, held.placements):
        if placement.is_shard():
            # torch cuts as chunk() does: pieces of the size rounded up, the last ones smaller or empty.
            dim = placement.dim % held.ndim
            piece = -(-size[dim] // ranks)
            begin = min(at * piece, size[dim])
            first[dim] += begin
            size[dim] = min(piece, size[dim] - begin)
    return held.to_local(), whole[tuple(slice(f, f + n) for f, n in zip(first, size))]
