# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a router, losses that keep its experts in balance, and the update of a bias that does so."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import said as number
from anyrank.explain.patterns import Pattern
from anyrank.explain.routers import (Form, Layer, Router, chosen_by, known_router, layer_of, rows_of, scores_of,
                                     softmax, view_of)
from anyrank.explain.tensors import Array, Case

BACK, AUXILIARY, UPDATE = "router_gradient", "router_auxiliary", "router_update"
MOST_PARTS, MOST_GUESSED = 64, 4
NEAR_MEAN = 2.0 ** -7  # bfloat16 does not keep counts apart that differ by at most this share
LEFT = 1e-3            # of a difference, that what is fitted may leave to be looked at closely

Place = typing.Callable[[Array], Array]  # of the logits' gradient, in the case's elements


# --- the gradient of weights and logits -------------------------------------------------------------------------------


def _of_weights(case: Case, layer: Layer) -> typing.Iterator[Pattern]:
    """No gradient of weights, or of those of one block of experts alone."""
    yield Pattern(BACK, np.zeros(case.shape), {
        "says": "no gradient reaches the weights of the experts, and through them the router"})
    ref, val = rows_of(case.ref), rows_of(case.val)
    tokens, n = ref.shape
    for parts in (p for p in range(2, n + 1) if n % p == 0 and n == layer.experts):
        held = (val != 0.0).reshape(tokens, parts, -1).any(axis=2)
        if (held.sum(axis=1) <= 1).all() and held.any():
            kept = ref.reshape(tokens, parts, -1) * held[:, :, None]
            yield Pattern(BACK, kept.reshape(case.shape), {"says": f"of {parts} ranks that share out the experts each "
                          "token's weights have the gradient of one alone"})
            return


def _of_logits(case: Case, router: Router, g: Array) -> typing.Iterator[Pattern]:
    """The backward pass of weights of another function. g: their gradient, [tokens, experts]."""
    p = scores_of(router.z, router.form)
    chosen = np.where(router.mask, p, 0.0)
    normalised = router.form.function == "shares"
    by = chosen.sum(axis=1, keepdims=True) if normalised else 1.0
    share, of_all = chosen / by, p if router.form.softmax else np.zeros(p.shape)

    def back(beside: Array) -> Array:
        """beside: the shares that the divisor takes back."""
        result: Array = router.form.factor * (1.0 if router.form.softmax else 1.0 - p) * (
            share * g - beside * (chosen * g).sum(axis=1, keepdims=True) / by)
        return result.reshape(case.shape)

    right, wrong, says = (share, of_all, "this is the gradient of weights whose divisor, the sum over the token's "
                          "experts, is a constant: no gradient goes through it") if normalised else (
        of_all, share, "this is the gradient of the chosen experts' logits alone: a softmax over all experts gives "
        "each logit one")
    if router.form.function in ("shares", "scores"):
        yield Pattern(BACK, case.ref + back(wrong) - back(right), {"says": says}, trials=3)
        yield Pattern(BACK, case.ref - back(right), {
            "says": "what reaches the router through the weights of the experts is missing"}, trials=3)


# --- losses besides ---------------------------------------------------------------------------------------------------


def _by_shares(z: Array, soft: bool, c: Array) -> Array:
    """The gradient of logits by that of the experts' shares of a token, c [tokens or 1, experts]."""
    s = softmax(z) if soft else 1.0 / (1.0 + np.exp(-z))
    p = s / s.sum(axis=1, keepdims=True)
    result: Array = p * (1.0 if soft else 1.0 - s) * (c - (p * c).sum(axis=1, keepdims=True))
    return result


def _parts(case: Case, tokens: int) -> list[int]:
    """Into how many parts of consecutive tokens a batch may be cut: ranks', micro-batches', samples'."""
    sizes = {*case.runs.group_sizes, case.runs.micro_batches, case.runs.batch}
    sizes |= {a * case.runs.micro_batches for a in case.runs.group_sizes}
    return sorted(n for n in sizes if 1 < n <= MOST_PARTS and tokens % n == 0)


def _losses(case: Case, z: Array, masks: typing.Iterable[Array]) -> typing.Iterator[tuple[str, str, list[Array]]]:
    """Losses with their scope, and the gradients of the logits that make them up. masks: which experts tokens may
    have."""
    (tokens, n), top = z.shape, z.max(axis=1, keepdims=True)
    yield "z", "", [softmax(z) * (np.log(np.exp(z - top).sum(axis=1, keepdims=True)) + top)]
    for mask, soft in itertools.product(masks, (True, False)):
        over_all = _by_shares(z, soft, mask.mean(axis=0, keepdims=True))
        yield "balance", "counts of all tokens", [over_all]
        for parts in _parts(case, tokens):
            counts = np.repeat(mask.reshape(parts, -1, n).mean(axis=1), tokens // parts, axis=0)
            own, scope = _by_shares(z, soft, counts), f"counts of each of {parts} parts of the tokens"
            yield "balance", scope, [own]
            yield "balance", f"{scope}, in place of those of all", [over_all, own]


def _auxiliary(case: Case, z: Array, masks: typing.Iterable[Array], placed: Place) -> typing.Iterator[Pattern]:
    """More, less or nothing but a loss of the router's own."""
    apart, val = (case.val - case.ref).reshape(-1), case.val.reshape(-1)
    for loss, scope, terms in _losses(case, z, masks):
        columns = np.stack([placed(term).reshape(-1) for term in terms], axis=1)
        for alone, target in ((False, apart), (True, val)) if columns.any() else ():
            found, _, rank, _ = np.linalg.lstsq(columns, target, rcond=None)
            made = columns @ found
            if rank == len(terms) and np.linalg.norm(made - target) <= LEFT * np.linalg.norm(target) and not (
                    alone and len(terms) > 1):
                expected = made if alone else case.ref.reshape(-1) + made
                yield Pattern(AUXILIARY, expected.reshape(case.shape), {
                    "loss": loss, "scope": scope, "alone": alone, "more": "less" if found[-1] < 0.0 else "more",
                    "weight": float(found[-1])}, len(terms))


# --- the update of a bias ---------------------------------------------------------------------------------------------


def _updates(case: Case, layer: Layer, router: Router) -> typing.Iterator[Pattern]:
    """A bias that moves by counts of the experts' tokens: of which ones, how often, and how exactly."""
    move = next(((a, b) for a, b in layer.moves if np.allclose(b, case.ref, 1e-6, 0.0)), None)
    tokens, n = router.mask.shape
    if move is None or case.shape != (n,):
        return
    before, by = move[0], float(np.abs(case.ref - move[0]).max())

    def after(*masks: Array) -> Array:
        result: Array = before + by * sum(np.sign(mask.sum() - n * mask.sum(axis=0)) for mask in masks)
        return result

    if by == 0.0 or not np.allclose(after(router.mask), case.ref, 1e-5, 1e-3 * by):
        return
    for parts in _parts(case, tokens):
        pieces = np.split(router.mask, parts)
        yield Pattern(UPDATE, after(*pieces), {"by": by, "how": f"after each of {parts} parts of the batch: updated "
                                               "after each micro-batch"}, trials=parts)
        own = [min((after(piece) for piece in pieces), key=lambda x, copy=copy: float(sum(  # type: ignore[misc]
            np.abs(x[box] - values).sum() for box, values in zip(copy.boxes, copy.values)))) for copy in case.copies]
        yield Pattern(UPDATE, [[x[box] for box in copy.boxes] for x, copy in zip(own, case.copies)], {
            "by": by, "how": f"by the counts of one of {parts} parts of the batch: each rank's own tokens, not summed "
            "over ranks"})
    plain = chosen_by(router.z, router.bias, router.k, Form(router.form.softmax))
    yield Pattern(UPDATE, after(plain), {"by": by, "how": "by counts of the largest scores without the bias, not by "
                                         "those of the routes"})
    yield Pattern(UPDATE, 2.0 * before - case.ref, {"by": by, "how": "towards the experts that have more tokens"})
    count, mean = router.mask.sum(axis=0), router.mask.sum() / n
    near = case.off & (np.abs(count - mean) <= NEAR_MEAN * mean)
    moves = np.round((case.val - before) / by)
    if near.any() and (np.abs(moves) <= 1).all():
        gap = float(np.abs(count - mean)[near].max())
        yield Pattern(UPDATE, np.where(near, before + by * moves, case.ref), {
            "by": by, "how": f"with another sign where counts are at most {gap:.4g} from the mean, {mean:.4g}: counts "
            "or their sum are rounded"}, 0, 8)


# --- generator --------------------------------------------------------------------------------------------------------


def _place(case: Case, layer: Layer) -> Place | None:
    """How the logits' gradient shows in a tensor of the router; None: it is none of its."""
    stem, module = case.name.stem, layer.router.rpartition(".")[0]
    inside = stem.startswith(layer.prefix) and (module + ".").startswith(stem + ".")
    if case.name.kind == "bwd" and math.prod(case.shape[:-1]) == layer.tokens:
        if case.shape[-1] == layer.experts:
            return lambda dz: dz
        return (lambda dz: dz @ layer.gate) if inside and case.shape[-1] == layer.gate.shape[1] else None
    x = layer.inputs[0] if layer.inputs else None
    if case.name.kind == "grad" and stem == layer.router and x is not None:
        if case.shape == layer.gate.shape:
            return lambda dz: dz.T @ x
        return (lambda dz: x.T @ dz) if case.shape == layer.gate.shape[::-1] else None
    return None


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind not in ("bwd", "grad", "new", "buffer") or not case.shape or case.reference.size < 3:
        return
    layer = layer_of(case)
    if layer is None:
        return
    router = known_router(layer, case.unit)
    if case.name.kind in ("new", "buffer"):
        yield from _updates(case, layer, router) if router else ()
        return
    views = [view_of(array, layer.experts) for name, array in layer.dumped if name == case.name.with_kind("fwd")
             and case.name.kind == "bwd" and array.size == case.reference.size]
    if views and views[0] is not None and views[0].kind != "numbers":
        yield from _of_weights(case, layer)
        return
    placed = _place(case, layer)
    if placed is None or not (layer.logits or router):
        return
    z = router.z if router else layer.logits[0][0]
    masks = [chosen_by(z, np.zeros(z.shape[1]), k, Form()) for k in range(1, min(z.shape[1], MOST_GUESSED + 1))]
    yield from _auxiliary(case, z, [router.mask] if router else masks, placed)
    if router is None:
        return
    factor = router.form.factor
    for times in (factor, 1.0 / factor) if abs(factor - 1.0) > 1e-3 else ():
        yield Pattern(BACK, times * case.ref, {"times": number(times), "factor": factor}, trials=2)
    g = next((case.runs.reference[back] for name, array in layer.dumped if (view := view_of(array, layer.experts))
              and view.kind == "all" and (back := name.replace(":fwd", ":bwd")) in case.runs.reference), None)
    if g is not None and case.shape[-1] == layer.experts and case.name.kind == "bwd":
        yield from _of_logits(case, router, rows_of(g))


# --- causes -----------------------------------------------------------------------------------------------------------

_DETACHED = ("`detach` or `no_grad` of the weights, of their sum or of the probabilities before they are masked or "
             "gathered; a collective without a backward")
CAUSES = (
    Cause("routing_weights", (BACK,), "this is {times} times the router's gradient, by the factor {factor} of its "
          "weights: left out on the way back, or there twice", "`routed_scaling_factor` in a backward pass of one's "
          "own", has(factor=bool)),
    Cause("router_backward", (BACK,), "{says}", _DETACHED),
    Cause("router_backward", (AUXILIARY,), "this is the gradient of the router's auxiliary loss alone: none reaches it "
          "through the weights of the experts", _DETACHED, has(alone=True)),
    Cause("balancing_loss", (AUXILIARY,), "the difference is the gradient of the router's z-loss: {weight} times "
          "lse*p, on this side more than on the other", "the coefficient of the z-loss, and the tokens that it is a "
          "mean over", has(loss="z")),
    Cause("balancing_loss", (AUXILIARY,), "the difference is the gradient of the router's balancing loss ({scope}), "
          "of which there is {more}", "the coefficient of the auxiliary loss, the 1/k, what it is divided by, and "
          "which tokens it counts: a micro-batch's, a rank's, the whole batch's, padding", has(loss="balance")),
    Cause("router_bias_update", (UPDATE,), "the bias of the choice moves by {by} a step, as it must, but {how}",
          "where the update is called: once, in the optimizer's step; the counts of each expert's tokens, of which "
          "routes, their dtype (integers) and their all-reduce over dp, cp and ep; the sign"),
)
