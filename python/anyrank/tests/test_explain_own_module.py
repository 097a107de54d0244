# SPDX-License-Identifier: Apache-2.0
"""The reference's own module, run on what the other run's read."""

from __future__ import annotations

import pathlib
import typing
import unittest

import numpy as np
import torch

import anyrank
from anyrank import AnyrankError
from anyrank.dump import Dump
from anyrank.explain import own_module
from anyrank.explain.dumps import case_of, runs_of
from anyrank.explain.own_module import RIGHT, UNTRIED, WRONG

nn = torch.nn


class Model(nn.Module):  # type: ignore[misc,name-defined]
    """wrong: "" or what is wrong with it."""

    def __init__(self, wrong: str = "", drop: float = 0.0) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.drop, self.head, self.wrong = nn.Dropout(drop), nn.Linear(8, 11), wrong
        if wrong == "epsilon":
            self.norm.eps = 0.1

    def forward(self, ids: typing.Any) -> typing.Any:
        x = self.norm(self.embed(ids))
        x = x * (1.5 if self.wrong == "scaled" else 1.0)
        x = self.mix(x)
        return self.head(self.drop(torch.relu(x) * (2.0 if self.wrong == "later" else 1.0)))


def build(drop: float = 0.0, wrong: str = "") -> typing.Any:
    torch.manual_seed(3)
    return Model(wrong, drop)


def run(folder: pathlib.Path, wrong: str = "", drop: float = 0.0) -> pathlib.Path:
    model = build(drop, wrong)
    if wrong == "weight":
        model.mix.weight.data[0, 0] += 1.0
    if wrong == "gradient":  # what comes back to the module is halved
        model.mix.register_full_backward_hook(lambda module, given, _: tuple(g * 0.5 for g in given))
    ids = torch.arange(24).reshape(4, 6) % 11
    with anyrank.capture(model, folder):
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    return folder


def verdict(path: pathlib.Path, wrong: str, name: str, drop: float = 0.0) -> own_module.Replay:
    reference, other = Dump(run(path / "one", drop=drop)), Dump(run(path / "two", wrong, drop))
    runs = runs_of(reference, other, {})
    case = case_of(runs, name)
    assert case is not None
    return own_module.replay(build(drop), case)


def test_a_module_is_right_whose_input_differs(tmp_path: pathlib.Path) -> None:
    found = verdict(tmp_path, "scaled", "mix:fwd")
    assert (found.verdict, found.inputs, found.weights) == (RIGHT, ("mix.in:fwd",), ())
    assert "mix.in:fwd differs" in found.sentences[0]


def test_a_module_is_right_whose_weight_differs(tmp_path: pathlib.Path) -> None:
    found = verdict(tmp_path, "weight", "mix:fwd")
    assert (found.verdict, found.inputs, found.weights) == (RIGHT, (), ("mix.weight:init",))


def test_a_module_is_wrong_that_computes_something_else(tmp_path: pathlib.Path) -> None:
    found = verdict(tmp_path, "epsilon", "norm:fwd")
    assert (found.verdict, found.inputs, found.weights) == (WRONG, (), ())
    assert "its weights and inputs are the reference's" in found.sentences[0]


def test_gradients_are_those_of_what_comes_back(tmp_path: pathlib.Path) -> None:
    found = verdict(tmp_path, "later", "head.weight:grad")
    assert found.verdict == UNTRIED  # nothing reads the head's output that has a gradient of its own
    found = verdict(tmp_path, "scaled", "norm.weight:grad")
    assert found.verdict == UNTRIED and "gradient" in found.sentences[0]


def test_what_draws_numbers_is_not_tried(tmp_path: pathlib.Path) -> None:
    found = verdict(tmp_path, "later", "drop:fwd", drop=0.5)
    assert found.verdict == UNTRIED and "does not give the reference's own values again" in found.sentences[0]


def test_a_backward_pass_by_itself(tmp_path: pathlib.Path) -> None:
    """A chain of modules, each of which reads what the one before it gives out."""

    def chain(folder: pathlib.Path, factor: float) -> Dump:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        if factor != 1.0:
            model[1].register_full_backward_hook(lambda module, given, _: tuple(factor * g for g in given))
        with anyrank.capture(model, folder):
            (model(torch.linspace(-1, 1, 24).reshape(4, 6)) ** 2).sum().backward()
        return Dump(folder)

    reference, other = chain(tmp_path / "one", 1.0), chain(tmp_path / "two", 0.5)
    runs = runs_of(reference, other, {})
    torch.manual_seed(1)
    mine = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    weight = case_of(runs, "0.weight:grad")
    assert weight is not None
    found = own_module.replay(mine, weight)
    assert (found.verdict, found.inputs) == (RIGHT, ("1:bwd",)), found


def test_a_module_comes_from_a_function_of_the_users(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("from torch import nn\n\ndef build(mesh):\n    return nn.Linear(2, 2), None\n", encoding="utf-8")
    assert isinstance(own_module.load(f"{file}:build"), nn.Linear)
    for where, words in ((f"{file}:other", "has no function other"), ("no.py:build", "has to be FILE.py:FUNCTION")):
        with unittest.TestCase().assertRaisesRegex(AnyrankError, words):
            own_module.load(where)
