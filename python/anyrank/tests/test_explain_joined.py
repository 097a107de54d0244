# SPDX-License-Identifier: Apache-2.0
"""What a module reads, joined in another order."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.explain import UNKNOWN, explain
from anyrank.tests.explained import case_of, shards, values

Array = typing.Any
A, B, C, D = (values(6, 5, n, seed=i) for i, n in enumerate((8, 4, 8, 8)))
W, BIAS = values(12, 20, seed=8), values(12, seed=9)
KERNEL = values(3, 8, 3, 3, seed=10)
SMALL, LARGE = values(2, 4, 3, 3, seed=11), values(2, 4, 6, 6, seed=12)


def linear(*parts: Array) -> Array:
    return (np.concatenate(parts, axis=-1).astype(np.float64) @ W.T + BIAS).astype(np.float32)


def test_linear() -> None:
    around = {"a:fwd": A, "b:fwd": B, "c:fwd": C, "d:fwd": D, "m.weight:init": W, "m.bias:init": BIAS}
    around["m:fwd"] = linear(A, B, C)
    for cause, other in (("slices_reordered", linear(B, A, C)), ("slices_reordered", linear(C, B, A)),
                         ("slices_repeated", linear(A, B, A)), (UNKNOWN, linear(A, B, D)),
                         (UNKNOWN, linear(A, B, values(6, 5, 8, seed=13)))):
        answer = explain(case_of("m:fwd", around["m:fwd"], other, reference=around, batch=6, seq=5))
        assert answer.cause == cause
    answer = explain(case_of("m:fwd", around["m:fwd"], linear(C, B, A), reference=around, batch=6, seq=5))
    assert "c:fwd, b:fwd, a:fwd, where the reference has a:fwd, b:fwd, c:fwd" in answer.sentence


def test_blocks_of_one_tensor() -> None:
    x = values(6, 5, 24, seed=14)
    w = values(9, 24, seed=15)
    blocks = np.split(x, 4, axis=-1)
    around = {"x:fwd": x, "m.weight:init": w}
    other = np.concatenate([blocks[i] for i in (0, 2, 1, 3)], axis=-1)
    answer = explain(case_of("m:fwd", x @ w.T, other @ w.T, reference=around, batch=6, seq=5))
    assert answer.cause == "slices_reordered" and "block 2 of 4" in answer.sentence


def convolved(x: Array, rows: typing.Any = "constant") -> Array:
    padded = np.pad(np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)), rows), ((0, 0), (0, 0), (0, 0), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, KERNEL).astype(np.float32)


def test_convolution_of_a_tensor_that_is_scaled_up() -> None:
    up = SMALL.repeat(2, 2).repeat(2, 3)
    around = {"skip:fwd": LARGE, "up:fwd": SMALL, "m.weight:init": KERNEL}
    reference, other = (convolved(np.concatenate(pair, 1)) for pair in ((up, LARGE), (LARGE, up)))
    assert explain(case_of("m:fwd", reference, other, reference=around, batch=2)).cause == "slices_reordered"


def test_padding_of_a_convolution() -> None:
    around = {"x:fwd": values(2, 8, 6, 6, seed=12), "m.weight:init": KERNEL}
    reference = convolved(around["x:fwd"])
    for mode, said in (("wrap", "other end"), ("edge", "the end itself"), ("reflect", "mirrored")):
        held = shards(reference, convolved(around["x:fwd"], mode), 2, 2)
        answer = explain(case_of("m:fwd", reference, held, {"sp": 2}, reference=around, batch=2))
        assert answer.cause == "padding" and said in answer.sentence


def test_modulation() -> None:
    x, s, shift, w = A[:, :5], values(6, 1, 8, seed=20), values(6, 1, 8, seed=21), values(12, 8, seed=22)
    read = x * (1.0 + s) + shift
    around = {"x:fwd": x, "m.in:fwd": read, "m.weight:init": w}
    answer = explain(case_of("m:fwd", read @ w.T, (read - x) @ w.T, reference=around, batch=6, seq=5))
    assert answer.cause == "norm_gain" and "s times x:fwd" in answer.sentence


def test_pooled() -> None:
    tokens, counts = values(6, 7, 8, seed=16), [3, 7, 5, 2, 6, 4]
    padded = np.stack([row[:n].mean(axis=0) for row, n in zip(tokens, counts)])
    image = values(6, 8, 3, 3, seed=17)
    for reference, other, cause in ((padded, tokens.mean(axis=1), "tokens_pooled"),
                                    (tokens[:, 0], tokens[:, -1], "tokens_pooled"),
                                    (tokens[:, -1], tokens[np.arange(6), [n - 1 for n in counts]], "tokens_pooled"),
                                    (image.mean(axis=(2, 3)), image.max(axis=(2, 3)), "tokens_pooled"),
                                    (tokens[:, 0], values(6, 8, seed=18), UNKNOWN)):
        around = {"image:fwd": image, "x:fwd": tokens, "p:fwd": reference}
        answer = explain(case_of("p:fwd", reference.astype(np.float32), other.astype(np.float32), reference=around,
                                 batch=6, seq=7))
        assert answer.cause == cause
    weight, bias = values(5, 8, seed=19), values(5, seed=20)
    reference, other = (x @ weight.T + bias for x in (padded, tokens.mean(axis=1)))
    around = {"x:fwd": tokens, "p.weight:init": weight, "p.bias:init": bias, "p:fwd": reference}
    answer = explain(case_of("p:fwd", reference.astype(np.float32), other.astype(np.float32), reference=around, batch=6,
                             seq=7))
    assert answer.cause == "tokens_pooled" and "each sample's first places (3, 7, 5, 2, 6, 4)" in answer.sentence
