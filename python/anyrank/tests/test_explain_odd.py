# SPDX-License-Identifier: Apache-2.0
"""What explanations read besides the tensor that differs: each may be missing, empty, a scalar, of integers or bool,
NaN, or of one sample. No generator ends by an exception, whatever is there, and none names a cause of mere noise."""

from __future__ import annotations

import dataclasses
import itertools
import typing
import warnings

import numpy as np

from anyrank.explain.explain import explain
from anyrank.explain.tensors import Runs, Tensors
from anyrank.tests.explained import case_of, shards, values

B, S, H, IDS = 2, 12, 24, 21
OUTPUTS = {
    "layers.0.mlp:fwd": (B, S, H), "layers.0.mlp.down_proj:fwd": (B, S, H), "layers.0.mlp.gate:fwd": (B, S, H),
    "layers.0.mlp.experts:fwd": (B, S, H), "layers.0.mlp.experts.1.down_proj.weight:grad": (H, H),
    "layers.0.self_attn:fwd": (B, S, H), "layers.0.self_attn.softmax:fwd": (B, 4, S, S),
    "layers.0.input_layernorm:fwd": (B, S, H), "layers.0:fwd": (B, S, H), "embed_tokens:fwd": (B, S, H),
    "embed_tokens.weight:grad": (IDS, H), "embed_tokens.weight:new": (IDS, H), "lm_head:fwd": (B, S, IDS),
    "lm_head.weight:grad": (IDS, H), "layers.0.mlp:bwd": (B, S, H), "loss:fwd": (), "grad_norm:clip": (),
    "layers.0.input_layernorm.weight:grad": (H,), "layers.0.mlp.gate.weight:m": (H, H)}
OTHERS = {
    "input_ids": (B, S), "position_ids": (B, S), "embed_tokens.weight:init": (IDS, H), "embed_tokens:fwd": (B, S, H),
    "layers.0.input_layernorm:fwd": (B, S, H), "layers.0.input_layernorm.weight:init": (H,),
    "layers.0.self_attn.q_proj:fwd": (B, S, H), "layers.0.self_attn.k_proj:fwd": (B, S, H),
    "layers.0.self_attn.v_proj:fwd": (B, S, H), "layers.0.self_attn:fwd": (B, S, H),
    "layers.0.mlp.gate_proj:fwd": (B, S, H), "layers.0.mlp.up_proj:fwd": (B, S, H),
    "layers.0.mlp.gate.weight:init": (H, H), "layers.0.mlp.gate:fwd": (B, S, H),
    "layers.0.mlp.experts.0.down_proj.weight:grad": (H, H), "layers.0:fwd": (B, S, H), "layers.0.mlp:bwd": (B, S, H),
    "norm:fwd": (B, S, H), "lm_head.weight:init": (IDS, H), "lm_head:bwd": (B, S, H), "lm_head:fwd": (B, S, IDS),
    "embed_tokens.weight:m": (IDS, H), "embed_tokens.weight:v": (IDS, H), "lm_head.weight:new": (IDS, H),
    "loss:bwd": (), "labels": (B, S)}
KINDS = ("right", "wrong", "missing", "empty", "scalar", "integers", "bools", "nans", "one row")


def _companion(name: str, kind: str, seed: int) -> typing.Any:
    shape = OTHERS[name]
    if kind == "scalar":
        return np.float32(seed)
    if kind == "one row":
        shape = (1, *shape[1:])
    if kind == "empty":
        shape = (0, *shape[1:])
    array = values(*shape, seed=seed)
    if kind == "integers" or name in ("input_ids", "position_ids", "labels"):
        array = (np.abs(array) * 7).astype(np.int64) % IDS
    return array > 0 if kind == "bools" else array * np.float32("nan") if kind == "nans" else array


def _runs(kinds: typing.Sequence[str]) -> Runs:
    sides: list[dict[str, typing.Any]] = [{}, {}]
    for i, name in enumerate(OTHERS):
        kind = kinds[i % len(kinds)]
        for side in range(2 if kind != "missing" else 0):
            sides[side][name] = _companion(name, kind, i + 100 * side * (kind == "wrong"))
    return Runs(Tensors(sides[0]), Tensors(sides[1]), batch=B, seq=S, heads=4, kv_heads=2)


def _spoiled(reference: typing.Any, how: str) -> typing.Any:
    other = reference * np.where(np.arange(reference.size).reshape(reference.shape) % 7 == 3, 1.1, 1.3)
    other = np.asarray(other + 0.01 * values(*reference.shape, seed=9), np.float32)
    if how == "infinite":
        other = reference.copy()
        other.reshape(-1)[min(3, other.size - 1)] = np.inf
    return other


def test_no_generator_ends_by_what_is_beside_a_tensor() -> None:
    for name, i in itertools.product(OUTPUTS, range(len(KINDS))):
        reference = np.asarray(values(*OUTPUTS[name], seed=5))
        case = case_of(name, reference, _spoiled(reference, "infinite" if i == 0 else "off"))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* ended at ")
            explain(dataclasses.replace(case, runs=_runs(KINDS[i:] + KINDS[:i])))


def test_noise_has_no_cause() -> None:
    named = []
    for row in range(240):
        shape = [(64,), (8, 12), (4, 6, 10)][row % 3]
        reference = values(*shape, seed=row)
        other = reference + np.float32([1e-6, 1e-4, 1e-2][row // 3 % 3]) * values(*shape, seed=row + 1000)
        kind = ("fwd", "bwd", "grad", "new", "m")[row % 5]
        held = other if row % 2 else shards(reference, other, 2)
        answer = explain(case_of(f"layers.1.mlp.down_proj:{kind}", reference, held, batch=4, seq=8))
        if answer.cause not in ("unknown", "rounding", "low_precision"):
            named.append((row, answer.cause, answer.sentence))
    assert not named
