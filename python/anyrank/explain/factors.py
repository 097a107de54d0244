# SPDX-License-Identifier: Apache-2.0
"""The reference times several numbers: one for each slice, block, row or shard."""

from __future__ import annotations

import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import listed, snapped
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.scaled import LEFT, Squares, groups_of, is_near, match, starts_right
from anyrank.explain.tensors import ACTIVATIONS, Array, Case

SLICES, ROWS, TARGETS = "factors_of_slices", "factors_of_rows", "other_targets"
MOST_SHIFTED = 3  # tokens by which a mask of targets may be shifted
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
    if case.name.kind == "bwd" and len(case.shape) > 2 and np.isfinite(case.val).all() and not starts_right(case):
        yield from _targets(case)
    rows = squares.over((*case.shape[:-1], 1))
    for i, (kind, grid, cells, axis) in enumerate(_grids(case)):
        found = (rows if grid[-1] == 1 else squares).over(grid)
        known = found.rr > 0.0
        if known.sum() < 2 or found.left > min(LEFT * total.smaller, 0.25 * total.left):
            continue
        factors = np.array([snapped(x, 1e-6) for x in found.factors[known].tolist()])
        levels = _levels(factors)
        if np.count_nonzero(case.ref) < TELLING * factors.size or len(levels) < 2 or {*levels} <= {0.0, 1.0}:
            continue
        values = np.ones(grid)
        values[known] = factors
        told = listed(factors.tolist() if factors.size < 9 else levels)
        numbers = {"text": f"each of {cells} is the reference times a number of its own: {told}",
                   "cells": cells, "axis": axis, "low": levels[0], "high": levels[-1], "levels": levels,
                   "values": told, "grid": values,
                   "means": [float(np.mean(1.0 / x)) if levels[0] > 0.0 else 0.0 for x in (factors, np.array(levels))],
                   "near": min(3e-3, max(1e-4, math.sqrt(found.left / max(float(found.vv.sum()), 1e-300))))}
        fitted = sum(ratio_of(x) is None for x in levels)
        yield Pattern(kind, _spread(values, case.shape) * case.ref, numbers, max(fitted, 1), 1 + i)


def _targets(case: Case) -> typing.Iterator[Pattern]:
    """Other tokens have a gradient of the loss, and those that have one in both runs have the same up to one factor."""
    inner = tuple(range(2, len(case.shape)))
    a, b = (np.any(x != 0.0, axis=inner) for x in (case.ref, case.val))
    both, more, fewer = a & b, b & ~a, a & ~b
    if not (more | fewer).any() or not both.any() or 2 * both.sum() < a.sum():
        return
    factor = snapped(float((case.ref[both] * case.val[both]).sum()) / float((case.ref[both] ** 2).sum()))
    if not is_near(factor * float(b.sum()), float(a.sum()), 1e-3) and abs(factor - 1.0) > 1e-3:
        return
    by = next((n for n in (s * k for k in range(1, MOST_SHIFTED + 1) for s in (1, -1))
               if abs(n) < a.shape[1] and np.array_equal(
                   b[:, n:] if n > 0 else b[:, :n], a[:, :-n] if n > 0 else a[:, -n:])), 0)
    lost, seq = fewer.any(axis=0), a.shape[1]
    ends = ((np.arange(seq) + 1) % n == 0 for n in range(2, seq) if seq % n == 0)
    shape = (*a.shape, *(1,) * len(inner))
    ranges = (np.diff(np.pad(a, ((0, 0), (1, 1))).astype(int), axis=1) > 0).sum(1)
    yield Pattern(TARGETS, np.where(more.reshape(shape), case.val, factor * case.ref * b.reshape(shape)), {
        "by": by, "ranges": int(ranges.max()), "more": int(more.sum()), "fewer": int(fewer.sum()), "factor": factor,
        "targets": int(a.sum()), "at_ends": lost.any() and any(
            not (lost & ~end).any() and not (b & end)[:, :-1].any() for end in ends)}, 0 if by else 1, 2 * MOST_SHIFTED)


def _spread(values: Array, shape: tuple[int, ...]) -> Array:
    """Each cell's value at its elements."""
    for axis, extent in enumerate(shape):
        if values.shape[axis] not in (1, extent):
            values = np.repeat(values, extent // values.shape[axis], axis)
    return values


# --- causes -----------------------------------------------------------------------------------------------------------


def _of_samples(case: Case, pattern: Pattern) -> bool:
    """Whether the cells are samples or tokens, or parts of them, of an activation or its gradient."""
    axis = pattern.numbers["axis"]
    return case.name.kind in ACTIVATIONS and (axis < 0 or (
        case.axes[axis] in ("batch", "token") or (axis == 0 and len(case.shape) > 1)))


def _means(case: Case, pattern: Pattern) -> bool:
    """Whether the factors are those of means over parts of several sizes, or of their sum."""
    numbers, runs = pattern.numbers, case.runs
    of_cells = {1.0, float(len(numbers["levels"])), *(n for n, _ in groups_of(case))}
    return _of_samples(case, pattern) and (_uneven(case, pattern) or any(
        is_near(numbers["means"][0] * n, 1.0, numbers["near"]) for n in of_cells) or any(
        is_near(numbers["means"][1] * n, 1.0, numbers["near"]) for n in (1, len(numbers["levels"]))))


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


def _parts_of_group(case: Case, pattern: Pattern) -> bool:
    """Whether parts of a gradient are right, and the others are multiplied by a number of ranks."""
    off = [x for x in pattern.numbers["levels"] if abs(x - 1.0) > 1e-4]
    return case.name.kind == "grad" and len(off) == 1 and match(off[0], groups_of(case), 1e-4)[0]


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
    Cause("labels_shifted", (TARGETS,), "the last token of each part of the sequence has no gradient, and all others "
          "{factor} times the reference's: labels are shifted after the sequence is cut",
          "shift the labels of whole sequences, then cut them", has(at_ends=True, more=0)),
    Cause("target_count", (TARGETS,), "the tokens that have a gradient are those of the reference {by} further on, "
          "and all that have one in both runs are right: the mask of targets is shifted", "the mask of labels, "
          "cut and shifted as the labels are", has(by=lambda by: by != 0)),
    Cause("target_count", (TARGETS,), "{fewer} of {targets} tokens have no gradient, and all others {factor} times the "
          "reference's: targets are left out of the loss", "padding, ignored labels, the end of a sequence",
          has(more=0)),
    Cause("target_count", (TARGETS,), "{more} tokens have a gradient here alone, beside {targets} "
          "targets of the reference, and all others are right, {factor} times as large",
          "`ignore_index`, the padding's and the prompt's labels", has(fewer=0, ranges=1)),
    Cause("reduced_again", (SLICES,), "{cells} are the reference times {values}: a part of the tensor is reduced over "
          "a group once more, or not averaged", "gradients of parameters that consist of two parts, of which one is "
          "whole on each rank", _parts_of_group),
    Cause("mean_of_means", (SLICES, ROWS), _EACH + ", as of counts ({values}): each rank or micro-batch divided by its "
          "own count", "divide by the global number of targets", _means),
    Cause("micro_batches_weighted", (SLICES,), "micro-batches count differently: the gradients of their samples are "
          "{values} times the reference's", "the divisor by the number of micro-batches, and where it is applied",
          _micro_batches_weighted),
    Cause("samples_weighted", (SLICES, ROWS), _EACH + " ({values}): they count more or less in the loss",
          "weights of samples, labels or classes, and what they are normalised by", _samples_weighted),
    Cause("row_statistic", (SLICES, ROWS), _EACH + ", and nothing else changed: a statistic of each is "
          "another (a mean square, a variance, a denominator)",
          "what the statistic is taken over: padding, a shard, other dimensions", _statistic),
)
