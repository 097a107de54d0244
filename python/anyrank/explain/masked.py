# SPDX-License-Identifier: Apache-2.0
"""Which elements differ, as a set: zeros, dropout's masks, one value or NaN in place of values, single elements.

A set alone (one rank's part, tokens from some position on) is a pattern without a cause.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, activation, every, has, kinds
from anyrank.explain.known import earlier, listed
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay.attention import documents
from anyrank.explain.scaled import starts_right
from anyrank.explain.tensors import Array, Case, Name, looked_up
from anyrank.explain.words import counted, ranks_of

ZERO_ALL, ZERO_RANKS, ZERO_TAIL, ZERO_ROWS, ZERO_BLOCK, ZERO_SOME = (
    "zero", "zero_ranks", "zero_tail", "zero_rows", "zero_block", "zero_some")
DROPPED, MASK, DOCUMENTS, CARRIED = "dropped", "mask", "starts_of_documents", "carried"
FILLED, NAN, FEW, BORDERS, PLACE, UNWRITTEN = "one_value", "not_finite", "few", "borders", "place", "unwritten"
LEAST = 8  # elements of one value that are no accident
MOST_FEW = 4  # elements that differ by accident of memory
LEAST_MASK, MOST_DROPPED = 16, 0.6  # scattered zeros that are a mask; share of values that it leaves out at most
NOUNS = {"batch": "samples", "token": "tokens", "head": "heads", "feature": "features", "out": "rows", "in": "columns",
         "vocab": "ids", "expert": "experts"}
Numbers = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Wrong:
    """The boxes of copies that differ somewhere, with which of their elements do. parts: (copy, box)."""

    case: Case
    parts: dict[tuple[int, int], Array]

    @classmethod
    def of(cls, case: Case) -> Wrong:
        return cls(case, {(i, k): off for i, copy in enumerate(case.copies) for k, box in enumerate(copy.boxes)
                          if (off := case.stands_out(copy.values[k], box)).any()})

    def values(self) -> typing.Iterator[tuple[Array, Array, Array]]:
        """(reference, value, differs) of each box."""
        for (i, k), off in self.parts.items():
            copy = self.case.copies[i]
            yield self.case.ref[copy.boxes[k]], copy.values[k].astype(np.float64), off

    @functools.cached_property
    def joined(self) -> tuple[Array, Array, Array]:
        """The same of all boxes, in a row."""
        ref, val, off = zip(*([x.ravel() for x in row] for row in self.values()))
        return np.concatenate(ref), np.concatenate(val), np.concatenate(off)

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

    def zero(self, mask: Array) -> list[list[Array]]:
        """Zeros at the places of a mask of the full tensor."""
        parts = self.expect(lambda ref, val, off: ref)
        for i, k in self.parts:
            parts[i][k] = np.where(mask[self.case.copies[i].boxes[k]], 0.0, parts[i][k])
        return parts

    def own(self) -> list[list[Array]]:
        return self.expect(lambda ref, val, off: np.where(off, val, ref))


# --- zeros ------------------------------------------------------------------------------------------------------------


def _hits(off: Array) -> list[Array]:
    """Of each axis the indices at which something differs."""
    return [np.flatnonzero(off.any(axis=tuple(a for a in range(off.ndim) if a != axis))) for axis in range(off.ndim)]


def _is_span(hits: Array) -> bool:
    """Whether these indices fill a range, but for a tenth."""
    return bool(10 * len(hits) >= 9 * (hits[-1] + 1 - hits[0]))


def _tail(case: Case, axis: int, hits: Array) -> str:
    """What is said of the last part of each of n shards along an axis, and no more; ""."""
    extent = case.shape[axis]
    for n in [n for a, n in case.cuts if a == axis] or case.runs.group_sizes or range(2, 17):
        size = extent // n
        cut = size - len(hits) // n
        if extent % n == 0 and len(hits) % n == 0 and size > 1 and 0 < cut < size and np.array_equal(
                hits, np.add.outer(np.arange(n) * size, np.arange(cut, size)).ravel()):
            twice = f": {cut} is {size} / {n}, so a local size was divided by the ranks twice"
            return (f"of each of {n} shards only the first {cut} of {size} {_noun(case, axis)} are there, and the rest "
                    f"is zero{twice if cut * n == size or size % n > 0 and cut == size // n else ''}")
    return ""


def _noun(case: Case, axis: int) -> str:
    return NOUNS.get(case.axes[axis], f"slices of dimension {axis}")


def are_by_value(ref: Array, zero: Array) -> bool:
    """Whether zeros are where the reference is below, or above, some value: a clamp, an activation or underflow."""
    some, others = ref[zero], ref[~zero & (ref != 0.0)]
    return bool(some.size and others.size) and any(
        x.max() < y.min() or x.min() > y.max() for x, y in ((some, others), (np.abs(some), np.abs(others))))


def _zeros(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    ref, val, off = wrong.joined
    count, all_of_it = int(case.seen.sum()), case.reference.size
    if val[off].any() or not count or case.reference.dtype.kind != "f":  # zero is a number as others among integers
        return
    if not val.any():
        one_right = len({i for i, _ in wrong.parts}) == len(case.copies) - 1 and all(
            copy.boxes == case.copies[0].boxes for copy in case.copies)
        yield Pattern(ZERO_ALL if wrong.of_all else ZERO_RANKS, wrong.expect(lambda ref, val, off: 0.0 * val), {
            "ranks": ranks_of(wrong.ranks), "one_right": one_right, "wrong_ranks": wrong.ranks})
        return
    if count >= MOST_FEW and are_by_value(ref, off):
        return
    hits = _hits(case.seen)
    mask: Array = np.zeros(case.shape, bool)
    mask[np.ix_(*hits)] = True
    cut = [axis for axis, at in enumerate(hits) if len(at) < case.shape[axis]]
    filled = count >= 0.25 * mask.sum()
    if len(cut) == 1 and filled and (case.seen.ndim > 1 or _is_span(hits[0])):
        axis, at = cut[0], hits[cut[0]]
        first, extent, noun = int(at[0]), case.shape[axis], _noun(case, axis)
        if tail := _tail(case, axis, at):
            yield Pattern(ZERO_TAIL, wrong.zero(mask), {"how": tail})
        elif case.axes[axis] == "token" and int(at[-1]) + 1 == extent and len(at) > 1 and any(
                first == extent // (2 * n) * (2 * n) for n in case.runs.group_sizes):
            yield Pattern(ZERO_TAIL, wrong.zero(mask), {
                "how": f"the last tokens have nothing: {first} is {extent} rounded down to a multiple of twice the "
                "context-parallel ranks"})
        how = (f"the {noun} {first} to {int(at[-1]) + 1} (exclusive) of {extent}" if len(at) > 1 and _is_span(at)
               else f"{len(at)} of {extent} {noun}")
        yield Pattern(ZERO_ROWS, wrong.zero(mask), {"how": how, "axis": case.axes[axis]})
    elif cut and filled and all(map(_is_span, hits)):
        yield Pattern(ZERO_BLOCK, wrong.zero(mask), {"how": f"{count} elements, which make up one block,"})
    rows = np.asarray(case.seen.any(axis=-1))
    if case.seen.ndim > 2 and not rows.all():  # whole rows of all leading dimensions
        noun = "tokens" if "token" in case.axes else "rows"
        yield Pattern(ZERO_ROWS, wrong.zero(np.broadcast_to(rows[..., None], case.shape)), {
            "how": f"{int(rows.sum())} of {rows.size} {noun}", "axis": noun})
    if count > LEAST:
        yield Pattern(ZERO_SOME, wrong.expect(lambda ref, val, off: np.where(off, 0.0, ref)), {
            "how": f"{count} of {all_of_it} elements"}, fitted=1)


# --- dropout ----------------------------------------------------------------------------------------------------------


def _is_scattered(zero: Array, alive: Array) -> bool:
    """Whether the elements that became zero are spread over those that were not as chance does, along every axis."""
    share = float(zero.sum()) / max(1, int(alive.sum()))
    for axis in range(zero.ndim):
        others = tuple(a for a in range(zero.ndim) if a != axis)
        counts, room = zero.sum(axis=others), alive.sum(axis=others)
        counts, room = counts[room > 0], room[room > 0]
        apart = float((((counts - room * share) ** 2) / (room * share * (1.0 - share) + 1e-300)).sum())  # chi squared
        even = len(counts) >= LEAST_MASK and int(room.min()) >= LEAST_MASK and apart < len(counts) / 4
        if even or apart > 2.0 * len(counts) + 20.0:
            return False
    return True


def _dropout(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    """Zeros where the reference has none, and the other way round; what neither drops has one factor."""
    ref, val, off = wrong.joined
    lost, gained = off & (val == 0.0) & (ref != 0.0), off & (ref == 0.0) & (val != 0.0)
    kept = (ref != 0.0) & (val != 0.0) & np.isfinite(val)
    if case.reference.dtype.kind != "f" or kept.sum() < LEAST_MASK or not (
            LEAST_MASK <= lost.sum() <= MOST_DROPPED * (ref != 0.0).sum()) or not all(
            _is_scattered((v == 0.0) & (r != 0.0), r != 0.0) for r, v, _ in wrong.values()) or are_by_value(ref, lost):
        return
    factor = float((ref[kept] * val[kept]).sum() / (ref[kept] ** 2).sum())
    factor = 1.0 if abs(factor - 1.0) < 1e-5 + case.rtol / 4.0 else factor
    shares = [float((x != 0.0).mean()) for x in (ref, val)]
    numbers: Numbers = {
        "lost": int(lost.sum()), "gained": int(gained.sum()), "factor": factor, "kept": shares[1],
        "percent": 100.0 * lost.sum() / max(1, int((ref != 0.0).sum())),
        "ranks": "" if wrong.of_all else f" on {ranks_of(wrong.ranks)}"}
    if not gained.any():
        scaled = factor > 1.0 and abs(factor * shares[1] / shares[0] - 1.0) <= 5.0 / math.sqrt(kept.sum())
        yield Pattern(DROPPED, wrong.expect(lambda r, v, o: np.where(v == 0.0, 0.0, factor * r)), {
            **numbers, "scaled": scaled, "p": 1.0 - 1.0 / factor}, fitted=int(factor != 1.0))
    elif min(lost.sum(), gained.sum()) * 20 >= off.sum() or factor != 1.0:
        rate = factor != 1.0 and abs(factor * shares[1] / shares[0] - 1.0) < 0.05
        yield Pattern(MASK, wrong.expect(lambda r, v, o: np.where((v == 0.0) | (r == 0.0), v, factor * r)), {
            **numbers, "rate": rate, "whose": _whose_mask(case)}, fitted=3)


def _whose_mask(case: Case) -> str:
    """Whether copies of one part have other masks, parts have one mask, or another tensor of the reference has it."""
    masks: dict[str, list[tuple[Array, Array]]] = {}
    for copy in case.copies:
        for box, values in zip(copy.boxes, copy.values):
            masks.setdefault(str(box), []).append((values == 0, case.reference[box] == 0))
    if any(not np.array_equal(mine, other[0][0]) for other in masks.values() for mine, _ in other):
        return "the copies of one value have different masks"
    parts = [some[0] for some in masks.values()]
    if len(parts) > 1 and all(np.array_equal(x, parts[0][0]) for x, _ in parts) and not all(
            np.array_equal(y, parts[0][1]) for _, y in parts):
        return f"all {len(parts)} parts have the same mask, that of an element's index in its part"
    zero = case.other == 0
    layer = next((text for text in case.runs.reference if (own := Name.of(text)).kind == case.name.kind
                  and own.stem != case.name.stem and (x := case.runs.reference[text]).shape == zero.shape
                  and np.array_equal(x == 0, zero)), "another seed, step or layer")
    return f"it is the mask of {layer}"


# --- one value, no value ----------------------------------------------------------------------------------------------


def _values(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    ref, val, off = wrong.joined
    count, last = int(off.sum()), _hits(case.seen)[-1]
    idle = case.axes[:1] == ("expert",) and not case.ref[case.seen.reshape(len(case.seen), -1).any(axis=1)].any()
    if (idle or not ref.any()) and np.isfinite(val).all():
        yield Pattern(UNWRITTEN, wrong.own(), {"wrong": count}, fitted=6)
    value, extent = float(val[off][0]), case.shape[-1]
    lost = off & ~np.isfinite(val) & np.isfinite(ref)
    if np.isnan(val[lost]).any():
        yield Pattern(NAN, wrong.expect(lambda ref, val, off: val), {"nan": int(lost.sum()), "wrong": count},
                      1 if lost.sum() == count else 6)
    elif count >= LEAST and value != 0.0 and (val[off] == value).all() and abs(value) > case.scale and count < off.size:
        over = next((n for n in case.runs.group_sizes or range(2, 17)
                     if len(last) == extent % n and len(last) == extent - int(last[0])), 0)
        yield Pattern(FILLED, wrong.expect(lambda ref, val, off: np.where(off, value, ref)), {
            "value": value, "wrong": count, "over": over, "how": f"the last {len(last)} of {extent} ids are {value:.4g}"
            f": {extent} over {over} ranks, rounded down, leaves them out"}, fitted=2)


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
    how, trials = "", 64
    if (np.abs(val - ref) > 0.1 * case.scale).all():
        how = f"only {counted(len(at), 'element', ('differs', 'differ'))}: {places}, where {ref[0]:.4g} is {val[0]:.4g}"
    if len(at) == 2 and (np.abs(val[::-1] - ref) <= case.rounding(ref)).all():
        how, trials = f"two elements are exchanged: {places}", 1
    if len(at) == 1 and case.reference.dtype == np.float32 and not ref[0].is_integer():  # counts are no bits
        bits = int(np.float32(ref[0]).view(np.uint32)) ^ int(np.float32(val[0]).view(np.uint32))
        if bits and bits & (bits - 1) == 0:
            how = f"bit {bits.bit_length() - 1} of one element is flipped: {ref[0]:.4g} is {val[0]:.4g} at {places}"
            trials = 32
    yield Pattern(FEW, wrong.own(), {"how": how}, min(1, len(at) - 1), trials)  # of their values it says nothing


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


def _documents(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    """All that differs is the first tokens of documents that begin within a row, each of them."""
    if case.axes[:2] != ("batch", "token") or not _is_sharp(case):
        return
    off = np.asarray(case.seen.reshape(*case.shape[:2], -1).any(axis=2))
    for name in (name for name in earlier(case) if name in case.runs.same):
        values = case.runs.reference[name]
        starts = documents(values) if values.dtype.kind in "iu" and values.shape == off.shape else None
        if starts is not None and not off[starts == 0].any():
            since = (np.arange(off.shape[1]) - starts)[starts > 0]
            reach = int(since[off[starts > 0]].max()) + 1
            if off[starts > 0][since == 0].all() and (since >= reach).any():
                yield Pattern(DOCUMENTS, wrong.own(), {"reach": reach, "name": name}, fitted=5)


def _carried(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    """Parts of the tokens on ranks, of which all but the first two differ, most at their first token, then less."""
    axis = case.axes.index("token") if "token" in case.axes else -1
    n = dict(case.cuts).get(axis, 0)
    if case.name.kind != "fwd" or n < 4 or case.shape[axis] < 4 * n:
        return
    size = np.moveaxis(np.where(case.seen, case.val - case.ref, 0.0) ** 2, axis, 0).reshape(case.shape[axis], -1).sum(1)
    parts = [[float(some.mean()) for some in np.array_split(part, 4)] for part in np.array_split(size, n)]
    if not np.any(parts[:2]) and np.all(np.diff(np.array(parts[2:])) < 0.0):
        yield Pattern(CARRIED, wrong.own(), {"n": n}, fitted=5)


def _places(case: Case, wrong: Wrong) -> typing.Iterator[Pattern]:
    """Which ranks' parts differ and, of each dimension, where in them: what it looks like."""
    said = []
    for axis in range(case.ref.ndim):
        hits = sorted({tuple(_hits(off)[axis].tolist()) for off in wrong.parts.values()})
        size = next(iter(wrong.parts.values())).shape[axis]
        if len(hits) <= 2 and min(map(len, hits)) < size:
            spans = (f"{x[0]} to {x[-1]}" if len(x) > 1 and _is_span(np.array(x)) else listed(x, 6) for x in hits)
            said.append(f"{_noun(case, axis)} {' or '.join(spans)} of {size}")
    there, whose = " and ".join(said), " in each rank's part" * (len(wrong.parts) > 1)
    if not wrong.of_all:
        has = "has" if len(wrong.ranks) == 1 else "have"
        there = f"what {ranks_of(wrong.ranks)} {has} differs{f', there {there}' if said else ''}"
    if said or not wrong.of_all:
        yield Pattern(PLACE, wrong.own(), {"text": f"only {there}{f' differ{whose}' * wrong.of_all}"}, fitted=9)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    wrong = Wrong.of(case)
    ways = (_dropout, _zeros, _values, _few, _borders, _documents, _carried, _places)
    for found in ways if wrong.parts and case.reference.ndim else ():
        yield from found(case, wrong)


# --- causes -----------------------------------------------------------------------------------------------------------


def _first_group(case: Case, pattern: Pattern) -> bool:
    """Whether the right ranks are the first group of the innermost dimension, and rows are looked up by ids."""
    inner = list(case.runs.mesh.values())[-1:] or [1]
    ranks = {copy.rank or 0 for copy in case.copies}
    right = ranks - set(pattern.numbers["wrong_ranks"])
    return any(right == set(range(n)) and len(ranks) >= 2 * n for n in (inner[0], 1)) and looked_up(case)


def _part_detached(case: Case, pattern: Pattern) -> bool:
    """Whether the gradient that the parameter's module passes back differs as well."""
    back = str(Name(case.name.module, "bwd", case.name.step))
    return case.name.kind == "grad" and back in case.runs.other and back in case.runs.reference and (
        back not in case.runs.same)


def _of_tensor(case: Case, pattern: Pattern) -> bool:
    """Whether zeros are missing in the tensor itself: of the first gradient, tokens without one are no targets."""
    return case.name.kind != "bwd" or starts_right(case)


def _begins(case: Case, pattern: Pattern) -> bool:
    """Whether an activation of the first step of a run that began before is zero, and not in the step after it."""
    then = case.runs.other.get(case.name.with_kind("fwd", case.name.step + 1))
    names = [(name, Name.of(name)) for name in case.runs.reference]
    loaded = all(name in case.runs.same for name, own in names if (own.kind, own.step) == ("new", case.name.step - 1))
    return loaded and case.name.kind == "fwd" and then is not None and bool(np.any(then)) and 1 < case.name.step == min(
        own.step for _, own in names if own.kind == "fwd")


def _written(case: Case, pattern: Pattern) -> bool:
    return case.name.kind not in ("m", "v") or case.beside(case.name.with_kind("grad")) is None


_SEEDS = ("seeds of dropout: one for replicated regions, one for each rank of a sharded region; layers that are "
          "counted from 0 in each stage, one stream of random numbers for several layers")
_DROP = "`model.eval()` against `model.train()`; p"
_DETACHED = "`detach`, `torch.no_grad`, an in-place write, or a part that is not used or not copied back"
_BLOCK = Cause("block_not_written", (ZERO_ROWS, ZERO_BLOCK), "{how} are zero, and all others are right",
               "what a mask, an index or a loop leaves out; a part that is not sent, gathered or computed", _of_tensor)
CAUSES = (
    Cause("dropout_without_scale", (DROPPED,), "{lost} elements ({percent} %), anywhere{ranks}, are zero, and all "
          "others are right: a mask of dropout without its scale 1/(1-p)", "the scale of the dropout",
          every(activation, has(factor=1.0))),
    Cause("dropout", (DROPPED,), "{lost} elements ({percent} %), anywhere{ranks}, are zero, and all others are "
          "{factor} times the reference: dropout with p = {p}, which the reference does not have", _DROP,
          every(activation, has(scaled=True))),
    Cause("dropout", (MASK,), "dropout with another rate{ranks}: {kept} of the values are kept, and what both keep "
          "is {factor} times the reference", _DROP, has(rate=True)),
    Cause("dropout_mask", (MASK,), "another mask{ranks}: {lost} values are zero where the reference is not, {gained} "
          "the other way round, all others are right; {whose}", _SEEDS, every(activation, has(factor=1.0))),
    Cause("world_rank_in_group", (ZERO_RANKS,), "zeros from {ranks}: the rank in the world was used where the rank "
          "in the group belongs, so no rank has their ids", "`dist.get_rank()` where `get_rank(group)` belongs",
          _first_group),
    Cause("zeros_of_ranks", (ZERO_RANKS,), "zeros from {ranks} alone", "work that these ranks skip: parameters "
          "without use, `no_sync`, an empty micro-batch; a buffer that is not copied back", has(one_right=False)),
    Cause("no_gradient", (ZERO_ALL,), "this parameter has no gradient: it is zero", _DETACHED, kinds("grad", "clip")),
    Cause("no_backward", (ZERO_ALL,), "no gradient flows through this module: it is zero",
          "`detach`, `torch.no_grad`, a collective without a backward", kinds("bwd")),
    Cause("state_not_resumed", (ZERO_ALL,), "zero in this step, the first recorded, and not in the next: what a step "
          "leaves to the next one begins anew", "what a checkpoint has besides weights and the optimizer's state: "
          "recurrent states, caches, buffers that are not persistent", _begins),
    Cause("never_written", (ZERO_ALL,), "this value was never written: it is zero", "a buffer that is cleared and "
          "whose producer does not run; a weight that is not loaded; a number of heads that is 0", _written),
    Cause("size_rounded_down", (ZERO_TAIL,), "{how}", "a size that is rounded down or divided by the ranks twice "
          "(`num_heads // tp` of a number that is local already), a loop that ends early"),
    Cause("ids_of_other_shards", (ZERO_ROWS,), "{how} are zero as a whole, all others are right: ids whose rows "
          "another rank holds", "the all-reduce after an embedding whose vocabulary is sharded, and the range of ids "
          "of a rank", lambda case, pattern: pattern.numbers["axis"] != "feature" and looked_up(case)),
    Cause("no_gradient", (ZERO_ROWS,), "{how} have no gradient, all others are right, and what the module passes back "
          "is wrong: a part of its output got no gradient", _DETACHED, _part_detached),
    _BLOCK,
    dataclasses.replace(_BLOCK, kinds=(ZERO_SOME,), when=lambda case, pattern: case.name.kind not in ("grad", "bwd")),
    Cause("no_gradient", (ZERO_SOME,), "{how} have no gradient, and those around them are right", _DETACHED,
          kinds("grad")),
    Cause("not_a_number", (NAN,), "{nan} of the {wrong} different values are not finite",
          "memory that is read before it is written, an overflow, 0/0 in a row that is masked altogether"),
    Cause("never_written", (UNWRITTEN,), "the reference is zero here, where nothing came: {wrong} elements hold what "
          "the memory held before", "`torch.empty` for gradients; a product over no rows writes nothing",
          kinds("grad")),
    Cause("size_rounded_down", (FILLED,), "{how}", "pad the vocabulary and mask it, or cut unevenly",
          every(activation, has(over=lambda n: n > 0))),
    Cause("filled", (FILLED,), "all {wrong} different elements are {value}, which is larger than all of the reference",
          "the fill of a mask or of padding that is used"),
    Cause("few_elements", (FEW,), "{how}", "memory or storage, a write to a wrong place, indices of single elements",
          has(how=bool)),
    Cause("halo_missing", (BORDERS,),
          "all that differs is up to {before} {noun} before and {behind} behind the borders of {n} ranks' parts: the "
          "gradients of edges that a rank had from its neighbour do not come back to it, and are not added",
          "the backward pass of the exchange of edges: as all that a rank sends forward, its gradient comes back",
          kinds("bwd", "grad")),
    Cause("halo_missing", (BORDERS,),
          "all that differs is up to {before} {noun} before and {behind} behind the borders of {n} ranks' parts",
          "the exchange of edges before convolutions, windows and shifts"),
    Cause("document_boundaries", (DOCUMENTS,), "all that differs is the first {reach} tokens of each document that "
          "begins within a row ({name}): what stands before it in its row reaches into it", "convolutions, shifts and "
          "states over tokens: whether they end, or are set back, where a document begins"),
    Cause("carried_state", (CARRIED,), "the first 2 of {n} ranks' parts of the tokens are right, the others off most "
          "at their first token: what comes from the part before is right, what comes from further back is not",
          "the state that a rank hands on: its own, and what was handed to it times the product of its decays"),
)
