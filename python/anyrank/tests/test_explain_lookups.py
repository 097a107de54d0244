# SPDX-License-Identifier: Apache-2.0
"""Rows of a table, samples of a batch and parts of a gradient: which of them stand there."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.explain import UNKNOWN, explain
from anyrank.tests import explained
from anyrank.tests.explained import case_of, copies, values

Array = typing.Any
TABLE = values(40, 8)
IDS = np.random.default_rng(1).integers(2, 38, (4, 12))
IDS[:, 0] = 0
PLACES = np.stack([np.maximum(np.arange(12) - pad, 0) for pad in (0, 2, 5, 3)])


def table_cause(name: str, ids: Array, other: Array, **facts: typing.Any) -> str:
    case = case_of(f"{name}:fwd", TABLE[ids], other.astype(np.float32), reference={"e.weight:init": TABLE}, batch=4,
                   seq=12, **facts)
    return explain(case).cause


def with_other_shard(row_of: typing.Callable[[Array], Array]) -> Array:
    return TABLE[IDS] + TABLE[np.where(IDS < 20, 20 + row_of(IDS) % 20, row_of(IDS) % 20)]


def test_rows_of_a_table() -> None:
    for cause, ids, other in (
            ("other_ids", IDS, TABLE[np.where(IDS == 0, 1, IDS)]),
            ("other_ids", IDS, TABLE[IDS + 1]),
            ("other_ids", IDS, TABLE[np.random.default_rng(2).permutation(40)[IDS]]),
            ("positions", PLACES, TABLE[np.broadcast_to(np.arange(12), (4, 12))]),
            ("positions", PLACES, TABLE[PLACES + 2]),
            ("embedding_mask", IDS, with_other_shard(np.zeros_like)),
            ("ids_at_shard_edge", IDS, TABLE[IDS] + (IDS == 20)[..., None] * values(4, 12, 8, seed=9)),
            ("embedding_mask", IDS, with_other_shard(lambda ids: ids)),
            ("embedding_mask", IDS, with_other_shard(lambda ids: 7 * ids + 3)),
            (UNKNOWN, IDS, np.where((IDS == 0)[..., None], values(4, 12, 8, seed=3), TABLE[IDS]))):
        assert table_cause("e", ids, other, mesh={"tp": 2}) == cause
    old = values(40, 8, seed=30)
    around = {"e.weight:init": old, "e.weight:new": TABLE}
    places, x = values(20, 8, seed=31), values(4, 12, 8, seed=32)
    for cause, other in (("positions", places[1:13]), ("positions", np.tile(places[:6], (2, 1)))):
        shifted = case_of("h:fwd", x + places[:12], x + other, reference={"e.weight:init": TABLE, "p:init": places},
                          batch=4, seq=12)
        assert explain(shifted).cause == cause
    stale = case_of("e:fwd@2", TABLE[IDS], old[IDS], reference=around, batch=4, seq=12)
    assert explain(stale).cause == "stale_weights"
    assert table_cause("e.call2", IDS, TABLE[np.where(IDS == 0, 1, IDS)]) == "other_ids"


def test_samples() -> None:
    images, new = values(8, 3, 6), values(8, 3, 6, seed=1)
    flipped = np.where(np.arange(8)[:, None, None] % 2 == 0, images[:, :, ::-1], np.roll(images, 2, axis=1))
    for cause, other in (("other_samples", flipped), ("other_samples", new),
                         ("same_samples", np.concatenate((new[:4], new[:4]))),
                         ("other_samples", np.concatenate((images[1:5], new[:4])))):
        held = explained.shards(images, other, 2)
        answer = explain(case_of("input.0:fwd", images, held, {"dp": 2}, batch=8))
        assert answer.cause == cause and (cause != "other_samples" or answer.confidence == "sure")
    answer = explain(case_of("input.0:fwd", images, explained.shards(images, np.concatenate((images[:4], new[:4])), 2),
                             {"dp": 2}, batch=8))
    assert "on rank 1: 4 samples are none of the reference's" in answer.sentence
    padded = np.where(np.arange(6) == 5, np.float32(9.0), images)  # a part of each sample: it may be the same sample
    assert explain(case_of("input.0:fwd", images, padded, batch=8)).cause != "other_samples"


def test_noise_of_another_rank() -> None:
    images, noise = values(8, 300, seed=7), values(8, 300, seed=8)
    alike = np.concatenate((noise[:4], noise[:4]))
    for cause, other in (("shards_seeded_alike", images + alike), ("other_samples", images + values(8, 300, seed=9))):
        other[:4] = images[:4] + noise[:4]
        held = explained.shards(images, other, 2)
        assert explain(case_of("input.0:fwd", images + noise, held, {"dp": 2}, batch=8)).cause == cause


def test_positions_that_run_on() -> None:
    own, other = np.array([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]), np.arange(6)[None].repeat(2, axis=0)
    assert explain(case_of("input.1:fwd", own, other, batch=2, seq=6)).cause == "positions"
    same = {"output:fwd"}  # turning depends on distances alone
    assert explain(case_of("input.1:fwd", own, other, batch=2, seq=6, same=same)).cause != "positions"


# --- gradients as products --------------------------------------------------------------------------------------------

OUT, IN = values(4, 6, 16, seed=4), values(4, 6, 10, seed=5)
EACH = np.einsum("bto,bti->boi", OUT, IN)
GRADIENT = EACH.sum(axis=0)


def product(reference: Array, other: typing.Any, mesh: typing.Any = None, **facts: typing.Any) -> str:
    around = {"m.act:bwd": OUT, "a:fwd": IN, "other:fwd": values(4, 6, 10, seed=6)}
    held = copies(*(np.asarray(x, np.float32) for x in other))
    return explain(case_of("m.weight:grad", reference.astype(np.float32), held, mesh or {}, reference=around, batch=4,
                           seq=6, **facts)).cause


def test_parts_of_a_gradient() -> None:
    assert product(GRADIENT, [EACH[2:].sum(0)], micro_batches=2) == "one_micro_batch"
    assert product(GRADIENT, [EACH[0]]) == "part_of_tokens"
    assert product(GRADIENT, [EACH[[0, 2]].sum(0)] * 2, {"dp": 2}) == "part_of_tokens"
    assert product(GRADIENT, [EACH[[0, 1, 3]].sum(0)]) == "part_of_tokens"
    assert product(GRADIENT, [GRADIENT, EACH[2:].sum(0)], {"dp": 2}) == "missing_all_reduce"
    assert product(GRADIENT, [GRADIENT, 2.0 * EACH[2:].sum(0)], {"dp": 2}) == "missing_average"
    halves = np.einsum("bto,bti->oi", OUT[:, 3:], IN[:, 3:])
    assert product(GRADIENT, [GRADIENT, halves], {"cp": 2}) == "missing_all_reduce"
    for order in ([2, 3, 0, 1], [2, 3, 2, 3], [1, 2, 3, 0]):
        crossed = np.einsum("bto,bti->oi", OUT, IN[order])
        assert product(GRADIENT, [crossed], micro_batches=2) == "input_of_other_micro_batch"
    other = np.einsum("bto,bti->oi", OUT, values(4, 6, 10, seed=6))
    assert product(GRADIENT, [other]) == "other_saved_input"
    assert product(GRADIENT, [values(16, 10, seed=7)]) == UNKNOWN


def test_a_weight_of_two_uses() -> None:
    rows = np.zeros((16, 10))
    rows[[1, 4, 9]] = values(3, 10, seed=8)
    for other in (GRADIENT, rows, rows + 2.0 * GRADIENT, 2.0 * rows + GRADIENT):
        assert product(GRADIENT + rows, [other]) == "tied_weight"
    assert product(GRADIENT + rows, [GRADIENT + values(16, 10, seed=9)]) == UNKNOWN
