# SPDX-License-Identifier: Apache-2.0
"""The reference times numbers: what a factor is, by the numbers of the run."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain.tensors import Runs
from anyrank.tests.explained import cause, values

RUNS = Runs(mesh={"dp": 4}, batch=8, seq=16, micro_batches=2)
X = values(8, 16, 24)
WEIGHT = values(48, 24, seed=1)
FACTORS = (
    ("h:bwd", -1.0, "sign_flipped"),
    ("h.weight:grad", 4.0, "reduced_again"), ("h.weight:grad", 0.25, "averaged_again"),
    ("h.weight:grad", 0.5, "averaged_again"),  # of micro-batches
    ("h.weight:grad", 3.0, "wrong_scalar"), ("h.weight:grad", 2.0 ** 16, "loss_scale"),
    ("h.weight:grad", 128.0, "sum_for_mean"), ("h:fwd", 24.0 ** 0.5, "scale_by_root"),
    ("h:fwd", 1.0457, "wrong_scalar"),
    ("h.weight:init", (72.0 / 36.0) ** 0.5, "init_scale_of_shard"), ("h.weight:init", 1.7, "init_scale"),
    ("h.weight:m", 0.5, "unknown"),  # the optimizer's state has causes of its own
)


def test_one_factor() -> None:
    for name, factor, expected in FACTORS:
        runs = RUNS if "init" not in name else Runs(mesh={"tp": 4})
        reference = X if name.startswith("h:") else WEIGHT
        around = dataclasses.replace(runs, reference={name: reference, "out:fwd": X}) if name == "h:fwd" else runs
        assert cause(name, reference, factor * reference, around) == expected


def _by_sample(*factors: float) -> typing.Any:
    return np.repeat(np.array(factors, np.float32), 8 // len(factors))[:, None, None]


SAMPLES = (
    ("h:bwd", _by_sample(2.0, 2.0 / 3.0, 2.0, 2.0 / 3.0), "mean_of_means"),  # T / (4 T_p), of counts 1, 3, 1, 3
    ("h:bwd", _by_sample(8.0, 8.0 / 3.0, 8.0, 8.0 / 3.0), "sum_of_local_means"),
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
    assert cause("h.weight:grad", WEIGHT, WEIGHT * part, RUNS) == "part_reduced_again"
    rows = np.repeat(1.0 + np.abs(values(8, 16, 4, seed=3)), 6, axis=2)
    norm = dataclasses.replace(RUNS, reference={"n:fwd": X, "n.weight:init": X[0, 0]})
    assert cause("n:fwd", X, X * rows, norm) == "statistic_of_one_shard"


def test_means_and_variances_of_own_samples() -> None:
    images = values(8, 6, 5, 5, seed=7) + values(8, 1, 1, 1, seed=8)

    def batch_norm(x: typing.Any) -> typing.Any:
        return (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)

    own = np.concatenate([batch_norm(part) for part in np.split(images, 4)])
    runs = Runs(mesh={"dp": 4}, batch=8)
    assert cause("bn:fwd", batch_norm(images), own, runs) == "statistic_of_own_samples"
    offsets = 1.0 + np.square(values(8, 16, 1, seed=9)), values(8, 16, 1, seed=10)
    norm = dataclasses.replace(RUNS, reference={"ln:fwd": X, "ln.weight:init": X[0, 0]})
    assert cause("ln:fwd", X, X * offsets[0] + offsets[1], norm) == "row_statistic"


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


def test_dropout_without_its_scale() -> None:
    kept = np.random.default_rng(0).random(X.shape) < 0.9
    assert cause("drop:fwd", X * kept / np.float32(0.9), X * kept, RUNS) == "dropout_without_scale"


def test_noise_is_no_factor() -> None:
    assert cause("h:fwd", X, X + 0.1 * values(*X.shape, seed=4), RUNS) == "unknown"
