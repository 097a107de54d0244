# SPDX-License-Identifier: Apache-2.0
"""Contrastive losses: of all pairs of two tensors' rows, of which the i-th of both belong together."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.entropy import NEAR, log_sum
from anyrank.explain.known import loss_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Name

PAIRS = "pairs"
TRIED, MOST_ROWS, MOST_SCALARS = 4, 64, 4
KINDS = ("both", "rows", "columns", "sigmoid")


def _features(case: Case) -> list[tuple[str, Array]]:
    """Matrices of as many rows, the last of the step first."""
    found: list[tuple[str, Array]] = []
    for name in reversed(list(case.runs.reference)):
        array = case.runs.reference[name]
        if (own := Name.of(name)).kind == "fwd" and own.step == case.name.step and array.ndim == 2 and (
                array.dtype.kind == "f" and 1 < array.shape[0] <= MOST_ROWS and array.shape[1] > 1):
            x: Array = array.astype(np.float64)
            if not any(np.array_equal(x, y) for _, y in found):
                found.append((name, x))
    return found[:TRIED]


def _scalars(case: Case) -> list[float]:
    """Numbers that products may be multiplied by, or that may be added: parameters and outputs of one element."""
    found, step = [], case.name.step
    for name in case.runs.reference:
        own, array = Name.of(name), case.runs.reference[name]
        if array.size == 1 and array.dtype.kind == "f" and (own.kind, own.step) in (
                ("fwd", step), ("init", step), ("new", step - 1)):
            found.append(float(array.ravel()[0]))
    return list(dict.fromkeys(found))[:MOST_SCALARS]


def _value(kind: str, logits: Array, targets: Array, used: Array) -> float:
    """The loss of logits. targets: the row that belongs to each; used: which pairs count."""
    index = np.arange(len(logits))
    if kind == "sigmoid":
        signs = -np.ones(logits.shape)
        signs[index, targets] = 1.0
        return float(np.logaddexp(0.0, -signs * logits)[used].sum() / len(logits))
    by_rows, by_columns = (float((log_sum(x) - x[index, targets]).mean())
                           for z in (logits, logits.T) for x in [np.where(used, z, -np.inf)])
    return {"both": 0.5 * (by_rows + by_columns), "rows": by_rows, "columns": by_columns}[kind]


def _wanted(case: Case, value: float) -> tuple[str, str, str, Array] | None:
    """How the reference's loss is made: of which tensors, its kind and its logits."""
    scalars = _scalars(case)
    scales = list(dict.fromkeys([1.0, *scalars, *(math.exp(x) for x in scalars if abs(x) < 8.0)]))
    for (a, x), (b, y) in itertools.combinations(_features(case), 2):
        if x.shape == y.shape and min(z.any(axis=1).min() for z in (x, y)):
            unit = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y)]
            for products, scale, kind in itertools.product((x @ y.T, unit[0] @ unit[1].T), scales, KINDS):
                for offset in (0.0, *scalars) if kind == "sigmoid" else (0.0,):
                    logits = scale * products + offset
                    x_of = _value(kind, logits, np.arange(len(logits)), np.ones(logits.shape, bool))
                    if abs(x_of - value) <= 4.0 * NEAR * abs(value):
                        return a, b, kind, logits
    return None


def _changed(case: Case, kind: str, logits: Array) -> typing.Iterator[tuple[str, float, dict[str, typing.Any]]]:
    """Losses with one thing changed."""
    rows = len(logits)
    index: Array = np.arange(rows)
    for n in (n for n in case.runs.group_sizes if rows % n == 0 and rows > n):
        size = rows // n
        apart = (index[None] // size - index[:, None] // size) % n
        yield "offset", _value(kind, logits, index % size, apart >= 0), {"parts": n, "size": size}
        for k in range(1, n):
            for used in (apart < k, (-apart) % n < k):
                yield "part", _value(kind, logits, index, used), {"parts": n, "left": n - k}


def patterns(case: Case) -> typing.Iterator[Pattern]:
    pair = loss_of(case)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = _wanted(case, pair[0]) if pair else None
        changed = list(_changed(case, *wanted[2:])) if wanted else []
    for how, x, numbers in changed:
        if pair and wanted and abs(x - pair[1]) <= 4.0 * NEAR * abs(pair[1]):
            yield Pattern(PAIRS, np.full(case.shape, x), {**numbers, "how": how, "a": wanted[0], "b": wanted[1]},
                          trials=len(changed))


_OF = "the loss of pairs of {a} and {b}: "
CAUSES = (
    Cause("labels_of_other_samples", (PAIRS,), _OF + "each row's partner is looked for in the first of {parts} parts: "
          "the targets of a part of {size} rows lack its offset", "`arange` of a rank's rows as targets, plus "
          "its rank times their number", has(how="offset")),
    Cause("negatives_left_out", (PAIRS,), _OF + "each of {parts} parts misses {left} of the others", "the gathering of "
          "the other ranks' features before the loss; the number of exchanges around the ring of ranks: one fewer than "
          "there are ranks", has(how="part")),
)
