# SPDX-License-Identifier: Apache-2.0
"""Explanations of a step: updates, moments, norms, initial values, losses and data, of arrays that are spoiled."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain import facts
from anyrank.explain.dumps import worst_of
from anyrank.explain.explain import UNKNOWN, explain
from anyrank.explain.run import recorded
from anyrank.explain.tensors import Case, Copy, Name, Runs, Tensors

Arrays = dict[str, typing.Any]
SHAPE, RATE, BETAS, EPS, DECAY = (24, 16), 1e-2, (0.9, 0.999), 1e-8, 0.1
WHOLE = (slice(0, SHAPE[0]), slice(0, SHAPE[1]))


def rounded(arrays: Arrays) -> Arrays:
    return {name: np.asarray(array, np.float32 if np.asarray(array).dtype.kind == "f" else np.int64)
            for name, array in arrays.items()}


def case_of(name: str, reference: Arrays, other: Arrays, copies: typing.Any = None, **known: typing.Any) -> Case:
    """other: the whole tensor, unless there are copies: (box, values) of each rank."""
    a, b = rounded(reference), rounded(other)
    whole = tuple(slice(0, n) for n in a[name].shape)
    held = tuple(Copy(rank, (box,), (np.asarray(values, np.float32),)) for rank, (box, values) in enumerate(
        copies if copies is not None else [(whole, b[name])]))
    same = {key for key in a if key != name and key in b and np.array_equal(a[key], b[key])}
    runs = Runs(a, b, same=same, **known)
    return Case(Name.of(name), a[name], worst_of(a[name], held), held, runs)


def cause_of(*given: typing.Any, **known: typing.Any) -> str:
    return explain(case_of(*given, **known)).cause


# --- updates ----------------------------------------------------------------------------------------------------------


def adam(rate: float = RATE, betas: tuple[float, float] = BETAS, eps: float = EPS, decay: float = DECAY,
         scale: float = 1.0, t: int = 1, gradient: typing.Any = None, in_gradient: float = 0.0) -> Arrays:
    """A first step of AdamW, from gradients times `scale`, corrected as step t."""
    random = np.random.default_rng(1)
    w, g = random.normal(size=SHAPE), random.normal(size=SHAPE) * 1e-2
    used = scale * (g if gradient is None else gradient(g)) + in_gradient * w
    m, v = (1.0 - betas[0]) * used, (1.0 - betas[1]) * used ** 2
    root = np.sqrt(v / (1.0 - betas[1] ** t)) + eps
    new = w - rate * (m / (1.0 - betas[0] ** t) / root + decay * w)
    return {"p:init": w, "p:grad": g, "p:new": new, "p:m": m, "p:v": v}


UPDATES: list[tuple[str, str, Arrays, Arrays]] = [
    ("no_update", "p:new", adam(), {**adam(), "p:new": adam()["p:init"]}),
    ("other_learning_rate", "p:new", adam(), adam(rate=3 * RATE)),
    ("update_sign", "p:new", adam(decay=0.0), adam(rate=-RATE, decay=0.0)),
    ("adam_step_counter", "p:new", adam(), adam(t=2)),
    ("weight_decay", "p:new", adam(), adam(decay=0.0)),
    ("adam_eps", "p:new", adam(), adam(eps=1e-3)),
    ("clip_factor", "p:m", adam(), adam(scale=0.3)),
    ("loss_scale", "p:m", adam(), adam(scale=1024.0)),
    ("update_sign", "p:m", adam(), adam(scale=-1.0)),
    ("other_betas", "p:m", adam(), adam(betas=(0.99, 0.99))),
    ("other_betas", "p:v", adam(), adam(betas=(0.9, 0.95))),
    ("weight_decay", "p:m", adam(), adam(in_gradient=0.01)),
    ("clipped", "p:m", adam(), adam(gradient=lambda g: np.clip(g, -5e-3, 5e-3))),
    ("clip_factor", "p:m", adam(), adam(scale=0.0)),
    (UNKNOWN, "p:m", adam(), adam(gradient=lambda g: np.random.default_rng(5).normal(size=SHAPE))),
    (UNKNOWN, "p:new", adam(), {**adam(), "p:new": np.random.default_rng(6).normal(size=SHAPE)}),
]


def test_updates() -> None:
    for cause, name, reference, other in UPDATES:
        assert cause_of(name, reference, other) == cause


def test_elements_without_a_gradient_are_not_moved() -> None:
    def case(size: float, moment: float = 0.0, decay: float = 0.0, **more: typing.Any) -> Case:
        """Six elements have a gradient of this size in the reference, and of exactly 0 in the other run."""
        few = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 64 == 3
        runs = [adam(decay=0.0, gradient=lambda g, own=own: np.where(few, own * np.sign(g), g)) for own in (size, 0.0)]
        for run, own in zip(runs, (size, 0.0)):
            run["p:grad"] = np.where(few, own, run["p:grad"])
        runs[1]["p:m"] = np.where(few, moment, runs[1]["p:m"])
        runs[1]["p:new"] = np.where(few, runs[1]["p:init"], runs[0]["p:new"])
        groups = (facts.Group({"weight_decay": decay}, ("p",)),)
        recorded = facts.Facts(True, optimizers=(facts.Optimizer("AdamW", groups),),
                               learning_rates={1: [[RATE]]})
        made = case_of("p:new", *runs, facts=(recorded, recorded))
        return dataclasses.replace(made, **more)

    answer = explain(case(1e-9))
    assert (answer.cause, "6 elements have a gradient of exactly 0" in answer.sentence) == ("rounding", True)
    assert explain(case(1e-9, decay=1e-9)).cause == "rounding"  # a decay that the weight's rounding swallows
    assert explain(case(1e-4, unit=2.0 ** -8)).cause == "rounding"
    other = explain(case(1e-3))  # a gradient that is none of rounding
    assert other.cause == "no_gradient" and "0.001 at most in the reference" in other.sentence
    for moved in (case(1e-9, moment=1e-5), case(1e-9, decay=0.1)):
        assert explain(moved).cause == "no_update"
    held = adam(decay=0.0)  # of all elements
    still = {**held, "p:new": held["p:init"]}
    assert cause_of("p:new", held, still) == "no_update"
    zeros = {name: 0.0 * held["p:grad"] for name in ("p:grad", "p:m", "p:v")}
    for size, cause in ((1e-9, "rounding"), (1e-2, "no_gradient")):
        noise = {"p:grad": size * np.sign(held["p:grad"]), "q:grad": held["p:grad"]}
        assert cause_of("p:new", {**held, **noise}, {**still, **noise, **zeros}) == cause


def test_a_moment_with_a_history() -> None:
    first, g = adam(), 1e-2 * np.random.default_rng(9).normal(size=SHAPE)
    m = first["p:m"]
    reference = {"p:init": first["p:init"], "p:m": m, "p:v": first["p:v"], "p:grad@2": g, "p:grad": first["p:grad"],
                 "p:v@2": BETAS[1] * first["p:v"] + (1.0 - BETAS[1]) * g ** 2,
                 "p:m@2": BETAS[0] * m + (1.0 - BETAS[0]) * g}
    lost = {**reference, "p:m@2": (1.0 - BETAS[0]) * g}
    stale = {**reference, "p:m@2": BETAS[0] * m + (1.0 - BETAS[0]) * first["p:grad"]}
    assert cause_of("p:m@2", reference, lost) == "optimizer_state_lost"
    assert cause_of("p:m@2", reference, stale) == "stale_value"
    assert cause_of("p:grad@2", reference, {**reference, "p:grad@2": first["p:grad"]}) == "stale_value"


def test_updates_of_ranks() -> None:
    right, before = adam()["p:new"], adam()["p:init"]
    halves = np.array(before), np.array(before)
    halves[0][:12], halves[1][12:] = right[:12], right[12:]
    of_copies = {"no_update": [(WHOLE, halves[0]), (WHOLE, halves[1])],
                 "decay_of_ranks_apart": [(WHOLE, right), (WHOLE, adam(decay=0.0)["p:new"])],
                 "update_scaled": [(WHOLE, right), (WHOLE, adam(rate=2 * RATE)["p:new"])],
                 "adam_step_counter": [(WHOLE, right), (WHOLE, adam(t=2)["p:new"])]}
    assert cause_of("p:new", adam(), adam(), [(WHOLE, right), (WHOLE, before)], mesh={"dp": 2}) == "no_update"
    for cause, copies in of_copies.items():
        assert cause_of("p:new", adam(), adam(), copies, mesh={"dp": 2}) == cause


def test_second_moments_of_parts() -> None:
    w, g = adam()["p:init"], adam()["p:grad"]

    def step(parts: int, beside: bool, axis: int = 0) -> Arrays:
        new = []
        for v, x in zip(np.split(w, parts, axis), np.split(g, parts, axis)):
            rows, columns = (x ** 2).mean(1, keepdims=True), (x ** 2).mean(0, keepdims=True)
            of_all = [(g ** 2).mean(1, keepdims=True), (g ** 2).mean(0, keepdims=True)]
            mean = rows.mean() if beside else (g ** 2).mean()
            new.append(v - RATE * x / np.sqrt((rows if axis == 0 else of_all[0][:len(x)]) * columns / mean))
        return {"p:init": w, "p:grad": g, "p:new": np.concatenate(new, axis)}

    for beside in (False, True):
        whole, parts = step(1, False)["p:new"], step(2, beside)["p:new"]
        boxes = [(slice(0, 12), WHOLE[1]), (slice(12, 24), WHOLE[1])]
        assert cause_of("p:new", step(1, False), step(2, beside), [(box, parts[box]) for box in boxes],
                        mesh={"dp": 2}) == "second_moment_by_parts"
        other = whole + RATE * np.random.default_rng(7).normal(size=SHAPE)
        assert cause_of("p:new", step(1, False), step(1, False), [(box, other[box]) for box in boxes],
                        mesh={"dp": 2}) == UNKNOWN


def test_a_step_that_a_rank_leaves_out() -> None:
    copies = [(WHOLE, adam()["p:init"]), (WHOLE, adam()["p:new"])]
    for gradient, expected in ((np.inf, "overflow_of_rank"), (1.0, "replicas_apart")):
        still = {**adam(), "p:new": adam()["p:init"], "q:grad": np.array([1.0, gradient])}
        case = case_of("p:new", still, still, copies, mesh={"tp": 2})
        other = Tensors({"q:grad": np.array([1.0, gradient])})
        assert explain(dataclasses.replace(case, runs=dataclasses.replace(case.runs, other=other))).cause == expected


def test_a_step_of_other_weights() -> None:
    old, random = adam(), np.random.default_rng(8)
    stale = {**old, "p:new": random.normal(size=SHAPE)}
    later = {**stale, "p:new@2": stale["p:new"] + RATE * random.normal(size=SHAPE)}
    assert cause_of("p:new", old, later) == "stale_weights_updated"
    assert cause_of("p:new", old, {**later, "p:new@2": random.normal(size=SHAPE)}) == UNKNOWN


def test_updates_by_the_shape() -> None:
    random, shapes = np.random.default_rng(4), {"p": (24, 16), "q": (32, 8), "r": (20, 10), "s": (8, 16)}
    w, u = ({name: random.normal(size=shape) for name, shape in shapes.items()} for _ in range(2))

    def step(by: typing.Callable[[int, int], float]) -> Arrays:
        return {**{f"{name}:init": w[name] for name in w},
                **{f"{name}:new": w[name] - RATE * by(*shapes[name]) * u[name] for name in w}}

    reference = step(lambda rows, columns: max(1.0, rows / columns) ** 0.5)
    assert cause_of("p:new", reference, step(lambda rows, columns: 1.0)) == "muon_scale"
    assert cause_of("p:new", reference, step(lambda rows, columns: rows / 7.0)) == "update_scaled"


def test_sgd_without_decay() -> None:
    w, g = adam()["p:init"], adam()["p:grad"]
    reference = {"p:init": w, "p:grad": g, "p:new": w - RATE * (g + DECAY * w)}
    assert cause_of("p:new", reference, {**reference, "p:new": w - RATE * g}) == "weight_decay"
    assert cause_of("p:new", reference, {**reference, "p:new": w - 1.9 * RATE * (g + DECAY * w)}) == "nesterov"
    assert cause_of("p:new", reference, {**reference, "p:new": w - 1.7 * RATE * (g + DECAY * w)}) == "update_scaled"


def test_recorded_differences() -> None:
    def run(rate: float, decay: float) -> facts.Facts:
        group = facts.Group({"weight_decay": decay, "lr": rate}, ("p",))
        return facts.Facts(True, optimizers=(facts.Optimizer("AdamW", (group,)),), learning_rates={1: [[rate]]})

    runs = Runs(facts=(run(0.1, 0.0), run(0.2, 0.0)))
    found = list(recorded(runs, Name.of("p:new")))
    assert [(answer.cause, answer.confidence) for answer in found] == [("other_learning_rate", "sure")]
    assert not list(recorded(runs, Name.of("p:fwd")))
    stepped = [dataclasses.replace(one, steps=(3,), micro_batches=(2,), schedulers=(facts.Optimizer(
        "LambdaLR", (facts.Group({"last_epoch": last}, ()),)),)) for one, last in zip(runs.facts, (3, 6))]
    answer = next(recorded(dataclasses.replace(runs, facts=(stepped[0], stepped[1])), Name.of("p:new")))
    assert "at step 3 in the reference and at 6 in the other run" in answer.sentence
    assert "in each of 2 micro-batches" in answer.sentence
    runs = dataclasses.replace(runs, facts=(run(0.1, 0.0), run(0.1, 0.1)))
    assert [answer.cause for answer in recorded(runs, Name.of("p:new"))] == ["weight_decay"]
    sides = [facts.Facts(True, modules={"norm": facts.Module("LayerNorm", attributes={"eps": eps})})
             for eps in (1e-5, 1e-6)]
    found = list(recorded(Runs(facts=(sides[0], sides[1])), Name.of("norm:fwd")))
    assert [answer.cause for answer in found] == ["other_configuration"]


# --- norms and initial values -----------------------------------------------------------------------------------------


def test_norms() -> None:
    random = np.random.default_rng(2)
    gradients = {f"layers.{i}.{name}:grad": random.normal(size=shape) * size for i in range(2)
                 for name, shape, size in (("up.weight", (8, 8), 1.0), ("up.bias", (8,), 1.3),
                                           ("norm.weight", (8,), 0.7))}
    squares = {name: float((np.float32(array).astype(np.float64) ** 2).sum()) for name, array in gradients.items()}
    total = sum(squares.values())
    biases = sum(square for name, square in squares.items() if "bias" in name)
    values = (("norm_other_order", total), ("norm_leaves_out", (total - biases) ** 0.5),
              ("norm_of_own_shards", (total / 2) ** 0.5),
              ("norm_counts_twice", (total + squares["layers.1.up.weight:grad"]) ** 0.5),
              ("norm_other_order", sum(float(np.abs(np.float32(array)).sum()) for array in gradients.values())),
              (UNKNOWN, 1.2345 * total ** 0.5))
    reference = {**gradients, "norm:clip": np.array(total ** 0.5)}
    for cause, value in values:
        assert cause_of("norm:clip", reference, {**gradients, "norm:clip": np.array(value)}, mesh={"dp": 2}) == cause
    for shared in (0.0, biases):
        of_ranks = [((), (0.3 * (total - shared) + shared) ** 0.5), ((), (0.7 * (total - shared) + shared) ** 0.5)]
        assert cause_of("norm:clip", reference, reference, of_ranks, mesh={"tp": 2}) == "norm_of_own_shards"
    assert cause_of("norm:clip", reference, reference, [((), 0.5), ((), 0.6)], mesh={"tp": 2}) == UNKNOWN


def test_initial_values() -> None:
    def drawn(seed: int, size: float = 1.0) -> typing.Any:
        return np.random.default_rng(seed).normal(size=SHAPE) * size

    reference = {"p:init": drawn(1), "q:init": drawn(2)}
    boxes = [(slice(0, 12), WHOLE[1]), (slice(12, 24), WHOLE[1])]
    draw = drawn(3)
    assert cause_of("p:init", reference, {**reference, "p:init": draw}) == "other_initial_values"
    assert cause_of("p:init", reference, {**reference, "p:init": drawn(3, 0.1)}) == "weight_not_loaded"
    assert cause_of("p:init", reference, {**reference, "p:init": reference["q:init"]}) == "other_tensor"  # no draw
    assert cause_of("p:init", reference, reference, [(box, draw[:12]) for box in boxes], mesh={"tp": 2}
                    ) == "shards_seeded_alike"
    assert cause_of("p:init", reference, reference, [(WHOLE, reference["p:init"]), (WHOLE, draw)], mesh={"dp": 2}
                    ) == "replicas_apart"


# --- the loss ---------------------------------------------------------------------------------------------------------


def entropy(x: typing.Any, labels: typing.Any, by: int = 1) -> typing.Any:
    x, y = (x[:, :-by], labels[:, by:]) if by else (x, labels)
    counted = y >= 0
    taken = np.take_along_axis(x, np.where(counted, y, 0)[..., None], 2)[..., 0]
    return np.where(counted, np.log(np.exp(x).sum(-1)) - taken, 0.0), counted


def test_losses() -> None:
    random = np.random.default_rng(3)
    x, labels = random.normal(size=(4, 10, 32)), random.integers(0, 32, (4, 10))
    labels[0, 2:8] = labels[3, 7:] = -100
    x[:2] *= 2.0
    x = np.float32(x).astype(np.float64)
    each, counted = entropy(x, labels)
    ranks = [each[:2].sum() / counted[:2].sum(), each[2:].sum() / counted[2:].sum()]
    mean, lse = each.sum() / counted.sum(), np.log(np.exp(x[:, :-1]).sum(-1))
    smooth = ((lse - x[:, :-1].mean(-1)) * counted).sum() / counted.sum()
    twice, there = entropy(x, labels, 2)
    values = {"mean_of_means": sum(ranks) / 2, "one_micro_batch": ranks[0], "sum_for_mean": each.sum(),
              "labels_shifted": twice.sum() / there.sum(), "target_count": each.sum() / counted.size,
              "label_smoothing": 0.9 * mean + 0.1 * smooth,
              "loss_term": mean + 1e-3 * (lse ** 2 * counted).sum() / counted.sum(),
              "vocabulary_parallel_loss": mean + np.log(2.0), UNKNOWN: 1.2345 * mean}
    reference = {"input.ids:fwd": labels, "head:fwd": x, "loss:fwd": np.array(mean)}
    micro = {"mean_of_means", "one_micro_batch"}
    for cause, value in values.items():
        other = {**reference, "loss:fwd": np.array(value)}
        assert cause_of("loss:fwd", reference, other, mesh={"tp": 2}, micro_batches=2 if cause in micro else 1) == cause


def test_losses_over_ranks() -> None:
    random = np.random.default_rng(9)
    x, labels = random.normal(size=(4, 12, 32)), random.integers(0, 32, (4, 12))
    x = np.float32(x).astype(np.float64)
    lse, moved = np.log(np.exp(x[:, :-1]).sum(-1)), labels[:, 1:]
    nearest = sum(np.take_along_axis(x[:, :-1], np.clip(moved, low, low + 15)[..., None], 2)[..., 0] for low in (0, 16))
    blocks = np.concatenate([moved, np.full((4, 1), -100)], axis=1).reshape(4, 4, 3)[:, [0, 3, 1, 2]].reshape(4, 12)
    there = blocks >= 0
    each = np.log(np.exp(x).sum(-1)) - np.take_along_axis(x, np.maximum(blocks, 0)[..., None], 2)[..., 0]
    reference = {"input.ids:fwd": labels, "head:fwd": x, "loss:fwd": np.array(entropy(x, labels)[0].mean())}
    values = {"vocabulary_parallel_loss": (lse - nearest).mean(), "zigzag_order": each[there].mean()}
    for cause, value in values.items():
        assert cause_of("loss:fwd", reference, {**reference, "loss:fwd": np.array(value)}, mesh={"tp": 2}) == cause


def test_labels_from_gradients() -> None:
    random = np.random.default_rng(4)
    h, w, labels = random.normal(size=(4, 8, 12)), random.normal(size=(20, 12)), random.integers(0, 20, (4, 8))
    x = np.float32(h @ w.T).astype(np.float64)

    def run(counted: typing.Any, labels: typing.Any) -> Arrays:
        p = np.exp(x - np.log(np.exp(x).sum(-1))[..., None])
        gradient = (p - np.eye(20)[labels]) * counted[..., None] / counted.sum()
        each = -np.log(np.take_along_axis(p, labels[..., None], 2)[..., 0])
        return {"head.weight:init": w, "head:fwd": x, "loss:fwd": np.array((each * counted).sum() / counted.sum()),
                "head:bwd": gradient @ w}

    counted: typing.Any = np.ones((4, 8), bool)
    counted[:, :3] = False
    reference = run(counted, labels)
    assert cause_of("loss:fwd", reference, run(np.ones((4, 8), bool), labels)) == "target_count"
    assert cause_of("loss:fwd", reference, run(counted, np.roll(labels, -1, 1))) == "labels_shifted"
    assert cause_of("loss:fwd", reference, run(counted, (7 * labels + 1) % 20)) == "other_labels"


# --- data -------------------------------------------------------------------------------------------------------------


def test_samples() -> None:
    ids = np.random.default_rng(5).integers(0, 99, (8, 12))
    others = np.random.default_rng(6).integers(0, 99, (8, 12))
    causes = {"same_samples": np.concatenate([ids[:4], ids[:4]]), "batch_order": ids[[3, 1, 2, 0, 4, 5, 6, 7]],
              "slices_repeated": ids[[0, 1, 2, 3, 4, 5, 6, 1]],
              "samples_dealt_out": ids[[0, 4, 1, 5, 2, 6, 3, 7]], "ids_off_by_one": ids + 1,
              "batch_of_other_step": others,
              "other_samples": np.random.default_rng(7).integers(0, 99, (8, 12))}
    reference = {"input.0:fwd@2": ids, "input.0:fwd": others}
    for cause, value in causes.items():
        assert cause_of("input.0:fwd@2", reference, {**reference, "input.0:fwd@2": value}, mesh={"dp": 2}) == cause


def test_gradients() -> None:
    a, b = adam()["p:grad"], np.random.default_rng(8).normal(size=SHAPE)
    assert cause_of("p:grad", {"p:grad": a + b}, {"p:grad": a, "q:grad": b}) == "tied_weight"
    assert cause_of("p:grad", {"p:grad": a}, {"p:grad": np.zeros(SHAPE)}) == "no_gradient"


# --- Muon -------------------------------------------------------------------------------------------------------------


def orthogonal(u: typing.Any, norm: float = 0.0) -> typing.Any:
    x = (u.T if len(u) > len(u.T) else u) / (norm or np.linalg.norm(u))
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return x.T if len(u) > len(u.T) else x


def muon(parts: typing.Any, momentum: str = "nesterov") -> Arrays:
    """A second step: `parts` makes orthogonal what it is given."""
    random = np.random.default_rng(3)
    w, kept, g = (random.normal(size=SHAPE) for _ in range(3))
    m = 0.9 * kept + 0.1 * g
    u = {"nesterov": 0.9 * m + 0.1 * g, "plain": m}[momentum]
    return {"p:init": w, "p:new": w, "p:m": kept, "p:grad@2": g, "p:m@2": m,
            "p:new@2": w - RATE * (parts(u) + DECAY * w)}


def test_muon() -> None:
    def halves(u: typing.Any) -> typing.Any:
        return np.concatenate([orthogonal(u[:12]), orthogonal(u[12:])])

    def norm(u: typing.Any) -> float:
        return float(np.linalg.norm(u))

    def by_own_norm(u: typing.Any) -> typing.Any:
        return np.concatenate([orthogonal(u, norm(u[:12]))[:12], orthogonal(u, norm(u[12:]))[12:]])

    whole = muon(orthogonal)
    for cause, reference, other in (("muon_by_parts", whole, muon(halves)), ("muon_by_parts", muon(halves), whole),
                                    ("muon_scale", whole, muon(by_own_norm)),
                                    ("muon_input", whole, muon(orthogonal, "plain")),
                                    ("update_misplaced", whole, muon(lambda u: np.roll(orthogonal(u), 12, 0))),
                                    (UNKNOWN, whole, muon(lambda u: u))):
        assert cause_of("p:new@2", reference, other, mesh={"tp": 2}) == cause
    vector = {name: array[:, 0] for name, array in adam().items()}
    steepest = {**vector, "p:new": vector["p:init"] - RATE * vector["p:grad"]}
    assert cause_of("p:new", vector, steepest) == "muon_input"
