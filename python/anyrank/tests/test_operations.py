# SPDX-License-Identifier: Apache-2.0
"""The first wrong operation, by the records of both runs."""

from __future__ import annotations

import json
import pathlib
import types
import tempfile
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

    wrong: "mean", the mean of a rank's own samples; "largest", the largest of these; "table", all ranks take the first
    part; "scale", another number; "term", a summand is left out; "before", what was set up before the step."""

    def __init__(self, wrong: str, rank: int, world: int) -> None:
        super().__init__()
        self.wrong, self.rank, self.world = wrong, rank, world
        self.first, self.table = nn.Linear(6, 6), nn.Parameter(torch.randn(8, 6))
        self.steps = torch.arange(8.0)[:, None].chunk(world)[0 if wrong == "before" else rank]

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
        largest = x.detach().amax(0)
        if self.world > 1 and self.wrong != "largest":
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return ((x - mean) * scale * shifted).tanh() / (4 + largest) * (self.steps + 1)


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
        with tempfile.TemporaryDirectory() as folder:
            anyrank.compare_ranks(build, step, layout={"dp": 2}, timeout=3600, folder=folder)
    except anyrank.RanksDiffer as error:
        return error
    return None


@needs("torch", "numpy")
class Compared(FolderCase):
    def test_the_first_wrong_operation_is_named(self) -> None:
        self.assertIsNone(first_of(""))
        for wrong, texts in {
            "mean": ("`x - mean` (test_operations.py:", "it takes `x.mean(0)`",
                     "the mean over dp is the reference's"),
            "table": ("`table + 1` (", "all ranks have the same one: rank 1 has rank 0's"),
            "scale": ("`(x - mean) * scale` (", "its number is 0.5, in the reference 0.25"),
            "largest": ("`x.detach().amax(0)` (test_operations.py:", "own_part_reduced",
                        "goes over dimension 0, of which each rank has a part"),
            "before": ("what `self.steps + 1` (test_operations.py:",
                       "takes from before the step is another value on rank 1"),
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


    def test_gradients_that_are_clipped_before_their_average(self) -> None:
        def build(mesh: typing.Any) -> typing.Any:
            return nn.Linear(6, 6)

        def step(model: typing.Any, mesh: typing.Any) -> None:
            x, optimizer = torch.randn(8, 6), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            loss = model(x.chunk(2)[mesh.get_local_rank()] if mesh else x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for p in model.parameters() if mesh else ():
                torch.distributed.all_reduce(p.grad)
                p.grad /= 2
            optimizer.step()
        with self.assertRaises(anyrank.RanksDiffer) as caught, tempfile.TemporaryDirectory() as folder:
            anyrank.compare_ranks(build, step, layout={"dp": 2}, timeout=3600, folder=folder)
        text = " ".join(str(caught.exception).split())
        self.assertIn("the update is made of all of them", text)
        self.assertIn("average_after_use", text)


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
        from anyrank.explain.operations import MEAN, SUM, judge, rows_said

        whole = np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32)
        top, left, uneven = np.split(whole, 2), np.split(whole, 2, axis=1), [whole[:3], whole[3:]]
        noise = np.random.default_rng(2).standard_normal((8, 6)).astype(np.float32)
        tp, both, dealt, plain = {"tp": 2}, {"dp": 2, "tp": 2}, (0, 2, 4, 6), ()
        padded = [whole[:5], np.concatenate([whole[5:], noise[:2]])]
        hot = (np.arange(8)[:, None] % 3 == np.arange(6)).astype(np.float32)
        for reference, parts, mesh, right, made, order in (
                (whole, [whole, whole], tp, True, "", plain), (whole, top, tp, True, "", plain),
                (whole, left, tp, True, "", plain), (whole, uneven, tp, True, "", plain),
                (whole, padded, tp, True, "", plain),
                (whole, [half[:, cut] for half in top for cut in (slice(3), slice(3, 6))], both, True, "", plain),
                (whole, [noise, whole - noise], tp, True, SUM, plain),
                (whole, [whole + noise, whole - noise], tp, True, MEAN, plain),
                (whole, [whole[::2], whole[1::2]], tp, True, "", dealt),
                (whole, [whole[[1, 0, *range(2, 8)]]] * 2, tp, True, "", (1, 0, *range(2, 8))),
                (hot, [hot[::2], hot[::2]], tp, False, "", plain),  # most rows are alike
                (whole, [top[0], top[0]], tp, False, "", plain), (whole, [whole, whole * 1.001], tp, False, "", plain),
                (whole, [whole[:3], noise[3:]], tp, False, "", plain),
                (whole, [whole[:3], noise[4:]], tp, None, "", plain)):
            found = judge(reference, dict(enumerate(parts)), mesh)
            self.assertEqual((found.right, found.made, found.order.get(0, ())), (right, made, order))
        self.assertTrue(judge(whole, {1: top[0], 3: top[1]}, both).right)  # of a stage's ranks
        self.assertEqual(judge(whole, dict(enumerate([noise, whole - noise] * 2)), both).over, ("tp",))
        crossed = [noise, noise, whole - noise, whole - noise]
        self.assertEqual(judge(whole, dict(enumerate(crossed)), both).over, ("dp",))
        self.assertIsNone(judge(whole, {1: top[0]}, both).right)
        self.assertEqual(rows_said((0, 1, 2, 6, 7, 4)), "0 to 2, 6 to 7, 4")


@needs("numpy")
def test_a_collective_after_it_is_named_without_a_guess_what_it_is_for() -> None:
    from anyrank.explain.operations import Operation, Wrong

    codes = ("sum", "total = part.sum()"), ("c10d.allreduce_", "all_reduce(total)")
    first, after = (Operation(i, name, "", "loss.py", 7 + i, code, (), (), (), {}, False)
                    for i, (name, code) in enumerate(codes))
    assert Wrong(first, first, after=after).sentence == (
        "`total = part.sum()` (loss.py:7) is the first operation that gives other values, before `all_reduce(total)` "
        "(loss.py:8)")
