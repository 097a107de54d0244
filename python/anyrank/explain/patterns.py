# SPDX-License-Identifier: Apache-2.0
"""A pattern is a simple map that takes the reference to the other run's values: what it expects is an array, held
against what is there by one rule."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.tensors import Array, Case

# Values by each copy and box, where ranks are expected to hold other things than parts of one array.
Parts = typing.Sequence[typing.Sequence[Array]]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """kind: what causes.py knows it by. expected: the full array that the other run is expected to have, or what each
    copy is. numbers: what a sentence says of it. fitted: how many numbers were chosen to fit, each of which makes an
    accident likelier. trials: among how many alternatives this one was found."""

    kind: str
    expected: Array | Parts
    numbers: typing.Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)
    fitted: int = 0
    trials: int = 1


@dataclasses.dataclass(frozen=True)
class Fit:
    """How well a pattern fits. unexplained: root mean square of what is left, in parts of the difference's. wrong: the
    share of the differing elements that are not as expected. harmed: how many elements that are right are expected to
    be others. beside: what unexplained is where those count too that are right and that the pattern changes. exact:
    all is as expected, up to rounding."""

    pattern: Pattern
    unexplained: float
    wrong: float
    harmed: int
    beside: float = 0.0

    @property
    def exact(self) -> bool:
        return (self.wrong == 0.0 and self.harmed == 0 and self.unexplained <= MOST_UNEXPLAINED
                and self.beside <= MOST_BESIDE)


# A pattern explains a difference only if it leaves a tenth of it at most: below, the tolerance itself would explain it.
MOST_UNEXPLAINED, MOST_BESIDE = 0.1, 0.5


def fit(case: Case, pattern: Pattern) -> Fit:
    """Holds a pattern against every copy."""
    off = wrong = harmed = 0
    left, difference = [0.0, 0.0], [0.0, 0.0]  # of the elements that differ; of all that differ or are changed
    whole = pattern.expected if isinstance(pattern.expected, np.ndarray) else None
    for i, copy in enumerate(case.copies):
        for k, (box, values) in enumerate(zip(copy.boxes, copy.values)):
            is_off = case.differs(values, box)
            expected = whole[box] if whole is not None else typing.cast(Parts, pattern.expected)[i][k]
            allowed = case.allowed[box] if isinstance(case.allowed, np.ndarray) else case.allowed
            rounding, reference = case.rounding(expected), case.ref[box]
            with np.errstate(invalid="ignore", over="ignore"):
                apart, before = np.abs(values.astype(np.float64) - expected), values.astype(np.float64) - reference
                is_wrong = ~(apart <= allowed + rounding) & (values != expected)
                changed = is_off | (np.abs(expected - reference) > rounding)
            is_wrong &= ~(np.isnan(values) & np.isnan(expected))
            off += int(is_off.sum())
            wrong += int((is_wrong & is_off).sum())
            harmed += int((is_wrong & ~is_off).sum())
            for j, mask in enumerate((is_off, changed)):
                finite = mask & np.isfinite(apart) & np.isfinite(reference)
                left[j] += float((apart[finite] ** 2).sum())
                difference[j] += float((before[finite] ** 2).sum())
    shares = [math.sqrt(x / y) if y > 0.0 else math.inf if x > 0.0 else 0.0 for x, y in zip(left, difference)]
    return Fit(pattern, shares[0], wrong / off if off else 0.0, harmed, shares[1])


def ratio_of(x: float, most: int = 64, near: float = 1e-5) -> tuple[int, int] | None:
    """p, q with x = p/q, of small numbers; None: x is no such ratio."""
    for q in range(1, most + 1):
        p = round(x * q)
        if p != 0 and abs(p) <= most and abs(x * q - p) <= near * abs(p):
            return p, q
    return None
