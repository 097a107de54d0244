# SPDX-License-Identifier: Apache-2.0
"""Capture on several ranks: the parts that each writes make the tensors of one rank, whatever divides them."""

from __future__ import annotations

import pathlib
import shutil
import typing
import unittest
import unittest.mock
import warnings

import numpy as np

import anyrank
from anyrank import AnyrankError, ranks
from anyrank._command import find_command
from anyrank._safetensors import read
from anyrank.tests import FolderCase, needs

try:
    import torch
    import torch.distributed as dist
    from torch import nn
except ImportError:
    nn = torch = dist = typing.cast(typing.Any, None)  # every test here is skipped

Module: typing.Any = nn.Module if nn is not None else object
Wrap = typing.Callable[[typing.Any], typing.Any]


class Model(Module):  # type: ignore[misc]
    """Blocks of up and down, 10 features wide: 4 ranks have 3, 3, 3 and 1 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 10))
                                    for _ in range(2))
        self.head = nn.Linear(10, 13)

    def forward(self, ids: typing.Any) -> typing.Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Pair(Module):  # type: ignore[misc]
    """A block that gives out two tensors, as those of transformers do."""

    def __init__(self, block: typing.Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: typing.Any) -> typing.Any:
        y = self.block(x)
        return y, y.softmax(-1)


class Pairs(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(block) for block in self.blocks)

    def forward(self, ids: typing.Any) -> typing.Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)[0]
        return self.head(x)


class Routed(Model):
    """Experts in a list, each called with the rows of its own tokens."""

    cut = -1  # the rank that gives the last module no gradient

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(10, 10) for _ in range(7))
        self.last = nn.Linear(10, 10)

    def forward(self, ids: typing.Any) -> typing.Any:
        x = self.embed(ids)
        rows = x.flatten(0, 1)
        y = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            mine = (ids.flatten() % 7 == i).nonzero().flatten()
            y = y.index_add(0, mine, expert(rows[mine])) if len(mine) else y
        last = self.last(x + y.view_as(x))
        return self.head(x + (last.detach() if dist.is_initialized() and dist.get_rank() == self.cut else last))


class Within(Module):  # type: ignore[misc]
    """A module that holds the model, whose rows of ids that came are the gradient of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()
        self.inner.embed = nn.Embedding(13, 10, sparse=True)

    def forward(self, ids: typing.Any) -> typing.Any:
        return self.inner(ids)


def ddp_within(model: typing.Any) -> typing.Any:
    model.inner = ddp(model.inner)
    return model


def ddp_of_some(model: typing.Any) -> typing.Any:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...] | None = None) -> typing.Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def ddp(model: typing.Any) -> typing.Any:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: typing.Any, mesh: typing.Any = None) -> typing.Any:
    from anyrank.tests.torch_names import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loaded_as_shards(model: typing.Any) -> typing.Any:
    """As transformers loads: divided without values, then every parameter replaced by one with this rank's part."""
    from anyrank.tests.torch_names import distribute_tensor

    values = model.state_dict()
    with torch.device("meta"):
        model = fsdp(type(model)(), mesh_of((dist.get_world_size(),)))
    for name, p in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        shard = distribute_tensor(values[name], p.device_mesh, p.placements)
        setattr(model.get_submodule(owner), key, nn.Parameter(shard))
    return model


def hybrid(model: typing.Any) -> typing.Any:
    return fsdp(model, mesh_of((2, 2), ("dp_replicate", "dp_shard")))


def tensor_parallel(model: typing.Any, mesh: typing.Any = None) -> typing.Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh or mesh_of((dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return model


def both(model: typing.Any) -> typing.Any:
    mesh = mesh_of((2, 2), ("fsdp", "tp"))
    return fsdp(tensor_parallel(model, mesh["tp"]), mesh["fsdp"])


def train(model: typing.Any, folder: pathlib.Path, wrap: Wrap | None, samples: tuple[int, int] = (0, 1), micro: int = 1,
          clip: bool = True, order: str = "by_micro_batch", adam: float = 0, **options: typing.Any) -> None:
    """Two steps on part samples[0] of samples[1] of the batch."""
    model = wrap(model) if wrap else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=adam) if adam else (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    part, parts = samples
    ids = torch.randint(0, 13, (8, 3), generator=torch.Generator().manual_seed(5))
    with anyrank.capture(model, folder, optimizer, **options):
        for _ in range(2):
            batches = ids.chunk(micro)
            own = [b.chunk(parts)[part] for b in batches]
            if order != "by_micro_batch":
                own = (ids.chunk(parts)[part] if order == "by_rank" else ids[part::parts]).chunk(micro)
            for b in own:
                (nn.functional.cross_entropy(model(b).flatten(0, 1), b.flatten()) / micro).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()


def batch_of(n: int) -> typing.Any:
    return torch.randint(0, 13, (n, 5), generator=torch.Generator().manual_seed(3))


@needs("torch")
class Placed(FolderCase):
    def setUp(self) -> None:
        super().setUp()
        try:
            find_command()
        except AnyrankError as error:
            self.skipTest(str(error))

    def same(self, world: int, wrap: Wrap | None, groups: int = 0, tensors: int = 0, kind: typing.Any = Model,
             **options: typing.Any) -> None:
        """That `world` ranks, with `groups` data-parallel ones among them, have what one rank has."""
        groups = groups or world

        def run(rank: int, folder: pathlib.Path, wrap: Wrap | None, groups: int) -> None:
            torch.manual_seed(0)
            train(kind(), folder, wrap, (rank * groups // max(world, 1) if wrap else 0, groups), **options)

        one = {key: value for key, value in options.items() if key in ("clip", "adam")}
        torch.manual_seed(0)
        train(kind(), self.path / "one", None, **one)
        ranks.spawn(world, run, self.path / "many", wrap, groups)
        self.verify(adam=bool(options.get("adam")), tensors=tensors)

    def verify(self, adam: bool, tensors: int) -> None:
        """As pytorch.md says: under Adam the first step, and the updates of all."""
        rules: list[dict[str, typing.Any]] = [{"atol": 1e-6}]
        if adam:
            rules = [{"atol": 1e-5, "ignore": ["*@*"]}, {"atol": 1e-5, "only": ["*:new*", "*:grad*"]}]
        for rule in rules:
            report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, **rule)
            self.assertTrue(report.ok, str(report))
        if tensors:
            self.assertIn(f": {tensors} tensors, ", str(report))

    def test_ddp(self) -> None:
        self.same(2, ddp, tensors=2 * 72 + 16)

    def test_ddp_within_the_model_and_sparse_gradients(self) -> None:
        self.same(2, ddp_within, kind=Within, clip=False)

    def test_experts_of_a_list_that_some_ranks_do_not_call(self) -> None:
        for micro in (1, 2):
            self.same(4, ddp_of_some, kind=Routed, micro=micro)

    def test_a_rank_without_a_part_of_a_tensor_is_a_difference(self) -> None:
        cut = type("Cut", (Routed,), {"cut": 1})

        def run(rank: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            with warnings.catch_warnings(record=True) as notes:
                train(cut(), folder, ddp_of_some, (rank, 2))
            if rank == 0 and not any("rank 1 has no part of 2 tensors" in str(note.message) for note in notes):
                raise AssertionError(notes)
        torch.manual_seed(0)
        train(cut(), self.path / "one", None)
        ranks.spawn(2, run, self.path / "many")
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-6)
        self.assertIn(("last:bwd", "shape"), [(t.tensor, t.state) for t in report.tensors], str(report))

    def same_of(self, world: int, run: typing.Callable[[int, int, pathlib.Path], None],
                **rule: typing.Any) -> typing.Any:
        """The report of one rank against `world` ranks of a program: run(rank, world, folder)."""
        torch.manual_seed(0)
        run(0, 1, self.path / "one")
        ranks.spawn(world, lambda rank: run(rank, world, self.path / "many"))
        return anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-6, **rule)

    def test_a_recurrent_layers_states_and_sequences_have_their_samples_in_the_middle(self) -> None:
        class Net(nn.Module):  # type: ignore[misc]
            def __init__(self, first: bool) -> None:
                super().__init__()
                self.first, self.rnn, self.head = first, nn.GRU(4, 6, num_layers=2, batch_first=first), nn.Linear(6, 1)

            def forward(self, x: typing.Any) -> typing.Any:
                y, _ = self.rnn(x if self.first else x.transpose(0, 1).tanh())
                return self.head(y if self.first else y.transpose(0, 1))

        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = Net(first)
            x = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
            model = ddp(model) if world > 1 else model
            with anyrank.capture(model, folder):
                model(x).square().mean().backward()

        for first in (True, False):
            report = self.same_of(2, run)
            self.assertTrue(report.ok, str(report))
            self.assertEqual(report.ragged, 0, report.text)

    def test_places_that_shapes_do_not_tell_are_told_by_values(self) -> None:
        class Net(nn.Module):  # type: ignore[misc]
            """Relative biases of as many heads as a rank has samples, probabilities [b * heads, s, s], [s, b, h]."""

            def __init__(self) -> None:
                super().__init__()
                self.table, self.probs = nn.Embedding(9, 2), nn.Softmax(-1)
                self.bias, self.turn, self.lin = nn.Identity(), nn.Identity(), nn.Linear(4, 4)

            def forward(self, x: typing.Any) -> typing.Any:
                s = x.shape[1]
                at = torch.arange(s)[:, None] - torch.arange(s)[None] + 4
                bias = self.bias(self.table(at).permute(2, 0, 1))  # [heads, s, s]
                scores = (x @ x.transpose(1, 2))[:, None] + bias
                probs = self.probs(scores.flatten(0, 1)).unflatten(0, (-1, 2)).mean(1)
                return self.lin(self.turn((probs @ x).permute(1, 0, 2)[:, :, None]).squeeze(2).transpose(0, 1))

        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = Net()
            x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
            model = ddp(model) if world > 1 else model
            with anyrank.capture(model, folder):
                model(x).square().mean().backward()

        report = self.same_of(2, run)
        self.assertTrue(report.ok, str(report))
        self.assertEqual(report.ragged, 1, report.text)
        self.assertIn("turn:", report.text)
        self.assertIn("it depends on the samples, and nothing says in which dimension", report.text)

    def test_ranks_with_other_numbers_of_steps_are_a_finding(self) -> None:
        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
            with anyrank.capture(model, folder, spec={"mesh": {"dp": world}, "mean_over": "dp"}):
                for _ in range(3 - rank):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    if world > 1:
                        for p in model.parameters():
                            torch.distributed.all_reduce(p.grad) if rank == 9 else None
                    optimizer.step()

        for common in (False, True):
            report = self.same_of(2, run, common=common)
            self.assertFalse(report.ok)
            self.assertEqual(report.first.tensor if report.first else "", "steps:count", str(report))
            self.assertIn("a step that not all ranks made (2 to 3)", report.text)

    def test_trainers_losses_are_those_of_all_ranks_without_a_spec(self) -> None:
        class Net(nn.Module):  # type: ignore[misc]
            """As transformers' models: the sum over a rank's targets, over those of all ranks."""

            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(4, 4)

            def forward(self, x: typing.Any) -> typing.Any:
                y = self.lin(x)
                return {"loss": y.square().sum() / 16, "logits": y}

        class Wrapper(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.base = Net()

            def forward(self, x: typing.Any) -> typing.Any:
                return self.base(x)

        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = Wrapper()
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
            model = ddp(model) if world > 1 else model
            with anyrank.capture(model, folder, spec=spec):
                for part in x.chunk(2):
                    (model(part)["loss"] * world).backward()

        for spec in ({"samples": "by_rank"}, {"samples": "by_rank", "partial": {"loss:fwd": "dp"}}):
            report = self.same_of(2, run)
            self.assertTrue(report.ok, str(report))
            with anyrank.open_dump(self.path / "many") as many:
                self.assertIn("loss:fwd", list(many))

    def test_samples_in_another_order_are_compared_one_by_one(self) -> None:
        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Flatten(0, 1), nn.Linear(4, 2))
            model = ddp(model) if world > 1 else model
            x = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
            mine = x[rank::world] if dealt else x.flip(0).chunk(world)[rank]
            mine = mine if dealt or world == 1 else mine * factor
            with anyrank.capture(model, folder):
                for part in mine.chunk(2):
                    (model(part).square().mean() / 2).backward()

        for dealt, factor, ok in ((True, 1.0, True), (False, 1.0, True), (False, 1.5, False)):
            report = self.same_of(2, run)
            self.assertEqual(report.ok, ok, str(report))
            self.assertEqual(report.reordered > 5, ok, report.text)

    def test_as_many_tokens_in_another_shape_leave_activations_out(self) -> None:
        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Linear(4, 4)
            model = ddp(model) if world > 1 else model
            x = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(1)).chunk(world, 1)[rank]
            with anyrank.capture(model, folder):
                model(x).square().mean().backward()

        report = self.same_of(2, run)
        self.assertTrue(report.ok, str(report))
        self.assertIn("as many tokens are given in another shape: [1,8,4], [2,4,4]", report.text)

    def test_gradients_that_are_reduced_in_16_bits_are_allowed_for_and_a_factor_is_seen(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            inner = model
            if world > 1:
                model = ddp(model)
                model.register_comm_hook(None, bf16_compress_hook)
            with anyrank.capture(model, folder):
                for step in range(2):
                    optimizer.zero_grad()
                    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
                    model(x).square().sum(-1).mean().backward()
                    inner[0].weight.grad *= factor if world > 1 else 1.0
                    optimizer.step()

        for factor, ok in ((1.0, True), (1.02, False)):
            report = self.same_of(2, run)
            self.assertEqual(report.ok, ok, str(report))
        self.assertEqual(report.first.tensor if report.first else "", "0.weight:grad", str(report))

    def test_updates_that_are_orthogonalised_in_16_bits_are_allowed_for(self) -> None:
        """Two samples give gradients of rank 2, so that rounding decides most directions of an update."""
        if not hasattr(torch.optim, "Muon"):
            self.skipTest("this version of torch has no Muon")

        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Sequential(nn.Linear(16, 64, bias=False), nn.Tanh(), nn.Linear(64, 16, bias=False))
            wrong = fault if world > 1 else ""
            options: dict[str, typing.Any] = {"lr": 1e-2 * (1.1 if wrong == "rate" else 1.0), "weight_decay": 0.0,
                                              "nesterov": wrong != "nesterov"}
            optimizer = torch.optim.Muon(model.parameters(), **options)
            rows = [p[:1] for p in model.parameters()] if wrong == "row" else []
            model = ddp(model) if world > 1 else model
            with anyrank.capture(model, folder):
                for step in range(2):
                    optimizer.zero_grad()
                    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
                    model(x).square().mean().backward()
                    lost = [row.detach().clone() for row in rows]
                    optimizer.step()
                    for row, value in zip(rows, lost):
                        row.data.copy_(value)

        for fault, tensor in (("", ""), ("rate", "0.weight:new"), ("row", "0.weight:new"),
                              ("nesterov", "0.weight:new@2")):
            with self.subTest(fault):
                report = self.same_of(2, run)
                self.assertEqual(report.first.tensor if report.first else "", tensor, str(report))

    def test_a_vector_beside_an_output_is_no_activation(self) -> None:
        class Net(nn.Module):  # type: ignore[misc]
            """As Megatron's layers, which give out (output, bias), of activations [s, b, h]."""

            def __init__(self) -> None:
                super().__init__()
                self.proj = Proj(4, 4)

            def forward(self, x: typing.Any, weight: typing.Any) -> typing.Any:
                y, bias = self.proj(x)
                return (y + bias) * weight

        class Proj(nn.Linear):  # type: ignore[misc]
            def forward(self, x: typing.Any) -> typing.Any:
                return nn.functional.linear(x, self.weight), self.bias

        def run(rank: int, world: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = Net()
            model = ddp(model) if world > 1 else model
            x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)).chunk(world, 1)[rank]
            with anyrank.capture(model, folder, spec={"shard": {"*:fwd": {"dp": 1}, "*:bwd": {"dp": 1}}}):
                model(x, torch.ones(4)).square().mean().backward()

        report = self.same_of(2, run)
        self.assertTrue(report.ok, str(report))

    def test_a_glob_for_activations_says_nothing_of_the_model_s_inputs(self) -> None:
        class Net(nn.Module):  # type: ignore[misc]
            """Activations [tokens, samples, 4] of ids [samples, tokens]. One of its modules is called as inputs are."""

            def __init__(self) -> None:
                super().__init__()
                self.tp, self.rank = 1, 0
                self.embed, self.input = nn.Embedding(32, 4), nn.Sequential()
                self.input.add_module("lin", nn.Linear(4, 4))

            def forward(self, ids: typing.Any) -> typing.Any:
                return self.input(self.embed(ids.T.chunk(self.tp)[self.rank % self.tp]))

        def run(rank: int, world: int, folder: pathlib.Path, kind: str, cut: int, shard: typing.Any,
                wrong: bool = False) -> None:
            torch.manual_seed(0)
            model = Net()
            ids = torch.arange(24).reshape(6, 4)
            ids = (ids + 2 * (rank == 1)) if wrong else ids
            spec = {"mesh": {kind: world}, "shard": shard}
            if kind == "tp":
                model.tp, model.rank = world, rank
            else:
                ids = ids.chunk(world, cut)[rank].contiguous()
            with anyrank.capture(model, folder, spec=spec, values=["fwd"], only=["input.*", "embed*"]):
                model(ids).square().mean().backward()

        def compared(kind: str, cut: int, shard: typing.Any) -> typing.Any:
            folder = self.path / f"{kind}-{len(shard)}"
            for name, world, wrong in (("one", 1, False), ("two", 2, False), ("wrong", 2, True)):
                ranks.spawn(world, run, world, folder / name, kind, cut, shard, wrong)
            right, wrong_one = (anyrank.verify(folder / "one", folder / name) for name in ("two", "wrong"))
            self.assertTrue(right.ok, str(right))
            return right, wrong_one.first.tensor if wrong_one.first else ""

        activations = {"*:fwd": {"dp": 1, "cp": 0, "tp": 0}}
        right, first = compared("tp", 0, activations)  # ranks have all ids, and each the activations of its tokens
        self.assertEqual((right.compared, right.ragged, first), (3, 0, "embed:fwd"))
        for kind, cut in (("dp", 0), ("cp", 1)):
            right, first = compared(kind, cut, activations)
            self.assertEqual((right.compared, right.ragged, first), (2, 1, "embed:fwd"), kind)
            self.assertIn("input.0:fwd", right.text)
            right, first = compared(kind, cut, {"input.0:fwd": {"dp": 0, "cp": 1}, **activations})
            self.assertEqual((right.compared, right.ragged, first), (3, 0, "input.0:fwd"), kind)

    def test_all_outputs_of_a_module_with_heads_of_a_rank_have_their_place(self) -> None:
        class Heads(nn.Module):  # type: ignore[misc]
            """q, k and v of four heads and two, [samples, tokens, heads, 4]: views, or computed from them (rotated)."""

            def __init__(self, form: str, wrong: int) -> None:
                super().__init__()
                self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
                self.form, self.wrong = form, wrong

            def forward(self, x: typing.Any) -> typing.Any:
                out = [linear(x).unflatten(-1, (-1, 4)) for linear in (self.q, self.k, self.v)]
                if self.form == "turned":
                    out = [t.transpose(1, 2) for t in out]
                if self.form == "rotated":
                    out = [torch.cat([-t[..., 2:], t[..., :2]], -1) for t in out]
                if self.wrong:
                    out[2] = out[2] * 1.5
                return tuple(out)

        def run(rank: int, world: int, folder: pathlib.Path, form: str, tokens: int, wrong: int = -1) -> None:
            from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
            torch.manual_seed(0)
            model = nn.ModuleDict({"heads": Heads(form, rank == wrong)})
            if world > 1:
                plan = {f"heads.{name}": ColwiseParallel(use_local_output=form != "dtensor") for name in "qkv"}
                parallelize_module(model, mesh_of((world,), ("tp",)), plan)
            with anyrank.capture(model, folder):
                x = torch.randn(3, tokens, 8)
                sum(t.square().sum() for t in model["heads"](x)).backward()

        for form, tokens in (("dtensor", 5), ("view", 5), ("view", 2), ("turned", 2), ("rotated", 5), ("rotated", 2)):
            folder = self.path / f"{form}{tokens}"
            run(0, 1, folder / "one", form, tokens)
            ranks.spawn(2, run, 2, folder / "many", form, tokens)
            report = anyrank.verify(folder / "one", folder / "many", only=["heads*:fwd", "heads*:grad"], rtol=1e-4,
                                    atol=1e-6)
            self.assertTrue(report.ok, f"{form}: {report}")
            # q of two heads and two tokens, which nothing but its values tells apart, is left out.
            left = int((form, tokens) == ("rotated", 2))
            self.assertEqual((report.compared, report.ragged), (12 - left, left), f"{form}: {report}")
        ranks.spawn(2, run, 2, self.path / "wrong", "view", 5, 1)
        report = anyrank.verify(self.path / "view5" / "one", self.path / "wrong", only=["heads*:fwd"], rtol=1e-4,
                                atol=1e-6)
        self.assertEqual([(row.tensor, row.rank) for row in report.tensors], [("heads.2:fwd", 1)], str(report))

    def test_a_pipeline_by_hand_has_its_micro_batches_in_whichever_order_it_calls_its_layers(self) -> None:
        """Stages that call their layers, and not the model: forward and backward in turns, all forward first, and all
        losses of the last stage as one sum. On one rank the model is called."""
        loss_of = nn.functional.cross_entropy

        class Deep(nn.Module):  # type: ignore[misc]
            def __init__(self, stage: int | None) -> None:
                super().__init__()
                layers = {"embed": nn.Embedding(13, 6), "0": nn.Linear(6, 6), "act": nn.Tanh(), "1": nn.Linear(6, 13)}
                stages = [list(layers.items())[:2], list(layers.items())[2:]]
                self.layers = nn.ModuleDict(dict(layers.items() if stage is None else stages[stage]))

            def forward(self, x: typing.Any) -> typing.Any:
                for layer in self.layers.values():
                    x = layer(x)
                return x

        def first_stage(model: typing.Any, ids: typing.Any, form: str) -> None:
            made = []
            for part in ids:
                made.append(model.forward(part))  # which is no call of the model
                dist.send(made[-1].detach(), 1)
                if form == "turns":
                    back_into([made[-1]])
            back_into(made if form != "turns" else [])

        def back_into(made: list[typing.Any]) -> None:
            grads = [torch.empty_like(y) for y in made]
            for grad in grads:
                dist.recv(grad, 1)
            torch.autograd.backward(made, grads)

        def last_stage(model: typing.Any, ids: typing.Any, form: str) -> None:
            buffers, losses = [torch.empty(2, 5, 6) for _ in ids], []
            for x, part in zip(buffers, ids):
                dist.recv(x, 0)
                y = model.forward(x.requires_grad_())
                losses.append(loss_of(y.flatten(0, 1), part.flatten()) / len(ids))
                if form == "turns":
                    losses.pop().backward()
                    dist.send(x.grad, 0)
            for loss in [sum(losses)] if form == "sum" else losses:
                loss.backward()
            for x in buffers if form != "turns" else []:
                dist.send(x.grad, 0)

        def run(rank: int, folder: pathlib.Path, form: str) -> None:
            torch.manual_seed(0)
            whole = Deep(None)
            model = whole if rank < 0 else Deep(rank)
            model.load_state_dict({name: t for name, t in whole.state_dict().items() if name in model.state_dict()})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ids = batch_of(6).chunk(3)
            with anyrank.capture(model, folder, spec={"mesh": {"pp": 2}} if rank >= 0 else None):
                for _ in range(2):
                    if rank < 0:
                        for part in ids:
                            (loss_of(model(part).flatten(0, 1), part.flatten()) / len(ids)).backward()
                    else:
                        (last_stage if rank else first_stage)(model, ids, form)
                    optimizer.step()
                    optimizer.zero_grad()

        run(-1, self.path / "one", "")
        for form in ("turns", "all", "sum"):
            ranks.spawn(2, run, self.path / form, form)
            report = anyrank.verify(self.path / "one", self.path / form, rtol=1e-4, atol=1e-6, ignore=["output:fwd*"])
            self.assertTrue(report.ok, f"{form}: {report}")
            self.assertEqual((report.compared, report.ragged), (44, 0), f"{form}: {report}")

    def test_fsdp2_with_uneven_shards(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")
        self.same(4, fsdp)
        self.same(2, loaded_as_shards)

    def test_fsdp2_of_blocks_that_give_out_two_tensors(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")
        self.same(2, fsdp, kind=Pairs)

    def test_hybrid_sharding_under_adam(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")
        self.same(4, hybrid, adam=1e-2)

    def test_tensor_parallelism_on_a_mesh_without_names(self) -> None:
        self.same(2, tensor_parallel, 1, clip=False)

    def test_fsdp2_over_tensor_parallelism_whose_shards_are_strided(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")
        self.same(4, both, 2, clip=False)

    def test_micro_batches_in_each_order(self) -> None:
        for order in ("by_micro_batch", "by_rank", "dealt"):
            self.same(2, ddp, micro=2, order=order, spec={"samples": order})
            report = anyrank.verify(self.path / "one/inputs", self.path / "many/inputs", rtol=1e-4, atol=1e-6)
            self.assertTrue(report.ok, str(report))
            for path in (self.path / "one", self.path / "many"):
                shutil.rmtree(path)

    def test_samples_in_an_order_that_nobody_told_are_read_in_the_reference_s(self) -> None:
        self.same(2, ddp, micro=2, order="by_rank")
        self.assertTrue(self.apart(aligned=False))
        self.assertFalse(self.apart(aligned=True))  # what explains a difference reads the same samples

    def apart(self, aligned: bool) -> bool:
        """Whether activations of the two runs are of other samples."""
        for folder in ("", "inputs"):
            one, many = (anyrank.Dump(self.path / run / folder) for run in ("one", "many"))
            for _ in range(2 if aligned else 0):  # a second time changes nothing
                many.align(one)
            for name in one:
                if name.endswith(":fwd") and not np.allclose(one[name], many[name], rtol=1e-4, atol=1e-6):
                    return True
        return False

    def test_ddp_that_wraps_inside_of_the_block(self) -> None:
        def run(rank: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model = Model()
            with anyrank.capture(model, folder, values=["fwd", "bwd", "grad"]):
                outer = ddp(model) if rank >= 0 else model
                ids = torch.randint(0, 13, (4, 3), generator=torch.Generator().manual_seed(5))
                ids = ids.chunk(2)[rank] if rank >= 0 else ids
                nn.functional.cross_entropy(outer(ids).flatten(0, 1), ids.flatten()).backward()
        run(-1, self.path / "one")
        ranks.spawn(2, run, self.path / "many")
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-6)
        self.assertTrue(report.ok, str(report))

    def test_each_rank_has_the_state_of_its_own_share_under_zero(self) -> None:
        def run(rank: int, folder: pathlib.Path) -> None:
            from torch.distributed.optim import ZeroRedundancyOptimizer
            torch.manual_seed(0)
            model = ddp(Model()) if rank >= 0 else Model()
            o = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1) if rank >= 0 else (
                torch.optim.AdamW(model.parameters(), lr=0.1))
            ids = torch.randint(0, 13, (4, 3), generator=torch.Generator().manual_seed(5))
            ids = ids.chunk(2)[rank] if rank >= 0 else ids
            with anyrank.capture(model, folder, o, values=["m", "v", "new"]):
                nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                o.step()
        run(-1, self.path / "one")
        ranks.spawn(2, run, self.path / "many")
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-5)
        self.assertTrue(report.ok, str(report))
        held = [set(read(path)[0]) for path in sorted((self.path / "many").glob("*.safetensors"))]
        self.assertTrue(any(name.endswith(":m") for name in held[0] - held[1]))
        self.assertTrue(any(name.endswith(":m") for name in held[1] - held[0]))

    def test_stages_of_a_pipeline(self) -> None:
        from torch.distributed import pipelining

        from anyrank.tests.torch_names import since
        since("2.5", "pipeline stages without example inputs")

        def run(rank: int, folder: pathlib.Path, schedule: typing.Any) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 3), nn.Linear(3, 4))
            x, y = torch.randn(8, 3), torch.randn(8, 4)
            if schedule:
                for name in (("2", "3"), ("0", "1"))[rank]:
                    delattr(model, name)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with anyrank.capture(model, folder, spec={"mesh": {"pp": 2}} if schedule else None, optimizer=optimizer):
                if schedule:
                    stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"))
                    given = {"target": y} if rank else {}
                    run = schedule(stage, 4, lambda a, b: (a - b).square().sum(), scale_grads=False)
                    run.step(*[x][rank:], **given)
                else:
                    (model(x) - y).square().sum().backward()
                optimizer.step()

        ranks.spawn(1, run, self.path / "one", None)
        for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
            ranks.spawn(2, run, self.path / "many", schedule)
            self.verify(adam=False, tensors=29)

    def test_a_module_without_weights_that_stages_share(self) -> None:
        """Each stage counts its calls from the first; one rank counts them all."""
        from torch.distributed import pipelining

        from anyrank.tests.torch_names import since
        since("2.5", "pipeline stages without example inputs")

        class Net(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.act = nn.GELU()
                self.layers = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in range(4)})

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers.values():
                    x = self.act(layer(x))
                return x

        def run(rank: int, folder: pathlib.Path, stages: int, wrong: bool = False) -> None:
            torch.manual_seed(0)
            model: typing.Any = Net()
            x, y = torch.randn(8, 3), torch.randn(8, 3)
            for name in (("1", "2", "3"), ("0",))[rank] if stages > 1 else ():
                del model.layers[name]
            if wrong and rank:
                model.layers["3"].bias.data += 0.1
            with anyrank.capture(model, folder, spec={"mesh": {"pp": 2}} if stages > 1 else None):
                if stages > 1:
                    stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"))
                    pipelining.ScheduleGPipe(stage, 2, nn.functional.mse_loss).step(*[x][rank:],
                                                                                  **({"target": y} if rank else {}))
                else:
                    nn.functional.mse_loss(model(x), y).backward()

        ranks.spawn(1, run, self.path / "one", 1)
        ranks.spawn(2, run, self.path / "many", 2)
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-5, atol=1e-7)
        self.assertTrue(report.ok, str(report))
        self.assertIn("several stages of the pipeline call the module", str(report))
        ranks.spawn(2, run, self.path / "wrong", 2, True)
        wrong = anyrank.verify(self.path / "one", self.path / "wrong", rtol=1e-5, atol=1e-7)
        self.assertTrue(wrong.first and wrong.first.tensor == "layers.3.bias:init", str(wrong))

    def test_a_schedule_is_captured_with_all_stages_of_a_rank(self) -> None:
        """Of a mean loss a schedule divides the gradients once all micro-batches have gone backward."""
        from torch.distributed import pipelining

        from anyrank.tests.torch_names import since
        since("2.5", "pipeline stages without example inputs")

        def run(rank: int, folder: pathlib.Path, schedule: typing.Any, stages: typing.Any, scaled: bool) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)))
            x, y = torch.randn(8, 4), torch.randn(8, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if schedule is None:
                with anyrank.capture(model, folder, optimizer):
                    (model(x) - y).square().mean().backward()
                    optimizer.step()
                return
            held = stages[rank]
            parts: list[typing.Any] = []
            for i in held:
                parts.append(nn.Sequential())
                parts[-1].add_module(str(i), model[i])
            of_rank = [pipelining.PipelineStage(part, i, 4, torch.device("cpu")) for part, i in zip(parts, held)]
            loss = nn.functional.mse_loss
            whole = schedule(of_rank, 4, (lambda a, b: loss(a, b) / (1 if scaled else 4)), scale_grads=scaled)
            given = whole if scaled else parts
            with anyrank.capture(given, folder, optimizer):
                whole.step(*[x][rank:], **({"target": y} if 3 in held else {}))
                optimizer.step()

        ranks.spawn(1, run, self.path / "one", None, [], False)
        turns, back = ([0, 2], [1, 3]), ([0, 3], [1, 2])
        for name, stages, scaled in (("Interleaved1F1B", turns, True), ("LoopedBFS", turns, False),
                                     ("InterleavedZeroBubble", turns, True), ("ZBVZeroBubble", back, True)):
            shutil.rmtree(self.path / "many", ignore_errors=True)
            ranks.spawn(2, run, self.path / "many", getattr(pipelining, f"Schedule{name}"), stages, scaled)
            self.verify(adam=False, tensors=50)

    def test_layers_that_know_their_number_and_what_holds_layers_of_each_stage(self) -> None:
        """As Megatron's stages: each counts its layers from 0, and calls a module that holds them."""
        from torch.distributed import pipelining

        from anyrank.tests.torch_names import since
        since("2.5", "pipeline stages without example inputs")

        class Layer(nn.Linear):  # type: ignore[misc]
            def __init__(self, number: int) -> None:
                super().__init__(4, 4)
                self.layer_number = number

        class Body(nn.Module):  # type: ignore[misc]
            def __init__(self, layers: list[typing.Any]) -> None:
                super().__init__()
                self.layers = nn.ModuleList(layers)

            def forward(self, x: typing.Any) -> typing.Any:
                for layer in self.layers:
                    x = layer(x).tanh()
                return x

        def run(rank: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            layers = [Layer(1), Layer(2)]
            model: typing.Any = nn.Sequential()
            model.add_module("body", Body(layers if rank < 0 else layers[rank:rank + 1]))
            x, y = torch.randn(8, 4), torch.randn(8, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if rank < 0:
                with anyrank.capture(model, folder, optimizer):
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
                return
            stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"))
            schedule = pipelining.ScheduleGPipe(stage, 2, nn.functional.mse_loss)
            with anyrank.capture(schedule, folder, optimizer):
                schedule.step(*[x][rank:], **({"target": y} if rank else {}))
                optimizer.step()

        run(-1, self.path / "one")
        ranks.spawn(2, run, self.path / "many")
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-6)
        self.assertTrue(report.ok, str(report))
        self.assertIn("each with its own layers in it", str(report))
        names = {name for path in sorted((self.path / "many").glob("*.safetensors")) for name in read(path)[0]}
        self.assertIn("body.layers.1.weight:grad", names)

    def test_the_outermost_of_several_wrappers_counts(self) -> None:
        def run(rank: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
            x = torch.randn(8, 4)
            called: typing.Any = model
            if rank >= 0:
                called = nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
                x = x.chunk(2)[rank]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch.compile, about hooks
                with anyrank.capture(model, folder):
                    called(x).square().mean().backward()

        run(-1, self.path / "one")
        ranks.spawn(2, run, self.path / "many")
        self.verify(adam=False, tensors=17)

    def test_what_replicate_is_called_on_is_data_parallel(self) -> None:
        from torch.distributed._composable.replicate import replicate

        def run(rank: int, folder: pathlib.Path, forgotten: bool) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
            x, y = torch.randn(8, 4), torch.randn(8, 2)
            if rank >= 0:
                replicate(model[0] if forgotten else model)
                x, y = x.chunk(2)[rank], y.chunk(2)[rank]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with anyrank.capture(model, folder, optimizer):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()

        run(-1, self.path / "one", False)
        ranks.spawn(2, run, self.path / "many", False)
        self.verify(adam=False, tensors=21)
        shutil.rmtree(self.path / "many")
        ranks.spawn(2, run, self.path / "many", True)
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-5)
        self.assertRegex(report.first.tensor if report.first else "", r"2.(weight|bias):grad")

    def test_gradients_that_an_engine_reduces_in_a_buffer_of_its_own(self) -> None:
        """`p.grad` stays the rank's own: it is not compared, or the engine hands in what its update reads."""
        spec = {"mesh": {"dp": 2}, "mean_over": "dp"}

        def run(rank: int, folder: pathlib.Path, how: str) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
            x, y = torch.randn(8, 4), torch.randn(8, 2)
            ps = dict(model.named_parameters())
            if rank >= 0:
                x, y = x.chunk(2)[rank], y.chunk(2)[rank]
            momenta = {name: torch.zeros_like(p) for name, p in ps.items()}
            with anyrank.capture(model, folder, spec=spec if rank >= 0 else None) as c:
                for _ in range(2):
                    nn.functional.mse_loss(model(x), y).backward()
                    flat = torch.cat([p.grad.flatten() for p in ps.values()])
                    if rank >= 0 and how != "not reduced":
                        dist.all_reduce(flat)
                        flat = flat / 2
                    parts = flat.split([p.numel() for p in ps.values()])
                    grads = {name: g.view_as(p) for (name, p), g in zip(ps.items(), parts)}
                    if how == "handed in":
                        c.gradients({f"module.{name}": g for name, g in grads.items()})
                    with torch.no_grad():
                        for name, p in ps.items():
                            momenta[name].mul_(0.9).add_(grads[name])
                            p.sub_(0.1 * momenta[name])
                            p.grad = None
                    if how == "handed in":
                        c.state({name: {"m": m} for name, m in momenta.items()})
                        c.step()

        for how, tensors, note in (("handed in", 45, ""), ("unread", 29, "hand in those that the update reads")):
            run(-1, self.path / "one", how)
            ranks.spawn(2, run, self.path / "many", how)
            report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-6)
            self.assertTrue(report.ok, str(report))
            self.assertIn(f": {tensors} tensors, ", str(report))
            self.assertIn(note, str(report))
        ranks.spawn(2, run, self.path / "many", "not reduced")
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-6)
        self.assertRegex(report.first.tensor if report.first else "", r"2.(weight|bias):grad$")

    def test_ranks_with_other_inputs_of_which_nothing_is_known(self) -> None:
        def run(rank: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)
            model: typing.Any = nn.Linear(4, 4)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                with anyrank.capture(model, folder):
                    model(torch.randn(2, 2, 4)[rank]).sum().backward()
            said = [str(one.message) for one in warned if '{"mesh": {"dp": 2}, "mean_over": "dp"}' in str(one.message)]
            assert len(said) == (rank == 0), said

        ranks.spawn(2, run, self.path / "many")

    def test_a_tied_table_of_the_last_stage_is_a_copy_of_the_first_one_s(self) -> None:
        def run(rank: int, folder: pathlib.Path, stages: int, summed: bool) -> None:
            torch.manual_seed(0)
            parts: typing.Any = {"embed": nn.Embedding(13, 10), "head": nn.Linear(10, 13, bias=False)}
            parts["head"].weight = parts["embed"].weight
            model = nn.Sequential()
            for name in list(parts)[rank:][:3 - stages]:
                model.add_module(name, parts[name])
            x, d = torch.arange(13) // 2, torch.empty(13, 10)
            names = {"head.weight": "embed.weight", **({} if summed else {"hed.weight": "embed.weight"})}
            spec = {"mesh": {"pp": 2}, "tied": names}
            with anyrank.capture(model, folder, spec=spec if stages > 1 else None) as c:
                if rank:
                    dist.recv(d, 0)
                    x = d.requires_grad_()
                y = model(x)
                if rank < stages - 1:
                    dist.send(y.detach(), 1)
                    dist.recv(d, 1)
                y.backward(d if rank < stages - 1 else 2 * y)
                if rank:
                    dist.send(x.grad, 0)
                if summed and stages > 1:
                    dist.all_reduce(parts["head"].weight.grad)
                c.gradients()
            told = any("matches 'hed.weight'" in note for note in c.notes)
            assert told == (rank == 0 and not summed), c.notes

        ranks.spawn(1, run, self.path / "one", 1, True)
        ranks.spawn(2, run, self.path / "many", 2, True)
        self.verify(adam=False, tensors=0)
        ranks.spawn(2, run, self.path / "wrong", 2, False)
        first = anyrank.verify(self.path / "one", self.path / "wrong", rtol=1e-4, atol=1e-6).first
        self.assertEqual(first and (first.tensor, first.cause), ("embed.weight:grad", "missing_all_reduce"))
        for name, words in (("embed.weight", "has embed.weight and what is tied"), (1, "tied has to be a dictionary")):
            with self.assertRaisesRegex(AnyrankError, words), anyrank.capture(
                    Model(), self.path / "no", spec={"tied": {"head.weight": name}}) as c:
                c._given(torch.zeros(2, 3, dtype=int))

    def test_a_rank_has_a_piece_of_each_of_packed_tensors(self) -> None:
        full = torch.nn.Linear(4, 8)
        pieces = {"tp": 0, "blocks": [4, 2, 2]}  # rows, of which only the relation counts
        spec = {"mesh": {"tp": 2}, "shard": {"qkv.*:*": pieces, "qkv:fwd": {**pieces, "tp": -1}}, "partial": {
            "qkv:bwd": "tp"}}
        x = torch.randn(3, 4, requires_grad=True)
        for rank, rows in ((None, list(range(8))), (0, [0, 1, 4, 6]), (1, [2, 3, 5, 7])):
            model = nn.Sequential()
            model.add_module("qkv", nn.Linear(4, len(rows)))
            model.qkv.load_state_dict({name: value[rows] for name, value in full.state_dict().items()})
            one = rank is None
            with anyrank.capture(model, self.path / ("one" if one else "many"), rank=rank, spec={} if one else spec,
                                 only=["qkv*"]):
                model(x).square().sum().backward()
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-5, atol=1e-6)
        self.assertTrue(report.ok and report.compared == 6, str(report))

    def test_packed_heads_of_fewer_than_the_ranks_have_copies(self) -> None:
        """4 heads of queries, 2 of keys and values, of 2 rows each, on 4 ranks: neighbours hold one KV head."""
        full = torch.nn.Linear(4, 16)
        pieces = {"tp": 0, "blocks": [4, 2, 2], "unit": 2}
        spec = {"mesh": {"tp": 4}, "shard": {"qkv.*:*": pieces, "qkv:fwd": {**pieces, "tp": -1}}}
        x = torch.randn(3, 4)

        def run(rank: int, folder: pathlib.Path) -> None:
            q, k = 2 * rank, 2 * (rank // 2)
            rows = [q, q + 1, 8 + k, 9 + k, 12 + k, 13 + k] if rank >= 0 else list(range(16))
            model = nn.Sequential()
            model.add_module("qkv", nn.Linear(4, len(rows)))
            model.qkv.load_state_dict({name: value[rows] for name, value in full.state_dict().items()})
            with torch.no_grad():
                model.qkv.bias[2] += 1.0 if folder.name == "apart" and rank == 3 else 0.0
            with anyrank.capture(model, folder, spec=spec if rank >= 0 else {}, values=["fwd", "init"], only=["qkv*"]):
                model(x)
        run(-1, self.path / "one")
        ranks.spawn(4, run, self.path / "many")
        ranks.spawn(4, run, self.path / "apart")
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-6, atol=1e-6)
        self.assertTrue(report.ok and report.compared == 3, str(report))
        report = anyrank.verify(self.path / "one", self.path / "apart", rtol=1e-6, atol=1e-6)
        self.assertEqual((report.ok, report.copies_different), (False, 2), str(report))
        for wrong, words in (({"blocks": [4, 3, 2]}, "3 heads cannot be held alike by 4 ranks"),
                             ({"unit": 3}, "has 9 rows, not 6"), ({"blocks": None}, "which are missing"),
                             ({"copies": 2}, "left out beside 'unit'")):
            net = nn.Sequential(nn.Linear(4, 6))
            with self.assertRaisesRegex(AnyrankError, words), anyrank.capture(
                    net, self.path / "no", rank=3, values=["init"],
                    spec={"mesh": {"tp": 4}, "shard": {"0.*:init": {**pieces, **wrong}}}):
                net(x)

    def test_local_tensors_that_hooks_make_of_dtensors_have_their_place(self) -> None:
        """A module's hook cuts what it reads along the tokens, or gives it all of that and sums up its gradient."""
        class Share(nn.Module):  # type: ignore[misc]
            share = 1.0

            def forward(self, x: typing.Any) -> typing.Any:
                return x * self.share

        def hook_sums(share: typing.Any, mesh: typing.Any) -> None:
            from anyrank.tests.torch_names import DTensor, Partial, Replicate
            everywhere, summed = [Replicate()], [Partial()]
            share.register_forward_pre_hook(lambda _m, args: (
                DTensor.from_local(args[0], mesh, everywhere).to_local(grad_placements=summed),))
            share.register_forward_hook(lambda _m, _args, y: (
                DTensor.from_local(y, mesh, summed).redistribute(placements=everywhere).to_local()))

        def run(rank: int, folder: pathlib.Path, wrong: bool = False) -> None:
            torch.manual_seed(0)
            model = nn.Sequential()
            for name, m in (("embed", nn.Linear(4, 6)), ("cut", nn.Tanh()), ("lin", nn.Linear(6, 6)),
                            ("join", nn.Tanh()), ("share", Share()), ("head", nn.Linear(6, 3))):
                model.add_module(name, m)
            if rank >= 0:
                from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

                from anyrank.tests.torch_names import Replicate, Shard
                mesh, tokens = mesh_of((2,), ("tp",)), Shard(1)
                parallelize_module(model, mesh, {
                    "cut": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=tokens,
                                              use_local_output=True),
                    "join": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate(),
                                               use_local_output=True)})
                hook_sums(model.share, mesh)
                model.share.share = 0.25 if rank == 0 else 0.75
            with anyrank.capture(model, folder, values=["fwd", "bwd"]):
                x = torch.randn(2, 6, 4, requires_grad=True)
                if wrong and rank == 1:
                    model.lin.register_full_backward_hook(lambda _m, grads, _: (grads[0] * 1.1,))
                model(x).square().sum().backward()

        run(-1, self.path / "one")
        ranks.spawn(2, run, self.path / "many")
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-5, atol=1e-6)
        self.assertEqual((report.ok, report.compared, report.ragged), (True, 15, 0), str(report))
        ranks.spawn(2, run, self.path / "wrong", True)
        report = anyrank.verify(self.path / "one", self.path / "wrong", rtol=1e-5, atol=1e-6)
        self.assertEqual((report.ok, report.copies_different), (False, 0), str(report))

    def test_inputs_of_samples_may_have_equal_values_on_all_ranks(self) -> None:
        """Labels and lengths of few samples are equal by chance, or rise from 0. Numbers for each class are equal on
        all ranks, as copies are."""
        labels = [[[1, 0], [1, 0], [1, 0], [1, 0]], [[0, 2], [1, 1], [0, 1], [0, 0]], [[0, 1], [2, 1], [0, 1], [2, 1]]]

        class Classes(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(5, 2)

            def forward(self, x: typing.Any, y: typing.Any, mask: typing.Any, factors: typing.Any) -> typing.Any:
                x = (self.lin(x) * mask.sum(-1, keepdim=True)).log_softmax(-1)
                return -(x[:, 0] * y * factors[0, 0] + x[:, 1] * factors[1, 0]).mean()

        def run(rank: int, folder: pathlib.Path, micro: int = 1, wrong: bool = False) -> None:
            torch.manual_seed(0)
            model, factors = Classes(), torch.randn(4, 2)
            x, mask = torch.randn(3, 8, 5), torch.tensor([[1, 1, 1], [1, 1, 0]] * 4)
            wrapped = ddp(model) if rank >= 0 else model
            with anyrank.capture(wrapped, folder, torch.optim.SGD(model.parameters()), values=["fwd"],
                                 spec={"samples": "by_rank"}) as capture:
                for step, y in enumerate(labels):
                    for part in range(micro):
                        n = 4 // micro if rank >= 0 else 8
                        mine = slice(max(rank, 0) * 4 + part * n, max(rank, 0) * 4 + (part + 1) * n)
                        given = torch.tensor(y).flatten()[mine]
                        if wrong and rank == 1 and step == 2:
                            given = given.flip(0)
                        wrapped(x[step, mine], given, mask[mine], factors).backward()
                    capture.step()

        run(-1, self.path / "one")
        for micro in (1, 2):
            ranks.spawn(2, run, self.path / f"{micro}", micro)
            report = anyrank.verify(self.path / "one", self.path / f"{micro}", only="input.*")
            self.assertEqual((report.ok, report.compared, report.ragged), (True, 12, 0), str(report))
        ranks.spawn(2, run, self.path / "wrong", 2, True)
        report = anyrank.verify(self.path / "one", self.path / "wrong", only="input.*")
        self.assertEqual([row.tensor for row in report.tensors], ["input.1:fwd@3"], str(report))

    def test_samples_behind_the_tokens_of_dtensors(self) -> None:
        def run(rank: int, folder: pathlib.Path) -> None:
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
            if rank >= 0:
                parallelize_module(model, mesh_of((2,), ("tp",)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
            with anyrank.capture(model, folder, spec={"shard": {"?:?wd": {"dp": 1}}}):
                model(torch.randn(5, 2, 4)).square().mean().backward()
        run(-1, self.path / "one")
        ranks.spawn(2, run, self.path / "many", timeout=3600)
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-6)
        self.assertTrue(report.ok, str(report))
        self.assertEqual(read(self.path / "one" / "rank-00000.safetensors")[0]["0:fwd"].shape, (2, 5, 6))

    def test_a_zigzag_is_put_together(self) -> None:
        """Tokens of two ranks, and of two micro-batches: of four pieces rank 0 has the outer two."""
        torch.manual_seed(0)
        model, x = nn.Linear(3, 3), torch.randn(4, 8, 3)
        shard = {"*:fwd": {"cp": {"dim": 1, "zigzag": True}}, "*:bwd": {"cp": {"dim": -2, "zigzag": True}}}
        net = nn.Sequential(nn.Tanh(), model)
        for rank, tokens in ((None, range(8)), (0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
            one = rank is None
            with anyrank.capture(net, self.path / ("one" if one else "many"), rank=rank, values=["fwd", "bwd"],
                                 spec={} if one else {"mesh": {"cp": 2}, "shard": shard}, only=["0:*", "1:*"]):
                for part in x.chunk(2) if one else x[:, list(tokens)].chunk(2):
                    net(part.clone().requires_grad_()).square().sum().backward()
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-5, atol=1e-6)
        self.assertTrue(report.ok and report.compared == 4, str(report))
        for dim, words in ((0, "are not two of 4 equal pieces"), ("1", "as {'dim': 1, 'zigzag': True}")):
            with self.assertRaisesRegex(AnyrankError, words), anyrank.capture(
                    model, self.path / "no", rank=0,
                    spec={"mesh": {"cp": 2}, "shard": {"weight:*": {"cp": {"dim": dim, "zigzag": True}}}}):
                model(x)

    def test_many_tensors_go_to_several_files_in_one_order(self) -> None:
        torch.manual_seed(0)
        train(Model(), self.path / "one", None, micro=2)
        with unittest.mock.patch("anyrank.capture._files.MOST_ENTRIES", 20):
            torch.manual_seed(0)
            train(Model(), self.path / "many", None, micro=2)
        self.assertGreater(len(list((self.path / "many").glob("*.safetensors"))), 7)
        report = anyrank.verify(self.path / "one", self.path / "many")
        self.assertTrue(report.ok, str(report))
        try:
            several, one = (list(anyrank.open_dump(self.path / name)) for name in ("many", "one"))
        except AnyrankError as error:
            self.skipTest(str(error))
        self.assertEqual(several, one)

    def test_a_wrong_value_of_one_rank_is_found(self) -> None:
        def run(rank: int, folder: pathlib.Path) -> None:
            torch.manual_seed(0)

            def changed(model: typing.Any) -> typing.Any:
                wrapped = ddp(model)
                with torch.no_grad():
                    model.blocks[1][1].weight[5] += rank
                return wrapped

            train(Model(), folder, changed, (rank, 2))
        torch.manual_seed(0)
        train(Model(), self.path / "one", None)
        ranks.spawn(2, run, self.path / "many")
        report = anyrank.verify(self.path / "one", self.path / "many", rtol=1e-4, atol=1e-6)
        self.assertFalse(report.ok)
        self.assertEqual(report.first.tensor if report.first else "", "blocks.1.1.weight:init")


@needs("torch")
class Bits(FolderCase):
    def test_weights_are_the_same_with_and_without_capture(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")

        def run(rank: int, folder: pathlib.Path, wrap: Wrap, steps: set[int]) -> list[typing.Any]:
            torch.manual_seed(0)
            model = Model()
            train(model, folder, wrap, (rank, 2), micro=2, steps=steps)
            return [p.detach() if not hasattr(p, "to_local") else p.to_local().detach() for p in model.parameters()]
        for wrap in (ddp, fsdp):
            captured = ranks.spawn(2, run, self.path / "dump", wrap, {1, 2})
            plain = ranks.spawn(2, run, self.path / "none", wrap, {99})
            for mine, other in zip(captured, plain):
                self.assertTrue(all(torch.equal(p, q) for p, q in zip(mine, other)))
        self.assertFalse([path for path in (self.path / "none").glob("*.safetensors") if read(path)[0]])


@needs("torch")
class Failing(FolderCase):
    def test_a_rank_that_leaves_with_an_error_stops_the_others_at_once(self) -> None:
        def run(rank: int, folder: pathlib.Path) -> str:
            model = Model()
            try:
                with anyrank.capture(model, folder):
                    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
                    if rank == 1:
                        raise ValueError("no more data")
            except (ValueError, AnyrankError) as error:
                return f"{type(error).__name__}: {error}"
            return "ended"
        said = ranks.spawn(3, run, self.path / "dump")
        self.assertEqual(said[1], "ValueError: no more data")
        for text in (said[0], said[2]):
            self.assertTrue(text.startswith("AnyrankError: rank 1 left the capture with an error"), text)
            self.assertIn("ValueError: no more data", text)
        self.assertFalse(list((self.path / "dump").iterdir()))

    def test_a_capture_is_told_from_others_by_its_folder(self) -> None:
        """Ranks that made different numbers of captures, and groups with members that made none."""
        def capture(rank: int, folder: pathlib.Path, fails: bool = False) -> str:
            try:
                with anyrank.capture(nn.Linear(2, 2), folder) as c:
                    c._model(torch.ones(1, 2)).sum().backward()
                    if fails:
                        raise ValueError("no more data")
            except (ValueError, AnyrankError) as error:
                return f"{type(error).__name__}: {error}"
            return "complete"

        def group(rank: int, world: int, folder: pathlib.Path) -> None:
            store = dist.FileStore(str(folder / f"store-{world}"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

        def run(rank: int, folder: pathlib.Path) -> list[str]:
            said = [capture(rank, folder / "one", fails=True)] * (rank == 0)
            said.append(capture(rank, folder / "many"))
            said.append(capture(rank, folder / ("left" if rank == 0 else "right")))
            said.append(capture(rank, folder / "many"))
            dist.destroy_process_group()
            if rank < 2:
                group(rank, 2, folder)
                said.append(capture(rank, folder / "many"))
                dist.destroy_process_group()
            group(rank, 3, folder)
            return [*said, capture(rank, folder / "many")]
        first, second, third = ranks.spawn(3, run, self.path, timeout=3600)
        self.assertEqual(first.pop(0), "ValueError: no more data")
        self.assertEqual((len(first), len(second), len(third)), (5, 5, 4))
        for said in (first, second, third):
            different = said.pop(1)
            self.assertRegex(different, r"AnyrankError: rank \d (is at the end of its capture \S*(left|right)#1, rank|"
                                        r"left the capture with an error, .* is at the end of its capture)")
            self.assertEqual(set(said), {"complete"})

    def test_a_group_that_is_gone_at_the_end_does_not_matter(self) -> None:
        def run(_rank: int, folder: pathlib.Path) -> None:
            model = Model()
            with anyrank.capture(model, folder):
                model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
                dist.barrier()  # else another rank may still be joining
                dist.destroy_process_group()
        ranks.spawn(2, run, self.path / "dump")
        self.assertEqual(len(list((self.path / "dump").glob("*.safetensors"))), 2)

    def test_a_mesh_that_does_not_fit_is_said(self) -> None:
        def run(_rank: int, folder: pathlib.Path) -> list[str]:
            said = []
            wrapped = tensor_parallel(Model(), mesh_of((2, 2), ("a", "tp"))["tp"])
            for sizes in ({"dp": 2}, {"tp": 2, "dp": 2}):
                try:
                    with anyrank.capture(wrapped, folder, spec={"mesh": sizes}):
                        wrapped(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
                except AnyrankError as error:
                    said.append(str(error))
            return said
        (said, *_) = ranks.spawn(4, run, self.path / "dump")
        self.assertIn("the mesh {'dp': 2} has 2 ranks, the run has 4", said[0])
        self.assertEqual(len(said), 1)  # the other names the same lines differently

    def test_a_spec_that_contradicts_a_dtensor_or_matches_nothing_is_said(self) -> None:
        def said(folder: pathlib.Path, spec: typing.Any) -> str:
            of_data = "dp" in str(spec)
            model = (fsdp if of_data else tensor_parallel)(Model(), mesh_of((2,), ("fsdp" if of_data else "tp",)))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    with anyrank.capture(model, folder, spec=spec):
                        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
                except AnyrankError as error:
                    return str(error)
            return "\n".join(str(one.message) for one in caught if "matches" in str(one.message))

        up, down = "blocks.?.1.weight:*", "blocks.?.3.weight:*"
        specs: list[tuple[typing.Any, str]] = [
            ({"shard": {up: {"tp": 0}, down: {"tp": -1}, "*.1:fwd": {"tp": 2}}}, ""),
            ({"shard": {up: {"tp": 1}}}, "blocks.0.1.weight:init: by its DTensor tp divides dimension 0, the spec"),
            ({"shard": {up: {"tp": None}}}, "by its DTensor tp divides dimension 0, the spec says None"),
            ({"shard": {"blocks.?.3.bias:*": {"tp": 0}}}, "by its DTensor tp divides no dimension, the spec says 0"),
            ({"shard": {up: {"tp": {"dim": 0, "zigzag": True}}}}, "tp divides dimension 0, the spec says 0 in a zig"),
            ({"shard": {up: {"tp": 0, "blocks": [2, 1]}}}, "of whose parts 'blocks' in the spec cannot be true"),
            ({"shard": {down: {"dp": 1}}}, "by its DTensor fsdp divides dimension 0, the spec says 1"),
            ({"partial": {down: "tp"}}, "blocks.0.3.weight:init: is partial over tp by the spec, and not"),
            ({"shard": {"block.?.1.weight:init": {"tp": 0}, "*:v": {"tp": 0}}},
             "matches 'block.?.1.weight:init' (the nearest is 'blocks.")]

        def run(rank: int, folder: pathlib.Path) -> list[str]:
            return [said(folder, spec) for spec, _ in specs]
        found = ranks.spawn(2, run, self.path / "dump", timeout=3600)[0]
        for text, (spec, words) in zip(found, specs):
            self.assertTrue(words in text and bool(words) == bool(text), (spec, text))

    def test_flat_parameters_are_refused(self) -> None:
        def run(_rank: int, folder: pathlib.Path) -> str:
            from torch.distributed.fsdp import FullyShardedDataParallel
            model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))
            try:
                anyrank.capture(model, folder)
            except AnyrankError as error:
                return str(error)
            return ""
        self.assertIn("fully_shard", ranks.spawn(2, run, self.path / "dump")[0])


if __name__ == "__main__":
    unittest.main()
