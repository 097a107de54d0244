# SPDX-License-Identifier: Apache-2.0
"""Rows of a table: which rows stand where the reference has others, and rows of other shards that are added."""

from __future__ import annotations

import dataclasses
import math
import re
import typing

import numpy as np

from anyrank.explain.causes import Cause, every, has
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import near
from anyrank.explain.tensors import Array, Case, Name

IDS, OF_SHARDS, STALE = "other_ids", "rows_of_other_shards", "stale_rows"
MOST_ROWS, MOST_VALUES = 1 << 16, 1 << 24  # that are looked up; of a table
LEAST = 4  # features of a row, by which it is told from others
_CALL = re.compile(r"\.call\d+$")


def _table(case: Case) -> tuple[str, Array] | None:
    """The weight of the module that gave the tensor, as it was in this step."""
    name, known = case.name, case.runs.reference
    stem = _CALL.sub("", name.stem)
    of = ("init", 1) if name.step == 1 else ("new", name.step - 1)
    text = str(Name(f"{stem}.weight", *of))
    if name.kind != "fwd" or not 2 <= len(case.shape) or text not in known:
        return None
    weight = known[text]
    fits = weight.ndim == 2 and weight.shape[1] == case.shape[-1] >= LEAST and weight.size <= MOST_VALUES
    return (text, weight.astype(np.float64)) if fits and math.prod(case.shape[:-1]) <= MOST_ROWS else None


def _ids(table: Array, rows: Array, limit: float) -> Array:
    """Of each row the first row of the table that it is; -1: it is none."""
    random = np.random.default_rng(1).standard_normal(table.shape[1])
    known = table @ random
    order = np.argsort(known, kind="stable")
    asked = rows @ random
    first = np.searchsorted(known[order], asked - 2.0 * limit * math.sqrt(table.shape[1]))
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
        told = _table(case)
        if told is None:
            return None
        name, table = told
        limit = near(case)
        ref, val = (x.reshape(-1, case.shape[-1]) for x in (case.ref, case.val))
        wanted = _ids(table, ref, limit)
        if (wanted < 0).any():
            return None
        wrong = np.asarray(case.seen.reshape(ref.shape).any(axis=1))
        return cls(name, table, wanted, np.where(wrong, _ids(table, val, limit), wanted), wrong)


def _of_sum(case: Case) -> Lookup | None:
    """A table whose rows are added, one for each token from the first on: of what differs by two rows of it."""
    name, known = case.name, case.runs.reference
    if not case.activation or len(case.shape) != 3 or case.shape[-1] < LEAST or math.prod(case.shape[:-1]) > MOST_ROWS:
        return None
    of = ("init", 1) if name.step == 1 else ("new", name.step - 1)
    rows, gap = case.shape[0] * case.shape[1], case.val - case.ref
    for text in known:
        own = Name.of(text)
        if (own.kind, own.step) != of or known[text].ndim != 2 or known[text].shape[1] != case.shape[2] or not (
                case.shape[1] <= len(known[text])) or known[text].size > MOST_VALUES:
            continue
        table: Array = known[text].astype(np.float64)
        wrong: Array = np.asarray(case.seen.any(axis=2))
        i, t = np.nonzero(wrong)
        if not (_ids(table, gap[i[:8], t[:8]] + table[t[:8]], 2.0 * near(case)) >= 0).all():
            continue
        wanted = np.tile(np.arange(case.shape[1]), (case.shape[0], 1))
        found = wanted.copy()
        found[wrong] = _ids(table, gap[wrong] + table[wanted[wrong]], 2.0 * near(case))
        if (found >= 0).all() and len(wrong[wrong]) >= 2:
            return Lookup(text, table, wanted.ravel(), found.ravel(), wrong.reshape(rows))
    return None


def _is_run(ids: Array) -> bool:
    """Whether ids mostly rise by one from token to token, as positions do."""
    return ids.ndim > 1 and ids.shape[-1] > 2 and bool(np.mean(np.diff(ids, axis=-1) == 1) > 0.5)


def _restart(own: Array, other: Array, runs: bool) -> dict[str, typing.Any]:
    """The token at which positions start again as at the first, those before it being right."""
    tokens = np.flatnonzero((own != other).any(axis=tuple(range(own.ndim - 1)))) if runs else np.zeros(0, int)
    first = int(tokens[0]) if len(tokens) else 0
    wrong: Array = np.asarray(own[..., first] != other[..., first])
    back: Array = np.asarray(other[..., first] == own[..., 0])
    return {"again": first > 0 and bool(back[wrong].all()), "token": first}


def _others(case: Case, rows: Lookup, rest: Array | float = 0.0) -> typing.Iterator[Pattern]:
    """Each row that differs is another row of the table. rest: what is added to the table's rows."""
    wanted, found = rows.wanted[rows.wrong], rows.found[rows.wrong]
    pairs = sorted({*zip(wanted.tolist(), found.tolist())})
    by = {b - a for a, b in pairs}
    own: Array = rows.wanted.reshape(case.shape[:-1])
    other: Array = rows.found.reshape(case.shape[:-1])
    runs = _is_run(own) and _is_run(other)
    firsts = runs and bool(np.all(other == np.arange(other.shape[-1])))
    text = ", ".join(f"row {b} for row {a}" for a, b in pairs[:3]) + (", .." if len(pairs) > 3 else "")
    yield Pattern(IDS, rest + rows.table[rows.found].reshape(case.shape), {
        "table": rows.name, "pairs": text, "wrong": int(rows.wrong.sum()), "rows": len(rows.wrong), "from": pairs[0][0],
        "to": pairs[0][1], "one": len(pairs) == 1, "by": next(iter(by)) if len(by) == 1 else 0, "positions": runs,
        "from_start": firsts, **_restart(own, other, runs),
        "all_of_it": len(pairs) == 1 and bool((rows.wanted[~rows.wrong] != pairs[0][0]).all()),
    }, fitted=0 if firsts else 1 if len(by) == 1 or len({b for _, b in pairs}) == 1 else min(len(pairs), 6))


def _stale(case: Case, rows: Lookup) -> typing.Iterator[Pattern]:
    """The same rows of the table as it was in an earlier step."""
    stem = Name.of(rows.name).stem
    for step in range(case.name.step - 2, -1, -1):
        text = str(Name(stem, "new", step) if step else Name(stem, "init", 1))
        known = case.runs.reference.get(text)
        if known is not None and known.shape == rows.table.shape:
            yield Pattern(STALE, known.astype(np.float64)[rows.wanted].reshape(case.shape), {
                "table": text, "step": case.name.step}, trials=case.name.step)


def _of_shards(case: Case, rows: Lookup) -> typing.Iterator[Pattern]:
    """The reference's row plus a row of each other shard of the table, by one of the ways to keep an id in a range."""
    table, ids = rows.table, rows.wanted
    for n in case.runs.group_sizes or (2, 4, 8):
        size = len(table) // n
        if len(table) % n or size < 2:
            continue
        ways: dict[str, typing.Callable[[int], Array]] = {
            "the first row": lambda start, size=size: np.full(len(ids), start),  # type: ignore[misc]
            "the last row": lambda start, size=size: np.full(len(ids), start + size - 1),  # type: ignore[misc]
            "the nearest row": lambda start, size=size: np.clip(ids, start, start + size - 1),  # type: ignore[misc]
            "the row of the id modulo the shard's size": (
                lambda start, size=size: start + (ids - start) % size)}  # type: ignore[misc]
        for way, row_of in ways.items():
            expected = table[ids].copy()
            for start in range(0, len(table), size):
                other = ids // size != start // size
                expected[other] += table[row_of(start)[other]]
            yield Pattern(OF_SHARDS, expected.reshape(case.shape), {"shards": n, "way": way}, trials=4)
    more = (case.val - case.ref).reshape(-1, case.shape[-1])
    extra = _ids(table, more, 2.0 * near(case))
    at = rows.wrong
    half = len(table) // 2
    if len(table) % 2 == 0 and (extra[at] >= 0).all() and (extra[at] // half != ids[at] // half).all():
        expected = case.ref.reshape(more.shape) + np.where(at[:, None], table[np.maximum(extra, 0)], 0.0)
        yield Pattern(OF_SHARDS, expected.reshape(case.shape), {"shards": 2, "way": "some row"}, fitted=2)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.reference.dtype.kind != "f" or not case.seen.any() or case.every:
        return
    rows = Lookup.of(case)
    if rows is None:
        if np.isfinite(case.val).all() and (rows := _of_sum(case)) is not None:
            yield from _others(case, rows, case.ref - rows.table[rows.wanted].reshape(case.shape))
        return
    if (rows.found >= 0).all():
        yield from _others(case, rows)
    elif np.isfinite(case.val).all():
        yield from _stale(case, rows)
        yield from _of_shards(case, rows)


# --- causes -----------------------------------------------------------------------------------------------------------

_ROWS = "the table {table} is right, and {wrong} of {rows} rows are others of it: {pairs}"
CAUSES = (
    Cause("stale_weights", (STALE,), "every row is that of the table as it was before the last update ({table}), bit "
          "for bit", "weights that are gathered or copied before the step, and not again after it"),
    Cause("embedding_mask", (OF_SHARDS,), "the reference's row plus {way} of each other of {shards} shards of the "
          "table: what ranks look up for ids that they do not own is not set to zero before the sum",
          "the mask of ids outside of a rank's range, before and after the look-up"),
    Cause("positions", (IDS,), "positions start again at token {token}: " + _ROWS,
          "where a rank's part of the sequence starts; documents that are packed", has(again=True)),
    Cause("position_offset", (IDS,), "positions are {by} on: " + _ROWS,
          "position ids; where a rank's part of the sequence starts; padding on the left",
          every(has(positions=True, by=lambda by: by != 0))),
    Cause("positions", (IDS,), "positions count from the start of each row, where the reference's start later: "
          + _ROWS, "padding on the left, documents that are packed, where a rank's part of the sequence starts",
          has(from_start=True)),
    Cause("positions", (IDS,), "other positions: " + _ROWS, "position ids; where a rank's part of the sequence "
          "starts; padding on the left", has(positions=True)),
    Cause("other_id", (IDS,), "row {to} of the table {table} stands wherever the reference has row {from}, at {wrong} "
          "of {rows} places", "the id that stands for padding, for the start, or for no class",
          has(one=True, all_of_it=True)),
    Cause("ids_off_by_one", (IDS,), "ids are {by} on: " + _ROWS,
          "ids that are counted from another start, and the special tokens before them",
          has(by=lambda by: abs(by) == 1, one=False)),
    Cause("other_ids", (IDS,), "other ids: " + _ROWS,
          "how the ids are made that this module reads: shifts, special ids, the slice of a rank"),
)
