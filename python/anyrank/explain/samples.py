# SPDX-License-Identifier: Apache-2.0
"""What a run works on: which of the reference's samples, ids and labels stand where, and on which ranks."""

from __future__ import annotations

import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, every, has
from anyrank.explain.lookups import IDS
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay.attention import first_keys
from anyrank.explain.slices import near
from anyrank.explain.tensors import Array, Case, Name
from anyrank.explain.words import counted, ranks_of

SAMPLES, OTHER_STEP, OFFSET, SHIFTED, NOISE = "samples", "input of another step", "ids offset", "ids shifted", "noise"
MOST_SAMPLES = 4096
LEAST = 8  # values of a sample, by which it is told from others
SHOWN = 3


def _is_input(name: Name) -> bool:
    return name.kind in ("fwd", "buffer") and name.stem.startswith("input")


def inputs_same(case: Case) -> bool:
    """Whether another input with a row of its own for each sample is right: then it is not samples that moved."""
    for name in case.runs.same:
        if name != str(case.name) and _is_input(Name.of(name)) and Name.of(name).step == case.name.step:
            array = case.runs.reference.get(name)
            if array is not None and array.ndim and len(array) == case.shape[0] and len(
                    np.unique(array.reshape(len(array), -1), axis=0)) > len(array) // 2:
                return True
    return False


# --- samples ----------------------------------------------------------------------------------------------------------


def _projected(rows: Array) -> Array:
    random = np.random.default_rng(2).standard_normal((rows.shape[1], 2))
    result: Array = np.nan_to_num(rows, posinf=0.25, neginf=0.125) @ random
    return result


def _alike(known: Array, asked: Array, limit: float) -> list[list[int]]:
    """Of each row asked for, the known ones that it equals."""
    a, b = _projected(known), _projected(asked)
    wide = 4.0 * limit * math.sqrt(known.shape[1]) + 1e-12 * float(np.abs(a).max(initial=0.0))
    return [[int(i) for i in np.flatnonzero((np.abs(a - row) <= wide).all(axis=1))] for row in b]


def _repeated_blocks(case: Case, sources: Array) -> bool:
    """Whether ranks or micro-batches have the same rows."""
    groups = case.runs.group_sizes
    return any(len({tuple(block) for block in sources.reshape(n, -1).tolist()}) < (n if n in groups else 2)
               for n in (*groups, case.runs.micro_batches) if n > 1 and len(sources) % n == 0)


def _dealt(sources: Array) -> int:
    """Into how many parts rows are dealt in turn, in place of blocks; 0: it is not so."""
    n = len(sources)
    for parts in (parts for parts in range(2, n) if n % parts == 0):
        turns = np.arange(n).reshape(-1, parts).T.ravel()
        if np.array_equal(sources, turns) or np.array_equal(sources, np.argsort(turns)):
            return parts
    return 0


def _rank_of(case: Case, sample: int) -> int | None:
    """The rank that has this sample alone."""
    ranks = {copy.rank for copy in case.copies for box in copy.boxes if box[0].start <= sample < box[0].stop}
    return ranks.pop() if len(ranks) == 1 and len(case.copies) > 1 else None


def _sample(case: Case, sample: int) -> str:
    rank = _rank_of(case, sample)
    return f"sample {sample}" + (f" (rank {rank})" if rank is not None else "")


def _samples(case: Case) -> typing.Iterator[Pattern]:
    """What the other run's samples are, as far as they are the reference's."""
    n, ref, val = case.shape[0], case.ref.reshape(case.shape[0], -1), case.val.reshape(case.shape[0], -1)
    limit = 16.0 * case.unit * case.scale if case.reference.dtype.kind == "f" else 0.0
    if any(len(same) > 1 for same in _alike(ref, ref, limit)):  # samples that are equal say nothing
        return
    sources: Array = np.array([same[0] if same else -1 for same in _alike(ref, val, limit)])
    off, right = case.seen.reshape(n, -1), inputs_same(case)
    wrong = [int(i) for i in np.flatnonzero(off.any(axis=1))]
    known, new = ([i for i in wrong if (sources[i] >= 0) is of] for of in (np.True_, np.False_))
    dealt, ranks = _dealt(sources), sorted({r for i in wrong if (r := _rank_of(case, i)) is not None})
    said = [f"{_sample(case, i)} is the reference's {sources[i]}" for i in known]
    numbers: dict[str, typing.Any] = {"all": n, "wrong": len(wrong), "new": len(new), "right": right, "blocks": False,
                                      "ranks": f" on {ranks_of(ranks)}" if len(case.copies) > len(ranks) > 0 else ""}
    if not new:
        numbers |= {"blocks": _repeated_blocks(case, sources), "dealt": dealt, "said": _listed(said),
                    "twice": bool((sources[sources[wrong]] == sources[wrong]).all())}
        yield Pattern(SAMPLES, case.ref[sources], numbers, fitted=0 if numbers["blocks"] or dealt else 1)
    elif _is_input(case.name) and not right and not case.every and ref.shape[1] >= LEAST and (
            off[wrong].mean(axis=1).min() >= 0.25):  # not parts of a sample: its labels, its padding
        ordered = [same[0] if len(same) == 1 else -1
                   for same in _alike(np.sort(ref, axis=1), np.sort(val, axis=1), limit)]
        twice = sorted({tuple(same) for same in _alike(val, val, limit) if len(same) > 1})
        said = [f"{' and '.join(_sample(case, i) for i in same[:SHOWN])} are the same" for same in twice] + said
        if all(ordered[i] >= 0 for i in new):
            said += [f"{_sample(case, i)} has the values of the reference's {ordered[i]} at other places" for i in new]
        else:
            said.append(f"{counted(len(new), 'sample', ('is', 'are'))} none of the reference's")
        numbers |= {"said": _listed(said),
                    "blocks": any(len({_rank_of(case, i) for i in same}) > 1 for same in twice)}
        yield Pattern(SAMPLES, [list(copy.values) for copy in case.copies], numbers, fitted=7)


def _same_noise(case: Case) -> typing.Iterator[Pattern]:
    """What differs on ranks goes with what another rank has of its own samples, in turn, and with no others of its."""
    n = len(case.copies)
    if case.cuts[:1] != ((0, n),) or case.reference.dtype.kind != "f" or case.shape[0] % n or case.shape[0] < 2 * n:
        return
    ref, apart = (x.reshape(n, case.shape[0] // n, -1) for x in (case.ref, case.val - case.ref))
    is_wrong = np.abs(apart).max(axis=(1, 2)) > near(case)
    if is_wrong.all() or not is_wrong.any():
        return
    right, size = int(np.argmin(is_wrong)), ref.shape[1]  # of parts
    table = np.mean([np.corrcoef(x, ref[right])[:size, size:] for x in apart[is_wrong]], axis=0)
    means = [float(np.diagonal(np.roll(table, by, axis=1)).mean()) for by in range(size)]
    if means[0] > max(6.0 / math.sqrt(apart[is_wrong].size), 3.0 * max(map(abs, means[1:]))):
        yield Pattern(NOISE, [list(copy.values) for copy in case.copies], {
            "wrong": ranks_of(_rank_of(case, i * size) or 0 for i in np.flatnonzero(is_wrong)),
            "right": _rank_of(case, right * size), "goes": means[0]}, fitted=7)


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:SHOWN]) + (", .." if len(texts) > SHOWN else "")


# --- ids and labels ---------------------------------------------------------------------------------------------------


def _inputs(case: Case) -> typing.Iterator[Pattern]:
    for name in case.runs.reference:
        own = Name.of(name)
        array = case.beside(name) if own.stem == case.name.stem and own.kind == case.name.kind else None
        if array is not None and own.step != case.name.step:
            yield Pattern(OTHER_STEP, array, {"step": case.name.step, "of": own.step}, trials=4)
    if len(case.shape) == 2 and case.reference.dtype.kind in "iu" and first_keys(case.reference) is not None and not (
            any(name.startswith("output") for name in case.runs.same)):
        yield Pattern(IDS, np.broadcast_to(np.arange(case.shape[1]), case.shape), {"positions": True, "how": (
            "positions run on through each row, where the reference's start again at 0 in each document")})
    apart = (case.val - case.ref)[case.off]
    if case.reference.dtype.kind not in "iu" or not apart.size:
        return
    if 2 * apart.size >= case.off.size and case.ref.max() >= 8 and (apart == apart[0]).all():
        yield Pattern(OFFSET, np.where(case.off, case.ref + apart[0], case.ref), {"by": int(apart[0])}, fitted=1)
    if len(case.shape) == 2 and len({*apart.tolist()}) > 2:  # else positions, which an offset explains
        for by in (by for by in (1, -1, 2, -2) if abs(by) * 2 <= case.shape[1]):
            expected = np.roll(case.ref, -by, axis=1)
            end = slice(-by, None) if by > 0 else slice(0, -by)
            expected[:, end] = case.val[:, end]  # what comes in is not looked at
            yield Pattern(SHIFTED, expected, {"by": by}, fitted=1)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if _is_input(case.name):
        yield from _inputs(case)
        yield from _same_noise(case)
    if case.shape and 2 <= case.shape[0] <= MOST_SAMPLES and case.reference.size >= 2 * case.shape[0] and (
            _is_input(case.name) or case.name.kind == "fwd" and case.axes[:1] == ("batch",)) and case.seen.any():
        yield from _samples(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _other_micro_batch(case: Case, pattern: Pattern) -> bool:
    right = pattern.numbers["right"] or "pp" in case.runs.mesh
    return bool(right) and case.runs.micro_batches > 1 and not _is_input(case.name)


_SAID = "{wrong} of {all} samples are others{ranks}: {said}"
CAUSES = (
    Cause("input_of_other_micro_batch", (SAMPLES,), "the inputs are right, and " + _SAID, "the buffers and the order "
          "of sends and receives of micro-batches", every(has(new=0), _other_micro_batch)),
    Cause("same_samples", (SAMPLES,), _SAID, "each rank's part of the batch: DistributedSampler, its rank and seed",
          has(right=False, blocks=True)),
    Cause("samples_dealt_out", (SAMPLES,), "the samples are dealt out in turn over {dealt} parts, where the reference "
          "has blocks ({said})", "how a batch is split over ranks or micro-batches", has(right=False, dealt=bool)),
    Cause("slices_repeated", (SAMPLES,), _SAID + ", which stands at its own place too", "what fills a batch up that "
          "the samples do not: DistributedSampler without `drop_last`, padding of the last batch",
          has(right=False, new=0, twice=True)),
    Cause("batch_order", (SAMPLES,), _SAID, "the order of samples: shuffling, its seed, the split over ranks",
          has(right=False, new=0)),
    Cause("other_samples", (SAMPLES,), _SAID, "the sampler of each rank (its seed, `set_epoch`); random flips, shifts "
          "and orders: what their seed depends on", has(right=False), sure=True),
    Cause("shards_seeded_alike", (NOISE,), "what differs on {wrong} goes with what rank {right} has of its own "
          "samples, element by element (correlation {goes}): the same random numbers on both", "noise, masks and "
          "augmentation that each rank draws by the same seed, in place of its part of what the whole batch draws"),
    Cause("batch_of_other_step", (OTHER_STEP,), "the input of step {step} is the reference's of step {of}: batches "
          "come again or are left out", "what a resume skips, the state of the data loader"),
    Cause("ids_off_by_one", (OFFSET,), "ids are off by {by}", "the ids of special tokens, the offset of a tokeniser",
          has(by=(1, -1))),
    Cause("labels_shifted", (SHIFTED,), "labels are shifted by {by}", "the shift of labels: in the data or in the "
          "model", lambda case, pattern: any(text in case.name.stem for text in ("label", "target"))),
    Cause("shifted", (SHIFTED,), "each row is shifted by {by}: values stand at other tokens", "how rows are cut from "
          "the data: a token added in front, an offset"),
)
