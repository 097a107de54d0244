# SPDX-License-Identifier: Apache-2.0
"""Samples of a batch that the model reads: which are the reference's, on which ranks, and which are none of them."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.data import inputs_same
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case
from anyrank.explain.words import counted, ranks_of

SAMPLES = "samples"
MOST_SAMPLES = 4096
LEAST = 8  # values of a sample, by which it is told from others
SHOWN = 3


def _projected(rows: Array) -> Array:
    random = np.random.default_rng(2).standard_normal((rows.shape[1], 2))
    result: Array = np.nan_to_num(rows) @ random
    return result


def _alike(known: Array, asked: Array, limit: float) -> list[list[int]]:
    """Of each row asked for, the known ones that it equals."""
    a, b = _projected(known), _projected(asked)
    wide = 4.0 * limit * math.sqrt(known.shape[1]) + 1e-12 * float(np.abs(a).max(initial=0.0))
    return [[int(i) for i in np.flatnonzero((np.abs(a - row) <= wide).all(axis=1))] for row in b]


@dataclasses.dataclass(frozen=True)
class Batch:
    """sources: of each sample of the other run the reference's that it is; -1: none. ordered: the same by its values in
    order of size, so at other places. twice: samples that the other run has more than once and the reference not."""

    sources: list[int]
    ordered: list[int]
    twice: list[list[int]]
    wrong: list[int]

    @classmethod
    def of(cls, case: Case) -> Batch | None:
        n = case.shape[0]
        ref, val = case.ref.reshape(n, -1), case.val.reshape(n, -1)
        limit = 16.0 * case.unit * case.scale if case.reference.dtype.kind == "f" else 0.0
        wrong = np.flatnonzero(case.seen.reshape(n, -1).any(axis=1))
        if 2 * case.seen.reshape(n, -1)[wrong].mean(axis=1).min() < 0.5:  # parts of a sample: its labels, its padding
            return None
        own = _alike(ref, ref, limit)
        if any(len(same) > 1 for same in own):  # samples that are equal say nothing
            return None
        sources = [same[0] if same else -1 for same in _alike(ref, val, limit)]
        ordered = [same[0] if len(same) == 1 else -1
                   for same in _alike(np.sort(ref, axis=1), np.sort(val, axis=1), limit)]
        groups = {tuple(same) for same in _alike(val, val, limit) if len(same) > 1}
        return cls(sources, ordered, sorted(map(list, groups)), wrong.tolist())


def _rank_of(case: Case, sample: int) -> int | None:
    """The rank that has this sample alone."""
    ranks = {copy.rank for copy in case.copies for box in copy.boxes if box[0].start <= sample < box[0].stop}
    return ranks.pop() if len(ranks) == 1 and len(case.copies) > 1 else None


def _sample(case: Case, sample: int) -> str:
    rank = _rank_of(case, sample)
    return f"sample {sample}" + (f" (rank {rank})" if rank is not None else "")


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:SHOWN]) + (", .." if len(texts) > SHOWN else "")


def patterns(case: Case) -> typing.Iterator[Pattern]:
    """What the other run's samples are, as far as they are the reference's."""
    n = case.shape[0] if case.shape else 0
    if case.name.stem.partition(".")[0] != "input" or not 2 <= n <= MOST_SAMPLES or case.every or (
            case.reference.size // n < LEAST or not case.seen.any() or inputs_same(case)):
        return
    batch = Batch.of(case)
    if batch is None:
        return
    known = [i for i in batch.wrong if batch.sources[i] >= 0]
    new = [i for i in batch.wrong if batch.sources[i] < 0]
    moved = [i for i in new if batch.ordered[i] >= 0]
    ranks = sorted({r for r in (_rank_of(case, i) for i in batch.wrong) if r is not None})
    twice = [f"{' and '.join(_sample(case, i) for i in same[:SHOWN])} are the same" for same in batch.twice]
    said = [f"{_sample(case, i)} is the reference's {batch.sources[i]}" for i in known]
    if moved and len(moved) == len(new):
        said += [f"{_sample(case, i)} has the values of the reference's {batch.ordered[i]} at other places"
                 for i in moved]
    elif new:
        said += [f"{counted(len(new), 'sample', ('is', 'are'))} none of the reference's"]
    yield Pattern(SAMPLES, [list(copy.values) for copy in case.copies], {
        "said": _listed([*twice, *said]), "wrong": len(batch.wrong), "all": n, "known": len(known), "new": len(new),
        "twice": len(batch.twice), "places": bool(moved) and len(moved) == len(batch.wrong),
        "ranks": f" on {ranks_of(ranks)}" if ranks and len(case.copies) > len(ranks) else "",
        "across": any(len({_rank_of(case, i) for i in same}) > 1 for same in batch.twice)}, fitted=7)


# --- causes -----------------------------------------------------------------------------------------------------------

_SAID = "{wrong} of {all} samples that the model reads differ{ranks}: {said}"
CAUSES = (
    Cause("same_samples", (SAMPLES,), _SAID, "each rank's part of the batch: DistributedSampler, its rank and seed",
          has(across=True), sure=True),
    Cause("batch_order", (SAMPLES,), _SAID, "the order of samples: shuffling, its seed, the split over ranks",
          has(new=0), sure=True),
    Cause("other_augmentation", (SAMPLES,), _SAID, "random flips, shifts and orders: what their seed depends on",
          has(places=True)),
    Cause("other_samples", (SAMPLES,), _SAID, "the sampler of each rank (its seed, `set_epoch`); random augmentation",
          sure=True),
)
