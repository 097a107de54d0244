# SPDX-License-Identifier: Apache-2.0
"""Rows of a table: which rows stand where the reference has others, and rows of other shards that are added."""

from __future__ import annotations

import dataclasses
import math
import re
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay.sources import parameter_names
from anyrank.explain.slices import near
from anyrank.explain.tensors import Array, Case, Name

IDS, OF_SHARDS, EDGES, STALE = "other_ids", "rows_of_other_shards", "rows_of_edges", "stale_rows"
MOST_ROWS, MOST_VALUES = 1 << 16, 1 << 24  # that are looked up; of a table
LEAST = 4  # features of a row, by which it is told from others
_CALL = re.compile(r"\.call\d+$")


def _ids(table: Array, rows: Array, limit: float) -> Array:
    """Of each row the first row of the table that it is; -1: it is none."""
    random = np.random.default_rng(1).standard_normal(table.shape[1])
    known = table @ random
    order = np.argsort(known, kind="stable")
    first = np.searchsorted(known[order], rows @ random - 2.0 * limit * math.sqrt(table.shape[1]))
    found = np.full(len(rows), -1)
    for more in range(3):
        at = order[np.minimum(first + more, len(order) - 1)]
        with np.errstate(invalid="ignore"):
            is_it = (np.abs(table[at] - rows) <= limit).all(axis=1)
        found = np.where((found < 0) & is_it, at, found)
    return found


@dataclasses.dataclass(frozen=True)
class Lookup:
    """wanted, found: of each row its row of the table in the reference and in the other run; -1: it is none."""

    name: str
    table: Array
    wanted: Array
    found: Array
    wrong: Array

    @classmethod
    def of(cls, case: Case) -> Lookup | None:
        """Rows of the weight of the module that gave the tensor, as it was in this step."""
        known, (text, *_) = case.runs.reference, parameter_names(case, f"{_CALL.sub('', case.name.stem)}.weight")
        if case.name.kind != "fwd" or text not in known or not _fits(case, known[text]):
            return None
        table: Array = known[text].astype(np.float64)
        limit = near(case)
        ref, val = (x.reshape(-1, case.shape[-1]) for x in (case.ref, case.val))
        wanted, wrong = _ids(table, ref, limit), np.asarray(case.seen.reshape(ref.shape).any(axis=1))
        return None if (wanted < 0).any() else cls(
            text, table, wanted, np.where(wrong, _ids(table, val, limit), wanted), wrong)

    @classmethod
    def of_sum(cls, case: Case) -> Lookup | None:
        """A table whose rows are added, one for each token from the first on: of what differs by two rows of it."""
        if not case.activation or len(case.shape) != 3:
            return None
        gap, wrong = case.val - case.ref, np.asarray(case.seen.any(axis=2))
        (i, t), own = np.nonzero(wrong), Name.of(parameter_names(case, "")[0])
        for text, table in ((text, case.runs.reference[text]) for text in case.runs.reference
                            if (Name.of(text).kind, Name.of(text).step) == (own.kind, own.step)):
            if not _fits(case, table) or case.shape[1] > len(table) or len(i) < 2:
                continue
            rows: Array = table.astype(np.float64)
            limit = 2.0 * near(case)
            if (_ids(rows, gap[i[:8], t[:8]] + rows[t[:8]], limit) >= 0).all():
                wanted = np.tile(np.arange(case.shape[1]), (case.shape[0], 1))
                found = wanted.copy()
                found[wrong] = _ids(rows, gap[wrong] + rows[wanted[wrong]], limit)
                if (found >= 0).all():
                    return cls(text, rows, wanted.ravel(), found.ravel(), wrong.ravel())
        return None


def _fits(case: Case, table: Array) -> bool:
    return len(case.shape) > 1 and table.ndim == 2 and table.shape[1] == case.shape[-1] >= LEAST and (
        table.size <= MOST_VALUES) and math.prod(case.shape[:-1]) <= MOST_ROWS


def _is_run(ids: Array) -> bool:
    """Whether ids mostly rise by one from token to token, as positions do."""
    return ids.ndim > 1 and ids.shape[-1] > 2 and bool(np.mean(np.diff(ids, axis=-1) == 1) > 0.5)


def _of_positions(own: Array, other: Array, by: set[int]) -> str:
    """What is said of other positions."""
    first = int(np.flatnonzero((own != other).any(axis=tuple(range(own.ndim - 1))))[0])
    wrong: Array = np.asarray(own[..., first] != other[..., first])
    if first and (other[..., first] == own[..., 0])[wrong].all():
        return f"positions start again at token {first}: "
    if len(by) == 1:
        return f"positions are {next(iter(by))} on: "
    return "positions count from the start of each row, where the reference's start later: " if (
        other == np.arange(other.shape[-1])).all() else "other positions: "


def _others(case: Case, rows: Lookup, rest: Array | float = 0.0) -> typing.Iterator[Pattern]:
    """Each row that differs is another row of the table. rest: what is added to the table's rows."""
    if (rows.found == rows.wanted).all():
        return
    pairs = sorted({*zip(rows.wanted[rows.wrong].tolist(), rows.found[rows.wrong].tolist())})
    by, wrong = {b - a for a, b in pairs}, int(rows.wrong.sum())
    own: Array = rows.wanted.reshape(case.shape[:-1])
    other: Array = rows.found.reshape(case.shape[:-1])
    runs = _is_run(own) and _is_run(other)
    firsts = runs and bool(np.all(other == np.arange(other.shape[-1])))
    text = ", ".join(f"row {b} for row {a}" for a, b in pairs[:3]) + (", .." if len(pairs) > 3 else "")
    how = f"the table {rows.name} is right, and {wrong} of {len(rows.wrong)} rows are others of it: {text}"
    if runs:
        how = _of_positions(own, other, by) + how
    elif len(pairs) == 1 and (rows.wanted[~rows.wrong] != pairs[0][0]).all():
        how = (f"row {pairs[0][1]} of the table {rows.name} stands wherever the reference has row {pairs[0][0]}, at "
               f"{wrong} of {len(rows.wrong)} places")
    elif len(by) == 1:
        how = f"ids are {next(iter(by))} on: {how}"
    yield Pattern(IDS, rest + rows.table[rows.found].reshape(case.shape), {"how": how, "positions": runs}, fitted=(
        0 if firsts else 1 if len(by) == 1 or len({b for _, b in pairs}) == 1 else min(len(pairs), 6)))


def _stale(case: Case, rows: Lookup) -> typing.Iterator[Pattern]:
    """The same rows of the table as it was in an earlier step."""
    stem = Name.of(rows.name).stem
    for step in range(case.name.step - 2, -1, -1):
        text = str(Name(stem, "new", step) if step else Name(stem, "init", 1))
        known = case.runs.reference.get(text)
        if known is not None and known.shape == rows.table.shape:
            yield Pattern(STALE, known.astype(np.float64)[rows.wanted].reshape(case.shape), {"table": text},
                          trials=case.name.step)


def _of_shards(case: Case, rows: Lookup) -> typing.Iterator[Pattern]:
    """The reference's row plus a row of each other shard of the table, by one of the ways to keep an id in a range."""
    table, ids, more = rows.table, rows.wanted, (case.val - case.ref).reshape(-1, case.shape[-1])
    for n in case.runs.group_sizes or (2, 4, 8):
        size = len(table) // n
        if len(table) % n or size < 2:
            continue
        starts = np.arange(0, len(table), size)[:, None]
        wrong: Array = ids[rows.wrong]
        for way, last in (("first", 0), ("last", size - 1)):  # the table's own first and last have other meanings
            if (wrong % size == last).all() and 0 < wrong.min() and wrong.max() < len(table) - 1 and (
                    rows.wrong[np.isin(ids, wrong)].all()):
                which = ", ".join(map(str, np.unique(wrong)[:4]))
                yield Pattern(EDGES, case.val, {"shards": n, "way": way, "ids": which}, 5, 2)
        for way, rows_of in {
                "the first row": starts + 0 * ids, "the last row": starts + size - 1 + 0 * ids,
                "the nearest row": np.clip(ids, starts, starts + size - 1),
                "the row of the id modulo the shard's size": starts + (ids - starts) % size}.items():
            others = np.where((ids // size != starts // size)[..., None], table[rows_of], 0.0).sum(axis=0)
            yield Pattern(OF_SHARDS, (table[ids] + others).reshape(case.shape), {"shards": n, "way": way}, trials=4)
    extra, at, half = _ids(table, more, 2.0 * near(case)), rows.wrong, len(table) // 2
    if len(table) % 2 == 0 and (extra[at] >= 0).all() and (extra[at] // half != ids[at] // half).all():
        expected = case.ref.reshape(more.shape) + np.where(at[:, None], table[np.maximum(extra, 0)], 0.0)
        yield Pattern(OF_SHARDS, expected.reshape(case.shape), {"shards": 2, "way": "some row"}, fitted=2)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.reference.dtype.kind != "f" or not case.seen.any() or case.every or not np.isfinite(case.val).all():
        return
    rows = Lookup.of(case)
    if rows is not None and (rows.found < 0).any():
        yield from _stale(case, rows)
        yield from _of_shards(case, rows)
    elif rows is not None:
        yield from _others(case, rows)
    elif (rows := Lookup.of_sum(case)) is not None:
        yield from _others(case, rows, case.ref - rows.table[rows.wanted].reshape(case.shape))


# --- causes -----------------------------------------------------------------------------------------------------------

CAUSES = (
    Cause("stale_weights", (STALE,), "every row is that of the table as it was before the last update ({table}), bit "
          "for bit", "weights that are gathered or copied before the step, and not again after it"),
    Cause("embedding_mask", (OF_SHARDS,), "the reference's row plus {way} of each other of {shards} shards of the "
          "table: what ranks look up for ids that they do not own is not set to zero before the sum",
          "the mask of ids outside of a rank's range, before and after the look-up"),
    Cause("ids_at_shard_edge", (EDGES,), "all rows of ids that are the {way} of one of {shards} shards of the table "
          "differ ({ids}), and no others", "the range of ids of a rank: `<` against `<=`"),
    Cause("positions", (IDS,), "{how}", "position ids; where a rank's part of the sequence starts; documents that are "
          "packed; padding on the left", has(positions=True)),
    Cause("other_ids", (IDS,), "{how}", "how the ids are made that this module reads: shifts, the id that stands for "
          "padding, for the start or for no class, the slice of a rank"),
)
