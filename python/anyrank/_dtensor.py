# SPDX-License-Identifier: Apache-2.0
"""DTensors compared with plain tensors: this rank's part, and the same part of the other."""

from __future__ import annotations

import typing


def is_dtensor(value: object) -> bool:
    return hasattr(value, "placements") and hasattr(value, "to_local")


def same_part(reference: typing.Any, other: typing.Any) -> tuple[typing.Any, typing.Any]:
    """Plain tensors of two, at least one of which is a DTensor: this rank's part of both. What is partial, and two
    DTensors that are shared out differently, are put together, which all ranks have to do (DTensor.full_tensor)."""
    one, two = is_dtensor(reference), is_dtensor(other)
    sides = [side for side in (reference, other) if is_dtensor(side)]
    whole = any(placement.is_partial() for side in sides for placement in side.placements)
    if one and two and not whole and _alike(reference, other):
        return reference.to_local(), other.to_local()
    if whole or (one and two):
        return (reference.full_tensor() if one else reference), (other.full_tensor() if two else other)
    held, full = (reference, other) if one else (other, reference)
    if not hasattr(full, "shape") or tuple(full.shape) != tuple(held.shape):
        return (held.to_local(), full) if one else (full, held.to_local())
    part = _part(full, held)
    return (held.to_local(), part) if one else (part, held.to_local())


def _alike(a: typing.Any, b: typing.Any) -> bool:
    return bool(a.placements == b.placements and a.device_mesh == b.device_mesh)


def _part(full: typing.Any, held: typing.Any) -> typing.Any:
    """What a plain tensor has where this rank's part of a DTensor is."""
    import torch

    from anyrank.capture._places import Whole, runs_of

    part = torch.as_tensor(full)
    whole = Whole(tuple(held.shape), held.device_mesh, tuple(held.placements))
    for dim, runs in enumerate(runs_of(whole, held.device_mesh.get_coordinate())):
        pieces = [part.narrow(dim, start, count) for start, count in runs]
        part = torch.cat(pieces, dim) if len(pieces) != 1 else pieces[0]
    return part
