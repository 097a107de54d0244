# SPDX-License-Identifier: Apache-2.0
"""Which elements differ, as a set: zeros, one value or NaN in place of values, single elements.

Zeros and masks say what stands where values differ. A set alone (one rank's part, tokens from some position on) is a
pattern without a cause.
"""

from __future__ import annotations

import dataclasses
import functools
import typing

import numpy as np

from anyrank.explain.causes import Cause, activation, every, has, kinds
from anyrank.explain.patterns import Pattern
from anyrank.explain.scaled import starts_right
from anyrank.explain.tensors import Array, Case, Name, looked_up
from anyrank.explain.words import counted, ranks_of

ZERO_ALL, ZERO_RANKS, ZERO_TAIL, ZERO_ROWS, ZERO_BLOCK, ZERO_SOME = (
    "zero", "zero_ranks", "zero_tail", "zero_rows", "zero_block", "zero_some")
FILLED, NAN, BIT, EXCHANGED, FEW, BORDERS, PLACE, UNWRITTEN = (
    "one_value", "not_finite", "bit", "two_exchanged", "few", "borders", "place", "unwritten")
LEAST = 8  # elements of one value that are no accident
MOST_FEW = 4  # elements that differ by accident of memory
NOUNS = {"batch": "samples", "token": "tokens", "head": "heads", "feature": "features", "out": "rows", "in": "columns",
         "vocab": "ids", "expert": "experts"}


@dataclasses.dataclass(frozen=True)
class Wrong:
    """The boxes of copies that differ somewhere, with which of their elements do. parts: (copy, box)."""

    case: Case
    parts: tuple[tuple[int, int], ...]
    off: tuple[Array, ...]

    @classmethod
    def of(cls, case: Case) -> Wrong:
        found = [((i, k), case.stands_out(values, box)) for i, copy in enumerate(case.copies)
                 for k, (box, values) in enumerate(zip(copy.boxes, copy.values))]
        found = [(part, off) for part, off in found if off.any()]
        return cls(case, tuple(part for part, _ in found), tuple(off for _, off in found))

    def values(self) -> typing.Iterator[tuple[Array, Array, Array]]:
        """(reference, value, differs) of each box."""
        for (i, k), off in zip(self.parts, self.off):
            copy = self.case.copies[i]
            yield self.case.ref[copy.boxes[k]], copy.values[k].astype(np.float64), off

    @functools.cached_property
    def joined(self) -> tuple[Array, Array, Array]:
        """The same of all boxes, in a row."""
        columns = [[x.ravel() for x in row] for row in self.values()]
        return tuple(np.concatenate(column) for column in zip(*columns))

    @property
    def of_all(self) -> bool:
        return len(self.parts) == sum(len(copy.boxes) for copy in self.case.copies)

    @property
    def ranks(self) -> list[int]:
        return sorted({self.case.copies[i].rank or 0 for i, _ in self.parts})

    def expect(self, of: typing.Callable[[Array, Array, Array], Array]) -> list[list[Array]]:
        """What each copy is: in boxes that differ `of` (reference, value, differs), else the reference."""
        parts = [[self.case.ref[box] for box in copy.boxes] for copy in self.case.copies]
        for (i, k), row in zip(self.parts, self.values()):
            parts[i][k] = of(*row)
        return parts

    def where(self, mask: Array, value: float) -> list[list[Array]]:
        """A value at the places of a mask of the full tensor."""
        parts = [[self.case.ref[box] for box in copy.boxes] for copy in self.case.copies]
        for i, k in self.parts:
            parts[i][k] = np.where(mask[self.case.copies[i].boxes[k]], value, parts[i][k])
        return parts

    def own(self) -> list[list[Array]]:
        return self.expect(lambda ref, val, off: np.where(off, val, ref))


# --- zeros ------------------------------------------------------------------------------------------------------------


def _hits(off: Array) -> list[Array]:
    """Of each axis the indices at which something differs."""
    axes = range(off.ndim)
    return [np.flatnonzero(off.any(axis=tuple(a for a in axes if a != axis))) for axis in axes]


def _spans(hits: Array) -> tuple[int, int] | None:
    """The range that these indices fill, but for a tenth."""
    start, end = int(hits[0]), int(hits[-1]) + 1
    return (start, end) if 10 * len(hits) >= 9 * (end - start) else None


def _tail(case: Case, axis: int, hits: Array) -> dict[str, typing.Any] | None:
    """The last part of each of n shards along an axis, and no more."""
    extent = case.shape[axis]
    seen = [n for a, n in case.cuts if a == axis]
    for n in seen or case.runs.group_sizes or range(2, 17):
        size = extent // n
        if extent % n or size < 2 or len(hits) % n:
            continue
        cut = size - len(hits) // n
        if 0 < cut < size and np.array_equal(hits, np.add.outer(np.arange(n) * size, np.arange(cut, size)).ravel()):
            return {"n": n, "cut": cut, "extent": size, "seen": bool(seen),
                    "twice": cut * n == size or (size % n > 0 and cut == size // n)}
    return None


def _noun(case: Case, axis: int) -> str:
    return NOUNS.get(case.axes[axis], f"slices of dimension {axis}")


def _one_is_right(case: Case, wrong: Wrong) -> bool:
    """Whether one rank alone has the value, and all others, which hold the same part, have none of it."""
    zero = {i for i, _ in wrong.parts}
    return len(zero) == len(case.copies) - 1 and all(copy.boxes == case.copies[0].boxes for copy in case.copies)


def are_by_value(ref: Array, zero: Array) -> bool:
    """Whether zeros are where the reference is below, or above, some value: a clamp, an activation or underflow."""
    some, others = ref[zero], ref[~zero & (ref != 0.0)]
    if not some.size or not others.size:
        return False
    return any(x.max() < y.min() or x.min() > y.max() for x, y in ((some, others), (np.abs(some), np.abs(others))))


def _zeros(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    _, val, off = wrong.joined
    count = int(case.seen.sum())
    if val[off].any() or not count or case.reference.dtype.kind != "f":  # zero is a number as others among integers
        return
    numbers = {"wrong": count, "all": case.reference.size, "ranks": ranks_of(wrong.ranks), "wrong_ranks": wrong.ranks,
               "axis": "", "block": False}
    if not val.any():
        kind = ZERO_ALL if wrong.of_all else ZERO_RANKS
        yield Pattern(kind, wrong.expect(lambda ref, val, off: np.zeros_like(ref)), {
            **numbers, "one_right": _one_is_right(case, wrong)})
        return
    ref = wrong.joined[0]
    if count >= MOST_FEW and are_by_value(ref, off):
        return
    hits = _hits(case.seen)
    mask: Array = np.zeros(case.shape, bool)
    mask[np.ix_(*hits)] = True
    cut = [axis for axis, at in enumerate(hits) if len(at) < case.shape[axis]]
    filled = count >= 0.25 * mask.sum()
    if len(cut) == 1 and filled and (case.seen.ndim > 1 or _spans(hits[0])):
        axis = cut[0]
        numbers |= {"axis": case.axes[axis], "noun": _noun(case, axis), "rows": len(hits[axis]),
                    "extent": case.shape[axis], "first": int(hits[axis][0]), "dimension": axis,
                    "end": int(hits[axis][-1]) + 1, "block": len(hits[axis]) > 1 and _spans(hits[axis]) is not None}
        if (tail := _tail(case, axis, hits[axis])) is not None:
            yield Pattern(ZERO_TAIL, wrong.where(mask, 0.0), {**numbers, **tail})
        yield Pattern(ZERO_ROWS, wrong.where(mask, 0.0), numbers)
    elif cut and filled and all(_spans(at) for at in hits):
        yield Pattern(ZERO_BLOCK, wrong.where(mask, 0.0), numbers)
    rows = np.asarray(case.seen.any(axis=-1))
    if case.seen.ndim > 2 and not rows.all():  # whole rows of all leading dimensions
        whole = np.broadcast_to(rows[..., None], case.shape)
        yield Pattern(ZERO_ROWS, wrong.where(whole, 0.0), {
            **numbers, "axis": "token" if "token" in case.axes else "",
            "noun": "tokens" if "token" in case.axes else "rows", "rows": int(rows.sum()), "extent": rows.size,
            "block": False, "dimension": -1})
    yield Pattern(ZERO_SOME, wrong.expect(lambda ref, val, off: np.where(off, 0.0, ref)), numbers, fitted=1)


# --- one value, no value ----------------------------------------------------------------------------------------------


def _left_over(case: Case) -> int:
    """Of how many shards the last indices of the last axis, which alone differ, are what is left over; 0: of none."""
    extent, hits = case.shape[-1], _hits(case.seen)[-1]
    counts = case.runs.group_sizes or range(2, 17)
    return next((n for n in counts if len(hits) == extent % n and len(hits) == extent - int(hits[0])), 0)


def _idle_experts(case: Case) -> bool:
    """Whether all that differs is of experts of which the reference has nothing."""
    return case.axes[:1] == ("expert",) and not case.ref[case.seen.reshape(len(case.seen), -1).any(axis=1)].any()


def _values(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    ref, val, off = wrong.joined
    if (not ref.any() or _idle_experts(case)) and np.isfinite(val).all():
        yield Pattern(UNWRITTEN, wrong.own(), {"wrong": int(off.sum())}, fitted=6)
    value, count = float(val[off][0]), int(off.sum())
    lost = off & ~np.isfinite(val) & np.isfinite(ref)
    if np.isnan(val[lost]).any():
        own = wrong.expect(lambda ref, val, off: val)
        yield Pattern(NAN, own, {"nan": int(lost.sum()), "wrong": count}, 1 if lost.sum() == count else 6)
    elif count >= LEAST and value != 0.0 and (val[off] == value).all():
        beyond = abs(value) > case.scale and count < off.size
        yield Pattern(FILLED, wrong.expect(lambda ref, val, off: np.where(off, value, ref)),
                      {"value": value, "wrong": count, "beyond": beyond, "shards": _left_over(case),
                       "extent": case.shape[-1], "left": len(_hits(case.seen)[-1])}, fitted=2)


# --- few elements, borders, places ------------------------------------------------------------------------------------


def _is_sharp(case: Case) -> bool:
    """Whether small differences count, so that what does not differ is right."""
    return float(np.max(case.allowed)) <= 1e-3 * case.scale


def _few(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    at = np.argwhere(case.seen)
    if not _is_sharp(case) or not 0 < len(at) <= MOST_FEW or case.reference.size < 64 * len(at):
        return
    ref, val = case.ref[tuple(at.T)], case.val[tuple(at.T)]
    places = ", ".join(str(tuple(map(int, row))) for row in at)
    numbers = {"places": places, "all": counted(len(at), "element", ("differs", "differ")), "ref": float(ref[0]),
               "val": float(val[0]), "large": bool((np.abs(val - ref) > 0.1 * case.scale).all()), "bit": 0}
    if len(at) == 2 and (np.abs(val[::-1] - ref) <= case.rounding(ref)).all():
        yield Pattern(EXCHANGED, wrong.own(), numbers, fitted=1)
    if len(at) == 1 and case.reference.dtype == np.float32 and not ref[0].is_integer():  # one of 32 values
        bits = int(np.float32(ref[0]).view(np.uint32)) ^ int(np.float32(val[0]).view(np.uint32))
        if bits and bits & (bits - 1) == 0 and not (ref[0].is_integer() and val[0].is_integer()):  # counts are no bits
            yield Pattern(BIT, wrong.own(), {**numbers, "bit": bits.bit_length() - 1}, trials=32)
    yield Pattern(FEW, wrong.own(), numbers, min(1, len(at) - 1), trials=64)  # of their values it says nothing


def _borders(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    """All that differs is next to the borders of ranks' parts, at every one of them."""
    hits = _hits(case.seen)
    for axis, parts in case.cuts if _is_sharp(case) and case.activation else ():
        if case.axes[axis] == "batch":
            continue
        edges = sorted({box[axis].start for copy in case.copies for box in copy.boxes} - {0})
        size = min(np.diff([0, *edges, case.shape[axis]]))
        before = [[e - int(i) for i in hits[axis] if 0 < e - i <= size // 2] for e in edges]
        behind = [[int(i) - e + 1 for i in hits[axis] if 0 <= i - e < size - size // 2] for e in edges]
        reach = [max((max(some, default=0) for some in side), default=0) for side in (before, behind)]
        near = {i for e in edges for i in range(e - reach[0], e + reach[1])}
        if set(hits[axis].tolist()) <= near and all(b or a for b, a in zip(before, behind)) and (
                2 * max(reach) < size or sum(reach) < size):
            yield Pattern(BORDERS, wrong.own(), {"before": reach[0], "behind": reach[1], "n": parts,
                                                 "noun": _noun(case, axis)}, fitted=5)


def _places(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    """One axis' indices that differ alone, or one rank's part: what it looks like."""
    hits = _hits(case.seen)
    cut = [axis for axis, at in enumerate(hits) if len(at) < case.shape[axis]]
    if not wrong.of_all:
        yield Pattern(PLACE, wrong.own(), {"text": f"only what {ranks_of(wrong.ranks)} has differs"}, fitted=9)
    elif len(cut) == 1:
        at, noun = hits[cut[0]], _noun(case, cut[0])
        span = _spans(at)
        listed = ", ".join(map(str, at[:6])) + (" .." if len(at) > 6 else "")
        where = f"{int(at[0])} to {int(at[-1])}" if span else listed
        yield Pattern(PLACE, wrong.own(), {"text": f"only {noun} {where} of {case.shape[cut[0]]} differ"}, fitted=9)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    wrong = Wrong.of(case)
    if not wrong.parts or not case.reference.ndim:
        return
    for found in (_zeros, _values, _few, _borders, _places):
        yield from found(case, wrong)


# --- causes -----------------------------------------------------------------------------------------------------------


def _floored(case: Case, pattern: Pattern) -> bool:
    """Whether the tokens that are left are as many as twice the ranks divide."""
    numbers = pattern.numbers
    first, extent = (numbers.get(key, 0) for key in ("first", "extent"))
    return bool(numbers["axis"] == "token" and numbers["block"]) and numbers["end"] == extent and any(
        first == extent // (2 * n) * (2 * n) for n in case.runs.group_sizes)


def _first_group(case: Case, pattern: Pattern) -> bool:
    """Whether the right ranks are the first group of the innermost dimension, and rows are looked up by ids."""
    inner = list(case.runs.mesh.values())[-1:] or [1]
    ranks = {copy.rank or 0 for copy in case.copies}
    right = ranks - set(pattern.numbers["wrong_ranks"])
    return any(right == set(range(n)) and len(ranks) >= 2 * n for n in (inner[0], 1)) and looked_up(case)


def _not_of_loss(case: Case, pattern: Pattern) -> bool:
    """Not tokens that have no gradient where the backward pass begins: the loss leaves those out."""
    tokens = "token" in case.axes and bool((case.seen.any(-1) == case.seen.all(-1)).all())
    return case.name.kind != "bwd" or not tokens or starts_right(case)


_TAIL = "of each of {n} shards only the first {cut} of {extent} {noun} are there, and the rest is zero"

def _part_detached(case: Case, pattern: Pattern) -> bool:
    """Whether the gradient that the parameter's module passes back differs as well."""
    back = str(Name(case.name.module, "bwd", case.name.step))
    return case.name.kind == "grad" and back in case.runs.other and back in case.runs.reference and (
        back not in case.runs.same)


def _of_tensor(case: Case, pattern: Pattern) -> bool:
    """Whether rows of zeros are missing in the tensor itself: of the first gradient, tokens without one are no
    targets."""
    return case.name.kind != "bwd" or starts_right(case)


_TAIL = "of each of {n} shards only the first {cut} of {extent} {noun} are there, and the rest is zero"
CAUSES = (
    Cause("world_rank_in_group", (ZERO_RANKS,), "zeros from {ranks}: the rank in the world was used where the rank "
          "in the group belongs, so no rank has their ids", "`dist.get_rank()` where `get_rank(group)` belongs",
          _first_group),
    Cause("zeros_of_ranks", (ZERO_RANKS,), "zeros from {ranks} alone", "work that these ranks skip: parameters "
          "without use, `no_sync`, an empty micro-batch; a buffer that is not copied back",
          lambda case, pattern: not pattern.numbers["one_right"]),
    Cause("no_gradient", (ZERO_ALL,), "this parameter has no gradient: it is zero",
          "a parameter that is not used, is detached or frozen, or whose gradient is not copied back",
          kinds("grad", "clip")),
    Cause("no_backward", (ZERO_ALL,), "no gradient flows through this module: it is zero",
          "`detach`, `torch.no_grad`, a collective without a backward", kinds("bwd")),
    Cause("no_head_computed", (ZERO_ALL,), "no head was computed: all are zero",
          "a local number of heads that is divided by the number of ranks once more",
          lambda case, pattern: case.name.kind == "fwd" and "head" in case.axes),
    Cause("never_written", (ZERO_ALL,), "this value was never written: it is zero",
          "a buffer that is cleared and whose producer does not run; a weight that is not loaded",
          lambda case, pattern: case.name.kind not in ("m", "v") or case.beside(case.name.with_kind("grad")) is None),
    Cause("sequence_floored", (ZERO_ROWS,), "the last tokens have nothing: {first} is {extent} rounded down to a "
          "multiple of twice the context-parallel ranks", "pad the sequence, or refuse its length", _floored),
    Cause("divided_twice", (ZERO_TAIL,), _TAIL +
          ": {cut} is {extent} / {n}, so a local size was divided by the ranks twice",
          "`num_heads // tp` of a number that is local already", has(twice=True)),
    Cause("shard_tail_missing", (ZERO_TAIL,), _TAIL, "a size that is rounded down, or a loop that ends early"),
    Cause("ids_of_other_shards", (ZERO_ROWS,),
          "{rows} of {extent} {noun} are zero as a whole, all others are right: ids whose rows another rank holds",
          "the all-reduce after an embedding whose vocabulary is sharded, and the range of ids of a rank",
          lambda case, pattern: pattern.numbers["axis"] != "feature" and looked_up(case)),
    Cause("no_gradient", (ZERO_ROWS,), "{rows} of {extent} {noun} have no gradient, all others are right, and what the "
          "module passes back is wrong: a part of its output got no gradient", "`detach`, `torch.no_grad` or an "
          "in-place write of a part of what the module gives", _part_detached),
    Cause("block_not_written", (ZERO_ROWS,),
          "the {noun} {first} to {end} (exclusive) of {extent} are zero, all others are right",
          "a part that is not sent, gathered or computed; a size that is rounded down",
          every(has(block=True), _not_of_loss, _of_tensor)),
    Cause("rows_left_out", (ZERO_ROWS,), "{rows} of {extent} {noun} are zero as a whole, all others are right",
          "what a mask, an index or a loop leaves out", every(_not_of_loss, _of_tensor)),
    Cause("block_not_written", (ZERO_BLOCK,),
          "a block of zeros: the {wrong} different elements are zero and make up one block",
          "a part that is not sent, gathered or computed; a size that is rounded down",
          every(_not_of_loss, _of_tensor)),
    Cause("partly_written", (ZERO_SOME,), "{wrong} of {all} elements are zero, and those around them are right",
          "what is added or copied in parts",
          lambda case, pattern: case.name.kind not in ("grad", "bwd") and pattern.numbers["wrong"] > 8),
    Cause("no_gradient", (ZERO_SOME,), "{wrong} of {all} elements have no gradient, and those around them are right",
          "a part of the parameter that is detached or not used",
          lambda case, pattern: case.name.kind == "grad" and pattern.numbers["wrong"] > 8),
    Cause("not_a_number", (NAN,), "{nan} of the {wrong} different values are not finite",
          "memory that is read before it is written, an overflow, 0/0 in a row that is masked altogether"),
    Cause("never_written", (UNWRITTEN,),
          "the reference is zero here, where nothing came: {wrong} elements hold what the memory held before",
          "`torch.empty` for gradients; a product over no rows writes nothing", kinds("grad")),
    Cause("ids_of_nobody", (FILLED,),
          "the last {left} of {extent} ids are {value}: {extent} over {shards} ranks, rounded down, leaves them out",
          "pad the vocabulary and mask it, or cut unevenly",
          every(activation, has(beyond=True, shards=lambda n: n > 0))),
    Cause("filled", (FILLED,),
          "all {wrong} different elements are {value}, which is larger than all of the reference",
          "the fill of a mask or of padding that is used", has(beyond=True)),
    Cause("two_exchanged", (EXCHANGED,), "two elements are exchanged: {places}", "indices of single elements"),
    Cause("bit_flipped", (BIT,), "bit {bit} of one element is flipped: {ref} is {val} at {places}",
          "memory or storage, not arithmetic"),
    Cause("few_elements", (FEW,), "only {all}: {places}, where {ref} is {val}", "a write to a wrong place",
          has(large=True)),
    Cause("halo_missing", (BORDERS,),
          "all that differs is up to {before} {noun} before and {behind} behind the borders of {n} ranks' parts",
          "the exchange of edges before convolutions, windows and shifts"),
)
