# SPDX-License-Identifier: Apache-2.0
"""The reference's values at other places: slices, blocks, heads and shards in another order, dimensions exchanged,
data some elements further on in memory; in the tensor, or in what a linear module reads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, activation, every, has, parameter
from anyrank.explain.known import earlier, shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay.sources import parameter as value_of
from anyrank.explain.slices import (DEALT, EXCHANGED, LEAST, PROBED, REORDERED, REPEATED, REVERSED, ROTATED, ROWS,
                                    SHIFTED, ZIGZAG, Move, applied, dimensions, divisors, moves, near)
from anyrank.explain.tensors import Array, Case, Copy, Name, looked_up, positional
from anyrank.explain.words import ranks_of

TRANSPOSED, SPLIT, MEMORY = "transposed", "transposed_parts", "in_memory"
WINDOW = 12  # elements by which an offset in memory is found
MOST_SHARDS = 64  # that blocks of a tensor may be where ranks are not known
MOST_INPUTS = 512  # features of a module whose weight is inverted
NOUNS = {"batch": "sample", "token": "token", "head": "head", "feature": "feature", "out": "row", "in": "column",
         "vocab": "id", "expert": "expert"}
Numbers = dict[str, typing.Any]

# --- slices -----------------------------------------------------------------------------------------------------------

_OTHER = "{unit} {a} has the values of {unit} {b}"
SAID = {ROTATED: "rotated by {by}{within}: {noun} i has that of i {sign}",
        REVERSED: "the {unit}s are in reverse order{within}",
        DEALT: "interleaved{within}: {p} runs of {q} {unit}s are dealt out in turn",
        ZIGZAG: "{unit}s in the order of a zigzag{within}: the r-th from either end stand together",
        EXCHANGED: "exchanged{within}: " + _OTHER + ", and the other way round",
        REPEATED: _OTHER + ", which has them too{within}", REORDERED: "{unit}s in another order{within}: " + _OTHER,
        SHIFTED: "shifted by {by}{within}: {noun} i has that of i {sign}; at the edge stand {edge}"}


def _numbers(case: Case, axis: int, move: Move, n: int, where: str) -> Numbers:
    names, by, whole = case.axes, abs(move.by) * move.size, move.period * move.size == n
    noun = ("token" if "token" in names else "row") if axis == ROWS else NOUNS.get(
        names[axis], "slice" if len(names) > 1 else "element")
    unit = noun if move.size == 1 else f"block of {move.size} {noun}"
    how = SAID[move.kind].format(
        noun=noun, unit=unit, by=f"{by} {noun}{'s' * (by != 1)}", sign=f"{'+' if move.by > 0 else '-'} {by}", p=move.p,
        q=move.q, a=move.a, b=move.b, edge=move.edge,
        within=("" if whole else f" within every {move.period * move.size} {noun}s") + where)
    moved: Array = np.flatnonzero(move.source != np.arange(n)) + 1
    return {"how": how, "axis": names[axis] if axis != ROWS else "rows", "dimension": axis, "size": move.size,
            "period": move.period, "blocks": n // move.size, "p": move.p, "q": move.q, "whole": whole,
            "sorted": axis == 0 and sorting(case, move.source), "lone": len(moved) == move.size,
            "ends": any(n % k == 0 and (moved % (n // k) == 0).all() for k in case.runs.group_sizes)}


def sorting(case: Case, order: Array) -> str:
    """What both runs have one number of for each sample, and this order of samples sorts; "": there is nothing."""
    known = case.runs.reference
    for name in (name for name in known if name in case.runs.same and shape_of(known, name) == order.shape):
        ways = [{*np.sign(np.diff(x.astype(np.float64)))} - {0.0} for x in (known[name], known[name][order])]
        if len(ways[0]) == 2 and len(ways[1]) == 1 and order.min() >= 0:
            return name
    return ""


def of_tensor(case: Case) -> typing.Iterator[Pattern]:
    for axis, move in moves(case, case.ref, case.val, case.seen):
        yield Pattern(move.kind, applied(case.ref, case.val, axis, move),
                      _numbers(case, axis, move, dimensions(case.shape, axis)[1], ""),
                      move.fitted + (move.edge == "others"))


def _of_parts(case: Case) -> typing.Iterator[Pattern]:
    """One rule for each rank's part that differs, where parts differ of which a slice of the whole tensor has some."""
    wrong = [(i, k) for i, copy in enumerate(case.copies) for k, box in enumerate(copy.boxes)
             if case.stands_out(copy.values[k], box).any()]
    if len(case.copies) < 2 or not wrong:
        return
    i, k = wrong[0]
    box, values = case.copies[i].boxes[k], np.asarray(case.copies[i].values[k], np.float64)
    where = " within each rank's part" if len(wrong) == sum(len(c.boxes) for c in case.copies) else (
        f" in the part of {ranks_of({case.copies[j].rank or 0 for j, _ in wrong})} alone")
    for axis, move in moves(case, case.ref[box], values, case.stands_out(values, box)):
        if move.edge == "others" or any(case.copies[j].values[m].shape != values.shape for j, m in wrong):
            continue
        parts = [[applied(case.ref[b], v.astype(np.float64), axis, move) if (j, m) in wrong else case.ref[b]
                  for m, (b, v) in enumerate(zip(c.boxes, c.values))] for j, c in enumerate(case.copies)]
        numbers = _numbers(case, axis, move, dimensions(values.shape, axis)[1], where)
        yield Pattern(move.kind, parts, {**numbers, "whole": False}, move.fitted, trials=2)


# --- dimensions -------------------------------------------------------------------------------------------------------


def _splits(shape: tuple[int, ...]) -> typing.Iterator[tuple[int, tuple[int, ...]]]:
    """Shapes of which one dimension is cut in two; -1: none is."""
    yield -1, shape
    for axis, extent in enumerate(shape):
        for d in divisors(extent)[1:-1][:40]:
            yield axis, (*shape[:axis], d, extent // d, *shape[axis + 1:])


def are_conserved(ref: Array, val: Array) -> bool:
    """Whether sums of squares and cubes are equal, as those of the same values in any order."""
    x, y = ref.ravel(), val.ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(x @ x)
        return abs(squares - float(y @ y)) <= 1e-3 * squares and bool(
            abs((x * x) @ x - (y * y) @ y) <= 1e-3 * float((x * x) @ np.abs(x)))


def _transposed(case: Case, ref: Array, val: Array, off: Array) -> tuple[str, Array, Numbers] | None:
    """Data of an array with its dimensions in another order, written under the old shape."""
    shape = tuple(n for n in ref.shape if n > 1)
    at = np.flatnonzero(off)
    if not 2 <= len(shape) <= 4 or len(at) < LEAST or not are_conserved(ref, val):
        return None
    at = at[:: max(1, len(at) // PROBED)]
    flat, asked, limit = ref.ravel(), val.ravel()[at], near(case)
    for axis, extents in _splits(shape):
        for direct in itertools.permutations(range(len(extents))):
            for order, of in ((direct, extents), (tuple(np.argsort(direct)), tuple(extents[o] for o in direct))):
                places = np.unravel_index(at, [of[o] for o in order])
                from_ = sum(p * math.prod(of[o + 1:]) for p, o in zip(places, order))
                if (np.abs(flat[from_] - asked) <= limit).all() and (from_ != at).any():
                    data = np.ascontiguousarray(ref.reshape(of).transpose(order)).reshape(ref.shape)
                    how = (f"the data is the reference's [{' x '.join(map(str, of))}] with its dimensions in the order "
                           f"{', '.join(map(str, order))}, written under the old shape")
                    return TRANSPOSED if axis < 0 else SPLIT, data, {"how": how, "cut": axis, "dimensions": len(shape)}
    return None


def transpositions(case: Case) -> typing.Iterator[Pattern]:
    if found := _transposed(case, case.ref, case.val, case.seen):
        yield Pattern(*found)
    elif case.cuts:
        parts, numbers = [[case.ref[box] for box in copy.boxes] for copy in case.copies], Numbers()
        for i, copy in enumerate(case.copies):
            for k, (box, values) in enumerate(zip(copy.boxes, copy.values)):
                if found := _transposed(case, case.ref[box], values.astype(np.float64), case.stands_out(values, box)):
                    _, parts[i][k], numbers = found
        if numbers:
            yield Pattern(TRANSPOSED, parts, {**numbers, "how": f"within each rank's part {numbers['how']}"}, trials=2)


def _in_memory(case: Case) -> typing.Iterator[Pattern]:
    """All of the data so many elements further on."""
    ref, val, off = case.ref.ravel(), case.val.ravel(), case.seen.ravel()
    wrong = np.flatnonzero(off)
    if len(wrong) < 2 * LEAST or wrong[-1] + 1 - wrong[0] < 2 * WINDOW:
        return
    middle = wrong[len(wrong) // 3]
    window, limit = val[middle: middle + WINDOW], near(case)
    if len(window) < WINDOW or len(np.unique(window)) < WINDOW // 2 or not np.isfinite(window).all():
        return
    candidates = np.arange(len(ref) - WINDOW + 1)
    for i in range(WINDOW):
        candidates = candidates[np.abs(ref[candidates + i] - window[i]) <= limit]
    for start in candidates[:4]:
        by = int(start - middle)
        source = np.where(off, np.arange(len(ref)) + by, np.arange(len(ref)))
        outside = (source < 0) | (source >= len(ref))
        if by and outside.sum() <= min(abs(by), len(wrong) // 2):
            expected = np.where(outside, val, ref[np.clip(source, 0, len(ref) - 1)]).reshape(case.shape)
            how = (f"shifted in memory: the {len(wrong)} different elements are the reference's {abs(by)} elements "
                   f"{'after' if by > 0 else 'before'}")
            yield Pattern(MEMORY, expected, {"how": how}, fitted=3 if by % case.shape[-1] == 0 else 1)


# --- what a linear module reads ---------------------------------------------------------------------------------------


def _of_inputs(case: Case) -> typing.Iterator[Pattern]:
    """Moves in what a linear module reads, which its output and its weight say where the weight has an inverse."""
    weight, bias = (value_of(case, f"{case.name.stem}.{leaf}") for leaf in ("weight", "bias"))
    if case.name.kind != "fwd" or len(case.shape) < 2 or weight is None or weight.ndim != 2:
        return
    added: Array | float = 0.0 if bias is None else bias.astype(np.float64)
    matrix: Array
    for matrix in (weight.T.astype(np.float64), weight.astype(np.float64)):
        if matrix.shape[1] != case.shape[-1] or matrix.shape[0] > min(matrix.shape[1], MOST_INPUTS) or any(
                v.shape[-1] != case.shape[-1] for copy in case.copies for v in copy.values):
            continue
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        if values[-1] <= 1e-5 * values[0]:
            continue
        inverse = right.T / values @ left.T
        ref, val = ((x.astype(np.float64) - added) @ inverse for x in (case.reference, case.other))
        if not are_conserved(ref, val) or np.abs(ref @ matrix + added - case.ref).max() > near(case):
            continue
        inner = dataclasses.replace(
            case, reference=ref, other=val, allowed=near(case) / float(values[-1]), rtol=0.0, copies=tuple(Copy(
                copy.rank, tuple((*box[:-1], slice(0, len(matrix))) for box in copy.boxes),
                tuple((v.astype(np.float64) - added) @ inverse for v in copy.values)) for copy in case.copies))
        for pattern in itertools.chain(of_tensor(inner), transpositions(inner)):
            if isinstance(pattern.expected, np.ndarray):
                numbers = {**pattern.numbers, "how": f"in what the module reads, {pattern.numbers['how']}"}
                yield Pattern(pattern.kind, pattern.expected @ matrix + added, numbers, pattern.fitted + 1, trials=3)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if not case.seen.any():
        return
    found = list(of_tensor(case)) if case.reference.size >= LEAST else []
    yield from found
    if case.reference.size >= LEAST and not any(p.fitted == 0 for p in found):
        yield from _of_parts(case)
    yield from transpositions(case)
    yield from _in_memory(case)
    yield from _of_inputs(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _labels(case: Case, pattern: Pattern) -> bool:
    """Captured labels, by the name of the model's argument."""
    leaf = case.name.stem.rpartition(".")[2].lower()
    return case.name.stem.startswith("input.") and ("label" in leaf or "target" in leaf)


def _table(case: Case, pattern: Pattern) -> bool:
    """Whether rows are looked up by ids: the module's output has them."""
    output = case.runs.reference.get(f"{case.name.module}:fwd")
    if case.activation or case.ref.ndim != 2 or output is None or output.shape[-1:] != case.shape[1:]:
        return False
    row = output.reshape(-1, case.shape[1])[0]
    return pattern.numbers["dimension"] == 0 and bool((case.reference == row).all(axis=1).any())


def _by_heads(case: Case, pattern: Pattern) -> bool:
    """Whether blocks are whole heads, where their number is known."""
    counts = {case.runs.heads, case.runs.kv_heads} - {0}
    return pattern.numbers["size"] > 1 and pattern.numbers["blocks"] in counts


def _by_shards(case: Case, pattern: Pattern) -> bool:
    """Whether there are as many blocks as ranks in a group; of a dump of no ranks, whether there may be."""
    hidden = case.copies[0].rank is None and pattern.numbers["size"] > 1 and pattern.numbers["blocks"] <= MOST_SHARDS
    return hidden or pattern.numbers["blocks"] in case.runs.group_sizes


def _ordered_before(case: Case, pattern: Pattern) -> bool:
    """Whether an activation of the step that comes before is the same in both runs, sample for sample."""
    return case.name.kind == "fwd" and any(
        (own := Name.of(name)).kind == "fwd" and own.step == case.name.step and name in case.runs.same
        and shape_of(case.runs.reference, name)[:1] == case.shape[:1] for name in earlier(case))


def _strided(case: Case, pattern: Pattern) -> bool:
    """Whether ranks have as many parts, and another tensor, of another size, is dealt out to them in the same way."""
    axis, n, runs = pattern.numbers["dimension"], pattern.numbers["q"], case.runs
    names = [name for name in runs.reference if Name.of(name).kind == case.name.kind and name not in runs.same
             and len(shape := shape_of(runs.reference, name)) > axis and shape[axis] != case.shape[axis]]
    return (axis, n) in case.cuts and any(np.array_equal(runs.other.get(name, ()), np.concatenate(
        [runs.reference[name].take(range(r, shape_of(runs.reference, name)[axis], n), axis) for r in range(n)], axis))
        for name in names[:MOST_SHARDS])


def _packed(case: Case, pattern: Pattern) -> bool:
    """Two or three parts of a parameter, dealt out in as many blocks as a group has ranks or a module has heads."""
    p, q, hidden = pattern.numbers["p"], pattern.numbers["q"], case.copies[0].rank is None
    counts = {*case.runs.group_sizes, case.runs.heads, case.runs.kv_heads}
    return not case.activation and pattern.numbers["size"] > 1 and any(
        x in (2, 3) and (hidden or y in counts) for x, y in ((p, q), (q, p)))


def _sequence_first(case: Case, pattern: Pattern) -> bool:
    numbers = pattern.numbers
    return numbers["size"] == 1 and numbers["whole"] and {numbers["p"], numbers["q"]} == {*case.shape[:2]}


def _pairs(case: Case, pattern: Pattern) -> bool:
    """Halves of each head's rows against neighbours."""
    return pattern.numbers["size"] == 1 and not pattern.numbers["whole"] and 2 in (
        pattern.numbers["p"], pattern.numbers["q"])


def _positional(case: Case, pattern: Pattern) -> bool:
    return positional(case)


def _not_by_ids(case: Case, pattern: Pattern) -> bool:
    """Whether rows are not those of a table, which stand at other places where ids are others."""
    return not looked_up(case)


_SAMPLES, _TOKENS, _ROWS = every(activation, has(axis="batch")), has(axis=("token", "rows")), has(axis="rows")
_POSITIONS = "position ids; where a rank's part of the sequence starts; padding on the left"
_ORDER = ("samplers (`DistributedSampler` against contiguous slices), shuffling, the order of data-parallel ranks and "
          "of micro-batches")
_SHARD = "the rank, and the group, by which a shard is chosen; the dimensions of a `DeviceMesh`"
_GATHERED = "the order in which gathered parts are put together: `torch.cat(parts, dim=1)` along the sequence"
_PARTS = "the order in which parts are put together; `torch.roll`, `flip`, `rotate_half`; a checkpoint's mapping"
_VIEWS = "`view`, `reshape` and `permute` of heads and features; packed q|k|v by head or by part"
_REORDERINGS = (ROTATED, REVERSED, DEALT, ZIGZAG, EXCHANGED, REORDERED, REPEATED)
CAUSES = (
    Cause("positions", (SHIFTED, ROTATED, REPEATED), "positions are others: {how}", _POSITIONS, _positional),
    Cause("labels_shifted", (SHIFTED, ROTATED), "the labels are {how}",
          "labels that are shifted both by the data and by the loss, or by neither", every(_labels, _TOKENS)),
    Cause("input_of_other_micro_batch", (REPEATED,), "{how}", "buffers that are used again, or read before a transfer "
          "has ended", every(_SAMPLES, lambda case, pattern: case.runs.micro_batches > 1)),
    Cause("slices_repeated", (REPEATED,), "{how}", "how the last batch is filled up; a buffer that is used again",
          every(_SAMPLES, has(lone=True))),
    Cause("batch_order", _REORDERINGS, "the samples are in the order of sorted {sorted}, which is not undone: {how}",
          "what sorts the samples inside of the model, and the inverse of that order (`order.argsort()`) for all that "
          "it gives", every(_SAMPLES, has(sorted=bool))),
    Cause("batch_order", _REORDERINGS, "the samples are in another order here, and not in what was computed before: "
          "{how}", "what orders samples by length or expert, or gathers them, and puts them back: `sort` and its "
          "inverse, `unsorted_indices`, the order of gathered parts", every(_SAMPLES, _ordered_before)),
    Cause("batch_order", _REORDERINGS, "the samples are in another order: {how}", _ORDER, _SAMPLES),
    Cause("other_ids", (ROTATED, SHIFTED), "the rows of the table are {how}",
          "ids that are counted from another start, and the special tokens before them", _table),
    Cause("gathered_in_rank_order", (ROTATED,), "{how}", _GATHERED,
          every(activation, _TOKENS, has(size=lambda n: n > 1))),
    Cause("tokens_shifted", (ROTATED, SHIFTED), "{how}", "positions or labels that are rolled or shifted", _TOKENS),
    Cause("tokens_shifted", (EXCHANGED, REPEATED, REORDERED), "the last tokens of ranks' parts alone are others: {how}",
          "a roll or a shift after the sequence is cut, in place of before", every(_TOKENS, has(ends=True))),
    Cause("shards_misplaced", (ROTATED,), "{how}", _SHARD, every(
        _by_shards, has(period=lambda n: n > 2), lambda case, pattern: not _by_heads(case, pattern))),
    Cause("transposed", (DEALT,), "samples and tokens are exchanged, [s, b] under the shape [b, s]: {how}",
          "[s, b, h] against [b, s, h]", every(_ROWS, _sequence_first)),
    Cause("gathered_in_rank_order", (DEALT,), "{how}: gathered parts one after the other, or batch and sequence "
          "exchanged", _GATHERED, every(_ROWS, has(whole=True))),
    Cause("zigzag_order", (DEALT, ZIGZAG), "{how}", "how the sequence is cut: in contiguous parts, in turn, or in a "
          "zigzag for balanced ring attention", _TOKENS),
    Cause("shards_misplaced", (DEALT,), "{how}: of {q} ranks each has one of every {q} in turn, not a contiguous part",
          "which part of the full tensor a rank's shard is filled with: `[rank::n]` in place of contiguous ones",
          every(parameter, has(size=1, whole=True), _strided)),
    Cause("packed_cut_as_one", (DEALT,), "{how}: a packed tensor (q|k|v, gate|up) was cut as one block, or put "
          "together shard by shard", "split each part on its own, then concatenate a rank's shares", _packed),
    Cause("rope_pairing", (DEALT,), "{how}: the pairs of RoPE are neighbours in one run, and halves in the other",
          "interleaved pairs against `rotate_half`; the conversion of q and k", every(parameter, _pairs)),
    Cause("dimension_flattened", (DEALT,), "{how}: a dimension of {p} times {q} is flattened the other way round",
          _VIEWS),
    Cause("shards_misplaced", (EXCHANGED, REORDERED), "{how}", _SHARD, _by_shards),
    Cause("wrong_kv_head", (REPEATED,), "{how}", "which KV head a rank or a query head takes", _by_heads),
    Cause("slices_repeated", (REPEATED,), "{how}", "a shard that was loaded or sent twice, a chunk that was read "
          "before it came; an index that does not advance",
          lambda case, pattern: pattern.numbers["size"] > 1 or _not_by_ids(case, pattern)),
    Cause("slices_reordered", (ROTATED, REVERSED, ZIGZAG, EXCHANGED), "{how}", _PARTS),
    Cause("slices_reordered", (REORDERED,), "{how}", _PARTS, _not_by_ids),
    Cause("transposed", (TRANSPOSED,), "{how}", "a view or reshape where a transposition is meant; `nn.Linear` [out, "
          "in] against `Conv1D` and JAX [in, out]"),
    Cause("gathered_in_rank_order", (SPLIT,), "gathered parts are one after the other: {how}", _GATHERED,
          every(activation, has(cut=1, dimensions=3))),
    Cause("transposed", (SPLIT,), "heads and tokens are exchanged: {how}", "`transpose(1, 2)` before or after "
          "`reshape`", every(activation, has(dimensions=3))),
    Cause("dimension_flattened", (SPLIT,), "a dimension is flattened the other way round: {how}", _VIEWS),
    Cause("shifted", (SHIFTED, MEMORY), "{how}", "offsets into a buffer or a file, padding at the start"),
)
