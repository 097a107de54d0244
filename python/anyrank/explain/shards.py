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
Key = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A box of a rank, and the box whose values it has."""

    rank: int
    box: Key
    source: Key

    @property
    def moved(self) -> bool:
        return self.source != self.box


def _parts(case: Case) -> list[list[Part]]:
    """Of each copy's boxes whose values they are; []: of some nobody's."""
    boxes = {tuple((s.start, s.stop) for s in box): case.ref[box] for copy in case.copies for box in copy.boxes}
    numbers = list(boxes)
    known = np.concatenate([projections(x, 1, 1, x.size) for x in boxes.values()])
    found = []
    for copy in case.copies:
        row = []
        for box, values in zip(copy.boxes, copy.values):
            own = source = tuple((s.start, s.stop) for s in box)
            if case.stands_out(values, box).any():
                asked = projections(values.astype(np.float64), 1, 1, values.size)[0]
                apart = np.abs(known - asked).max(axis=1)
                apart[[x.shape != values.shape or np.ptp(x) == 0.0 for x in boxes.values()]] = math.inf
                source = numbers[int(apart.argmin())]
                if apart.min() > 2.0 * near(case) * math.sqrt(values.size):
                    return []
            row.append(Part(copy.rank or 0, own, source))
        found.append(row)
    return found


def _ranks_along(case: Case) -> typing.Iterator[tuple[str, int, int]]:
    """(dimension, stride, size) of the mesh, and of all ranks as one."""
    stride = 1
    for name, n in reversed([*case.runs.mesh.items()]):
        yield f" along {name}", stride, n
        stride *= n
    yield "", 1, max(c.rank or 0 for c in case.copies) + 1


def _rule_of(case: Case, parts: list[Part], by_rank: bool) -> tuple[str, str]:
    """By what rule a rank has another rank's part, and what is said of it: "one" for all, "modulo", "next" ranks',
    "repeated"; "": another."""
    if len({p.source for p in parts}) == 1 and len(parts) > 1:
        return "one", "all ranks have the same one"
    of_rank = {p.rank: p for p in parts} if by_rank else {}
    boxes = sorted({p.box for p in parts})
    for along, stride, n in _ranks_along(case) if of_rank else ():
        if 2 <= len(boxes) < n and all(p.source == boxes[p.rank // stride % n % len(boxes)] for p in parts):
            return "modulo", f"rank r has part r mod {len(boxes)}, not floor(r * {len(boxes)} / {n})"
        for by in range(1, n):
            there = {r: r + ((r // stride % n + by) % n - r // stride % n) * stride for r in of_rank}
            if all(there[r] in of_rank and of_rank[there[r]].box == p.source for r, p in of_rank.items()):
                return "next", f"rank r has the shard of rank r + {by} modulo {n}{along}"
    right = {p.box for p in parts if not p.moved}
    return ("repeated", "a shard stands at another rank's place too") if any(
        p.source in right for p in parts if p.moved) else ("", "shards are at other ranks")


def _shards(case: Case) -> typing.Iterator[Pattern]:
    """Each rank's part is a part of the reference, of some another rank's."""
    boxes = {str(box): box for copy in case.copies for box in copy.boxes}.values()
    found = _parts(case) if len(boxes) > 1 and case.seen.sum() >= LEAST // 2 else []
    parts = [part for row in found for part in row]
    moved = [p for p in parts if p.moved]
    if not moved:
        return
    owner = {p.box: p.rank for p in reversed(parts)}
    rows: dict[int, list[Part]] = {}
    for part in sorted(parts, key=lambda p: p.box):
        rows.setdefault(part.rank, []).append(part)
    place = {p.box: k for row in rows.values() for k, p in enumerate(row)}
    mixed = any(place[p.source] != k for row in rows.values() for k, p in enumerate(row))
    firsts = [row[0] for row in rows.values()]
    rule, said = _rule_of(case, firsts, not mixed and len({p.rank for p in firsts}) == len(firsts))
    pairs = ", ".join(f"rank {p.rank} has rank {owner[p.source]}'s" for p in moved[:4])
    same_rank = all(p.rank == owner[p.source] for p in moved)
    if same_rank:
        said, pairs = "parts of one rank are at others' places", ", ".join(
            f"part {place[p.box] + 1} has part {place[p.source] + 1}'s" for p in sorted(moved, key=lambda p: p.box)[:4])
    varies = {axis for axis in range(len(case.shape)) if len({box[axis].start for box in boxes}) > 1}
    yield Pattern(SHARDS, [[case.ref[tuple(slice(*s) for s in p.source)] for p in row] for row in found], {
        "how": f"{said}: {pairs}", "rule": rule, "axis": case.axes[min(varies)] if len(varies) == 1 else "",
        "mixed": mixed, "same_rank": same_rank})


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
    for some in (names[i: i + count] for count in (2, 3) for i in range(len(names) - count + 1)):
        if str(name) not in some:
            continue
        arrays = [case.ref if text == str(name) else case.runs.reference[text] for text in some]
        first, start = np.concatenate([a[:, :1] for a in arrays]), sum(map(len, arrays[:some.index(str(name))]))
        for n in case.runs.group_sizes or (2, 3, 4, 8):
            if all(len(a) % n == 0 for a in arrays):
                rows = np.concatenate([np.arange(shape[0] // n) + (r * len(first) + start) // n for r in range(n)])
                if np.allclose(first[rows], case.val[:, :1], rtol=0.0, atol=near(case)):
                    how = f"{', '.join(some)} are packed one after the other and cut in {n} blocks as one"
                    yield Pattern(CUT_AS_ONE, np.concatenate(arrays)[rows].astype(np.float64), {"how": how})


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.seen.any():
        yield from _shards(case)
        yield from _cut_as_one(case)


# --- causes -----------------------------------------------------------------------------------------------------------


_SAMPLES, _MODULO = every(activation, has(axis="batch")), has(rule="modulo")
_PACKED = "split each part on its own, then concatenate a rank's shares"
CAUSES = (
    Cause("positions", (SHARDS,), "each rank counts positions from the start of its own part: {how}",
          "position ids; where a rank's part of the sequence starts; padding on the left",
          lambda case, pattern: positional(case)),
    Cause("input_of_other_micro_batch", (SHARDS,), "a micro-batch has the values of another one: {how}",
          "the order in which micro-batches are sent and received, forward and backward; buffers that are used again, "
          "or read before a transfer has ended", every(_SAMPLES, has(same_rank=True))),
    Cause("world_rank_in_group", (SHARDS,), "samples by the rank in the world: {how}",
          "ranks that share a layer need the samples of their data-parallel rank", every(_SAMPLES, _MODULO)),
    Cause("same_samples", (SHARDS,), "ranks worked on the same samples: {how}",
          "the slice of the batch that a rank takes; `DistributedSampler` with its rank and its set_epoch",
          every(_SAMPLES, has(rule=("one", "repeated")))),
    Cause("batch_order", (SHARDS,), "the samples are on other ranks: {how}",
          "samplers, shuffling, the order of data-parallel ranks and of micro-batches", _SAMPLES),
    Cause("zigzag_order", (SHARDS,), "the chunks of a zigzag are in another order: {how}; of N context-parallel "
          "ranks rank r has the chunks r and 2N-1-r", "how the sequence is cut for balanced ring attention",
          has(axis="token", mixed=True)),
    Cause("packed_cut_as_one", (SHARDS,), "a packed tensor (q|k|v, gate|up) was cut as one block: {how}", _PACKED,
          has(mixed=True)),
    Cause("wrong_kv_head", (SHARDS,), "{how}", "which KV head a rank takes where ranks share one",
          every(parameter, _MODULO)),
    Cause("world_rank_in_group", (SHARDS,), "the rank in the world chose the part: {how}",
          "`dist.get_rank()` where `get_rank(group)` belongs", _MODULO),
    Cause("shards_seeded_alike", (SHARDS,), "every shard was seeded alike: {how}",
          "the seed of a sharded parameter has to depend on the rank; a broadcast over ranks of other shards",
          every(kinds("init"), has(rule="one"))),
    Cause("slices_repeated", (SHARDS,), "{how}",
          "a shard that was loaded or sent twice, or a chunk that was read before it came", has(rule="repeated")),
    Cause("shards_misplaced", (SHARDS,), "{how}", "the rank, and the group, by which a shard is chosen; the dimensions "
          "of a `DeviceMesh`"),
    Cause("packed_cut_as_one", (CUT_AS_ONE,), "{how}", _PACKED),
)
