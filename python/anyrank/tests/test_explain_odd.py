# SPDX-License-Identifier: Apache-2.0
"""What explanations read besides the tensor that differs: each may be missing, empty, a scalar, of integers or bool,
NaN, or of one sample. No generator ends by an exception, whatever is there, and none names a cause of mere noise."""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
import warnings

import numpy as np

from anyrank.explain import text
from anyrank.explain.explain import Answer, cause_of, causes, explain, fits_of
from anyrank.explain.patterns import Fit, Pattern
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


KEYS = sorted({key for cause in causes() for key in re.findall(r"{(\w+)", cause.sentence)} | {
    "text", "levels", "means", "grid", "kept", "wanted"})
INTERNAL = re.compile(r"[{}\[\]]|\b(True|False|None)\b")


def test_what_a_difference_looks_like_is_said_without_internals() -> None:
    """Of every kind of pattern, with numbers and with what no sentence has."""
    case, seen = case_of("a:fwd", values(4, 6), values(4, 6, seed=1), batch=4), set()
    for kind in {kind for cause in causes() for kind in cause.kinds}:
        for held in (1.5, True, None, {"low": 1}, [1, 2], values(3), "each of 2 parts is another",
                     "kept False, wanted [1]"):
            numbers = dict.fromkeys(KEYS, held)
            for told in (numbers, {key: x for key, x in numbers.items() if key != "text"}):
                answer = Answer("unknown", fits=(Fit(Pattern(kind, (), told), 0.2, 0.1, 0),))
                said = [line for line in text.lines(case, answer) if "looks like" in line or "is left" in line]
                assert not any(INTERNAL.search(line) for line in said), (kind, held, said)
                assert bool(said) <= isinstance(told.get("text"), str), (kind, said)
                seen |= {*said}
    assert any("each of 2 parts is another; 20 % of the difference is left" in line for line in seen)


def test_generators_say_what_they_find_without_internals() -> None:
    for name, i in itertools.product(OUTPUTS, range(len(KINDS))):
        reference = np.asarray(values(*OUTPUTS[name], seed=5))
        case = dataclasses.replace(case_of(name, reference, _spoiled(reference, "off")),
                                   runs=_runs(KINDS[i:] + KINDS[:i]))
        answer = explain(case)
        for fit in fits_of(case):
            cause = cause_of(case, fit.pattern)
            said = [*text.lines(case, dataclasses.replace(answer, cause="unknown", fits=(fit,)))[1:],
                    cause.text(fit.pattern) if cause is not None else ""]
            assert not any(INTERNAL.search(line.partition("known")[0]) for line in said), (fit.pattern.kind, said)


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
