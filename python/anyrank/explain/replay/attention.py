# SPDX-License-Identifier: Apache-2.0
"""Attention computed again from q, k and v: first the recipe that gives the reference's output is found, then the one
change of it that gives the other run's."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing

import numpy as np

from anyrank.explain.replay.sources import earlier, left, parameter, thinned, valid
from anyrank.explain.tensors import Array, Case, Name

BASES = (1e4, 1e6, 5e5, 1e5, 1e3, 2.5e5, 5e6, 1e7, 500.0)
MOST_SCORES = 1 << 24  # of a whole output
SMALL = 0.12  # of the difference that a change may leave on the rows that are tried, before it is held against all
_ROLE = re.compile(r"(?:^|[_.])(?:to_?|w|lin_?|in_?)?(kv|[qkv])(?:uery|ueries|ey|eys|alue|alues)?(?:$|[_.\d])")


@dataclasses.dataclass(frozen=True)
class Turn:
    """RoPE. frequencies: of each pair of features; the features after them are not turned. Positions, of all samples or
    of each: of queries and keys; None: 0, 1, .."""

    frequencies: Array
    halves: tuple[bool, bool] = (True, True)  # of q and k: pairs (i, i + n/2); else (2i, 2i + 1)
    sides: tuple[int, int, int] = (1, 1, 0)  # how q, k and v are turned; -1: backwards
    last: bool = False  # the last features are turned, and not the first
    q_positions: Array | None = None
    k_positions: Array | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """seen: [1 or samples, queries, keys]. softmax: "seen", or what is wrong with it. parts: of ranks, 0: none."""

    scale: float
    seen: Array
    turn: Turn | None = None
    cap: float = 0.0
    slopes: Array | None = None
    sinks: Array | None = None
    softmax: str = "seen"
    dealt: bool = False  # query heads are dealt out to KV heads in turn
    order: tuple[int, ...] = ()  # of heads in the output
    joined: str = "heads"  # side by side; "lanes": features of all heads in turn; "unmoved": heads before tokens
    chunks: Array | None = None  # the rank's part of each token


@dataclasses.dataclass(frozen=True)
class Heads:
    """q: [samples, queries, heads, features]; k, v: [samples, keys, KV heads, features]."""

    q: Array
    k: Array
    v: Array
    packed: str = ""


@dataclasses.dataclass(frozen=True)
class Target:
    """The output: of heads side by side, times a matrix; or the probabilities themselves."""

    case: Case
    matrix: Array | None  # [in, out]
    bias: Array | float = 0.0
    probabilities: bool = False

    def rows(self, array: Array) -> Array:
        """[samples, queries, ..] of an array of the case's shape."""
        return array.swapaxes(1, 2) if self.probabilities else array.reshape(array.shape[0], array.shape[1], -1)

    def takes(self, heads: Heads) -> bool:
        """Whether the matrix is one of as many inputs as the heads have features together."""
        return self.matrix is None or self.matrix.shape[0] == heads.q.shape[2] * heads.v.shape[3]

    def shaped(self, rows: Array) -> Array:
        return rows.swapaxes(1, 2) if self.probabilities else rows.reshape(self.case.shape)


def role_of(name: str) -> str:
    last = name.rpartition(".")[2]
    found = _ROLE.search(last) or _ROLE.search(name)
    return found[1] if found and not ("query" in last and "key" in last) else ""


# --- what it computes -------------------------------------------------------------------------------------------------


def turned(x: Array, turn: Turn, side: int, positions: Array | None, rows: Array) -> Array:
    """x: [rows, heads, features]."""
    sign = turn.sides[side]
    if sign == 0:
        return x
    n = len(turn.frequencies)
    at: Array = (rows if positions is None else positions[rows]).astype(np.float64)
    angles = sign * at[:, None, None] * turn.frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    result: Array = np.array(x, np.float64)
    part = result[..., -2 * n:] if turn.last else result[..., :2 * n]
    halves = turn.halves[min(side, 1)]
    a, b = (part[..., :n], part[..., n:]) if halves else (part[..., 0::2], part[..., 1::2])
    a[...], b[...] = a * cos - b * sin, b * cos + a * sin
    return result


def _positions(positions: Array | None, sample: int) -> Array | None:
    return positions if positions is None or positions.ndim == 1 else positions[sample % len(positions)]


def scores(heads: Heads, r: Recipe, sample: int, rows: Array) -> Array:
    """[KV heads, heads of each, rows, keys]"""
    q, k = heads.q[sample][rows], heads.k[sample]
    keys = np.arange(k.shape[0])
    if r.turn is not None:
        q = turned(q, r.turn, 0, _positions(r.turn.q_positions, sample), rows)
        k = turned(k, r.turn, 1, _positions(r.turn.k_positions, sample), keys)
    groups = k.shape[1]
    shared = q.shape[1] // groups
    q = q.reshape(len(rows), shared, groups, -1).swapaxes(1, 2) if r.dealt else q.reshape(len(rows), groups, shared, -1)
    s: Array = np.matmul(q.transpose(1, 2, 0, 3), k.transpose(1, 2, 0)[:, None]) * r.scale
    if r.cap > 0.0:
        s = r.cap * np.tanh(s / r.cap)
    if r.slopes is not None:
        by = r.slopes.reshape(shared, groups).T if r.dealt else r.slopes.reshape(groups, shared)
        s = s + by[:, :, None, None] * (keys[None, :] - rows[:, None])
    return s


def weights(s: Array, r: Recipe, seen: Array) -> Array:
    """Softmax of scores. seen: [rows, keys]; a query that sees nothing has the same weight for all keys, as where
    masked scores are the least number of their format."""
    none = ~seen.any(-1, keepdims=True)
    s, seen = np.where(none, 0.0, s), seen | none
    if r.softmax in ("zero", "capped"):  # unseen scores are 0, or the least that a cap leaves
        s = np.where(seen, s, 0.0 if r.softmax == "zero" else -r.cap)
    elif r.softmax == "inverted":
        s = np.where(seen, -np.inf, s)
    elif r.softmax not in ("after",):
        s = np.where(seen, s, -np.inf)
    axis = -2 if r.softmax == "queries" else -1
    most = s.max(axis, keepdims=True)
    if r.sinks is not None:
        sinks = r.sinks.reshape(*s.shape[:2], 1, 1)
        most = np.maximum(most, sinks)
    most = np.where(np.isfinite(most), most, 0.0)
    e = np.exp(s - most)
    if r.softmax in ("apart", "two") and r.chunks is not None:  # each part's own: their mean, or weighted by 2^ln(sum)
        e = e * np.exp(most) if r.softmax == "two" else e
        added, weight = np.zeros_like(e), np.zeros_like(most)
        for chunk in np.unique(r.chunks):
            own = np.where(r.chunks == chunk, e, 0.0)
            total = own.sum(-1, keepdims=True)
            share = (total > 0.0) * 1.0 if r.softmax == "apart" else np.where(total > 0.0, total, 0.0) ** math.log(2.0)
            added += share * np.divide(own, total, out=np.zeros_like(own), where=total > 0.0)
            weight += share
        mean: Array = added / np.where(weight > 0.0, weight, 1.0)
        return mean
    total = e.sum(axis, keepdims=True)
    if r.sinks is not None:
        total = total + np.exp(sinks - most)
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0.0)
    result: Array = np.where(seen, p, 0.0) if r.softmax == "after" else p
    return result


def at_home(p: Array, chunks: Array, rows: Array) -> Array:
    """Probabilities [.., rows, keys] where the values of the query's own part stand for those of every part."""
    parts = [np.flatnonzero(chunks == chunk) for chunk in np.unique(chunks)]
    summed = np.sum([p[..., part] for part in parts], axis=0)
    result: Array = np.zeros_like(p)
    for part in parts:
        own = np.isin(rows, part)
        result[..., np.flatnonzero(own)[:, None], part] = summed[..., own, :]
    return result


def output(target: Target, heads: Heads, r: Recipe, sample: int, rows: Array) -> Array:
    """The case's rows of one sample: [rows, features], or of probabilities [rows, heads, keys]."""
    everything = r.softmax == "queries" or r.joined == "unmoved"
    own = np.arange(heads.q.shape[1]) if everything else rows
    seen = r.seen[sample if r.seen.shape[0] > 1 else 0][own]
    p = weights(scores(heads, r, sample, own), r, seen)
    p = p[:, :, rows] if r.softmax == "queries" else p
    if target.probabilities:
        joined = p.swapaxes(0, 1) if r.dealt else p
        rows_first: Array = joined.reshape(-1, *p.shape[2:]).swapaxes(0, 1)
        return rows_first
    p = at_home(p, r.chunks, rows) if r.softmax == "home" and r.chunks is not None else p
    v = heads.v[sample]
    if r.turn is not None and r.turn.sides[2]:
        v = turned(v, r.turn, 2, _positions(r.turn.k_positions, sample), np.arange(v.shape[0]))
    context = np.matmul(p, v.transpose(1, 0, 2)[:, None])  # [groups, shared, rows, features]
    context = context.swapaxes(0, 1) if r.dealt else context
    context = context.reshape(-1, *context.shape[2:])
    context = context[list(r.order)] if r.order else context
    if r.joined == "unmoved":
        flat = context.reshape(context.shape[1], -1)[rows]
    else:
        flat = (context.transpose(1, 2, 0) if r.joined == "lanes" else context.swapaxes(0, 1)).reshape(len(rows), -1)
    result: Array = flat if target.matrix is None else flat @ target.matrix + target.bias
    return result


def everything(target: Target, heads: Heads, r: Recipe) -> Array:
    rows = np.arange(heads.q.shape[1])
    return target.shaped(np.stack([output(target, heads, r, b, rows) for b in range(heads.q.shape[0])]))


# --- what it reads ----------------------------------------------------------------------------------------------------


def targets(case: Case) -> typing.Iterator[Target]:
    if case.name.kind != "fwd" or case.reference.dtype.kind != "f" or len(case.shape) not in (3, 4):
        return
    if len(case.shape) == 4:
        yield Target(case, None, probabilities=True)
        return
    weight, bias = (parameter(case, f"{case.name.stem}.{part}") for part in ("weight", "bias"))
    if weight is None or weight.ndim != 2:
        yield Target(case, None)
        return
    added: Array | float = 0.0 if bias is None else bias.astype(np.float64)
    for matrix in (weight.T, weight) if weight.shape[0] == weight.shape[1] else (
            (weight.T,) if weight.shape[0] == case.shape[-1] else (weight,)):
        if matrix.shape[1] == case.shape[-1]:
            yield Target(case, matrix.astype(np.float64), added)


def _siblings(case: Case) -> typing.Iterator[dict[str, str]]:
    """{role: name} of tensors near by that are q, k and v by their names, or all in one (""): the last of each."""
    names, stem = earlier(case), case.name.stem
    tried: list[dict[str, str]] = []
    for named in _named(case, names, stem):
        if named not in tried:
            tried.append(named)
            yield named


def _named(case: Case, names: list[str], stem: str) -> typing.Iterator[dict[str, str]]:
    for _ in range(2):
        prefix = stem + "." if stem == case.name.stem and any(n.startswith(stem + ".") for n in names) else (
            stem.rpartition(".")[0] + "." if "." in stem else "")
        stem = prefix[:-1]
        inside = [n for n in names if n.startswith(prefix) and ".in" not in n[len(prefix):]]
        found = {role_of(Name.of(n).stem[len(prefix):]): n for n in inside}
        if {"q", "k", "v"} <= found.keys():
            yield {role: found[role] for role in "qkv"}
        if {"q", "kv"} <= found.keys():
            yield {role: found[role] for role in ("q", "kv")}
        for n in reversed(inside):
            if not role_of(Name.of(n).stem[len(prefix):]):
                yield {"": n}


def _split(x: Array, size: int, queries: int) -> Array | None:
    """[samples, tokens, heads, features], in binary64."""
    if x.ndim == 4:
        moved = x if x.shape[1] == queries and x.shape[2] != queries else x.swapaxes(1, 2)
        return moved.astype(np.float64) if moved.shape[-1] == size else None
    if x.ndim != 3 or x.shape[-1] % size:
        return None
    return x.reshape(*x.shape[:2], -1, size).astype(np.float64)


def _packed(x: Array, heads: int, size: int) -> typing.Iterator[Heads]:
    """One tensor: q|k|v, or KV heads each with their queries."""
    if x.ndim != 3 or x.shape[-1] % size or (x.shape[-1] // size - heads) % 2 or x.shape[-1] // size <= heads:
        return
    groups = (x.shape[-1] // size - heads) // 2
    if heads % groups:
        return
    apart: Array = x.reshape(*x.shape[:2], -1, size).astype(np.float64)
    cut = heads + groups
    yield Heads(apart[:, :, :heads], apart[:, :, heads:cut], apart[:, :, cut:], "one after the other")
    together: Array = x.reshape(*x.shape[:2], groups, -1, size).astype(np.float64)
    if groups > 1:
        q = together[:, :, :, :-2].reshape(*x.shape[:2], heads, size)
        yield Heads(q, together[:, :, :, -2], together[:, :, :, -1], "by KV heads")


def _paired(q: Array, kv: Array, size: int) -> typing.Iterator[Heads]:
    """k and v in one tensor: k|v, or each head's k and v."""
    if q.ndim != 3 or kv.ndim != 3 or q.shape[-1] % size or kv.shape[-1] % (2 * size):
        return
    own: Array = q.reshape(*q.shape[:2], -1, size).astype(np.float64)
    both: Array = kv.reshape(*kv.shape[:2], -1, size).astype(np.float64)
    groups = both.shape[2] // 2
    if own.shape[2] % groups == 0:
        yield Heads(own, both[:, :, :groups], both[:, :, groups:])
        if groups > 1:
            yield Heads(own, both[:, :, ::2], both[:, :, 1::2])


def _sizes(case: Case, width: int) -> list[int]:
    """Features of a head: of the recorded number of heads alone, or any."""
    if case.runs.heads and width % case.runs.heads == 0:
        return [width // case.runs.heads]
    return [d for d in (64, 128, 32, 16, 8, 96, 80, 256, 48, 24, 12, 4, 2) if width % d == 0]


def readings(target: Target) -> typing.Iterator[Heads]:
    """q, k and v as the output may have read them."""
    case = target.case
    width = case.shape[-1] if target.matrix is None else target.matrix.shape[0]
    queries = case.shape[-2]
    for named in _siblings(case) if not thinned(case) else ():
        arrays = {role: case.runs.reference[name] for role, name in named.items()}
        if any(x.ndim not in (3, 4) or x.shape[0] != case.shape[0] for x in arrays.values()):
            continue
        if target.probabilities:
            width = case.shape[1] * (arrays["q"].shape[-1] if arrays["q"].ndim == 4 else
                                     arrays["q"].shape[-1] // case.shape[1]) if "q" in arrays else 0
        for size in [arrays["q"].shape[-1]] if "q" in arrays and arrays["q"].ndim == 4 else (
                [width // case.shape[1]] if target.probabilities else _sizes(case, width)):
            if "" in arrays and width and arrays[""].shape[1] == queries:
                yield from (h for h in _packed(arrays[""], width // size, size)
                            if math.prod(h.q.shape[:3]) * queries <= MOST_SCORES)
            elif "kv" in arrays and size:
                yield from _paired(arrays["q"], arrays["kv"], size)
            elif "q" in arrays and size:
                split = [_split(arrays[role], size, queries if role == "q" else _tokens(arrays["k"], queries))
                         for role in "qkv"]
                if _fit_together(split, width, queries):
                    q, k, v = typing.cast(list[Array], split)
                    yield Heads(q, k, v)


def _tokens(x: Array, queries: int) -> int:
    return int(x.shape[1] if x.ndim == 3 or x.shape[1] == queries else x.shape[2])


def _fit_together(split: list[Array | None], width: int, queries: int) -> bool:
    q, k, v = split
    if q is None or k is None or v is None:
        return False
    return bool(q.shape[2] * v.shape[3] == width and q.shape[1] == queries and k.shape[:3] == v.shape[:3]
                and q.shape[2] % k.shape[2] == 0 and q.shape[0] == k.shape[0]
                and math.prod(q.shape[:3]) * k.shape[1] <= MOST_SCORES)


# --- masks ------------------------------------------------------------------------------------------------------------


def mask(queries: int, keys: int, ahead: int | None = 0, window: int = 0, starts: Array | None = None,
         hidden: Array | None = None) -> Array:
    """[1 or samples, queries, keys]. ahead: of its own position a query sees; None: all. starts: each query's first
    key, hidden: keys that are not seen, by sample."""
    i, j = np.arange(queries)[None, :, None], np.arange(keys)[None, None, :]
    seen: Array = np.ones((1, queries, keys), bool)
    if ahead is not None:
        seen = seen & (j <= i + ahead)
    if window:
        seen = seen & (j > i - window)
    if starts is not None:
        seen = seen & (j >= starts[:, :, None]) if ahead is not None else seen & (
            starts[:, :, None] == starts[:, None, :])
    if hidden is not None:
        seen = seen & ~hidden[:, None, :]
    return seen


def interval(target: Target, heads: Heads, r: Recipe, sample: int, row: int, wanted: Array) -> tuple[int, int, float]:
    """The first and last key of a query, and how much they leave unexplained, if it sees all keys between."""
    own = np.array([row])
    s = scores(heads, r, sample, own)[:, :, 0]  # [groups, shared, keys]
    e = np.exp(s - s.max(-1, keepdims=True))
    v = heads.v[sample].transpose(1, 0, 2)[:, None]
    sums, totals = np.cumsum(e[..., None] * v, 2), np.cumsum(e, 2)  # [groups, shared, keys, features]
    pad = [(0, 0), (0, 0), (1, 0)]
    sums, totals = np.pad(sums, [*pad, (0, 0)]), np.pad(totals, pad)
    n = s.shape[-1]
    lasts = sorted({row, n - 1, max(row - 1, 0), min(row + 1, n - 1)})
    pairs = [(0, last) for last in range(n)] + [(first, last) for last in lasts for first in range(1, last + 1)]
    first, last = np.array(pairs).T
    with np.errstate(divide="ignore", invalid="ignore"):
        context = (sums[:, :, last + 1] - sums[:, :, first]) / (totals[:, :, last + 1] - totals[:, :, first])[..., None]
    context = context.swapaxes(0, 1) if r.dealt else context
    flat = context.reshape(-1, *context.shape[2:]).swapaxes(0, 1).reshape(len(pairs), -1)
    made = flat if target.matrix is None else flat @ target.matrix + target.bias
    apart = np.linalg.norm(made - wanted, axis=-1) / (np.linalg.norm(wanted) + 1e-300)
    at = int(np.nanargmin(apart))
    return int(first[at]), int(last[at]), float(apart[at])


def masks(probe: Probe, r: Recipe) -> typing.Iterator[tuple[str, Array, dict[str, typing.Any]]]:
    """What else queries may see: by keys that explain some rows."""
    target, heads = probe.target, probe.heads
    queries, keys = r.seen.shape[1:]
    square = queries == keys
    yield "open", mask(queries, keys, None), {}
    if square:
        for ahead in (0, 1, -1, -2):
            seen = mask(queries, keys, ahead)
            yield "ahead", seen | (np.eye(queries, dtype=bool) & ~seen.any(-1, keepdims=True)), {"ahead": ahead}
    else:
        for ahead in (0, keys - queries):
            yield "ahead", r.seen & mask(queries, keys, ahead), {"ahead": ahead}
    for n in {len(r.seen), *(len(r.seen) // n for n in target.case.runs.group_sizes)} if len(r.seen) > 1 else ():
        yield "first", r.seen[np.arange(len(r.seen)) // n * n], {"samples": n}
    for kind, seen in given(target.case, queries, keys):
        for own in (seen, seen & mask(queries, keys, 0)) if square else (seen,):
            yield kind, own, {"keys": int((~own.any(1)).sum(-1).max())}
    if target.probabilities:
        return
    found = [(b, t, *interval(target, heads, r, b, t, probe.whole[b, t])) for b, t in probe.places]
    near = [(b, t, first, last) for b, t, first, last, apart in found if apart < 0.02]
    for window in sorted({t - first + 1 for _, t, first, last in near if first > 0 and last == t} if square else ()):
        yield "window", r.seen & mask(queries, keys, 0, window), {"window": window}
        yield "window", mask(queries, keys, 0, window), {"window": window}
    starts = probe.starts
    if square and starts is not None:
        yield "found", mask(queries, keys, 0, 0, starts), {}
        yield "found", mask(queries, keys, None, 0, starts), {}
    hidden = _hidden(probe, r)
    if hidden is not None:
        base = mask(queries, keys, 0) if square and is_causal(r.seen) else mask(queries, keys, None)
        for own in {id(base): base, id(r.seen): r.seen}.values():
            yield "hidden", own & ~hidden[:, None, :], {"keys": int(hidden.sum(1).max())}


def given(case: Case, queries: int, keys: int) -> typing.Iterator[tuple[str, Array]]:
    """Keys that queries may see by what the model read of each token: its document's number, 0 or 1 for padding, its
    position in a document."""
    for name in earlier(case):
        array = case.runs.reference[name]
        if array.dtype.kind not in "iub" or array.ndim != 2 or array.shape[1] != keys:
            continue
        values: Array = array.astype(np.int64)
        found, counts = np.unique(values, return_counts=True)
        for value in found[np.argsort(-counts, kind="stable")[:12]] if 2 < len(found) else ():  # a word that is padding
            yield "hidden", np.broadcast_to((values != value)[:, None, :], (len(values), queries, keys))
        if values.min() == 0 and values.max() == 1:
            yield "hidden", np.broadcast_to((values == 1)[:, None, :], (len(values), queries, keys))
        if queries == keys:
            changes = np.diff(values, axis=1)
            if (values[:, 1:][changes != 0] != 0).all() and 0.0 < (changes != 0).mean() < 0.5:
                yield "documents", values[:, :, None] == values[:, None, :]
            starts = first_keys(values)
            if starts is not None:
                yield "documents", mask(queries, keys, 0, 0, starts)


def first_keys(positions: Array) -> Array | None:
    """The first key of each query's document, by positions that count from 0 in each; None: they do not."""
    at = np.arange(positions.shape[1])[None]
    starts = at - positions
    known = (starts >= 0).all() and (np.diff(starts, axis=1) >= 0).all() and (positions[:, 1:] == 0).any()
    return np.asarray(starts) if known else None


def counted(probe: Probe) -> typing.Iterator[Array]:
    """Positions that start again within a sample: those that the model read, and those of documents."""
    case, keys = probe.target.case, probe.heads.k.shape[1]
    for name in earlier(case):
        array = case.runs.reference[name]
        if array.dtype.kind in "iu" and array.ndim == 2 and array.shape[1] == keys and first_keys(array) is not None:
            yield array
    if probe.starts is not None:
        yield np.arange(keys)[None] - probe.starts


def is_causal(seen: Array) -> bool:
    return bool(seen.shape[1] == seen.shape[2] and not np.triu(seen.any(0), 1).any())


def _hidden(probe: Probe, r: Recipe) -> Array | None:
    """Keys at an end of each sample that its last queries do not see."""
    heads, causal = probe.heads, is_causal(r.seen)
    samples, keys = heads.k.shape[:2]
    hidden = np.zeros((samples, keys), bool)
    for b in range(samples):
        row = heads.q.shape[1] - 1
        first, last, apart = interval(probe.target, heads, r, b, row, probe.whole[b, row])
        if apart > 0.02:
            return None
        hidden[b, :first], hidden[b, last + 1:] = True, True
    return hidden if hidden.any() else None


# --- the search -------------------------------------------------------------------------------------------------------


class Probe:
    """Some rows of the output, which a recipe is tried on. places: (sample, query). against: what is left is measured
    in parts of this."""

    def __init__(self, target: Target, heads: Heads, whole: Array, places: list[tuple[int, int]],
                 base: Array | None = None) -> None:
        self.target, self.heads, self.places, self.whole = target, heads, places, whole
        self.samples: dict[int, Array] = {b: np.array([t for s, t in places if s == b]) for b, _ in places}
        self.wanted = self._of(whole)
        self.against = self.wanted if base is None else self.wanted - self._of(base)

    def _of(self, rows: Array) -> Array:
        result: Array = np.concatenate([rows[b][own].reshape(len(own), -1) for b, own in self.samples.items()])
        return result

    def made(self, r: Recipe) -> Array:
        result: Array = np.concatenate([output(self.target, self.heads, r, b, rows).reshape(len(rows), -1)
                               for b, rows in self.samples.items()])
        return result

    def left(self, r: Recipe) -> float:
        with np.errstate(all="ignore"):
            found = left(self.made(r), self.wanted, self.against)
        return found if math.isfinite(found) else math.inf

    @functools.cached_property
    def starts(self) -> Array | None:
        """The first key of each query's document: a token that sees itself alone begins one. None: there is one
        document."""
        heads, whole = self.heads, self.whole
        if self.target.probabilities or heads.q.shape[1] != heads.k.shape[1]:
            return None
        shared = heads.q.shape[2] // heads.k.shape[2]
        alone = np.repeat(heads.v, shared, axis=2).reshape(*heads.v.shape[:2], -1)
        alone = alone if self.target.matrix is None else alone @ self.target.matrix + self.target.bias
        size = np.linalg.norm(whole, axis=-1)
        begins = np.linalg.norm(alone - whole, axis=-1) <= valid(self.target.case) * size
        begins[:, 0] = True
        if not begins[:, 1:].any() or begins.mean() > 0.5:
            return None
        at = np.where(begins, np.arange(begins.shape[1]), 0)
        result: Array = np.maximum.accumulate(at, axis=1)
        return result


def places(case: Case, target: Target, of_difference: bool) -> list[tuple[int, int]]:
    """Rows to try: early, middle and late ones; of a difference, those that differ, and one that does not."""
    rows = target.rows(case.off)
    samples, queries = rows.shape[:2]
    off: Array = np.asarray(rows.reshape(samples, queries, -1).any(-1))
    if not of_difference:
        found = {(b, t) for b in {0, samples - 1} for t in {1, 2, queries // 2, queries - 1} if t < queries}
        return sorted(found)
    wrong = np.argwhere(off)
    some = wrong[np.unique(np.linspace(0, len(wrong) - 1, 7).astype(int))]
    right = np.argwhere(~off)
    return sorted({(int(b), int(t)) for b, t in [*some, *right[:1], *right[-1:]]})


def turns(case: Case, size: int) -> list[Turn]:
    """RoPE as a reference may have it: by a dumped table of cosines and sines, or by the usual bases."""
    found = []
    known = tables(case)
    for n in sorted({*known, *(size * k // m for m in (2, 3, 4) for k in range(1, m + 1))}):
        if n < 2 or n % 2 or n > size:
            continue
        for frequencies in [known[n]] if n in known else [base ** (-np.arange(0, n, 2) / n) for base in BASES]:
            found += [Turn(frequencies, (True, True)), Turn(frequencies, (False, False))]
    return found


def tables(case: Case) -> dict[int, Array]:
    """Frequencies by width, of dumped cosines and sines of positions: [.., positions, width]."""
    found: dict[int, Array] = {}
    names = [name for name in earlier(case) if case.runs.reference[name].ndim >= 2]
    for a, b in zip(names, names[1:]):
        x, y = case.runs.reference[a], case.runs.reference[b]
        if x.shape != y.shape or x.shape[-2] < 2 or x.shape[-1] % 2 or x.dtype.kind != "f":
            continue
        x, y = (z.reshape(-1, *z.shape[-2:])[0, :2].astype(np.float64) for z in (x, y))
        square = x ** 2 + y ** 2
        if square[0, 0] > 0 and np.allclose(square, square[0, 0], rtol=0.02) and np.allclose(y[0], 0.0, atol=1e-6):
            n = x.shape[-1]
            angles = np.arctan2(y[1], x[1])
            found[n] = angles[:n // 2] if np.allclose(angles[:n // 2], angles[n // 2:]) else angles[::2]
    return found


def golden(error: typing.Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """The best factor between two, by a grid of logarithms and golden sections: (factor, error)."""
    grid = np.exp(np.linspace(math.log(low), math.log(high), 40))
    tried = [error(x) for x in grid]
    at = int(np.argmin(tried))
    if tried[at] > 0.6:
        return float(grid[at]), tried[at]
    a, b = math.log(grid[max(at - 1, 0)]), math.log(grid[min(at + 1, 39)])
    share = (math.sqrt(5.0) - 1.0) / 2.0
    one, two = b - share * (b - a), a + share * (b - a)
    left, right = error(math.exp(one)), error(math.exp(two))
    for _ in range(30):
        if left < right:
            b, two, right = two, one, left
            one = b - share * (b - a)
            left = error(math.exp(one))
        else:
            a, one, left = one, two, right
            two = a + share * (b - a)
            right = error(math.exp(two))
    return math.exp((a + b) / 2.0), min(left, right)
