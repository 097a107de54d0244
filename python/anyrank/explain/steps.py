# SPDX-License-Identifier: Apache-2.0
"""What the dumps have of a step of an optimizer beside a tensor, and what is recorded of the optimizer."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.patterns import Parts
from anyrank.explain.tensors import Array, Case, Name
from anyrank.explain.words import ranks_of

SAMPLED = 1 << 16  # elements by which numbers are fitted; the pattern is held against all
NEAR = 1e-3  # of a fitted factor: as far apart as two that mean the same
USUAL_BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.95, 0.95), (0.9, 0.99), (0.5, 0.999), (0.0, 0.99))


def last(name: Name) -> str:
    """A parameter's name before the step."""
    return name.with_kind("new", name.step - 1) if name.step > 1 else name.with_kind("init", 1)


def before(case: Case, other: bool = False) -> Array | None:
    """The weights before the step."""
    return case.beside(last(case.name), other)


def options(case: Case) -> typing.Mapping[str, typing.Any]:
    """What the reference records of the optimizer of this parameter."""
    for optimizer in case.runs.facts[0].optimizers:
        for group in optimizer.groups:
            if not group.parameters or case.name.stem in group.parameters:
                return group.options
    return {}


def betas_of(case: Case) -> tuple[tuple[float, float], ...]:
    """Adam's rates: those that are recorded, else usual ones that the reference's moments agree with."""
    told = options(case).get("betas")
    if isinstance(told, (list, tuple)) and len(told) == 2:
        return ((float(told[0]), float(told[1])),)
    g, m, v = (case.beside(case.name.with_kind(kind)) for kind in ("grad", "m", "v"))
    if g is None or m is None or v is None:
        return ()
    begins = sum_of(m, (g,))
    if case.name.step == 1 and (begins is None or begins.left > 1e-2):
        return USUAL_BETAS  # moments with a history that is not dumped
    if case.name.step == 1:  # of gradients times c: m is (1 - beta1) c g, v is (1 - beta2) (c g)^2
        first, second = sum_of(m, (g,)), sum_of(v, (m ** 2,))
        if first is None or second is None or max(first.left, second.left) > max(1e-3, 8.0 * case.unit):
            return ()
        return tuple(b for b in USUAL_BETAS if near(second.numbers[0], (1.0 - b[1]) / (1.0 - b[0]) ** 2))
    kept = [case.beside(case.name.with_kind(kind, case.name.step - 1)) for kind in ("m", "v")]
    if kept[0] is None or kept[1] is None:
        return ()
    first, second = sum_of(m, (kept[0], g)), sum_of(v, (kept[1], g ** 2))
    return tuple(b for b in USUAL_BETAS if first is not None and second is not None
                 and abs(first.numbers[0] - b[0]) < 1e-3 and abs(second.numbers[0] - b[1]) < 1e-4)


def rates_of(case: Case) -> tuple[float, float] | None:
    """The learning rates that both runs record of this step; None where either has several, or none."""
    found = []
    for facts in case.runs.facts:
        at = max((step for step in facts.learning_rates if step <= case.name.step), default=None)
        told = [rate for groups in (facts.learning_rates[at] if at is not None else ()) if isinstance(groups, list)
                for rate in groups]
        if not told or told.count(told[0]) != len(told):
            return None
        found.append(float(told[0]))
    return found[0], found[1]


def near(x: float, y: float, within: float = NEAR) -> bool:
    return abs(x - y) <= within * max(abs(y), 1e-30)


def copied(case: Case, arrays: typing.Sequence[Array]) -> Parts:
    """A full array for each copy, as what the copies hold of them."""
    return [[array[box] for box in copy.boxes] for copy, array in zip(case.copies, arrays)]


def flat(case: Case, i: int, array: Array | None = None) -> Array:
    """What copy i has, or its elements of an array, in one row."""
    copy = case.copies[i]
    parts = copy.values if array is None else [array[box] for box in copy.boxes]
    result: Array = np.concatenate([np.ravel(part) for part in parts]).astype(np.float64)
    return result


def own_of(case: Case, i: int) -> Array:
    """What copy i has, in the full tensor's places; elsewhere the reference."""
    result: Array = case.ref.copy()
    for box, values in zip(case.copies[i].boxes, case.copies[i].values):
        result[box] = values
    return result


def ranks_named(case: Case, which: typing.Iterable[int]) -> str:
    """Copies by rank, in words."""
    ranks = {rank for i in which if (rank := case.copies[i].rank) is not None}
    return f" on {ranks_of(ranks)}" if ranks and len(ranks) < len(case.copies) else ""


@dataclasses.dataclass(frozen=True)
class Sum:
    """The least squares of y by columns: their numbers, and the root mean square that is left, in parts of y's."""

    numbers: tuple[float, ...]
    left: float


def sum_of(y: Array, columns: typing.Sequence[Array]) -> Sum | None:
    """None: the columns do not tell their numbers apart, or y is zero."""
    step = max(1, y.size // SAMPLED)
    a = np.stack([np.ravel(column)[::step] for column in columns], 1)
    b: Array = np.ravel(y)[::step]
    sizes = np.sqrt((a ** 2).sum(0))
    total = math.sqrt(float((b ** 2).sum()))
    if not (np.isfinite(sizes).all() and math.isfinite(total)) or total == 0.0 or b.size <= len(columns) + 1:
        return None
    used = sizes > 0.0
    if not used.any():
        return None
    x, _, rank, singular = np.linalg.lstsq(a[:, used] / sizes[used], b, rcond=None)
    if rank < int(used.sum()) or singular[-1] < 1e-4 * singular[0]:
        return None
    numbers = np.zeros(len(columns))
    numbers[used] = x / sizes[used]
    return Sum(tuple(map(float, numbers)), math.sqrt(float(((b - a @ numbers) ** 2).sum())) / total)
