# SPDX-License-Identifier: Apache-2.0
"""Sets of elements that differ: what stands there, and what has no cause."""

from __future__ import annotations

from typing import Any

import numpy as np

from anyrank.explain.explain import UNKNOWN, explain
from anyrank.tests import explained
from anyrank.tests.explained import case_of, values

W, A = values(32, 24), values(4, 16, 24)
BATCH: dict[str, Any] = {"batch": 4, "seq": 16}


def put(x: Any, at: Any, value: Any) -> Any:
    result = x.copy()
    result[at] = value
    return result


def dropped(x: Any, p: Any, seed: Any, factor: Any = None) -> Any:
    keep = np.random.default_rng(seed).random(x.shape) >= p
    return np.where(keep, x * np.float32(1.0 / (1.0 - p) if factor is None else factor), np.float32(0.0))


def tails(x: Any, n: Any, cut: Any, axis: Any = 0) -> Any:
    local = np.arange(x.shape[axis]) % (x.shape[axis] // n)
    return put(x, (slice(None),) * axis + (local >= cut,), 0.0)


def flipped(x: Any, at: Any, bit: Any) -> Any:
    result = x.copy()
    result.view(np.uint32)[at] ^= np.uint32(1 << bit)
    return result


CASES = [
    ("never_written", "w:init", W, W * 0),
    ("no_gradient", "w:grad", W, W * 0),
    ("no_backward", "a:bwd", A, A * 0),
    ("block_not_written", "w:init", W, put(W, slice(8, 16), 0.0)),
    ("block_not_written", "w:init", W, put(W, (slice(8, 16), slice(3, 9)), 0.0)),
    ("block_not_written", "w:init", W, put(W, [1, 5, 6, 20], 0.0)),
    ("block_not_written", "a:fwd", A, put(A, ([0, 1, 3], [4, 9, 2]), 0.0)),
    ("size_rounded_down", "a:fwd", A, tails(A, 2, 6, 2)),
    ("size_rounded_down", "a:fwd", A, tails(A, 2, 10, 2)),
    ("size_rounded_down", "a:fwd", values(4, 18, 24), put(values(4, 18, 24), (slice(None), slice(16, None)), 0.0)),
    ("filled", "w:init", W, put(W, slice(3, 5), -1e4)),
    ("filled", "a:fwd", A, put(A, (slice(None), 4), -np.inf)),
    ("not_a_number", "a:fwd", A, put(A, (1, 2), np.nan)),
    ("dropout", "a:fwd", A, dropped(A, 0.1, 1)),
    ("dropout_without_scale", "a:fwd", A, dropped(A, 0.1, 1, 1.0)),
    ("dropout", "a:fwd", dropped(A, 0.1, 1), dropped(A, 0.3, 2)),
    ("dropout_mask", "a:fwd", dropped(A, 0.2, 1), dropped(A, 0.2, 2)),
    ("block_not_written", "w:init", W, dropped(W, 0.1, 1, 1.0)),
    ("few_elements", "w:init", W, flipped(W, (3, 4), 27)),
    ("few_elements", "w:init", W, put(W, ([3, 9], [4, 2]), [W[9, 2], W[3, 4]])),
    ("few_elements", "w:init", W, put(W, ([3, 9], [4, 2]), [W[3, 4] + 3.0, W[9, 2] - 5.0])),
    # Zeros by the sign or the size of a value are no mask.
    ("activation_function", "a:fwd", A, np.maximum(A, 0.0)),
    (UNKNOWN, "w:init", W, np.where(np.abs(W) < 0.2, np.float32(0.0), W)),
    # Sets alone: a range of tokens, some rows, one sample.
    (UNKNOWN, "a:fwd", A, put(A, (slice(None), slice(5, None)), values(4, 11, 24, seed=2))),
    (UNKNOWN, "w:init", W, put(W, [3, 9], values(2, 24, seed=2))),
]


def test_whole_tensor() -> None:
    for index, (cause, name, reference, other) in enumerate(CASES):
        facts: dict[str, Any] = {"batch": 4, "seq": reference.shape[1], "mesh": {"cp": 2}} if name[0] == "a" else {}
        answer = explain(case_of(name, reference, other, **facts))
        assert answer.cause == cause, (index, answer)


def test_state_that_is_not_resumed() -> None:
    then = {"a:fwd@3": A * 0, "a:fwd@4": A}
    for same, step, expected in (({"w:new@2"}, 3, "state_not_resumed"), (set(), 3, "never_written"),
                                 ({"w:new@2"}, 4, "never_written")):
        case = case_of(f"a:fwd@{step}", A, A * 0, **BATCH, reference={"w:new@2": W, "a:fwd@3": A, "a:fwd@4": A},
                       other={**then, "a:fwd@5": A}, same=same)
        assert explain(case).cause == expected


def test_starts_of_documents() -> None:
    numbers = np.repeat([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]], 4, axis=0)
    runs: dict[str, Any] = {**BATCH, "reference": {"input.1:fwd": numbers, "a:fwd": A}, "same": {"input.1:fwd"}}
    for cause, tokens in (("document_boundaries", [4, 5, 10, 11]), (UNKNOWN, [4, 5, 10, 11, 1]), (UNKNOWN, [4, 5])):
        other = put(A, (slice(None), tokens), values(4, len(tokens), 24, seed=3))
        assert explain(case_of("a:fwd", A, other, **runs)).cause == cause


def test_a_state_that_is_carried_over_one_border_alone() -> None:
    fades = np.tile(0.5 ** np.arange(4), 4)[None, :, None] * values(4, 1, 24, seed=4)
    for cause, first in (("carried_state", 8), (UNKNOWN, 12)):
        held = explained.shards(A, np.where(np.arange(16)[:, None] >= first, A + fades, A).astype(np.float32), 4, 1)
        answer = explain(case_of("a:fwd", A, held, {"cp": 4}, **BATCH))
        assert answer.cause == cause
    assert "only what rank 3 has differs" in answer.sentence


def test_zeros_of_one_rank() -> None:
    answer = explain(case_of("w:new", W, explained.shards(W, put(W, slice(16, 24), 0.0), 4), {"dp": 4}))
    assert answer.cause == "zeros_of_ranks" and "rank 2 alone" in answer.sentence


def test_ids_of_other_shards() -> None:
    table = values(40, 24)
    ids = np.random.default_rng(1).integers(0, 40, (4, 16))
    reference = table[ids]
    case = case_of("emb:fwd", reference, put(reference, ids >= 20, 0.0), **BATCH, reference={"emb.weight:init": table})
    assert explain(case).cause == "ids_of_other_shards"


def test_masks_by_rank() -> None:
    reference = dropped(A, 0.2, 1)
    half = dropped(A[..., :12], 0.2, 3)  # one mask in both ranks' parts
    other = np.concatenate((half, np.where(half != 0, A[..., 12:] / np.float32(0.8), np.float32(0.0))), axis=2)
    case = case_of("a:fwd", reference, explained.shards(reference, other, 2, 2), {"tp": 2}, **BATCH)
    assert explain(case).cause == "dropout_mask"
    case = case_of("a:fwd", reference, explained.copies(reference, dropped(A, 0.2, 4)), {"tp": 2}, **BATCH)
    assert explain(case).cause == "dropout_mask"
    other = dropped(A, 0.2, 5)
    case = case_of("l.1.drop:fwd", reference, other, **BATCH, reference={"l.0.drop:fwd": other * 3})
    assert explain(case).cause == "dropout_mask"


def test_halo() -> None:
    other = A.copy()
    other[:, [7, 8]] += 1.0 + values(4, 2, 24, seed=3)
    assert explain(case_of("c:fwd", A, explained.shards(A, other, 2, 1), {"cp": 2}, **BATCH)).cause == "halo_missing"
    other = A.copy()
    other[:, 5:11] += 1.0 + values(4, 6, 24, seed=3)  # more than half of a part
    answer = explain(case_of("c:fwd", A, explained.shards(A, other, 2, 1), {"cp": 2}, **BATCH))
    assert answer.cause in (UNKNOWN, "halo_missing")


def test_what_a_set_looks_like() -> None:
    other = put(W, slice(16, 24), values(8, 24, seed=4))
    answer = explain(case_of("w:new", W, explained.shards(W, other, 4), {"dp": 4}))
    assert answer.cause == UNKNOWN and answer.fits[0].pattern.numbers["text"] == "only what rank 2 has differs"
