# SPDX-License-Identifier: Apache-2.0
"""Resumed runs: right ones under other layouts and in other formats without a finding, broken ones by their cause."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import pathlib
import struct
import typing

import anyrank
from anyrank import _safetensors, ranks, resume
from anyrank.tests import FolderCase, needs

STEPS = 3


def trained() -> dict[str, typing.Any]:
    """A run after some steps: all that its checkpoint has."""
    import torch
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
    names = [name for name, _ in model.named_parameters()]
    states = {name: dict(state) for name, state in zip(names, optimizer.state.values())}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"model": dict(model.state_dict()), "optim": {"state": states, "param_groups": groups},
            "scheduler": schedule.state_dict(), "rng": {"torch": torch.get_rng_state()},
            "loader": {"epoch": 0, "batches_seen": STEPS}, "scaler": {"scale": 65536.0}, "step": STEPS}


def shards(rank: int, size: int, folder: str) -> None:
    """The same, saved by the ranks of a mesh, each with its rows."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from anyrank.tests.torch_names import Shard, distribute_tensor
    mesh, state = init_device_mesh("cpu", (size,)), trained()
    cut = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state["model"].items()}
    for name, moments in state["optim"]["state"].items():
        for kind in ("exp_avg", "exp_avg_sq"):
            moments[kind] = distribute_tensor(moments[kind], mesh, [Shard(0)])
    state["model"] = cut
    dcp.save(state, checkpoint_id=folder)


@needs("torch")
class Resumed(FolderCase):
    def saved(self, name: str, change: typing.Callable[[dict[str, typing.Any]], object] | None = None,
              trainer: bool = False) -> pathlib.Path:
        """A checkpoint of torch.distributed.checkpoint, or a folder as transformers' Trainer writes it."""
        import torch
        import torch.distributed.checkpoint as dcp
        state, folder = trained(), self.path / name
        if change:
            change(state)
        if not trainer:
            dcp.save(state, checkpoint_id=str(folder))
            return folder
        folder.mkdir()
        _safetensors.write(folder / "model.safetensors", {
            key: _safetensors.Entry("F32", tuple(value.shape), memoryview(value.contiguous().numpy()).cast("B"))
            for key, value in state["model"].items()}, {})
        numbered = {"state": dict(enumerate(state["optim"]["state"].values())),
                    "param_groups": state["optim"]["param_groups"]}
        torch.save(numbered, folder / "optimizer.pt")
        torch.save(state["scheduler"], folder / "scheduler.pt")
        torch.save({"cpu": state["rng"]["torch"], "python": (3, tuple(range(625)), None)}, folder / "rng_state.pth")
        (folder / "trainer_state.json").write_text(json.dumps(
            {"global_step": state["step"], "epoch": 0.5, "log_history": [{"loss": 1.0}], "total_flos": 1}))
        (folder / "config.json").write_text("{}")
        return folder

    def causes(self, *paths: pathlib.Path, **options: typing.Any) -> dict[str, resume.Finding]:
        return {finding.cause: finding for finding in resume.compare(*paths, **options).findings}

    def test_right_ones(self) -> None:
        one, again = self.saved("one"), self.saved("again")
        report = resume.compare(one, again)
        self.assertTrue(report.same, str(report))
        self.assertGreater(report.tensors, 20)
        self.assertGreater(report.values, 15)
        for size in (2, 4):
            ranks.spawn(size, shards, size, str(self.path / f"{size}"))
        for pair in itertools.permutations((one, self.path / "2", self.path / "4"), 2):
            report = resume.compare(*pair)
            self.assertTrue(report.same, str(report))
        for name in ("a", "b"):
            self.saved(name, trainer=True)
        report = resume.compare(self.path / "a", self.path / "b")
        self.assertTrue(report.same, str(report))
        self.assertGreater(report.tensors, 20)

    def test_broken_ones(self) -> None:
        import torch

        def moments(state: dict[str, typing.Any], change: typing.Callable[[dict[str, typing.Any]], object]) -> None:
            for own in state["optim"]["state"].values():
                change(own)

        def exchange(own: dict[str, typing.Any]) -> None:
            own["exp_avg"], own["exp_avg_sq"] = own["exp_avg_sq"], own["exp_avg"]

        def by_number(state: dict[str, typing.Any]) -> None:
            held = state["optim"]["state"]
            held["2.bias"], held["3.bias"] = held["3.bias"], held["2.bias"]

        def swap_rows(state: dict[str, typing.Any]) -> None:
            weight = state["model"]["0.weight"]
            state["model"]["0.weight"] = torch.cat([weight[8:], weight[:8]])

        broken: list[tuple[str, str, typing.Callable[[dict[str, typing.Any]], object]]] = [
            ("moments_reset", "0.weight (first moment)", lambda s: moments(s, lambda own: own.update(
                exp_avg=torch.zeros_like(own["exp_avg"]), exp_avg_sq=torch.zeros_like(own["exp_avg_sq"])))),
            ("moments_exchanged", "first moment", lambda s: moments(s, exchange)),
            ("step_reset", "0.weight.step", lambda s: moments(s, lambda own: own.update(step=torch.tensor(0.0)))),
            ("schedule", "last_epoch 3 -> 0", lambda s: s["scheduler"].update(last_epoch=0)),
            ("random_state", "rng.torch", lambda s: s["rng"].update(torch=torch.zeros_like(s["rng"]["torch"]))),
            ("data_position", "batches_seen 3 -> 0", lambda s: s["loader"].update(batches_seen=0)),
            ("loss_scale", "65536.0 -> 1024.0", lambda s: s["scaler"].update(scale=1024.0)),
            ("kept_in_16_bits", "weight", lambda s: s["model"].update(
                {key: value.bfloat16().float() for key, value in s["model"].items()})),
            ("other_tensor", "bias", by_number),
            ("shards_exchanged", "0.weight", swap_rows),
            ("shards_differ", "2.weight", lambda s: s["model"]["2.weight"][6:].mul_(0.5)),
            ("scaled", "moment", lambda s: moments(s, lambda own: own["exp_avg"].mul_(4.0))),
            ("missing", "3.bias", lambda s: s["model"].pop("3.bias")),
            ("layout", "0.bias", lambda s: s["model"].update({"0.bias": s["model"]["0.bias"].double()})),
            ("zeroed", "3.weight", lambda s: s["model"]["3.weight"].zero_()),
            ("unknown", "0.weight", lambda s: s["model"]["0.weight"].add_(torch.rand(16, 8)))]
        one = self.saved("one")
        for i, (cause, name, change) in enumerate(broken):
            with self.subTest(cause=cause):
                found = self.causes(one, self.saved(f"b{i}", change))
                self.assertEqual(list(found), [cause], [str(one) for one in found.values()])
                self.assertTrue(any(name in said for said in found[cause].names), found[cause])
                self.assertTrue(found[cause].look_at)
        self.assertEqual(self.causes(one, self.path / "b0", ignore=["*moment*"]), {})

    def test_two_steps(self) -> None:
        import torch

        def later(state: dict[str, typing.Any]) -> None:
            for own in (*state["optim"]["state"].values(), state["model"]):
                for key in own:
                    own[key] = own[key] + (1.0 if key == "step" else torch.rand_like(own[key]))

        found = self.causes(self.saved("one"), self.saved("two", later))
        self.assertEqual(list(found), ["another_step"], found)

    def test_folders_of_a_trainer(self) -> None:
        a = self.saved("a", trainer=True)
        b = self.saved("b", lambda s: (s.update(step=0), s["scheduler"].update(_step_count=1)), trainer=True)
        self.assertEqual(sorted(self.causes(a, b)), ["schedule", "step_reset"])
        (b / "rng_state.pth").unlink()
        self.assertIn("rng_state.cpu", self.causes(a, b)["missing"].names)

    def test_what_a_dump_says_of_its_run_is_no_state(self) -> None:
        a, b = self.saved("a", trainer=True), self.saved("b", trainer=True)
        (b / "model.json").write_text('{"format": "anyrank model", "world": 2}', encoding="utf-8")
        self.assertEqual(self.causes(a, b), {})
        (b / "model.json").write_text('{"world": 2}', encoding="utf-8")
        self.assertNotEqual(self.causes(a, b), {})

    def test_a_trainer_under_fsdp(self) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        def moved(name: str, change: typing.Callable[[dict[str, typing.Any]], object] | None = None) -> pathlib.Path:
            folder, state = self.saved(name, change, trainer=True), trained()
            if change:
                change(state)
            for key, inner, old in (("model", "pytorch_model_fsdp_0", "model.safetensors"),
                                    ("optim", "optimizer_0", "optimizer.pt")):
                dcp.save({key: state[key]}, checkpoint_id=str(folder / inner))
                (folder / old).unlink()
            return folder

        a = moved("a")
        self.assertEqual(self.causes(a, moved("same")), {})
        b = moved("b", lambda s: (s["rng"]["torch"].add_(1), s["optim"]["state"]["0.weight"]["exp_avg"].zero_()))
        self.assertEqual(sorted(self.causes(a, b)), ["moments_reset", "random_state"])
        torch.save({"w": torch.ones(2)}, a / "before.pt")
        torch.save({"w": torch.ones(2)}, b / "after.pt")
        self.assertEqual(self.causes(a / "before.pt", b / "after.pt"), {})


class Command(FolderCase):
    def put(self, name: str, *values: float) -> pathlib.Path:
        data = memoryview(struct.pack(f"<{len(values)}f", *values))
        folder = self.path / name
        folder.mkdir()
        _safetensors.write(folder / "model.safetensors", {"w": _safetensors.Entry("F32", (len(values),), data)}, {})
        return folder

    def run_main(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return resume.main(list(arguments)), out.getvalue(), err.getvalue()

    def test_status_and_output(self) -> None:
        a, b = self.put("a", 1.0, 2.0), self.put("b", 2.0, 4.0)
        status, out, _ = self.run_main(str(a), str(a))
        self.assertEqual((status, out.endswith(": the same\n")), (0, True), out)
        status, out, _ = self.run_main(str(a), str(b))
        self.assertEqual((status, "scaled: weights are multiplied by 2" in out), (1, True), out)
        status, out, _ = self.run_main(str(a), str(b), "--json")
        self.assertEqual((status, json.loads(out)["findings"][0]["cause"]), (1, "scaled"))
        self.assertEqual(self.run_main(str(a), str(b), "--ignore", "w")[0], 0)
        for path, says in ((self.path / "none", "no such checkpoint"), (self.path, "holds no tensor")):
            status, out, err = self.run_main(str(a), str(path))
            self.assertEqual((status, out, says in err), (2, "", True), err)
        (a / "sampler.npz").write_bytes(b"1")
        (a / "trainer_state.json").write_text('{"global_step": 1}')
        status, out, err = self.run_main(str(a), str(a))
        self.assertEqual((status, "sampler.npz: not read" in err), (0, True), err)
        for pair in ((a, b), (b, a)):
            self.assertIn("trainer_state.global_step", {name for one in resume.compare(*pair).findings
                                                        for name in one.names if one.cause == "missing"})
        (b / "optimizer.pt").write_bytes(b"PK\x03\x04 broken")
        with self.assertRaises(anyrank.AnyrankError):
            resume.compare(a, b)
