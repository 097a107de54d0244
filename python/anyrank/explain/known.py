# SPDX-License-Identifier: Apache-2.0
"""What the dumps have besides the tensor that differs: its numbers, and other tensors at its elements."""

from __future__ import annotations

import functools
import math
import typing

import numpy as np

from anyrank.explain.tensors import Array, Case, Name, Tensors, every

_STRIDED = 4096  # elements of a sample


@functools.lru_cache(maxsize=8)
def _order(names: tuple[str, ...]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def order(case: Case) -> dict[str, int]:
    """Names of the reference in the order in which they were computed."""
    return _order(tuple(case.runs.reference))


def loss_of(case: Case) -> tuple[float, float] | None:
    """The reference's and the other run's value of a case that is one finite number of a forward pass; else None."""
    if case.name.kind != "fwd" or case.reference.size != 1 or case.reference.dtype.kind != "f":
        return None
    reference, value = float(case.ref.ravel()[0]), float(case.val.ravel()[0])
    return (reference, value) if math.isfinite(reference) and math.isfinite(value) else None


def earlier(case: Case) -> list[str]:
    """Names of what was computed before the case's tensor, the latest first."""
    names = list(case.runs.reference)
    at = order(case).get(str(case.name), len(names))
    return names[:at][::-1]


def shape_of(tensors: typing.Mapping[str, Array], name: str) -> tuple[int, ...]:
    """A tensor's shape, if possible without reading it."""
    return tensors.shape(name) if isinstance(tensors, Tensors) else tuple(np.shape(tensors[name]))


def full_shape(case: Case) -> tuple[int, ...]:
    """The tensor's shape, of which the case may have every n-th index alone."""
    name = str(case.name)
    return shape_of(case.runs.reference, name) if name in case.runs.reference else case.shape


def at_elements(case: Case, array: Array) -> Array | None:
    """Another tensor's values at the case's elements, in binary64; None: it has another number of elements."""
    shape = full_shape(case)
    if array.dtype.kind not in "fiub" or math.prod(array.shape) != math.prod(shape):
        return None
    thin = array.reshape(shape)[every(shape)]
    return thin.astype(np.float64) if thin.shape == case.shape else None


def sample_of(count: int) -> Array:
    """Indices of a sample of so many elements, which no power of two divides evenly."""
    index: Array = np.arange(min(count, _STRIDED))
    return index if count <= _STRIDED else (index * (count / _STRIDED)).astype(np.int64)


def sampled(case: Case, array: Array, index: Array) -> Array | None:
    """A tensor's values at a sample of the case's elements, in binary64."""
    shape = full_shape(case)
    if array.dtype.kind not in "fiub" or math.prod(array.shape) != math.prod(shape):
        return None
    array = array.reshape(shape)
    if shape != case.shape:
        array = array[every(shape)]
    return array.flat[index].astype(np.float64) if array.shape == case.shape else None


def is_norm(case: Case, name: str) -> bool:
    """Whether an activation is of a module whose weight is one number for each feature."""
    names = case.runs.reference
    weight = f"{Name.of(name).stem}.weight:init"
    return weight in names and name in names and shape_of(names, weight) == shape_of(names, name)[-1:]


def output_gradient(case: Case, run: typing.Mapping[str, Array], back: Name) -> Array | None:
    """The gradient of a linear layer's output, [rows, out], of that of its input and its weight of before the step;
    None: it has none, or more outputs than inputs."""
    own = Name(f"{back.stem}.weight", "new" if back.step > 1 else "init", max(back.step - 1, 1))
    weight, dx = run.get(str(own)), run.get(str(back))
    if weight is None or dx is None or weight.ndim != 2 or dx.shape[-1:] != weight.shape[1:] or (
            weight.shape[0] > weight.shape[1]) or not (np.isfinite(dx).all() and np.isfinite(weight).all()):
        return None
    w: Array = weight.astype(np.float64)
    d: Array = dx.astype(np.float64).reshape(-1, weight.shape[1])
    gram = w @ w.T
    if np.linalg.cond(gram) > 1e8:
        return None
    result: Array = np.linalg.solve(gram, w @ d.T).T
    left = np.linalg.norm(result @ w - d)
    return result if left <= 64.0 * case.unit * np.linalg.norm(d) else None


def targets_of(case: Case) -> int:
    """Tokens with a target: as the report says, or those that the loss gives a gradient; 0: not known."""
    told = (case.runs.report.get("facts") or {}).get("targets") or 0
    if told:
        return int(told)
    runs = case.runs
    if not runs.batch or not runs.seq:
        return 0
    for name in runs.reference:
        if Name.of(name).kind == "bwd":
            shape = shape_of(runs.reference, name)
            is_loss = len(shape) == 3 and shape[:2] == (runs.batch, runs.seq)
            return int((runs.reference[name] != 0).any(axis=2).sum()) if is_loss else 0
    return 0


def snapped(x: float, unsure: float = 1e-5) -> float:
    """The small ratio that a number is, or the number."""
    for q in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        p = round(x * q)
        if p != 0 and abs(p) <= 64 and abs(x * q - p) <= max(unsure, 1e-5) * abs(p):
            return p / q
    return x


def said(x: float) -> str:
    """A number as a ratio, a root or four digits."""
    for q in range(1, 65):
        p = round(x * q)
        if p != 0 and abs(p) <= 64 and abs(x * q - p) <= 1e-5 * abs(p):
            return f"{p}/{q}" if q > 1 else str(p)
    return f"{x:.6g}"


def listed(values: typing.Sequence[float], most: int = 8) -> str:
    """Numbers in a list that is not long."""
    texts = [f"{x:.4g}" for x in values[:most]]
    return ", ".join(texts) + (", .." if len(values) > most else "")
