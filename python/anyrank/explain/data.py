# SPDX-License-Identifier: Apache-2.0
"""What a run worked on, before anything is computed: samples, ids and labels, and parameters that one run lacks."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Name

ROWS, OTHER_STEP, OFFSET, SHIFTED = "rows of others", "input of another step", "ids offset", "ids shifted"
UNTIED, NOTHING = "sum of two parameters", "no gradient"
MOST_ROWS, COLUMNS = 2048, 64


def _is_input(name: Name) -> bool:
    return name.kind in ("fwd", "buffer") and name.stem.startswith("input")


def _sources(case: Case) -> Array | None:
    """For each row of the other run, the row of the reference that it equals; None: some equal none, or several."""
    n = case.shape[0]
    ref, val = case.ref.reshape(n, -1), case.val.reshape(n, -1)
    columns = np.linspace(0, ref.shape[1] - 1, min(COLUMNS, ref.shape[1])).astype(int)
    near = case.unit * 64.0 * case.scale if case.reference.dtype.kind == "f" else 0.0
    a, b = ref[:, columns], val[:, columns]
    found = np.full(n, -1)
    for i in range(n):
        alike = np.flatnonzero((np.abs(a - b[i]) <= near).all(1))
        if alike.size != 1:  # no row, or rows that are equal, as positions are
            return None
        found[i] = alike[0]
    return found


def _rows(case: Case) -> typing.Iterator[Pattern]:
    n = case.shape[0] if case.shape else 0
    if not 2 <= n <= MOST_ROWS or case.reference.size // n < 2:
        return
    sources = _sources(case)
    if sources is None or (sources == np.arange(n)).all():
        return
    moved = np.flatnonzero(sources != np.arange(n))
    numbers = {"moved": moved.size, "rows": n, "first": int(moved[0]), "is": int(sources[moved[0]]),
               "repeated": len(set(sources.tolist())) < n, "blocks": _repeated_blocks(case, sources),
               "parts": _dealt(sources), "inputs_same": inputs_same(case)}
    yield Pattern(ROWS, case.ref[sources], numbers, fitted=0 if numbers["blocks"] or numbers["parts"] else 1)


def inputs_same(case: Case) -> bool:
    """Whether another input with a row of its own for each sample is right: then it is not samples that moved."""
    for name in case.runs.same:
        if name != str(case.name) and _is_input(Name.of(name)) and Name.of(name).step == case.name.step:
            array = case.runs.reference.get(name)
            if array is not None and array.ndim and len(array) == case.shape[0] and len(
                    np.unique(array.reshape(len(array), -1), axis=0)) > len(array) // 2:
                return True
    return False


def _repeated_blocks(case: Case, sources: Array) -> int:
    """In how many equal blocks of rows the same rows stand; 0: it is not so."""
    n = len(sources)
    sizes = {size for size in (*case.runs.group_sizes, case.runs.micro_batches) if size > 1 and n % size == 0}
    for parts in sorted(sizes, reverse=True):
        blocks = sources.reshape(parts, -1)
        if (blocks == blocks[0]).all():
            return parts
    for parts in case.runs.group_sizes:  # some of the ranks have another's
        if n % parts == 0 and len({tuple(block) for block in sources.reshape(parts, -1).tolist()}) < parts:
            return parts
    return 0


def _dealt(sources: Array) -> int:
    """Into how many parts rows are dealt in turn, in place of blocks; 0: it is not so."""
    n = len(sources)
    for parts in range(2, n):
        if n % parts == 0:
            turns = np.arange(n).reshape(-1, parts).T.ravel()
            if np.array_equal(sources, turns) or np.array_equal(sources, np.argsort(turns)):
                return parts
    return 0


def _other_steps(case: Case) -> typing.Iterator[Pattern]:
    for name in case.runs.reference:
        parsed = Name.of(name)
        if parsed.stem == case.name.stem and parsed.kind == case.name.kind and parsed.step != case.name.step:
            array = case.beside(name)
            if array is not None:
                yield Pattern(OTHER_STEP, array, {"step": case.name.step, "of": parsed.step, "earlier":
                                                  parsed.step < case.name.step}, trials=4)


def _offset(case: Case) -> typing.Iterator[Pattern]:
    apart = (case.val - case.ref)[case.off]
    if 2 * apart.size >= case.off.size and case.ref.max() >= 8 and (apart == apart[0]).all():
        yield Pattern(OFFSET, np.where(case.off, case.ref + apart[0], case.ref), {"by": int(apart[0])}, fitted=1)


def _shifted(case: Case) -> typing.Iterator[Pattern]:
    """Ids or labels that stand some tokens on; what comes in at the end is not looked at."""
    if len(case.shape) != 2 or len({*(case.val - case.ref)[case.off].tolist()}) < 3:
        return  # positions, which an offset explains
    for by in (1, -1, 2, -2):
        if abs(by) * 2 > case.shape[1]:
            continue
        expected = case.val.copy()
        if by > 0:
            expected[:, :-by] = case.ref[:, by:]
        else:
            expected[:, -by:] = case.ref[:, :by]
        yield Pattern(SHIFTED, expected, {"by": by}, fitted=1)


def _untied(case: Case) -> typing.Iterator[Pattern]:
    """One parameter here and two there: the gradient of one is the sum of both."""
    if not case.runs.other:
        return
    stems = [{Name.of(name).stem for name in run} for run in (case.runs.reference, case.runs.other)]
    for here in (True, False):
        runs = (case.runs.other, case.runs.reference) if here else (case.runs.reference, case.runs.other)
        for name in runs[0]:
            parsed = Name.of(name)
            if parsed.kind == "grad" and parsed.step == case.name.step and parsed.stem not in stems[0 if here else 1]:
                extra = case.beside(name, here)
                if extra is not None and extra.any():
                    yield Pattern(UNTIED, case.ref - extra if here else case.ref + extra,
                                  {"name": parsed.stem, "run": "the other run" if here else "the reference"})


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "grad":
        yield from _untied(case)
        if case.ref.any() and not case.val.any():
            yield Pattern(NOTHING, np.zeros(case.shape))
    if _is_input(case.name):
        yield from _other_steps(case)
        if case.reference.dtype.kind in "iu":
            yield from _offset(case)
            yield from _shifted(case)
    if _is_input(case.name) or (case.name.kind == "fwd" and case.axes[:1] == ("batch",)):
        yield from _rows(case)


def _is(key: str) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: bool(pattern.numbers[key])


def _other_micro_batch(case: Case, pattern: Pattern) -> bool:
    right = pattern.numbers["inputs_same"] or "pp" in case.runs.mesh
    return bool(right) and case.runs.micro_batches > 1 and not _is_input(case.name)


def _samples(key: str) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: bool(pattern.numbers[key]) and not pattern.numbers["inputs_same"]


CAUSES = (
    Cause("input_of_other_micro_batch", (ROWS,), "the inputs are right, and row {first} is the reference's row {is}: a "
          "module that got another micro-batch's input", "the buffers and the order of sends and receives of "
          "micro-batches",
          _other_micro_batch),
    Cause("same_samples", (ROWS,), "ranks worked on the same samples: of {blocks} parts of the batch some are equal "
          "(row {first} is the reference's row {is})", "each rank's part of the batch: DistributedSampler, its rank "
          "and seed", _samples("blocks")),
    Cause("samples_dealt_out", (ROWS,), "the samples are dealt out in turn over {parts} parts, where the reference has "
          "blocks (row {first} is the reference's row {is})", "how a batch is split over ranks or micro-batches",
          _samples("parts")),
    Cause("batch_order", (ROWS,), "other samples: some are there twice, others not at all (row {first} is the "
          "reference's row {is})", "the sampler of each rank: its seed and shuffling", _samples("repeated")),
    Cause("batch_order", (ROWS,), "the samples are in another order: {moved} of {rows} rows, row {first} is the "
          "reference's row {is}", "the order of samples: shuffling, its seed, the split over ranks", _samples("moved")),
    Cause("batch_again", (OTHER_STEP,), "the input of step {step} is the reference's of step {of}: a batch comes again",
          "what a resume skips, the state of the data loader", _is("earlier")),
    Cause("batch_left_out", (OTHER_STEP,), "the input of step {step} is the reference's of step {of}: batches are left "
          "out", "what a resume skips, the state of the data loader"),
    Cause("ids_off_by_one", (OFFSET,), "ids are off by {by}", "the ids of special tokens, the offset of a tokeniser",
          lambda case, pattern: abs(pattern.numbers["by"]) == 1),
    Cause("labels_shifted", (SHIFTED,), "labels are shifted by {by}", "the shift of labels: in the data or in the "
          "model", lambda case, pattern: any(text in case.name.stem for text in ("label", "target"))),
    Cause("shifted", (SHIFTED,), "each row is shifted by {by}: values stand at other tokens", "how rows are cut from "
          "the data: a token added in front, an offset"),
    Cause("tied_weight", (UNTIED,), "a weight that is tied in one run alone: {run} has {name} besides, and the "
          "gradients of both add up to the other's", "the tie of both weights after loading, wrapping or moving"),
    Cause("no_gradient", (NOTHING,), "this parameter has no gradient: all zero", "whether it is used, detached or "
          "frozen; a gradient that is not added or copied back"),
)
