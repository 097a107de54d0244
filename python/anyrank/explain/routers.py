# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures of experts: scores of logits, the experts chosen by them, and their weights.

A router's form is searched until the reference's own values come out of its logits; then with one thing changed, until
the other run's do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import shape_of
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.tensors import ACTIVATIONS, Array, Case, Name

FORM = "router"
MOST_EXPERTS, MOST_GROUPS, MOST_WORK = 1024, 32, 1 << 29
MOST_CHOSEN = 16  # experts of a token
LEAST = 4         # tokens whose experts are no accident


# --- the layer --------------------------------------------------------------------------------------------------------


def rows_of(array: Array) -> Array:
    """[tokens, features], in binary64."""
    result: Array = array.reshape(-1, array.shape[-1]).astype(np.float64)
    return result


def close(x: Array, y: Array, unit: float) -> bool:
    """Whether two arrays are the same up to rounding."""
    size = float(np.abs(y).max(initial=0.0))
    return bool((np.abs(x - y) <= max(2e-5, 8.0 * unit) * size).all())


@dataclasses.dataclass(frozen=True)
class Layer:
    """A module with experts, `prefix` before its names. weights: names of the experts' parameters, one for each or one
    of all, by the rest of their name. gate: the router's weight, [experts, features]. inputs: what the layer may read,
    [tokens, features]."""

    prefix: str
    weights: dict[str, list[str]]
    gate: Array
    router: str  # the stem of the router's weight
    tokens: int
    dumped: list[tuple[str, Array]]  # activations of the layer, [tokens, columns]
    logits: list[tuple[Array, Array]]  # that it may have, each with a bias of the choice
    inputs: list[Array]
    moves: list[tuple[Array, Array]]  # a bias before the step and after it

    @property
    def experts(self) -> int:
        return len(self.gate)


def _of_experts(case: Case, prefix: str) -> tuple[dict[str, list[str]], str, list[str]] | None:
    """Names of the experts' parameters below a prefix, of the router's weight, and of other parameters."""
    known = case.runs.reference
    by_leaf: dict[str, dict[int, str]] = {}
    others: dict[str, str] = {}
    for name in known:
        own = Name.of(name)
        if own.stem.startswith(prefix) and own.kind in ("init", "weight", "buffer"):
            leaf = own.stem[len(prefix):]
            match = re.fullmatch(r"((?:.*?\.)?)(\d+)\.(.+)", leaf)
            if match and own.kind != "buffer":
                by_leaf.setdefault(f"{match[1]}*.{match[3]}", {})[int(match[2])] = name
            elif len(shape_of(known, name)) == 3:
                by_leaf[leaf] = {0: name}
            else:
                others.setdefault(leaf, name)  # the first is of before the step
    stems = tuple(leaf.removesuffix("weight") for leaf in by_leaf)
    for leaf in [leaf for leaf, name in others.items() if leaf.startswith(stems) and len(shape_of(known, name)) == 2]:
        by_leaf[leaf] = {0: others.pop(leaf)}  # biases of stacked experts
    sizes = {leaf: len(names) if "*" in leaf else shape_of(known, names[0])[0] for leaf, names in by_leaf.items()
             if sorted(names) == [*range(len(names))]}
    for n in sorted(n for n in {*sizes.values()} if 2 <= n <= MOST_EXPERTS):
        gates = [name for name in others.values() if len(shape := shape_of(known, name)) == 2 and n in shape]
        if gates:
            of = {leaf: [by_leaf[leaf][i] for i in sorted(by_leaf[leaf])] for leaf in sizes if sizes[leaf] == n}
            return of, min(gates, key=lambda name: shape_of(known, name)[0] != n), [*others.values()]
    return None


def layer_of(case: Case) -> Layer | None:
    """The nearest layer with experts and a router that a tensor belongs to. In a model that names none any numbered
    modules would be tried as experts."""
    if not case.runs.has_experts:
        return None
    parts = case.name.stem.split(".")
    for depth in range(len(parts), max(len(parts) - 4, -1), -1):
        prefix = ".".join(parts[:depth]) + "." * (depth > 0)
        found = _of_experts(case, prefix)
        if found:
            return _read(case, prefix, *found)
    return None


def _read(case: Case, prefix: str, weights: dict[str, list[str]], router: str, others: list[str]) -> Layer | None:
    """What the step's dump has of the layer."""
    known, of_one = case.runs.reference, next(iter(weights.values()))
    n = len(of_one) if len(of_one) > 1 else shape_of(known, of_one[0])[0]
    gate: Array = known[in_step(case, router)].astype(np.float64)
    gate = gate if len(gate) == n else gate.T
    step = [name for name in known if (own := Name.of(name)).kind == "fwd" and own.step == case.name.step]
    of_router = (math.prod(shape[:-1]) for name in step if Name.of(name).stem.startswith(prefix)
                 and (shape := shape_of(known, name))[-1:] == (n,))
    tokens = math.prod(case.shape[:-1]) if case.name.kind in ACTIVATIONS else next(
        of_router, case.runs.batch * max(case.runs.seq, 1))
    if case.every and any(s.step not in (None, 1) for s in case.every) or not tokens:
        return None
    names = [name for name in step if len(shape := shape_of(known, name)) >= 2 and math.prod(shape[:-1]) == tokens]
    inside = [name for name in names if f"{Name.of(name).stem}.".startswith(prefix)]
    dumped = [(name, rows_of(known[name])) for name in inside if known[name].dtype.kind in "fiu"]
    stem = Name.of(router).stem
    first = next((i for i, name in enumerate(names) if Name.of(name).stem.startswith(stem.rpartition(".")[0])),
                 names.index(inside[0]) if inside else len(names))
    read = [name for name in names if shape_of(known, name)[-1] == gate.shape[1] and name != str(case.name)]
    wide = [name for name in names[:first][::-1] if name in read]
    beside = sorted((name for name in read if name not in inside and name not in wide),
                    key=lambda name: "norm" not in name)
    inputs = [rows_of(known[name]) for name in (*wide[:2], *beside[:2])]
    moves: list[tuple[Array, Array]] = []
    for name in (name for name in others if shape_of(known, name) == (n,)):
        before: Array = known[in_step(case, name)].astype(np.float64)
        after: Array = known.get(Name.of(name).with_kind("new", case.name.step), before).astype(np.float64)
        if case.name.kind == "buffer" and Name.of(name).stem == case.name.stem:  # dumped after each step, zero at first
            kept = case.beside(case.name.with_kind("buffer", case.name.step - 1)) if case.name.step > 1 else None
            before, after = np.zeros(n) if kept is None else kept, case.ref
        moves.append((before, after))
    vectors = [x for x, _ in moves if x.any()]
    made = [x @ gate.T for x in inputs] if tokens * gate.size <= MOST_WORK else []
    dense = [z for _, z in dumped if z.shape[1] == n and (z < 0.0).any() and (z != 0.0).all()]
    logits = [(z, bias) for z in (*dense, *made, *(z + v for z in made for v in vectors))
              for bias in (np.zeros(n), *vectors)]
    return Layer(prefix, weights, gate, stem, tokens, dumped, logits, inputs, moves)


def in_step(case: Case, name: str) -> str:
    """The name of a parameter as it is in the case's step."""
    after = Name.of(name).with_kind("new", case.name.step - 1)
    return after if case.name.step > 1 and after in case.runs.reference else name


def halves(x: Array) -> Array:
    """Rounded to bfloat16, in binary64."""
    bits: Array = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000
    result: Array = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    return result


# --- a router's form --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
    """How a router chooses and weighs. groups: of which those `kept` stay that are ranked by the sum of their two best
    scores. Weights are `factor` times a function of the scores of those chosen: "shares" of their sum, the "scores" ..
    """

    softmax: bool = True
    biased: bool = False
    groups: int = 1
    kept: int = 1
    best: bool = False     # groups are ranked by their best score alone
    dealt: bool = False    # group i has experts i, i + groups, ..
    zeros: bool = False    # the scores of groups that do not stay are 0
    shifted: bool = False  # the bias is added to the logits
    last: bool = False     # of equal scores the last one is taken
    rounded: int = 0       # logits are rounded to bfloat16: 1, after the product; 2, its factors too
    function: str = "shares"
    factor: float = 1.0

    @property
    def weights(self) -> str:
        times = f"{self.factor:.4g} times " if self.factor != 1.0 else ""
        return f"{times}{FUNCTIONS[self.function]} of a {'softmax' if self.softmax else 'sigmoid'}"

    @property
    def choice(self) -> str:
        of = f"{self.kept} of {self.groups} groups{' of experts dealt round' if self.dealt else ''}, ranked by " + (
            "their best score" if self.best else "the sum of their two best") if self.groups > 1 else "all experts"
        return "".join((of, " (the other scores become 0)" if self.zeros else "",
                        f" by a {'softmax' if self.softmax else 'sigmoid'}",
                        " of logits with the bias" if self.shifted else " with the bias" if self.biased else "",
                        ", of rounded logits" if self.rounded else "", ", of equal ones the last" if self.last else ""))


FUNCTIONS = {"shares": "shares of the sum over the experts chosen", "scores": "the scores, not normalised,",
             "shares of all": "shares of the sum over all experts", "biased shares": "shares of biased scores",
             "biased scores": "biased scores", "softmax again": "a second softmax, over the experts chosen,",
             "softmax of all": "a second softmax, over all experts,", "equal": "equal shares, in place of scores",
             "logits": "the logits, in place"}


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Array = e / e.sum(axis=-1, keepdims=True)
    return result


def scores_of(z: Array, form: Form) -> Array:
    result: Array = softmax(z) if form.softmax else 1.0 / (1.0 + np.exp(-z))
    return result


def chosen_by(z: Array, bias: Array, k: int, form: Form) -> Array:
    """Which experts tokens have, [tokens, experts]."""
    c = scores_of(z + bias if form.shifted else z, form) + (bias if form.biased and not form.shifted else 0.0)
    tokens, n = c.shape
    if form.groups > 1:
        each = n // form.groups
        group = np.arange(n) % form.groups if form.dealt else np.arange(n) // each
        by_group = np.sort(c[:, np.argsort(group, kind="stable")].reshape(tokens, form.groups, each), axis=2)
        rank = by_group[:, :, -1] if form.best or each < 2 else by_group[:, :, -2:].sum(axis=2)
        stays = np.zeros(rank.shape, bool)
        np.put_along_axis(stays, np.argsort(-rank, axis=1, kind="stable")[:, :form.kept], True, axis=1)
        c = np.where(stays[:, group], c, 0.0 if form.zeros else -np.inf)
    order = np.argsort(-c[:, ::-1] if form.last else -c, axis=1, kind="stable")
    mask: Array = np.zeros(c.shape, bool)
    np.put_along_axis(mask, (n - 1 - order if form.last else order)[:, :k], True, axis=1)
    return mask


def weights_by(z: Array, bias: Array, mask: Array, form: Form) -> Array:
    """The weights of a choice, [tokens, experts], 0 of those not chosen."""
    p, name = scores_of(z, form), form.function
    x = {"logits": z, "equal": np.ones(z.shape)}.get(name, p)
    x = x + bias if name.startswith("biased") else np.exp(p) if name.startswith("softmax") else x
    over = x if name.endswith("of all") else np.where(mask, x, 0.0)
    divided = name not in ("scores", "biased scores", "logits")
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Array = np.where(mask, form.factor * x / (over.sum(axis=1, keepdims=True) if divided else 1.0), 0.0)
    return result


def _choices(n: int, k: int, biased: bool) -> typing.Iterator[Form]:
    """Ways to choose that a reference may have, the simplest first."""
    yield from map(Form, (True, False))
    yield from (Form(soft, True) for soft in (False, True) if biased)
    for (groups, kept), soft, best in itertools.product(_groups_of(n, k), (False, True), (False, True)):
        yield from (Form(soft, bias, groups, kept, best) for bias in ((True, False) if biased else (False,)))


def _groups_of(n: int, k: int) -> list[tuple[int, int]]:
    """Into how many groups experts are cut, and how many of these stay."""
    return [(groups, kept) for groups in range(2, min(n // 2, MOST_GROUPS) + 1) if n % groups == 0
            for kept in range(1, groups) if kept * (n // groups) >= k and (groups <= 8 or kept & (kept - 1) == 0)]


def _changed(form: Form, n: int, k: int, biased: bool) -> typing.Iterator[tuple[int, dict[str, typing.Any]]]:
    """What may be changed of a form, and among how many."""
    yield from ((1, {"factor": x}) for x in (1.0, form.factor ** 2, 1.0 / form.factor))
    yield from ((len(FUNCTIONS), {"function": name}) for name in FUNCTIONS if (
        biased or not name.startswith("biased")) and not (form.softmax and name == "shares of all"))
    yield from ((2, {"softmax": not form.softmax, "function": name}) for name in (form.function, "scores", "shares"))
    yield from ((8, {"rounded": how, "last": last}) for how in (0, 1, 2) for last in (False, True))
    yield from ((8, other) for other in ({"biased": not form.biased}, {"shifted": True, "biased": True}) if biased)
    if form.groups > 1:
        yield from ((8, {what: not getattr(form, what)}) for what in ("best", "dealt", "zeros"))
    for groups, kept in ((1, 1), *_groups_of(n, k)):
        yield 8 if groups == 1 else 64, {"groups": groups, "kept": kept, "best": form.best and groups > 1}


# --- what a tensor has of a router ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class View:
    """How a tensor shows a choice: "all" weights [tokens, experts], the "chosen" ones [tokens, k] in the order of a
    choice, or the experts' "numbers" [tokens, k]."""

    kind: str
    k: int

    def shown(self, weights: Array, mask: Array, like: Array) -> Array:
        """The tensor [tokens, ..] of weights and a choice, a row's slots in the order that `like` has."""
        if self.kind == "all":
            return weights
        index = np.nonzero(mask)[1].reshape(len(mask), self.k)
        values = index.astype(float) if self.kind == "numbers" else np.take_along_axis(weights, index, axis=1)
        result: Array = np.empty(values.shape)
        np.put_along_axis(result, np.argsort(like, axis=1, kind="stable"), np.sort(values, axis=1), axis=1)
        return result


def view_of(array: Array, n: int) -> View | None:
    """What a tensor [tokens, columns] may show of n experts."""
    columns = array.shape[1]
    if columns == n:
        counts = np.count_nonzero(array, axis=1)
        k = int(counts.max(initial=0))
        return View("all", k) if 0 < k < n and k <= MOST_CHOSEN and (counts == k).all() else None
    if columns > min(n - 1, MOST_CHOSEN) or not np.isfinite(array).all():
        return None
    whole = (array == np.round(array)).all() and array.min(initial=0.0) >= 0 and array.max(initial=0.0) < n
    apart = (np.diff(np.sort(array, axis=1), axis=1) > 0).all()
    return View("numbers" if whole and apart and array.max(initial=0.0) >= columns else "chosen", columns)


@dataclasses.dataclass(frozen=True)
class Router:
    """A router whose form gives what the reference has. z: logits [tokens, experts]."""

    z: Array
    bias: Array
    k: int
    form: Form
    mask: Array
    weights: Array
    product: Array | None = None  # of rounded factors

    def with_form(self, form: Form) -> tuple[Array, Array]:
        """Choice and weights of another form."""
        z = self.product if form.rounded == 2 and self.product is not None else self.z
        z = halves(z) if form.rounded else z
        mask = chosen_by(z, self.bias, self.k, form)
        return mask, weights_by(z, self.bias, mask, form)

    def changed(self) -> typing.Iterator[tuple[Form, Array, Array, int]]:
        """Forms with one thing changed, with choice and weights, and among how many they are."""
        for trials, one in _changed(self.form, self.z.shape[1], self.k, bool(np.ptp(self.bias))):
            form = dataclasses.replace(self.form, **one)
            mask, weights = self.with_form(form)
            if np.isfinite(weights).all() and not (np.array_equal(mask, self.mask) and close(
                    weights, self.weights, 2.0 ** -24)):
                yield form, mask, weights, trials

    def said(self, form: Form, mask: Array) -> dict[str, typing.Any]:
        rows = int((mask != self.mask).any(axis=1).sum())
        change = "rounded" if form.rounded else "choice" if form.choice != self.form.choice and rows else "weights"
        return {"change": change, "is": form.choice if change != "weights" else form.weights, "rows": rows, "k": self.k,
                "was": self.form.choice if change != "weights" else self.form.weights}


def router_of(layer: Layer, array: Array, view: View, unit: float) -> Router | None:
    """The router's form by what the reference has of it, [tokens, columns]."""
    for z, bias in layer.logits:
        n, biased = z.shape[1], bool(np.ptp(bias))
        for form in (dataclasses.replace(form, function=name) for form in _choices(n, view.k, biased)
                     for name in (("shares",) if view.kind == "numbers" else ("shares", "scores"))):
            for part in (slice(0, 8), slice(None)):
                mask = chosen_by(z[part], bias, view.k, form)
                expected = view.shown(weights_by(z[part], bias, mask, form), mask, array[part])
                square = float((expected ** 2).sum())
                factor = 1.0 if view.kind == "numbers" or not square else float((expected * array[part]).sum()) / square
                if not factor > 0.0 or not close(factor * expected, array[part], unit):
                    break
            else:
                ratio = ratio_of(factor, 64, 1e-4)
                form = dataclasses.replace(form, factor=ratio[0] / ratio[1] if ratio else factor)
                mask = chosen_by(z, bias, view.k, form)
                return Router(z, bias, view.k, form, mask, weights_by(z, bias, mask, form), next((
                    halves(x) @ halves(layer.gate).T for x in layer.inputs if close(x @ layer.gate.T, z, unit)), None))
    return None


def known_router(layer: Layer, unit: float) -> Router | None:
    """The router of a layer by any of its dumped tensors: weights first."""
    views = [(array, view) for _, array in layer.dumped if (view := view_of(array, layer.experts))]
    views.sort(key=lambda pair: ("all", "chosen", "numbers").index(pair[1].kind))
    return next((router for array, view in views if (router := router_of(layer, array, view, unit))), None)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    """Weights or numbers of experts in another form."""
    if case.name.kind != "fwd" or len(case.shape) < 2 or case.reference.size < 8:
        return
    layer = layer_of(case)
    if layer is None or case.shape[-1] > layer.experts:
        return
    ref, val = rows_of(case.ref), rows_of(case.val)
    scores = ref.shape[1] == layer.experts and (ref > 0.0).all()
    view = view_of(ref, layer.experts) or (View("all", layer.experts) if scores else None)
    router = router_of(layer, ref, view, case.unit) if view else None
    if router is None or view is None:
        return
    for form, mask, weights, trials in router.changed():
        if view.kind != "numbers" or (mask != router.mask).any(axis=1).sum() >= LEAST or (
                form.last or form.rounded or form.groups > 1):
            yield Pattern(FORM, view.shown(weights, mask, val).reshape(case.shape), router.said(form, mask), 0, trials)
    for before, after in layer.moves:
        if np.array_equal(before, router.bias):
            yield from _moved_bias(case, router, view, float(np.abs(after - before).max()))


def _moved_bias(case: Case, router: Router, view: View, by: float) -> typing.Iterator[Pattern]:
    """A choice by a bias that moves within the step, after each micro-batch."""
    pieces, n = case.runs.micro_batches, router.z.shape[1]
    if pieces < 2 or by == 0.0 or not router.form.biased or len(router.z) % pieces or view.kind == "chosen":
        return
    bias, parts = router.bias.copy(), []
    for z in np.split(router.z, pieces):
        parts.append(chosen_by(z, bias, router.k, router.form))
        bias = bias + by * np.sign(len(z) * router.k / n - parts[-1].sum(axis=0))
    mask = np.concatenate(parts)
    weights = weights_by(router.z, router.bias, mask, router.form)
    yield Pattern(FORM, view.shown(weights, mask, rows_of(case.val)).reshape(case.shape),
                  {**router.said(router.form, mask), "change": "bias moves", "by": by})


# --- causes -----------------------------------------------------------------------------------------------------------

WEIGHTS = Cause("routing_weights", (FORM,), "the router computed again from its logits: the weights of a token's "
                "experts are {is}, where the reference has {was}", "`norm_topk_prob`, `scoring_func` and "
                "`routed_scaling_factor`: a factor left out or applied twice, the order of softmax and `topk`, the sum "
                "that weights are divided by, the scores that they are taken from (without the bias of the choice)",
                has(change="weights"))
_CHOSEN = "{rows} tokens have other experts, and of the same logits: "
CAUSES = (
    WEIGHTS,
    Cause("router_bias_update", (FORM,), _CHOSEN + "those of a bias that moves by {by} after each micro-batch, within "
          "the step", "where the update is called: once, in the optimizer's step", has(change="bias moves")),
    Cause("other_experts_chosen", (FORM,), _CHOSEN + "the {k} largest of {is}, where the reference takes them of "
          "{was}", "`n_group` and `topk_group`, how groups are ranked and masked, the bias of the choice, equal "
          "logits", has(change="choice")),
    Cause("other_experts_chosen", (FORM,), _CHOSEN + "those of logits that are rounded to bfloat16 ({is})",
          "the dtype of the router's logits at `topk`, which promises no order of equal values; a router in autocast",
          has(change="rounded", rows=bool)),
    Cause("low_precision", (FORM,), "the weights of the experts are those of logits that are rounded to bfloat16",
          "the dtype of the router: its product, or its logits", has(change="rounded")),
)
