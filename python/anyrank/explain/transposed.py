# SPDX-License-Identifier: Apache-2.0
"""Data with its dimensions in another order, or so many elements further on in memory."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, activation, every, has, parameter
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import LEAST, PROBED, divisors, near
from anyrank.explain.tensors import Array, Case

TRANSPOSED, SPLIT, MEMORY = "transposed", "transposed_parts", "in_memory"
WINDOW = 12  # elements by which an offset is found


def _splits(shape: tuple[int, ...]) -> typing.Iterator[tuple[int, tuple[int, ...]]]:
    """Shapes of which one dimension is cut in two; -1: none is."""
    yield -1, shape
    for axis, extent in enumerate(shape):
        for d in divisors(extent)[1:-1][:40]:
            yield axis, (*shape[:axis], d, extent // d, *shape[axis + 1:])


def are_conserved(ref: Array, val: Array) -> bool:
    """Whether sums of squares and cubes are equal, as those of the same values in any order."""
    x, y = ref.ravel(), val.ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(x @ x)
        return abs(squares - float(y @ y)) <= 1e-3 * squares and bool(
            abs((x * x) @ x - (y * y) @ y) <= 1e-3 * float((x * x) @ np.abs(x)))


def _transposed(case: Case, ref: Array, val: Array, off: Array
                ) -> typing.Iterator[tuple[str, Array, dict[str, typing.Any]]]:
    """Data of an array with its dimensions in another order, written under the old shape."""
    shape = tuple(n for n in ref.shape if n > 1)
    at = np.flatnonzero(off)
    if not 2 <= len(shape) <= 4 or len(at) < LEAST or not are_conserved(ref, val):
        return
    at = at[:: max(1, len(at) // PROBED)]
    flat, asked, limit = ref.ravel(), val.ravel()[at], near(case)
    for axis, extents in _splits(shape):
        for order in itertools.permutations(range(len(extents))):
            for order, of in ((order, extents), (tuple(np.argsort(order)), tuple(extents[o] for o in order))):
                places = np.unravel_index(at, [of[o] for o in order])
                strides = [math.prod(of[o + 1:]) for o in order]
                from_ = sum(p * s for p, s in zip(places, strides))
                if (np.abs(flat[from_] - asked) > limit).any() or (from_ == at).all():
                    continue
                data = np.ascontiguousarray(ref.reshape(of).transpose(order)).reshape(ref.shape)
                yield TRANSPOSED if axis < 0 else SPLIT, data, {
                    "order": ", ".join(map(str, order)), "extents": " x ".join(map(str, of)), "cut": axis,
                    "dimensions": len(shape), "first": order[0], "parts": extents[axis] if axis >= 0 else 0}
                return


def transpositions(case: Case) -> typing.Iterator[Pattern]:
    found = False
    for kind, data, numbers in _transposed(case, case.ref, case.val, case.seen):
        found = True
        yield Pattern(kind, data, {**numbers, "within": ""})
    if found or not case.cuts:
        return
    parts = []
    numbers = {}
    for copy in case.copies:
        parts.append([case.ref[box] for box in copy.boxes])
        for k, (box, values) in enumerate(zip(copy.boxes, copy.values)):
            off = case.stands_out(values, box)
            for _, parts[-1][k], numbers in _transposed(case, case.ref[box], values.astype(np.float64), off):
                pass
    if numbers:
        yield Pattern(TRANSPOSED, parts, {**numbers, "within": " within each rank's part"}, trials=2)


def _in_memory(case: Case) -> typing.Iterator[Pattern]:
    """All of the data so many elements further on."""
    ref, val, off = case.ref.ravel(), case.val.ravel(), case.seen.ravel()
    wrong = np.flatnonzero(off)
    if len(wrong) < 2 * LEAST or wrong[-1] + 1 - wrong[0] < 2 * WINDOW:
        return
    middle = wrong[len(wrong) // 3]
    window = val[middle: middle + WINDOW]
    if len(window) < WINDOW or len(np.unique(window)) < WINDOW // 2 or not np.isfinite(window).all():
        return
    limit = near(case)
    candidates = np.flatnonzero(np.abs(ref[:len(ref) - WINDOW + 1] - window[0]) <= limit)
    for i in range(1, WINDOW):
        candidates = candidates[np.abs(ref[candidates + i] - window[i]) <= limit]
    for start in candidates[:4]:
        by = int(start - middle)
        source = np.where(off, np.arange(len(ref)) + by, np.arange(len(ref)))
        outside = (source < 0) | (source >= len(ref))
        lost = int(outside.sum())
        if by == 0 or lost > abs(by) or 2 * lost > len(wrong):
            continue
        expected = np.where(outside, val, ref[np.clip(source, 0, len(ref) - 1)]).reshape(case.shape)
        yield Pattern(MEMORY, expected, {"by": abs(by), "side": "after" if by > 0 else "before", "lost": lost,
                                         "wrong": len(wrong)}, fitted=3 if by % case.shape[-1] == 0 else 1)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.seen.any():
        yield from transpositions(case)
        yield from _in_memory(case)



CAUSES = (
    Cause("weight_transposed", (TRANSPOSED,),
          "transposed{within}: the data is the reference's [{extents}] with its dimensions in the order {order}",
          "`nn.Linear` [out, in] against `Conv1D` and JAX [in, out]", every(parameter, has(dimensions=2))),
    Cause("transposed", (TRANSPOSED,), "transposed{within}: the data is the reference's [{extents}] with its "
          "dimensions in the order {order}, written under the old shape",
          "a view or reshape where a transposition is meant"),
    Cause("gathered_in_rank_order", (SPLIT,), "gathered parts are one after the other: the data is the reference's "
          "[{extents}] with its dimensions in the order {order}",
          "`torch.cat(parts, dim=1)` of what was gathered along the sequence",
          every(activation, has(cut=1, dimensions=3))),
    Cause("heads_and_tokens_exchanged", (SPLIT,), "heads and tokens are exchanged: the data is the reference's "
          "[{extents}] with its dimensions in the order {order}, written under the old shape",
          "`transpose(1, 2)` before or after `reshape`", every(activation, has(dimensions=3))),
    Cause("dimension_flattened", (SPLIT,), "a dimension is flattened the other way round: the data is the "
          "reference's [{extents}] with its dimensions in the order {order}",
          "`view`, `reshape` and `permute` of heads and features"),
    Cause("shifted_in_memory", (MEMORY,),
          "shifted in memory: the {wrong} different elements are the reference's {by} elements {side}",
          "an offset into a buffer or a file"),
)
