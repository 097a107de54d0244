# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with an attention: changes of its recipe, one at a time, and the causes that they are."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay import attention as a
from anyrank.explain.replay.sources import USABLE, left, parameter, parameters, valid, where_wrong
from anyrank.explain.tensors import Array, Case

Numbers = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """kind: of the pattern that it leaves. fitted: how many of its numbers were chosen to fit."""

    kind: str
    recipe: a.Recipe
    numbers: Numbers = dataclasses.field(default_factory=dict)
    fitted: int = 0
    heads: a.Heads | None = None  # where q, k and v are other ones


Changes = typing.Iterator[Change]
Part = typing.Callable[[a.Probe, a.Recipe], Changes]


def _with(r: a.Recipe, **fields: typing.Any) -> a.Recipe:
    return dataclasses.replace(r, **fields)


def _of_turn(probe: a.Probe, r: a.Recipe) -> Changes:
    """Of RoPE: other frequencies, pairs, sides and width."""
    turn, size = r.turn, probe.heads.q.shape[-1]
    if turn is None:
        for other in a.turns(probe.target.case, size):
            yield Change("rope_added", _with(r, turn=other))
        return

    def turned(kind: str, fitted: int = 0, numbers: Numbers | None = None, **fields: typing.Any) -> Change:
        return Change(kind, _with(r, turn=dataclasses.replace(turn, **fields)), numbers or {}, fitted)

    yield Change("rope_missing", _with(r, turn=None), {"sides": "q and k"})
    for side, sides in (("q", (0, 1, 0)), ("k", (1, 0, 0))):
        yield turned("rope_missing", numbers={"sides": side}, sides=sides)
    yield turned("rope_on_values", sides=(1, 1, 1))
    yield turned("rope_direction", sides=(-1, -1, 0))
    for side, sides in (("q", (-1, 1, 0)), ("k", (1, -1, 0))):
        yield turned("rope_direction", numbers={"sides": side}, sides=sides)
    both = turn.halves[0]
    for halves in ((not both, not both), (both, not both), (not both, both)):
        yield turned("rope_pairing", halves=halves)
    if 2 * len(turn.frequencies) < size:
        yield turned("rope_width", last=not turn.last, numbers={"features": "the last"})
    yield turned("rope_twice", frequencies=2.0 * turn.frequencies)
    yield from _of_frequencies(probe, r, turned, turn, size)


def _of_frequencies(probe: a.Probe, r: a.Recipe, turned: typing.Callable[..., Change], turn: a.Turn,
                    size: int) -> Changes:
    n = 2 * len(turn.frequencies)
    for factor in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 4, 8):
        yield turned("rope_stretch", frequencies=factor * turn.frequencies, numbers={"factor": factor})
    for base in a.BASES:
        yield turned("rope_theta", frequencies=base ** (-np.arange(0, n, 2) / n), numbers={"base": base})
    old = turn.frequencies[1] ** (-n / 2.0) if n > 2 else 1e4
    width = probe.heads.q.shape[2] * size
    for of in {size, width} - {n}:  # exponents of the head's features or the model's width, not of the turned ones
        yield turned("rope_theta", frequencies=old ** (-np.arange(0, n, 2) / of), numbers={"base": old ** (n / of)})
    for other in range(2, size + 1, 2):
        if other != n:
            yield turned("rope_width", frequencies=old ** (-np.arange(0, other, 2) / other),
                         numbers={"features": f"{other} of {size}"})
    error = _error(probe, lambda x: turned("", frequencies=x ** (-np.arange(0, n, 2) / n)).recipe)
    base, apart = a.golden(error, 16.0, 1e8)
    if apart < a.SMALL:
        yield turned("rope_theta", 1, {"base": base}, frequencies=base ** (-np.arange(0, n, 2) / n))


def _error(probe: a.Probe, recipe: typing.Callable[[float], a.Recipe]) -> typing.Callable[[float], float]:
    return lambda x: probe.left(recipe(x))


def _of_scale(probe: a.Probe, r: a.Recipe) -> Changes:
    """The scale of scores, and what limits them."""
    heads = probe.heads
    size, count = heads.q.shape[-1], heads.q.shape[2]
    known = {1.0: "1", size ** -0.5: f"1/sqrt({size})", 1.0 / size: f"1/{size}", (size * count) ** -0.5:
             f"1/sqrt({size * count})", count ** -0.5: f"1/sqrt({count})", float(size) ** 0.5: f"sqrt({size})"}
    for n in probe.target.case.runs.group_sizes:
        known.setdefault((size * count / n) ** -0.5, f"1/sqrt({size * count // n})")
        known.setdefault((count / n) ** -0.5, f"1/sqrt({count // n})")
        known.setdefault((size / n) ** -0.5, f"1/sqrt({size // n})")
    was = known.get(r.scale, f"{r.scale:.4g}")
    for scale, text in known.items():
        if scale != r.scale:
            yield Change("scale", _with(r, scale=scale), {"was": was, "now": text})
    x, apart = a.golden(_error(probe, lambda x: _with(r, scale=x * r.scale)), 1 / 128, 128)
    if apart < a.SMALL:
        yield Change("scale", _with(r, scale=x * r.scale), {"was": was, "now": f"{x * r.scale:.4g}"}, 1)
    if r.cap:
        yield Change("cap", _with(r, cap=0.0), {"now": "no cap", "was": r.cap})
    for cap in (50.0, 30.0, 20.0):
        yield Change("cap", _with(r, cap=cap), {"now": f"a cap of {cap:g}", "was": r.cap or "none"})
    x, apart = a.golden(_error(probe, lambda x: _with(r, cap=x)), 1 / 8, 256)
    if apart < a.SMALL:
        yield Change("cap", _with(r, cap=x), {"now": f"a cap of {x:.4g}", "was": r.cap or "none"}, 1)


def slopes_of(count: int, base: float = 8.0) -> Array:
    """ALiBi's of so many heads."""
    n = 2 ** int(math.log2(count))
    first = 2.0 ** (-base * np.arange(1, n + 1) / n)
    more = 2.0 ** (-base * np.arange(1, 2 * (count - n), 2) / (2 * n))
    result: Array = np.concatenate([first, more])
    return result


def _of_slopes(probe: a.Probe, r: a.Recipe) -> Changes:
    count = probe.heads.q.shape[2]
    usual = slopes_of(count)
    if r.slopes is None:
        yield Change("slopes", _with(r, slopes=usual), {"now": "added"})
        return
    yield Change("slopes", _with(r, slopes=None), {"now": "left out"})
    yield Change("slopes", _with(r, slopes=-r.slopes), {"now": "of the other sign"})
    plain = 2.0 ** (-8.0 * np.arange(1, count + 1) / count)
    yield Change("slopes", _with(r, slopes=plain), {"now": "of the plain series"})
    for n in (2, 3, 4, 6, 8):
        if count % n == 0:
            for own in (r.slopes[:count // n], slopes_of(count // n)):
                said = {"now": f"those of {count // n} heads, {n} times"}
                yield Change("slopes", _with(r, slopes=np.tile(own, n)), said)
    for base in (4.0, 16.0, 2.0, 1.0):
        yield Change("slopes", _with(r, slopes=slopes_of(count, base)), {"now": f"2^(-{base:g} i/n)"})
    slopes = r.slopes
    x, apart = a.golden(_error(probe, lambda x: _with(r, slopes=x * slopes)), 1 / 128, 128)
    if apart < a.SMALL:
        yield Change("slopes", _with(r, slopes=x * slopes), {"now": f"{x:.4g} times as large"}, 1)


def _of_mask(probe: a.Probe, r: a.Recipe) -> Changes:
    for kind, seen, numbers in a.masks(probe, r):
        if seen.shape != r.seen.shape or (seen != r.seen).any():
            said = {**numbers, "is": kind, **_counts(r.seen, seen)}
            yield Change("mask", _with(r, seen=seen), said, int(kind == "found"))


def _of_softmax(probe: a.Probe, r: a.Recipe) -> Changes:
    for softmax in ("after", "zero", "queries", "inverted"):
        yield Change(f"softmax_{softmax}", _with(r, softmax=softmax))
    if r.cap:
        yield Change("softmax_zero", _with(r, softmax="capped"), {"cap": r.cap})


def _of_sinks(probe: a.Probe, r: a.Recipe) -> Changes:
    case = probe.target.case
    module = case.name.stem.rpartition(".")[0]
    for stem in parameters(case, module):
        value = parameter(case, stem)
        if value is not None and value.shape == (probe.heads.q.shape[2],) and "sink" in stem:
            yield Change("sinks", _with(r, sinks=None if r.sinks is not None else value.astype(np.float64)))


def _counts(was: Array, now: Array) -> Numbers:
    """How many keys queries see now that they did not see, and the other way round."""
    was, now = np.broadcast_arrays(was, now)
    return {"gained": int((now & ~was).sum()), "lost": int((was & ~now).sum()),
            "later": int((now & ~was & ~np.tri(*now.shape[1:], dtype=bool)).sum())}


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
    shared = ("cp", "sp", "ring", "ulysses", "context")
    sizes = tuple(n for name, n in case.runs.mesh.items() if name.startswith(shared))
    cut = any(box[1] != slice(0, case.shape[1]) for copy in case.copies for box in copy.boxes) and len(case.shape) == 3
    return case.runs.group_sizes if cut else sizes


def _of_parts(probe: a.Probe, r: a.Recipe) -> Changes:
    """Ranks that share the tokens: keys, positions and masks of their own part."""
    queries, keys = r.seen.shape[1:]
    for n in token_parts(probe.target.case) if queries == keys else ():
        for layout, part, place in parts_of(keys, n):
            said = {"n": n, "layout": layout}
            own = (part[:, None] == part[None, :])[None]
            yield Change("own_keys", _with(r, seen=r.seen & own), said)
            yield Change("apart", _with(r, softmax="apart", chunks=part), {**said, "how": "the mean of what they give"})
            how = "their outputs weighted by powers of 2 of logarithmic sums that are natural"
            yield Change("apart", _with(r, softmax="two", chunks=part), {**said, "how": how})
            if a.is_causal(r.seen):
                open_ = np.ones((1, queries, keys), bool)
                yield Change("mask_of_parts", _with(r, seen=(place[:, None] >= place[None, :])[None]), said)
                yield Change("mask_of_parts", _with(r, seen=np.where(own, r.seen, open_)), said)
                yield Change("mask_of_parts", _with(r, seen=np.where(own, r.seen, part[:, None] > part[None, :])), said)
                order = np.argsort(part * keys + place)
                where = np.argsort(order)
                yield Change("mask_of_parts", _with(r, seen=(where[:, None] >= where[None, :])[None]), said)
            order = np.argsort(part * keys + place)
            for keys_order in (order, np.argsort(order)) if (order != np.arange(keys)).any() else ():
                turn = r.turn and dataclasses.replace(r.turn, k_positions=keys_order)
                heads = a.Heads(probe.heads.q, probe.heads.k[:, keys_order], probe.heads.v[:, keys_order])
                yield Change("rank_order", _with(r, turn=turn), said, heads=heads)
            yield Change("home", _with(r, softmax="home", chunks=part), said)
            if r.turn is not None:
                order = np.argsort(np.argsort(part * keys + place))
                for kind, positions in (("rope_restarts", place), ("rope_zigzag", order)):
                    for sides in ("q and k", "q", "k"):
                        turn = dataclasses.replace(
                            r.turn, q_positions=positions if "q" in sides else r.turn.q_positions,
                            k_positions=positions if "k" in sides else r.turn.k_positions)
                        yield Change(kind, _with(r, turn=turn), {**said, "sides": sides})


def _of_positions(probe: a.Probe, r: a.Recipe) -> Changes:
    if r.turn is None:
        return
    queries, keys = r.seen.shape[1:]
    for by in (1, -1, 2, -2, 3, -3, 4, -4):
        turn = dataclasses.replace(r.turn, q_positions=np.arange(queries) + by)
        yield Change("rope_offset", _with(r, turn=turn), {"by": by})
    first = min(t for _, t in a.places(probe.target.case, probe.target, True))
    for length in sorted({first, first - 1, first + 1, *(keys // n for n in (2, 4, 8))}):
        if 1 < length < keys and queries == keys:
            positions = np.arange(keys) % length
            turn = dataclasses.replace(r.turn, q_positions=positions, k_positions=positions)
            yield Change("rope_restarts", _with(r, turn=turn), {"n": -(-keys // length), "layout": "contiguous",
                                                                "sides": "q and k"})


def _of_documents(probe: a.Probe, r: a.Recipe) -> Changes:
    """Positions that start again at each document, or do not."""
    if r.turn is None:
        return
    if r.turn.q_positions is not None:
        turn = dataclasses.replace(r.turn, q_positions=None, k_positions=None)
        yield Change("rope_documents", _with(r, turn=turn), {"how": "run on over the ends of documents"})
        return
    for positions in a.counted(probe):
        turn = dataclasses.replace(r.turn, q_positions=positions, k_positions=positions)
        yield Change("rope_documents", _with(r, turn=turn), {"how": "start again at each document"})


def _of_heads(probe: a.Probe, r: a.Recipe) -> Changes:
    heads = probe.heads
    count, groups, size = heads.q.shape[2], heads.k.shape[2], heads.q.shape[3]
    if 1 < groups < count:
        yield Change("kv_heads", _with(r, dealt=not r.dealt))
    square = count == groups and heads.q.shape == heads.k.shape
    if square:
        yield Change("exchanged", r, heads=a.Heads(heads.k, heads.q, heads.v), numbers={"what": "q and k"})
    yield Change("exchanged", r, heads=a.Heads(heads.q, heads.v, heads.k), numbers={"what": "k and v"})
    if square:
        yield Change("exchanged", r, heads=a.Heads(heads.v, heads.k, heads.q), numbers={"what": "q and v"})
    if count > 1 and not probe.target.probabilities:
        yield Change("heads_reversed", _with(r, order=tuple(reversed(range(count)))))
        for by in range(1, count) if count > 2 else ():
            yield Change("heads_rotated", _with(r, order=tuple((i + by) % count for i in range(count))), {"by": by})
    yield Change("split", r, heads=a.Heads(_by_features(heads.q), _by_features(heads.k), _by_features(heads.v)),
                 numbers={"size": size})
    if not probe.target.probabilities:
        yield Change("split", _with(r, joined="lanes"), numbers={"size": size})
        yield Change("unmoved", _with(r, joined="unmoved"))
    if heads.packed:
        yield from _repacked(heads, r)


def _by_features(x: Array) -> Array:
    """Heads of features that are [features, heads] and not [heads, features]."""
    result: Array = x.reshape(*x.shape[:2], x.shape[3], x.shape[2]).swapaxes(2, 3)
    return result


def _repacked(heads: a.Heads, r: a.Recipe) -> Changes:
    """The same packed tensor cut into q, k and v otherwise."""
    count, groups, size = heads.q.shape[2], heads.k.shape[2], heads.q.shape[3]
    shared, lead = count // groups, heads.q.shape[:2]
    if heads.packed == "by KV heads":
        whole = np.concatenate([heads.q.reshape(*lead, groups, shared, size), heads.k[:, :, :, None],
                                heads.v[:, :, :, None]], axis=3).reshape(*lead, -1, size)
    else:
        whole = np.concatenate([heads.q, heads.k, heads.v], axis=2)
    grouped = whole.reshape(*lead, groups, shared + 2, size)
    ways = {"q|k|v": np.split(whole, [count, count + groups], axis=2),
            "k|v|q": [whole[:, :, 2 * groups:], whole[:, :, :groups], whole[:, :, groups:2 * groups]],
            "by KV heads": [grouped[..., :-2, :].reshape(*lead, count, size), grouped[..., -2, :], grouped[..., -1, :]],
            "by KV heads, k and v first": [grouped[..., 2:, :].reshape(*lead, count, size), grouped[..., 0, :],
                                           grouped[..., 1, :]]}
    for name, parts in ways.items():
        yield Change("packing", r, heads=a.Heads(*parts), numbers={"way": name})


TABLE = (_of_mask, _of_softmax, _of_sinks, _of_scale, _of_turn, _of_slopes, _of_positions, _of_documents, _of_parts,
         _of_heads)
TABLE_OF_REFERENCE = (_of_mask, _of_scale, _of_turn, _of_slopes, _of_sinks)  # what a reference may have
BEAM = 4  # recipes that are changed further
READINGS = 3  # ways to read q, k and v that are looked at closely


# --- the search -------------------------------------------------------------------------------------------------------


def starts_of(target: a.Target, heads: a.Heads) -> list[tuple[float, a.Recipe]]:
    """The nearest plain recipes: a causal mask or none, RoPE or none. A causal query with few keys before it knows
    nothing of windows and, mostly, documents, so that early ones are looked at."""
    case, queries, keys, size = target.case, heads.q.shape[1], heads.k.shape[1], heads.q.shape[-1]
    square = queries == keys
    masks = [a.mask(queries, keys, 0), a.mask(queries, keys, None)] if square else [a.mask(queries, keys, None)]
    turns = [None, *(a.turns(case, size) if square else ())]
    recipes = [a.Recipe(size ** -0.5, own, turn) for own in masks for turn in turns]
    return _search(_early(target, heads), recipes, (), valid(case))


def _early(target: a.Target, heads: a.Heads) -> a.Probe:
    samples = range(min(heads.q.shape[0], 3))
    return a.Probe(target, heads, target.rows(target.case.ref), [(b, t) for b in samples for t in (1, 2, 3)
                                                                if t < heads.q.shape[1]])


def base_of(target: a.Target, heads: a.Heads, first: list[tuple[float, a.Recipe]]) -> tuple[a.Recipe, float]:
    """The nearest recipe of the reference, and how much it leaves: scale and RoPE by early rows, then the mask by
    others; where that fails, all at once."""
    case, enough = target.case, valid(target.case)
    full = a.Probe(target, heads, target.rows(case.ref), a.places(case, target, False))
    recipes, found = [r for _, r in first], list[tuple[float, a.Recipe]]()
    for probe, parts in ((_early(target, heads), TABLE_OF_REFERENCE[1:]), (full, TABLE_OF_REFERENCE)):
        some = _search(probe, recipes, parts, enough)
        found += _search(full, [r for _, r in some[:3]], (_of_mask, _of_documents), enough)
        if min(left for left, _ in found) <= enough:
            break
    left, best = min(found, key=lambda row: row[0])
    return best, left


def _search(probe: a.Probe, recipes: list[a.Recipe], parts: typing.Sequence[Part],
            enough: float) -> list[tuple[float, a.Recipe]]:
    """The nearest recipes, some changes away from these."""
    found = sorted(((probe.left(r), i, r) for i, r in enumerate(recipes)), key=lambda row: row[:2])[:BEAM]
    for _ in range(3 if parts else 0):
        if found[0][0] <= enough:
            break
        changes = [c.recipe for _, _, r in found for part in parts for c in part(probe, r)
                   if not c.kind.startswith("softmax")]
        more = sorted(((probe.left(r), i, r) for i, r in enumerate(changes)), key=lambda row: row[:2])[:BEAM]
        if not more or more[0][0] > 0.9 * found[0][0]:
            break
        found = sorted([*found, *more], key=lambda row: row[0])[:BEAM]
    return [(left, r) for left, _, r in found]


def patterns(case: Case) -> typing.Iterator[Pattern]:
    ways = [(starts_of(target, heads), target, heads) for target in a.targets(case) for heads in a.readings(target)
            if target.takes(heads)]
    best: tuple[float, a.Target, a.Heads, a.Recipe] | None = None
    for first, target, heads in sorted(ways, key=lambda way: way[0][0][0])[:READINGS]:
        base, left = base_of(target, heads, first)
        if best is None or left < best[0]:
            best = left, target, heads, base
        if left <= valid(case):
            break
    if best is not None and best[0] <= USABLE:
        yield from changed(*best[1:])


def changed(target: a.Target, heads: a.Heads, base: a.Recipe) -> typing.Iterator[Pattern]:
    """Every change that explains the rows that were tried, held against all."""
    case = target.case
    probe = a.Probe(target, heads, target.rows(case.val), a.places(case, target, True), target.rows(case.ref))
    whole: Array | None = None
    for change in (c for part in TABLE for c in part(probe, base)):
        own = probe if change.heads is None else a.Probe(target, change.heads, probe.whole, probe.places,
                                                         target.rows(case.ref))
        if own.left(change.recipe) > a.SMALL:
            continue
        whole = a.everything(target, heads, base) if whole is None else whole
        expected = case.ref + a.everything(target, change.heads or heads, change.recipe) - whole
        numbers = {"causal": a.is_causal(base.seen), "documents": base.seen.shape[0] > 1, **change.numbers}
        yield Pattern(f"attention_{change.kind}", where_wrong(case, expected), numbers, change.fitted)
    yield from _of_some_heads(target, heads, base, probe)


def _of_some_heads(target: a.Target, heads: a.Heads, base: a.Recipe, probe: a.Probe) -> typing.Iterator[Pattern]:
    """What some heads give is missing, or times a number."""
    case, count, size = target.case, heads.q.shape[2], heads.v.shape[3]
    if target.matrix is None or count > 64:
        return
    plain = dataclasses.replace(target, matrix=None)
    context = np.concatenate([a.output(plain, heads, base, b, rows) for b, rows in probe.samples.items()])
    each = np.stack([context[:, i * size:(i + 1) * size] @ target.matrix[i * size:(i + 1) * size]
                     for i in range(count)])
    difference = probe.against
    factors = np.linalg.lstsq(each.reshape(count, -1).T, difference.reshape(-1), rcond=None)[0]
    made = np.tensordot(factors, each, 1)
    wrong = [i for i in range(count) if abs(factors[i]) > 1e-3]
    if left(made, difference) > a.SMALL or not wrong or len(wrong) == count:
        return
    value = float(np.mean(factors[wrong])) + 1.0
    if np.ptp(factors[wrong]) > 0.01:
        return
    value = round(value) if abs(value - round(value)) < 1e-3 else value
    rows = np.arange(heads.q.shape[1])
    full = np.stack([a.output(plain, heads, base, b, rows) for b in range(heads.q.shape[0])])
    lanes: Array = np.repeat([value - 1.0 if i in wrong else 0.0 for i in range(count)], size)
    expected = case.ref + ((full * lanes) @ target.matrix).reshape(case.shape)
    kind = "attention_heads_missing" if value == 0 else "attention_heads_scaled"
    yield Pattern(kind, where_wrong(case, expected), {"heads": wrong, "of": count, "factor": float(value)},
                  0 if float(value).is_integer() else 1, 2 * count)


# --- causes -----------------------------------------------------------------------------------------------------------


def _is_documents(case: Case, pattern: Pattern) -> bool:
    return pattern.numbers.get("is") in ("documents", "found")


def _off_by_some(case: Case, pattern: Pattern) -> bool:
    return pattern.numbers.get("is") == "ahead" and pattern.numbers["causal"] and pattern.numbers["ahead"] != 0


def _is(**wanted: typing.Any) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: all(pattern.numbers.get(key) == value for key, value in wanted.items())


AGAIN = "computed again from the q, k and v of the reference, these values come out with "
MASK, TURN = ("attention_mask",), "where q and k are turned (apply_rotary_pos_emb), its cosines and sines"
CAUSES = (
    Cause("causal_mask_missing", MASK, AGAIN + "no causal mask: each query sees all keys of its sample", "is_causal or "
          "attn_mask of the attention", _is(**{"is": "open", "causal": True})),
    Cause("causal_mask", MASK, AGAIN + "a causal mask that lets a query see keys up to {ahead} after its own", "the "
          "diagonal of torch.tril or torch.triu, the end of a range", _off_by_some),
    Cause("causal_mask", MASK, AGAIN + "a causal mask, which the reference does not have", "is_causal of the attention",
          _is(**{"is": "ahead", "causal": False, "ahead": 0})),
    Cause("keys_masked", MASK, AGAIN + "all keys seen, of which the reference masks {gained}: padding is attended to",
          "the padding mask, attention_mask and key_padding_mask", _is(**{"is": "open", "causal": False})),
    Cause("attention_window", MASK, AGAIN + "a window of {window} keys", "sliding_window, and which layers have one",
          _is(**{"is": "window"})),
    Cause("attention_across_documents", MASK, AGAIN + "a causal mask alone, where the reference hides other documents",
          "cu_seqlens, position_ids of packed samples",
          _is(**{"is": "ahead", "ahead": 0, "lost": 0, "documents": True})),
    Cause("causal_mask", MASK, AGAIN + "a causal mask, which the reference does not have", "is_causal of the attention",
          _is(**{"is": "ahead", "gained": 0})),
    Cause("attention_window", MASK, AGAIN + "a causal mask alone: the reference has a window, or documents, as well",
          "sliding_window, and which layers have one", _is(**{"is": "ahead", "ahead": 0, "lost": 0, "later": 0})),
    Cause("document_boundaries", MASK, AGAIN + "the keys that the first of {samples} samples sees, for all of them",
          "cu_seqlens, position_ids and masks of each sample", _is(**{"is": "first"})),
    Cause("document_boundaries", MASK, AGAIN + "documents that begin elsewhere than in the reference", "cu_seqlens, "
          "position_ids of packed samples", _is_documents),
    Cause("keys_masked", MASK, AGAIN + "up to {keys} keys of a sample masked ({gained} scores seen that the reference "
          "masks, {lost} the other way round)", "the padding mask: its side, its sample, its length",
          _is(**{"is": "hidden"})),
    Cause("mask_after_softmax", ("attention_softmax_after",), AGAIN + "the mask after the softmax, whose denominator "
          "then counts the unseen keys too", "a mask of -inf added to the scores, not one that multiplies the "
          "probabilities"),
    Cause("masked_with_zero", ("attention_softmax_zero",), AGAIN + "the scores of unseen keys set to 0 and not to "
          "-inf, so that the softmax gives them weight", "masked_fill of the scores"),
    Cause("mask_inverted", ("attention_softmax_inverted",), AGAIN + "the mask inverted: each query sees what the "
          "reference hides", "whether True means seen (scaled_dot_product_attention) or hidden (MultiheadAttention)"),
    Cause("softmax_axis", ("attention_softmax_queries",), AGAIN + "the softmax over the queries and not over the keys",
          "dim of the softmax"),
    Cause("sinks_missing", ("attention_sinks",), AGAIN + "the sinks left out of the softmax, or added to it", "the "
          "sink's term in the denominator"),
    Cause("softmax_scale", ("attention_scale",), AGAIN + "scores times {now}, {was} in the reference", "scale of the "
          "attention, and the size of a head that it is taken from"),
    Cause("softcap", ("attention_cap",), AGAIN + "{now} on the scores ({was} in the reference)",
          "attn_logit_softcapping, which some attention kernels leave out"),
    Cause("alibi_slopes", ("attention_slopes",), AGAIN + "ALiBi's slopes {now}", "the heads whose slopes a rank takes"),
    Cause("rope_missing", ("attention_rope_missing",), AGAIN + "{sides} not turned by RoPE", TURN),
    Cause("rope_missing", ("attention_rope_added",), AGAIN + "q and k turned by RoPE, which the reference does not do",
          TURN),
    Cause("rope_on_values", ("attention_rope_on_values",), AGAIN + "v turned by RoPE as well", TURN),
    Cause("rope_direction", ("attention_rope_direction",), AGAIN + "RoPE turning the other way round", "the sign of "
          "the sines: rotate_half"),
    Cause("rope_pairing", ("attention_rope_pairing",), AGAIN + "RoPE turning other pairs of features: neighbours "
          "against halves", "rotate_half against complex pairs, and the order of the rows of q and k in a converted "
          "checkpoint"),
    Cause("rope_width", ("attention_rope_width",), AGAIN + "RoPE turning other features: {features}", "rotary_dim, "
          "partial_rotary_factor"),
    Cause("rope_positions", ("attention_rope_twice",), AGAIN + "RoPE turning by twice the angles: applied twice, or "
          "positions that count in steps of 2", TURN),
    Cause("rope_theta", ("attention_rope_stretch",), AGAIN + "RoPE's angles times {factor}", "rope_scaling, position "
          "interpolation"),
    Cause("rope_theta", ("attention_rope_theta",), AGAIN + "RoPE of the base {base}", "rope_theta, rotary_emb_base"),
    Cause("rope_offset", ("attention_rope_offset",), AGAIN + "q at positions {by} on from those of k", "the first "
          "position (position_ids, a cache's length, a rank's offset), which q and k share"),
    Cause("rope_restarts", ("attention_rope_restarts",), AGAIN + "positions of {sides} that start again from 0 in each "
          "of {n} parts", "position_ids of a rank's part of the tokens"),
    Cause("zigzag_positions", ("attention_rope_zigzag",), AGAIN + "positions of {sides} that take the tokens of {n} "
          "ranks as contiguous parts, which are a zigzag", "position_ids cut in the same order as the tokens"),
    Cause("positions_over_documents", ("attention_rope_documents",), AGAIN + "positions that {how}", "position_ids of "
          "packed samples"),
    Cause("ring_own_keys", ("attention_own_keys",), AGAIN + "each query seeing the keys of its own rank alone, one of "
          "{n}", "the ring of the attention, or the all-gather of k and v"),
    Cause("ring_own_keys", ("attention_home",), AGAIN + "the values of the own rank, of {n}, weighted by the other "
          "ranks' keys", "what the ring sends round: k and v together"),
    Cause("gathered_in_rank_order", ("attention_rank_order",), AGAIN + "keys and values in the order of {n} ranks "
          "({layout} parts one after the other), not in that of their positions", "the order in which gathered parts "
          "are put together"),
    Cause("softmax_of_own_keys", ("attention_apart",), AGAIN + "a softmax over the keys of each of {n} ranks alone and "
          "{how}", "partial outputs are weighted by their sums of exponentials"),
    Cause("causal_mask", ("attention_mask_of_parts",), AGAIN + "a causal mask by the places of tokens in the parts of "
          "{n} ranks ({layout}), not by their positions", "the mask of each step of the ring"),
    Cause("wrong_kv_head", ("attention_kv_heads",), AGAIN + "query heads dealt out to the KV heads in turn, not in "
          "blocks", "repeat against repeat_interleave of k and v"),
    Cause("other_module", ("attention_exchanged",), AGAIN + "{what} exchanged", "the order in which q, k and v are "
          "cut, named or passed"),
    Cause("heads_reversed", ("attention_heads_reversed",), AGAIN + "the heads of the output in reverse order", "the "
          "order of the heads before the output's product"),
    Cause("heads_rotated", ("attention_heads_rotated",), AGAIN + "the heads of the output moved on by {by}", "the "
          "order of the heads before the output's product; of ranks in an all-to-all"),
    Cause("dimension_flattened", ("attention_split",), AGAIN + "features cut into heads the other way round: [heads, "
          "{size}] against [{size}, heads]", "view and permute of q, k and v"),
    Cause("heads_and_tokens_exchanged", ("attention_unmoved",), AGAIN + "heads and tokens not exchanged back before "
          "the heads are put side by side", "transpose(1, 2) before reshape of the output"),
    Cause("packed_cut_as_one", ("attention_packing",), AGAIN + "the packed q, k and v cut as {way}", "view and split "
          "of the packed product"),
    Cause("heads_missing", ("attention_heads_missing",), AGAIN + "nothing from the heads {heads} of {of}", "ranks or "
          "heads that the output's product leaves out"),
    Cause("heads_scaled", ("attention_heads_scaled",), AGAIN + "what the heads {heads} of {of} give times {factor}",
          "how many ranks or copies have these heads"),
)
