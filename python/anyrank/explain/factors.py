# SPDX-License-Identifier: Apache-2.0
"""The reference times several numbers: one for each slice, block, row or shard."""

from __future__ import annotations

import math
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.known import is_norm, listed, said
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.scaled import LEFT, Squares, groups_of, is_near, match, starts_right
from anyrank.explain.tensors import ACTIVATIONS, Array, Case

SLICES, ROWS, ROW_PARTS = "factors_of_slices", "factors_of_rows", "factors_of_row_parts"
AFFINE, TARGETS = "factors_and_offsets", "other_targets"
MOST_SHIFTED = 3  # tokens by which a mask of targets may be shifted
LEAST_FACTOR = 0.05  # of standard deviations, one over the other
TELLING = 4  # elements of a slice for each factor that is fitted


def _nouns(case: Case, axis: int) -> str:
    plural = {"batch": "samples", "token": "tokens", "head": "heads", "feature": "features", "out": "rows",
              "in": "columns", "vocab": "rows", "expert": "experts"}
    return plural.get(case.axes[axis], f"slices of dimension {axis}")


def _parts_of(case: Case, extent: int) -> list[int]:
    """Numbers of equal parts of a dimension that ranks, micro-batches or heads may make."""
    runs = case.runs
    numbers = {*runs.group_sizes, runs.heads, runs.kv_heads, runs.micro_batches, *(n for _, n in case.cuts)}
    numbers |= {n * runs.micro_batches for n in runs.group_sizes} | {2 * n for n in runs.group_sizes} | {2, 3, 4, 8}
    return sorted(n for n in numbers if 1 < n < extent and extent % n == 0)


def _grids(case: Case) -> typing.Iterator[tuple[str, tuple[int, ...], str, int]]:
    """Kind, cells along each dimension, what a cell is, and the dimension; coarse ones first."""
    shape, ndim = case.shape, len(case.shape)
    one = [1] * ndim
    for axis, extent in enumerate(shape):
        for n in _parts_of(case, extent):
            yield SLICES, tuple([*one[:axis], n, *one[axis + 1:]]), f"{n} equal parts of the {_nouns(case, axis)}", axis
    for axis, extent in enumerate(shape):
        if extent > 1:
            yield SLICES, tuple([*one[:axis], extent, *one[axis + 1:]]), f"{extent} {_nouns(case, axis)}", axis
    if ndim > 2:
        yield ROWS, (*shape[:-1], 1), f"{math.prod(shape[:-1])} {_nouns(case, ndim - 2)}", -1
    if ndim > 1:
        for n in _parts_of(case, shape[-1]):
            if shape[-1] // n >= TELLING:
                yield ROW_PARTS, (*shape[:-1], n), f"{n} parts of each row", -1


def _levels(factors: Array) -> list[float]:
    """Factors that are apart, in order of size."""
    ordered = np.sort(factors)
    first: Array = np.append(True, np.diff(ordered) > 1e-4 * np.abs(ordered[1:]))
    result: list[float] = ordered[first].tolist()
    return result


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if not case.shape or not case.ref.size:
        return
    squares = Squares.of(case)
    total = squares.over((1,) * len(case.shape))
    if not total.difference > 0.0 or total.left <= 1e-8 * total.difference:  # nothing is left of one factor
        return
    yield from _targets(case)
    rows = squares.over((*case.shape[:-1], 1)) if case.shape else squares
    left = total.left
    for i, (kind, grid, cells, axis) in enumerate(_grids(case)):
        if kind == ROW_PARTS and left <= 1e-9 * total.difference:  # whole rows have explained it
            break
        found = (rows if grid[-1] == 1 else squares).over(grid)
        known, left = found.rr > 0.0, min(left, found.left)
        if known.sum() < 2 or found.left > min(LEFT * total.smaller, 0.25 * total.left):
            continue
        factors = np.array([_simple(x) for x in found.factors[known].tolist()])
        if np.count_nonzero(case.ref) < TELLING * factors.size or (
                set(factors.tolist()) <= {0.0, 1.0} and (case.name.kind != "bwd" or starts_right(case))):
            continue
        levels = _levels(factors)
        if len(levels) < 2:
            continue
        values = np.ones(grid)
        values[known] = factors
        wrong = np.abs(factors - 1.0) > 1e-4
        numbers = {"cells": cells, "axis": axis, "parts": factors.size, "wrong": int(wrong.sum()), "low": levels[0],
                   "high": levels[-1], "levels": levels,
                   "values": listed(factors.tolist() if factors.size < 9 else levels),
                   "inverse": float(np.mean(1.0 / factors)) if levels[0] > 0.0 else 0.0,
                  "inverse_of_levels": float(np.mean(1.0 / np.array(levels))) if levels[0] > 0.0 else 0.0,
                  "lost": np.flatnonzero(values.reshape(-1) == 0.0).tolist(),
                  "unknown": np.flatnonzero(~known.reshape(-1)).tolist(), "grid": values, "parts_of_row": grid[-1],
                  "near": min(3e-3, max(1e-4, math.sqrt(found.left / max(float(found.vv.sum()), 1e-300))))}
        numbers |= _range(case, values, axis)
        fitted = sum(ratio_of(x) is None for x in levels)
        yield Pattern(kind, _spread(values, case.shape) * case.ref, numbers, max(fitted, 1), 1 + i)
    is_fwd = case.name.kind == "fwd" and case.reference.dtype.kind == "f"
    if is_fwd and total.left > LEFT * total.smaller and np.isfinite(case.val).all():
        yield from _affine(case, squares, total.difference)


def _targets(case: Case) -> typing.Iterator[Pattern]:
    """Other tokens have a gradient of the loss, and those that have one in both runs have the same up to one factor."""
    if case.name.kind != "bwd" or len(case.shape) < 3 or starts_right(case) or not np.isfinite(case.val).all():
        return
    inner = tuple(range(2, len(case.shape)))
    a, b = (np.any(x != 0.0, axis=inner) for x in (case.ref, case.val))
    both, more, fewer = a & b, b & ~a, a & ~b
    if not more.any() or not both.any() or 2 * both.sum() < a.sum():
        return
    square = float((case.ref[both] ** 2).sum())
    factor = _simple(float((case.ref[both] * case.val[both]).sum()) / square)
    by = next((n for n in (s * k for k in range(1, MOST_SHIFTED + 1) for s in (1, -1))
               if abs(n) < a.shape[1] and np.array_equal(
                   b[:, n:] if n > 0 else b[:, :n], a[:, :-n] if n > 0 else a[:, -n:])), 0)
    near = is_near(factor * float(b.sum()), float(a.sum()), 1e-3)
    if not near and abs(factor - 1.0) > 1e-3:
        return
    spread = more.reshape(*more.shape, *(1,) * len(inner))
    expected = np.where(spread, case.val, factor * case.ref * b.reshape(spread.shape))
    ranges = (np.diff(np.pad(a, ((0, 0), (1, 1))).astype(int), axis=1) > 0).sum(1)
    numbers = {"by": by, "ranges": int(ranges.max()), "more": int(more.sum()), "fewer": int(fewer.sum()),
               "factor": factor, "targets": int(a.sum())}
    yield Pattern(TARGETS, expected, numbers, 0 if by else 1, 2 * MOST_SHIFTED)


def _affine(case: Case, squares: Squares, difference: float) -> typing.Iterator[Pattern]:
    """A factor and an offset for each channel of each part of the samples, or for each row: other means and
    variances."""
    shape, ndim = case.shape, len(case.shape)
    grids: list[tuple[str, int, tuple[int, ...]]] = []
    for axis in {1, ndim - 1} if ndim > 1 else ():
        for n in (1, *(n for n in case.runs.group_sizes if shape[0] % n == 0)):
            grids.append(("channels", n, tuple(n if i == 0 else shape[i] if i == axis else 1 for i in range(ndim))))
    if ndim > 1 and shape[-1] >= 4 * TELLING:
        grids.append(("rows", 1, (*shape[:-1], 1)))
    sums = Squares(case.ref, case.val, np.ones(shape))
    for kind, parts, grid in grids:
        cells = math.prod(grid)
        if case.ref.size < 2 * TELLING * cells:
            continue
        of, mean = squares.over(grid), sums.over(grid)
        rr, rv, vv = of.rr - mean.rr ** 2 / mean.vv, of.rv - mean.rr * mean.rv / mean.vv, of.vv - mean.rv ** 2 / mean.vv
        factors = np.divide(rv, rr, out=np.ones_like(rr), where=rr > 0.0)
        if float(np.maximum(vv - factors * rv, 0.0).sum()) > LEFT * difference or not factors.min() > LEAST_FACTOR:
            continue
        offsets = (mean.rv - factors * mean.rr) / mean.vv
        expected = _spread(factors, shape) * case.ref + _spread(offsets, shape)
        yield Pattern(AFFINE, expected, {"of": kind, "parts": parts, "cells": cells, "low": float(factors.min()),
                                         "high": float(factors.max())}, 2 * cells)
        return


def _simple(x: float) -> float:
    """The ratio of small numbers that a factor is, or the factor."""
    ratio = ratio_of(x, 8, 1e-6)
    return ratio[0] / ratio[1] if ratio else x


def _spread(values: Array, shape: tuple[int, ...]) -> Array:
    """Each cell's value at its elements."""
    for axis, extent in enumerate(shape):
        if values.shape[axis] not in (1, extent):
            values = np.repeat(values, extent // values.shape[axis], axis)
    return values


def _range(case: Case, values: Array, axis: int) -> dict[str, typing.Any]:
    """Of slices with one factor, the others being right: which, where they are consecutive."""
    if axis < 0:
        return {}
    flat = values.reshape(-1)
    off = np.flatnonzero(np.abs(flat - 1.0) > 1e-4)
    each = case.shape[axis] // flat.size
    if off.size in (0, flat.size) or off[-1] - off[0] + 1 != off.size or np.ptp(flat[off]) > 1e-4 * abs(flat[off[0]]):
        return {}
    return {"first": int(off[0]) * each, "last": (int(off[-1]) + 1) * each - 1, "part": float(flat[off[0]]),
            "part_name": said(float(flat[off[0]])), "of": _nouns(case, axis)}


# --- causes -----------------------------------------------------------------------------------------------------------


def _of_samples(case: Case, pattern: Pattern) -> bool:
    """Whether the cells are samples or tokens, or parts of them, of an activation or its gradient."""
    axis = pattern.numbers["axis"]
    return case.name.kind in ACTIVATIONS and (axis < 0 or (
        case.axes[axis] in ("batch", "token") or (axis == 0 and len(case.shape) > 1)))


def _mean_of_means(case: Case, pattern: Pattern) -> bool:
    return _of_samples(case, pattern) and (_uneven(case, pattern) or any(
        is_near(pattern.numbers[key], 1.0, pattern.numbers["near"]) for key in ("inverse", "inverse_of_levels")))


def _uneven(case: Case, pattern: Pattern) -> bool:
    """Whether samples have the factors of means over groups that are of several sizes."""
    if pattern.numbers["axis"] != 0:
        return False
    samples, factors = case.shape[0], pattern.numbers["grid"].reshape(-1)
    each: Array = np.repeat(factors, samples // factors.size)
    for n in (*case.runs.group_sizes, case.runs.micro_batches):
        sizes = samples / (n * np.maximum(each, 1e-9))
        whole = np.rint(sizes)
        if n > 1 and (whole >= 1.0).all() and (np.abs(sizes - whole) <= pattern.numbers["near"] * sizes).all() and all(
                np.count_nonzero(whole == size) % size == 0 for size in set(whole.tolist())):
            return bool(is_near(float((1.0 / whole).sum()), float(n), 1e-6))
    return False


def _sum_of_means(case: Case, pattern: Pattern) -> bool:
    inverse = pattern.numbers["inverse"]
    parts = {round(n) for n, _ in groups_of(case)} | {len(pattern.numbers["levels"])}
    levels = pattern.numbers["levels"]
    return inverse > 0.0 and _of_samples(case, pattern) and (
        any(is_near(inverse * n, 1.0, pattern.numbers["near"]) for n in parts if n > 1)
        or is_near(pattern.numbers["inverse_of_levels"] * len(levels), 1.0, pattern.numbers["near"]))


def _lost_at_cuts(case: Case, pattern: Pattern) -> bool:
    """Whether the last token of each of equal parts of the sequence, but of the last, has no gradient."""
    lost, unknown = set(pattern.numbers["lost"]), set(pattern.numbers["unknown"])
    cells, seq = pattern.numbers["grid"].size, case.runs.seq
    if not lost or not seq or cells % seq or not _of_samples(case, pattern):
        return False
    ends = (set(range(n - 1, cells, n)) for n in range(2, seq) if seq % n == 0)
    return any(lost <= each <= lost | unknown | set(range(seq - 1, cells, seq)) for each in ends)


def _targets_left_out(case: Case, pattern: Pattern) -> bool:
    """Whether some tokens have no gradient, and that of all others is larger by as many."""
    numbers = pattern.numbers
    kept = numbers["parts"] - len(numbers["lost"])
    return case.name.kind == "bwd" and _of_samples(case, pattern) and len(numbers["lost"]) > 0 and len(
        numbers["levels"]) == 2 and kept > 0 and (
            numbers["high"] == 1.0 or is_near(numbers["high"] * kept, numbers["parts"], numbers["near"]))


def _part_of_group(case: Case, pattern: Pattern) -> bool:
    part = pattern.numbers.get("part")
    return part is not None and case.name.kind == "grad" and match(part, groups_of(case), 1e-4)[0]


def _by_shard(case: Case, pattern: Pattern) -> bool:
    """Whether each rank's part of the tensor has one factor, and the parts have several."""
    axis, factors = pattern.numbers["axis"], pattern.numbers["grid"].reshape(-1)
    if axis not in {at for at, _ in case.cuts} or (
            case.name.kind in ACTIVATIONS and case.axes[axis] in ("batch", "token")):
        return False
    each: Array = np.repeat(factors, case.shape[axis] // factors.size)
    parts = [each[box[axis]] for copy in case.copies for box in copy.boxes]
    return all(np.ptp(part) <= 1e-4 * abs(part[0]) for part in parts if part.size)


def _samples_weighted(case: Case, pattern: Pattern) -> bool:
    return case.name.kind == "bwd" and _of_samples(case, pattern) and pattern.numbers["low"] > 0.0


def _micro_batches_weighted(case: Case, pattern: Pattern) -> bool:
    """Whether samples have the factors of the micro-batches that they are in, on each data-parallel rank."""
    micro, axis, factors = case.runs.micro_batches, pattern.numbers["axis"], pattern.numbers["grid"].reshape(-1)
    if micro < 2 or axis != 0 or not _samples_weighted(case, pattern):
        return False
    parts = (factors.reshape(n, micro, -1) for n in (1, *case.runs.group_sizes) if factors.size % (n * micro) == 0)
    return any(all(np.ptp(each[:, m]) <= pattern.numbers["near"] for m in range(micro)) for each in parts)


def _statistic(case: Case, pattern: Pattern) -> bool:
    """Whether rows of an activation have factors of their own, of which there are many."""
    axis = pattern.numbers["axis"]
    rows = axis < 0 or (0 <= axis < len(case.shape) - 1)
    return case.name.kind == "fwd" and rows and len(pattern.numbers["levels"]) > 2


_EACH = "each of {cells} has a factor of its own, {low} to {high} times the reference"
CAUSES = (
    Cause("labels_shifted", (SLICES,), "the last token of each part of the sequence has no gradient, and all others "
          "{high} times the reference's: labels are shifted after the sequence is cut",
          "shift the labels of whole sequences, then cut them", _lost_at_cuts),
    Cause("target_count", (SLICES, ROWS), "some tokens have no gradient, and all others {high} times the reference's: "
          "targets are left out of the loss", "padding, ignored labels, the end of a sequence",
          _targets_left_out),
    Cause("ignored_labels", (TARGETS,), "the tokens that have a gradient are those of the reference {by} further on, "
          "and all that have one in both runs are right: the mask of targets is shifted", "the mask of labels, "
          "cut and shifted as the labels are", lambda case, pattern: pattern.numbers["by"] != 0),
    Cause("ignored_labels", (TARGETS,), "{more} tokens have a gradient here alone, beside {targets} "
          "targets of the reference, and all others are right, {factor} times as large",
          "`ignore_index`, the padding's and the prompt's labels", lambda case, pattern: (
              pattern.numbers["fewer"] == 0 and pattern.numbers["ranges"] == 1)),
    Cause("scaled_by_rank", (SLICES,), "each rank's part is the reference times a factor of its own: {values}",
          "a count, a norm or a size of the rank's own part in place of the group's", _by_shard),
    Cause("part_reduced_again", (SLICES,), "{of} {first} to {last} are the reference times {part_name}, and the others "
          "are right: one part of the tensor is reduced over a group once more, or not averaged",
          "gradients of parameters that consist of two parts, of which one is whole on each rank", _part_of_group),
    Cause("mean_of_means", (SLICES, ROWS), _EACH + ": each rank or micro-batch divided by its own count, and the "
          "means were averaged", "divide by the global number of targets",
          _mean_of_means),
    Cause("sum_of_local_means", (SLICES, ROWS), _EACH + ", and the mean of the reciprocals is {inverse}, one over the "
          "number of parts: each rank or micro-batch divided by its own count, and the means were added",
          "divide by the global number of targets", _sum_of_means),
    Cause("micro_batches_weighted", (SLICES,), "micro-batches count differently: the gradients of their samples are "
          "{values} times the reference's", "the divisor by the number of micro-batches, and where it is applied",
          _micro_batches_weighted),
    Cause("samples_weighted", (SLICES, ROWS), _EACH + " ({values}): they count more or less in the loss",
          "weights of samples, labels or classes, and what they are normalised by", _samples_weighted),
    Cause("statistic_of_one_shard", (ROW_PARTS,), "each of {cells} has a factor of its own, {low} to {high}: a "
          "statistic of each row is taken over a shard in place of the whole row",
          "the all-reduce of the mean square, variance, maximum or denominator over the ranks that share the row",
          lambda case, pattern: pattern.numbers["parts_of_row"] in case.runs.group_sizes and (
              case.name.kind == "fwd" and is_norm(case, str(case.name)))),
    Cause("statistic_of_own_samples", (AFFINE,), "each channel of each of {parts} parts of the samples has a factor "
          "and an offset of its own: its mean and variance are those of a rank's own samples",
          "`SyncBatchNorm`; the group over which statistics are reduced",
          lambda case, pattern: pattern.numbers["of"] == "channels" and pattern.numbers["parts"] > 1),
    Cause("row_statistic", (AFFINE,), "each of {cells} rows has a factor and an offset of its own: its mean and "
          "variance are others", "what the statistics are taken over: padding, a shard, other dimensions",
          lambda case, pattern: pattern.numbers["of"] == "rows" and is_norm(case, str(case.name))),
    Cause("row_statistic", (SLICES, ROWS, ROW_PARTS), _EACH + ", and nothing else changed: a statistic of each is "
          "another (a mean square, a variance, a denominator)",
          "what the statistic is taken over: padding, a shard, other dimensions",
          _statistic),
)
