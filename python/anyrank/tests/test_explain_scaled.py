# SPDX-License-Identifier: Apache-2.0
"""The reference times numbers: what a factor is, by the numbers of the run."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain.tensors import Runs
from anyrank.tests.explained import cause, values
from anyrank.tests.test_explain_steps import cause_of

RUNS = Runs(mesh={"dp": 4}, batch=8, seq=16, micro_batches=2)
X = values(8, 16, 24)
WEIGHT = values(48, 24, seed=1)
FACTORS = (
    ("h:bwd", -1.0, "sign_flipped"),
    ("h.weight:grad", 4.0, "reduced_again"), ("h.weight:grad", 0.25, "averaged_again"),
    ("h.weight:grad", 0.5, "averaged_again"),  # of micro-batches
    ("h.weight:grad", 3.0, "wrong_scalar"), ("h.weight:grad", 2.0 ** 16, "loss_scale"),
    ("h.weight:grad", 128.0, "target_count"), ("h:fwd", 24.0 ** 0.5, "wrong_scalar"),
    ("h:fwd", 1.0457, "wrong_scalar"),
    ("h.weight:init", 1.7, "init_scale"),
    ("h.weight:m", 0.5, "unknown"),  # the optimizer's state has causes of its own
)


def test_one_factor() -> None:
    for name, factor, expected in FACTORS:
        runs = RUNS if "init" not in name else Runs(mesh={"tp": 4})
        reference = X if name.startswith("h:") else WEIGHT
        around = dataclasses.replace(runs, reference={name: reference, "out:fwd": X}) if name == "h:fwd" else runs
        assert cause(name, reference, factor * reference, around) == expected


def test_factors_of_stages() -> None:
    """Two stages: each clips by its own norm, or multiplies the gradient that it receives, or neither."""
    names = ["out.weight:grad", "mid.weight:grad", "low.weight:grad", "in.weight:grad"]
    grads = {name: values(12, 8, seed=i) for i, name in enumerate(names)}
    last, first = (np.sqrt(sum(float((grads[name] ** 2).sum()) for name in part)) for part in (names[:2], names[2:]))
    total = np.hypot(last, first)
    cases = (((total / last, total / first), "norm_of_own_shards"), ((1.7, 1.7 ** 2), "scaled_by_stage"),
             ((1.0, 1.3), "scaled_by_stage"), ((1.7, 2.1), "wrong_scalar"))
    for factors, expected in cases:
        other = {name: grads[name] * factors[i // 2] for i, name in enumerate(names)}
        name = names[0] if factors[0] != 1.0 else names[2]
        assert cause_of(name, grads, other, mesh={"pp": 2}) == expected, factors


def _by_sample(*factors: float) -> typing.Any:
    return np.repeat(np.array(factors, np.float32), 8 // len(factors))[:, None, None]


SAMPLES = (
    ("h:bwd", _by_sample(2.0, 2.0 / 3.0, 2.0, 2.0 / 3.0), "mean_of_means"),  # T / (4 T_p), of counts 1, 3, 1, 3
    ("h:bwd", _by_sample(8.0, 8.0 / 3.0, 8.0, 8.0 / 3.0), "mean_of_means"),
    ("h:bwd", _by_sample(1.0, 1.3, 0.7, 1.1, 1.6, 0.4, 1.2, 1.9), "samples_weighted"),
    ("h:bwd", _by_sample(2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0), "micro_batches_weighted"),
    ("h:fwd", 1.0 + np.abs(values(8, 16, 1, seed=2)), "row_statistic"),
    ("h:fwd", 1.0 + np.abs(values(1, 1, 24, seed=2)), "unknown"),  # features: a gain, which has causes of its own
)


def test_factors_of_slices() -> None:
    for name, factors, expected in SAMPLES:
        assert cause(name, X, X * factors, RUNS) == expected


def test_factors_of_a_shard() -> None:
    shards: typing.Any = np.repeat([0.9, 1.2, 1.05, 0.7], 12)[:, None]
    assert cause("h.weight:grad", WEIGHT, WEIGHT * shards, RUNS, parts=4) == "scaled_by_rank"
    part = np.where(np.arange(48) < 12, 4.0, 1.0)[:, None]
    assert cause("h.weight:grad", WEIGHT, WEIGHT * part, RUNS) == "reduced_again"


def test_tokens_without_a_gradient() -> None:
    lost = np.ones((8, 16, 1))
    lost[2, 3:7] = 0.0
    assert cause("h:bwd", X, X * lost, RUNS) == "target_count"
    assert cause("h:bwd", X, X * lost * (128.0 / 124.0), RUNS) == "target_count"
    ends = np.where(np.arange(16) % 8 == 7, 0.0, 8.0 / 7.0)[None, :, None]
    assert cause("h:bwd", X, X * ends, RUNS) == "labels_shifted"


def test_few_values_have_a_telling_factor_or_none() -> None:
    loss = np.float32(3.7).reshape(())
    for factor, expected in ((4.0, "reduced_again"), (0.9831, "unknown"), (1.0 / 3.0, "unknown")):
        assert cause("loss:fwd", loss, np.asarray(loss * factor), RUNS) == expected


def test_noise_is_no_factor() -> None:
    assert cause("h:fwd", X, X + 0.1 * values(*X.shape, seed=4), RUNS) == "unknown"


def test_gradients_of_experts_alone() -> None:
    names = [f"h.{i}.{part}.weight:grad" for i in range(2) for part in ("attn", "experts.0.w1", "experts.1.w1", "norm")]
    right = {name: values(8, 6, seed=i) for i, name in enumerate(names)}
    wrong = {name: array * (2.0 if "expert" in name else 1.0) for name, array in right.items()}
    runs = Runs(right, wrong, mesh={"dp": 2, "ep": 2})
    first = names[1]
    assert cause(first, right[first], wrong[first], runs) == "divisor_of_experts"
