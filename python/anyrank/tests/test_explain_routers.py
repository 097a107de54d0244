# SPDX-License-Identifier: Apache-2.0
"""Routers and experts of a small mixture, with one thing changed."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain.explain import explain
from anyrank.explain.experts import ACTS, Experts, Mixture
from anyrank.explain.facts import Facts, Module
from anyrank.explain.routers import Form, Router, chosen_by, halves, layer_of, router_of, view_of
from anyrank.explain.routers import weights_by
from anyrank.explain.tensors import Array, Runs
from anyrank.tests.explained import case_of, cause, copies, values

BATCH, SEQ, WIDTH, INNER, EXPERTS, K = 4, 12, 24, 10, 8, 2
TOKENS = BATCH * SEQ
X, GATE = values(BATCH, SEQ, WIDTH), values(EXPERTS, WIDTH, seed=1) / 4.0
BIAS = values(EXPERTS, seed=2) / 8.0
FIRST, SECOND = values(EXPERTS, 2 * INNER, WIDTH, seed=3) / 4.0, values(EXPERTS, WIDTH, INNER, seed=4) / 4.0
LAST = values(EXPERTS, WIDTH, seed=5) / 4.0
ROWS: Array = X.reshape(TOKENS, WIDTH).astype(np.float64)
Z: Array = ROWS @ GATE.astype(np.float64).T


def routed(form: Form, z: Array = Z, bias: Array = BIAS) -> Router:
    mask = chosen_by(z, bias, K, form)
    return Router(z, bias, K, form, mask, weights_by(z, bias, mask, form))


def around(**more: Array) -> dict[str, Array]:
    """Names of a dump, in execution order."""
    names = {"m.gate.weight:init": GATE, "m.gate.bias:init": BIAS, "m.experts.down:init": SECOND,
             "m.experts.down_bias:init": LAST, "m.experts.gate_up:init": FIRST, "norm:fwd": X}
    dumped = {name.replace("__", "."): array for name, array in more.items()}
    return {**names, **dumped, "head:fwd": values(BATCH, SEQ, 7)}


def runs(names: dict[str, Array], **facts: typing.Any) -> Runs:
    return Runs(names, batch=BATCH, seq=SEQ, **facts)


SOFT, GROUPED = Form(), Form(False, True, 4, 2, factor=2.5)
SCORES = Form(function="scores")
FORMS = (
    (SOFT, {"function": "scores"}, "routing_weights"), (SCORES, {"function": "shares"}, "routing_weights"),
    (SOFT, {"function": "softmax again"}, "routing_weights"),
    (SOFT, {"softmax": False}, "routing_weights"),
    (GROUPED, {"factor": 1.0}, "routing_weights"), (GROUPED, {"factor": 6.25}, "routing_weights"),
    (GROUPED, {"function": "biased shares"}, "routing_weights"),
    (GROUPED, {"best": True}, "other_experts_chosen"), (GROUPED, {"groups": 1, "kept": 1}, "other_experts_chosen"),
    (GROUPED, {"biased": False}, "other_experts_chosen"),
    (SOFT, {"rounded": 2}, "low_precision"),
    (SOFT, {"factor": 1.7}, "wrong_scalar"), (SOFT, {"function": "softmax again", "factor": 1.3}, "unknown"),
)


def test_weights_of_another_form() -> None:
    for form, change, expected in FORMS:
        base, other = routed(form), dataclasses.replace(form, **change)
        z = halves(halves(ROWS) @ halves(GATE).T) if other.rounded else Z
        is_ = routed(other, z)
        for kind in ("all", "chosen"):
            def shown(router: Router, kind: str = kind) -> Array:
                index = np.argsort(-router.weights, axis=1)[:, :K]
                return typing.cast(Array, np.asarray(router.weights if kind == "all" else np.take_along_axis(
                    router.weights, index, axis=1)).astype(np.float32))
            said = cause("m.gate:fwd", shown(base), shown(is_), runs(around(**{"m__gate:fwd": shown(base)})))
            assert said == expected or kind == "chosen" and expected == "unknown" != said, (form, change, kind, said)


def test_numbers_of_experts() -> None:
    base = routed(GROUPED)
    numbers: Array = np.nonzero(base.mask)[1].reshape(BATCH, SEQ, K).astype(np.float32)
    layer = layer_of(case_of("m.routes:fwd", numbers, numbers, batch=BATCH, seq=SEQ, reference=around()))
    assert layer is not None and layer.experts == EXPERTS
    view = view_of(numbers.reshape(TOKENS, K), EXPERTS)
    assert view is not None and view.kind == "numbers"
    found = router_of(layer, numbers.reshape(TOKENS, K).astype(np.float64), view, 2.0 ** -24)
    assert found is not None and (found.form.groups, found.form.kept, found.form.biased) == (4, 2, True)
    one: Array = routed(dataclasses.replace(GROUPED, best=True)).mask
    other: Array = np.nonzero(one)[1].reshape(BATCH, SEQ, K).astype(np.float32)
    assert cause("m.routes:fwd", numbers, other, runs(around())) == "other_experts_chosen"
    odd = numbers.copy()
    odd[:, ::2] = (odd[:, ::2] + 1) % EXPERTS  # no form chooses these
    assert cause("m.routes:fwd", numbers, odd, runs(around())) != "other_experts_chosen"


def test_no_experts_are_looked_for_where_none_are_recorded() -> None:
    def layers(names: dict[str, Array], **facts: typing.Any) -> bool:
        known = runs(names, facts=(Facts(True, **facts), Facts()))
        return layer_of(dataclasses.replace(case_of("m.proj:fwd", X, X), runs=known)) is not None

    dense = {"m.layers.0.gate_proj.weight:init": FIRST[0], "m.layers.1.gate_proj.weight:init": FIRST[1],
             "m.taps.weight:init": FIRST, "m.head.weight:init": GATE, "m.proj:fwd": X}
    assert not layers(dense) and not layers(dense, config={"num_experts": 1, "experts": None})
    assert layers(dense, config={"num_experts": EXPERTS}) and layers(dense, modules={"m": Module("SparseMoeBlock")})
    assert layers({name.replace("head", "router"): array for name, array in dense.items()})
    assert layers({name.replace("head", "gate"): array for name, array in dense.items()})


def mixture(form: Form, **other: typing.Any) -> Mixture:
    experts = Experts((FIRST,), SECOND, (None, LAST), False, np.arange(2 * INNER), ACTS[0])
    experts = dataclasses.replace(experts, **other)
    return Mixture(experts, ROWS, experts.all(ROWS), routed(form, bias=np.zeros(EXPERTS)).weights, np.zeros(ROWS.shape))


def spoilt() -> typing.Iterator[tuple[str, Array, str]]:
    """What is wrong, the values, and the cause."""
    m = mixture(SOFT)
    w, on, turned = m.weights, m.weights != 0.0, np.arange(2 * INNER).reshape(INNER, 2).T.reshape(-1)
    yield "unweighted", m.sum(on.astype(float)), "routing_weights"
    yield "squared", m.sum(w * w), "routing_weights"
    yield "input", m.sum(on.astype(float), m.experts.all(ROWS, w)), "routing_weights"
    bare = mixture(SOFT, biases=(None, None))
    yield "bias", bare.sum(w) + on @ LAST, "routing_weights"
    yield "one left out", m.sum(np.where(np.arange(EXPERTS) == 3, 0.0, w)), "experts_left_out"
    yield "some dropped", m.sum(np.where((np.arange(TOKENS) > 40)[:, None] & (w > 0.5), 0.0, w)), "experts_left_out"
    yield "turned", mixture(SOFT, columns=turned).sum(w), "packed_cut_as_one"
    yield "exchanged", mixture(SOFT, columns=np.roll(np.arange(2 * INNER), INNER)).sum(w), "activation_arguments"
    yield "dealt", m.sum(w[:, np.arange(EXPERTS).reshape(2, -1).T.reshape(-1)]), "expert_rows_misplaced"
    rows = m.y[on]  # in the order of slots, two of each token
    yield "rows", np.einsum("tk,tkf->tf", w[on].reshape(TOKENS, K), np.roll(rows, 1, axis=0).reshape(TOKENS, K, -1)), (
        "expert_rows_misplaced")
    moved: Array = np.zeros(w.shape)
    moved[on] = np.roll(w[on], 1)
    yield "weights", m.sum(moved), "expert_rows_misplaced"
    yield "scores", m.sum(mixture(SCORES).weights), "routing_weights"
    yield "noise", m.sum(w) + values(TOKENS, WIDTH, seed=9), "unknown"


def test_sums_of_experts() -> None:
    m = mixture(SOFT)
    right: Array = m.sum(m.weights).reshape(X.shape).astype(np.float32)
    names = around()
    del names["m.gate.bias:init"]
    forms: list[dict[str, typing.Any]] = [{}, {"m.gate:fwd": Z.astype(np.float32)}]
    for dumped in forms:  # the router's form by its logits and the sums alone
        for what, other, expected in spoilt():
            said = cause("m:fwd", right, other.reshape(X.shape), runs({**names, **dumped}))
            assert said == expected, (what, said)
    later = {name.replace(":init", ":new"): array for name, array in names.items() if ":init" in name}
    stale = {name: array + 1.0 if ":init" in name else array for name, array in names.items()}
    turned = m.sum(np.roll(m.weights, 4, axis=1)).reshape(X.shape)
    for name, known in (("m:fwd", names), ("m:fwd@2", {**stale, **later, "norm:fwd@2": X})):
        assert cause(name, right + X, turned + X, runs(known)) == "expert_rows_misplaced"


def test_scores_of_all_experts() -> None:
    soft: Array = (np.exp(Z) / np.exp(Z).sum(axis=1, keepdims=True)).astype(np.float32)
    for other, expected in ((1.0 / (1.0 + np.exp(-Z)), "routing_weights"),
                            (1.0 / (1.0 + np.exp(-2.0 * Z)), "unknown")):
        assert cause("m.scores:fwd", soft, other, runs(around(m__scores=soft))) == expected


def gradient(p: Array, c: Array) -> Array:
    result: Array = p * (c - (p * c).sum(axis=1, keepdims=True))
    return result


def test_gradients_of_the_router() -> None:
    p: Array = np.exp(Z) / np.exp(Z).sum(axis=1, keepdims=True)
    g: typing.Any = values(TOKENS, EXPERTS, seed=10).astype(np.float64)
    lse = np.log(np.exp(Z).sum(axis=1, keepdims=True))
    for form, name in ((SOFT, "shares"), (SCORES, "scores")):
        router = routed(form)
        w = router.weights
        inner = (w * g).sum(axis=1, keepdims=True)
        soft, over = w * (g - inner), w * g - p * inner
        right = soft if name == "shares" else over
        whole = gradient(p, router.mask.mean(axis=0, keepdims=True))
        each: Array = np.repeat(router.mask.reshape(BATCH, SEQ, EXPERTS).mean(axis=1), SEQ, axis=0)
        cases = [(right + 0.1 * whole, "balancing_loss"), (right + 0.1 * (gradient(p, each) - whole), "balancing_loss"),
                 (right + 0.01 * p * lse, "balancing_loss"), (0.1 * whole, "router_backward"),
                 (right + 0.1 * gradient(p, values(TOKENS, EXPERTS, seed=11)), "unknown"),
                 (over if name == "shares" else soft, "router_backward")]
        names = around(m__logits=Z, **{"m__weights:fwd": w, "m__weights:bwd": g})
        for other, expected in cases:
            said = cause("m.logits:bwd", right.astype(np.float32), other, runs(names))
            assert said == expected, (name, expected, said)
            at_input = right @ GATE, other @ GATE
            if expected == "balancing_loss":
                assert cause("m.gate:bwd", at_input[0].astype(np.float32), at_input[1], runs(names)) == expected
    router = routed(SOFT)
    w32 = values(TOKENS, EXPERTS, seed=12) * router.mask
    own = np.where(np.arange(EXPERTS) // 4 == router.mask.argmax(axis=1)[:, None] // 4, w32, 0.0)
    names = around(**{"m__weights:fwd": router.weights})
    for other in (0.0 * w32, own):
        assert cause("m.weights:bwd", w32, other, runs(names)) == "router_backward"


def test_update_of_the_bias() -> None:
    form = Form(False, True)
    router = routed(form)

    def after(*masks: Array) -> Array:
        return typing.cast(Array, (BIAS + 0.01 * sum(np.sign(m.sum() - EXPERTS * m.sum(axis=0)) for m in masks)).astype(
            np.float32))

    right, halves_ = after(router.mask), np.split(router.mask, 2)
    names = around(**{"m__weights:fwd": router.weights, "m__gate__bias:new": right})
    for held, facts in ((copies(*(after(half) for half in halves_)), {"mesh": {"dp": 2}}),
                        (after(*halves_), {"micro_batches": 2}), (2.0 * BIAS - right, {}),
                        (after(chosen_by(Z, BIAS, K, Form(False))), {})):
        case = case_of("m.gate.bias:new", right, held, batch=BATCH, seq=SEQ, reference=names, **facts)
        assert explain(case).cause == "router_bias_update"


def test_update_of_a_bias_that_is_a_buffer() -> None:
    router = routed(Form(False, True), bias=np.zeros(EXPERTS))
    right, *halves_ = (np.float32(0.01) * np.sign(m.sum() - EXPERTS * m.sum(axis=0)).astype(np.float32)
                       for m in (router.mask, *np.split(router.mask, 2)))
    names = {**around(**{"m__weights:fwd": router.weights}), "m.gate.bias:buffer": right}
    del names["m.gate.bias:init"]
    for held in ([halves_[0]] * 2, halves_):
        case = case_of("m.gate.bias:buffer", right, copies(*held), {"dp": 2}, batch=BATCH, seq=SEQ, reference=names)
        answer = explain(case)
        assert answer.cause == "router_bias_update" and "each rank's own tokens" in answer.sentence
