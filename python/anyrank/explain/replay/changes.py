# SPDX-License-Identifier: Apache-2.0
"""Attention with one thing changed: first the recipe that gives the reference's output is found, then the one change
of it that gives the other run's."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay import attention as a
from anyrank.explain.replay.sources import USABLE, parameter, parameters, valid, where_wrong
from anyrank.explain.tensors import Array, Case
from anyrank.explain.words import ranks_of


@dataclasses.dataclass(frozen=True)
class Change:
    """cause, how: what it is, and is said of it. fitted: how many of its numbers were chosen to fit."""

    cause: str
    how: str
    recipe: a.Recipe
    fitted: int = 0
    heads: a.Heads | None = None  # where q, k and v are other ones


Changes = typing.Iterator[Change]
Part = typing.Callable[[a.Probe, a.Recipe], Changes]
_with = dataclasses.replace


def _best(probe: a.Probe, cause: str, how: str, recipe: typing.Callable[[float], a.Recipe], low: float,
          high: float) -> Changes:
    """The number that fits best."""
    x, apart = a.best_of(lambda x: probe.left(recipe(x)), low, high)
    if apart < a.SMALL:
        yield Change(cause, how.format(x), recipe(x), 1)


SIDES = {"q not turned by RoPE": (0, 1, 0), "k not turned by RoPE": (1, 0, 0), "v turned by RoPE as well": (1, 1, 1),
         "RoPE turning the other way round": (-1, -1, 0), "RoPE turning q the other way round": (-1, 1, 0),
         "RoPE turning k the other way round": (1, -1, 0)}


def _of_turn(probe: a.Probe, r: a.Recipe) -> Changes:
    """Of RoPE: other frequencies, pairs, sides and width."""
    turn, size = r.turn, probe.heads.q.shape[-1]
    if turn is None:
        for other in a.turns(probe.target.case, probe.heads):
            yield Change("rope_turn", "q and k turned by RoPE, which the reference does not do", _with(r, turn=other))
        return

    def turned(**fields: typing.Any) -> a.Recipe:
        return _with(r, turn=_with(turn, **fields))

    yield Change("rope_turn", "q and k not turned by RoPE", _with(r, turn=None))
    for how, sides in ((how, of) for how, of in SIDES.items() if not of[2] or probe.heads.v.shape[-1] == size):
        yield Change("rope_turn", how, turned(sides=sides))
    both = turn.halves[0]
    for halves in ((not both, not both), (both, not both), (not both, both)):
        yield Change("rope_pairing", "RoPE turning other pairs of features: neighbours against halves",
                     turned(halves=halves))
    n = 2 * len(turn.frequencies)
    old = float(turn.frequencies[1]) ** (-n / 2.0) if n > 2 else 1e4
    if n < size:
        yield Change("rope_settings", "RoPE turning the last features", turned(last=not turn.last))
    yield Change("positions", "RoPE turning by twice the angles: applied twice, or positions that count in steps of 2",
                 turned(frequencies=2.0 * turn.frequencies))
    for factor in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 4, 8):
        yield Change("rope_settings", f"RoPE's angles times {factor:g}", turned(frequencies=factor * turn.frequencies))

    def based(base: float, of: int = 0, width: int = n) -> a.Recipe:
        return turned(frequencies=base ** (-np.arange(0, width, 2) / (of or width)))

    for base in a.BASES:
        yield Change("rope_settings", f"RoPE of the base {base:g}", based(base))
    for of in {size, probe.heads.q.shape[2] * size} - {n}:  # exponents of a head's features or the model's width
        yield Change("rope_settings", f"RoPE of the base {old ** (n / of):.4g}", based(old, of))
    for other in {*range(2, size + 1, 2)} - {n}:
        yield Change("rope_settings", f"RoPE turning {other} of {size} features", based(old, 0, other))
    yield from _best(probe, "rope_settings", "RoPE of the base {:.4g}", based, 16.0, 1e8)


def _of_scale(probe: a.Probe, r: a.Recipe) -> Changes:
    """The scale of scores, and what limits them."""
    size, count = probe.heads.q.shape[-1], probe.heads.q.shape[2]
    known = {1.0: "1", size ** -0.5: f"1/sqrt({size})", 1.0 / size: f"1/{size}", float(size) ** 0.5: f"sqrt({size})"}
    for n in (1, *probe.target.case.runs.group_sizes):
        for of in (size * count // n, count // n, size // n, probe.heads.v.shape[-1]):
            known.setdefault(max(of, 1) ** -0.5, f"1/sqrt({of})")
    was = f", {known.get(r.scale, f'{r.scale:.4g}')} in the reference"
    for scale, text in known.items():
        if scale != r.scale:
            yield Change("softmax_scale", f"scores times {text}{was}", _with(r, scale=scale))
    yield from _best(probe, "softmax_scale", "scores times {:.4g}" + was, lambda x: _with(r, scale=x),
                     r.scale / 128, r.scale * 128)
    for cap in ({0.0, 20.0, 30.0, 50.0} - {r.cap}):
        yield Change("softcap", (f"a cap of {cap:g} on the scores" if cap else "no cap on the scores") + (
            f", {r.cap:g} in the reference" if r.cap else ""), _with(r, cap=cap))
    yield from _best(probe, "softcap", "a cap of {:.4g} on the scores", lambda x: _with(r, cap=x), 1 / 8, 256)


def slopes_of(count: int, base: float = 8.0) -> Array:
    """ALiBi's of so many heads."""
    n = 2 ** int(math.log2(count))
    result: Array = np.concatenate([2.0 ** (-base * np.arange(1, n + 1) / n),
                                    2.0 ** (-base * np.arange(1, 2 * (count - n), 2) / (2 * n))])
    return result


def _of_slopes(probe: a.Probe, r: a.Recipe) -> Changes:
    count, slopes = probe.heads.q.shape[2], r.slopes
    if slopes is None:
        yield Change("alibi_slopes", "ALiBi's slopes added", _with(r, slopes=slopes_of(count)))
        return
    ways: list[tuple[str, Array | None]] = [
        ("left out", None), ("of the other sign", -slopes),
        ("of the plain series", 2.0 ** (-8.0 * np.arange(1, count + 1) / count)),
        *((f"2^(-{base:g} i/n)", slopes_of(count, base)) for base in (4.0, 16.0, 2.0, 1.0)),
        *((f"those of {count // n} heads, {n} times", np.tile(own, n)) for n in (2, 3, 4, 6, 8) if count % n == 0
          for own in (slopes[:count // n], slopes_of(count // n)))]
    for how, other in ways:
        yield Change("alibi_slopes", f"ALiBi's slopes {how}", _with(r, slopes=other))
    yield from _best(probe, "alibi_slopes", "ALiBi's slopes times {:.4g}", lambda x: _with(r, slopes=x * slopes),
                     1 / 128, 128)


def _of_mask(probe: a.Probe, r: a.Recipe) -> Changes:
    """Other masks; of documents, which hide where positions begin, also with positions that start again in each."""
    ways = [r, *(change.recipe for positions in (a.counted(probe) if len(r.seen) > 1 else ())
                 for change in _placed(r, "", positions, ("q and k",)))]
    for (kind, seen, n), way in itertools.product(a.masks(probe, r), ways):
        if seen.shape != r.seen.shape or (seen != r.seen).any():
            yield Change(*_said(kind, n, r.seen, seen), _with(way, seen=seen), int(kind == "found"))


def _said(kind: str, n: int, was: Array, now: Array) -> tuple[str, str]:
    """What a mask in place of another is, and how it is said; "": nothing that has a name."""
    gained, lost, causal = int((now & ~was).sum()), int((was & ~now).sum()), a.is_causal(was)
    if kind == "open":
        return ("causal_mask", "no causal mask: each query sees all keys of its sample") if causal else (
            "keys_masked", f"all keys seen, of which the reference masks {gained}: padding is attended to")
    if kind == "ahead" and causal and n:
        return "causal_mask", f"a causal mask that lets a query see keys up to {n} after its own"
    if kind == "ahead" and not causal and (n == 0 or not gained):
        return "causal_mask", "a causal mask, which the reference does not have"
    if kind == "ahead" and n == lost == 0:
        return ("document_boundaries", "a causal mask alone, where the reference hides other documents") if (
            len(was) > 1) else ("attention_window", "a causal mask alone: the reference has a window as well")
    if kind == "hidden":
        return "keys_masked", (f"up to {n} keys of a sample masked ({gained} scores seen that the reference masks, "
                               f"{lost} the other way round)")
    return {"window": ("attention_window", f"a window of {n} keys"),
            "first": ("document_boundaries", f"the keys that the first of {n} samples sees, for all of them"),
            "ahead": ("", "")}.get(
                kind, ("document_boundaries", "documents that begin elsewhere than in the reference"))


SOFTMAXES = {
    "after": ("attention_softmax", "the mask after the softmax, whose denominator then counts the unseen keys too"),
    "zero": ("attention_softmax", "the scores of unseen keys set to 0 and not to -inf, so that the softmax gives them "
             "weight"),
    "queries": ("attention_softmax", "the softmax over the queries and not over the keys"),
    "inverted": ("keys_masked", "the mask inverted: each query sees what the reference hides")}


def _of_softmax(probe: a.Probe, r: a.Recipe) -> Changes:
    for softmax, said in SOFTMAXES.items():
        yield Change(*said, _with(r, softmax=softmax))
    if r.cap:
        yield Change("attention_softmax", "the scores of unseen keys limited by the cap, which comes after the mask",
                     _with(r, softmax="capped"))


def _of_sinks(probe: a.Probe, r: a.Recipe) -> Changes:
    case = probe.target.case
    for stem in parameters(case, case.name.stem.rpartition(".")[0]):
        value = parameter(case, stem)
        if value is not None and value.shape == (probe.heads.q.shape[2],) and "sink" in stem:
            yield Change("sinks_missing", "the sinks left out of the softmax, or added to it",
                         _with(r, sinks=None if r.sinks is not None else value.astype(np.float64)))


def parts_of(tokens: int, n: int) -> typing.Iterator[tuple[str, Array, Array]]:
    """(name, each token's part, its place among the part's tokens) where n ranks share tokens: contiguous, zigzag."""
    at = np.arange(tokens)
    if tokens % n == 0:
        yield "contiguous", at // (tokens // n), at % (tokens // n)
    if tokens % (2 * n) == 0:
        length = tokens // (2 * n)
        chunk: Array = at // length
        yield "zigzag", np.minimum(chunk, 2 * n - 1 - chunk), at % length + np.where(chunk >= n, length, 0)


def token_parts(case: Case) -> tuple[int, ...]:
    """How many ranks may share the tokens of a sample: the mesh says so, or the copies are parts of them."""
    cut = any(box[1] != slice(0, case.shape[1]) for copy in case.copies for box in copy.boxes) and len(case.shape) == 3
    return case.runs.group_sizes if cut else tuple(n for name, n in case.runs.mesh.items() if name.startswith(
        ("cp", "sp", "ring", "ulysses", "context")))


def _of_parts(probe: a.Probe, r: a.Recipe) -> Changes:
    """Ranks that share the tokens: keys, positions and masks of their own part."""
    queries, keys = r.seen.shape[1:]
    for n in token_parts(probe.target.case) if queries == keys else ():
        for layout, part, place in parts_of(keys, n):
            own, gathered = part[:, None] == part[None, :], np.argsort(part * keys + place)
            there = np.argsort(gathered)
            for softmax, how in (
                    ("apart", f"a softmax over the keys of each of {n} ranks alone and the mean of what they give"),
                    ("two", f"a softmax over the keys of each of {n} ranks alone and their outputs weighted by powers "
                     "of 2 of logarithmic sums that are natural"),
                    ("home", f"the values of the own rank, of {n}, weighted by the other ranks' keys")):
                yield Change("ring_attention", how, _with(r, softmax=softmax, chunks=part))
            for seen in (place[:, None] >= place, np.where(own, r.seen, True), there[:, None] >= there,
                         np.where(own, r.seen, part[:, None] > part)) if a.is_causal(r.seen) else ():
                what = ("causal_mask", "a causal mask") if r.seen.sum() == queries * (queries + 1) // 2 else (
                    "attention_window", "a window")
                yield Change(what[0], f"{what[1]} by the places of tokens in the parts of {n} ranks ({layout}), not by "
                             "their positions", _with(r, seen=seen.reshape(-1, queries, keys)))
            for order in (gathered, there) if layout == "zigzag" else ():
                heads = a.Heads(probe.heads.q, probe.heads.k[:, order], probe.heads.v[:, order])
                yield Change("gathered_in_rank_order", f"keys and values in the order of {n} ranks ({layout} parts one "
                             "after the other), not in that of their positions",
                             _with(r, turn=r.turn and _with(r.turn, k_positions=order)), heads=heads)
            for how, positions in ((f"start again from 0 in each of {n} parts", place), (
                    f"take the tokens of {n} ranks as contiguous parts, which are a zigzag", there)):
                yield from _placed(r, how, positions)


def _of_blocks(probe: a.Probe, r: a.Recipe) -> Changes:
    """Ranks that share the tokens, of which each sees the keys of some others: what the reference sees of these, or all
    of them where that is nothing."""
    target, (queries, keys), differs = probe.target, r.seen.shape[1:], probe.target.rows(probe.target.case.off)
    off = np.argwhere(differs.reshape(*differs.shape[:2], -1).any(-1)).tolist()
    for n in (n for n in token_parts(target.case) if queries == keys and n <= MOST_RANKS):
        for layout, part, _ in parts_of(keys, n):
            whole, sees = r.seen, dict[int, tuple[int, ...]]()
            for rank, (b, t) in {int(part[t]): (b, t) for b, t in off}.items():  # one row of each rank
                none, own = ~np.isin(part, part[r.seen[:, part == rank].any((0, 1))]), r.seen[b % len(r.seen), t]
                rows = {on: np.where(part == rank, own, np.isin((part - rank) % n, on) & (own | none))
                        for k in range(n) for on in itertools.combinations(range(1, n), k)}  # so many ranks on
                left = {on: float(np.linalg.norm(a.output(target, probe.heads, _with(r, seen=np.broadcast_to(
                    row, (1, queries, keys))), b, np.array([t])) - probe.whole[b, t])) for on, row in rows.items()}
                best = sees[rank] = min(left, key=left.__getitem__)
                seen = np.isin((part - rank) % n, best) & (r.seen | none)
                whole = np.where((part == rank)[:, None] & (part != rank), seen, whole)
            said = [f"rank {i} those of {ranks_of({(i + by) % n for by in (0, *on)})}" for i, on in sees.items()]
            was = ", in the reference those of the ranks up to its own" * a.is_causal(r.seen)
            yield Change("ring_attention", f"ranks that see the keys of others ({layout} parts of {n} ranks{was}): "
                         f"{', '.join(said)}", _with(r, seen=whole), len({*sees.values()}) - 1)


def _placed(r: a.Recipe, how: str, positions: Array, sides: typing.Sequence[str] = ("q and k", "q", "k")) -> Changes:
    for side in sides:
        turn = r.turn and _with(r.turn, **{f"{x}_positions": positions for x in side.split(" and ")})
        if turn is not None:
            yield Change("positions", f"positions of {side} that {how}", _with(r, turn=turn))


def _of_positions(probe: a.Probe, r: a.Recipe) -> Changes:
    queries, keys = r.seen.shape[1:]
    for by in (1, -1, 2, -2, 3, -3, 4, -4):
        yield from _placed(r, f"are {by} on from those of k", np.arange(queries) + by, ("q",))
    first = min(t for _, t in a.places(probe.target.case, probe.target, True))
    for length in sorted({first, first - 1, first + 1, *(keys // n for n in (2, 4, 8))}) if queries == keys else ():
        if 1 < length < keys:
            yield from _placed(r, f"start again from 0 in each of {-(-keys // length)} parts",
                               np.arange(keys) % length, ("q and k",))


def _of_documents(probe: a.Probe, r: a.Recipe) -> Changes:
    """Positions that start again at each document, or do not."""
    if r.turn is not None and r.turn.q_positions is not None:
        yield from _placed(r, "run on over the ends of documents", np.arange(r.seen.shape[2]), ("q and k",))
        return
    for positions in a.counted(probe) if r.turn is not None else ():
        yield from _placed(r, "start again at each document", positions, ("q and k",))


def _of_heads(probe: a.Probe, r: a.Recipe) -> Changes:
    heads, flat = probe.heads, not probe.target.probabilities
    count, groups, size = heads.q.shape[2], heads.k.shape[2], heads.q.shape[3]
    for n in {1, *probe.target.case.runs.group_sizes} if 1 < groups < count else ():  # ranks
        if groups % n == 0:
            which = (np.arange(n)[:, None] * (groups // n) + np.arange(count // n) % (groups // n)).ravel()
            yield Change("wrong_kv_head", "query heads dealt out to the KV heads in turn, not in blocks", r,
                         heads=a.Heads(heads.q, heads.k[:, :, which], heads.v[:, :, which]))
    square, alike = heads.q.shape == heads.k.shape == heads.v.shape, heads.k.shape == heads.v.shape
    for what, (q, k, v) in (("q and k", "kqv"), ("k and v", "qvk"), ("q and v", "vkq")):
        if square or alike and what == "k and v":
            yield Change("other_module", f"{what} exchanged", r, heads=a.Heads(*(getattr(heads, x) for x in (q, k, v))))
    at = np.arange(count)
    orders = {"in reverse order": at[::-1], **{f"moved on by {by}": (at + by) % count for by in range(1, count)},
              **{f"dealt out in turn over {n}": at.reshape(n, -1).T.ravel() for n in range(2, count) if count % n == 0}}
    for how, order in orders.items() if flat and count > 1 else ():
        yield Change("slices_reordered", f"the heads of the output {how}", _with(r, order=tuple(order.tolist())))
    split = f"features cut into heads the other way round: [heads, {size}] against [{size}, heads]"
    yield Change("dimension_flattened", split, r, heads=a.Heads(*(
        x.reshape(*x.shape[:2], x.shape[3], x.shape[2]).swapaxes(2, 3) for x in (heads.q, heads.k, heads.v))))
    if flat:
        yield Change("dimension_flattened", split, _with(r, joined="lanes"))
        yield Change("transposed", "heads and tokens not exchanged back before the heads are put side by side",
                     _with(r, joined="unmoved"))
    if heads.packed:
        yield from _repacked(probe, r)


def _repacked(probe: a.Probe, r: a.Recipe) -> Changes:
    """The same packed tensor cut into q, k and v otherwise: at once, by KV heads, or by ranks."""
    heads, lead = probe.heads, probe.heads.q.shape[:2]
    count, groups, size = heads.q.shape[2], heads.k.shape[2], heads.q.shape[3]
    if heads.packed == "by KV heads":
        whole = np.concatenate([heads.q.reshape(*lead, groups, -1, size), heads.k[:, :, :, None],
                                heads.v[:, :, :, None]], axis=3).reshape(*lead, -1, size)
    else:
        whole = np.concatenate([heads.q, heads.k, heads.v], axis=2)
    ways = {"k|v|q": (1, (2, 0, 1)), "by KV heads, k and v first": (groups, (2, 0, 1)), "q|k|v": (1, (0, 1, 2)),
            "by KV heads": (groups, (0, 1, 2)), **{f"q|k|v of each of {n} ranks": (n, (0, 1, 2))
                                                   for n in probe.target.case.runs.group_sizes if groups % n == 0}}
    for name, (n, order) in ways.items():
        counts = (groups, groups, count) if order[0] else (count, groups, groups)
        parts = np.split(whole.reshape(*lead, n, -1, size), np.cumsum(counts)[:2] // n, axis=3)
        yield Change("packed_cut_as_one", f"the packed q, k and v cut as {name}", r, heads=a.Heads(
            *(parts[i].reshape(*lead, -1, size) for i in order)))


TABLE = (_of_mask, _of_softmax, _of_sinks, _of_scale, _of_turn, _of_slopes, _of_positions, _of_documents, _of_parts,
         _of_blocks, _of_heads)
TABLE_OF_REFERENCE = (_of_mask, _of_scale, _of_turn, _of_slopes, _of_sinks)  # what a reference may have
BEAM, MOST_RANKS = 4, 8  # recipes that are changed further; ranks of which each may see any others' keys
READINGS, FAR = 3, 0.9  # ways to read q, k and v that are looked at closely, of which plain recipes leave less


# --- the search -------------------------------------------------------------------------------------------------------


def _early(target: a.Target, heads: a.Heads) -> a.Probe:
    return a.Probe(target, heads, target.rows(target.case.ref), [(b, t) for b in range(min(heads.q.shape[0], 3))
                                                                for t in (1, 2, 3) if t < heads.q.shape[1]])


def starts_of(target: a.Target, heads: a.Heads) -> list[tuple[float, a.Recipe]]:
    """The nearest plain recipes: a causal mask or none, RoPE or none. A causal query with few keys before it knows
    nothing of windows and, mostly, documents, so that early ones are looked at."""
    queries, keys, size = heads.q.shape[1], heads.k.shape[1], heads.q.shape[-1]
    square = queries == keys
    masks = [a.mask(queries, keys, ahead) for ahead in ((0, None) if square else (None,))]
    masks += [a.shown(target.rows(target.case.ref))] if target.probabilities else []
    turns = [None, *(a.turns(target.case, heads) if square else ())]
    recipes = [a.Recipe(size ** -0.5, own, turn) for own in masks for turn in turns]
    return _search(_early(target, heads), recipes, (), valid(target.case))


def base_of(target: a.Target, heads: a.Heads, first: list[tuple[float, a.Recipe]]) -> tuple[float, a.Recipe]:
    """How much the nearest recipe of the reference leaves, and that recipe: scale and RoPE by early rows, then the mask
    by others; where that fails, all at once."""
    case, enough = target.case, valid(target.case)
    full = a.Probe(target, heads, target.rows(case.ref), a.places(case, target, False))
    found = list[tuple[float, a.Recipe]]()
    for probe, parts in ((_early(target, heads), TABLE_OF_REFERENCE[1:]), (full, TABLE_OF_REFERENCE)):
        some = _search(probe, [r for _, r in first], parts, enough)
        found += _search(full, [r for _, r in some[:3]], (_of_mask, _of_documents), enough)
        if min(left for left, _ in found) <= enough:
            break
    return min(found, key=lambda row: row[0])


def _search(probe: a.Probe, recipes: list[a.Recipe], parts: typing.Sequence[Part],
            enough: float) -> list[tuple[float, a.Recipe]]:
    """The nearest recipes, some changes away from these."""
    def nearest(some: list[a.Recipe]) -> list[tuple[float, a.Recipe]]:
        return sorted(((probe.left(r), r) for r in some), key=lambda row: row[0])[:BEAM]

    found = nearest(recipes)
    for _ in range(3 if parts else 0):
        more = nearest([c.recipe for _, r in found for part in parts for c in part(probe, r)]) if (
            found[0][0] > enough) else []
        if not more or more[0][0] > 0.9 * found[0][0]:
            break
        found = sorted([*found, *more], key=lambda row: row[0])[:BEAM]
    return found


def patterns(case: Case) -> typing.Iterator[Pattern]:
    """The changes of the recipes that give the reference; where none does, of the nearest one."""
    ways = [(starts_of(target, heads), target, heads) for target in a.targets(case) for heads in a.readings(target)]
    found: list[tuple[float, a.Recipe, a.Target, a.Heads]] = []
    for first, target, heads in sorted((way for way in ways if way[0][0][0] < FAR), key=lambda way: way[0][0][0])[
            :READINGS]:
        found.append((*base_of(target, heads, first), target, heads))
        some = list(changed(*found[-1][1:])) if found[-1][0] <= valid(case) else []
        yield from some
        if some:
            return
    best = min(found, key=lambda row: row[0], default=None)
    if best is not None and valid(case) < best[0] <= USABLE:
        yield from changed(*best[1:])


def changed(base: a.Recipe, target: a.Target, heads: a.Heads) -> typing.Iterator[Pattern]:
    """Every change that explains the rows that were tried, held against all."""
    case = target.case
    val, ref, places = target.rows(case.val), target.rows(case.ref), a.places(case, target, True)
    probe = a.Probe(target, heads, val, places, ref)
    whole: Array | None = None
    for change in (c for part in TABLE for c in part(probe, base)):
        own = probe if change.heads is None else a.Probe(target, change.heads, val, places, ref)
        if change.cause and own.left(change.recipe) <= a.SMALL:
            whole = a.everything(target, heads, base) if whole is None else whole
            expected = case.ref + a.everything(target, own.heads, change.recipe) - whole
            yield Pattern(f"attention {change.cause}", where_wrong(case, expected), {"how": change.how}, change.fitted)


# --- causes -----------------------------------------------------------------------------------------------------------

TURN = "where q and k are turned (apply_rotary_pos_emb), its cosines and sines, the sign of its sines (rotate_half)"
POSITIONS = "position_ids: padding, a cache's length, packed samples, where a rank's part of the tokens starts"
SETTINGS = "rope_theta, rope_scaling, rotary_dim, partial_rotary_factor"
LOOKS = {
    "causal_mask": "is_causal or attn_mask of the attention: the diagonal of torch.tril or torch.triu, the mask of "
                   "each step of a ring",
    "keys_masked": "the padding mask (attention_mask, key_padding_mask): its side, its sample, its length, whether "
                   "True means seen or hidden",
    "attention_window": "sliding_window, and which layers have one",
    "document_boundaries": "cu_seqlens, position_ids and masks of packed samples",
    "attention_softmax": "dim of the softmax; a mask of -inf added to the scores, not one that multiplies the "
                         "probabilities",
    "sinks_missing": "the sink's term in the denominator",
    "softmax_scale": "scale of the attention, and the size of a head that it is taken from",
    "softcap": "attn_logit_softcapping, which some attention kernels leave out",
    "alibi_slopes": "the heads whose slopes a rank takes",
    "rope_turn": TURN,
    "rope_pairing": "rotate_half against complex pairs, and the order of the rows of q and k in a converted checkpoint",
    "rope_settings": SETTINGS,
    "positions": POSITIONS,
    "ring_attention": "whose keys and values a rank has at each hop of the ring (after i hops those of rank - i) and "
                      "its mask; k and v together; partial outputs, weighted by their sums of exponentials",
    "gathered_in_rank_order": "the order in which gathered parts are put together",
    "wrong_kv_head": "repeat against repeat_interleave of k and v",
    "other_module": "the order in which q, k and v are cut, named or passed",
    "slices_reordered": "the order of the heads before the output's product; of ranks in an all-to-all",
    "dimension_flattened": "view and permute of q, k and v",
    "transposed": "transpose(1, 2) before reshape of the output",
    "packed_cut_as_one": "view and split of the packed product"}
CAUSES = tuple(Cause(name, (f"attention {name}",), "computed again from the q, k and v of the reference, these values "
                     "come out with {how}", look) for name, look in LOOKS.items())
