# SPDX-License-Identifier: Apache-2.0
"""Attention computed again from q, k and v: its recipe, what it may have read, and what its queries may see."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import typing

import numpy as np

from anyrank.explain.replay.sources import earlier, left, parameter, valid
from anyrank.explain.tensors import Array, Case, Name

BASES = (1e4, 1e6, 5e5, 1e5, 1e3, 2.5e5, 5e6, 1e7, 500.0)
MOST_SCORES = 1 << 24  # of a whole output
MOST_FEATURES = 256  # of a head, where their number is not recorded
MOST_KEYS = 128  # of which any run may be hidden, and not one at an end alone
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
    """seen: [1 or samples, queries, keys]. softmax: "seen", or what is wrong with it."""

    scale: float
    seen: Array
    turn: Turn | None = None
    cap: float = 0.0
    slopes: Array | None = None
    sinks: Array | None = None
    softmax: str = "seen"
    order: tuple[int, ...] = ()  # of heads in the output
    joined: str = "heads"  # side by side; "lanes": features of all heads in turn; "unmoved": heads before tokens
    chunks: Array | None = None  # the rank's part of each token


@dataclasses.dataclass(frozen=True)
class Heads:
    """q: [samples, queries, heads, features]; k, v: [samples, keys, KV heads, features]. packed: how they lie in one
    tensor. last: how many features, the last ones, RoPE is for, of latent attention; 0: it is not known."""

    q: Array
    k: Array
    v: Array
    packed: str = ""
    last: int = 0


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

    def shaped(self, rows: Array) -> Array:
        return rows.swapaxes(1, 2) if self.probabilities else rows.reshape(self.case.shape)

    def of(self, context: Array) -> Array:
        result: Array = context if self.matrix is None else context @ self.matrix + self.bias
        return result


# --- what it computes -------------------------------------------------------------------------------------------------


def turned(x: Array, turn: Turn, side: int, sample: int, rows: Array) -> Array:
    """x: [rows, heads, features]."""
    if not turn.sides[side]:
        return x
    n, positions = len(turn.frequencies), turn.k_positions if side else turn.q_positions
    if positions is not None and positions.ndim > 1:
        positions = positions[sample % len(positions)]
    at: Array = (rows if positions is None else positions[rows]).astype(np.float64)
    angles = turn.sides[side] * at[:, None, None] * turn.frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    result: Array = np.array(x, np.float64)
    part = result[..., -2 * n:] if turn.last else result[..., :2 * n]
    a, b = (part[..., :n], part[..., n:]) if turn.halves[min(side, 1)] else (part[..., 0::2], part[..., 1::2])
    a[...], b[...] = a * cos - b * sin, b * cos + a * sin
    return result


def scores(heads: Heads, r: Recipe, sample: int, rows: Array) -> Array:
    """[KV heads, heads of each, rows, keys]"""
    q, k = heads.q[sample][rows], heads.k[sample]
    keys = np.arange(k.shape[0])
    if r.turn is not None:
        q, k = turned(q, r.turn, 0, sample, rows), turned(k, r.turn, 1, sample, keys)
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    q = q.reshape(len(rows), groups, shared, -1)
    s: Array = np.matmul(q.transpose(1, 2, 0, 3), k.transpose(1, 2, 0)[:, None]) * r.scale
    if r.cap > 0.0:
        s = r.cap * np.tanh(s / r.cap)
    if r.slopes is not None:
        s = s + r.slopes.reshape(groups, shared, 1, 1) * (keys[None, :] - rows[:, None])
    return s


def weights(s: Array, r: Recipe, seen: Array) -> Array:
    """Softmax of scores. seen: [rows, keys]; a query that sees nothing has the same weight for all keys, as where
    masked scores are the least number of their format."""
    none = ~seen.any(-1, keepdims=True)
    s, seen = np.where(none, 0.0, s), seen | none
    if r.softmax != "after":  # of "zero" and "capped" unseen scores are 0, or the least that a cap leaves
        s = np.where(seen ^ (r.softmax == "inverted"), s, {"zero": 0.0, "capped": -r.cap}.get(r.softmax, -np.inf))
    axis = -2 if r.softmax == "queries" else -1
    sinks = None if r.sinks is None else r.sinks.reshape(*s.shape[:2], 1, 1)
    most = s.max(axis, keepdims=True) if sinks is None else np.maximum(s.max(axis, keepdims=True), sinks)
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
    total = e.sum(axis, keepdims=True) + (0.0 if sinks is None else np.exp(sinks - most))
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
    own = np.arange(heads.q.shape[1]) if r.softmax == "queries" or r.joined == "unmoved" else rows
    p = weights(scores(heads, r, sample, own), r, r.seen[sample if r.seen.shape[0] > 1 else 0][own])
    p = p[:, :, rows] if r.softmax == "queries" else p
    if target.probabilities:
        return np.moveaxis(p.reshape(-1, *p.shape[2:]), 0, 1)
    p = at_home(p, r.chunks, rows) if r.softmax == "home" and r.chunks is not None else p
    v = heads.v[sample]
    v = v if r.turn is None else turned(v, r.turn, 2, sample, np.arange(v.shape[0]))
    context = np.matmul(p, v.transpose(1, 0, 2)[:, None]).reshape(-1, p.shape[2], v.shape[2])  # [heads, rows, features]
    context = context[list(r.order)] if r.order else context
    if r.joined == "unmoved":
        return target.of(context.reshape(context.shape[1], -1)[rows])
    return target.of((context.transpose(1, 2, 0) if r.joined == "lanes" else context.swapaxes(0, 1)).reshape(
        len(rows), -1))


def everything(target: Target, heads: Heads, r: Recipe) -> Array:
    rows = np.arange(heads.q.shape[1])
    return target.shaped(np.stack([output(target, heads, r, b, rows) for b in range(heads.q.shape[0])]))


# --- what it reads ----------------------------------------------------------------------------------------------------


def targets(case: Case) -> typing.Iterator[Target]:
    if case.name.kind != "fwd" or case.reference.dtype.kind != "f" or len(case.shape) not in (3, 4) or case.every:
        return
    weight, bias = (parameter(case, f"{case.name.stem}.{part}") for part in ("weight", "bias"))
    if len(case.shape) == 4 or weight is None or weight.ndim != 2:
        yield Target(case, None, probabilities=len(case.shape) == 4)
        return
    for matrix in (weight.T, weight):
        if matrix.shape[1] == case.shape[-1]:
            yield Target(case, matrix.astype(np.float64), 0.0 if bias is None else bias.astype(np.float64))


def role_of(name: str) -> str:
    last = name.rpartition(".")[2]
    found = _ROLE.search(last) or _ROLE.search(name)
    return found[1] if found and not ("query" in last and "key" in last) else ""


def _siblings(case: Case) -> typing.Iterator[dict[str, str]]:
    """{role: name} of tensors near by that are q, k and v by their names, or all in one (""): the last of each."""
    known, tried = earlier(case), list[dict[str, str]]()
    for names, up in itertools.product(([n for n in known if n in case.runs.other], known), (0, 1)):
        own = f"{case.name.stem}."
        stems = [own] * any(n.startswith(own) for n in names) + [
            ".".join([*case.name.stem.split(".")[:-n], ""]) for n in (1, 2)]
        prefix = stems[up]
        roles = {n: role_of(Name.of(n).stem[len(prefix):]) for n in names if n.startswith(prefix)
                 and ".in" not in n[len(prefix):] and n[len(prefix):].count(".") <= 2}
        found = {role: n for n, role in roles.items()}
        for named in [*({role: found[role] for role in some} for some in (("q", "k", "v"), ("q", "kv"))
                        if {*some} <= found.keys()), *({"": n} for n in reversed(roles) if not roles[n])]:
            if named not in tried:
                tried.append(named)
                yield named


def _apart(x: Array, size: int, queries: int) -> Array:
    """[samples, tokens, heads, features]"""
    if x.ndim == 4:
        return x if x.shape[1] == queries != x.shape[2] else x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, size)


def _cut(arrays: dict[str, Array], size: int, heads: int, queries: int) -> typing.Iterator[Heads]:
    """Ways to take the tensors for q, k and v: of one for all q|k|v, or KV heads each with their queries; of k and v in
    one k|v, or each head's k and v."""
    apart = {role: _apart(x, size, queries) for role, x in arrays.items()}
    if "v" in apart:
        yield Heads(apart["q"], apart["k"], apart["v"])
    elif "kv" in apart:
        both, groups = apart["kv"], apart["kv"].shape[2] // 2
        yield Heads(apart["q"], both[:, :, :groups], both[:, :, groups:])
        yield Heads(apart["q"], both[:, :, ::2], both[:, :, 1::2])
    elif (groups := (apart[""].shape[2] - heads) // 2) > 0 and apart[""].shape[2] == heads + 2 * groups:
        x, cut = apart[""], heads + groups
        yield Heads(x[:, :, :heads], x[:, :, heads:cut], x[:, :, cut:], "one after the other")
        if groups > 1 and heads % groups == 0:
            x = x.reshape(*x.shape[:2], groups, -1, size)
            yield Heads(x[:, :, :, :-2].reshape(*x.shape[:2], heads, size), x[..., -2, :], x[..., -1, :], "by KV heads")


def _latent(case: Case, named: dict[str, str], width: int) -> typing.Iterator[Heads]:
    """Latent attention: the last features of k, for which RoPE is, are one vector for all heads, with which the output
    of another module near by ends."""
    arrays = {role: case.runs.reference[name] for role, name in named.items()}
    parent = next(iter(named.values())).rpartition(".")[0]
    beside = [case.runs.reference[n] for n in earlier(case) if n.rpartition(".")[0] == parent][-8:]
    common = math.gcd(width, *(x.shape[-1] for x in arrays.values()))
    for count in (n for n in range(1, common + 1) if common % n == 0):
        q, k, v = (x.reshape(*x.shape[:2], count, -1) for x in (arrays[role if role in arrays else "kv"]
                                                                for role in "qkv"))
        k, v = (k, v) if "v" in arrays else np.split(k, [max(k.shape[-1] - width // count, 0)], axis=-1)
        last = q.shape[-1] - k.shape[-1]
        for x in beside if last > 0 == last % 2 and k.shape[-1] and v.shape[-1] == width // count else ():
            if x.shape[:-1] == q.shape[:2] and x.shape[-1] >= last and x.shape[-1] % (count * last):
                shared = np.broadcast_to(x[:, :, None, -last:], (*k.shape[:3], last))
                yield Heads(q, np.concatenate([k, shared], -1), v, "", last)


def readings(target: Target) -> typing.Iterator[Heads]:
    """q, k and v as the output may have read them."""
    case, queries = target.case, target.case.shape[-2]
    for named in _siblings(case):
        arrays: dict[str, Array] = {role: case.runs.reference[name] for role, name in named.items()}
        if any(x.ndim not in (3, 4) or x.shape[0] != case.shape[0] or role == "" and x.ndim == 4
               for role, x in arrays.items()):
            continue
        first, count = next(iter(arrays.values())), case.shape[1]
        width = case.shape[-1] if target.matrix is None else target.matrix.shape[0]
        sizes = [width // case.runs.heads] if case.runs.heads and width % case.runs.heads == 0 else [
            d for d in range(2, MOST_FEATURES + 1, 2) if width % d == 0]
        if "q" in arrays and (target.probabilities or first.ndim == 4):
            sizes = [first.shape[-1] if first.ndim == 4 else first.shape[-1] // count]
        elif target.probabilities:
            sizes = [first.shape[-1] // (count + 2 * n) for n in range(1, count + 1) if count % n == 0]
        for size in sizes:
            if size and all(x.shape[-1] % size == 0 for x in arrays.values()):
                own = count * size if target.probabilities else width
                yield from (Heads(h.q.astype(np.float64), h.k.astype(np.float64), h.v.astype(np.float64), h.packed)
                            for h in _cut(arrays, size, own // size, queries) if _fits(h, own, queries))
        if "q" in arrays and first.ndim == 3 and not target.probabilities:
            yield from (h for h in _latent(case, named, width) if _fits(h, width, queries))


def _fits(h: Heads, width: int, queries: int) -> bool:
    return bool(h.q.shape[2] * h.v.shape[3] == width and h.q.shape[1] == queries and h.k.shape[:3] == h.v.shape[:3]
                and h.k.shape[2] and h.q.shape[2] % h.k.shape[2] == 0 and h.q.shape[::3] == h.k.shape[::3]
                and math.prod(h.q.shape[:3]) * h.k.shape[1] <= MOST_SCORES)


# --- masks ------------------------------------------------------------------------------------------------------------


def mask(queries: int, keys: int, ahead: int | None = 0, window: int = 0, starts: Array | None = None,
         hidden: Array | None = None) -> Array:
    """[1 or samples, queries, keys]. ahead: of its own position a query sees; None: all. starts: each query's first
    key, hidden: keys that are not seen, by sample."""
    i, j = np.arange(queries)[None, :, None], np.arange(keys)[None, None, :]
    seen: Array = np.ones((1, queries, keys), bool) if ahead is None else j <= i + ahead
    if window:
        seen = seen & (j > i - window)
    if starts is not None:
        seen = seen & (j >= starts[:, :, None] if ahead is not None else starts[:, :, None] == starts[:, None, :])
    return seen if hidden is None else seen & ~hidden[:, None, :]


def interval(target: Target, heads: Heads, r: Recipe, sample: int, row: int, wanted: Array,
             seen: int = 0) -> tuple[int, int, float]:
    """The first and last key of a query, and how much they leave unexplained, if it sees all keys between; or, of so
    many keys that it may see, those that it does not."""
    s = scores(heads, r, sample, np.array([row]))[:, :, 0]  # [groups, shared, keys]
    e = np.exp(s - s.max(-1, keepdims=True))
    v = heads.v[sample].transpose(1, 0, 2)[:, None]
    sums, totals = (np.insert(np.cumsum(x, 2), 0, 0.0, 2) for x in (e[..., None] * v, e))
    n = s.shape[-1]
    lasts = sorted({row, n - 1, max(row - 1, 0), min(row + 1, n - 1)})
    if seen:
        n, lasts = seen, list(range(seen)) if seen <= MOST_KEYS else [seen - 1]
    first, last = np.array([(0, last) for last in range(-1 if seen else 0, n)] + [
        (first, last) for last in lasts for first in range(1, last + 1)]).T
    with np.errstate(divide="ignore", invalid="ignore"):
        up, down = ((x[:, :, last + 1] - x[:, :, first]) if not seen else (
            x[:, :, [seen]] - x[:, :, last + 1] + x[:, :, first]) for x in (sums, totals))
        context = up / down[..., None]
    made = target.of(np.moveaxis(context, 2, 0).reshape(len(first), -1))
    apart = np.linalg.norm(made - wanted, axis=-1) / (np.linalg.norm(wanted) + 1e-300)
    at = int(np.argmin(np.where(np.isfinite(apart), apart, np.inf)))
    return int(first[at]), int(last[at]), float(apart[at])


def masks(probe: Probe, r: Recipe) -> typing.Iterator[tuple[str, Array, int]]:
    """What else queries may see: by keys that explain some rows. The number: how far ahead, the window, or what a
    sentence says."""
    target, heads = probe.target, probe.heads
    queries, keys = r.seen.shape[1:]
    square = queries == keys
    yield "open", mask(queries, keys, None), 0
    for ahead in (0, 1, -1, -2) if square else (0, keys - queries):
        seen = mask(queries, keys, ahead) & (True if square else r.seen)
        yield "ahead", seen | (np.eye(queries, dtype=bool) & ~seen.any(-1, keepdims=True)) if square else seen, ahead
    for n in {len(r.seen), *(len(r.seen) // n for n in target.case.runs.group_sizes)} if len(r.seen) > 1 else ():
        yield "first", r.seen[np.arange(len(r.seen)) // n * n], n
    for kind, seen in given(target.case, queries, keys):
        for own in (seen, seen & mask(queries, keys, 0)) if square else (seen,):
            yield kind, own, int((~own.any(1)).sum(-1).max())
    if target.probabilities:
        yield "found", shown(probe.whole), 0
        return
    found = [(t, *interval(target, heads, r, b, t, probe.whole[b, t])) for b, t in probe.places]
    for window in sorted({t - first + 1 for t, first, last, apart in found if apart < 0.02 and 0 < first <= last == t}
                         if square else ()):
        yield "window", r.seen & mask(queries, keys, 0, window), window
        yield "window", mask(queries, keys, 0, window), window
    for ahead in (0, None) if square and probe.starts is not None else ():
        yield "found", mask(queries, keys, ahead, 0, probe.starts), 0
    hidden = _hidden(probe, r)
    base = mask(queries, keys, 0 if is_causal(r.seen) else None)
    if hidden is not None:
        yield from (("hidden", own & ~hidden[:, None, :], int(hidden.sum(1).max())) for own in (base, r.seen))


def shown(rows: Array) -> Array:
    """What queries see, by the rows of probabilities, [samples, queries, heads, keys]."""
    result: Array = (rows != 0.0).any(2)
    return result


def given(case: Case, queries: int, keys: int) -> typing.Iterator[tuple[str, Array]]:
    """Keys that queries may see by what the model read of each token: its document's number, 0 or 1 for padding, its
    position in a document."""
    for name in earlier(case):
        array = case.runs.reference[name]
        if array.dtype.kind not in "iub" or array.ndim != 2 or array.shape[1] != keys:
            continue
        values: Array = array.astype(np.int64)
        found, counts = np.unique(values, return_counts=True)
        for value in found[np.argsort(-counts, kind="stable")[:12]] if 2 < len(found) else [0][:int(
                found[0] == 0 and found[-1] == 1)]:  # a word that is padding
            yield "hidden", np.broadcast_to((values != value)[:, None, :], (len(values), queries, keys))
        if queries == keys and (starts := documents(values)) is not None:
            yield "documents", starts[:, :, None] == starts[:, None, :]


def documents(values: Array) -> Array | None:
    """The first token of each token's document, where numbers of tokens, [samples, tokens], are documents' numbers or
    positions in them; None: they are neither, or there is one document."""
    changes = np.diff(values, axis=1) != 0
    if not (values[:, 1:][changes] != 0).all() or not 0.0 < changes.mean() < 0.5:
        return first_keys(values)
    starts: Array = np.maximum.accumulate(np.pad(changes, ((0, 0), (1, 0))) * np.arange(values.shape[1]), axis=1)
    return starts


def first_keys(positions: Array) -> Array | None:
    """The first key of each query's document, by positions that count from 0 in each; None: they do not."""
    starts: Array = np.arange(positions.shape[1])[None] - positions
    known = (starts >= 0).all() and (np.diff(starts, axis=1) >= 0).all() and (positions[:, 1:] == 0).any()
    return starts if known else None


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
    """A run of keys of each sample that its last query does not see."""
    hidden: Array = np.zeros(probe.heads.k.shape[:2], bool)
    row, keys = probe.heads.q.shape[1] - 1, probe.heads.k.shape[1]
    for b in range(len(hidden)):
        first, last, apart = interval(probe.target, probe.heads, r, b, row, probe.whole[b, row], keys)
        if apart > 0.02:
            return None
        hidden[b, first:last + 1] = True
    return hidden if hidden.any() else None


# --- rows that are tried ----------------------------------------------------------------------------------------------


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

    def left(self, r: Recipe) -> float:
        with np.errstate(all="ignore"):
            made = np.concatenate([output(self.target, self.heads, r, b, rows).reshape(len(rows), -1)
                                   for b, rows in self.samples.items()])
            found = left(made, self.wanted, self.against)
        return found if math.isfinite(found) else math.inf

    @functools.cached_property
    def starts(self) -> Array | None:
        """The first key of each query's document: a token that sees itself alone begins one. None: there is one
        document."""
        heads, whole = self.heads, self.whole
        if self.target.probabilities or heads.q.shape[1] != heads.k.shape[1]:
            return None
        alone = np.repeat(heads.v, heads.q.shape[2] // heads.k.shape[2], axis=2)
        apart = np.linalg.norm(self.target.of(alone.reshape(*alone.shape[:2], -1)) - whole, axis=-1)
        begins = apart <= 0.02 * np.linalg.norm(whole, axis=-1)
        begins[:, 0] = True
        if not begins[:, 1:].any() or begins.mean() > 0.5:
            return None
        result: Array = np.maximum.accumulate(np.where(begins, np.arange(begins.shape[1]), 0), axis=1)
        return result


def places(case: Case, target: Target, of_difference: bool) -> list[tuple[int, int]]:
    """Rows to try: early, middle and late ones; of a difference, those that differ, and one that does not."""
    rows = target.rows(case.off)
    samples, queries = rows.shape[:2]
    if not of_difference:
        return sorted({(b, t) for b in {0, samples - 1} for t in {1, 2, queries // 2, queries - 1} if t < queries})
    off: Array = np.asarray(rows.reshape(samples, queries, -1).any(-1))
    wrong, right = np.argwhere(off), np.argwhere(~off)
    some = wrong[np.unique(np.linspace(0, len(wrong) - 1, 7).astype(int))]
    return sorted({(int(b), int(t)) for b, t in [*some, *right[:1], *right[-1:]]})


def turns(case: Case, heads: Heads) -> list[Turn]:
    """RoPE as a reference may have it: by a dumped table of cosines and sines, or by the usual bases."""
    known, size = tables(case), heads.q.shape[-1]
    usual = {*known, *(size * k // m for m in (2, 3, 4) for k in range(1, m + 1))}
    widths = [heads.last] if heads.last else sorted(n for n in usual if n % 2 == 0 and 2 <= n <= size)
    return [Turn(frequencies, (halves, halves), last=heads.last > 0) for n in widths for halves in (True, False)
            for frequencies in ([known[n]] if n in known else [base ** (-np.arange(0, n, 2) / n) for base in BASES])]


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
            n, angles = x.shape[-1], np.arctan2(y[1], x[1])
            found[n] = angles[:n // 2] if np.allclose(angles[:n // 2], angles[n // 2:]) else angles[::2]
    return found


def best_of(error: typing.Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """The best number between two, by ever finer grids of logarithms: (number, error)."""
    grid = np.linspace(math.log(low), math.log(high), 40)
    for _ in range(12):
        tried = [error(math.exp(x)) for x in grid]
        at = int(np.argmin(tried))
        if tried[at] > 0.6:
            break
        grid = np.linspace(grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)], 9)
    return math.exp(float(grid[at] if tried[at] > 0.6 else grid[4])), tried[at]
