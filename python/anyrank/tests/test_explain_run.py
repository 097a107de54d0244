# SPDX-License-Identifier: Apache-2.0
"""The finding of a run: what one run lacks comes before what follows from it, and others are asked that say more."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import typing
import unittest.mock

import numpy as np

from anyrank.dump import Box, Part, Tensor
from anyrank.explain import dumps
from anyrank.explain.run import Finding, explain_run
from anyrank.explain.tensors import Array
from anyrank.tests.test_explain_steps import Arrays, adam, rounded


class Held(dict[str, typing.Any]):
    """A dump in memory, of no ranks."""

    mesh: typing.ClassVar[dict[str, int]] = {}

    def __init__(self, arrays: Arrays, path: pathlib.Path) -> None:
        super().__init__(rounded(arrays))
        self.path = str(path)

    def align(self, reference: Held) -> None:
        pass

    def metadata(self, key: str) -> str | None:
        return None

    def tensor(self, name: str) -> Tensor:
        shape = self[name].shape
        box = Box((0,) * len(shape), shape)
        return Tensor(name, "F32", shape, None, (Part(None, "", (box,), 0, 1, False),))

    def part(self, name: str, i: int) -> typing.Any:
        return [np.asarray(self[name])]


def finding(folder: pathlib.Path, first: str, reference: Arrays, other: Arrays) -> tuple[str, str, str]:
    """The cause, its confidence and the tensor that said so, as of a report by a tolerance of 1e-5."""
    a, b = Held(reference, folder), Held(other, folder)
    worst = [{"tensor": name, "allowed": 1e-5} for name in a if name in b and (
        a[name].shape != b[name].shape or np.abs(a[name] - b[name]).max() > 1e-5)]
    report = {"first": {"tensor": first}, "worst": worst, "missing": [name for name in a if name not in b],
              "unexpected": [name for name in b if name not in a],
              "lost_gradients": [name for name in {*a} ^ {*b} if name.endswith(":grad")]}
    found = explain_run(typing.cast(typing.Any, a), typing.cast(typing.Any, b), report)
    return found.answer.cause, found.answer.confidence, found.asked


class OfRanks(Held):
    """A dump of two ranks: of each tensor two copies, or one that both have."""

    mesh: typing.ClassVar[dict[str, int]] = {"tp": 2}

    def __init__(self, arrays: dict[str, typing.Any], path: pathlib.Path) -> None:
        super().__init__({name: held[0] if isinstance(held, list) else held for name, held in arrays.items()}, path)
        self.held = {name: held if isinstance(held, list) else [held] * 2 for name, held in arrays.items()}

    def tensor(self, name: str) -> Tensor:
        whole = super().tensor(name)
        return dataclasses.replace(whole, parts=tuple(dataclasses.replace(whole.parts[0], rank=r) for r in range(2)))

    def part(self, name: str, i: int) -> typing.Any:
        return [np.asarray(self.held[name][i], np.float32)]


def of_ranks(folder: pathlib.Path, reference: Arrays, other: dict[str, typing.Any], differ: list[str]) -> Finding:
    report = {"first": {"tensor": differ[0]}, "worst": [{"tensor": name, "allowed": 1e-5} for name in differ]}
    a, b = Held(reference, folder), OfRanks(other, folder)
    return explain_run(typing.cast(typing.Any, a), typing.cast(typing.Any, b), report)


def test_ranks_with_parts_of_a_sum(tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(2)
    w, x, dy = (random.normal(size=shape) for shape in ((6, 8), (20, 8), (20, 6)))
    own = dy * (np.arange(6) < 4) + random.normal(size=dy.shape) * (np.arange(6) >= 4)  # of the last two, a summand
    dys = [own, np.where(np.arange(6) < 4, dy, dy - own)]
    reference = {"l.weight:init": w, "x:fwd": x, "l:bwd": dy @ w, "l.weight:grad": dy.T @ x}
    other = {**reference, "l:bwd": [d @ w for d in dys], "l.weight:grad": [d.T @ x for d in dys]}
    found = of_ranks(tmp_path, reference, other, ["l:bwd", "l.weight:grad"])
    assert (found.answer.cause, found.asked) == ("missing_all_reduce", "l.weight:grad")


def test_copies_that_have_samples_of_their_own(tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(3)
    x, a, b = random.normal(size=(4, 8)), random.normal(size=(6, 8)), random.normal(size=(6, 8))
    reference = {"x:fwd": x, "w:grad": (a + b) / 2}
    found = of_ranks(tmp_path, reference, {"x:fwd": [x[:2], x[2:]], "w:grad": [a, b]}, ["x:fwd", "w:grad"])
    assert (found.answer.cause, found.asked) == ("missing_average", "w:grad")
    found = of_ranks(tmp_path, reference, {"x:fwd": [x[:2], x[:2]], "w:grad": [a, b]}, ["x:fwd", "w:grad"])
    assert found.answer.cause == "unknown"


def test_gradients_of_one_run_alone(tmp_path: pathlib.Path) -> None:
    whole = {**adam(), "q:grad": np.ones(4), "q:init": np.ones(4), "norm:clip": np.array(2.0)}
    less = {name: array for name, array in whole.items() if name != "q:grad"} | {"norm:clip": np.array(1.0)}
    assert finding(tmp_path, "norm:clip", whole, less)[:2] == ("no_gradient", "sure")
    assert finding(tmp_path, "norm:clip", less, whole)[:2] == ("frozen_trained", "sure")
    forward = {**whole, "a:fwd": np.arange(6.0)}  # before the backward pass: not from its gradients
    cause = finding(tmp_path, "a:fwd", forward, {**less, "a:fwd": np.array([0.0, 1.0, 7.0, 3.0, 4.5, 5.0])})[0]
    assert cause == "unknown"


def test_what_a_module_reads_is_asked(tmp_path: pathlib.Path) -> None:
    read, w = np.random.default_rng(1).standard_normal((6, 40)), np.random.default_rng(2).standard_normal((3, 40))
    drop = np.random.default_rng(3).random((6, 40)) < 0.2
    reads = [{"m.in:fwd": x} for x in (read, np.where(drop, 0.0, read))]
    given = [{"m.weight:init": w, "m:fwd": x["m.in:fwd"] @ w.T} for x in reads]
    assert finding(tmp_path, "m:fwd", *given)[2] == ""
    sides = iter(reads)
    with unittest.mock.patch.object(dumps, "inputs_of", lambda dump: Held(next(sides), tmp_path)):
        cause, _, asked = finding(tmp_path, "m:fwd", *given)
    assert (cause, asked) == ("dropout_without_scale", "m.in:fwd")


def test_moments_are_asked(tmp_path: pathlib.Path) -> None:
    spoiled = adam(scale=0.3, eps=1e-3)
    assert finding(tmp_path, "p:new", adam(eps=1e-3), spoiled) == ("clip_factor", "possible", "p:m")


def in_shape(folder: pathlib.Path, name: str, reference: typing.Any, other: typing.Any,
             mesh: dict[str, int]) -> Finding:
    a, b = Held({name: reference}, folder), Held({name: other}, folder)
    b.__class__ = type("OfMesh", (Held,), {"mesh": mesh})
    row = {"tensor": name, "state": "shape"}
    return explain_run(typing.cast(typing.Any, a), typing.cast(typing.Any, b), {"first": row, "worst": [row]})


def test_a_whole_batch_on_each_rank(tmp_path: pathlib.Path) -> None:
    ids = np.random.default_rng(3).integers(0, 90, (8, 5))
    by_micro_batch = np.concatenate([ids[:4], ids[:4], ids[4:], ids[4:]])
    for name in ("input.0:fwd", "tok:fwd", "tok:bwd"):
        for held, mesh in ((np.tile(ids, (2, 1)), {}), (np.tile(ids, (2, 1)), {"dp": 2}), (by_micro_batch, {"dp": 2}),
                           (by_micro_batch, {"fsdp": 2}), (np.tile(ids, (4, 1)), {"dp_replicate": 2, "dp_shard": 2})):
            answer = in_shape(tmp_path, name, ids, held, mesh).answer
            assert (answer.cause, answer.confidence) == ("same_samples", "sure"), (name, mesh)
            assert answer.sentence.startswith(
                f"{name[:-4]} has {len(held)} rows on {len(held) // 8} ranks and 8 on one: each rank got the whole "
                "batch; under data parallelism"), answer.sentence
            assert "`batch.chunk(world)[rank]`" in answer.sentence
    (tmp_path / "model.json").write_text(json.dumps({"format": "anyrank model", "version": 1, "world": 2,
                                                     "wrapper": "DistributedDataParallel"}))
    assert "8 on the reference's 2: each rank got the whole batch; under DDP each" in in_shape(
        tmp_path, "tok:fwd", ids, by_micro_batch, {"dp": 2}).answer.sentence


def test_rows_that_are_there_twice_for_another_reason(tmp_path: pathlib.Path) -> None:
    ids = np.random.default_rng(3).integers(0, 90, (8, 5))
    twice = np.concatenate([ids[:4], ids[:4], ids[4:], ids[4:]])
    for name, held, mesh in (("tok:fwd", twice, {"tp": 2}), ("w:grad", twice, {"dp": 2}), ("tok:fwd", twice, {"dp": 4}),
                             ("tok:fwd", twice[::-1], {"dp": 2}),
                             ("tok:fwd", np.concatenate([ids, ids[::-1]]), {"dp": 2})):
        assert in_shape(tmp_path, name, ids, held, mesh).answer.cause != "same_samples", (name, mesh)


def test_copies_of_heads_are_spoken_of_where_ranks_share_out_tensors(tmp_path: pathlib.Path) -> None:
    w = np.random.default_rng(4).normal(size=(8, 5))
    twice, other = np.repeat(w.reshape(2, 4, 5), 2, 0).reshape(16, 5), np.random.default_rng(5).normal(size=(16, 5))
    unknown = in_shape(tmp_path, "h.0.k_proj.weight:init", w, twice, {}).answer.sentence  # files of a layout unknown
    assert "KV heads copied" in unknown
    (tmp_path / "model.json").write_text('{"format": "anyrank model", "version": 1}')
    for mesh, spoken in (({"tp": 4}, True), ({"model": 2}, True), ({"dp": 2}, False), ({}, False),
                         ({"dp": 2, "pp": 2}, False), ({"fsdp": 2, "cp": 2}, False), ({"dp": 2, "tp": 4}, True)):
        for held in (twice, other):
            said = in_shape(tmp_path, "h.0.k_proj.weight:init", w, held, mesh).answer.sentence
            assert ("KV heads" in said, "capture's spec" in said) == (spoken, spoken and held is twice), (mesh, said)


def test_the_number_of_steps_comes_first(tmp_path: pathlib.Path) -> None:
    steps = {"steps:count": np.array(2), "a:fwd": np.ones(4)}
    assert finding(tmp_path, "steps:count", steps, {**steps, "steps:count": np.array(4)})[:2] == (
        "number_of_steps", "sure")


def test_a_loss_whose_backward_pass_is_right(tmp_path: pathlib.Path) -> None:
    right = {"loss:fwd": np.array(1.0), "a:bwd": np.arange(6.0), "a.weight:grad": np.arange(12.0)}
    of_weights = {**right, "loss:fwd": np.array(1.5), "a.weight:grad": right["a.weight:grad"] ** 2}
    assert finding(tmp_path, "loss:fwd", right, of_weights)[0] == "loss_term"
    elsewhere = {**of_weights, "a:bwd": np.arange(6.0) ** 2}
    assert finding(tmp_path, "loss:fwd", right, elsewhere)[0] == "unknown"


def test_vectors_are_asked_how_gradients_are_added_up(tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(1)
    back, weights = random.normal(size=(4, 6, 8)), np.array([1.0, 2.0, 1.0, 1.0])[:, None, None]
    reference = {"ids:fwd": np.ones((4, 6)), "a:bwd": back, "a.weight:grad": random.normal(size=(8, 5)),
                 "b.bias:grad": back.sum((0, 1))}
    other = {**reference, "a.weight:grad": random.normal(size=(8, 5)), "b.bias:grad": (weights * back).sum((0, 1))}
    assert finding(tmp_path, "a.weight:grad", reference, other) == ("counted_twice", "possible", "b.bias:grad")
    elsewhere = {**other, "a:bwd": random.normal(size=(4, 6, 8))}  # the gradients follow from this one
    assert finding(tmp_path, "a.weight:grad", reference, elsewhere)[0] == "unknown"


def test_a_gradient_that_rounding_leaves_of_zero_is_no_lost_one(tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(5)
    w, k = random.normal(size=(40, 30)), random.normal(size=40)

    def cause_of(reference: Arrays, other: Arrays) -> tuple[str, str]:
        report = {"first": {"tensor": "k.bias:grad"}, "worst": [
            {"tensor": name, "state": "different"} for name in reference if (reference[name] != other[name]).any()]}
        a, b = Held(reference, tmp_path), Held(other, tmp_path)
        found = explain_run(typing.cast(typing.Any, a), typing.cast(typing.Any, b), report)
        return found.tensor, found.answer.cause

    for size, zeros in ((1e-9, "rounding"), (1e-3, "no_gradient")):
        assert cause_of({"k.bias:grad": size * k, "w:grad": w}, {"k.bias:grad": 0.0 * k, "w:grad": w}) == (
            "k.bias:grad", zeros)
    assert cause_of({"k.bias:grad": 1e-9 * k, "w:grad": w}, {"k.bias:grad": k, "w:grad": w})[1] != "rounding"
    assert cause_of({"k.bias:grad": 1e-9 * k, "w:grad": w}, {"k.bias:grad": 0.0 * k, "w:grad": 2.0 * w})[0] == "w:grad"


def test_activations_in_another_shape_have_the_reference_in_that_one() -> None:
    whole = np.random.default_rng(6).normal(size=(2, 3, 4, 5))
    rows, heads_first = whole.reshape(2, 3, 20), whole.swapaxes(1, 2)
    square = np.random.default_rng(7).normal(size=(2, 4, 4, 5))  # as many heads as tokens
    alike = (rows, whole), (rows, heads_first), (rows, rows.reshape(6, 20)), (
        square.reshape(2, 4, 20), square), (square.reshape(2, 4, 20), square.swapaxes(1, 2))
    for a, b in (*alike, *((y, x) for x, y in alike)):
        found = dumps.reshaped(a, b.shape, lambda b=b: b)  # type: ignore[misc]
        assert found is not None and np.array_equal(found, b), (a.shape, b.shape)
    for shape in ((3, 2, 20), (2, 12, 5), (4, 30), (2, 4, 5, 3), (20, 6)):
        assert dumps.reshaped(rows, shape, lambda: rows) is None, shape


def test_other_formats_are_no_rounding(tmp_path: pathlib.Path) -> None:
    x = np.random.default_rng(8).normal(size=(40, 30)).astype(np.float32)
    short = (x.view(np.uint32) & np.uint32(0xffff0000)).view(np.float32)
    near = x * np.float32(1.0 + 3e-7)

    def said(reference: Array, other: Array, row: dict[str, str], facts: tuple[str, str] = ("", "")) -> tuple[str, str]:
        paths = [tmp_path / name for name in "ab"]
        for path, more in zip(paths, facts):
            path.mkdir(exist_ok=True)
            (path / "model.json").write_text(json.dumps({"format": "anyrank model", "version": 1, **json.loads(
                more or "{}")}))
        a, b = (Held({"h:fwd": values}, path) for values, path in zip((reference, other), paths))
        report = {"first": {"tensor": "h:fwd"}, "worst": [{"tensor": "h:fwd", "state": "different", **row}]}
        answer = explain_run(typing.cast(typing.Any, a), typing.cast(typing.Any, b), report).answer
        return answer.cause, answer.sentence

    assert said(x, near, {})[0] == "rounding"
    cast, none = '{"autocast": {"cpu": "bfloat16"}}', "{}"
    kept = [json.dumps({"dtypes": {dtype: ["w"]}}) for dtype in ("bfloat16", "float32")]
    for values, row, facts, words in (
            ((x, short), {"dtype": "F32", "other_dtype": "BF16"}, ("", ""), "fp32 in the reference, bf16 in the other"),
            ((short, x), {"dtype": "BF16", "other_dtype": "F32"}, ("", ""), "bf16 in the reference, fp32 in the other"),
            ((x, near), {}, (cast, none), "autocast on cpu: bfloat16 in the reference"),
            ((x, near), {}, (kept[0], kept[1]), "type of 1 parameter (w): bfloat16 in the reference"),
            ((short, x), {}, ("", ""), "numbers of bf16 in the reference alone")):
        cause, sentence = said(*values, row, facts)
        assert cause == "fewer_bits" or (cause == "low_precision" and words in sentence), (words, sentence)
        assert "another order" not in sentence
    assert said(x, near, {}, (cast, cast))[0] == "rounding"
