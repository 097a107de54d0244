# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures of experts: scores of logits, the experts chosen by them, their weights, the gradients of these,
losses of balance, and the bias of the choice.

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
    experts: int
    weights: dict[str, list[str]]
    gate: Array
    router: str  # the stem of the router's weight
    tokens: int
    dumped: list[tuple[str, Array]]  # activations of the layer, [tokens, columns]
    logits: list[tuple[Array, Array]]  # that it may have, each with a bias of the choice
    inputs: list[Array]
    moves: list[tuple[Array, Array]]  # a bias before the step and after it


def _of_experts(case: Case, prefix: str) -> tuple[int, dict[str, list[str]], list[str]] | None:
    """How many experts there are below a prefix, names of their parameters, and names of others."""
    numbered: dict[str, dict[int, str]] = {}
    stacked: dict[str, list[str]] = {}
    others = []
    for name in case.runs.reference:
        own = Name.of(name)
        if not own.stem.startswith(prefix) or own.kind not in ("init", "weight", "buffer"):
            continue
        match = re.fullmatch(r"((?:.*?\.)?)(\d+)\.(.+)", own.stem[len(prefix):])
        if match and own.kind != "buffer":
            numbered.setdefault(f"{match[1]}*.{match[3]}", {})[int(match[2])] = name
        elif len(shape_of(case.runs.reference, name)) == 3:
            stacked[own.stem[len(prefix):]] = [name]
        else:
            others.append(name)
    known = case.runs.reference
    stems = tuple(leaf.removesuffix("weight") for leaf in stacked)
    for name in [name for name in others if len(shape_of(known, name)) == 2]:
        leaf = Name.of(name).stem[len(prefix):]
        if leaf.startswith(stems):  # biases of stacked experts
            stacked[leaf] = [name]
            others.remove(name)
    sizes = {len(names) for names in numbered.values()} | {shape_of(known, names[0])[0] for names in stacked.values()}
    for n in sorted(n for n in sizes if 2 <= n <= MOST_EXPERTS):
        if any(n in shape_of(known, name) and len(shape_of(known, name)) == 2 for name in others):
            of = {leaf: [names[i] for i in range(n)] for leaf, names in numbered.items()
                  if sorted(names) == [*range(n)]}
            return n, of | {leaf: names for leaf, names in stacked.items() if shape_of(known, names[0])[0] == n}, others
    return None


def layer_of(case: Case) -> Layer | None:
    """The nearest layer with experts and a router that a tensor belongs to."""
    known, parts = case.runs.reference, case.name.stem.split(".")
    for depth in range(len(parts), max(len(parts) - 4, -1), -1):
        prefix = ".".join(parts[:depth]) + "." * (depth > 0)
        found = _of_experts(case, prefix)
        if not found:
            continue
        n, of, others = found
        two = [name for name in others if len(shape := shape_of(known, name)) == 2 and n in shape]
        router = min(two, key=lambda name: shape_of(known, name)[0] != n)
        gate: Array = known[in_step(case, router)].astype(np.float64)
        gate = gate if gate.shape[0] == n else gate.T
        return _read(case, prefix, of, gate, Name.of(router).stem, others)
    return None


def _read(case: Case, prefix: str, weights: dict[str, list[str]], gate: Array, router: str, others: list[str]
          ) -> Layer | None:
    """What the step's dump has of the layer."""
    runs, n = case.runs, len(gate)
    tokens = math.prod(case.shape[:-1]) if case.name.kind in ACTIVATIONS else _tokens(case, prefix, n)
    if case.every and any(s.step not in (None, 1) for s in case.every) or not tokens:
        return None
    names = [name for name in runs.reference if (own := Name.of(name)).kind == "fwd" and own.step == case.name.step
             and len(shape := shape_of(runs.reference, name)) >= 2 and math.prod(shape[:-1]) == tokens]
    inside = [name for name in names if Name.of(name).stem.startswith(prefix) or Name.of(name).stem == prefix[:-1]]
    dumped = [(name, rows_of(runs.reference[name])) for name in inside
              if runs.reference[name].dtype.kind in "fiu"]
    parts = (router.rpartition(".")[0], *(leaf_of(prefix, own) for own in weights.values()))
    first = next((i for i, name in enumerate(names) if Name.of(name).stem.startswith(tuple(filter(None, parts)))),
                 names.index(inside[0]) if inside else len(names))
    read = [name for name in names if shape_of(runs.reference, name)[-1] == gate.shape[1] and name != str(case.name)]
    wide = [name for name in names[:first][::-1] if name in read]
    beside = sorted((name for name in read if name not in inside and name not in wide),
                    key=lambda name: "norm" not in name)
    inputs = [rows_of(runs.reference[name]) for name in (*wide[:2], *beside[:2])]
    moves = _moves(case, others, n)
    vectors = [before for before, _ in moves if before.any()]
    made = [x @ gate.T for x in inputs] if tokens * gate.size <= MOST_WORK else []
    dense = [z for _, z in dumped if z.shape[1] == n and (z < 0.0).any() and (z != 0.0).all()]
    zs = [*dense, *made, *(z + v for z in made for v in vectors)]
    return Layer(prefix, n, weights, gate, router, tokens, dumped,
                 [(z, bias) for z in zs for bias in (np.zeros(n), *vectors)], inputs, moves)


def in_step(case: Case, name: str) -> str:
    """The name of a parameter as it is in the case's step."""
    after = Name.of(name).with_kind("new", case.name.step - 1)
    return after if case.name.step > 1 and after in case.runs.reference else name


def _tokens(case: Case, prefix: str, n: int) -> int:
    """Of a step: those that the layer has scores of."""
    known = case.runs.reference
    rows = (math.prod(shape_of(known, name)[:-1]) for name in known if Name.of(name).kind == "fwd"
            and Name.of(name).stem.startswith(prefix) and shape_of(known, name)[-1:] == (n,))
    return next(rows, case.runs.batch * max(case.runs.seq, 1))


def leaf_of(prefix: str, names: list[str]) -> str:
    """The module that holds parameters of the experts."""
    stem = Name.of(names[0]).stem
    cut = stem.find(".0.", len(prefix)) if len(names) > 1 else stem.rfind(".")
    return stem[:max(cut, 0)]


def _moves(case: Case, others: list[str], n: int) -> list[tuple[Array, Array]]:
    """Of each vector with one number for each expert, what it is before the step and after it."""
    found: dict[str, tuple[Array, Array]] = {}
    known, step = case.runs.reference, case.name.step
    for name in others:
        own = Name.of(name)
        if shape_of(known, name) == (n,) and (own.kind != "buffer" or own.stem not in found):
            before = known[in_step(case, name)]
            after = known.get(own.with_kind("new", step), before)
            found[own.stem] = before.astype(np.float64), after.astype(np.float64)
    return list(found.values())


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


FUNCTIONS = {"shares": "shares of the sum over the experts chosen", "scores": "the scores, not normalised",
             "shares of all": "shares of the sum over all experts", "biased shares": "shares of biased scores",
             "biased scores": "biased scores", "softmax again": "a second softmax, over the experts chosen",
             "softmax of all": "a second softmax, over all experts", "equal": "one equal share for each",
             "logits": "the logits"}


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
    order = n - 1 - order if form.last else order
    mask: Array = np.zeros(c.shape, bool)
    np.put_along_axis(mask, order[:, :k], True, axis=1)
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


def choices(n: int, k: int, biased: bool) -> typing.Iterator[Form]:
    """Ways to choose that a reference may have, the simplest first."""
    for soft in (True, False):
        yield Form(soft)
    for soft in (False, True) if biased else ():
        yield Form(soft, True)
    for (groups, kept), soft, best in itertools.product(groups_of(n, k), (False, True), (False, True)):
        yield from (Form(soft, bias, groups, kept, best) for bias in ((True, False) if biased else (False,)))


def groups_of(n: int, k: int) -> list[tuple[int, int]]:
    """Into how many groups experts are cut, and how many of these stay."""
    return [(groups, kept) for groups in range(2, min(n // 2, MOST_GROUPS) + 1) if n % groups == 0
            for kept in range(1, groups) if kept * (n // groups) >= k and (groups <= 8 or kept & (kept - 1) == 0)]


def changed(form: Form, n: int, k: int, biased: bool) -> typing.Iterator[tuple[Form, int]]:
    """A form with one thing changed, and among how many."""
    replace = dataclasses.replace
    yield from ((replace(form, function=name), len(FUNCTIONS)) for name in FUNCTIONS if name != form.function and (
        biased or not name.startswith("biased")) and not (form.softmax and name == "shares of all"))
    yield from ((replace(form, softmax=not form.softmax, function=name), 2)
                for name in (form.function, "scores", "shares"))
    yield from ((other, 8) for other in (replace(form, last=True), replace(form, groups=1, kept=1)) if other != form)
    yield from ((replace(form, rounded=how, last=last), 8) for how in (1, 2) for last in (False, True))
    if biased:
        yield from ((replace(form, biased=not form.biased), 8), (replace(form, shifted=True, biased=True), 8))
    if form.groups > 1:
        yield from ((replace(form, **{what: not getattr(form, what)}), 8) for what in ("best", "dealt", "zeros"))
    for groups, kept in groups_of(n, k):
        if (groups, kept) != (form.groups, form.kept):
            yield replace(form, groups=groups, kept=kept, best=form.best and form.groups > 1), 64


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
        values = np.sort(values, axis=1)
        result: Array = np.empty(values.shape)
        np.put_along_axis(result, np.argsort(like, axis=1, kind="stable"), values, axis=1)
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
    weights: Array | None  # None: the reference has numbers of experts alone
    product: Array | None = None  # of rounded factors

    def with_form(self, form: Form) -> tuple[Array, Array]:
        """Choice and weights of another form."""
        z = self.product if form.rounded == 2 and self.product is not None else self.z
        z = halves(z) if form.rounded else z
        mask = chosen_by(z, self.bias, self.k, form)
        return mask, weights_by(z, self.bias, mask, form)


def router_of(layer: Layer, array: Array, view: View, unit: float) -> Router | None:
    """The router's form by what the reference has of it, [tokens, columns]."""
    for z, bias in layer.logits:
        n, biased = z.shape[1], bool(np.ptp(bias))
        first = slice(0, 8)
        for form in (dataclasses.replace(form, function=name) for form in choices(n, view.k, biased)
                     for name in (("shares",) if view.kind == "numbers" else ("shares", "scores"))):
            for part in (first, slice(None)):
                mask = chosen_by(z[part], bias, view.k, form)
                weights, shown = weights_by(z[part], bias, mask, form), array[part]
                expected = view.shown(weights, mask, shown)
                square = float((expected ** 2).sum())
                factor = 1.0 if view.kind == "numbers" or not square else float((expected * shown).sum()) / square
                if not factor > 0.0 or not close(factor * expected, shown, unit):
                    break
            else:
                ratio = ratio_of(factor, 64, 1e-4)
                form = dataclasses.replace(form, factor=ratio[0] / ratio[1] if ratio else factor)
                return Router(z, bias, view.k, form, mask, None if view.kind == "numbers" else form.factor * weights,
                              next((halves(x) @ halves(layer.gate).T for x in layer.inputs
                                    if close(x @ layer.gate.T, z, unit)), None))
    return None


def known_router(layer: Layer, unit: float) -> Router | None:
    """The router of a layer by any of its dumped tensors: weights first."""
    views = [(array, view) for _, array in layer.dumped if (view := view_of(array, layer.experts))]
    for array, view in sorted(views, key=lambda pair: ("all", "chosen", "numbers").index(pair[1].kind)):
        router = router_of(layer, array, view, unit)
        if router:
            return router
    return None


def meaning(base: Form, is_: Form) -> str:
    """What is changed between two forms."""
    if base.function != is_.function and dataclasses.replace(base, function=is_.function) == is_:
        return {"scores": "not normalised", "shares": "normalised", "biased shares": "biased",
                "biased scores": "biased"}.get(is_.function, "function")
    if is_.rounded:
        return "rounded"
    if base.factor != is_.factor:
        return "factor"
    return "function" if base.softmax != is_.softmax and base.biased == is_.biased and not base.biased else "choice"


def choice_text(form: Form) -> str:
    of = f"{form.kept} of {form.groups} groups{' of experts dealt round' if form.dealt else ''}, ranked by " + (
        "their best score" if form.best else "the sum of their two best") if form.groups > 1 else "all experts"
    return "".join((of, " (the other scores become 0)" if form.zeros else "",
                    f" by a {'softmax' if form.softmax else 'sigmoid'}",
                    " of logits with the bias" if form.shifted else " with the bias" if form.biased else "",
                    ", of rounded logits" if form.rounded else "", ", of equal ones the last" if form.last else ""))


def forms_changed(router: Router) -> typing.Iterator[tuple[Form, Array, Array, int, int]]:
    """Forms with one thing changed: with choice and weights, how many numbers are fitted, and among how many."""
    form, factor = router.form, router.form.factor
    for x in {1.0, factor * factor, 1.0 / factor} - {factor}:
        yield dataclasses.replace(form, factor=x), *router.with_form(dataclasses.replace(form, factor=x)), 0, 1
    for other, trials in changed(form, router.z.shape[1], router.k, bool(np.ptp(router.bias))):
        mask, weights = router.with_form(other)
        if np.isfinite(weights).all() and not (np.array_equal(mask, router.mask) and router.weights is not None
                                               and close(weights, router.weights, 2.0 ** -24)):
            yield other, mask, weights, 0, trials


def said(router: Router, form: Form, mask: Array) -> dict[str, typing.Any]:
    moved = int((mask != router.mask).any(axis=1).sum())
    return {"change": meaning(router.form, form), "is": choice_text(form), "was": choice_text(router.form),
            "rows": moved, "k": router.k, "factor": form.factor, "factor_was": router.form.factor,
            "function": FUNCTIONS[form.function], "function_was": FUNCTIONS[router.form.function],
            "scores": "softmax" if form.softmax else "sigmoid",
            "scores_was": "softmax" if router.form.softmax else "sigmoid"}


def _of_values(case: Case, layer: Layer) -> typing.Iterator[Pattern]:
    """Weights or numbers of experts in another form."""
    ref, val = rows_of(case.ref), rows_of(case.val)
    view = view_of(ref, layer.experts) or (View("all", layer.experts) if ref.shape[1] == layer.experts and (
        ref > 0.0).all() else None)  # the scores of all
    router = router_of(layer, ref, view, case.unit) if view else None
    if router is None or view is None:
        return
    for form, mask, weights, fitted, trials in forms_changed(router):
        if view.kind == "numbers" and (mask != router.mask).any(axis=1).sum() < LEAST and not (
                form.last or form.rounded or form.groups > 1):
            continue
        expected = view.shown(weights, mask, val)
        factor = float((expected * val).sum() / max(float((expected ** 2).sum()), 1e-300))
        yield Pattern(FORM, expected.reshape(case.shape), said(router, form, mask), fitted, trials)
        if view.kind != "numbers" and form.factor == router.form.factor != 1.0 and (
                abs(factor * form.factor - 1.0) < 1e-4):
            yield Pattern(FORM, (factor * expected).reshape(case.shape), said(router, form, mask), 1, trials)
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
                  {"change": "bias moves", "by": by, "first": len(router.z) // pieces,
                   "rows": int((mask != router.mask).any(axis=1).sum())})


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or len(case.shape) < 2 or case.reference.size < 8:
        return
    layer = layer_of(case)
    if layer is not None and case.shape[-1] <= layer.experts:
        yield from _of_values(case, layer)


# --- causes -----------------------------------------------------------------------------------------------------------

_AGAIN = "the router computed again from its logits: "
_CHOSEN = "{rows} tokens have other experts, and of the same logits: "
CHANGES = (
    Cause("routing_weights_scaled", (FORM,), _AGAIN + "the weights of a token's experts are multiplied by {factor}, "
          "where the reference has a factor of {factor_was}", "`routed_scaling_factor` "
          "(`moe_router_topk_scaling_factor`): left out, or applied twice", has(change="factor")),
    Cause("routing_normalisation", (FORM,), _AGAIN + "the weights are not normalised: each is its expert's score, and "
          "not divided by the sum of the token's", "`norm_topk_prob`; a softmax over all experts where one over those "
          "chosen belongs", has(change="not normalised")),
    Cause("routing_normalisation", (FORM,), _AGAIN + "the weights are normalised: each score is divided by the sum of "
          "the token's, which the reference does not do", "`norm_topk_prob`; a softmax over those chosen",
          has(change="normalised")),
    Cause("router_bias_in_weights", (FORM,), _AGAIN + "the weights are of the scores with the bias of the choice "
          "added, which is for the choice alone", "which scores `gather` takes the weights from",
          has(change="biased")),
    Cause("routing_weights_function", (FORM,), _AGAIN + "the weights are {function} of a {scores}, where the "
          "reference has {function_was} of a {scores_was}", "`scoring_func`, the order of softmax and `topk`, a "
          "softmax that is applied again, the sum that weights are divided by", has(change="function")),
)
CAUSES = (
    *CHANGES,
    Cause("router_bias_update", (FORM,), _CHOSEN + "those of a bias that has moved by {by} after the first {first} "
          "tokens: it is updated within the step, after each micro-batch", "where the update is called: once, in the "
          "optimizer's step", has(change="bias moves")),
    Cause("other_experts_chosen", (FORM,), _CHOSEN + "the {k} largest of {is}, where the reference takes them of "
          "{was}", "`n_group` and `topk_group`, how groups are ranked and masked, the bias of the choice, equal "
          "logits", has(change="choice")),
    Cause("other_experts_chosen", (FORM,), "the router's logits are rounded to bfloat16 before the choice ({is}): "
          "{rows} tokens have other experts", "the dtype of the router's logits at `topk`, which promises no order of "
          "equal values; a router in autocast",
          lambda case, pattern: has(change="rounded")(case, pattern) and pattern.numbers["rows"] > 0),
    Cause("low_precision", (FORM,), "the weights of the experts are those of logits that are rounded to bfloat16",
          "the dtype of the router: its product, or its logits", has(change="rounded")),
)
