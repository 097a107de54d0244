# SPDX-License-Identifier: Apache-2.0
"""Runs whose tensors are sketched are compared like those that are kept, whatever divides them."""

from __future__ import annotations

import pathlib
import subprocess
import typing
import unittest.mock

import anyrank
from anyrank import AnyrankError, ranks
from anyrank._command import find_command
from anyrank._arrays import entry_of
from anyrank.tests import FolderCase, needs
from anyrank.tests.test_capture_ranks import Model, Wrap, both, ddp, fsdp, hybrid, tensor_parallel, train

try:
    import torch

    from anyrank.capture import _places, _sketches
except ImportError:
    torch = typing.cast(typing.Any, None)  # every test here is skipped


@needs("torch")
class Sketched(FolderCase):
    def setUp(self) -> None:
        super().setUp()
        try:
            find_command()
        except AnyrankError as error:
            self.skipTest(str(error))

    def run_one(self, folder: str, **options: typing.Any) -> None:
        torch.manual_seed(0)
        train(Model(), self.path / folder, None, **options)

    def run_many(self, folder: str, world: int, wrap: Wrap, groups: int, spoil: float = 1.0,
                 **options: typing.Any) -> None:
        def run(rank: int, path: pathlib.Path, wrap: Wrap) -> None:
            def spoiled(model: typing.Any) -> typing.Any:
                model.blocks[1][3].weight.register_hook(lambda grad: grad * spoil)
                return wrap(model)
            torch.manual_seed(0)
            train(Model(), path, spoiled if spoil != 1.0 else wrap, (rank * groups // world, groups), **options)
        ranks.spawn(world, run, self.path / folder, wrap)

    def compared(self, reference: str, other: str, **options: typing.Any) -> typing.Any:
        return anyrank.verify(self.path / reference, self.path / other, rtol=1e-4, atol=1e-6, **options)

    def test_any_layout_has_the_sketches_of_one_rank_and_of_its_tensors(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")
        self.run_one("one", keep="sketch", clip=False)
        self.run_one("tensors", clip=False)
        self.assertTrue(anyrank.verify(self.path / "tensors", self.path / "one").ok)  # by bits
        for i, (world, wrap, groups, options) in enumerate((
                (2, ddp, 2, {}), (2, ddp, 2, {"micro": 2}), (2, tensor_parallel, 1, {}), (3, tensor_parallel, 1, {}),
                (4, fsdp, 4, {}), (4, hybrid, 4, {}), (4, both, 2, {"micro": 2}))):
            with self.subTest(i):
                self.run_many(f"many-{i}", world, wrap, groups, keep="sketch", clip=False, **options)
                for reference in ("one", "tensors"):
                    report = self.compared(reference, f"many-{i}")
                    self.assertTrue(report.ok, str(report))
                self.assertFalse(list((self.path / f"many-{i}").glob("*.safetensors")))
                self.assertNotIn("not compared", str(report))
        report = self.compared("many-2", "many-6")  # tp 2 against fsdp 2 with tp 2
        self.assertTrue(report.ok, str(report))

    def test_a_difference_has_its_tensor_its_step_and_its_factor(self) -> None:
        self.run_one("one", keep="sketch", clip=False)
        self.run_many("many", 2, ddp, 2, keep="sketch", spoil=1.5, clip=False)
        text = str(self.compared("one", "many"))
        self.assertIn("blocks.1.3.weight:grad: off by 50 % of its size, as a whole the reference times 1.5", text)
        self.assertIn('only=["blocks.1.3.weight:grad"], steps={1}', text)

    def test_weights_that_a_rounded_gradient_moves(self) -> None:
        """A key's bias has no effect behind a softmax: its gradient is rounding, of which Adam makes whole steps. The
        weight's gradient is none. Dumps say the same."""
        def run(folder: str, seed: int, keep: str, rate: float = 1e-3) -> None:
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 64)
            optimizer = torch.optim.Adam(model.parameters(), lr=rate, eps=1e-12)
            with torch.no_grad():
                model.bias.fill_(1.0)
            rounding = 1e-9 * torch.randn(64, generator=torch.Generator().manual_seed(seed))
            with anyrank.capture(model, self.path / folder, optimizer, keep=keep, values=["init", "grad", "new"]):
                model(torch.ones(1, 8)).sum().backward()
                model.bias.grad.copy_(rounding)
                optimizer.step()
        for keep in ("sketch", "tensors"):
            for folder, seed, rate in (("one", 0, 1e-3), ("other", 1, 1e-3), ("further", 0, 4e-3)):
                run(f"{folder}-{keep}", seed, keep, rate)
            self.assertTrue(self.compared(f"one-{keep}", f"other-{keep}").ok, keep)
            self.assertIn("bias:new", str(self.compared(f"one-{keep}", f"further-{keep}")))

    def test_copies_that_differ_are_a_difference_in_sketches_and_in_dumps(self) -> None:
        def run(rank: int, path: pathlib.Path, keep: str) -> None:
            torch.manual_seed(0)
            model = ddp(Model())
            if rank == 1:
                with torch.no_grad():
                    model.module.head.bias[3] += 0.5
            with anyrank.capture(model, path, keep=keep):
                model(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
        self.run_one("one", keep="sketch", clip=False)
        for keep in ("sketch", "tensors"):
            ranks.spawn(2, run, self.path / keep, keep)
            text = str(self.compared("one", keep))
            self.assertIn("head.bias:init: rank 1 has another copy than rank 0", text)

    def test_options_that_need_elements_are_refused(self) -> None:
        self.run_one("one", keep="sketch")
        self.run_one("tensors")
        for options, name in ((["--normal"], "--normal"), (["--html", str(self.path / "a.html")], "--html"),
                              (["--dp", "2"], "--tp, --cp, --dp"), (["--no-equal-nan"], "--no-equal-nan"),
                              (["--ulp", "1"], "--ulp"), (["--reference-map", "m.json"], "--reference-map")):
            done = subprocess.run([find_command(), "verify", self.path / "one", self.path / "tensors", *options],
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 2, options)
            self.assertIn(f"{name}", done.stderr)
        self.assertFalse((self.path / "a.html").exists())

    def test_nothing_to_compare_is_no_verdict(self) -> None:
        def run(folder: str, **options: typing.Any) -> None:
            torch.manual_seed(0)
            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with anyrank.capture(model, self.path / folder, optimizer, keep="sketch", **options):
                model(torch.arange(12).reshape(4, 3)).square().mean().backward()
                optimizer.step()
        run("one")
        run("later", first_step=11)
        for other, options, says in (("later", {}, "no step in common"), ("one", {"only": ["zzz*"]}, "matches none"),
                                     ("one", {"ignore": ["*"]}, "leave none")):
            with self.assertRaisesRegex(AnyrankError, says):
                self.compared("one", other, **options)

    def test_what_a_dump_leaves_out_is_left_out_beside_sketches(self) -> None:
        """Micro-batches padded to lengths of their own have activations without a place in the full batch."""
        ids = torch.tensor([[1, 2, 0], [3, 4, 0], [5, 6, 7], [8, 1, 2]])

        def run(folder: str, keep: str, batches: list[typing.Any]) -> None:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Embedding(9, 4, padding_idx=0), torch.nn.Linear(4, 3))
            with anyrank.capture(model, self.path / folder, keep=keep):
                for batch in batches:
                    (model(batch).square().sum(-1) * (batch != 0)).sum().backward()
        run("one", "sketch", [ids])
        run("other", "tensors", [ids[:2, :2], ids[2:]])
        for reference, other in (("one", "other"), ("other", "one")):
            report = self.compared(reference, other)
            self.assertTrue(report.ok, str(report))
            self.assertIn("left out: ", str(report))

    def test_the_same_samples_in_another_order(self) -> None:
        def run(folder: str, flip: bool, factor: float = 1.0) -> str:
            torch.manual_seed(0)
            model, ids = Model(), torch.arange(12).reshape(4, 3)
            with anyrank.capture(model, self.path / folder, keep="sketch"):
                (factor * model(ids.flip(0) if flip else ids).square().mean()).backward()
            return folder
        report = self.compared(run("one", False), run("other", True))
        self.assertTrue(report.ok, str(report))
        self.assertIn("activations, as the runs have the same samples in other orders", str(report))
        self.assertFalse(self.compared("one", run("further", True, 1.01)).ok)

    def test_copies_of_tensors_that_do_not_fit_into_memory(self) -> None:
        self.run_one("one", keep="sketch", clip=False)
        with unittest.mock.patch.object(_sketches, "MOST_IN_MEMORY", 1000):
            self.run_many("many", 2, ddp, 2, keep="sketch", clip=False)
        report = self.compared("one", "many")
        self.assertTrue(report.ok, str(report))
        self.assertFalse([path.name for path in (self.path / "many").iterdir() if path.name.startswith("tmp")])

    def test_a_device_has_the_figures_of_the_kernel(self) -> None:
        """By torch's operations on the CPU: bits alike, but for sums, whose order is the device's."""
        for dtype, shape in ((torch.float32, (70, 1000)), (torch.bfloat16, (3, 9, 7)), (torch.float16, (5000,)),
                             (torch.float64, (33, 65)), (torch.int64, (40, 4)), (torch.uint8, (2, 300, 70)),
                             (torch.float32, ())):
            with self.subTest(dtype=dtype, shape=shape):
                torch.manual_seed(0)
                full = (torch.randn(shape) * 50).to(dtype)
                if full.is_floating_point() and full.numel() > 9:
                    full.view(-1)[[1, 2, 3, 4]] = torch.tensor([float("nan"), float("-inf"), 0.0, -0.0]).to(dtype)
                half = full.shape[0] // 2 if shape else 0
                boxes = [_places.Box((0,) * full.dim(), (0,) * full.dim(), shape)] if not shape else [
                    _places.Box((a, *[0] * (full.dim() - 1)), (a, *[0] * (full.dim() - 1)), (n, *shape[1:]))
                    for a, n in ((0, half), (half, full.shape[0] - half))]
                entry = entry_of(full)
                one, two = (_sketches.Sketch(entry.dtype, shape) for _ in range(2))
                one.add(entry, boxes)
                with unittest.mock.patch("anyrank.capture._sketch_torch.AT_ONCE", 777):
                    two.add_on_device(full, boxes)
                a, b = one.encoded(), two.encoded()
                rows = len(a) - 4 * int.from_bytes(a[100:104], "little")
                for part in (slice(64), slice(88, 104), slice(rows, None)):
                    self.assertEqual(a[part], b[part])
                sums = [torch.frombuffer(bytearray(x[64:88] + x[104:rows]), dtype=torch.float64) for x in (a, b)]
                torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=1e-9)

    def test_a_run_that_its_device_sketches(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")
        self.run_one("one", keep="sketch", clip=False)
        with unittest.mock.patch.object(_sketches, "ON_DEVICE", ("cpu",)):
            self.run_many("many", 4, both, 2, keep="sketch", clip=False)
        report = self.compared("one", "many")
        self.assertTrue(report.ok, str(report))

    def test_every_nth_step(self) -> None:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with anyrank.capture(model, self.path / "run", optimizer, keep="sketch", every=3):
            for _ in range(8):
                model(torch.randint(0, 13, (4, 3))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        from anyrank._library import given_json, library
        run = given_json(library()["sketches_json"](str(self.path / "run").encode()))
        self.assertEqual(sorted({t["step"] for t in run["tensors"]}), [1, 4, 7])
        self.assertEqual({t["left_out"] for t in run["tensors"]}, {""})
        for options, says in (({"keep": "sketches"}, "none of"), ({"every": 0}, "every"),
                              ({"every": 2, "steps": 3}, "every"),
                              ({"keep": "sketch", "rounding": True}, "need the tensors"),
                              ({"keep": "sketch", "keep_inputs": "*"}, "need the tensors")):
            with self.assertRaisesRegex(AnyrankError, says):
                anyrank.capture(model, self.path / "no", **options)
