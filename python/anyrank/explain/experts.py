# SPDX-License-Identifier: Apache-2.0
"""What the experts of tokens make together, computed again: experts left out, rows put back at other places, weights
applied otherwise; and the sum with a shared expert.

Of the forms that the parameters' shapes leave open, the one that gives the reference is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.patterns import Pattern
from anyrank.explain.routers import (CHANGES, Form, Layer, Router, choices, chosen_by, close, forms_changed,
                                     in_step, known_router, layer_of, leaf_of, rows_of, said, weights_by)
from anyrank.explain.tensors import ACTIVATIONS, Array, Case, Name

MIXTURE, SHARED = "mixture_of_experts", "shared_expert"
MOST_TRIED, MOST_WORK, MOST_TOKENS, MOST_ROWS = 1 << 24, 1 << 29, 1024, 4096
SAMPLE = 8  # tokens on which forms are tried
MOST_GUESSED, MOST_TURNED = 8, 64

Act = typing.Callable[[Array, Array], Array]
Stack = typing.Union[typing.Sequence[Array], Array]  # an array for each expert


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        result: Array = 1.0 / (1.0 + np.exp(-x))
    return result


def _limited(gate: Array, up: Array) -> Array:
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    result: Array = gate * _sigmoid(1.702 * gate) * (up + 1.0)
    return result


ACTS: dict[str, Act] = {
    "silu(gate)*up": lambda gate, up: gate * _sigmoid(gate) * up,
    "gelu(gate)*up": lambda gate, up: 0.5 * gate * (1.0 + _erf(gate / math.sqrt(2.0))) * up,
    "gelu_tanh(gate)*up": lambda gate, up: gate * _sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (
        gate + 0.044715 * gate ** 3)) * up,
    "relu(gate)*up": lambda gate, up: np.maximum(gate, 0.0) * up,
    "relu(gate)^2*up": lambda gate, up: np.maximum(gate, 0.0) ** 2 * up,
    "gate*sigmoid(1.702*gate)*(up + 1), limited": _limited}
_erf: typing.Callable[[Array], Array] = np.vectorize(math.erf, otypes=[float])


@dataclasses.dataclass(frozen=True)
class Experts:
    """first: arrays of gate and up, or of both, by expert; second: of what comes after; each with its bias or None.
    flip: they are stored [in, out]. columns: where the first product has gate and, behind it, up."""

    first: tuple[Stack, ...]
    second: Stack
    biases: tuple[Stack | None, ...]
    flip: bool
    columns: Array
    act: str

    @property
    def width(self) -> int:
        return int(self.second[0].shape[0 if self.flip else 1])

    @property
    def gated(self) -> bool:
        return len(self.columns) == 2 * self.width

    def _product(self, x: Array, matrix: Array, bias: Stack | None, expert: int) -> Array:
        result: Array = x @ (matrix if self.flip else matrix.T).astype(np.float64)
        return result if bias is None else result + bias[expert]

    def run(self, expert: int, x: Array, columns: Array | None = None, biased: bool = True) -> Array:
        """What an expert makes of rows. columns: where gate and up are taken from. biased: with its last bias."""
        h = np.concatenate([self._product(x, stack[expert], bias, expert)
                            for stack, bias in zip(self.first, self.biases)], axis=1)[:, self.columns]
        h, n = h if columns is None else h[:, columns], self.width
        made = ACTS[self.act](h[:, :n], h[:, n:] if self.gated else np.ones(1))
        return self._product(made, self.second[expert], self.biases[-1] if biased else None, expert)


def forms_of(case: Case, layer: Layer) -> typing.Iterator[Experts]:
    """Experts as shapes allow them."""
    known, features = case.runs.reference, layer.gate.shape[1]
    read = {leaf: [in_step(case, name) for name in names] for leaf, names in layer.weights.items()}
    stacks: dict[str, Stack] = {leaf: [known[name] for name in names] if len(names) > 1 else known[names[0]]
                                for leaf, names in read.items()}
    matrices = {leaf: stack for leaf, stack in stacks.items() if stack[0].ndim == 2}

    def bias_of(leaf: str, size: int) -> Stack | None:
        stem = leaf.removesuffix("weight")
        return next((v for name, v in stacks.items() if name.startswith(stem) and v[0].shape == (size,)), None)

    for flip in (False, True) if 2 <= len(matrices) <= 3 else ():
        shapes = {leaf: stack[0].shape[::-1] if flip else stack[0].shape for leaf, stack in matrices.items()}
        for down, (out, width) in shapes.items():
            firsts = [leaf for leaf in matrices if leaf != down]
            if out != features or any(shapes[leaf][1] != features for leaf in firsts):
                continue
            for order in itertools.permutations(firsts):
                rows = sum(shapes[leaf][0] for leaf in order)
                halves, turn = np.arange(rows), np.concatenate([np.arange(0, rows, 2), np.arange(1, rows, 2)])
                columns = [halves] if rows in (width, 2 * width) else []
                if len(firsts) == 1 and rows == 2 * width:
                    columns = [halves, turn, np.roll(halves, width), np.roll(turn, width)]
                biases = (*(bias_of(leaf, shapes[leaf][0]) for leaf in order), bias_of(down, features))
                for c, act in itertools.product(columns, ACTS):
                    yield Experts(tuple(matrices[leaf] for leaf in order), matrices[down], biases, flip, c, act)


# --- the reference computed again -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mixture:
    """slots: each token's experts [tokens, k] with their weights and what they make, [tokens, k, features]. rest: what
    the reference has besides."""

    experts: Experts
    router: Router
    x: Array
    slots: Array
    weights: Array
    made: Array
    rest: Array

    def made_by(self, columns: Array | None = None, biased: bool = True, weighted: bool = False, act: str = "",
                slots: Array | None = None) -> Array:
        """What the slots' experts make in another way, or others do. weighted: of their input times the weight."""
        experts = dataclasses.replace(self.experts, act=act) if act else self.experts
        slots = self.slots if slots is None else slots
        made: Array = np.zeros((*slots.shape, self.x.shape[1]))
        for e in range(self.router.z.shape[1]):
            t, k = np.nonzero(slots == e)
            if len(t):
                times = self.weights[t, k, None] if weighted else 1.0
                made[t, k] = experts.run(e, self.x[t] * times, columns, biased)
        return made

    def sum(self, weights: Array, made: Array | None = None) -> Array:
        """What comes out with other weights, or of other rows."""
        result: Array = self.rest + np.einsum("tk,tkf->tf", weights, self.made if made is None else made)
        return result

    def made_otherwise(self, columns: Array | None = None, act: str = "", experts: Array | None = None) -> Array:
        """What comes out of other rows. experts: by number, which one is taken for it."""
        return self.sum(self.weights, self.made_by(columns, act=act, slots=None if experts is None else experts[
            self.slots]))

    def of(self, rows: Array) -> Mixture:
        """Of some tokens alone."""
        router = dataclasses.replace(self.router, **{
            name: array[rows] for name in ("z", "mask", "weights", "product")
            if (array := getattr(self.router, name)) is not None})
        return dataclasses.replace(self, router=router, **{name: getattr(self, name)[rows] for name in (
            "x", "slots", "weights", "made", "rest")})


def _beside(case: Case, layer: Layer) -> list[Array]:
    """What may be added to the experts' part: other activations of the layer, or what it reads."""
    inside = [array for name, array in layer.dumped if name != str(case.name) and array.shape[1] == case.shape[-1]]
    return inside + layer.inputs


def _is_rest(rest: Array, ref: Array, beside: list[Array], unit: float) -> bool:
    """Whether what is left is rounding or each row a multiple of another activation's."""
    size = float(np.abs(ref).max())
    for other in (np.zeros(ref.shape), *beside):
        squares = (other ** 2).sum(axis=1, keepdims=True)
        share = (rest * other).sum(axis=1, keepdims=True) / np.where(squares > 0.0, squares, 1.0)
        if (np.abs(rest - share * other) <= max(2e-5, 8.0 * unit) * size).all():
            return True
    return False


def _by_numbers(layer: Layer, y: Array, ref: Array, index: Array, beside: list[Array], unit: float) -> Router | None:
    """A router whose weights give a sample of the reference: y [sample, experts, features]. beside: what may be
    added."""
    target, added = ref.reshape(-1), [b.reshape(-1) for b in beside]
    for (z, bias), k in itertools.product(layer.logits, range(1, min(layer.experts, MOST_GUESSED) + 1)):
        for form in choices(layer.experts, k, bool(np.ptp(bias))):
            for function in ("shares", "scores"):
                form = dataclasses.replace(form, function=function)
                mask = chosen_by(z[index], bias, k, form)
                made = np.einsum("te,tef->tf", weights_by(z[index], bias, mask, form), y)
                columns = np.stack([made.reshape(-1), *added], axis=1)
                found = np.linalg.lstsq(columns, target, rcond=None)[0]
                factor = float(found[0])
                if factor > 0.0 and close(columns @ found, target, unit):
                    form = dataclasses.replace(form, factor=factor if abs(factor - 1.0) > 1e-4 else 1.0)
                    mask = chosen_by(z, bias, k, form)
                    return Router(z, bias, k, form, mask, weights_by(z, bias, mask, form))
    return None


def _spans(y: Array, ref: Array, beside: list[Array], unit: float) -> bool:
    """Whether rows are sums of what all experts make, and other activations."""
    features = np.unique(np.linspace(0, ref.shape[1] - 1, 4 * (y.shape[1] + len(beside))).astype(int))
    if 2 * (y.shape[1] + len(beside)) > len(features):
        return False
    for t in range(len(ref)):
        columns = np.stack([*y[t], *(b[t] for b in beside)], axis=1)[features]
        found = np.linalg.lstsq(columns, ref[t, features], rcond=None)[0]
        if not close(columns @ found, ref[t, features], unit):
            return False
    return True


def mixture_of(case: Case, layer: Layer, router: Router | None) -> Mixture | None:
    """The reference's experts and router that give the case's tensor."""
    ref, beside = rows_of(case.ref), _beside(case, layer)
    index = _sample(len(ref))
    for x, experts in itertools.product(layer.inputs, forms_of(case, layer)):
        work = len(experts.columns) * layer.gate.shape[1]
        own = router
        if own is None and work * layer.experts * 2 <= MOST_TRIED:
            ends = index[[0, -1]]
            y = np.stack([experts.run(e, x[ends]) for e in range(layer.experts)], axis=1)
            if _spans(y, ref[ends], [b[ends] for b in beside], case.unit):
                y = np.stack([experts.run(e, x[index]) for e in range(layer.experts)], axis=1)
                own = _by_numbers(layer, y, ref[index], index, [b[index] for b in beside], case.unit)
        if own is None or len(ref) * own.k * work > MOST_WORK:
            continue
        given = own.weights if own.weights is not None else own.with_form(own.form)[1]
        slots = np.nonzero(own.mask)[1].reshape(len(ref), own.k)
        weights = np.take_along_axis(given, slots, axis=1)
        whole = Mixture(experts, own, x, slots, weights, np.zeros((*slots.shape, 1)), ref)
        for rows in (index, np.arange(len(ref))):
            part = whole.of(rows)
            made = part.made_by()
            rest = ref[rows] - np.einsum("tk,tkf->tf", part.weights, made)
            if not _is_rest(rest, ref[rows], [b[rows] for b in beside], case.unit):
                break
        else:
            return dataclasses.replace(whole, made=made, rest=rest)
    return None


def _sample(tokens: int) -> Array:
    index: Array = np.unique(np.linspace(0, tokens - 1, SAMPLE).astype(int))
    return index


# --- other sums -------------------------------------------------------------------------------------------------------

Sum = tuple[typing.Callable[[Mixture], Array], dict[str, typing.Any]]


def _bare(m: Mixture) -> Array:
    """With the last bias as it is."""
    made = m.made_by(biased=False)
    result: Array = m.sum(m.weights, made) + (m.made - made).sum(axis=1)
    return result


def _in_form(m: Mixture, form: Form) -> Array:
    return m.sum(np.take_along_axis(m.router.with_form(form)[1], m.slots, axis=1))


APPLIED: dict[str, typing.Callable[[Mixture], Array]] = {
    "the sum of a token's experts, without weights": lambda m: m.sum(np.ones(m.weights.shape)),
    "the mean of a token's experts, without weights": lambda m: m.sum(np.full(m.weights.shape, 1.0 / m.router.k)),
    "each weight applied twice": lambda m: m.sum(m.weights ** 2),
    "the weight multiplying what goes into the expert, not what comes out": lambda m: m.sum(
        np.ones(m.weights.shape), m.made_by(weighted=True)),
    "the bias of the second product added as it is, without the token's weights": _bare}


def _sums(case: Case, m: Mixture) -> typing.Iterator[Sum]:
    """Weights applied otherwise, gate and up taken from other columns, other activations, other experts."""
    for how, applied in APPLIED.items():
        yield applied, {"change": "weights", "how": how}
    for columns, what, how in _columns(m.experts.width, case.runs.group_sizes) if m.experts.gated else ():
        yield functools.partial(Mixture.made_otherwise, columns=columns), {"change": what, "how": how}
    for act in ACTS:
        yield functools.partial(Mixture.made_otherwise, act=act), {"change": "act", "how": act, "was": m.experts.act}
    n = m.router.z.shape[1]
    orders = [(f"experts are dealt round {ranks} ranks, where each has consecutive ones, or the other way round",
               np.arange(n).reshape(ranks, -1).T.reshape(-1)) for ranks in range(2, n) if n % ranks == 0]
    orders += [(f"expert {by} stands for expert 0, and so on in turn", np.roll(np.arange(n), -by))
               for by in range(1, n)]
    for how, order in orders if n <= MOST_TURNED else ():
        yield functools.partial(Mixture.made_otherwise, experts=order), {
            "change": "rows", "moved": int((order[m.slots] != m.slots).sum()), "slots": m.slots.size, "how": how}
    for form, mask, weights, _, _ in forms_changed(m.router):
        if np.array_equal(mask, m.router.mask):
            yield functools.partial(_in_form, form=form), said(m.router, form, mask)


def _proved(m: Mixture, val: Array, off: Array, sums: typing.Iterable[Sum], unit: float
            ) -> typing.Iterator[tuple[Array, dict[str, typing.Any], int]]:
    """Of sums those that are right for a sample of the tokens."""
    rows = off[_sample(len(off))] if len(off) else off
    part = m.of(rows)
    for made, numbers in sums:
        if close(made(part), val[rows], 8.0 * unit):
            yield made(m), numbers, 0


def _columns(n: int, groups: typing.Iterable[int]) -> typing.Iterator[tuple[Array, str, str]]:
    """Other columns of gate and up, and what is wrong with them."""
    halves, turn = np.arange(2 * n), np.arange(2 * n).reshape(2, n).T.reshape(-1)
    yield np.roll(halves, n), "exchanged", "gate and up exchanged"
    for parts in (1, *(g for g in groups if n % g == 0)):
        whose = f" of each of {parts} ranks" if parts > 1 else ""
        each = turn.reshape(parts, 2, n // parts)
        yield each.swapaxes(0, 1).reshape(-1), "packed", f"columns{whose} that have gate and up in turn, read as halves"
        blocks = halves.reshape(2, parts, n // parts).swapaxes(0, 1).reshape(parts, n // parts, 2)
        yield (blocks.transpose(2, 0, 1).reshape(-1), "packed",
               f"halves{whose}, read as columns that have gate and up in turn")


def _left_out(m: Mixture, val: Array, unit: float) -> typing.Iterator[tuple[Array, dict[str, typing.Any], int]]:
    """Slots whose expert is missing, or has the weight of another slot."""
    gram = np.einsum("tkf,tlf->tkl", m.made, m.made)
    if (np.linalg.cond(gram) > 1e9).any():
        return
    share = np.linalg.solve(gram, np.einsum("tkf,tf->tk", m.made, val - m.rest)[:, :, None])[:, :, 0]
    if not close(m.sum(share), val, unit):
        return
    near = max(1e-3, 32.0 * unit)
    gone = np.abs(share) <= near * np.abs(m.weights)
    same = np.abs(share - m.weights) <= near * np.abs(m.weights)
    slots = {"slots": share.size, "lacking": int(gone.sum())}
    if gone.any() and (gone | same).all():
        yield m.sum(np.where(gone, 0.0, m.weights)), {"change": "left out", "whose": _whose(m, gone), **slots}, 1
    ordered = np.sort(m.weights, axis=None)
    at = np.clip(np.searchsorted(ordered, share), 1, ordered.size - 1)
    nearest = np.where(share - ordered[at - 1] < ordered[at] - share, ordered[at - 1], ordered[at])
    if not gone.any() and close(np.sort(nearest, axis=None), ordered, unit) and (
            np.abs(nearest - share) <= near * np.abs(share)).all():
        yield m.sum(nearest), {"change": "weights moved", "moved": int((~same).sum()), **slots}, 1


def _whose(m: Mixture, gone: Array) -> str:
    """Which slots these are."""
    n, experts = m.router.z.shape[1], set(m.slots[gone].tolist())
    if all(gone[m.slots == e].all() for e in experts):
        return f": all of expert{'s' if len(experts) > 1 else ''} " + ", ".join(map(str, sorted(experts)[:8]))
    for ranks in (r for r in range(2, n) if n % r == 0):
        held = m.slots // (n // ranks)
        if all(len(set(held[t][~gone[t]].tolist())) <= 1 and not set(held[t][~gone[t]]) & set(held[t][gone[t]])
               for t in range(len(gone))):
            return f": of {ranks} ranks that share out the experts each token has those of one"
    return ""


def _places(experts: Array, parts: int, by_slot: bool) -> typing.Iterator[tuple[Array, str]]:
    """Which slot's row each slot has by mistakes with the order in which slots of one expert stand together, in each of
    equal parts of the tokens. by_slot: all first slots are before all second ones."""
    grid = np.arange(experts.size).reshape(parts, -1, experts.shape[1])
    places: Array = np.empty((4, experts.size), int)
    for part in grid:
        index = (part.T if by_slot else part).reshape(-1)
        order = np.argsort(experts.reshape(-1)[index], kind="stable")
        back = np.argsort(order, kind="stable")
        for row, taken in zip(places, (order[order], order, order[(back + 1) % len(order)], order[back - 1])):
            row[index] = index[taken]
    whose = f", on each of {parts} ranks" if parts > 1 else ""
    yield places[0], f"the sorting permutation was applied in place of its inverse{whose}"
    yield places[1], f"they were not put back, and stand in the experts' order{whose}"
    yield places[2], f"each slot has the next row of the experts' order{whose}"
    yield places[3], f"each slot has the row before in the experts' order{whose}"


def _rows(m: Mixture, val: Array, groups: typing.Iterable[int], unit: float
          ) -> typing.Iterator[tuple[Array, dict[str, typing.Any], int]]:
    """Rows of the experts, or weights, put back at other slots."""
    tokens, k = m.slots.shape
    numbers, n = {"change": "rows", "slots": tokens * k}, m.router.z.shape[1]
    parts = [1, *(g for g in groups if tokens % g == 0)]
    for order, p, by_slot in itertools.product((np.argsort(m.slots, axis=1), np.argsort(-m.weights, axis=1)), parts,
                                               (False, True)):
        experts, weights = (np.take_along_axis(a, order, axis=1) for a in (m.slots, m.weights))
        made = np.take_along_axis(m.made, order[:, :, None], axis=1)
        for places, how in _places(experts, p, by_slot):
            moved = int((places != np.arange(tokens * k)).sum())
            yield m.sum(weights, made.reshape(tokens * k, -1)[places].reshape(made.shape)), {
                **numbers, "moved": moved, "how": how}, 0
            yield m.sum(weights.reshape(-1)[places].reshape(weights.shape), made), {
                "change": "weights moved", "moved": moved, "slots": tokens * k}, 0
    if k > 2 or tokens > MOST_TOKENS:
        return
    every = np.broadcast_to(np.arange(n), (tokens, n)) if tokens * n <= MOST_ROWS else m.slots
    rows = m.made_by(slots=every).reshape(every.size, -1)
    own = np.arange(tokens)[:, None] * every.shape[1] + (m.slots if every.shape[1] == n else np.arange(k))
    found = _search(m, rows, own, val - m.rest, unit)
    if found is not None:
        yield m.sum(m.weights, rows[found]), {**numbers, "moved": int((found != own).sum()),
                                              "how": "the row of another token, or of another expert"}, 1


def _search(m: Mixture, flat: Array, own: Array, target: Array, unit: float) -> Array | None:
    """Which of the experts' rows each slot has; None: some token's are none."""
    k = m.slots.shape[1]
    u = np.random.default_rng(0).normal(size=flat.shape[1])
    key, goal = flat @ u, target @ u
    order = np.argsort(key)
    near = max(2e-5, 8.0 * unit) * float(np.abs(target).max())
    found: Array = own.copy()
    for t in np.nonzero((np.abs(m.sum(m.weights) - m.rest - target) > near).any(axis=1))[0]:
        first = np.zeros(1) if k == 1 else m.weights[t, 0] * key
        wanted = (goal[t] - first) / m.weights[t, -1]
        places = np.searchsorted(key[order], wanted)
        best = None
        for shift in (-1, 0):
            j = order[np.clip(places + shift, 0, len(order) - 1)]
            i = np.nonzero(np.abs(key[j] - wanted) <= near * 8.0 * math.sqrt(len(u)) / abs(m.weights[t, -1]))[0]
            rows = (0.0 if k == 1 else m.weights[t, 0] * flat[i]) + m.weights[t, -1] * flat[j[i]]
            right = i[(np.abs(rows - target[t]) <= near).all(axis=1)]
            if len(right):
                best = (right[0], j[right[0]])
        if best is None:
            return None
        found[t] = best[-k:]
    return found


# --- the shared expert ------------------------------------------------------------------------------------------------


def _shared(case: Case, layer: Layer, factor: float) -> typing.Iterator[Pattern]:
    """The sum of the experts and of the one that all tokens have, with its gate, or parts of it. factor: of the
    experts' weights."""
    ref, beside = rows_of(case.ref), [(name, a) for name, a in layer.dumped if name != str(case.name)]
    wide = [(name, a) for name, a in beside if a.shape[1] == ref.shape[1]]
    gates = [a for _, a in beside if a.shape[1] == 1]
    holders = {leaf_of(layer.prefix, names) for names in layer.weights.values()}
    routed = next((a for name, a in wide if Name.of(name).stem in holders), None)
    for name, made in wide:
        for gate in (None, *gates):
            share = np.ones((len(ref), 1)) if gate is None else _sigmoid(gate)
            rest = ref - share * made
            if routed is made or routed is not None and not close(rest, routed, case.unit) or routed is None and (
                    "shared" not in name):
                continue
            numbers: dict[str, typing.Any] = {"shared": name}
            for other in ((1.0, *(x for x in gates if x is not gate)) if gate is not None else map(_sigmoid, gates)):
                yield Pattern(SHARED, (rest + other * made).reshape(case.shape), {**numbers, "change": "gate"})
            if gate is not None:
                yield Pattern(SHARED, (rest + gate * made).reshape(case.shape), {**numbers, "change": "logit"})
            if factor != 1.0:
                numbers["factor"] = factor
                yield Pattern(SHARED, (rest + factor * share * made).reshape(case.shape), {
                    **numbers, "change": "factor"})
            yield Pattern(SHARED, rest.reshape(case.shape), {**numbers, "change": "shared"})
            yield Pattern(SHARED, (share * made).reshape(case.shape), {**numbers, "change": "routed"})
            return


# --- generator --------------------------------------------------------------------------------------------------------


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind not in ACTIVATIONS[:1] or len(case.shape) < 2 or case.reference.size < 8:
        return
    layer = layer_of(case)
    if layer is None or case.shape[-1] != layer.gate.shape[1]:
        return
    router = known_router(layer, case.unit)
    yield from _shared(case, layer, router.form.factor if router else 1.0)
    mixture = mixture_of(case, layer, router)
    if mixture is None:
        return
    val = rows_of(case.val)
    off = np.nonzero(rows_of(case.off).any(axis=1))[0]
    for found in (_proved(mixture, val, off, _sums(case, mixture), case.unit), _left_out(mixture, val, case.unit),
                  _rows(mixture, val, case.runs.group_sizes, case.unit)):
        for expected, numbers, fitted in found:
            yield Pattern(MIXTURE, expected.reshape(case.shape), numbers, fitted, 4)


# --- causes -----------------------------------------------------------------------------------------------------------

_AGAIN = "computed again from the reference's routes and the experts' weights, these values come out with "
CAUSES = (
    *(dataclasses.replace(cause, kinds=(MIXTURE,)) for cause in CHANGES),
    Cause("experts_left_out", (MIXTURE,), "an expert's output is missing in {lacking} of {slots} slots of "
          "tokens{whose}", "the bounds of the loop over experts, each rank's experts, rows that did not return; "
          "`moe_expert_capacity_factor`, token dropping", has(change="left out")),
    Cause("expert_rows_misplaced", (MIXTURE,), "{moved} of {slots} slots of tokens have what the experts make of "
          "another: {how}", "the permutation that sorts tokens by expert, its inverse, and the offsets of the "
          "all-to-all", has(change="rows")),
    Cause("expert_rows_misplaced", (MIXTURE,), "{moved} of {slots} slots of tokens have their own expert with the "
          "weight of another slot", "the order of the weights where tokens are sorted by expert, or sent to other "
          "ranks", has(change="weights moved")),
    Cause("expert_weights_applied", (MIXTURE,), _AGAIN + "{how}", "where the weights are applied: once, to what comes "
          "out of the expert, behind its last bias; `apply_router_weight_on_input`", has(change="weights")),
    Cause("activation_arguments", (MIXTURE,), _AGAIN + "{how}", "the order of gate|up in the experts' packed weight "
          "(w1 and w3)", has(change="exchanged")),
    Cause("packed_cut_as_one", (MIXTURE,), _AGAIN + "gate and up from {how}", "`chunk(2, -1)` where the model has "
          "`[..., ::2]` and `[..., 1::2]`, or the other way round", has(change="packed")),
    Cause("activation_function", (MIXTURE,), _AGAIN + "{how}, where the reference has {was}",
          "the experts' activation, its limits and slope", has(change="act")),
    Cause("shared_expert_left_out", (SHARED,), "the shared expert is left out: these are the values of the routed "
          "ones alone", "the shared expert's stream, its overlap, and where its output is added",
          has(change="shared")),
    Cause("routing_weights_scaled", (SHARED,), "the shared expert's output is multiplied by {factor} too, the factor "
          "of the routed experts' weights", "where `routed_scaling_factor` is applied: before the shared expert is "
          "added", has(change="factor")),
    Cause("experts_left_out", (SHARED,), "the routed experts are left out: these are the values of the shared one "
          "alone", "where the routed experts' output is added", has(change="routed")),
    Cause("shared_gate_left_out", (SHARED,), "the shared expert's output is multiplied by its gate's logit, not by "
          "the sigmoid of that", "the sigmoid of `shared_expert_gate`", has(change="logit")),
    Cause("shared_gate_left_out", (SHARED,), "the shared expert's gate is left out, or there is one in this run alone",
          "`shared_expert_gate` (`moe_shared_expert_gate`)", has(change="gate")),
)
