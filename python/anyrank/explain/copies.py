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
from anyrank.explain.known import shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.steps import own_of, sum_of
from anyrank.explain.tensors import Array, Case, Name, positional
from anyrank.explain.words import counted, ranks_of, some

SUM, MEAN, SUM_AND_MORE, OTHER_GROUP, SHARDS_ADDED = (
    "copies_sum", "copies_mean", "sum_and_more", "summed_over_shards", "shards_added")
SOME_RIGHT, ONE_RIGHT, OWN_PART, RANK_FACTORS, EQUAL_BITS, IN_STAGES = (
    "some_copies_right", "one_copy_right", "own_part", "rank_factors", "equal_bits", "summed_in_stages")
LEAST = 8  # elements, or rows, that are no accident
MOST_TENSORS = 24  # of the same shape that are tried as what was counted on every rank
SAMPLED = 256
LIKE = 0.5  # of a difference that a pattern leaves at most to be looked at
Group = tuple[int, ...]  # numbers of copies


# --- groups of ranks --------------------------------------------------------------------------------------------------


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


Lack = typing.Callable[[Array, Array, Array], Array]  # of (reference, sum of copies, holders) what copies lack


class Fold:
    """Sums of copies in groups. parts: (copies, their sum, how many hold an element, which differ), of full shapes."""

    def __init__(self, case: Case, groups: list[Group]) -> None:
        self.case, self.difference = case, 0.0
        self.parts: list[tuple[Group, Array, Array, Array]] = []
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
            self.parts.append((group, total, holders, off))

    @property
    def shared(self) -> bool:
        """Whether every element that differs has several copies in its group."""
        return all((holders[off] > 1.0).all() for _, _, holders, off in self.parts)

    def lacks(self, of: Lack) -> float:
        """What `of` leaves, in parts of what copies differ by."""
        left = sum(float((holders * of(self.case.ref, total, np.maximum(holders, 1.0)) ** 2)[off].sum())
                   for _, total, holders, off in self.parts)
        return math.sqrt(left / self.difference) if self.difference > 0.0 else math.inf

    def expect(self, of: Lack) -> list[list[Array]]:
        """Each copy plus what a group's values lack of the reference."""
        parts: list[list[Array]] = [[] for _ in self.case.copies]
        for group, total, holders, off in self.parts:
            lacks = np.where(off, of(self.case.ref, total, np.maximum(holders, 1.0)), 0.0)
            for i in group:
                parts[i] = [values.astype(np.float64) + lacks[box] if off[box].any() else self.case.ref[box]
                            for box, values in zip(self.case.copies[i].boxes, self.case.copies[i].values)]
        return parts


def _ranks(case: Case, which: typing.Iterable[int]) -> str:
    return ranks_of(case.copies[i].rank or 0 for i in which)


def _right(case: Case) -> list[bool]:
    return [not any(case.stands_out(values, box).any() for box, values in zip(copy.boxes, copy.values))
            for copy in case.copies]


# --- sums and means ---------------------------------------------------------------------------------------------------


def _apart(case: Case, groups: list[Group]) -> bool:
    """Whether in some group copies of one part differ by more than rounding."""
    for group in groups:
        for i, j in zip(group, group[1:]):
            a, b = case.copies[i], case.copies[j]
            if a.boxes == b.boxes and any(case.stands_out(x, box).any() and np.abs(
                    x.astype(np.float64) - y).max(initial=0.0) > 1e-5 * max(case.scale, 1e-300)
                    for box, x, y in zip(a.boxes, a.values, b.values)):
                return True
    return False


def _rows_off(fold: Fold) -> str:
    """Which rows alone differ, in words; "": all of those that are not zero, or no run of rows."""
    off, axes = np.logical_or.reduce([part[3] for part in fold.parts]), tuple(range(1, len(fold.case.shape)))
    rows = np.flatnonzero(off.any(axis=axes)) if axes else np.zeros(0, int)
    run = rows.size and rows[-1] - rows[0] + 1 == rows.size < np.count_nonzero(fold.case.ref.any(axis=axes))
    return f" in rows {rows[0]} to {rows[-1]} of {len(off)} alone" if run else ""


def _among(case: Case) -> str:
    """Of a gradient, after a backward pass that is right: which of the step's are right and which are not; "": none."""
    runs = case.runs
    of_step = [(name, n) for name in runs.reference if (n := Name.of(name)).kind in ("bwd", "grad")
               and n.step == case.name.step and name in runs.other]
    passed = {name in runs.same for name, n in of_step if n.kind == "bwd"} == {True} and case.name.kind == "grad"
    right = [n.stem for name, n in of_step if n.kind == "grad" and name in runs.same and np.any(runs.reference[name])]
    wrong = [n.stem for name, n in of_step if n.kind == "grad" and name not in runs.same]
    differ = counted(len(wrong), "gradient", ("differs", "differ"))
    return f"; {differ} ({some(wrong)}), others are right ({some(right)})" if passed and right else ""


def _stages(case: Case) -> typing.Iterator[Pattern]:
    """Copies of one value have sums or means over groups of ranks, which together are that of all; some may have it."""
    fine, boxes = _right(case), {str(copy.boxes) for copy in case.copies}
    by_value: dict[tuple[bytes, ...], list[int]] = {}
    for i, copy in enumerate(case.copies):
        if not fine[i]:
            by_value.setdefault(tuple(v.tobytes() for v in copy.values), []).append(i)
    if len(boxes) > 1 or len(by_value) < 2 or len(by_value) == len(fine) or not np.isfinite(case.val).all():
        return
    held = [own_of(case, group[0]) for group in by_value.values()]
    multiple = sum_of(held[0], (case.ref,))  # as where each rank has another factor
    if len({*map(len, by_value.values())}) > 1 or multiple is None or multiple.left < 0.05:
        return
    total = np.sum(held, axis=0)
    right, groups = [i for i, of in enumerate(fine) if of], "; ".join(_ranks(case, g) for g in by_value.values())
    for times, what in ((1.0, "add up to it"), (1.0 / len(by_value), "have it as their mean")):
        lacks = case.ref - times * total
        yield Pattern(IN_STAGES, [[values if fine[i] else values + lacks[box] for box, values in zip(
            copy.boxes, copy.values)] for i, copy in enumerate(case.copies)], {
                "who": _ranks(case, right) if right else "no rank", "groups": groups, "what": what})


def _sums(case: Case) -> typing.Iterator[Pattern]:
    if not np.isfinite(case.val).all():
        return
    for name, n, groups in _meshes(case):
        fold = Fold(case, groups)
        if not _apart(case, groups) or not fold.shared:
            continue
        right = [i for i, fine in enumerate(_right(case)) if fine]
        numbers = {"over": f" over {name}" if name else "", "ranks": _ranks(case, range(len(case.copies))),
                   "who": f"{_ranks(case, right)} alone has the value" if right else "no rank has the value",
                   "rows": _rows_off(fold), "among": _among(case)}
        lacks: tuple[tuple[str, Lack], ...] = ((SUM, lambda ref, total, holders: ref - total),
                                               (MEAN, lambda ref, total, holders: ref - total / holders))
        for kind, of in lacks:
            if fold.lacks(of) < LIKE and not (kind == MEAN and right):
                yield Pattern(kind, fold.expect(of), numbers)
        yield from _sums_and_more(case, fold, numbers)


def _sums_and_more(case: Case, fold: Fold, numbers: dict[str, typing.Any]) -> typing.Iterator[Pattern]:
    """What every rank has, and is counted as often as there are ranks: a vector (a bias), or tensors of the run."""
    more = np.concatenate([(total - case.ref)[off] / np.maximum(holders[off] - 1.0, 1.0)
                           for _, total, holders, off in fold.parts])
    found: list[tuple[str, Array, int]] = []
    if len(case.shape) > 1 and more.size == case.reference.size and case.reference.size // case.shape[-1] >= LEAST:
        extra = more.reshape(-1, case.shape[-1])
        vector: Array = extra.mean(axis=0)
        if np.abs(extra - vector).max() <= 1e-3 * np.abs(vector).max():
            found.append(("for one vector that each rank adds: a bias", vector, 2))
    off = np.flatnonzero(np.logical_or.reduce([part[3] for part in fold.parts]))
    if len(off) == more.size >= LEAST:
        found += _tensors_in(case, off[::max(1, len(off) // SAMPLED)], more[::max(1, len(off) // SAMPLED)])
    for text, counted, fitted in found:
        yield Pattern(SUM_AND_MORE, fold.expect(lambda ref, total, holders: ref + (holders - 1.0) * counted - total),
                      {**numbers, "but": text}, fitted)


def _tensors_in(case: Case, at: Array, wanted: Array) -> typing.Iterator[tuple[str, Array, int]]:
    """Up to three tensors of the reference, of the same kind and step, that add up to this."""
    known = case.runs.reference
    names = [text for text in known if (n := Name.of(text)).kind == case.name.kind and n.step == case.name.step
             and text != str(case.name) and math.prod(shape_of(known, text)) == case.reference.size][:MOST_TENSORS]
    sampled: list[Array] = [known[text].ravel()[at].astype(np.float64) for text in names]
    for count in (1, 2, 3):
        for some in itertools.combinations(range(len(names)), count):
            if np.abs(sum(sampled[i] for i in some) - wanted).max() <= 1e-3 * np.abs(wanted).max():
                yield (f"for {' and '.join(names[i] for i in some)}, which each rank has in full", np.sum(
                    [known[names[i]].astype(np.float64).reshape(case.shape) for i in some], axis=0), count)
                return


# --- other groups -----------------------------------------------------------------------------------------------------


def _other_groups(case: Case) -> typing.Iterator[Pattern]:
    """Sums over ranks that hold other parts, in place of those that share one, or besides them."""
    shards: dict[tuple[int, ...], list[int]] = {}  # copies by part, each of one box, all of one extent
    bits: dict[bytes, list[int]] = {}
    for i, copy in enumerate(case.copies):
        shards.setdefault(tuple(s.start for s in copy.boxes[0]), []).append(i)
        bits.setdefault(copy.values[0].tobytes(), []).append(i)
    if len(shards) < 2 or any(_right(case)) or not np.isfinite(case.val).all() or any(
            len(copy.boxes) != 1 or copy.values[0].shape != case.copies[0].values[0].shape for copy in case.copies):
        return
    values: list[Array] = [copy.values[0].astype(np.float64) for copy in case.copies]
    refs = np.stack([case.ref[case.copies[part[0]].boxes[0]] for part in shards.values()])
    for factor in (1.0, 1.0 / len(shards)):
        yield Pattern(SHARDS_ADDED, [[factor * refs.sum(axis=0)] for _ in case.copies],
                      {"shards": len(shards), "mean": factor != 1.0})
    if any(len(group) < 2 or all(case.copies[i].boxes == case.copies[group[0]].boxes for i in group)
           for group in bits.values()):
        return
    numbers = {"groups": "; ".join(_ranks(case, group) for group in bits.values()), "axis": next(
        (axis for axis, starts in zip(case.axes, zip(*shards)) if len({*starts}) > 1), "")}
    if len(bits) > 1:
        lacks = refs.sum(axis=0) - np.sum([values[group[0]] for group in bits.values()], axis=0)
        yield Pattern(OTHER_GROUP, [[v + lacks] for v in values], numbers)
    if case.activation and 2 * (np.ptp(refs, axis=0) == 0.0).sum() < refs[0].size and np.ptp(values[0]) > 0.0:
        yield Pattern(EQUAL_BITS, [[v] for v in values], numbers, fitted=6)


# --- copies apart -----------------------------------------------------------------------------------------------------


def _copies_right(case: Case) -> typing.Iterator[Pattern]:
    """Of each part that differs, some copies are right and others are not: zeros, or others."""
    fine = _right(case)
    right, wrong = ([i for i, of in enumerate(fine) if of == wanted] for wanted in (True, False))
    if right and all(any(case.copies[i].boxes == case.copies[j].boxes for j in right) for i in wrong):
        zero = len(right) == 1 and all(not v.any() for i in wrong for v in case.copies[i].values)
        yield Pattern(ONE_RIGHT if zero else SOME_RIGHT, [list(copy.values) for copy in case.copies],
                      {"right": _ranks(case, right), "wrong": _ranks(case, wrong)}, 0 if zero else 8)


def _own_parts(case: Case) -> typing.Iterator[Pattern]:
    """Of copies of one value, each has its own block right along an axis, and zeros elsewhere."""
    if any(_right(case)) or any(len(copy.boxes) != 1 for copy in case.copies):
        return
    refs = [case.ref[copy.boxes[0]] for copy in case.copies]
    size = sum(ref.size for ref in refs)
    filled = sum(int(np.count_nonzero(copy.values[0])) for copy in case.copies)
    for (name, n, groups), axis in itertools.product(_meshes(case), range(len(case.shape))):
        if n < 2 or filled > 1.5 / n * size or any(len(group) != n or len(
                {case.copies[i].boxes[0][axis].start for i in group}) > 1 for group in groups):
            continue
        parts: list[list[Array]] = [[] for _ in case.copies]
        for k, i in ((k, i) for group in groups for k, i in enumerate(group)):
            own = np.arange(refs[i].shape[axis]) * n // refs[i].shape[axis] == k
            parts[i] = [np.where(own.reshape([-1 if a == axis else 1 for a in range(refs[i].ndim)]), refs[i], 0.0)]
        held, whole = (sum(map(np.count_nonzero, arrays)) for arrays in ((part[0] for part in parts), refs))
        if held >= LEAST and whole - held >= max(LEAST, (n - 1) / n * size / 4):
            yield Pattern(OWN_PART, parts, {"n": n, "axis": case.axes[axis] or f"dimension {axis}"})


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
        said = ", ".join(f"{f:.4g} on {_ranks(case, [i])}" for i, f in enumerate(factors[:4]))
        off = [i for i, f in enumerate(factors) if abs(f - 1.0) > 1e-5]
        text = (f"what {_ranks(case, off)} has is the reference times {factors[off[0]]:.6g}" if len(off) == 1 else
                f"each rank has the reference times a number of its own: {said}")
        numbers = {"factors": said + (" .." if len(factors) > 4 else ""), "right": any(_right(case)), "text": text}
        parts = [[f * case.ref[box] for box in copy.boxes] for f, copy in zip(factors, case.copies)]
        yield Pattern(RANK_FACTORS, parts, numbers, fitted=min(different, 5))


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.by_rank and case.seen.any():
        for found in (_own_parts, _sums, _stages, _other_groups, _copies_right, _rank_factors):
            yield from found(case)


# --- causes -----------------------------------------------------------------------------------------------------------


_REDUCE = ("the all-reduce after a row-parallel forward and after the input's gradient of a column-parallel layer; "
           "hooks of DDP; gradients of parameters that every rank has, of whose tokens it has a part")
_SUMS = ("a missing sum{over}{rows}: each rank has its own part, the copies of {ranks} add up to the reference, and "
         "{who}")
_MEANS = ("a missing average{over}{rows}: each rank has its own value, and the mean of the copies of {ranks} is the "
          "reference{among}")
_MEAN = "the average did not run: `no_sync`, the module inside called, a parameter without a gradient, `ReduceOp.AVG`"

CAUSES = (
    Cause("missing_all_reduce", (OWN_PART,), "each of {n} ranks has its own part of the gradient along {axis}, and "
          "zeros elsewhere: the ranks' sum is the gradient",
          "the all-reduce of a parameter's gradient of which each rank uses a part", kinds("grad")),
    Cause("collective_without_backward", (OWN_PART,),
          "each of {n} ranks has the gradient of its own part along {axis}, and zeros elsewhere",
          "a collective whose backward does not gather", every(kinds("bwd"), has(axis="token"))),
    Cause("missing_all_gather", (OWN_PART,), "a missing all-gather: each of {n} ranks has its own part along {axis}, "
          "and zeros elsewhere", "`all_gather_into_tensor`, `redistribute` of a DTensor"),
    Cause("replicas_apart", (ONE_RIGHT,), "{right} has the value, and {wrong} zeros",
          "`dist.broadcast` of initial values and state; `sync_module_states`",
          kinds("init", "new", "m", "v", "state", "buffer", "weight")),
    Cause("missing_all_reduce", (ONE_RIGHT,),
          "{right} has the value, and {wrong} zeros: the sum over these ranks is missing", _REDUCE),
    Cause("missing_all_reduce", (SUM,), _SUMS + "{among}", _REDUCE, kinds(
        "fwd", "bwd", "grad", "clip", "count", "weight")),
    Cause("missing_average", (MEAN,), _MEANS, "what averages these parameters' gradients: DDP knows those alone that "
          "are there and require a gradient when it wraps the module (none added or unfrozen later, as adapters), and "
          "none that it is told to ignore", has(among=bool)),
    Cause("missing_average", (MEAN,), _MEANS, _MEAN,
          lambda case, pattern: not case.activation or case.reference.size >= LEAST),
    Cause("missing_all_reduce", (SUM_AND_MORE,), _SUMS + ", but {but}", _REDUCE, kinds("fwd", "bwd")),
    Cause("missing_all_reduce", (IN_STAGES,), "a part of the sum over ranks is missing: of groups of ranks ({groups}) "
          "each has its own part, these {what}, and it is whole on {who}", "a reduction in stages (in a machine, "
          "between machines): its last stage, what hands the whole sum to all ranks; a reduction over a smaller group",
          kinds("grad", "fwd", "bwd", "clip")),
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
    Cause("scaled_by_rank", (RANK_FACTORS,), "each rank has the reference times a number of its own: {factors}",
          "a norm, count or size of a rank's own part in place of the group's",
          lambda case, pattern: not case.activation and not pattern.numbers["right"]),
    Cause("replicas_apart", (SOME_RIGHT,), "the copy of {right} is right, that of {wrong} is not",
          "seeds with the rank in them, a collective that one rank skips, state that is not broadcast",
          kinds("init", "buffer", "weight", "new", "m", "v")),
)
