# SPDX-License-Identifier: Apache-2.0
"""The first wrong operation, by the records of both runs."""

from __future__ import annotations

import json
import pathlib
import types
import typing

import anyrank
from anyrank.tests import FolderCase, needs

try:
    import numpy as np
    import torch
    from torch import nn
except ImportError:
    np, torch, nn = None, None, types.SimpleNamespace(Module=object)  # type: ignore[assignment]


class Centred(nn.Module):  # type: ignore[misc]
    """A layer of values less their mean, and a table that each rank has all of and takes its own part of.

    wrong: "mean", the mean of a rank's own samples; "table", all ranks take the first part; "scale", another number;
    "term", a summand is left out."""

    def __init__(self, wrong: str, rank: int, world: int) -> None:
        super().__init__()
        self.wrong, self.rank, self.world = wrong, rank, world
        self.first, self.table = nn.Linear(6, 6), nn.Parameter(torch.randn(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        mean = x.mean(0).detach()
        if self.world > 1 and self.wrong != "mean":
            torch.distributed.all_reduce(mean)
            mean = mean / self.world
        part = 0 if self.wrong == "table" else self.rank
        table = self.table.chunk(self.world)[part]
        scale = 0.5 if self.wrong == "scale" and self.world > 1 else 0.25
        shifted = table if self.wrong == "term" and self.world > 1 else table + 1
        return ((x - mean) * scale * shifted).tanh()


def first_of(wrong: str) -> typing.Any:
    """What compare_ranks says of two ranks that share samples out."""
    def build(mesh: typing.Any) -> typing.Any:
        model = Centred(wrong, mesh.get_local_rank() if mesh else 0, 2 if mesh else 1)
        return model

    def step(model: typing.Any, mesh: typing.Any) -> None:
        x = torch.randn(8, 6)
        loss = model(x.chunk(2)[mesh.get_local_rank()] if mesh else x).square().mean()
        loss.backward()
        for p in model.parameters() if mesh else ():
            torch.distributed.all_reduce(p.grad)
            p.grad /= 2
    try:
        anyrank.compare_ranks(build, step, layout={"dp": 2}, timeout=3600)
    except anyrank.RanksDiffer as error:
        return error
    return None


@needs("torch", "numpy")
class Compared(FolderCase):
    def test_the_first_wrong_operation_is_named(self) -> None:
        self.assertIsNone(first_of(""))
        for wrong, texts in {
            "mean": ("`x - mean` (test_operations.py:", "it takes `x.mean(0).detach()`",
                     "the mean over ranks is the reference's"),
            "table": ("`table + 1` (", "all ranks have the same one: rank 1 has rank 0's"),
            "scale": ("`(x - mean) * scale` (", "its number is 0.5, in the reference 0.25"),
            "term": ("`(x - mean) * scale * shifted` (", "the reference alone does `table + 1` (test_operations.py:"),
        }.items():
            with self.subTest(wrong):
                said = first_of(wrong)
                for text in texts:
                    self.assertIn(text, " ".join(str(said).split()))

    def test_what_cannot_be_read_is_said_or_left_out(self) -> None:
        model = Centred("", 0, 1)
        for name, factor in (("one", 1.0), ("other", 2.0)):
            torch.manual_seed(0)
            with anyrank.capture(model, self.path / name, operations=True):
                (model(torch.randn(4, 6).mul(factor).repeat(2, 1))).sum().backward()
        report = anyrank.verify(self.path / "one", self.path / "other")
        self.assertIn("`torch.randn(4, 6).mul(factor)`", str(report))
        rows = self.path / "other" / "operations" / "rank-00000.json"
        for text in ("", "{}", '{"operations": 1}', '{"operations": [{}]}', rows.read_text()[:-9],
                     rows.read_text().replace('"inputs": [', '"inputs": [[], ')):
            rows.write_text(text)
            said = str(anyrank.verify(self.path / "one", self.path / "other"))
            self.assertIn("the record of operations cannot be read", said, text[:40])
        with anyrank.capture(model, self.path / "other"):
            model(torch.randn(8, 6)).sum().backward()
        self.assertFalse(rows.parent.exists())


@needs("torch", "numpy")
class Recorded(FolderCase):
    def test_each_operation_has_its_place_inputs_and_results(self) -> None:
        model = Centred("", 0, 1)
        with anyrank.capture(model, self.path / "dump", operations=True):
            model(torch.randn(8, 6)).sum().backward()
        folder = pathlib.Path(self.path / "dump" / "operations")
        rows = json.loads((folder / "rank-00000.json").read_text())["operations"]
        means = [row for row in rows if row["name"] == "aten.mean"]
        self.assertEqual([row["numbers"]["dim"] for row in means], [[0]])
        self.assertIn("x.mean(0)", means[0]["code"])
        products = [row for row in rows if row["name"] == "aten.addmm"]
        self.assertEqual([row["module"] for row in products], ["first"])
        self.assertIn("first.bias", products[0]["inputs"])
        backward = [row for row in rows if row["name"] == "aten.tanh_backward"]
        self.assertEqual([(row["backward"], row["code"].endswith(".tanh()")) for row in backward], [(True, True)])


@needs("numpy", "torch")
class Judged(FolderCase):
    def test_how_ranks_have_what_is_right(self) -> None:
        from anyrank.explain.operations import MEAN, ROWS, SUM, judge

        whole = np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32)
        top, left = np.split(whole, 2), np.split(whole, 2, axis=1)
        noise = np.random.default_rng(2).standard_normal((8, 6)).astype(np.float32)
        tp, both = {"tp": 2}, {"dp": 2, "tp": 2}
        for parts, mesh, right, said in (
                ([whole, whole], tp, True, ""), (top, tp, True, ""), (left, tp, True, ""),
                ([top[0][:, :3], top[0][:, 3:], top[1][:, :3], top[1][:, 3:]], both, True, ""),
                ([noise, whole - noise], tp, True, SUM), ([whole + noise, whole - noise], tp, True, MEAN),
                ([whole[::2], whole[1::2]], tp, True, ROWS), ([top[0], top[0]], tp, False, ""),
                ([whole, whole * 1.001], tp, False, ""), ([whole[:3], whole[3:]], tp, True, ROWS),
                ([whole[:3], noise[3:]], tp, None, "")):
            found = judge(whole, dict(enumerate(parts)), mesh)
            self.assertEqual((found.right, found.said), (right, said))
