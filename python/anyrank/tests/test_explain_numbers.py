# SPDX-License-Identifier: Apache-2.0
"""Averages over steps, contrastive losses, blocks of constants, and recorded facts that contradict a cause."""

from __future__ import annotations

import types
import typing
import unittest.mock

import numpy as np

from anyrank.explain import explain as engine
from anyrank.explain import facts
from anyrank.explain.causes import Cause
from anyrank.explain.contradictions import contradicted
from anyrank.explain.explain import UNKNOWN, explain
from anyrank.explain.patterns import Pattern
from anyrank.tests.test_explain_steps import SHAPE, Arrays, case_of, cause_of


def drawn(seed: int, *shape: int) -> typing.Any:
    return np.random.default_rng(seed).normal(size=shape or SHAPE)


def test_averages_of_weights() -> None:
    w, new = drawn(1), drawn(1) + 1e-2 * drawn(2)
    reference: Arrays = {"p:init": w, "p:new": new, "mean.p:new": 0.9 * w + 0.1 * new}
    values = {"other_point_of_step": w, "average_of_weights": new, UNKNOWN: w + 1e-2 * drawn(3)}
    for cause, value in values.items():
        assert cause_of("mean.p:new", reference, {**reference, "mean.p:new": value}) == cause
    assert cause_of("mean.p:new", reference, {"mean.p:new": 0.95 * w + 0.05 * new}) == "average_of_weights"


def momentum(value: float) -> facts.Facts:
    return facts.Facts(True, modules={"bn": facts.Module("BatchNorm2d", attributes={"momentum": value, "eps": 1e-5})})


def test_running_statistics() -> None:
    batch = drawn(4, 24)
    reference: Arrays = {"bn.running_var:buffer": 0.9 + 0.1 * batch ** 2}
    other: Arrays = {"bn.running_var:buffer": 0.1 + 0.9 * batch ** 2}
    for facts_of in ((momentum(0.1), momentum(0.9)), (facts.Facts(),) * 2):
        assert cause_of("bn.running_var:buffer", reference, other, facts=facts_of) == "statistics_momentum"
    assert explain(case_of("bn.running_var:buffer", reference, other)).confidence == "likely"
    assert cause_of("bn.running_var:buffer", reference, other, facts=(momentum(0.1),) * 2) != "statistics_momentum"
    assert cause_of("bn.running_var:buffer", reference, {"bn.running_var:buffer": drawn(5, 24) ** 2}) == UNKNOWN


def test_an_optimizer_made_again() -> None:
    w, g = drawn(6), drawn(7) * 1e-2
    reference: Arrays = {"p:init": w, "p:new": w - 1e-3 * drawn(8), "p:grad@2": g}
    reference["p:new@2"] = reference["p:new"] - 1e-3 * drawn(9)
    first = reference["p:new"] - 2e-3 * np.sign(g)
    assert cause_of("p:new@2", reference, {**reference, "p:new@2": first}) == "optimizer_state_lost"
    assert cause_of("p:new@2", reference, {**reference, "p:new@2": first + 1e-3 * drawn(10)}) == UNKNOWN


def test_updates_relative_to_parameters() -> None:
    reference, other = Arrays(), Arrays()
    for i, size in enumerate((1.0, 0.1, 3.0, 0.03)):
        w, step = drawn(i) * size, 1e-2 * drawn(20 + i)
        reference |= {f"p{i}:init": w, f"p{i}:new": w - step * np.sqrt((w ** 2).mean())}
        other |= {f"p{i}:init": w, f"p{i}:new": w - step}
    answer = explain(case_of("p1:new", reference, other))
    assert answer.cause == "update_scaled" and "over the root mean square" in answer.sentence


def test_blocks_of_constants() -> None:
    ones, zeros = np.ones(8), np.zeros(8)
    reference: Arrays = {"p:init": np.concatenate([zeros, ones, zeros, zeros])}
    for value in [zeros, zeros, ones, zeros], [zeros, 2 * ones, ones, zeros]:
        assert cause_of("p:init", reference, {"p:init": np.concatenate(value)}) == "other_constants"
    noisy = np.concatenate([zeros, zeros, ones + drawn(11, 8), zeros])
    assert cause_of("p:init", reference, {"p:init": noisy}) == UNKNOWN


def softmax(logits: typing.Any, targets: typing.Any) -> float:
    each = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), targets]
    return float(each.mean())


def test_contrastive_losses() -> None:
    a, b = (np.float32(drawn(seed, 8, 6)).astype(np.float64) for seed in (12, 13))
    logits, right = 2.0 * a @ b.T, np.arange(8)
    both = [0.5 * (softmax(x, right % n) + softmax(x.T, right % n)) for x, n in ((logits, 8), (logits, 2))]
    own = sum(softmax(logits[i:i + 2, i:i + 2], right[:2]) + softmax(logits[i:i + 2, i:i + 2].T, right[:2])
              for i in (0, 2, 4, 6)) / 8.0
    reference: Arrays = {"a:fwd": a, "b:fwd": b, "scale:fwd": np.array(2.0), "loss:fwd": np.array(both[0])}
    values = {"labels_of_other_samples": both[1], "negatives_left_out": own, UNKNOWN: 1.2345 * both[0]}
    for cause, value in values.items():
        assert cause_of("loss:fwd", reference, {**reference, "loss:fwd": np.array(value)}, mesh={"dp": 4}) == cause


def test_labels_cut_before_they_are_shifted() -> None:
    x, labels = np.float32(drawn(14, 4, 12, 32)).astype(np.float64), np.random.default_rng(15).integers(0, 32, (4, 12))
    each = np.log(np.exp(x).sum(-1)) - np.take_along_axis(x, np.roll(labels, -1, 1)[..., None], 2)[..., 0]
    reference: Arrays = {"input.ids:fwd": labels, "head:fwd": x, "loss:fwd": each[:, :-1].mean()}
    there = np.arange(12) % 6 < 5
    assert cause_of("loss:fwd", reference, {**reference, "loss:fwd": each[:, there].mean()}, mesh={"cp": 2}
                    ) == "labels_shifted"


# --- contradictions ---------------------------------------------------------------------------------------------------


def run(**options: typing.Any) -> facts.Facts:
    group = facts.Group({"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, **options}, ("bn.p",))
    return facts.Facts(True, modules=momentum(0.1).modules, optimizers=(facts.Optimizer("Adam", (group,)),),
                       learning_rates={1: [[options.get("lr", 0.1)]]}, micro_batches=(1,))


def test_what_is_equal_in_both_runs_is_no_cause() -> None:
    differing: dict[str, dict[str, typing.Any]] = {
        "other_learning_rate": {"lr": 0.2}, "other_betas": {"betas": [0.8, 0.99]}, "adam_eps": {"eps": 1e-6},
        "weight_decay": {"weight_decay": 0.0}}
    array: Arrays = {"bn.p:new": drawn(16)}

    def says(cause: str, *runs: facts.Facts, name: str = "bn.p:new", exact: bool = False) -> bool:
        same = {name: array["bn.p:new"]}
        return contradicted(case_of(name, same, same, facts=runs, exact=exact), cause)

    for cause, options in differing.items():
        assert says(cause, run(), run()) and not says(cause, run(), run(**options)), cause
        assert not says(cause, facts.Facts(), run()), cause
    for cause in ("norm_epsilon", "one_micro_batch", "missing_all_reduce"):
        assert says(cause, run(), run()) and not says(cause, facts.Facts(), facts.Facts()), cause
    assert says("rounding", run(), run(), exact=True) and not says("rounding", run(), run())


def test_another_cause_or_a_simpler_map_makes_it_possible_only() -> None:
    case = case_of("p:grad", {"p:grad": drawn(17)}, {"p:grad": drawn(18)})

    def answer(*kinds: str) -> tuple[str, str, tuple[str, ...]]:
        """Of patterns that all fit; a digit is the number of fitted numbers."""
        found = [Pattern(kind[0], case.val, fitted=int(kind[1:])) for kind in kinds]
        module = types.SimpleNamespace(patterns=lambda case: iter(found))
        with unittest.mock.patch.multiple(engine, MODULES=(module,), causes=lambda: causes):
            told = explain(case)
        return told.cause, told.confidence, told.others

    causes = (Cause("a", ("A",), "a", "x", sure=True), Cause("b", ("B",), "b", "y"), Cause("c", ("C",), "c", "x"))
    assert answer("A0") == answer("A0", "B1") == answer("A0", "C0") == answer("A0", "D0") == ("a", "sure", ())
    assert answer("A1", "B1") == ("a", "possible", ("b",))
    assert answer("B1", "D0") == ("b", "possible", ())  # D has no cause
    assert answer("B1") == ("b", "likely", ())
    assert answer("B300") == ("b", "possible", ()) and answer("B384")[0] == UNKNOWN  # of 384 elements


# --- branches ---------------------------------------------------------------------------------------------------------


def test_branches() -> None:
    weight, after, rest = drawn(26, 8, 8), drawn(27, 6, 8), drawn(28, 6, 8)
    through = after @ weight
    reference: Arrays = {"a.weight:init": weight, "b:bwd": after, "a:bwd": through + rest}
    values = {"no_backward": through, "loss_term": through + 4.0 * rest, UNKNOWN: through + drawn(29, 6, 8)}
    for cause, value in values.items():
        assert cause_of("a:bwd", reference, {**reference, "a:bwd": value}) == cause
    alone = {**reference, "a:bwd": through}
    answer = explain(case_of("a:bwd", alone, reference))
    assert (answer.cause, answer.confidence) == ("gradient_of_another_path", "possible")


def test_a_micro_batch_that_was_clipped() -> None:
    weight, back = drawn(30, 4, 8), drawn(31, 8, 6, 4)
    reference: Arrays = {"a.weight:init": weight, "a:bwd": back @ weight, "a.bias:grad": back.sum((0, 1))}
    other = 0.3 * back[:4].sum((0, 1)) + back[4:].sum((0, 1))
    known = {"batch": 8, "micro_batches": 2}
    assert cause_of("a.bias:grad", reference, {**reference, "a.bias:grad": other}, **known) == "micro_batches_weighted"
    assert cause_of("a.bias:grad", reference, {**reference, "a.bias:grad": drawn(32, 4)}, **known) == UNKNOWN


def test_other_tokens_are_targets() -> None:
    back = drawn(33, 4, 12, 6)
    mask: typing.Any = np.zeros((4, 12), bool)
    for i, start in enumerate((1, 3, 2, 5)):
        mask[i, start:start + 5] = True

    def of(counted: typing.Any) -> typing.Any:
        return back * counted[..., None] / counted.sum()

    reference: Arrays = {"head:bwd": of(mask)}
    for counted in (np.roll(mask, 1, 1), mask | (np.arange(12) > 9)):
        assert cause_of("head:bwd", reference, {"head:bwd": of(counted)}) == "target_count"
    others = {"head:bwd": of(np.roll(mask, 1, 1)) * (1.0 + 0.1 * drawn(34, 4, 12, 1))}
    assert cause_of("head:bwd", reference, others) != "target_count"
