# SPDX-License-Identifier: Apache-2.0
"""Facts of runs: what a capture records besides tensors, and what is said to differ between two runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
import types
import typing
import unittest
import unittest.mock

from anyrank import AnyrankError, ranks
from anyrank._names import folded, unfolded
from anyrank.explain import facts
from anyrank.explain.__main__ import main
from anyrank.tests import FolderCase, needs

try:
    import torch
    import torch.distributed as dist
    from torch import nn

    import anyrank
    from anyrank.capture import _facts
except (ImportError, AnyrankError):
    nn = torch = dist = typing.cast(typing.Any, None)  # tests of captures are skipped

Module: typing.Any = nn.Module if nn is not None else object


@dataclasses.dataclass
class Settings:
    heads: int = 2
    theta: float = 1e4
    kinds: tuple[str, ...] = ("full", "sliding")


class Block(Module):  # type: ignore[misc]
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8, eps=eps), nn.Linear(8, 12), nn.Linear(12, 8)
        self.scaling, self.heads, self.window = float("inf"), 2, (4, None)

    def forward(self, x: typing.Any, mask: typing.Any = None) -> typing.Any:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(Module):  # type: ignore[misc]
    def __init__(self, settings: typing.Any = None, eps: float = 1e-5, tied: bool = False,
                 unused: bool = False) -> None:
        super().__init__()
        self.config = settings or Settings()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.layers = nn.ModuleList(Block(eps) for _ in range(3))
        self.more = nn.Linear(2, 2) if unused else None
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: typing.Any) -> typing.Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask=None)
        return self.head(x)


Change = typing.Callable[..., typing.Any]


def run(folder: pathlib.Path, steps: int = 2, micro: int = 1, seed: int = 7, lr: float = 0.1, decay: float = 0.0,
        kind: typing.Any = None, gamma: float = 1.0, autocast: bool = False, change: Change | None = None,
        wrap: Change | None = None, **model: typing.Any) -> None:
    """A training run whose learning rate falls by gamma."""
    torch.manual_seed(seed)
    net = Model(**model)
    if change:
        change(net)
    net = wrap(net) if wrap else net
    optimizer = (kind or torch.optim.AdamW)([{"params": [p for p in net.parameters() if p.dim() > 1]}, {
        "params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": decay}], lr=lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    rank = dist.get_rank() if dist.is_initialized() else 0
    with anyrank.capture(net, folder):
        for _ in range(steps):
            for ids in torch.arange(24).reshape(4, 6).remainder(11).chunk(micro):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = nn.functional.cross_entropy(net(ids + rank % 1).flatten(0, 1).float(), ids.flatten())
                (loss / micro).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


class Names(unittest.TestCase):
    def test_names_are_folded_and_come_back(self) -> None:
        names = [f"layers.{i}.experts.{k}.w" for i in range(4) for k in range(3)] + ["layers.7.w", "head", "", "a.01.b"]
        self.assertEqual(folded(names), ["layers.{0-3}.experts.{0-2}.w", "layers.7.w", "head", "", "a.01.b"])
        self.assertEqual(sorted(unfolded(folded(names))), sorted(names))
        with self.assertRaises(ValueError):
            unfolded(["a.{0-999999999}.b"])


@needs("torch")
class Recorded(FolderCase):
    def told(self, folder: str = "dump", **options: typing.Any) -> typing.Any:
        run(self.path / folder, **options)
        return json.loads((self.path / folder / "model.json").read_text(encoding="utf-8"))

    def test_what_the_run_was(self) -> None:
        told = self.told(micro=2, gamma=0.5, unused=True, autocast=True, decay=0.01,
                         change=lambda net: net.embed.requires_grad_(False))
        self.assertEqual((told["format"], told["version"], told["world"]), ("anyrank model", 1, 1))
        self.assertEqual(told["config"], {"config": {"heads": 2, "theta": 1e4, "kinds": ["full", "sliding"]}})
        self.assertEqual(told["versions"]["torch"], torch.__version__)
        self.assertEqual(told["ranks"], {"seed": [7], "steps": [2], "micro_batches": [2], "calls": [{"1": 2}],
                                         "without_gradient": [{"1": ["more.weight", "more.bias"]}]})
        self.assertEqual((told["frozen"], told["autocast"]), (["embed.weight"], {"cpu": "bfloat16"}))
        self.assertEqual(told["learning_rates"], {"1": [[0.1, 0.1]], "2": [[0.05, 0.05]]})
        (optimizer,), (schedule,) = told["optimizers"], told["schedulers"]
        self.assertEqual((optimizer["class"], schedule["class"], schedule["options"]["gamma"]),
                         ("AdamW", "ExponentialLR", 0.5))
        self.assertEqual([(group["options"]["weight_decay"], group["parameters"][-1]) for group in optimizer["groups"]],
                         [(0.01, "more.weight"), (0.01, "more.bias")])
        kinds = {module["class"]: module for module in told["modules"]}
        block = kinds["Block"]
        self.assertEqual((block["paths"], block["arguments"]), (["layers.{0-2}"], ["x", "mask"]))
        self.assertEqual((block["in"], block["out"]), ({"x": "float32 [2, 6, 8]"}, ["float32 [2, 6, 8]"]))
        self.assertEqual(block["attributes"],
                         {"training": True, "scaling": "Infinity", "heads": 2, "window": [4, None]})
        self.assertEqual(kinds["LayerNorm"]["attributes"]["eps"], 1e-5)

    def test_nothing_that_a_model_holds_fails_the_capture(self) -> None:
        class Config:
            def to_dict(self) -> typing.Any:
                raise RuntimeError("not now")

        class Odd(int):
            def __int__(self) -> int:
                raise RuntimeError("no number")

        def change(net: typing.Any) -> None:
            net.config, net.odd, net.args = Config(), Odd(3), types.SimpleNamespace(width=8, where=object())
            net.layers[0].itself = [net.layers[0]]
            net.huge = list(range(1000))
        told = self.told(change=change)
        self.assertEqual(told["config"], {"args": {"width": 8}})
        self.assertEqual(told["modules"][0]["attributes"], {"training": True, "more": None})
        with unittest.mock.patch.object(_facts.Facts, "_described_modules", side_effect=RuntimeError("broken")):
            told = self.told("other")
        self.assertEqual((told["left_out"], told["ranks"]["steps"]), ({"of_rank": "RuntimeError: broken"}, [None]))

    def test_a_large_model_leaves_attributes_out_first(self) -> None:
        def change(net: typing.Any) -> None:
            for layer in net.layers:
                vars(layer).update({f"word{i}": f"{id(layer)}{'x' * 180}" for i in range(300)})
        told = self.told(change=change)
        self.assertLess((self.path / "dump/model.json").stat().st_size, 100_000)
        self.assertTrue(told["truncated"])
        self.assertNotIn("attributes", told["modules"][0])
        self.assertIn("in", told["modules"][0])
        self.assertTrue(facts.read(self.path / "dump").truncated)
        self.assertLess(len(_facts.bounded({"dtypes": {"float32": [f"{i}x.w" for i in range(100_000)]}})), 100)

    def test_stages_make_one_model(self) -> None:
        def stage(*layers: int) -> typing.Any:
            paths = [f"layers.{i}" for i in layers]
            groups = [{"options": {"lr": 1}, "parameters": paths}]
            return {"modules": [{"paths": paths, "class": "Block"}], "dtypes": {"float32": paths}, "frozen": [],
                    "tied": [], "optimizers": [{"class": "SGD", "groups": groups}]}
        told = _facts._joined([stage(0, 1), stage(2), stage(3)])
        paths = [f"layers.{i}" for i in range(4)]
        self.assertEqual(told["modules"], [{"paths": paths, "class": "Block"}])
        self.assertEqual(told["dtypes"], {"float32": paths})
        self.assertEqual(told["optimizers"],
                         [{"class": "SGD", "groups": [{"options": {"lr": 1}, "parameters": paths}]}])


@needs("torch")
class Differences(FolderCase):
    def said(self, *folders: str) -> list[str]:
        a, b = (facts.read(self.path / folder) for folder in folders)
        return [difference.text for difference in facts.differences(a, b)]

    def test_each_is_said_with_both_values(self) -> None:
        run(self.path / "one")
        for text, options in (
                ("the reference made 2 steps, the other run 1", {"steps": 1}),
                ("the reference went through 1 micro-batch, the other run 2", {"micro": 2}),
                ("config.theta: 10000.0 in the reference, 500000.0 in the other run",
                 {"settings": Settings(theta=5e5)}),
                ("eps of 3 modules (layers.{0-2}.norm): 1e-05 in the reference, 1e-06 in the other run", {"eps": 1e-6}),
                ("training of 1 module (layers.1.norm): true in the reference, false in the other run",
                 {"change": lambda net: net.layers[1].norm.eval()}),
                ("1 parameter requires a gradient in the reference alone: layers.2.down.bias",
                 {"change": lambda net: net.layers[2].down.bias.requires_grad_(False)}),
                ("4 parameters have no gradient in the other run, in step 1: layers.0.norm.bias, layers.0.norm.weight, "
                 "layers.0.up.bias, layers.0.up.weight", {"change": lambda net: net.layers[0].up.register_forward_hook(
                     lambda module, given, y: y.detach())}),
                ("embed.weight and head.weight are one tensor in the other run alone", {"tied": True}),
                ("2 parameters are in the other run alone: more.bias, more.weight", {"unused": True}),
                ("1 module is in the other run alone: more", {"unused": True}),
                ("type of 2 parameters (layers.0.norm.bias, layers.0.norm.weight): float32 in the reference, float64 "
                 "in the other run", {"change": Double.put}),
                ("class of 1 module (layers.0.norm): LayerNorm in the reference, Double in the other run",
                 {"change": Double.put}),
                ("autocast on cpu: none in the reference, bfloat16 in the other run", {"autocast": True}),
                ("optimizer: AdamW in the reference, Adam in the other run", {"kind": torch.optim.Adam}),
                ("the learning rates differ from step 1 on: 0.1 in the reference, 0.2 in the other run", {"lr": 0.2}),
                ("the learning rates differ from step 2 on: 0.1 in the reference, 0.05 in the other run",
                 {"gamma": 0.5}),
                ("ExponentialLR's gamma: 1.0 in the reference, 0.5 in the other run", {"gamma": 0.5}),
                ("AdamW's weight_decay of 12 parameters (layers.{0-2}.down.bias, layers.{0-2}.norm.bias, "
                 "layers.{0-2}.norm.weight, layers.{0-2}.up.bias): 0.0 in the reference, 0.1 in the other run",
                 {"decay": 0.1}),
                ("seed of rank 0: 7 in the reference, 8 in the other run", {"seed": 8})):
            with self.subTest(text=text):
                run(self.path / "other", **options)
                self.assertIn(text, self.said("one", "other"))
                (self.path / "other/rank-00000.safetensors").unlink()
        run(self.path / "same")
        self.assertEqual(self.said("one", "same"), [])

    def test_what_a_layout_divides_is_no_difference(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")
        from anyrank.tests.test_capture_ranks import ddp

        def fsdp(net: typing.Any) -> typing.Any:
            from anyrank.tests.torch_names import fully_shard

            return fully_shard(net)

        def many(rank: int, folder: pathlib.Path, wrap: typing.Any) -> None:
            run(folder, wrap=wrap)
        ranks.spawn(1, many, self.path / "one", None)
        for wrap in (ddp, fsdp):
            ranks.spawn(2, many, self.path / "many", wrap)
            self.assertEqual(self.said("one", "many"), [])
            self.assertEqual(facts.read(self.path / "many").mesh, {"dp": 2})
        a = facts.Facts(True, world=1, modules={
            "up": facts.Module("Linear", attributes={"out_features": 8, "rank": 0})})
        b = dataclasses.replace(a, world=2, mesh={"tp": 2}, modules={
            "up": facts.Module("ColumnParallelLinear", attributes={"out_features": 4, "rank": 1})})
        self.assertEqual(facts.differences(a, b), [])
        self.assertEqual(len(facts.differences(a, dataclasses.replace(b, world=1, mesh={}))), 3)
        self.assertEqual(facts.layouts(a, b), "the reference had 1 rank, the other run 2 ranks (tp 2)")

    def test_ranks_that_do_not_agree(self) -> None:
        def alone(rank: int, folder: pathlib.Path) -> None:
            net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with anyrank.capture(net, folder, spec={"mesh": {"dp": 2}, "mean_over": "dp"} if rank >= 0 else None):
                for _ in range(2 if rank == 1 else 3):
                    y = net[0](torch.ones(2, 3))
                    net[1](y.detach() if rank == 1 else y).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        alone(-1, self.path / "one")
        ranks.spawn(2, alone, self.path / "many")
        self.assertEqual([text for text in self.said("one", "many") if "seed" not in text],
                         ["ranks differ in the other run: rank 0 made 3 steps, rank 1 made 2 steps",
                          "2 parameters have no gradient in the other run on rank 1, in step 1: 0.bias, 0.weight"])

    def test_runs_of_which_nothing_is_recorded_are_not_called_the_same(self) -> None:
        run(self.path / "one")
        (self.path / "bare").mkdir()
        said = io.StringIO()
        for other in ("bare", "missing"):
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                self.assertEqual(main([str(self.path / "one"), str(self.path / other), "--facts"]), 2)
        for text in ("bare: has no model.json", "missing: there is no such file or folder"):
            self.assertIn(text, said.getvalue())

    def test_the_command_prints_them(self) -> None:
        run(self.path / "one")
        run(self.path / "other", lr=0.2)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(main([str(self.path / "one"), str(self.path / "other"), "--facts"]), 1)
            file = self.path / "one/rank-00000.safetensors"
            self.assertEqual(main([str(self.path / "one"), str(file), "--facts"]), 0)
        self.assertEqual(out.getvalue().splitlines(), [
            "the learning rates differ from step 1 on: 0.1 in the reference, 0.2 in the other run",
            "both runs had 1 rank", "both runs had 1 rank", "what is recorded of the two runs is the same"])


class Double(nn.LayerNorm if nn is not None else object):  # type: ignore[misc]
    """A norm in binary64."""

    def __init__(self, width: int) -> None:
        super().__init__(width, dtype=torch.float64)

    def forward(self, x: typing.Any) -> typing.Any:
        return super().forward(x.double()).float()

    @classmethod
    def put(cls, net: typing.Any) -> None:
        net.layers[0].norm = cls(8)


class Read(FolderCase):
    def test_a_dump_without_them_and_files_of_others(self) -> None:
        file = self.path / "model.json"
        self.assertFalse(facts.read(self.path).recorded)
        file.write_text('{"layers": 3}', encoding="utf-8")
        self.assertFalse(facts.read(self.path).recorded)
        self.assertEqual(facts.differences(facts.read(self.path), facts.Facts(True)), [])
        for text in ("{", '{"format": "anyrank model", "version": 2}',
                     '{"format": "anyrank model", "version": 1, "frozen": ["a.{0-999999999}"]}'):
            file.write_text(text, encoding="utf-8")
            with self.assertRaises(AnyrankError):
                facts.read(self.path)
            with contextlib.redirect_stderr(io.StringIO()):
                self.assertEqual(main([str(self.path), str(self.path), "--facts"]), 2)

    def write(self, **content: typing.Any) -> None:
        (self.path / "model.json").write_text(json.dumps({"format": "anyrank model", "version": 1, **content}),
                                              encoding="utf-8")

    def test_what_is_null_is_not_known(self) -> None:
        self.write(**dict.fromkeys(("versions", "world", "mesh", "config", "modules", "ranks")))
        found = facts.read(self.path)
        self.assertEqual((found.recorded, found.world, found.modules), (True, 1, {}))
        self.assertEqual(facts.differences(found, found), [])

    def test_a_value_of_another_type_is_refused_with_its_place(self) -> None:
        """Left out, it would let two runs pass for the same that differ there."""
        for content, says in (
                ({"world": 0}, "model.json: world: got 0, expected an integer from 1 on"),
                ({"world": True}, "model.json: world: got true, expected an integer from 1 on"),
                ({"versions": {"torch": 2}}, "versions.torch: got 2, expected a string"),
                ({"mesh": {f"d{i}": 2 for i in range(9)}}, "mesh: has 9 dimensions, expected at most 8"),
                ({"modules": [{"class": "A"}, {"paths": ["a"]}]}, 'modules[1]: has no "class"'),
                ({"learning_rates": {"x": []}}, 'learning_rates.x: got "x", expected the number of a step as the key'),
                ({"learning_rates": {"1": 0.1}}, "learning_rates.1: got 0.1, expected a list"),
                ({"ranks": {"calls": [None, {"1": "\x1b[2J"}]}}, 'calls[1].1: got "\\u001b[2J", expected an integer'),
                ({"frozen": ["a.{0-99999999}"]}, "frozen: has 100000000 names, expected at most 1048576"),
                ({"dtypes": {str(i): ["a.{0-999999}"] for i in range(9)}}, "dtypes.4: has the file's name 4194305")):
            with self.subTest(says):
                self.write(**content)
                with self.assertRaises(AnyrankError) as raised:
                    facts.read(self.path)
                self.assertIn(says, str(raised.exception))
