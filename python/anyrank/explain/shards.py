# SPDX-License-Identifier: Apache-2.0
"""Ranks' parts that are other parts of the reference: shards at the wrong ranks, packed tensors cut as one."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, activation, every, has, kinds, parameter
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import LEAST, near, projections
from anyrank.explain.tensors import Case, positional

SHARDS, CUT_AS_ONE = "shards", "cut_as_one"
Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A box of a rank, and the number of the box whose values it has."""

    rank: int
    box: int
    source: int


def _key(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in box)


def _boxes(case: Case) -> list[Box]:
    """Different boxes of all copies."""
    return list({_key(box): box for copy in case.copies for box in copy.boxes}.values())


def _parts(case: Case, boxes: list[Box]) -> list[list[Part]] | None:
    """Of each copy's boxes whose values they are; None: of some nobody's."""
    number = {_key(box): i for i, box in enumerate(boxes)}
    shapes = [case.reference[box].shape for box in boxes]
    known = np.concatenate([projections(case.ref[box], 1, 1, math.prod(shape)) for box, shape in zip(boxes, shapes)])
    varied = [np.ptp(case.ref[box]) > 0.0 for box in boxes]
    found = []
    for copy in case.copies:
        row = []
        for box, values in zip(copy.boxes, copy.values):
            own = source = number[_key(box)]
            if case.stands_out(values, box).any():
                asked = projections(values.astype(np.float64), 1, 1, values.size)[0]
                apart = np.abs(known - asked).max(axis=1)
                apart[[not v or s != values.shape for v, s in zip(varied, shapes)]] = math.inf
                source = int(apart.argmin())
                if apart[source] > 2.0 * near(case) * math.sqrt(values.size):
                    return None
            row.append(Part(copy.rank or 0, own, source))
        found.append(row)
    return found


def _ranks_along(case: Case) -> typing.Iterator[tuple[str, int, int]]:
    """(dimension, stride, size) of the mesh, and of all ranks as one."""
    stride = 1
    for name, n in reversed([*case.runs.mesh.items()]):
        yield name, stride, n
        stride *= n
    yield "", 1, max(c.rank or 0 for c in case.copies) + 1


def _rule_of(case: Case, parts: list[Part], by_rank: bool) -> dict[str, typing.Any]:
    """By what rule a rank has another rank's part: "one" for all, "modulo", "next" ranks', "repeated"; "": another."""
    if len({p.source for p in parts}) == 1 and len(parts) > 1:
        return {"rule": "one", "along": ""}
    of_rank = {p.rank: p for p in parts} if by_rank else {}
    count = len({p.box for p in parts})
    for name, stride, n in _ranks_along(case):
        if of_rank and 2 <= count < n and all(p.source == p.rank // stride % n % count for p in parts):
            return {"rule": "modulo", "along": name, "of": n, "count": count}
        for by in range(1, n if of_rank else 0):
            there = {r: r + ((r // stride % n + by) % n - r // stride % n) * stride for r in of_rank}
            if all(there[r] in of_rank and of_rank[there[r]].box == p.source for r, p in of_rank.items()):
                return {"rule": "next", "along": name and f" along {name}", "by": by, "of": n}
    right = {p.box for p in parts if p.box == p.source}
    return {"rule": "repeated" if any(p.source in right for p in parts if p.source != p.box) else "", "along": ""}


def _shards(case: Case) -> typing.Iterator[Pattern]:
    """Each rank's part is a part of the reference, of some another rank's."""
    boxes = _boxes(case)
    if len(boxes) < 2 or case.seen.sum() < LEAST // 2 or (found := _parts(case, boxes)) is None:
        return
    parts = [part for row in found for part in row]
    moved = [p for p in parts if p.source != p.box]
    if not moved:
        return
    owner = {p.box: p.rank for p in reversed(parts)}
    rows: dict[int, list[Part]] = {}
    for part in sorted(parts, key=lambda p: _key(boxes[p.box])):
        rows.setdefault(part.rank, []).append(part)
    place = {p.box: k for row in rows.values() for k, p in enumerate(row)}
    mixed = any(place[p.source] != k for row in rows.values() for k, p in enumerate(row))
    firsts = [row[0] for row in rows.values()]
    by_rank = not mixed and len({p.rank for p in firsts}) == len(firsts)
    pairs = ", ".join(f"rank {p.rank} has rank {owner[p.source]}'s" for p in moved[:4])
    varies = {axis for axis in range(len(case.shape)) if len({box[axis].start for box in boxes}) > 1}
    numbers = {"pairs": pairs, "axis": case.axes[min(varies)] if len(varies) == 1 else "", "mixed": mixed,
               "first": moved[0].box, "other": moved[0].source,
               "same_rank": all(p.rank == owner[p.source] for p in moved),
               **_rule_of(case, firsts, by_rank)}
    yield Pattern(SHARDS, [[case.ref[boxes[p.source]] for p in row] for row in found], numbers)


def _cut_as_one(case: Case) -> typing.Iterator[Pattern]:
    """Weights that were packed one after the other and cut into n blocks at once, each taken for a block of every
    part: the tensor and its neighbours of the same width, in the dump's order."""
    name, shape = case.name, case.shape
    if case.activation or len(shape) != 2:
        return
    layer = name.module.rpartition(".")[0]
    end = f".{name.stem.rpartition('.')[2]}{str(name)[len(name.stem):]}"
    names = [text for text in case.runs.reference if text.startswith(f"{layer}.") and text.endswith(end)
             and case.runs.reference[text].shape[1:] == shape[1:]]
    for count in (2, 3):
        for i in range(len(names) - count + 1):
            some = names[i: i + count]
            if str(name) not in some:
                continue
            arrays = [case.ref if text == str(name) else case.runs.reference[text].astype(np.float64) for text in some]
            packed, k = np.concatenate(arrays), some.index(str(name))
            start = sum(len(a) for a in arrays[:k])
            for n in case.runs.group_sizes or (2, 3, 4, 8):
                if any(len(a) % n for a in arrays):
                    continue
                rows = np.concatenate([np.arange(shape[0] // n) + (r * len(packed) + start) // n for r in range(n)])
                if np.allclose(packed[rows, :1], case.val[:, :1], rtol=0.0, atol=near(case)):
                    yield Pattern(CUT_AS_ONE, packed[rows], {"n": n, "names": ", ".join(some)})


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.seen.any():
        yield from _shards(case)
        yield from _cut_as_one(case)


# --- causes -----------------------------------------------------------------------------------------------------------


_SAMPLES = every(activation, has(axis="batch"))
_POSITIONS = "position ids; where a rank's part of the sequence starts; padding on the left"
_ORDER = "samplers, shuffling, the order of data-parallel ranks and of micro-batches"
_SHARD = "the group that a rank is taken from; the dimensions of a `DeviceMesh`"
_RANKS = "the slice of the batch that a rank takes; `DistributedSampler` with its rank and its set_epoch"

CAUSES = (
    Cause("positions", (SHARDS,), "each rank counts positions from the start of its own part: {pairs}", _POSITIONS,
          lambda case, pattern: positional(case)),
    Cause("input_of_other_micro_batch", (SHARDS,),
          "a micro-batch has the values of another one: part {first} is part {other}",
          "buffers that are used again, or read before a transfer has ended", every(_SAMPLES, has(same_rank=True))),
    Cause("world_rank_in_group", (SHARDS,), "samples by the rank in the world: rank r has part r mod {count} of the "
          "batch, not floor(r * {count} / {of}): {pairs}",
          "ranks that share a layer need the samples of their data-parallel rank",
          every(_SAMPLES, has(rule="modulo"))),
    Cause("same_samples", (SHARDS,), "ranks worked on the same samples: {pairs}", _RANKS,
          every(_SAMPLES, has(rule=("one", "repeated")))),
    Cause("batch_order", (SHARDS,), "the samples are on other ranks: {pairs}", _ORDER, _SAMPLES),
    Cause("zigzag_order", (SHARDS,), "the chunks of a zigzag are in another order: {pairs}; of N context-parallel "
          "ranks rank r has the chunks r and 2N-1-r", "how the sequence is cut for balanced ring attention",
          has(axis="token", mixed=True)),
    Cause("packed_cut_as_one", (SHARDS,), "a packed tensor (q|k|v, gate|up) was cut as one block: {pairs}",
          "split each part on its own, then concatenate a rank's shares", has(mixed=True)),
    Cause("wrong_kv_head", (SHARDS,), "rank r has part r mod {count}, not floor(r * {count} / {of}): {pairs}",
          "which KV head a rank takes where ranks share one", every(parameter, has(rule="modulo"))),
    Cause("world_rank_in_group", (SHARDS,),
          "the rank in the world chose the part: rank r has part r mod {count}: {pairs}",
          "`dist.get_rank()` where `get_rank(group)` belongs", has(rule="modulo")),
    Cause("shards_seeded_alike", (SHARDS,), "every shard has the same initial values: {pairs}",
          "the seed of a sharded parameter has to depend on the rank; a broadcast over ranks of other shards",
          every(kinds("init"), has(rule="one"))),
    Cause("one_shard_on_all_ranks", (SHARDS,), "every rank worked on one shard: {pairs}",
          "the rank by which the shard is chosen", has(rule="one")),
    Cause("shard_repeated", (SHARDS,), "a shard stands at another rank's place too: {pairs}",
          "a shard that was loaded or sent twice, or a chunk that was read before it came", has(rule="repeated")),
    Cause("shards_rotated", (SHARDS,), "rank r has the shard of rank r + {by} modulo {of}{along}: {pairs}", _SHARD,
          has(rule="next")),
    Cause("shards_misplaced", (SHARDS,), "shards are at the wrong ranks: {pairs}", _SHARD),
    Cause("packed_cut_as_one", (CUT_AS_ONE,), "{names} are packed one after the other and cut in {n} blocks as one",
          "split each part on its own, then concatenate a rank's shares"),
)
