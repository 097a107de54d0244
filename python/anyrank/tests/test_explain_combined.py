# SPDX-License-Identifier: Apache-2.0
"""Other tensors and vectors in the reference, in its place, or in sums with it."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.tensors import Array, Runs
from anyrank.tests.explained import cause, values

BATCH, SEQ, WIDTH = 4, 8, 16
EMBEDDED, BRANCH, INNER = (values(BATCH, SEQ, WIDTH, seed=i) for i in range(3))
BIAS, GAIN = values(WIDTH, seed=3), 1.0 + 0.1 * values(WIDTH, seed=4)
WEIGHT, HEAD = values(WIDTH, WIDTH, seed=5), values(12, WIDTH, seed=6)
GATE = values(BATCH, SEQ, 1, seed=7)


def normed(x: Array) -> Array:
    return typing.cast(Array, x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * GAIN)


def _runs(**more: Array) -> Runs:
    names = {"l.0.bias:init": BIAS, "n.weight:init": GAIN, "head.weight:init": HEAD, "embed:fwd": EMBEDDED,
             "l.0.b:fwd": BRANCH, "l.1.inner:fwd": INNER, "gate:fwd": GATE}
    return Runs({**names, **{name.replace("__", ":").replace("_at_", "@"): x for name, x in more.items()}},
                batch=BATCH, seq=SEQ)


SUM = EMBEDDED + BRANCH
ADDENDS = (
    ("l.0:fwd", BRANCH, BRANCH + BIAS, "bias_counted_again"),
    ("l.0:fwd", BRANCH, BRANCH - 0.5 * BIAS, "bias_counted_again"),
    ("l.1:fwd", SUM, SUM + 0.25, "constant_added"), ("l.1:fwd", SUM, SUM + EMBEDDED, "residual"),
    ("l.1:bwd", SUM, SUM + values(WIDTH, seed=9), "constant_added"),
    ("l.1:fwd", SUM, BRANCH, "residual"), ("l.1:fwd", SUM, EMBEDDED + 0.5 * BRANCH, "residual_scale"),
    ("l.1:fwd", SUM, 4.0 * EMBEDDED + BRANCH, "residual_scale"), ("l.1:fwd", SUM, SUM + 0.7 * INNER, "residual"),
    ("n:fwd", normed(SUM), normed(BRANCH), "residual"),
    ("n:fwd", normed(SUM), normed(EMBEDDED + 0.5 * BRANCH), "residual_scale"),
    ("n:fwd", normed(SUM), SUM, "norm_missing"),  # its norm is the reference
    ("n:fwd", normed(EMBEDDED), EMBEDDED, "norm_missing"),
    ("head:fwd", SUM @ HEAD.T, BRANCH @ HEAD.T, "residual"),
    ("head:fwd", SUM @ HEAD.T, (EMBEDDED + 3.0 * BRANCH) @ HEAD.T, "residual_scale"),
    ("l.2:fwd", values(BATCH, SEQ, WIDTH, seed=10), EMBEDDED, "other_tensor"),
    ("l.1:fwd", SUM, SUM + np.roll(EMBEDDED, 1, 0), "unknown"),
    ("l.2:fwd", EMBEDDED + BRANCH / (1.0 + np.exp(-GATE)), SUM, "tensor_added"),
)


def test_activations() -> None:
    for name, reference, other, expected in ADDENDS:
        assert cause(name, reference, other, _runs(**{name.replace(":", "__"): reference})) == expected


def test_other_layers_and_steps() -> None:
    first, second, third = (values(WIDTH, WIDTH, seed=20 + i) for i in range(3))
    runs = Runs({"l.0.w:init": first, "l.1.w:init": second, "k.w:init": third, "l.0.w:grad": first, "l.1.w:grad": third,
                 "x:bwd": third, "l.0.w:grad@2": second, "x:bwd@2": first, "l.experts.0.w:init": HEAD,
                 "l.experts.1.w:init": -WEIGHT[:12]})
    cases = (("l.experts.1.w:init", -WEIGHT[:12], HEAD, "shards_seeded_alike"),
             ("l.0.w:init", first, second, "other_tensor"), ("l.0.w:init", first, third, "other_tensor"),
             ("l.0.w:grad@2", second, first, "stale_value"), ("x:bwd@2", first, third, "stale_value"),
             ("l.0.w:grad@2", second, second + 0.223 * first, "gradient_not_zeroed"))
    for name, reference, other, expected in cases:
        assert cause(name, reference, other, runs) == expected, name


def test_a_tied_weight_has_two_uses() -> None:
    one, two = values(WIDTH, 8, seed=30), values(WIDTH, 8, seed=31)
    runs = Runs({"embed.weight:grad": one + two}, {"embed.weight:grad": one, "head.weight:grad": two})
    assert cause("embed.weight:grad", one + two, one, runs) == "tied_weight"


def test_a_later_value() -> None:
    runs = _runs(late__fwd=INNER[::-1].copy())
    reference = runs.reference["l.0.b:fwd"]
    assert cause("l.0.b:fwd", reference, INNER[::-1], runs) == "other_tensor"
