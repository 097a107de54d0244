# SPDX-License-Identifier: Apache-2.0
"""Gradients as sums over samples and uses: which summands the other run has."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain.explain import explain
from anyrank.explain.tensors import Array, Runs
from anyrank.tests.explained import case_of, cause, copies, values

BATCH, SEQ, WIDTH, VOCABULARY = 4, 6, 8, 20
HIDDEN, HEAD = values(BATCH, SEQ, WIDTH), values(VOCABULARY, WIDTH, seed=1)
IDS = np.random.default_rng(2).integers(0, VOCABULARY, (BATCH, SEQ))
LABELS = np.random.default_rng(3).integers(0, VOCABULARY, (BATCH, SEQ))


def _head() -> tuple[Array, Array]:
    """Logits, and the gradient of their mean cross-entropy."""
    logits = HIDDEN.astype(np.float64) @ HEAD.T.astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p[np.arange(BATCH)[:, None], np.arange(SEQ), LABELS] -= 1.0
    return logits, p / (BATCH * SEQ)


LOGITS, GRADIENT = _head()
BACK = GRADIENT @ HEAD
SUMMANDS = np.matmul(GRADIENT.transpose(0, 2, 1), HIDDEN)  # [samples, vocabulary, width]
REFERENCE = SUMMANDS.sum(0).astype(np.float32)
RUNS = Runs({"input.0:fwd": IDS, "head.weight:init": HEAD, "embed:fwd": values(BATCH, SEQ, WIDTH, seed=4),
             "norm:fwd": HIDDEN, "head:fwd": LOGITS.astype(np.float32), "head:bwd": BACK.astype(np.float32),
             "block:bwd": values(BATCH, SEQ, WIDTH, seed=5), "head.weight:grad": REFERENCE},
            mesh={"dp": 2}, batch=BATCH, seq=SEQ, micro_batches=2)
WEIGHTS = (
    ((0.0, 0.0, 1.0, 1.0), "one_micro_batch"), ((0.0, 1.0, 0.0, 1.0), "one_micro_batch"),
    ((2.0, 2.0, 1.0, 1.0), "counted_twice"),
    ((0.25, 0.25, 0.5, 0.5), "micro_batches_weighted"), ((4.0, 4.0, 2.0, 2.0), "micro_batches_weighted"),
    ((2.0, 2.0, 2.0 / 3.0, 2.0 / 3.0), "mean_of_means"), ((1.0, 1.3, 0.6, 0.8), "samples_weighted"),
)


def test_samples() -> None:
    for weights, expected in WEIGHTS:
        other = np.tensordot(np.array(weights), SUMMANDS, 1)
        assert cause("head.weight:grad", REFERENCE, other, RUNS) == expected


def test_micro_batches_that_are_not_reduced() -> None:
    for first, second, said in (((1, 1), (2, 0), "micro-batches 2 of 2"), ((2, 0), (1, 1), "micro-batches 1 of 2")):
        held = [np.tensordot(np.array([*first[::way], *second[::way]]), SUMMANDS, 1).astype(np.float32)
                for way in (1, -1)]
        case = case_of("head.weight:grad", REFERENCE, copies(*held))
        answer = explain(dataclasses.replace(case, runs=RUNS))
        assert answer.cause == "missing_average" and said in answer.sentence


def test_another_gradient_is_no_sum_of_these() -> None:
    assert cause("head.weight:grad", REFERENCE, REFERENCE + 0.3 * values(VOCABULARY, WIDTH, seed=6), RUNS) == "unknown"


def test_uses_of_a_tied_weight() -> None:
    own = np.zeros((VOCABULARY, WIDTH))
    np.add.at(own, IDS.reshape(-1), RUNS.reference["block:bwd"].reshape(-1, WIDTH).astype(np.float64))
    tied = (REFERENCE + own).astype(np.float32)
    runs = Runs({**RUNS.reference, "embed.weight:init": HEAD, "embed.weight:grad": tied}, batch=BATCH, seq=SEQ)
    for other in (own, REFERENCE, tied + own):
        assert cause("embed.weight:grad", tied, other, runs) == "tied_weight"


def test_another_input_of_the_right_gradient() -> None:
    back, given, other = values(2, 4, 20, seed=7), values(2, 4, 24, seed=8), values(2, 4, 24, seed=9)

    def product(a: Array, b: Array) -> Array:
        return typing.cast(Array, np.einsum("stp,stq->pq", a, b, dtype=np.float64).astype(np.float32))

    reference, found, weighted = product(back, given), product(back, other), product(other[..., :20], given)
    runs = Runs({"a:fwd": given, "b:bwd": back, "c.weight:grad": reference}, batch=2, seq=4)
    assert cause("c.weight:grad", reference, found, runs) == "other_saved_input"
    assert cause("c.weight:grad", reference, weighted, runs) == "unknown"  # of another gradient


def test_ids_of_an_embedding_without_inputs() -> None:
    own = np.zeros((VOCABULARY, WIDTH))
    np.add.at(own, IDS.reshape(-1), RUNS.reference["block:bwd"].reshape(-1, WIDTH).astype(np.float64))
    tied = (REFERENCE + own).astype(np.float32)
    runs = Runs({"embed.weight:init": HEAD, "embed:fwd": HEAD[IDS], "block:bwd": RUNS.reference["block:bwd"],
                 "embed.weight:grad": tied}, batch=BATCH, seq=SEQ)
    assert cause("embed.weight:grad", tied, own, runs) == "tied_weight"
