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
Way = tuple[str, str, str, float, float]  # the tensors, the kind of loss, scale and offset of the products


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
        if len(found) == TRIED:
            break
    return found


def _scalars(case: Case) -> list[float]:
    """Numbers that products may be multiplied by, or that may be added: parameters and outputs of one element."""
    found = []
    for name in case.runs.reference:
        own, array = Name.of(name), case.runs.reference[name]
        kinds = ("fwd", "init" if case.name.step == 1 else "new")
        at = own.step if own.kind != "new" else own.step + 1
        if array.size == 1 and array.dtype.kind == "f" and own.kind in kinds and at == case.name.step:
            found.append(float(array.ravel()[0]))
    return list(dict.fromkeys(found))[:MOST_SCALARS]


def _rows(logits: Array, targets: Array) -> float:
    return float((log_sum(logits) - logits[np.arange(len(logits)), targets]).mean())


def _value(kind: str, logits: Array, targets: Array | None = None, used: Array | None = None) -> float:
    """The loss of logits; targets: the row that belongs to each; used: which pairs count."""
    targets = np.arange(len(logits)) if targets is None else targets
    if kind == "sigmoid":
        signs = -np.ones(logits.shape)
        signs[np.arange(len(logits)), targets] = 1.0
        each = np.logaddexp(0.0, -signs * logits)
        return float((each if used is None else each[used]).sum() / len(logits))
    kept = [logits if used is None else np.where(used, logits, -np.inf) for logits in (logits, logits.T)]
    by_rows, by_columns = (_rows(x, targets) for x in kept)
    return {"both": 0.5 * (by_rows + by_columns), "rows": by_rows, "columns": by_columns}[kind]


def _wanted(case: Case, value: float) -> typing.Iterator[tuple[Way, Array]]:
    """How the reference's loss is made, and its logits."""
    scalars = _scalars(case)
    scales = list(dict.fromkeys([1.0, *scalars, *(math.exp(x) for x in scalars if abs(x) < 8.0)]))
    for (a, x), (b, y) in itertools.combinations(_features(case), 2):
        if x.shape != y.shape:
            continue
        lengths = [np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y)]
        for products in (x @ y.T, (x / lengths[0]) @ (y / lengths[1]).T) if min(map(np.min, lengths)) > 0.0 else ():
            for scale, kind in itertools.product(scales, ("both", "rows", "columns", "sigmoid")):
                for offset in (0.0, *scalars) if kind == "sigmoid" else (0.0,):
                    logits = scale * products + offset
                    if abs(_value(kind, logits) - value) <= 4.0 * NEAR * abs(value):
                        yield (a, b, kind, scale, offset), logits
                        return


def _changed(case: Case, kind: str, logits: Array) -> typing.Iterator[tuple[str, float, dict[str, typing.Any]]]:
    """Losses with one thing changed."""
    rows = len(logits)
    index: Array = np.arange(rows)
    for n in (n for n in case.runs.group_sizes if rows % n == 0 and rows > n):
        size = rows // n
        apart = (index[None] // size - index[:, None] // size) % n
        yield "offset", _value(kind, logits, index % size), {"parts": n, "size": size}
        yield "own", _value(kind, logits, used=apart == 0), {"parts": n, "left": n - 1}
        for k in range(1, n):
            for used in (apart < k, (-apart) % n < k) if k > 1 else ():
                yield "part", _value(kind, logits, used=used), {"parts": n, "left": n - k}
    for other in ("both", "rows", "columns") if kind != "sigmoid" else ():
        if other != kind:
            yield "direction", _value(other, logits), {"other": other, "right": kind}


def patterns(case: Case) -> typing.Iterator[Pattern]:
    pair = loss_of(case)
    if pair is None:
        return
    reference, value = pair
    with np.errstate(invalid="ignore", over="ignore"):
        for (a, b, kind, scale, offset), logits in _wanted(case, reference):
            changed = list(_changed(case, kind, logits))
            for how, x, numbers in changed:
                if abs(x - value) <= 4.0 * NEAR * abs(value):
                    yield Pattern(PAIRS, np.full(case.shape, x), {**numbers, "how": how, "a": a, "b": b},
                                  trials=len(changed))


_OF = "the loss of pairs of {a} and {b}: "
CAUSES = (
    Cause("labels_of_other_samples", (PAIRS,), _OF + "each row's partner is looked for in the first of {parts} parts: "
          "the targets of a part of {size} rows lack its offset", "`arange` of a rank's rows as targets, plus "
          "its rank times their number", has(how="offset")),
    Cause("negatives_left_out", (PAIRS,), _OF + "each of {parts} parts is compared with itself alone",
          "the gathering of the other ranks' features before the loss", has(how="own")),
    Cause("negatives_left_out", (PAIRS,), _OF + "each of {parts} parts misses {left} of the others",
          "the number of exchanges around the ring of ranks: one fewer than there are ranks", has(how="part")),
    Cause("contrastive_direction", (PAIRS,), _OF + "over {other} in place of {right}", "the sum of both directions",
          has(how="direction")),
)
