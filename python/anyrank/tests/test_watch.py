# SPDX-License-Identifier: Apache-2.0
"""Rules of right runs: each is broken once, and none is found where nothing is wrong."""

from __future__ import annotations

import contextlib
import io
import pathlib
import typing
import warnings

import anyrank
from anyrank import AnyrankError, ranks
from anyrank._library import given_json, library
from anyrank.tests import FolderCase, needs
from anyrank.tests.test_capture_ranks import Model, both, ddp, fsdp, hybrid
from anyrank.watch import main, watched_of
from anyrank.watch_rules import STALE, STILL, UNUSED, Watched

try:
    import torch
    from torch import nn
except ImportError:
    torch = nn = typing.cast(typing.Any, None)


def entry(name: str, digest: str = "1", **further: typing.Any) -> dict[str, typing.Any]:
    return {"name": name, "digest": digest, "shape": [4], "zeros": 0, "nan": 0, "inf": 0, "differing": -1,
            "left_out": "", "max_abs": 1.0, **further}


class Rules(FolderCase):
    def of(self, step: typing.Callable[[int], list[dict[str, typing.Any]]], steps: int = 6,
           states: typing.Callable[[int], list[dict[str, typing.Any]]] = lambda i: [],
           **facts: typing.Any) -> list[tuple[str, str, int]]:
        watched = Watched(facts)
        def named(i: int) -> list[dict[str, typing.Any]]:
            return [{**one, "name": f"{one['name']}@{i}" if i > 1 else one["name"]} for one in step(i)
                    if i == 1 or not one["name"].endswith(":init")]
        found = [(one.rule, one.tensor, one.step) for i in range(1, steps + 1)
                 for one in watched.step(i, named(i), states(i))]
        self.notes = watched.notes
        return found

    def right(self, i: int) -> list[dict[str, typing.Any]]:
        return [entry("w:init", "0"), entry("w:grad"), entry("w:new", str(i)), entry("mask:fwd", inf=2)]

    def test_a_right_run_breaks_none(self) -> None:
        self.assertEqual(self.of(self.right, ranks={"steps": [4, 4]}), [])

    def test_each_rule_is_broken(self) -> None:
        last = UNUSED
        for steps, facts, expected in (
                (lambda i: [*self.right(i), entry("w:m", differing=1)], {}, [("copies", "w:m", 1)]),
                (lambda i: [*self.right(i), entry("a:fwd", nan=int(i > 1)), entry("b:fwd", nan=1)], {},
                 [("not_finite", "b:fwd", 1)]),
                (lambda i: [*self.right(i), entry("loss:fwd", inf=1)], {}, [("not_finite", "loss:fwd", 1)]),
                (lambda i: [*self.right(i), entry("v:init", "5"), entry("v:new", "5")], {},
                 [("no_gradient", "v:grad", last)]),
                (lambda i: [*self.right(i), entry("v:grad", zeros=4, max_abs=0.0, shape=[2, 2]),
                            entry("v:new", "1")], {},
                 [("zero_gradient", "v:grad", last)]),
                (lambda i: [*self.right(i), entry("v:init", "5"), entry("v:grad"), entry("v:new", "5")], {},
                 [("not_updated", "v:new", STALE)]),
                (self.right, {"ranks": {"steps": [4, 3]}}, [("steps_agree", "steps", 1)])):
            self.assertEqual(self.of(typing.cast(typing.Any, steps), **typing.cast(typing.Any, facts)), expected)

    def test_what_ranks_say_of_themselves(self) -> None:
        def said(i: int, rank: int, **further: typing.Any) -> dict[str, typing.Any]:
            return {"rank": rank, "at": {"dp": rank}, "data": ["dp"], "parts": 1, "rates": [[0.1]], "updates": [i],
                    "scale": 8.0, "samples": 10 * i + rank, "clipped": 1, "weights": i, "saved": [i], **further}
        def of(change: typing.Callable[[int], dict[str, typing.Any]], **norm: typing.Any) -> list[tuple[str, str, int]]:
            def entries(i: int) -> list[dict[str, typing.Any]]:
                return [entry("w:init", "0"), entry("w:grad", sum_squares=4.0), entry("w:new", str(i)),
                        entry("grad_norm:clip", **{"sum": 2.0, **norm})]
            return self.of(entries, states=lambda i: [said(i, 0), {**said(i, 1), **change(i)}])
        self.assertEqual(of(lambda i: {}), [])
        for change, rule, tensor, step in (
                (lambda i: {"rates": [[0.2 if i == 2 else 0.1]]}, "states_agree", "learning rates", 2),
                (lambda i: {"scale": 4.0 if i == 3 else 8.0}, "states_agree", "scale of the loss", 3),
                (lambda i: {"updates": [2 * i]}, "states_agree", "counts of updates", 1),
                (lambda i: {"samples": 10 * i}, "samples_of_ranks", "samples of rank 1", STALE),
                (lambda i: {"samples": 7}, "samples_of_ranks", "samples of rank 1", STALE + 1),
                (lambda i: {"saved": [1], "weights": i}, "checkpoints", "checkpoint", 3)):
            self.assertEqual(of(typing.cast(typing.Any, change))[:1], [(rule, tensor, step)])
        self.assertEqual(of(lambda i: {"updates": [1] if i == 2 else [i]})[-1][0], "counts_updates")
        self.assertEqual(of(lambda i: {}, sum=1.9), [("norm_of_gradients", "grad_norm:clip", 1)])
        again = self.of(self.right, states=lambda i: [{**said(i, rank), "samples": rank} for rank in (0, 1)])
        self.assertEqual(again, [("samples_of_ranks", "samples", UNUSED)])
        self.assertEqual(self.of(self.right, states=lambda i: [{**said(i, 0), "samples": 3}]), [])
        self.assertEqual(self.notes, [f"the samples of the first {UNUSED} steps are the same"])

    def test_a_scheduler_is_never_ahead_of_the_run(self) -> None:
        def of(schedule: typing.Callable[[int], list[int | None]], steps: int = 30, every: int = 1,
               updates: typing.Callable[[int], int] = lambda i: i) -> list[tuple[str, str, int]]:
            watched = Watched()
            found = []
            for i in range(1, steps * every + 1, every):
                state = {"rank": 0, "at": {}, "updates": [updates(i)], "schedules": [schedule(i)]}
                found += [(one.rule, one.tensor, one.step) for one in watched.step(i, [], [state])]
            return found
        ahead = ("counts_updates", "scheduler of rank 0")
        self.assertEqual(of(lambda i: [4 * i, 4 * i + 1, 1]), [(*ahead, STALE + 1)])  # in each of 4 micro-batches
        self.assertEqual(of(lambda i: [2 * i, 2 * i + 1, 1], every=100), [(*ahead, 100 * STALE + 1)])
        self.assertEqual(of(lambda i: [2 * i, 0, 1])[:1], [(*ahead, STALE + 1)])  # of a class that does not count calls
        self.assertEqual(of(lambda i: [i, i, 1], updates=lambda i: min(i, 4)), [(*ahead, 4 + STILL)])
        for right in (lambda i: [i, i + 1, 1], lambda i: [i // 10, 1, 1], lambda i: [2 * i, 2 * i + 1, 2],
                      lambda i: [i, 4 * i, 1],  # accelerate counts calls that make no step
                      lambda i: [1000 * i, i, 1],  # by the number of tokens
                      lambda i: [i + (1000 if i > 9 else 0), i + (1000 if i > 9 else 0), 1],  # a checkpoint was loaded
                      lambda i: [None, None, 1]):
            self.assertEqual(of(typing.cast(typing.Any, right)), [])
        # A scaled loss overflows at first, and now and then.
        self.assertEqual(of(lambda i: [i, i, 1], updates=lambda i: max(0, i - STILL + 1)), [])
        self.assertEqual(of(lambda i: [i, i, 1], updates=lambda i: i - i // 3), [])

    def test_parts_that_nothing_tells(self) -> None:
        """Experts, of which each rank has its own; not copies that were not broadcast, whose gradients are the same."""
        def step(gradient: int) -> typing.Callable[[int], list[dict[str, typing.Any]]]:
            return lambda i: [entry("w:init", "0", differing=1), entry("w:grad", differing=gradient),
                              entry("w:new", str(i), differing=1)]
        self.assertEqual(self.of(step(1)), [])
        self.assertIn("1 parameters are other ones on each rank", self.notes[0])
        self.assertEqual(self.of(step(-1)), [("copies", "w:init", 1)])

    def test_what_is_frozen_or_waits_is_left_alone(self) -> None:
        still = [entry("v:init", "5"), entry("v:new", "5")]
        self.assertEqual(self.of(lambda i: [*self.right(i), *still], frozen=["v"]), [])
        noise = [*still, entry("v:grad", max_abs=1e-9)]
        self.assertEqual(self.of(lambda i: [*self.right(i), *noise]), [])
        waiting = [*still, entry("v:grad")]
        self.assertEqual(self.of(lambda i: [*self.right(i), *waiting], learning_rates={"1": [[0.0]]}), [])


@needs("torch")
class Runs(FolderCase):
    def train(self, folder: pathlib.Path, watched: typing.Any, bug: str = "") -> None:
        model = Model()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[1:] if bug == "group" else parameters, lr=0.01)
        with watched(model, folder, optimizer):
            for i in range(8):
                ids = torch.randint(0, 13, (4, 3))
                nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                if bug == "nan" and i == 2:
                    model.head.weight.grad[1, 1] = float("nan")
                optimizer.step()
                optimizer.zero_grad()

    def test_a_run_and_what_it_left(self) -> None:
        def captured(model: typing.Any, folder: pathlib.Path, optimizer: typing.Any) -> typing.Any:
            return anyrank.capture(model, folder, optimizer, keep="sketch", every=2)
        for bug, rule in (("", ""), ("group", "not_updated"), ("nan", "not_finite")):
            found: list[typing.Any] = []
            self.train(self.path / "live", lambda model, folder, optimizer: anyrank.watch(
                model, optimizer, every=2, folder=folder, on_finding=found.append), bug)
            self.train(self.path / "kept", captured, bug)
            for said in (found, watched_of(self.path / "kept")[0]):
                self.assertEqual([one.rule for one in said], [rule] if rule else [], said)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                self.assertEqual(main([str(self.path / "kept")]), int(bool(rule)))
            self.assertIn(f"[{rule}]\n1 finding in" if rule else "0 findings in", out.getvalue())
        with self.assertRaises(AnyrankError), contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(main([str(self.path)]), 2)
            watched_of(self.path)

    def test_ranks(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")

        def run(rank: int, folder: pathlib.Path, wrap: typing.Any, groups: int, world: int, bug: str) -> list[str]:
            torch.manual_seed(0)
            model = wrap(Model())
            if bug == "seed" and rank == 1:
                with torch.no_grad():
                    model.module.head.weight[0, 0] += 1.0
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            with warnings.catch_warnings(record=True), anyrank.watch(model, optimizer, every=1, folder=folder) as watch:
                for i in range(3 if bug == "steps" and rank == 1 else 4):
                    ids = torch.randint(0, 13, (8, 3), generator=torch.Generator().manual_seed(i))
                    own = ids.chunk(groups)[0 if bug == "samples" else rank * groups // world]
                    called = model.module if bug == "steps" and i == 3 else model
                    nn.functional.cross_entropy(called(own).flatten(0, 1), own.flatten()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return [str(one) for one in watch.findings]
        for i, (world, wrap, groups, bug) in enumerate(((2, ddp, 2, ""), (4, fsdp, 4, ""), (4, hybrid, 4, ""),
                                                        (4, both, 2, ""), (2, ddp, 2, "seed"), (2, ddp, 2, "steps"),
                                                        (2, ddp, 2, "samples"))):
            said = ranks.spawn(world, run, self.path / str(i), wrap, groups, world, bug)
            self.assertEqual(said[1:], [[]] * (world - 1))
            begin = {"seed": "step 1: head.weight:init, and [0-9]+ others?: rank 1 has another copy",
                     "steps": "step 4: steps: ranks have other numbers of them: rank 0: 4, rank 1: 3",
                     "samples": "step 3: samples of rank 1: are those of rank 0"}.get(bug)
            self.assertEqual(len(said[0]), int(bool(bug)))
            if begin:
                self.assertRegex(said[0][0], begin)

    def test_schedulers_of_a_run(self) -> None:
        """Stepped once for an update, for each micro-batch, with a scaled loss that overflows; classes that count in
        other ways."""
        kinds = torch.optim.lr_scheduler
        makers: dict[str, typing.Callable[[typing.Any], typing.Any]] = {
            "linear": lambda o: kinds.LambdaLR(o, lambda i: 1.0 / (i + 1)),
            "restarts": lambda o: kinds.CosineAnnealingWarmRestarts(o, 4),
            "two": lambda o: kinds.SequentialLR(o, [kinds.LinearLR(o), kinds.ConstantLR(o)], [3])}
        for kind, make in makers.items():
            for micro, each, scaled in ((1, False, False), (2, False, False), (2, True, False), (1, False, True)):
                torch.manual_seed(0)
                model = nn.Linear(4, 4)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                scheduler, scaler = make(optimizer), torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0 ** 127)
                with warnings.catch_warnings(), anyrank.watch(model, optimizer, every=1, folder=self.path / "w",
                                                              on_finding=lambda found: None) as watch:
                    warnings.simplefilter("ignore")
                    for _ in range(12):
                        for _ in range(micro):
                            scaler.scale(model(torch.randn(4, 4)).square().mean() * 2.0 ** 6).backward()
                            if each:
                                scheduler.step()
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
                        if not each:
                            scheduler.step()
                found = [one for one in watch.findings if one.rule == "counts_updates"]
                self.assertEqual(bool(found), each, (kind, micro, each, scaled, found))

    @needs("accelerate")
    def test_schedulers_of_accelerate_step_for_each_process(self) -> None:
        def run(rank: int, folder: pathlib.Path, split: bool) -> list[str]:
            import accelerate

            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=(
                accelerate.utils.DataLoaderConfiguration(split_batches=split)))
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1.0 / (i + 1))
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            torch.manual_seed(rank)
            with anyrank.watch(model, optimizer, every=1, folder=folder, timeout=120) as watch:
                for _ in range(12):
                    with accelerator.accumulate(model):
                        accelerator.backward(model(torch.randn(4, 4)).square().mean())
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
            assert scheduler.scheduler.last_epoch == (6 if split else 12)
            return [str(one) for one in watch.findings if one.rule == "counts_updates"]
        for split in (False, True):
            self.assertEqual(ranks.spawn(2, run, self.path / str(split), split), [[], []])

    def test_ranks_that_do_something_alone(self) -> None:
        """One evaluates while the others wait for it, and a buffer is a rank's own until DDP sends the first one's."""
        def run(rank: int, folder: pathlib.Path) -> list[str]:
            class Centred(nn.Module):  # type: ignore[misc]
                def __init__(self) -> None:
                    super().__init__()
                    self.net = nn.Linear(8, 4)
                    self.register_buffer("mean", torch.zeros(8))

                def forward(self, x: typing.Any) -> typing.Any:
                    if self.training:
                        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                    return self.net(x - self.mean)
            torch.manual_seed(0)
            inner = Centred()
            model = nn.parallel.DistributedDataParallel(inner)
            optimizer = torch.optim.AdamW(model.parameters())
            torch.manual_seed(rank)
            with anyrank.watch(model, optimizer, every=1, folder=folder, timeout=120) as watch:
                for _ in range(4):
                    model(torch.randn(4, 8)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if rank == 0:
                        with torch.no_grad():
                            inner(torch.ones(1, 8))
                    torch.distributed.barrier()
            return [*map(str, watch.findings), *watch.notes]
        self.assertEqual(ranks.spawn(2, run, self.path / "run"), [[], []])

    def test_optimizers_in_turns(self) -> None:
        """An even number of steps meets one of two alone; model.zero_grad() takes a gradient that none of them has."""
        class Both(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1)

            def forward(self, x: typing.Any, through: bool) -> typing.Any:
                return self.two(self.one(x) if through else x)
        for left_out, expected in ((0, []), (1, ["one.bias:new"])):
            torch.manual_seed(0)
            model = Both()
            parts = [[*model.one.parameters()], [*model.two.parameters()]]
            parts = [[parts[0][0], *parts[1]]] if left_out else parts
            optimizers = [torch.optim.Adam(part) for part in parts]
            with warnings.catch_warnings(record=True), anyrank.watch(
                    model, optimizers, every=1 if left_out else 2, folder=self.path / str(left_out)) as watch:
                for step in range(30):
                    model(torch.randn(4, 8), bool(step % 2 or left_out)).square().mean().backward()
                    optimizers[0 if step % 2 or left_out else 1].step()
                    model.zero_grad()
            self.assertEqual([one.tensor for one in watch.findings], expected)

    def test_stages_of_a_pipeline_wait_for_each_other_alone(self) -> None:
        """The second stage's forward pass needs the first one's: a rank that waits where its step ends stops both."""
        from anyrank.tests.torch_names import since
        since("2.5", "pipeline stages without example inputs")

        def run(rank: int, folder: pathlib.Path, watched: bool, every: int) -> list[str]:
            from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
            torch.manual_seed(0)
            stages = [nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.LayerNorm(8)),  # named alike: 1.weight
                      nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 13))]
            stages[0][1].bias.requires_grad_(False)
            optimizer = torch.optim.AdamW(stages[rank].parameters(), lr=0.01)
            stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
            schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (
                nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())))
            capture = (anyrank.watch(schedule, optimizer, every=every, folder=folder, timeout=120) if watched else
                       anyrank.capture(schedule, folder, optimizer, keep="sketch", every=every, timeout=120))
            with capture:
                for i in range(7):
                    ids = torch.randint(0, 13, (4, 3), generator=torch.Generator().manual_seed(i))
                    schedule.step(*([ids] if rank == 0 else []), **({"target": ids} if rank == 1 else {}))
                    optimizer.step()
                    optimizer.zero_grad()
            return [*map(str, getattr(capture, "findings", ())), *capture.notes]
        for watched, every in ((True, 1), (True, 2), (False, 1)):
            folder = self.path / f"{watched}{every}"
            self.assertEqual(ranks.spawn(2, run, folder, watched, every), [[], []])
        self.assertEqual(watched_of(self.path / "False1")[0], [])

    def test_a_rank_that_skips_steps_holds_nobody_up(self) -> None:
        """It ends fewer steps than the others, which wait for it in the backward pass alone."""
        def run(rank: int, folder: pathlib.Path) -> list[str]:
            torch.manual_seed(0)
            model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
            optimizer = torch.optim.AdamW(model.parameters())
            with warnings.catch_warnings(record=True), anyrank.watch(model, optimizer, every=1, folder=folder,
                                                                     timeout=120) as watch:
                for i in range(9):
                    samples = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * i + rank))
                    model(samples).square().mean().backward()
                    if rank == 0 or i == 0:
                        optimizer.step()
                    optimizer.zero_grad()
            return [*map(str, watch.findings), *watch.notes]
        said = ranks.spawn(2, run, self.path / "run")
        self.assertIn("captured steps behind rank 0", str(said[0]))
        self.assertRegex(str(said[0]), "steps: ranks have other numbers of them: rank 0: 9, rank 1: [12]")

    def test_a_compiled_model_stays_compiled(self) -> None:
        if not hasattr(torch.compiler, "set_stance"):
            self.skipTest("torch.compile cannot be put off before PyTorch 2.6")
        graphs: list[int] = []

        def backend(graph: typing.Any, _inputs: typing.Any) -> typing.Any:
            graphs.append(len(graph.graph.find_nodes(op="call_function", target=nn.functional.linear)))
            return graph.forward
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters())
        with anyrank.watch(compiled, optimizer, every=3, folder=self.path / "run"):
            for _ in range(7):
                compiled(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch._dynamo.reset()
        self.assertEqual(graphs, [2])  # both layers in one
        read = given_json(library()["sketches_json"](str(self.path / "run").encode()))
        self.assertIn("2:fwd@7", [tensor["name"] for tensor in read["tensors"]])
