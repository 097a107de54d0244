# SPDX-License-Identifier: Apache-2.0
"""Values at other places: for each way to move them the cause that is found, and near misses that have none."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from anyrank.explain import moved, shards
from anyrank.explain.explain import UNKNOWN, explain
from anyrank.explain.tensors import Copy
from anyrank.tests import explained
from anyrank.tests.explained import case_of, values

W, A = values(32, 24), values(4, 16, 24)  # a weight; an activation of 4 samples of 16 tokens
BATCH: dict[str, Any] = {"batch": 4, "seq": 16}
POSITIONS = np.broadcast_to(values(16, 24), (4, 16, 24)).copy()


def blocks(x: Any, order: Any, size: Any, axis: Any = 0) -> Any:
    index = (np.asarray(order)[:, None] * size + np.arange(size)).ravel()
    return np.take(x, index, axis)


def dealt(x: Any, p: Any, axis: Any = 0) -> Any:
    n = x.shape[axis]
    return np.take(x, np.arange(n) % p * (n // p) + np.arange(n) // p, axis)


def shifted(x: Any, by: Any, axis: Any, edge: Any) -> Any:
    result = np.roll(x, -by, axis)
    at = [slice(None)] * x.ndim
    at[axis] = slice(x.shape[axis] - by, None)
    result[tuple(at)] = edge
    return result


WHOLE = [
    ("slices_reordered", "w:init", W, np.roll(W, -3, 0)),
    ("slices_reordered", "w:init", W, np.roll(W, 16, 0)),
    ("slices_reordered", "w:init", W, blocks(W, [1, 0, 3, 2], 8)),
    ("slices_reordered", "w:init", W, W[::-1]),
    ("slices_reordered", "a:fwd", A, A[:, ::-1]),
    ("batch_order", "a:fwd", A, A[::-1]),
    ("batch_order", "a:fwd", A, A[[1, 2, 3, 0]]),
    ("batch_order", "a:fwd", A, A[[3, 0, 2, 1]]),
    ("samples_dealt_out", "a:fwd", A, dealt(A, 2)),
    ("zigzag_order", "a:fwd", A, dealt(A, 4, 1)),
    ("gathered_in_rank_order", "a:fwd", A, A.reshape(4, 2, 8, 24).transpose(1, 0, 2, 3).reshape(4, 16, 24)),
    ("transposed", "a:fwd", A, A.reshape(4, 16, 3, 8).transpose(0, 2, 1, 3).reshape(4, 16, 24)),
    ("gathered_in_rank_order", "a:fwd", A, np.roll(A, 4, 1)),
    ("tokens_shifted", "a:fwd", A, np.roll(A, 3, 1)),
    ("tokens_shifted", "a:fwd", A, shifted(A, 1, 1, 0.0)),
    ("positions", "a:fwd", POSITIONS, shifted(POSITIONS, 2, 1, 7.0)),
    ("shifted", "w:init", W, shifted(W, 2, 0, W[-1])),
    ("zigzag_order", "a:fwd", A, blocks(A, [0, 7, 1, 6, 2, 5, 3, 4], 2, 1)),
    ("dimension_flattened", "w:init", W, dealt(W, 4)),
    ("dimension_flattened", "w:init", W, dealt(W, 4).astype(np.float32) * np.float32(1 + 1e-7)),
    ("rope_pairing", "w:init", W, np.concatenate([dealt(W[i:i + 8], 2) for i in range(0, 32, 8)])),
    ("rope_pairing", "w:init", W, np.concatenate([W[i:i + 8][[0, 2, 1, 3, 4, 5, 6, 7]] for i in range(0, 32, 8)])),
    ("slices_reordered", "w:init", W, W[[0, 5, 2, 3, 4, 1, *range(6, 32)]]),
    ("slices_repeated", "w:init", W, W[[0, 1, 2, 9, *range(4, 32)]]),
    ("slices_repeated", "w:init", W, blocks(W, [0, 2, 2, 3], 8)),
    ("slices_reordered", "w:init", W, W[np.random.default_rng(3).permutation(32)]),
    ("transposed", "w:init", values(24, 24), values(24, 24).T),
    ("transposed", "w:init", W, W.T.reshape(32, 24)),
    ("transposed", "a:fwd", A, A.transpose(1, 0, 2).reshape(4, 16, 24)),
    ("shifted", "w:init", W, np.roll(W.ravel(), -5).reshape(W.shape)),
    # Near misses: other values, one value that is none of the reference's, too few elements.
    ("other_initial_values", "w:init", W, values(32, 24, seed=9)),
    (UNKNOWN, "w:init", W, np.roll(W, -3, 0) + (np.arange(24) == 5) * (np.arange(32) == 7)[:, None] * np.float32(0.5)),
    (UNKNOWN, "w:init", values(6), values(6)[::-1]),
]


def test_whole_tensor() -> None:
    for index, (cause, name, reference, other) in enumerate(WHOLE):
        facts = BATCH if name == "a:fwd" else {}
        answer = explain(case_of(name, reference, np.ascontiguousarray(other), **facts))
        assert answer.cause == cause, (index, answer)


def on_ranks(name: Any, reference: Any, order: Any, n: Any, axis: Any = 0, mesh: Any = None, **facts: Any) -> Any:
    """Rank r has part order[r] of the reference."""
    held = explained.shards(reference, reference, n, axis)
    parts = [(held[r][0], held[order[r]][1]) for r in range(n)]
    return case_of(name, reference, parts, mesh or {"tp": n}, **facts)


SHARDS = [
    ("shards_misplaced", "w:init", W, [1, 2, 3, 0], 0, {}),
    ("shards_misplaced", "w:init", W, [0, 3, 2, 1], 0, {}),
    ("shards_seeded_alike", "w:init", W, [0, 0, 0, 0], 0, {}),
    ("shards_misplaced", "w:new", W, [1, 1, 1, 1], 0, {}),
    ("slices_repeated", "w:new", W, [0, 1, 1, 3], 0, {}),
    ("same_samples", "a:fwd", A, [0, 0, 0, 0], 0, BATCH),
    ("batch_order", "a:fwd", A, [1, 2, 3, 0], 0, BATCH),
    ("positions", "a:fwd", POSITIONS, [0, 0, 0, 0], 1, BATCH),
]


def test_samples_that_stay_sorted() -> None:
    lengths, x = np.array([5, 9, 2, 7, 3, 8]), values(6, 10)
    runs: dict[str, Any] = {"batch": 6, "reference": {"input.1:fwd": lengths}, "same": {"input.1:fwd"}}
    answer = explain(case_of("m:fwd", x, x[np.argsort(-lengths)], **runs))
    assert answer.cause == "batch_order" and "sorted input.1:fwd" in answer.sentence


def test_shards() -> None:
    for cause, name, reference, order, axis, facts in SHARDS:
        assert explain(on_ranks(name, reference, order, 4, axis, **facts)).cause == cause


def test_strided_shards() -> None:
    other = values(8, 24)
    strided = [np.concatenate([x[rank::4] for rank in range(4)]) for x in (W, other)]
    for n, beside, expected in ((4, strided[1], "shards_misplaced"), (2, strided[1], "dimension_flattened"),
                                (4, other, "dimension_flattened")):
        known: dict[str, Any] = {"reference": {"w:init": W, "v:init": other}, "other": {"v:init": beside}}
        case = case_of("w:init", W, explained.shards(W, strided[0], n), {"dp": n}, **known)
        assert explain(case).cause == expected


def test_samples_in_order_before() -> None:
    for name, said in (("b:fwd", "not in what was computed before"), ("c:fwd", "in another order: ")):
        case = case_of("a:fwd", A, A[[1, 2, 3, 0]], **BATCH, reference={name: A + 1, "a:fwd": A}, same={"b:fwd"})
        answer = explain(case)
        assert answer.cause == "batch_order" and said in answer.sentence


def test_micro_batches_in_another_order() -> None:
    case = case_of("a:bwd", A, explained.shards(A, A[::-1], 4), **BATCH, micro_batches=4)
    held = Copy(0, tuple(box for copy in case.copies for box in copy.boxes),
                tuple(part for copy in case.copies for part in copy.values))
    answer = explain(dataclasses.replace(case, copies=(held,)))
    assert answer.cause == "input_of_other_micro_batch" and "part 1 has part 4's" in answer.sentence


def test_tokens_rolled_after_the_cut() -> None:
    whole = np.roll(A, -1, 1)
    parts = np.concatenate([np.roll(part, -1, 1) for part in np.split(A, 2, 1)], 1)
    answer = explain(case_of("a:fwd", whole, explained.shards(whole, parts, 2, 1), {"cp": 2}, **BATCH))
    assert answer.cause == "tokens_shifted", answer


def test_kv_head_by_modulo() -> None:
    box = [(slice(16 * h, 16 * h + 16), slice(0, 24)) for h in (0, 0, 1, 1)]
    held = [(b, W[16 * (r % 2):16 * (r % 2) + 16]) for r, b in enumerate(box)]
    assert explain(case_of("w:init", W, held, {"tp": 4})).cause == "wrong_kv_head"


def test_packed_weights_cut_as_one() -> None:
    gate, up = values(32, 24, seed=1), values(32, 24, seed=2)
    packed = np.concatenate((gate, up))
    other = np.concatenate((packed[:16], packed[32:48]))
    case = case_of("ff.gate.weight:init", gate, explained.shards(gate, other, 2), {"tp": 2},
                   reference={"ff.gate.weight:init": gate, "ff.up.weight:init": up})
    assert explain(case).cause == "packed_cut_as_one"


def test_one_ranks_part() -> None:
    other = W.copy()
    other[16:] = W[16:, ::-1]
    answer = explain(case_of("w:init", W, explained.shards(W, other, 2), {"tp": 2}))
    assert answer.cause == "slices_reordered" and "rank 1 alone" in answer.sentence


def test_what_a_linear_module_reads() -> None:
    weight, x = values(24, 24, seed=4), values(4, 16, 24, seed=5)
    reference, other = x @ weight.T, dealt(x, 6, 2) @ weight.T
    case = case_of("proj:fwd", reference, other, **BATCH, reference={"proj.weight:init": weight})
    assert explain(case).cause == "dimension_flattened"


def test_large_tensors_without_a_relation_have_no_pattern() -> None:
    reference = values(2048, 2048)
    case = case_of("w:init", reference, values(2048, 2048, seed=1), {"tp": 4})
    for module in (moved, shards):
        assert not list(module.patterns(case))
