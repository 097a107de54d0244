# SPDX-License-Identifier: Apache-2.0
"""Ranks' copies against each other and the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from anyrank.explain.explain import UNKNOWN, explain
from anyrank.tests import explained
from anyrank.tests.explained import case_of, copies, values

W, A = values(16, 24), values(4, 16, 24)
BATCH: dict[str, Any] = {"batch": 4, "seq": 16}


def summands(x: Any, n: Any, seed: Any = 1) -> Any:
    """n arrays that add up to x."""
    some = [values(*x.shape, seed=seed + i) for i in range(n - 1)]
    return [*some, x - sum(some)]


def own_blocks(x: Any, n: Any, axis: Any) -> Any:
    local = np.arange(x.shape[axis]) // (x.shape[axis] // n)
    shape = [-1 if a == axis else 1 for a in range(x.ndim)]
    return [np.where((local == r).reshape(shape), x, np.float32(0.0)) for r in range(n)]


a, b, c, d = summands(W, 4)
BIAS = values(24, seed=8)
x, y = summands(A, 2)
CASES = [
    ("missing_all_reduce", "w:grad", W, [a, b, c, d], {"dp": 4}),
    ("missing_all_reduce", "w:grad", W, [a + b, a + b, c + d, c + d], {"dp": 2, "tp": 2}),
    ("missing_all_reduce", "a:fwd", A, [x, y], {"tp": 2}),
    ("missing_all_reduce", "a:fwd", A, [x + BIAS, y + BIAS], {"tp": 2}),
    ("missing_average", "w:grad", W, [4 * a, 4 * b, 4 * c, 4 * d], {"dp": 4}),
    ("missing_all_reduce", "w:grad", W, own_blocks(W, 4, 0), {"tp": 4}),
    ("missing_all_gather", "a:fwd", A, own_blocks(A, 2, 2), {"tp": 2}),
    ("collective_without_backward", "a:bwd", A, own_blocks(A, 2, 1), {"tp": 2}),
    ("missing_all_reduce", "w:grad", W, [W, a + b, W, c + d], {"dp": 4}),
    ("missing_all_reduce", "w:grad", W, [W, 2 * (a + b), W, 2 * (c + d)], {"dp": 4}),
    ("missing_all_reduce", "w:grad", W, [a + b, a + b, c + d, c + d], {"dp": 4}),
    ("scaled_by_rank", "w:grad", W, [W * np.float32(f) for f in (0.7, 1.3, 1.3)], {"dp": 3}),
    ("replicas_apart", "w:init", W, [W, 0 * W], {"dp": 2}),
    ("replicas_apart", "w:init", W, [W, values(16, 24, seed=5)], {"dp": 2}),
    ("scaled_by_rank", "w:grad", W, [W * np.float32(0.7), W * np.float32(1.9)], {"dp": 2}),
    # Copies that have nothing to do with each other, and a right copy beside a wrong one of a gradient.
    (UNKNOWN, "w:grad", W, [values(16, 24, seed=5), values(16, 24, seed=6)], {"dp": 2}),
    (UNKNOWN, "w:grad", W, [W, values(16, 24, seed=5)], {"dp": 2}),
    (UNKNOWN, "w:grad", W, [W, a + b, W, c], {"dp": 4}),
    (UNKNOWN, "w:grad", W, [a, b, c, d + (np.arange(24) == 2) * np.float32(9)], {"dp": 4}),
]


def test_copies() -> None:
    for index, (cause, name, reference, held, mesh) in enumerate(CASES):
        answer = explain(case_of(name, reference, copies(*held), mesh, **(BATCH if name[0] == "a" else {})))
        assert answer.cause == cause, (index, answer)


def test_the_group_is_named() -> None:
    answer = explain(case_of("w:grad", W, copies(a + b, a + b, c + d, c + d), {"dp": 2, "tp": 2}))
    assert "over dp" in answer.sentence and "add up to the reference" in answer.sentence


def test_gradients_that_some_parameters_alone_lack() -> None:
    known = {"l:bwd": A, "w:grad": W, "q:grad": W + 1}
    for back, said in (({"l:bwd"}, "1 gradient differs (w), others are right (q)"), (set(), "")):
        answer = explain(case_of("w:grad", W, copies(2 * a, 2 * (W - a)), {"dp": 2}, reference=known, other=known,
                                 same={*back, "q:grad"}))
        assert answer.cause == "missing_average" and said in answer.sentence and ("DDP" in answer.look) == bool(said)


def test_rows_that_lack_a_sum() -> None:
    held = [np.concatenate([W[:12], part[12:]]) for part in (a, W - a)]
    answer = explain(case_of("w:grad", W, copies(*held), {"tp": 2}))
    assert answer.cause == "missing_all_reduce" and "in rows 12 to 15 of 16 alone" in answer.sentence


def test_branch_that_every_rank_adds() -> None:
    branch = values(4, 16, 24, seed=6)
    case = case_of("h:bwd", A, copies(x + branch, y), {"tp": 2}, **BATCH, reference={"h.own:bwd": branch})
    answer = explain(case)
    assert answer.cause == "missing_all_reduce" and "h.own:bwd" in answer.sentence


def halves(held: Any) -> Any:
    """Rank r = (dp, tp): held[dp][tp] is its half of the rows."""
    box = [(slice(8 * t, 8 * t + 8), slice(0, 24)) for t in range(2)]
    return [(box[t], held[2 * r + t]) for r in range(2) for t in range(2)]


def test_other_groups() -> None:
    parts = [[half[8 * t:8 * t + 8] for t in range(2)] for half in (a + b, c + d)]
    over_tp = [parts[r][0] + parts[r][1] for r in range(2) for _ in range(2)]
    assert explain(case_of("w:grad", W, halves(over_tp), {"dp": 2, "tp": 2})).cause == "wrong_group"
    added = W[:8] + W[8:]
    assert explain(case_of("w:grad", W, halves([added] * 4), {"dp": 2, "tp": 2})).cause == "reduced_again"
    assert explain(case_of("w:grad", W, halves([added / 2] * 4), {"dp": 2, "tp": 2})).cause == "wrong_group"


def test_same_samples_in_another_order() -> None:
    held = [(box, values(2, 16, 24, seed=9)) for box, _ in explained.shards(A, A, 2)]
    assert explain(case_of("a:fwd", A, held, {"dp": 2}, **BATCH)).cause == "same_samples"
