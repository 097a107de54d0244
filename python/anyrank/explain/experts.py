# SPDX-License-Identifier: Apache-2.0
"""What the experts of tokens make together, computed again: experts left out, rows put back at other places, weights
applied otherwise.

Of the forms that the parameters' shapes leave open, the one that gives the reference is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import listed
from anyrank.explain.patterns import Pattern
from anyrank.explain.routers import WEIGHTS, Layer, Router, close, in_step, layer_of, router_of, rows_of, view_of
from anyrank.explain.tensors import Array, Case
from anyrank.explain.words import counted

MIXTURE = "mixture_of_experts"
MOST_WORK, MOST_MADE, MOST_TOKENS, MOST_ROWS = 1 << 31, 1 << 24, 1024, 4096
SAMPLE = 8  # tokens on which forms are tried

Act = typing.Callable[[Array, Array], Array]
Stack = typing.Union[typing.Sequence[Array], Array]  # an array for each expert


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        result: Array = 1.0 / (1.0 + np.exp(-x))
    return result


_erf: typing.Callable[[Array], Array] = np.vectorize(math.erf, otypes=[float])
ACTS: tuple[Act, ...] = (  # of gate and up
    lambda gate, up: gate * _sigmoid(gate) * up,
    lambda gate, up: 0.5 * gate * (1.0 + _erf(gate / math.sqrt(2.0))) * up,
    lambda gate, up: gate * _sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate ** 3)) * up,
    lambda gate, up: np.maximum(gate, 0.0) * up,
    lambda gate, up: np.maximum(gate, 0.0) ** 2 * up,
    lambda gate, up: np.minimum(gate, 7.0) * _sigmoid(1.702 * np.minimum(gate, 7.0)) * (np.clip(up, -7.0, 7.0) + 1.0))


@dataclasses.dataclass(frozen=True)
class Experts:
    """first: arrays of gate and up, or of both, by expert; second: of what comes after; each with its bias or None.
    flip: they are stored [in, out]. columns: where the first product has gate and, behind it, up."""

    first: tuple[Stack, ...]
    second: Stack
    biases: tuple[Stack | None, ...]
    flip: bool
    columns: Array
    act: Act

    @property
    def width(self) -> int:
        return int(self.second[0].shape[0 if self.flip else 1])

    @property
    def gated(self) -> bool:
        return len(self.columns) == 2 * self.width

    def _product(self, x: Array, matrix: Array, bias: Stack | None, expert: int) -> Array:
        result: Array = x @ (matrix if self.flip else matrix.T).astype(np.float64)
        return result if bias is None else result + bias[expert]

    def run(self, expert: int, x: Array) -> Array:
        """What an expert makes of rows."""
        h = np.concatenate([self._product(x, stack[expert], bias, expert)
                            for stack, bias in zip(self.first, self.biases)], axis=1)[:, self.columns]
        made = self.act(h[:, :self.width], h[:, self.width:] if self.gated else np.ones(1))
        return self._product(made, self.second[expert], self.biases[-1], expert)

    def all(self, x: Array, times: Array | None = None) -> Array:
        """What all experts make of rows, [tokens, experts, features]. times: of their input, [tokens, experts]."""
        result: Array = np.stack([self.run(e, x if times is None else x * times[:, e, None])
                                  for e in range(len(self.second))], axis=1)
        return result


def forms_of(case: Case, layer: Layer) -> typing.Iterator[Experts]:
    """Experts as shapes allow them."""
    known, features = case.runs.reference, layer.gate.shape[1]
    stacks: dict[str, Stack] = {}
    for leaf, names in layer.weights.items():
        read = [known[in_step(case, name)] for name in names]
        stacks[leaf] = read if len(read) > 1 else read[0]
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
    """y: what each expert makes of each token, [tokens, experts, features]. weights: 0 of experts that a token does not
    have. rest: what the reference has besides."""

    experts: Experts
    x: Array
    y: Array
    weights: Array
    rest: Array

    def sum(self, weights: Array, y: Array | None = None) -> Array:
        result: Array = self.rest + np.einsum("te,tef->tf", weights, self.y if y is None else y)
        return result


def _shares(y: Array, values: Array, beside: Array, unit: float) -> Array | None:
    """How much of what each expert makes rows are sums of, and as the last column of another activation; None: they
    are no such sums."""
    shares: Array = np.zeros((len(y), y.shape[1] + 1))
    used = slice(None) if beside.any() else slice(0, -1)
    for t in range(len(y)):
        columns = np.vstack([y[t], beside[t]])[used].T
        found, _, rank, _ = np.linalg.lstsq(columns, values[t], rcond=None)
        if not close(columns @ found, values[t], unit) or rank < columns.shape[1]:
            return None
        shares[t, used] = found
    shares[np.abs(shares) < 1e-3 * np.abs(shares[:, :-1]).max(initial=0.0)] = 0.0
    return shares


def mixture_of(case: Case, layer: Layer) -> tuple[Mixture, Array] | None:
    """The reference's experts that give the case's tensor, and what is added to them."""
    ref, n = rows_of(case.ref), layer.experts
    inside = [array for _, array in layer.dumped if array.shape == ref.shape and not close(array, ref, case.unit)]
    some: Array = np.unique(np.linspace(0, len(ref) - 1, SAMPLE).astype(int))
    if ref.size * n > MOST_MADE or n + 4 > ref.shape[1]:
        return None
    for x, experts in itertools.product(layer.inputs, forms_of(case, layer)):
        if len(ref) * n * len(experts.columns) * ref.shape[1] > MOST_WORK:
            continue
        made = experts.all(x[some])
        for beside in (np.zeros(ref.shape), *inside, *layer.inputs):
            if _shares(made, ref[some], beside[some], case.unit) is not None:
                y = experts.all(x)
                shares = _shares(y, ref, beside, case.unit)
                if shares is not None:
                    weights = shares[:, :-1]
                    rest = ref - np.einsum("te,tef->tf", weights, y)
                    return Mixture(experts, x, y, weights, rest), beside
    return None


# --- other sums -------------------------------------------------------------------------------------------------------

Found = typing.Iterator[tuple[Array, dict[str, typing.Any], int]]


def _other_weights(m: Mixture, shares: Array, router: Router | None, near: float) -> Found:
    """The weights that the other run's sums have: of which experts, which function of the reference's."""
    w, n = m.weights, m.weights.shape[1]
    on = w != 0.0

    def alike(x: Array, y: Array) -> bool:
        return bool((np.abs(x - y) <= near * np.abs(y)).all())

    gone, slots = on & (shares == 0.0), int(on.sum())
    if gone.any() and alike(shares, np.where(gone, 0.0, w)):
        whole = [e for e in range(n) if gone[:, e].any() and (gone == on)[:, e].all()]
        of = f", all of those of {counted(len(whole), 'expert')} ({listed(whole)})" if whole else ""
        yield np.where(gone, 0.0, w), {"change": "left out", "slots": slots, "lacking": int(gone.sum()), "whose": of}, 1
    for how, other in {"the sum of a token's experts, without weights": on.astype(float),
                       "the mean of a token's experts, without weights": on / np.maximum(on.sum(1, keepdims=True), 1),
                       "each weight applied twice": w * w}.items():
        if alike(shares, other):
            yield other, {"change": "applied", "how": how}, 0
    moved: Array = np.take_along_axis(np.sort(w, axis=1), np.argsort(np.argsort(shares, axis=1), axis=1), axis=1)
    if alike(shares, moved) and gone.any():
        yield moved, {"change": "rows", "slots": slots, "moved": int(gone.sum()), "how": "other experts work on these "
                      "tokens, as if experts were in another order or cut at other places"}, 1
    if alike(np.sort(shares[on]), np.sort(w[on])) and not shares[~on].any():
        moved[:] = 0.0
        moved[on] = np.sort(w[on])[np.argsort(np.argsort(shares[on]))]
        yield moved, {"change": "weights moved", "slots": slots, "moved": int((np.abs(moved - w) > near * w).sum())}, 1
    if router is not None:
        yield from ((other, router.said(form, mask), 0) for form, mask, other, _ in router.changed()
                    if np.array_equal(mask, router.mask) and alike(shares, other))


def _other_rows(case: Case, m: Mixture, val: Array) -> Found:
    """What comes out where experts make something else: of other columns, of weighted inputs, of other tokens."""
    w, experts = m.weights, m.experts
    for columns, what, how in _columns(experts.width, case.runs.group_sizes) if experts.gated else ():
        y = dataclasses.replace(experts, columns=experts.columns[columns]).all(m.x)
        yield m.sum(w, y), {"change": what, "how": how}, 0
    yield m.sum((w != 0.0).astype(float), experts.all(m.x, w)), {
        "change": "applied", "how": "the weight multiplying what goes into the expert, not what comes out"}, 0
    last = experts.biases[-1]
    if last is not None:
        yield m.sum(w) + ((w != 0.0) - w) @ np.stack([last[e] for e in range(w.shape[1])]), {
            "change": "applied", "how": "the bias of the second product added as it is, without the token's weights"}, 0
    found, k = _search(m, val - m.rest, case.unit), np.count_nonzero(w)
    if found is not None:
        made, moved = found
        yield made + m.rest, {"change": "rows", "slots": k, "moved": moved,
                              "how": "the row of another token, or of another expert"}, 1


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


def _search(m: Mixture, target: Array, unit: float) -> tuple[Array, int] | None:
    """What one or two of the experts' rows make in place of each token's own, and how many are others."""
    (tokens, n), on = m.weights.shape, m.weights != 0.0
    k = int(on[0].sum())
    if not 1 <= k <= 2 or (on.sum(axis=1) != k).any() or tokens > MOST_TOKENS:
        return None
    rows = np.ones(on.shape, bool) if tokens * n <= MOST_ROWS else on
    flat, own, w = m.y[rows], np.flatnonzero(on[rows]).reshape(tokens, k), m.weights[on].reshape(tokens, k)
    u = np.random.default_rng(0).normal(size=flat.shape[1])
    key, goal = flat @ u, target @ u
    order = np.argsort(key)
    near = max(2e-5, 8.0 * unit) * float(np.abs(target).max())
    found: Array = own.copy()
    for t in np.nonzero((np.abs(m.sum(m.weights) - m.rest - target) > near).any(axis=1))[0]:
        first = np.zeros(1) if k == 1 else w[t, 0] * key
        wanted = (goal[t] - first) / w[t, -1]
        places = np.searchsorted(key[order], wanted)
        best = None
        for shift in (-1, 0):
            j = order[np.clip(places + shift, 0, len(order) - 1)]
            i = np.nonzero(np.abs(key[j] - wanted) <= near * 8.0 * math.sqrt(len(u)) / abs(w[t, -1]))[0]
            sums = (0.0 if k == 1 else w[t, 0] * flat[i]) + w[t, -1] * flat[j[i]]
            right = i[(np.abs(sums - target[t]) <= near).all(axis=1)]
            if len(right):
                best = (right[0], j[right[0]])
        if best is None:
            return None
        found[t] = best[-k:]
    return np.einsum("tk,tkf->tf", w, flat[found]), int((found != own).sum())


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or len(case.shape) < 2 or case.reference.size < 8:
        return
    layer = layer_of(case)
    again = mixture_of(case, layer) if layer is not None and case.shape[-1] == layer.gate.shape[1] else None
    if layer is None or again is None:
        return
    mixture, beside = again
    val, view = rows_of(case.val), view_of(mixture.weights, layer.experts)
    shares = _shares(mixture.y, val, beside, case.unit)
    near = max(1e-3, 32.0 * case.unit)
    if shares is None:
        sums = list(_other_rows(case, mixture, val))
    else:
        router = router_of(layer, mixture.weights, view, near / 8.0) if view else None
        found = _other_weights(mixture, shares[:, :-1], router, near)
        sums = [(mixture.sum(w), numbers, fitted) for w, numbers, fitted in found]
    for expected, numbers, fitted in sums:
        yield Pattern(MIXTURE, expected.reshape(case.shape), numbers, fitted, 4)


# --- causes -----------------------------------------------------------------------------------------------------------

_AGAIN = "computed again from the reference's routes and the experts' weights, these values come out with "
CAUSES = (
    dataclasses.replace(WEIGHTS, kinds=(MIXTURE,)),
    Cause("routing_weights", (MIXTURE,), _AGAIN + "{how}", "where the weights are applied: once, to what comes out of "
          "the expert, behind its last bias; `apply_router_weight_on_input`", has(change="applied")),
    Cause("experts_left_out", (MIXTURE,), "an expert's output is missing in {lacking} of {slots} slots of "
          "tokens{whose}", "the bounds of the loop over experts, each rank's experts, rows that did not return; "
          "`moe_expert_capacity_factor`, token dropping", has(change="left out")),
    Cause("expert_rows_misplaced", (MIXTURE,), "{moved} of {slots} slots of tokens have what the experts make of "
          "another: {how}", "the permutation that sorts tokens by expert, its inverse, and the offsets of the "
          "all-to-all", has(change="rows")),
    Cause("expert_rows_misplaced", (MIXTURE,), "{moved} of {slots} slots of tokens have their own expert with the "
          "weight of another slot", "the order of the weights where tokens are sorted by expert, or sent to other "
          "ranks", has(change="weights moved")),
    Cause("activation_arguments", (MIXTURE,), _AGAIN + "{how}", "the order of gate|up in the experts' packed weight "
          "(w1 and w3)", has(change="exchanged")),
    Cause("packed_cut_as_one", (MIXTURE,), _AGAIN + "gate and up from {how}", "`chunk(2, -1)` where the model has "
          "`[..., ::2]` and `[..., 1::2]`, or the other way round", has(change="packed")),
)
