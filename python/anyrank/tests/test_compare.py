# SPDX-License-Identifier: Apache-2.0
"""compare_ranks without pytest, and the measured allowances that it judges by."""

from __future__ import annotations

import functools
import math
import pathlib
import tempfile
import typing
import unittest
import unittest.mock
import warnings

import anyrank
from anyrank.tests import FolderCase, needs

compare_ranks = functools.partial(anyrank.compare_ranks, timeout=3600)  # however slow the machine is


def setUpModule() -> None:
    """Dumps of ranks that differ stay, and go with this folder."""
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    patch = unittest.mock.patch("tempfile.tempdir", folder.name)
    unittest.addModuleCleanup(patch.stop)
    patch.start()


def network(mesh: typing.Any) -> typing.Any:
    """A layer whose 96 inputs are shared out over ranks, between two others."""
    import torch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = torch.nn.Sequential(torch.nn.Linear(8, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}) if mesh else model


def step_with(factor: float = 1.0) -> typing.Callable[[typing.Any, typing.Any], None]:
    """A step that multiplies one parameter's gradient on N ranks."""
    def step(model: typing.Any, mesh: typing.Any) -> None:
        import torch

        model(torch.randn(5, 8)).square().mean().backward()
        if mesh:
            model[0].bias.grad *= factor
    return step


def step_with_all(model: typing.Any, mesh: typing.Any) -> None:
    """A step that touches no gradient itself."""
    import torch

    model(torch.randn(5, 8)).square().mean().backward()


def quantised(shared: bool) -> typing.Any:
    """Values in fp8 by a scale: of all ranks' largest value, or of this rank's, which is wrong."""
    import torch

    class Quantised(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            largest = x.detach().abs().amax()
            if shared:
                torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            scale = 448 / largest
            return x + ((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x).detach()
    return Quantised()


def chosen(shared: bool) -> typing.Any:
    """A layer for the half of the tokens with the largest scores: of all ranks' tokens, or of this rank's."""
    import torch

    class Chosen(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x.detach().sum(-1)
            parts = [torch.empty_like(scores) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, scores)
            all_scores = torch.cat(parts).flatten() if shared else scores.flatten()
            least = all_scores.topk(len(all_scores) // 2).values[-1]
            return x + (scores >= least).to(x.dtype).unsqueeze(-1) * self.inner(x)
    return Chosen()


def compare_middle(middle: typing.Callable[[], typing.Any], alike: bool, dtype: str = "float32") -> typing.Any:
    """Two ranks of data parallelism with a module between two layers; alike: tokens that are nearly one another's."""
    import torch

    def build(mesh: typing.Any) -> typing.Any:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), middle(), torch.nn.Linear(16, 16))
        model = model.to(getattr(torch, dtype))
        return torch.nn.parallel.DistributedDataParallel(model) if mesh else model

    def step(model: typing.Any, mesh: typing.Any) -> None:
        x = torch.randn(1, 1, 16) + 1e-7 * torch.randn(8, 12, 16) if alike else torch.randn(8, 12, 16)
        x = x * torch.linspace(0.2, 2.0, 8).view(8, 1, 1) if not alike else x
        x = x.chunk(2)[torch.distributed.get_rank()] if mesh else x
        model(x.to(getattr(torch, dtype))).float().square().mean().backward()
    return compare_ranks(build, step, layout={"dp": 2})


@needs("torch")
class Judged(unittest.TestCase):
    def test_a_step_that_quantises_or_chooses_is_not_judged_by_its_rounding(self) -> None:
        for middle, alike in ((quantised, False), (chosen, True)):
            for shared in (True, False):
                with self.assertRaisesRegex(anyrank.AnyrankError, "^cannot judge .*: .* of its largest element.*rtol="):
                    compare_middle(lambda: middle(shared), alike)

    def test_a_choice_that_rounding_does_not_change_is_judged(self) -> None:
        compare_middle(lambda: chosen(True), False)
        with self.assertRaisesRegex(anyrank.RanksDiffer, "^1:fwd differs"):
            compare_middle(lambda: chosen(False), False)

    def test_ordinary_steps_are_judged_in_both_formats(self) -> None:
        import torch

        for dtype in ("float32", "bfloat16"):
            self.assertIsNotNone(compare_middle(torch.nn.Tanh, False, dtype))

    def test_a_factor_that_no_element_shows_is_seen_in_bf16(self) -> None:
        import torch

        def build(mesh: typing.Any) -> typing.Any:
            model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)).bfloat16()
            return torch.nn.parallel.DistributedDataParallel(model) if mesh else model

        def step(model: typing.Any, mesh: typing.Any) -> None:
            x = torch.randn(64, 64).bfloat16()
            x = x.chunk(2)[torch.distributed.get_rank()] if mesh else x
            model(x).float().square().mean().backward()
            if mesh:
                model.module[0].weight.grad *= factor
        for factor in (1.02, 0.98):
            with self.assertRaisesRegex(anyrank.RanksDiffer, "^0.weight:grad differs .*as a whole the reference times"):
                compare_ranks(build, step, layout={"dp": 2})
        factor = 1.0
        compare_ranks(build, step, layout={"dp": 2})

    def test_a_lost_gradient_is_named_whatever_is_common(self) -> None:
        def frozen(mesh: typing.Any) -> typing.Any:
            model = network(mesh)
            model[0].bias.requires_grad_(mesh is None)
            return model
        with self.assertRaisesRegex(anyrank.RanksDiffer, "^0.bias:grad is there on one rank, and not on 2 ranks"):
            compare_ranks(frozen, step_with_all, ranks=2, common=True)
        compare_ranks(frozen, step_with_all, ranks=2, common=True, ignore="0.bias:grad")


@needs("torch")
class Compare(FolderCase):
    def test_right_runs_are_let_alone(self) -> None:
        for seed in range(4):
            compared = compare_ranks(network, step_with(), ranks=2 + seed % 3, seed=seed)
            self.assertTrue(0 < compared.worst < 0.5, compared)
            self.assertEqual(compared.weak, ())
            self.assertIn("0.bias:grad", compared.allowed)

    def test_pairs_joined_in_a_batch_are_in_no_other_order(self) -> None:
        def build(mesh: typing.Any) -> typing.Any:
            import torch

            model = torch.nn.Sequential(torch.nn.Linear(8, 4))
            group = mesh.get_group("dp") if mesh else None
            return torch.nn.parallel.DistributedDataParallel(model, process_group=group) if mesh else model

        def step(model: typing.Any, mesh: typing.Any) -> None:
            import torch

            ranks, rank = (mesh.size(), mesh.get_local_rank()) if mesh else (1, 0)
            better, worse = model(torch.cat([torch.randn(4, 8).chunk(ranks)[rank] for _ in range(2)])).chunk(2)
            (worse - better).square().mean().backward()
        halves = {"dp": 0, "blocks": [1, 1]}
        result = compare_ranks(build, step, layout={"dp": 2}, spec={"shard": {"*:fwd": halves, "*:bwd": halves}})
        self.assertTrue(result.report.ok)

    def test_small_factors_are_seen(self) -> None:
        for factor in (1 + 1e-3, 1 - 1e-4):
            with self.assertRaises(anyrank.RanksDiffer) as caught:
                compare_ranks(network, step_with(factor), ranks=2, repeat="make check")
            report = caught.exception.report
            first = report.first if report is not None else None
            assert first is not None and first.ratio is not None
            self.assertEqual(first.tensor, "0.bias:grad")
            self.assertGreater(first.ratio, 2)
            self.assertTrue(factor < 1 or "the reference times 1.001" in str(caught.exception), caught.exception)
            self.assertIn("  repeat   make check\n", str(caught.exception))

    def test_a_given_rule_is_the_only_one(self) -> None:
        folder = self.path / "kept"
        compare_ranks(network, step_with(1 + 1e-3), ranks=2, rtol=1e-2, atol=1e-6, folder=folder)
        self.assertEqual({path.name for path in folder.iterdir()}, {"one", "ranks"})  # nothing was measured
        with self.assertRaisesRegex(anyrank.RanksDiffer, "0.bias:grad"):
            compare_ranks(network, step_with(1 + 1e-3), ranks=2, rtol=1e-4, atol=1e-8)
        compare_ranks(network, step_with(1 + 1e-3), ranks=2, ignore=["0.bias:grad"])

    def test_one_ranks_own_failures_are_told_from_the_others(self) -> None:
        def raises(model: typing.Any, mesh: typing.Any) -> None:
            if mesh is None:
                raise ValueError("no batch")
        with self.assertRaisesRegex(anyrank.RanksFailed, "^one rank, which the others are compared with, failed: .*"
                                                         "ValueError: no batch"):
            compare_ranks(network, raises)

        def branches(model: typing.Any, mesh: typing.Any) -> None:
            import torch

            x = torch.randn(5, 8)
            same = torch.equal(model(x), model(x))  # not where operations err
            model(x if same else x[:3]).sum().backward()
        with self.assertRaisesRegex(anyrank.AnyrankError, "depends on the last bits of its values"):
            compare_ranks(network, branches)

    def test_dumps_stay_where_ranks_differ_alone_and_that_is_said(self) -> None:
        def raising(model: typing.Any, mesh: typing.Any) -> None:
            raise ValueError("of the step")
        with tempfile.TemporaryDirectory() as name, unittest.mock.patch("tempfile.tempdir", name):
            here = pathlib.Path(name)
            compare_ranks(network, step_with(), atol=1e-4)
            self.assertEqual(list(here.glob("anyrank-*")), [])
            with self.assertRaises(anyrank.RanksFailed):
                compare_ranks(network, raising)
            self.assertEqual(list(here.glob("anyrank-*")), [])
            with self.assertRaises(anyrank.RanksDiffer) as caught:
                compare_ranks(network, step_with(factor=2.0), atol=1e-4)
            kept, = here.glob("anyrank-compare-*")
            self.assertIn(f"\n  kept     {kept}: both runs, for `look`; nothing else removes them",
                          str(caught.exception))
            self.assertLessEqual({"one", "ranks"}, {path.name for path in kept.iterdir()})
            with self.assertRaises(anyrank.RanksDiffer) as caught:
                compare_ranks(network, step_with(factor=2.0), atol=1e-4, folder=here / "own")
            self.assertNotIn("  kept ", str(caught.exception))

    def test_wrong_arguments(self) -> None:
        for options, words in (({"ranks": 0}, "has the size 0"), ({"layout": {}}, "no dimension"),
                               ({"ranks": 1}, r"^1 rank \(tp=1\) would be compared with itself: give 2 or more"),
                               ({"layout": {"dp": 1, "tp": 1}}, "compared with itself"),
                               ({"ranks": 2, "layout": {"tp": 2}}, "one of the two"),
                               ({"bits": True, "atol": 0.1}, "at most one rule")):
            with self.assertRaisesRegex(ValueError, words):
                compare_ranks(network, step_with(), **typing.cast(typing.Any, options))

    def test_what_would_compare_nothing_is_an_error_of_one_line(self) -> None:
        def forward(model: typing.Any, mesh: typing.Any) -> None:
            import torch

            model(torch.randn(5, 8))

        def parts(model: typing.Any, mesh: typing.Any) -> None:
            model[0]
        wrong: list[tuple[typing.Any, typing.Any, str]] = [
            (forward, None, r"step called no backward\(\), so no gradient would be compared: call it, or .*no_grad"),
            (parts, None, "step made no forward pass"),
            (step_with(), {"shards": {}}, r"spec: unknown key 'shards'; is 'shard' meant\?"),
            (step_with(), {"shard": {"0.weight:*": {"x": 0}}}, "mesh {'tp': 2} has no dimension 'x'"),
            (step_with(), {"shard": {"0.weight:*": {"tp": 1}}}, "by its DTensor .* the spec says 1")]
        for step, spec, words in wrong:
            with self.assertRaisesRegex(anyrank.AnyrankError, words) as caught:
                compare_ranks(network, step, spec=spec)
            self.assertNotIn("\n", str(caught.exception))

    def test_outputs_alone_are_compared_if_that_is_said(self) -> None:
        def forward(model: typing.Any, mesh: typing.Any) -> None:
            import torch

            with torch.no_grad():
                model(torch.randn(5, 8))
        self.assertGreater(compare_ranks(network, forward).report.compared, 4)

    def test_a_part_of_spec_that_says_nothing_is_warned_of(self) -> None:
        for shard, words in (({"0.wieght:*": {"tp": 0}}, "no tensor .* matches '0.wieght:.'.*nearest is '0.weight:"),
                             ({"1:fwd": {"dp": 0, "tp": -1}, "0:fwd": {"dp": 0, "tp": -1}},
                              "shard of '1:fwd' and 1 more: no effect, as the layout {'tp': 2} has no dimension 'dp'; "
                              "if the spec serves other layouts too, give it the size 1 here")):
            with self.assertWarnsRegex(UserWarning, words):
                compare_ranks(network, step_with(), spec={"shard": shard})
        with warnings.catch_warnings(record=True) as said:
            compare_ranks(network, step_with(), spec={"shard": {"1:fwd": {"dp": 0, "tp": -1}}}, dimensions=["dp"])
        self.assertEqual([str(one.message) for one in said if "no effect" in str(one.message)], [])


@needs("torch")
class Noise(unittest.TestCase):
    def test_what_errs_and_by_how_much(self) -> None:
        import torch

        from anyrank import rounding

        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            eps = torch.finfo(dtype).eps
            x = torch.rand(64, 64).to(dtype) + 1
            x[0] = 0
            operations: dict[str, typing.Callable[[typing.Any], typing.Any]] = {
                "pointwise": lambda x: x * 3, "in place": lambda x: x.clone().mul_(3), "product": lambda x: x @ x,
                "sum": lambda x: x.sum(0)}
            for name, compute in operations.items():
                exact = compute(x).double()
                with rounding.Noise(1):
                    errs, again = compute(x).double(), compute(x).double()
                off = (errs - exact).abs() / exact.abs().clamp(min=1e-300)
                off = torch.where(exact == 0, errs.abs(), off)
                self.assertTrue(0 < off.max() <= 10 * eps, f"{name} {dtype} {off.max() / eps}")
                self.assertTrue((errs[exact == 0] == 0).all(), name)
                self.assertFalse(torch.equal(errs, again), name)

    def test_what_only_moves_is_exact_and_random_numbers_stay(self) -> None:
        import torch

        from anyrank import rounding

        x = torch.randn(6, 6)

        def compute() -> list[typing.Any]:
            torch.manual_seed(3)
            y = x.t().clone()
            y[2] = 7
            return [torch.rand(3), torch.cat([x, y])[1:].reshape(-1), x.relu(), x.max(), torch.dropout(x, 0.0, True),
                    torch.nn.functional.embedding(torch.tensor([1, 2]), x), x.double(), x.sort().values]
        exact = compute()
        with rounding.Noise(1):
            noisy = compute()
        for a, b in zip(exact, noisy):
            self.assertTrue(torch.equal(a, b))

    def test_parts_of_dtensors_err(self) -> None:
        """FSDP's norm of all gradients is a DTensor of partial norms, which has no copy_ of its own."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from anyrank import rounding
        from anyrank.tests.torch_names import Shard, distribute_tensor, since
        since("2.6", "the norm of all gradients")

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            w = torch.nn.Parameter(distribute_tensor(torch.rand(8, 4), init_device_mesh("cpu", (1,)), [Shard(0)]))
            w.grad = w.detach() + 1
            exact = torch.nn.utils.get_total_norm([w.grad]).full_tensor()
            with rounding.Noise(1):
                off = torch.nn.utils.clip_grad_norm_([w], 1e9).full_tensor() / exact - 1
        finally:
            dist.destroy_process_group()
        self.assertTrue(0 < abs(off) < 1e-5, off)

    def test_backward_errs_too_and_runs_repeat(self) -> None:
        import torch

        from anyrank import rounding

        def gradient(seed: int | None) -> typing.Any:
            w = torch.ones(16, 16, requires_grad=True)
            x = torch.linspace(0, 1, 64).reshape(4, 16)
            if seed is None:
                (x @ w).tanh().sum().backward()
            else:
                with rounding.Noise(seed):
                    (x @ w).tanh().sum().backward()
            return w.grad
        self.assertTrue(torch.equal(gradient(1), gradient(1)))
        self.assertFalse(torch.equal(gradient(1), gradient(2)))
        self.assertFalse(torch.equal(gradient(1), gradient(None)))


@needs("torch")
class Allowances(FolderCase):
    def test_normal_is_what_rounding_explains(self) -> None:
        """Sums in another order are; a wrong scale, a lost micro-batch and a wrong epsilon are not."""
        import contextlib

        import torch

        from anyrank import rounding

        def run(folder: typing.Any, noise: typing.Any = None, split: bool = False, scale: float = 1.0,
                eps: float = 1e-5, lost: bool = False, dtype: typing.Any = torch.float32) -> None:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32, eps=eps), torch.nn.GELU(),
                                        torch.nn.Linear(32, 16)).to(dtype)
            with torch.no_grad():
                model[3].weight.mul_(scale)
            x = torch.randn(8, 16).to(dtype)
            with anyrank.capture(model, folder), noise or contextlib.nullcontext():
                halves = [x[:4], x[4:]] if split or lost else [x]
                for half in halves[:1] if lost else halves:
                    (model(half).float().square().sum() / x.numel()).backward()

        for dtype in (torch.float32, torch.bfloat16):
            path = self.path / f"allowed-{dtype}.safetensors"
            rounding.measure(lambda folder, noise: run(folder, noise, dtype=dtype), path, 9)
            run(self.path / f"one-{dtype}", dtype=dtype)
            cases: list[tuple[dict[str, typing.Any], bool]] = [({"split": True}, True), ({"scale": 1.01}, False),
                                                               ({"lost": True}, False)]
            for i, (change, normal) in enumerate(cases + [({"eps": 1e-3}, False)] * (dtype == torch.float32)):
                other = self.path / f"other-{dtype}-{i}"
                run(other, dtype=dtype, **change)
                only = "*:grad" if "split" in change or "lost" in change else "*"
                report = anyrank.verify(self.path / f"one-{dtype}", other, normal=True, sensitivity=path, only=only)
                self.assertEqual(report.ok, normal, f"{dtype} {change} {report}")

    def test_file(self) -> None:
        """8 times the largest difference and a step of the largest element; of a single value 100 times."""
        import struct

        from anyrank import _safetensors, rounding

        def dump(name: str, many: list[float], one: float) -> typing.Any:
            folder = self.path / name
            folder.mkdir()
            _safetensors.write(folder / "rank-00000.safetensors", {
                "many:fwd": _safetensors.Entry("F32", (2,), memoryview(struct.pack("<2f", *many))),
                "none:fwd": _safetensors.Entry("F32", (0,), memoryview(b"")),
                "ids:fwd": _safetensors.Entry("I64", (1,), memoryview(struct.pack("<q", 3))),
                "one:fwd": _safetensors.Entry("F32", (), memoryview(struct.pack("<f", one)))})
            return folder
        reference = dump("one", [1.0, -4.0], 2.0)
        draws = [dump("a", [1.0, -4.25], 2.0), dump("b", [1.5, -4.0], 2.5)]
        path = self.path / "allowed.safetensors"
        allowed = rounding.allowances(reference, draws, path)
        step = 2.0**-23
        self.assertEqual(allowed["many:fwd"], (8 * 0.5 + 4 * step, 4.0))
        self.assertEqual(allowed["one:fwd"], (100 * 0.5 + 2 * step, 2.0))
        self.assertEqual((allowed["none:fwd"].allowed, allowed["ids:fwd"].allowed), (0.0, 0.0))
        entries, metadata = _safetensors.read(path)
        self.assertEqual(struct.unpack("<d", entries["one:fwd"].data)[0], allowed["one:fwd"].allowed)
        self.assertEqual(metadata["anyrank.seeds"], "2")
        self.assertTrue(math.isfinite(allowed["many:fwd"].allowed))
        report = anyrank.verify(reference, draws[1], sensitivity=path)
        self.assertEqual((report.result, report.unjudged), ("unjudged", ("many:fwd",)))  # as much as it is
        self.assertEqual((report.different, report.ok), (0, False))


if __name__ == "__main__":
    unittest.main()
