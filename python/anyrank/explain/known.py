# SPDX-License-Identifier: Apache-2.0
"""What the dumps have besides the tensor that differs: its numbers, and other tensors at its elements."""

from __future__ import annotations

import math
import typing

import numpy as np

from anyrank.explain import facts
from anyrank.explain.patterns import ratio_of
from anyrank.explain.tensors import Array, Case, Name, Tensors, every
from anyrank.explain.words import RUNS

_STRIDED = 4096  # elements of a sample


def order(case: Case) -> dict[str, int]:
    """Names of the reference in the order in which they were computed."""
    return {name: i for i, name in enumerate(case.runs.reference)}


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


def at_elements(case: Case, array: Array, index: Array | None = None) -> Array | None:
    """Another tensor's values at the case's elements, or at some of them, in binary64; None: it has another number of
    elements."""
    shape = full_shape(case)
    if array.dtype.kind not in "fiub" or math.prod(array.shape) != math.prod(shape):
        return None
    thin: Array = array.reshape(shape)[every(shape)]
    if thin.shape != case.shape:
        return None
    return (thin if index is None else thin.flat[index]).astype(np.float64)


def sample_of(count: int) -> Array:
    """Indices of a sample of so many elements, which no power of two divides evenly."""
    index: Array = np.arange(min(count, _STRIDED))
    return index if count <= _STRIDED else (index * (count / _STRIDED)).astype(np.int64)


def is_norm(case: Case, name: str) -> bool:
    """Whether an activation is of a module whose weight is one number for each feature."""
    names = case.runs.reference
    weight = f"{Name.of(name).stem}.weight:init"
    return weight in names and name in names and shape_of(names, weight) == shape_of(names, name)[-1:]


def targets_of(case: Case) -> int:
    """Tokens with a target: as the dump says, or those that the loss gives a gradient; 0: not known."""
    runs = case.runs
    if runs.targets:
        return runs.targets
    if not runs.batch or not runs.seq:
        return 0
    for name in runs.reference:
        if Name.of(name).kind == "bwd":
            shape = shape_of(runs.reference, name)
            is_loss = len(shape) == 3 and shape[:2] == (runs.batch, runs.seq)
            return int((runs.reference[name] != 0).any(axis=2).sum()) if is_loss else 0
    return 0


_FORMATS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8 e4m3", "F8_E5M2": "fp8 e5m2"}
_ENOUGH = 16  # numbers of bf16, which one fp32 number in 65,536 is by chance


def is_of_bf16(values: Array) -> bool:
    """Whether numbers that are kept in fp32 were computed in bf16: beyond chance, all of them are numbers of it."""
    if values.dtype != np.float32 or values.size < _ENOUGH:
        return False
    held = np.ascontiguousarray(values)
    return not (held.view(np.uint32) & 0xffff).any() and len(np.unique(held.ravel()[:1 << 16])) >= _ENOUGH


def formats_apart(case: Case) -> str:
    """Which formats the two runs have that differ: of the tensor, as recorded of the runs, or by the values; "": none
    is known."""
    row, (a, b) = case.runs.row(str(case.name)), case.runs.facts
    x, y = (_FORMATS.get(str(row.get(key)), "") for key in ("dtype", "other_dtype"))
    if x and y and x != y:
        return f"the tensor is {x} in the reference, {y} in the other run"
    for difference in facts.differences(a, b):
        values = isinstance(difference.reference, str) and isinstance(difference.other, str)
        if difference.kind == "autocast" or difference.kind == "dtypes" and values or (
                difference.text.startswith(("matmul_precision: ", "autocast of "))):
            return difference.text
    held = [is_of_bf16(values) for values in (case.reference, case.other)]
    if held[0] != held[1]:
        return f"all values are numbers of bf16 in {RUNS[held[1]]} alone"
    return ""


def left_of_zero(unit: float) -> float:
    """What rounding leaves of a gradient that is zero, at most, in parts of the step's largest one: 256 roundings of
    sums that cancel; in 16 bits, which are summed in more, a 64th."""
    return min(256.0 * unit, 2.0 ** -6)


MOST_READ = 256  # tensors that are read for the largest of them


def rms_of_kind(case: Case, kind: str, enough: float = math.inf) -> float:
    """The largest root mean square of the reference's tensors of this kind in the step, or one that is enough: as
    reported, else as read."""
    runs, largest = case.runs, 0.0
    alike = [text for text in runs.reference if (own := Name.of(text)).kind == kind and own.step == case.name.step]
    told = [float(runs.row(text).get("rms_reference") or 0.0) for text in alike]
    if max(told, default=0.0) >= enough:
        return max(told)
    for text in alike[:MOST_READ]:
        largest = max(largest, float(np.sqrt((np.asarray(runs.reference[text], np.float64) ** 2).mean())))
        if largest >= enough:
            break
    return max(largest, *told) if told else largest


def snapped(x: float, unsure: float = 1e-5) -> float:
    """The small ratio that a number is, or the number."""
    ratio = ratio_of(x, 64, unsure)
    return ratio[0] / ratio[1] if ratio and ratio[1] in (*range(1, 9), 16) else x


def said(x: float) -> str:
    """A number as a ratio or six digits."""
    ratio = ratio_of(x)
    return f"{x:.6g}" if not ratio else f"{ratio[0]}/{ratio[1]}" if ratio[1] > 1 else str(ratio[0])


def listed(values: typing.Sequence[float], most: int = 8) -> str:
    """Numbers in a list that is not long."""
    texts = [f"{x:.4g}" for x in values[:most]]
    return ", ".join(texts) + (", .." if len(values) > most else "")
