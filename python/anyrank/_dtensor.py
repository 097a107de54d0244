# SPDX-License-Identifier: Apache-2.0
"""DTensors compared with plain tensors: this rank's part, and the same part of the other."""

from __future__ import annotations

import typing


def is_dtensor(value: object) -> bool:
    return hasattr(value, "placements") and hasattr(value, "to_local")


def same_part(reference: typing.Any, actual: typing.Any) -> tuple[typing.Any, typing.Any]:
    """Plain tensors of two, at least one of which is a DTensor: this rank's part of both. What is partial, and two
    DTensors that are shared out differently, are put together, which all ranks have to do (DTensor.full_tensor)."""
    reference_distributed, actual_distributed = is_dtensor(reference), is_dtensor(actual)
    sides = [side for side in (reference, actual) if is_dtensor(side)]
    has_partial = any(placement.is_partial() for side in sides for placement in side.placements)
    if reference_distributed and actual_distributed and not has_partial and _alike(reference, actual):
        return reference.to_local(), actual.to_local()
    if has_partial or (reference_distributed and actual_distributed):
        return (reference.full_tensor() if reference_distributed else reference), (
            actual.full_tensor() if actual_distributed else actual
        )
    dtensor, full = (reference, actual) if reference_distributed else (actual, reference)
    if not hasattr(full, "shape") or tuple(full.shape) != tuple(dtensor.shape):
        return (dtensor.to_local(), full) if reference_distributed else (full, dtensor.to_local())
    part = _part(full, dtensor)
    return (dtensor.to_local(), part) if reference_distributed else (part, dtensor.to_local())


def _alike(a: typing.Any, b: typing.Any) -> bool:
    return bool(a.placements == b.placements and a.device_mesh == b.device_mesh)


def _part(full: typing.Any, dtensor: typing.Any) -> typing.Any:
    """Returns the part of a plain tensor that corresponds to this rank's part of a DTensor."""
    import torch

    from anyrank.capture._places import Whole, runs_of

    part = torch.as_tensor(full)
    full_layout = Whole(tuple(dtensor.shape), dtensor.device_mesh, tuple(dtensor.placements))
    for dim, runs in enumerate(runs_of(full_layout, dtensor.device_mesh.get_coordinate())):
        pieces = [part.narrow(dim, start, count) for start, count in runs]
        part = torch.cat(pieces, dim) if len(pieces) != 1 else pieces[0]
    return part
