# SPDX-License-Identifier: Apache-2.0
"""Elementwise maps of the reference: formats, steps, limits, functions."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain.mapped import FUNCTIONS, rounded
from anyrank.explain.tensors import Array, Runs
from anyrank.tests.explained import cause, values

X = values(32, 64)


def _steps(x: Array, bits: int) -> Array:
    step = np.abs(x).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return typing.cast(Array, np.rint(x / step) * step)


MAPS: tuple[tuple[str, typing.Callable[[Array], Array], str], ...] = (
    ("w:init", lambda x: rounded(x, "bf16"), "fewer_bits"),
    ("w:fwd", lambda x: rounded(x, "bf16", cut=True), "fewer_bits"),
    ("w:fwd", lambda x: rounded(x, "fp16"), "fewer_bits"), ("w:fwd", lambda x: rounded(x, "tf32"), "fewer_bits"),
    ("w:fwd", lambda x: rounded(x, "fp8 e4m3"), "fewer_bits"),
    ("w:grad", lambda x: rounded(x * (1.0 + 2e-3 * values(32, 64, seed=1)), "bf16"), "fewer_bits"),
    ("w:init", lambda x: _steps(x, 8), "quantised"), ("w:init", lambda x: _steps(x, 4), "quantised"),
    ("w:init", lambda x: _steps(x.reshape(-1, 16), 8).reshape(x.shape), "quantised"),
    ("w:grad", lambda x: np.clip(x, -1.5, 1.5), "clipped"), ("w:fwd", lambda x: np.minimum(x, 0.5), "clipped"),
    ("w:fwd", np.abs, "activation_function"), ("w:fwd", lambda x: x + 1e-7 * values(32, 64, seed=1), "rounding"),
    ("w:fwd", lambda x: x + 2e-3 * values(32, 64, seed=1), "unknown"),
)


def test_maps() -> None:
    for name, spoil, expected in MAPS:
        assert cause(name, X, spoil(X.astype(np.float64)), Runs()) == expected


def test_exact_numerics_have_no_rounding() -> None:
    assert cause("w:fwd", X, X * np.float32(1.0 + 2.0 ** -23), Runs(exact=True)) == "small_change"


GATE, UP, DOWN = values(4, 8, 32, seed=2), values(4, 8, 32, seed=3), values(16, 32, seed=4)
silu, gelu, tanh = (FUNCTIONS[name] for name in ("silu", "gelu", "gelu's tanh form"))
ACTIVATIONS: tuple[tuple[typing.Callable[[Array, Array], Array], typing.Callable[[Array, Array], Array], str], ...] = (
    (lambda g, u: silu(g), lambda g, u: gelu(g), "activation_function"),
    (lambda g, u: gelu(g), lambda g, u: tanh(g), "activation_function"),
    (lambda g, u: silu(g) * u, lambda g, u: g * u, "activation_function"),
    (lambda g, u: silu(g) * u, lambda g, u: g * silu(u), "activation_function"),
    (lambda g, u: (silu(g) * u) @ DOWN.T, lambda g, u: (gelu(g) * u) @ DOWN.T,
     "activation_function"),
    (lambda g, u: (silu(g) * u) @ DOWN.T, lambda g, u: (g * silu(u)) @ DOWN.T, "activation_function"),
    (lambda g, u: (silu(g) * u) @ DOWN.T, lambda g, u: (silu(g) + u) @ DOWN.T, "unknown"),
)


def test_activations() -> None:
    for right, wrong, expected in ACTIVATIONS:
        gate: typing.Any = GATE.astype(np.float64)
        up: typing.Any = UP.astype(np.float64)
        reference: typing.Any = right(gate, up).astype(np.float32)
        runs = Runs({"down.weight:init": DOWN, "gate:fwd": GATE, "up:fwd": UP, "down:fwd": reference}, batch=4, seq=8)
        assert cause("down:fwd", reference, wrong(gate, up), runs) == expected


def test_the_norm_of_clipped_gradients() -> None:
    grads = {"a:grad": values(64, 8), "b:grad": 3.0 * values(32, seed=1)}
    norm = [float(np.sqrt(sum(np.square(np.clip(g, -most, most)).sum() for g in grads.values())))
            for most in (99.0, 0.5)]
    runs = dataclasses.replace(Runs(), reference=grads)
    assert cause("grad_norm:clip", np.float32(norm[0]).reshape(()), np.asarray(norm[1]), runs) == "clipped"
    assert cause("grad_norm:clip", np.float32(norm[0]).reshape(()), np.asarray(0.9137 * norm[0]), runs) == "unknown"


def test_a_smooth_limit() -> None:
    x = 5.0 * values(4, 8, 16)
    runs = Runs({"x:fwd": x, "y:fwd": 6.0 * np.tanh(x / 6.0)}, same=("x:fwd",), batch=4, seq=8)
    assert cause("y:fwd", runs.reference["y:fwd"], 30.0 * np.tanh(x / 30.0), runs) == "softcap"
