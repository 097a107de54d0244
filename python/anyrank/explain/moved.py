# SPDX-License-Identifier: Apache-2.0
"""The reference's values at other places: slices, blocks, heads and shards in another order."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.causes import Cause, activation, every, has, parameter
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import (DEALT, EXCHANGED, LEAST, REORDERED, REPEATED, REVERSED, ROTATED, ROWS,
                                    SHIFTED, ZIGZAG, Move, applied, dimensions, moves)
from anyrank.explain.tensors import Case, looked_up, positional
from anyrank.explain.words import ranks_of

MOST_SHARDS = 64  # that blocks of a tensor may be where ranks are not known
NOUNS = {"batch": "sample", "token": "token", "head": "head", "feature": "feature", "out": "row", "in": "column",
         "vocab": "id", "expert": "expert"}


def _noun(case: Case, axis: int) -> str:
    names = case.axes
    if axis == ROWS:
        return "token" if "token" in names else "row"
    return NOUNS.get(names[axis], "slice" if axis < len(names) - 1 or len(names) > 1 else "element")


def _numbers(case: Case, axis: int, move: Move, n: int, where: str) -> dict[str, typing.Any]:
    noun = _noun(case, axis)
    unit = noun if move.size == 1 else f"block of {move.size} {noun}s"
    units = f"{noun}s" if move.size == 1 else f"blocks of {move.size} {noun}s"
    of_all = move.period * move.size
    within = "" if of_all == n else f" within every {of_all} {noun}s"
    slices = abs(move.by) * move.size
    return {"axis": case.axes[axis] if axis != ROWS else "rows", "dimension": axis, "noun": noun, "unit": unit,
            "units": units, "size": move.size, "period": move.period, "n": n, "blocks": n // move.size,
            "within": within + where, "by": slices, "sign": "+" if move.by > 0 else "-", "p": move.p, "q": move.q,
            "a": move.a, "b": move.b, "edge": move.edge, "whole": of_all == n,
            "lone": int((move.source != np.arange(n)).sum()) == move.size,
            "slices": f"{slices} {noun}{'s' if slices != 1 else ''}"}


def of_tensor(case: Case) -> typing.Iterator[Pattern]:
    for axis, move in moves(case, case.ref, case.val, case.seen):
        numbers = _numbers(case, axis, move, dimensions(case.shape, axis)[1], "")
        yield Pattern(move.kind, applied(case.ref, case.val, axis, move), numbers,
                      move.fitted + (move.edge == "others"))


def _of_parts(case: Case) -> typing.Iterator[Pattern]:
    """One rule for each rank's part that differs, where parts differ of which a slice of the whole tensor has some."""
    wrong = [(i, k) for i, copy in enumerate(case.copies) for k, box in enumerate(copy.boxes)
             if case.stands_out(copy.values[k], box).any()]
    if len(case.copies) < 2 or not wrong:
        return
    i, k = wrong[0]
    box, values = case.copies[i].boxes[k], np.asarray(case.copies[i].values[k], np.float64)
    ranks = sorted({case.copies[j].rank or 0 for j, _ in wrong})
    where = " within each rank's part" if len(wrong) == sum(len(c.boxes) for c in case.copies) else (
        f" in the part of {ranks_of(ranks)} alone")
    for axis, move in moves(case, case.ref[box], values, case.stands_out(values, box)):
        if move.edge == "others" or any(case.copies[j].values[m].shape != values.shape for j, m in wrong):
            continue
        parts = [[applied(case.ref[b], v.astype(np.float64), axis, move) if (j, m) in wrong else case.ref[b]
                  for m, (b, v) in enumerate(zip(c.boxes, c.values))] for j, c in enumerate(case.copies)]
        numbers = _numbers(case, axis, move, dimensions(values.shape, axis)[1], where)
        yield Pattern(move.kind, parts, {**numbers, "whole": False}, move.fitted, trials=2)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.reference.size < LEAST or not case.seen.any():
        return
    found = list(of_tensor(case))
    yield from found
    if not any(p.fitted == 0 for p in found):
        yield from _of_parts(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _labels(case: Case, pattern: Pattern) -> bool:
    """Captured labels, by the name of the model's argument."""
    leaf = case.name.stem.rpartition(".")[2].lower()
    return case.name.stem.startswith("input.") and ("label" in leaf or "target" in leaf)


def _rotary(case: Case, pattern: Pattern) -> bool:
    """Whether it is a table of sines or cosines: zeros or ones alone at the first position, and none above one."""
    first = case.ref.reshape(-1, case.shape[-1])[0] if case.ref.ndim > 1 else case.ref[:1]
    return positional(case) and case.reference.dtype.kind == "f" and case.scale <= 1.0 and np.ptp(first) == 0.0


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


def _packed(case: Case, pattern: Pattern) -> bool:
    """Two or three parts of a parameter, dealt out in as many blocks as a group has ranks or a module has heads."""
    p, q, hidden = pattern.numbers["p"], pattern.numbers["q"], case.copies[0].rank is None
    counts = {*case.runs.group_sizes, case.runs.heads, case.runs.kv_heads}
    return not case.activation and pattern.numbers["size"] > 1 and any(
        x in (2, 3) and (hidden or y in counts) for x, y in ((p, q), (q, p)))


def _sequence_first(case: Case, pattern: Pattern) -> bool:
    numbers = pattern.numbers
    return numbers["size"] == 1 and numbers["whole"] and {numbers["p"], numbers["q"]} == {*case.shape[:2]}


def _not_by_ids(case: Case, pattern: Pattern) -> bool:
    """Whether rows are not those of a table, which stand at other places where ids are others."""
    return not looked_up(case)


def _pairs(case: Case, pattern: Pattern) -> bool:
    """Halves of each head's rows against neighbours."""
    return pattern.numbers["size"] == 1 and not pattern.numbers["whole"] and 2 in (
        pattern.numbers["p"], pattern.numbers["q"])


_POSITIONAL = (lambda case, pattern: positional(case))
_SAMPLES, _TOKENS, _ROWS = every(activation, has(axis="batch")), has(axis=("token", "rows")), has(axis="rows")
_PLACES = "{noun} i has that of i {sign} {by}{within}"
_POSITIONS = "position ids; where a rank's part of the sequence starts; padding on the left"
_TURN = "rotated by {slices}{within}: {noun} i has that of i {sign} {by}"
_DEALT = "interleaved{within}: {p} runs of {q} {units} are dealt out in turn"
_EXCHANGED = "exchanged{within}: {unit} {a} has the values of {unit} {b}, and the other way round"
_REPEATED = "{unit} {a} has the values of {unit} {b}, which has them too{within}"
_REORDERED = "{units} in another order{within}: {unit} {a} has the values of {unit} {b}"
_ORDER = "samplers, shuffling, the order of data-parallel ranks and of micro-batches"
_SHARD = "the group that a rank is taken from; the dimensions of a `DeviceMesh`"


CAUSES = (
    Cause("rope_offset", (SHIFTED, ROTATED), "the table of RoPE is that of other positions: " + _PLACES, _POSITIONS,
          _rotary),
    Cause("position_offset", (SHIFTED, ROTATED), "positions are off by {by}: " + _PLACES, _POSITIONS, _POSITIONAL),
    Cause("positions", (REPEATED,), "positions start again: " + _REPEATED, _POSITIONS, _POSITIONAL),
    Cause("labels_shifted", (SHIFTED, ROTATED), "the labels are shifted{within}: token i has that of i {sign} {by}",
          "labels that are shifted both by the data and by the loss, or by neither", every(_labels, _TOKENS)),
    Cause("batch_order", (ROTATED,),
          "the samples are in another order: sample i is sample i {sign} {by} of the reference{within}", _ORDER,
          _SAMPLES),
    Cause("batch_order", (REVERSED,), "the samples are in reverse order{within}", _ORDER, _SAMPLES),
    Cause("ids_off_by_one", (ROTATED, SHIFTED), "row i of the table has the values of row i {sign} {by}{within}",
          "ids that are counted from another start, and the special tokens before them", _table),
    Cause("token_blocks_rotated", (ROTATED,),
          "blocks of {size} tokens are rotated{within}: a block has that of {by} tokens {sign} its place",
          "the order in which the chunks of an all-gather along the sequence are put together",
          every(activation, _TOKENS, has(size=lambda n: n > 1))),
    Cause("tokens_shifted", (ROTATED,), _TURN, "positions or labels that are rolled", _TOKENS),
    Cause("heads_rotated", (ROTATED,), "the heads are rotated: " + _TURN, "the head at which a rank starts",
          _by_heads),
    Cause("halves_exchanged", (ROTATED,), "the two halves ({size} {noun}s each) are exchanged{within}",
          "two parts that are packed in the other order; `rotate_half`; two shards exchanged", has(period=2)),
    Cause("shards_rotated", (ROTATED,), "{units} are rotated by {slices}{within}", _SHARD, _by_shards),
    Cause("rotated", (ROTATED,), _TURN, "`torch.roll`, offsets"),
    Cause("sequence_reversed", (REVERSED,), "the tokens are in reverse order{within}",
          "`flip`; the order of positions", _TOKENS),
    Cause("reversed", (REVERSED,), "the {units} are in reverse order{within}", "`flip`, and loops that count down"),
    Cause("samples_dealt_out", (DEALT,), "samples are dealt out to ranks in turn in one run, and in contiguous parts "
          "in the other ({p} runs of {q} {units})", "`DistributedSampler` against contiguous slices of the batch",
          _SAMPLES),
    Cause("transposed", (DEALT,),
          "samples and tokens are exchanged: the data is that of [s, b] under the shape [b, s]",
          "[s, b, h] against [b, s, h]", every(_ROWS, _sequence_first)),
    Cause("gathered_in_rank_order", (DEALT,), _DEALT +
          ": gathered parts one after the other ([ranks, b, s/N] for [b, s]), or batch and sequence exchanged",
          "`torch.cat(parts, dim=1)` of what was gathered along the sequence", every(_ROWS, has(whole=True))),
    Cause("tokens_dealt_out", (DEALT,), _DEALT +
          ": tokens go to ranks in turn in one run, in contiguous parts in the other", "how the sequence is cut",
          _TOKENS),
    Cause("packed_cut_as_one", (DEALT,), _DEALT +
          ": a packed tensor (q|k|v, gate|up) was cut as one block, or put together shard by shard",
          "split each part on its own, then concatenate a rank's shares", _packed),
    Cause("rope_pairing", (DEALT,), _DEALT + ": the pairs of RoPE are neighbours in one run, and halves in the other",
          "interleaved pairs against `rotate_half`; the conversion of q and k", every(parameter, _pairs)),
    Cause("dimension_flattened", (DEALT,), _DEALT + ": a [{p}, {q}] dimension is flattened the other way round",
          "`view`, `reshape` and `permute` of heads and features; packed q|k|v by head or by part"),
    Cause("zigzag_order", (ZIGZAG,), "{units} in the order of a zigzag{within}: the r-th from either end stand "
          "together in one run, and in the sequence's order in the other",
          "how the sequence is cut for balanced ring attention", _TOKENS),
    Cause("slices_reordered", (ZIGZAG,), "{units} in another order{within}: the r-th from either end stand together",
          "the order in which parts are put together"),
    Cause("input_of_other_micro_batch", (REPEATED,), _REPEATED,
          "buffers that are used again, or read before a transfer has ended",
          every(_SAMPLES, lambda case, pattern: case.runs.micro_batches > 1)),
    Cause("slices_repeated", (REPEATED,), _REPEATED, "how the last batch is filled up; a buffer that is used again",
          every(_SAMPLES, has(lone=True))),
    Cause("batch_order", (REORDERED, REPEATED, EXCHANGED),
          "the samples are in another order: sample {a} is sample {b} of the reference", _ORDER, _SAMPLES),
    Cause("shards_misplaced", (EXCHANGED, REORDERED), _REORDERED, _SHARD, _by_shards),
    Cause("slices_exchanged", (EXCHANGED,), _EXCHANGED, "names or indices in the mapping of a checkpoint"),
    Cause("wrong_kv_head", (REPEATED,), _REPEATED, "which KV head a rank or a query head takes", _by_heads),
    Cause("shard_repeated", (REPEATED,), _REPEATED,
          "a shard that was loaded or sent twice, or a chunk that was read before it came",
          has(size=lambda n: n > 1)),
    Cause("slices_repeated", (REPEATED,), _REPEATED, "an index that does not advance", _not_by_ids),
    Cause("slices_reordered", (REORDERED,), _REORDERED, "the order in which parts are put together", _not_by_ids),
    Cause("tokens_shifted", (SHIFTED,),
          "shifted by {slices}{within}: token i has that of i {sign} {by}; at the edge stand {edge}",
          "positions or labels that are shifted", _TOKENS),
    Cause("shifted", (SHIFTED,),
          "shifted by {slices}{within}: {noun} i has that of i {sign} {by}; at the edge stand {edge}",
          "offsets, padding at the start"),
)
