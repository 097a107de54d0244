# SPDX-License-Identifier: Apache-2.0
"""Ranks' copies of one value against each other and the reference: sums over groups of ranks that are missing or were
taken over other ranks, copies that went apart, parts that were not gathered.

A rank's own summand is not known; but that all copies of a group add up to the reference is one equation for each
element. It is held by asking each copy to be the reference less the others.
"""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, every, has, kinds
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Copy, positional
from anyrank.explain.words import ranks_of

SUM, MEAN, SUM_AND_VECTOR, SUM_AND_TENSOR, OTHER_GROUP, SHARDS_ADDED = (
    "copies_sum", "copies_mean", "sum_and_vector", "sum_and_tensor", "summed_over_shards", "shards_added")
SOME_RIGHT, ONE_RIGHT, OWN_PART, RANK_FACTORS, EQUAL_BITS, EXTREME = (
    "some_copies_right", "one_copy_right", "own_part", "rank_factors", "equal_bits", "extreme")
LEAST = 8  # elements, or rows, that are no accident
MOST_TENSORS = 24  # of the same shape that are tried as what was counted on every rank
SAMPLED = 256
LIKE = 0.5  # of a difference that a pattern leaves at most to be looked at
Group = tuple[int, ...]  # numbers of copies


# --- groups of ranks --------------------------------------------------------------------------------------------------


def _same_box(a: Copy, b: Copy) -> bool:
    return a.boxes == b.boxes


def _meshes(case: Case) -> typing.Iterator[tuple[str, int, list[Group]]]:
    """(dimensions, ranks of a group, groups of copies) of each choice of the mesh's dimensions, or all ranks as one."""
    mesh = {name: n for name, n in case.runs.mesh.items() if n > 1}
    ranks = [copy.rank for copy in case.copies]
    if not mesh or None in ranks or math.prod(mesh.values()) <= max(r or 0 for r in ranks):
        yield "", len(ranks), [tuple(range(len(ranks)))]
        return
    places = [np.asarray(p) for p in np.unravel_index([rank or 0 for rank in ranks], tuple(mesh.values()))]
    for count in range(1, len(mesh) + 1):
        for some in itertools.combinations(range(len(mesh)), count):
            groups: dict[tuple[int, ...], list[int]] = {}
            for i in range(len(ranks)):
                groups.setdefault(tuple(int(p[i]) for d, p in enumerate(places) if d not in some), []).append(i)
            yield " and ".join(list(mesh)[d] for d in some), math.prod(list(mesh.values())[d] for d in some), [
                tuple(group) for group in groups.values()]


class Fold:
    """Sums of copies in groups. total, holders: by group, of the full shape."""

    def __init__(self, case: Case, groups: list[Group]) -> None:
        self.case, self.groups, self.difference = case, groups, 0.0
        self.total: list[Array] = []
        self.holders: list[Array] = []
        self.off: list[Array] = []
        for group in groups:
            total, holders = np.zeros(case.shape), np.zeros(case.shape)
            off: Array = np.zeros(case.shape, bool)
            for i in group:
                for box, values in zip(case.copies[i].boxes, case.copies[i].values):
                    total[box] += values
                    holders[box] += 1.0
                    out = case.stands_out(values, box)
                    off[box] |= out
                    self.difference += float(((values - case.ref[box])[out] ** 2).sum())
            self.total.append(total)
            self.holders.append(holders)
            self.off.append(off)

    @property
    def shared(self) -> bool:
        """Whether every element that differs has several copies in its group."""
        return all((holders[off] > 1.0).all() for holders, off in zip(self.holders, self.off))

    def lacks(self, of: typing.Callable[[Array, Array, Array], Array]) -> float:
        """What `of` leaves, in parts of what copies differ by."""
        left = sum(float((holders * of(self.case.ref, total, np.maximum(holders, 1.0)) ** 2)[off].sum())
                   for total, holders, off in zip(self.total, self.holders, self.off))
        return math.sqrt(left / self.difference) if self.difference > 0.0 else math.inf

    def expect(self, of: typing.Callable[[Array, Array, Array], Array]) -> list[list[Array]]:
        """Each copy plus what a group's values lack of the reference: `of` (reference, total, holders)."""
        parts: list[list[Array]] = [[] for _ in self.case.copies]
        for group, total, holders, off in zip(self.groups, self.total, self.holders, self.off):
            lacks = np.where(off, of(self.case.ref, total, np.maximum(holders, 1.0)), 0.0)
            for i in group:
                parts[i] = [values.astype(np.float64) + lacks[box] if off[box].any() else self.case.ref[box]
                            for box, values in zip(self.case.copies[i].boxes, self.case.copies[i].values)]
        return parts


def _right(case: Case) -> list[bool]:
    return [not any(case.stands_out(values, box).any() for box, values in zip(copy.boxes, copy.values))
            for copy in case.copies]


def _less_sum(ref: Array, total: Array, holders: Array) -> Array:
    result: Array = ref - total
    return result


def _less_mean(ref: Array, total: Array, holders: Array) -> Array:
    result: Array = ref - total / holders
    return result


# --- sums and means ---------------------------------------------------------------------------------------------------


def _apart(case: Case, groups: list[Group]) -> bool:
    """Whether in some group copies of one part differ by more than rounding."""
    for group in groups:
        for i, j in zip(group, group[1:]):
            a, b = case.copies[i], case.copies[j]
            if _same_box(a, b) and any(case.stands_out(x, box).any() and np.abs(
                    x.astype(np.float64) - y).max(initial=0.0) > 1e-5 * max(case.scale, 1e-300)
                    for box, x, y in zip(a.boxes, a.values, b.values)):
                return True
    return False


def _sums(case: Case) -> typing.Iterator[Pattern]:
    if not np.isfinite(case.val).all():
        return
    for name, n, groups in _meshes(case):
        if not _apart(case, groups):
            continue
        fold = Fold(case, groups)
        if not fold.shared:
            continue
        right = [case.copies[i].rank or 0 for i, fine in enumerate(_right(case)) if fine]
        numbers = {"over": f" over {name}" if name else "", "dimensions": name, "n": n,
                   "ranks": ranks_of(copy.rank or 0 for copy in case.copies),
                   "who": f"{ranks_of(right)} alone has the value" if right else "no rank has the value"}
        for kind, of in ((SUM, _less_sum), (MEAN, _less_mean)):
            if fold.lacks(of) < LIKE:
                yield Pattern(kind, fold.expect(of), numbers)
        yield from _sums_and_more(case, fold, numbers)


def _sums_and_more(case: Case, fold: Fold, numbers: dict[str, typing.Any]) -> typing.Iterator[Pattern]:
    """What every rank has, and is counted as often as there are ranks: a vector (a bias), or tensors of the run."""
    more = np.concatenate([(total - case.ref)[off] / np.maximum(holders[off] - 1.0, 1.0)
                           for total, holders, off in zip(fold.total, fold.holders, fold.off)])
    if len(case.shape) > 1 and more.size == case.reference.size and case.reference.size // case.shape[-1] >= LEAST:
        extra = more.reshape(-1, case.shape[-1])
        vector = extra.mean(axis=0)
        if np.abs(extra - vector).max() <= 1e-3 * np.abs(vector).max():
            yield Pattern(SUM_AND_VECTOR, fold.expect(
                lambda ref, total, holders: ref + (holders - 1.0) * vector - total), numbers, fitted=2)
    for names, tensors in _tensors_in(case, fold, more):
        yield Pattern(SUM_AND_TENSOR, fold.expect(
            lambda ref, total, holders: ref + (holders - 1.0) * tensors - total),
            {**numbers, "names": names}, fitted=1 + names.count(" and "))


def _tensors_in(case: Case, fold: Fold, more: Array) -> typing.Iterator[tuple[str, Array]]:
    """Up to three tensors of the reference, of the same kind and step, that add up to this."""
    off = fold.off[0]
    for other in fold.off[1:]:
        off = off | other
    if int(off.sum()) != more.size or more.size < LEAST:
        return
    at = np.flatnonzero(off)
    step = max(1, len(at) // SAMPLED)
    wanted = more[::step]
    known: list[tuple[str, Array]] = []
    for text in case.runs.reference:
        if len(known) < MOST_TENSORS and text != str(case.name) and f":{case.name.kind}" in text and (
                text.partition("@")[2] or "1") == str(case.name.step):
            array = case.runs.reference[text]
            if array.shape == case.shape or array.size == case.reference.size:
                known.append((text, array))
    near = 1e-3 * float(np.abs(wanted).max(initial=0.0))
    sampled = [array.ravel()[at[::step]].astype(np.float64) for _, array in known]
    for count in (1, 2, 3):
        for some in itertools.combinations(range(len(known)), count):
            if np.abs(sum(sampled[i] for i in some) - wanted).max(initial=0.0) <= near:
                total: typing.Any = sum(known[i][1].astype(np.float64).reshape(case.shape) for i in some)
                yield " and ".join(known[i][0] for i in some), np.asarray(total)
                return


# --- other groups -----------------------------------------------------------------------------------------------------


def _shards(case: Case) -> list[list[int]]:
    """Copies by part, where each has one box, all of one extent; []: it is not so."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for i, copy in enumerate(case.copies):
        if len(copy.boxes) != 1 or copy.values[0].shape != case.copies[0].values[0].shape:
            return []
        parts.setdefault(tuple(s.start for s in copy.boxes[0]), []).append(i)
    return list(parts.values()) if len(parts) > 1 else []


def _other_groups(case: Case) -> typing.Iterator[Pattern]:
    """Sums over ranks that hold other parts, in place of those that share one, or besides them."""
    shards = _shards(case)
    if not shards or any(_right(case)) or not np.isfinite(case.val).all():
        return
    values: list[Array] = [copy.values[0].astype(np.float64) for copy in case.copies]
    boxes = [case.copies[part[0]].boxes[0] for part in shards]
    whole = np.sum([case.ref[box] for box in boxes], axis=0)
    for factor in (1.0, 1.0 / len(shards)):
        yield Pattern(SHARDS_ADDED, [[factor * whole] for _ in case.copies],
                      {"shards": len(shards), "mean": factor != 1.0})
    bits: dict[bytes, list[int]] = {}
    for i, copy in enumerate(case.copies):
        bits.setdefault(copy.values[0].tobytes(), []).append(i)
    groups = "; ".join(ranks_of(case.copies[i].rank or 0 for i in group) for group in bits.values())
    part_of = {i: k for k, part in enumerate(shards) for i in part}
    if not all(len({part_of[i] for i in group}) > 1 for group in bits.values()):
        return
    alike = np.ptp([case.ref[box] for box in boxes], axis=0)
    numbers = {"groups": groups, "alike": int((alike == 0.0).sum()), "all": alike.size, "one": len(bits) == 1,
               "axis": next((case.axes[a] for a in range(len(case.shape))
                             if len({box[a].start for box in boxes}) > 1), "")}
    if len(bits) > 1:
        lacks = whole - np.sum([values[group[0]] for group in bits.values()], axis=0)
        yield Pattern(OTHER_GROUP, [[v + lacks] for v in values], numbers)
    if case.activation and 2 * numbers["alike"] < alike.size and np.ptp(values[0]) > 0.0:
        yield Pattern(EQUAL_BITS, [[v] for v in values], numbers, fitted=6)


# --- copies apart -----------------------------------------------------------------------------------------------------


def _copies_right(case: Case) -> typing.Iterator[Pattern]:
    """Of each part that differs, some copies are right and others are not: zeros, or others."""
    right = _right(case)
    wrong = [i for i, fine in enumerate(right) if not fine]
    if not any(right) or any(not any(right[j] and _same_box(case.copies[i], case.copies[j])
                                     for j in range(len(right))) for i in wrong):
        return
    numbers = {"right": ranks_of(case.copies[i].rank or 0 for i, fine in enumerate(right) if fine),
               "wrong": ranks_of(case.copies[i].rank or 0 for i in wrong)}
    zero = sum(right) == 1 and all(not v.any() for i in wrong for v in case.copies[i].values)
    kind, fitted = (ONE_RIGHT, 0) if zero else (SOME_RIGHT, 8)
    yield Pattern(kind, [list(copy.values) for copy in case.copies], numbers, fitted)


def _own_parts(case: Case) -> typing.Iterator[Pattern]:
    """Of copies of one value, each has its own block right along an axis, and zeros elsewhere."""
    for name, n, groups in _meshes(case):
        if n < 2 or any(_right(case)) or any(len(group) != n for group in groups) or any(
                len(copy.boxes) != 1 or copy.values[0].shape != case.copies[0].values[0].shape for copy in case.copies):
            continue
        filled = sum(int(np.count_nonzero(copy.values[0])) for copy in case.copies)
        if filled > 1.5 / n * sum(copy.values[0].size for copy in case.copies):
            continue
        for axis in range(len(case.shape)):
            if any(len({case.copies[i].boxes[0][axis].start for i in group}) > 1 for group in groups):
                continue
            parts: list[list[Array]] = [[] for _ in case.copies]
            held = lost = 0
            for group in groups:
                for k, i in enumerate(group):
                    ref = case.ref[case.copies[i].boxes[0]]
                    edges = np.linspace(0, ref.shape[axis], n + 1).astype(int)
                    own = [slice(None)] * ref.ndim
                    own[axis] = slice(edges[k], edges[k + 1])
                    expected = np.zeros_like(ref)
                    expected[tuple(own)] = ref[tuple(own)]
                    parts[i] = [expected]
                    held += int(np.count_nonzero(expected))
                    lost += int(np.count_nonzero(ref)) - int(np.count_nonzero(expected))
            most = (n - 1) / n * sum(copy.values[0].size for copy in case.copies)
            if held >= LEAST and lost >= max(LEAST, most / 4):
                yield Pattern(OWN_PART, parts, {"n": n, "axis": case.axes[axis] or f"dimension {axis}",
                                                "over": f" over {name}" if name else "", "dimensions": name})


def _rank_factors(case: Case) -> typing.Iterator[Pattern]:
    """Each rank has the reference times a number of its own."""
    if len(case.copies) < 2 or case.val.size < LEAST:
        return
    factors, left, difference = [], 0.0, 0.0
    for copy in case.copies:
        ref = np.concatenate([case.ref[box].ravel() for box in copy.boxes])
        val = np.concatenate([v.ravel().astype(np.float64) for v in copy.values])
        square = float(ref @ ref)
        if square == 0.0 or not np.isfinite(val).all():
            return
        factors.append(float(ref @ val) / square)
        left += float(val @ val) - factors[-1] ** 2 * square
        difference += float((val - ref) @ (val - ref))
    different = len({round(f, 5) for f in factors})
    if different > 1 and left < LIKE ** 2 * difference:
        said = ", ".join(f"{f:.4g} on {ranks_of([copy.rank or 0])}" for f, copy in zip(factors[:4], case.copies))
        numbers = {"factors": said + (" .." if len(factors) > 4 else ""), "right": any(_right(case))}
        parts = [[f * case.ref[box] for box in copy.boxes] for f, copy in zip(factors, case.copies)]
        yield Pattern(RANK_FACTORS, parts, numbers, fitted=min(different, 5))


def _extremes(case: Case) -> typing.Iterator[Pattern]:
    """The largest or the smallest of ranks' summands: never below, or above, their mean, and no sum by its sign."""
    ref, val = case.ref[case.seen], case.val[case.seen]
    if case.name.kind != "grad" or ref.size < 8 * LEAST or not np.isfinite(val).all():
        return
    above = float((val > ref).mean())
    if not 0.02 < above < 0.98 or np.ptp([ref.min(), ref.max()]) == 0.0:
        return
    for n in case.runs.group_sizes:
        for op, limit in (("max", np.maximum), ("min", np.minimum)):
            signs = (val > 0.0)[ref < 0.0] if op == "max" else (val < 0.0)[ref > 0.0]
            if (limit(val, ref / n) == val).all() and signs.size and 0.02 < signs.mean() < 0.98:
                yield Pattern(EXTREME, limit(case.val, case.ref / n), {
                    "op": op, "n": n, "word": "largest" if op == "max" else "smallest"}, fitted=4)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if not case.seen.any():
        return
    yield from _extremes(case)
    if case.by_rank:
        for found in (_own_parts, _sums, _other_groups, _copies_right, _rank_factors):
            yield from found(case)


# --- causes -----------------------------------------------------------------------------------------------------------


_REDUCE = ("the all-reduce after a row-parallel forward and after the input's gradient of a column-parallel layer; "
           "hooks of DDP; gradients of parameters that every rank has, of whose tokens it has a part")
_SUMS = "each rank has only its own part of the sum{over}: the copies of {ranks} add up to the reference; {who}"
_MEAN = "the average did not run: `no_sync`, the module inside called, a parameter without a gradient, `ReduceOp.AVG`"

CAUSES = (
    Cause("missing_all_reduce", (OWN_PART,), "each of {n} ranks has its own part of the gradient along {axis}, and "
          "zeros elsewhere: the ranks' sum is the gradient",
          "the all-reduce of a parameter's gradient of which each rank uses a part", kinds("grad")),
    Cause("collective_without_backward", (OWN_PART,),
          "each of {n} ranks has the gradient of its own part along {axis}, and zeros elsewhere",
          "a collective whose backward does not gather", every(kinds("bwd"), has(axis="token"))),
    Cause("missing_all_gather", (OWN_PART,), "each of {n} ranks has its own part along {axis}, and zeros elsewhere",
          "`all_gather_into_tensor`, `redistribute` of a DTensor"),
    Cause("missing_broadcast", (ONE_RIGHT,), "{right} has the value, and {wrong} zeros",
          "`dist.broadcast` of initial values and state; `sync_module_states`",
          kinds("init", "new", "m", "v", "state", "buffer", "weight")),
    Cause("missing_all_reduce", (ONE_RIGHT,),
          "{right} has the value, and {wrong} zeros: the sum over these ranks is missing", _REDUCE),
    Cause("missing_all_reduce", (SUM,), _SUMS, _REDUCE, kinds("fwd", "bwd", "grad", "clip", "count", "weight")),
    Cause("missing_average", (MEAN,),
          "each rank has its own value{over}: the mean of the copies of {ranks} is the reference", _MEAN,
          lambda case, pattern: not case.activation or case.reference.size >= LEAST),
    Cause("missing_all_reduce", (SUM_AND_VECTOR,), _SUMS + ", but for one vector that each rank adds: a bias",
          _REDUCE, kinds("fwd")),
    Cause("missing_all_reduce", (SUM_AND_TENSOR,), _SUMS + ", but for {names}, which each rank has in full", _REDUCE,
          kinds("fwd", "bwd")),
    Cause("reduced_again", (SHARDS_ADDED,), "each rank's shard is the sum of all {shards} shards",
          "an all-reduce over the world, or over ranks that hold other parts", has(mean=False)),
    Cause("wrong_group", (SHARDS_ADDED,),
          "each rank's shard is the mean of all {shards} shards: an average over ranks that hold other parts",
          "the ranks of `new_group`, the dimension of a `DeviceMesh`"),
    Cause("wrong_group", (OTHER_GROUP,), "summed over the wrong group: ranks that hold different parts have equal "
          "bits ({groups}), and these groups' values add up to all parts",
          "the ranks of `new_group`, the dimension of a `DeviceMesh`", kinds("grad", "fwd", "bwd", "clip")),
    Cause("same_samples", (EQUAL_BITS,), "ranks that have other samples have the same values bit for bit ({groups})",
          "the slice of the batch that a rank takes; `DistributedSampler` with its rank and its set_epoch",
          lambda case, pattern: pattern.numbers["axis"] == "batch" and not positional(case)),
    Cause("reduction_operator", (EXTREME,), "the {word} of {n} ranks' parts in place of their sum, an all-reduce by "
          "{op}: no element is beyond the mean of the {n} parts", "`ReduceOp`"),
    Cause("scaled_by_rank", (RANK_FACTORS,), "each rank has the reference times a number of its own: {factors}",
          "a norm, count or size of a rank's own part in place of the group's",
          lambda case, pattern: not case.activation and not pattern.numbers["right"]),
    Cause("replicas_apart", (SOME_RIGHT,), "the copy of {right} is right, that of {wrong} is not",
          "seeds with the rank in them, a collective that one rank skips, state that is not broadcast",
          kinds("init", "buffer", "weight", "new", "m", "v")),
)
