# SPDX-License-Identifier: Apache-2.0
"""Capture on one rank: what it writes, that it changes no number, and that it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import struct
import sys
import types
import typing
import unittest.mock
import warnings

from anyrank import AnyrankError
from anyrank._arrays import entry_of
from anyrank._safetensors import Entry, read
from anyrank.tests import FolderCase, needs

try:
    import torch
    from torch import nn
    from torch.nn.utils import clip_grad_norm_  # as programs do that import it by name before

    import anyrank
    from anyrank.capture import _patches
    from anyrank.capture._inputs import Inputs
except (ImportError, AnyrankError):
    nn = torch = typing.cast(typing.Any, None)  # every test here is skipped

Module: typing.Any = nn.Module if nn is not None else object


@dataclasses.dataclass
class Both:
    one: typing.Any
    two: typing.Any


class Forked(Module):  # type: ignore[misc]
    """Gives out several tensors, in `form`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.a, self.b = form, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: typing.Any) -> typing.Any:
        one, two = self.a(x), self.b(x)
        return {"tuple": (one, two), "dict": {"one": one, "two": two}, "dataclass": Both(one, two)}[self.form]


class InPlace(Module):  # type: ignore[misc]
    """Writes over its input, and does not say so."""

    def forward(self, x: typing.Any) -> typing.Any:
        return x.mul_(2).relu_()


class Doubled(Module):  # type: ignore[misc]
    """What it reads is not what its own module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: typing.Any) -> typing.Any:
        return self.inner(2 * x)


class Model(Module):  # type: ignore[misc]
    def __init__(self, form: str = "tuple", checkpoint: bool | None = None, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.fork, self.drop, self.inplace = nn.Embedding(11, 6), Forked(form), nn.Dropout(0.2), InPlace()
        self.act, self.norm, self.head = nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.unused, self.form, self.checkpoint = nn.Linear(2, 2), form, checkpoint
        if tied:
            self.head.weight = self.embed.weight

    def block(self, x: typing.Any) -> typing.Any:
        out = self.fork(x)
        one, two = out if self.form == "tuple" else out.values() if self.form == "dict" else (out.one, out.two)
        return self.drop(self.act(one + 0) + self.inplace(two + 0)) + x

    def forward(self, ids: typing.Any) -> typing.Any:
        x = self.embed(ids)
        if self.checkpoint is None:
            x = self.block(x)
        else:
            from torch.utils.checkpoint import checkpoint
            x = checkpoint(self.block, x, use_reentrant=self.checkpoint)
        return self.head(self.norm(x))


def batch(n: int = 4) -> typing.Any:
    return torch.randint(0, 11, (n, 5), generator=torch.Generator().manual_seed(3))


def train(model: typing.Any, optimizer: typing.Any, steps: int = 2, micro: int = 1, autocast: bool = False,
          evaluate: bool = False) -> list[typing.Any]:
    losses = []
    for _ in range(steps):
        for ids in batch().chunk(micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()) / micro
            loss.backward()
            losses.append(loss.detach())
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                model(batch(3))
    return losses


def adamw(model: typing.Any, **options: typing.Any) -> typing.Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, **options)


@needs("torch")
class CaptureCase(FolderCase):
    def files(self, folder: str = "dump") -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for path in sorted((self.path / folder).glob("*.safetensors")):
            found.update(read(path)[0])
        return found

    def value(self, name: str, folder: str = "dump") -> typing.Any:
        entry = self.files(folder)[name]
        return torch.frombuffer(bytearray(entry.data), dtype=torch.float32).reshape(entry.shape)

    def captured(self, make: typing.Callable[[], typing.Any], folder: str = "dump", seed: int = 0, steps: int = 2,
                 micro: int = 1, autocast: bool = False, evaluate: bool = False, optimizer: typing.Any = adamw,
                 **options: typing.Any) -> typing.Any:
        torch.manual_seed(seed)
        model = make()
        with anyrank.capture(model, self.path / folder, **options):
            self.losses = train(model, optimizer(model), steps, micro, autocast, evaluate)
        return model


class Bits(CaptureCase):
    def same(self, make: typing.Callable[[], typing.Any], **options: typing.Any) -> None:
        model = self.captured(make, **options)
        losses, state = self.losses, torch.get_rng_state()
        torch.manual_seed(0)
        plain = make()
        own = train(plain, adamw(plain), **options)
        self.assertTrue(torch.equal(torch.stack(losses), torch.stack(own)))
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            self.assertTrue(torch.equal(p, q), name)
        self.assertTrue(torch.equal(state, torch.get_rng_state()))
        self.assertTrue(torch.equal(self.value("embed.weight:new@2"), plain.embed.weight))

    def test_no_number_changes(self) -> None:
        self.same(Model)

    def test_none_with_activation_checkpointing(self) -> None:
        for reentrant in (False, True):
            self.same(functools.partial(Model, checkpoint=reentrant))

    def test_none_with_gradient_accumulation_and_evaluation(self) -> None:
        self.same(Model, micro=2, evaluate=True)

    def test_none_in_mixed_precision_with_tied_weights(self) -> None:
        self.same(lambda: Model(tied=True), autocast=True)

    def test_none_with_a_frozen_parameter_and_outputs_of_other_forms(self) -> None:
        def make(form: str) -> typing.Any:
            model = Model(form)
            model.fork.a.weight.requires_grad_(False)
            return model
        for form in ("dict", "dataclass"):
            self.same(functools.partial(make, form))

    def test_none_in_a_compiled_model(self) -> None:
        torch.manual_seed(0)
        plain = Model().eval()
        train(plain, adamw(plain))
        torch.manual_seed(0)
        model = Model().eval()
        compiled = torch.compile(model, backend="eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Dynamo does not know")  # how to trace what the capture does
            with anyrank.capture(compiled, self.path / "dump"):
                train(compiled, adamw(model))
        self.assertTrue(torch.equal(model.head.weight, plain.head.weight))
        names = self.files()
        for name in ("fork.a:fwd", "fork.a:bwd", "fork.a.weight:grad", "head.weight:new@2", "loss:fwd@2"):
            self.assertIn(name, names)


class Written(CaptureCase):
    def test_all_kinds_of_a_step_are_written(self) -> None:
        model = self.captured(Model)
        names = self.files()
        for name in ("embed:fwd", "fork:fwd", "fork.1:fwd", "fork.a:fwd", "fork.a:bwd", "head.weight:grad",
                     "head.weight:m", "head.weight:v", "head.weight:new", "grad_norm:clip", "loss:fwd", "output:fwd"):
            self.assertIn(name, names)
            self.assertIn(f"{name}@2", names)
        self.assertIn("head.weight:init", names)
        self.assertNotIn("head.weight:init@2", names)
        self.assertNotIn("unused.weight:grad", names)
        self.assertTrue(torch.equal(self.value("loss:fwd"), self.losses[0]))
        self.assertTrue(torch.equal(self.value("head.weight:new@2"), model.head.weight))

    def test_gradients_are_those_before_clipping_and_the_norm_is_theirs(self) -> None:
        self.captured(Model)
        grads = [self.value(name) for name in self.files() if name.endswith(":grad")]
        norm = torch.cat([g.flatten() for g in grads]).norm()
        self.assertGreater(float(norm), 0.1)
        torch.testing.assert_close(self.value("grad_norm:clip"), norm)

    def test_clipping_in_two_calls_is_heard_as_in_one(self) -> None:
        from torch.nn import utils

        from anyrank.tests.torch_names import since
        since("2.6", "clipping in two calls")
        by_name = utils.clip_grads_with_norm_

        def clip(model: typing.Any) -> None:
            by_name(model.parameters(), 0.1, utils.get_total_norm([p.grad for p in model.parameters()]))
        for folder, function in (("one", lambda model: clip_grad_norm_(model.parameters(), 0.1)), ("two", clip)):
            torch.manual_seed(0)
            model, other = nn.Linear(3, 2), nn.Linear(3, 2)
            with anyrank.capture(model, self.path / folder):
                for _ in range(2):
                    model(torch.ones(2, 3)).square().sum().backward()
                    other(torch.ones(2, 3)).sum().backward()
                    clip_grad_norm_(other.parameters(), 0.1)  # of no concern
                    function(model)
                    with torch.no_grad():
                        model.weight -= model.weight.grad
        one, two = self.files("one"), self.files("two")
        self.assertEqual(list(one), list(two))
        self.assertTrue({"grad_norm:clip", "weight:grad", "weight:new", "grad_norm:clip@2"} <= set(one))
        self.assertNotIn("grad_norm.call2:clip", one)
        for name in one:
            self.assertEqual(bytes(one[name].data), bytes(two[name].data), name)

    def test_clipping_before_the_backward_pass_ends_no_step_and_is_said(self) -> None:
        def run(folder: str, early: bool, by_grad: bool = False) -> list[str]:
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as notes, anyrank.capture(model, self.path / folder):
                warnings.simplefilter("always")
                for step in range(2):
                    for part in batch(4)[:, :3].float().chunk(2):
                        loss = model(part).square().mean()
                        if early:
                            clip_grad_norm_(model.parameters(), 0.1)
                        if by_grad:
                            for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                                p.grad = grad if p.grad is None else p.grad + grad
                        else:
                            loss.backward()
                    if not early:
                        clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            return [str(note.message) for note in notes]
        self.assertEqual(run("right", early=False), [])
        self.assertEqual(run("by-grad", early=False, by_grad=True), [])
        self.assertEqual(run("early", early=True), [
            "step 1: clipping finds no gradient of 2 parameters, before the forward pass has gone backward: it clips "
            "nothing",
            "step 1: clipping comes before the forward pass has gone backward: it scales gradients that were left "
            "before, and none that follow"])
        for folder in ("right", "by-grad", "early"):
            self.assertEqual(bytes(self.files(folder)["steps:count"].data), (2).to_bytes(8, "little"), folder)
        self.assertEqual(self.files("right").keys() - self.files("early").keys(),
                         {"grad_norm:clip", "grad_norm:clip@2"})
        self.assertLessEqual({"weight:grad@2", "grad_norm:clip@2"}, self.files("by-grad").keys())
        report = anyrank.verify(self.path / "right", self.path / "early", rtol=1e-4, atol=1e-6)
        self.assertEqual(report.first.tensor if report.first else "", "bias:grad", str(report))
        self.assertRegex(report.text, r"in step 1 of the other run clipping comes before the forward pass has gone")

    def test_checkpointing_writes_the_same_tensors(self) -> None:
        for reentrant in (False, True):
            self.captured(Model, folder="plain")
            self.captured(functools.partial(Model, checkpoint=reentrant), folder="again")
            plain, again = self.files("plain"), self.files("again")
            self.assertEqual(set(plain), set(again))
            for name in plain:
                self.assertEqual(bytes(plain[name].data), bytes(again[name].data), name)

    def test_a_module_called_as_the_models_own_output_is_kept_apart(self) -> None:
        class Net(Module):  # type: ignore[misc]
            def __init__(self, name: str, form: str) -> None:
                super().__init__()
                self.lin, self.form = nn.Linear(3, 3), form
                setattr(self, name, nn.MSELoss() if form == "loss" else nn.Linear(3, 3))

            def forward(self, x: typing.Any) -> typing.Any:
                last = self.get_submodule("output" if hasattr(self, "output") else "loss")
                y = last(self.lin(x), x) if self.form == "loss" else last(self.lin(x))
                return y * 2 if self.form == "more" else y

        expected = {("output", "loss"): ["loss:fwd"], ("loss", "loss"): ["loss:fwd"],
                    ("output", "last"): ["output:fwd", "loss:fwd"],
                    ("loss", "last"): ["loss:fwd", "output:fwd", "loss.call2:fwd"],
                    ("output", "more"): ["output:fwd", "output.call2:fwd", "loss:fwd"],
                    ("loss", "more"): ["loss:fwd", "output:fwd", "loss.call2:fwd"]}
        for (name, form), own in expected.items():
            model = Net(name, form)
            with anyrank.capture(model, self.path / "dump", only=["*:fwd"]):
                y = model(torch.ones(2, 3))
                (y if form == "loss" else y.sum()).backward()
            self.assertEqual(set(self.files()), {"input.0:fwd", "lin:fwd", *own}, (name, form))
            if form == "more":
                self.assertTrue(torch.equal(self.value(own[1]), y))

    def test_a_tuples_only_scalar_is_the_loss_if_backward_is_called_on_a_multiple_of_it(self) -> None:
        class Net(Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.lin, self.scale = nn.Linear(3, 3), nn.Parameter(torch.tensor(2.0))

            def forward(self, x: typing.Any) -> typing.Any:
                y = self.lin(x)
                return y, (y.square().mean() if own else self.scale.exp())

        for own, power in ((True, 0), (False, 0), (False, 2)):
            model = Net()
            with anyrank.capture(model, self.path / "dump", only=["*:fwd"]):
                y, scalar = model(torch.ones(2, 3))
                loss = scalar if own else scalar.pow(power) if power else (scalar * y).square().sum()
                (loss / 4).backward()
            outputs = [] if own else ["output:fwd", "output.1:fwd"]
            self.assertEqual(set(self.files()), {"input.0:fwd", "lin:fwd", "loss:fwd", *outputs})
            self.assertTrue(torch.equal(self.value("loss:fwd"), loss / 4))

    def test_an_output_has_its_position_whatever_is_none_before_it(self) -> None:
        class Pair(nn.Module):  # type: ignore[misc]
            def forward(self, x: typing.Any, first: bool) -> typing.Any:
                return (x, None) if first else (None, 2 * x)

        class Net(Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.lin, self.pair = nn.Linear(3, 3), Pair()

            def forward(self, x: typing.Any, first: bool) -> typing.Any:
                return self.pair(self.lin(x), first)

        for first, position in ((True, ""), (False, ".1")):
            model = Net()
            with anyrank.capture(model, self.path / f"{first}", only=["pair*:fwd", "output*:fwd"]):
                given = [y for y in model(torch.ones(2, 3), first) if y is not None]
                given[0].sum().backward()
            self.assertEqual(set(self.files(f"{first}")), {f"pair{position}:fwd", f"output{position}:fwd"})
            self.assertTrue(torch.equal(self.value(f"pair{position}:fwd", f"{first}"), given[0]))

    def test_what_is_handed_in_has_to_be_a_parameter_s(self) -> None:
        model = nn.Linear(3, 2)
        with self.assertRaisesRegex(anyrank.AnyrankError, "'w' is no parameter .* first of them is 'weight'"):
            with anyrank.capture(model, self.path / "dump") as c:
                model(torch.ones(2, 3)).sum().backward()
                c.gradients({"w": torch.ones(2, 3)})
        with self.assertRaisesRegex(anyrank.AnyrankError, r"weight: .* the shape \[3\], the parameter \[2, 3\]"):
            with anyrank.capture(model, self.path / "dump") as c:
                model(torch.ones(2, 3)).sum().backward()
                c.gradients({"weight": torch.ones(3)})

    def test_a_loss_that_megatron_frees_and_sends_backward_by_the_engine_itself(self) -> None:
        home = "megatron.core.pipeline_parallel.schedules"
        schedules: typing.Any = types.ModuleType(home)

        def free(output: typing.Any, freed: bool = False) -> None:
            output.data = torch.full((1,), 7.0)

        def backward(output: typing.Any, grad: typing.Any) -> None:
            engine: typing.Any = torch.autograd.Variable._execution_engine
            given = torch.ones_like(output) if grad is None else grad
            engine.run_backward((output,), (given,), False, False, (), True, True)

        schedules.deallocate_output_tensor, schedules.custom_backward = free, backward
        model = nn.Linear(3, 2)
        with unittest.mock.patch.dict(sys.modules, {home: schedules}):
            with anyrank.capture(model, self.path / "dump"):
                loss = model(torch.ones(2, 3)).square().sum()
                value = loss.detach().clone()
                schedules.deallocate_output_tensor(loss, True)
                schedules.custom_backward(loss, None)
            self.assertTrue(torch.equal(self.value("loss:fwd"), value))
            self.assertEqual((schedules.deallocate_output_tensor, schedules.custom_backward), (free, backward))
            with anyrank.capture(model, self.path / "unheard"):
                backward(model(torch.ones(2, 3)).square().sum(), None)
        report = anyrank.verify(self.path / "unheard", self.path / "unheard")
        self.assertIn("losses, as no backward pass of a scalar was seen", str(report))

    def test_an_optimizer_that_an_engine_has_given_parts_of_its_own(self) -> None:
        """As DeepSpeed does; frozen parameters, which it leaves alone, do not make it another model's."""
        model: typing.Any = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
        optimizer = torch.optim.SGD([torch.zeros(8, requires_grad=True)], lr=0.1)
        with self.assertRaisesRegex(anyrank.AnyrankError, "updates none"):
            anyrank.capture(model, self.path / "dump", optimizer)
        for p in model[0].parameters():
            p._hp_mapping = None
        anyrank.capture(model, self.path / "dump", optimizer)

    def test_emptied_parameters_are_refused(self) -> None:
        model = nn.Linear(3, 2)
        full = {name: p.data for name, p in model.named_parameters()}
        for p in model.parameters():
            p.data = torch.empty(0)

        def gather(module: typing.Any, _args: typing.Any) -> None:
            for name, p in module.named_parameters():
                p.data = full[name]

        model.register_forward_pre_hook(gather)
        with self.assertRaisesRegex(anyrank.AnyrankError, "2 of 2 parameters are empty .* weight"):
            with anyrank.capture(model, self.path / "dump"):
                model(torch.ones(2, 3))

    def test_the_loss_is_what_backward_is_called_on(self) -> None:
        class Net(Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(3, 3)

            def forward(self, x: typing.Any) -> typing.Any:
                y = self.lin(x)
                return {"loss": y.square().mean(), "logits": y}

        for used in (True, False):
            model, x = Net(), torch.ones(4, 3)
            with anyrank.capture(model, self.path / f"{used}", only=["*:fwd"]):
                for part in x.chunk(2):
                    out = model(part)
                    (out["loss"] / 2 if used else out["logits"].sum().exp()).backward()
            self.assertEqual(set(self.files(f"{used}")), {"input.0:fwd", "lin:fwd", "loss:fwd",
                                                           *([] if used else ["output:fwd"])})
            y = model(x[:2])
            sums = y["loss"] if used else 2 * y["logits"].sum().exp()
            self.assertTrue(torch.allclose(self.value("loss:fwd", f"{used}"), sums))

    def test_steps_end_at_the_optimizers_step_whatever_moves(self) -> None:
        for lr, form in ((0.0, "plain"), (0.1, "closure"), (0.0, "closure"), (0.1, "lbfgs"), (0.0, "masters")):
            model = nn.Linear(3, 2)
            masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
            kind = torch.optim.LBFGS if form == "lbfgs" else torch.optim.SGD
            optimizer = kind(masters if form == "masters" else model.parameters(), lr=lr)

            def closure() -> typing.Any:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 3)).square().sum()
                loss.backward()
                return loss

            folder = f"{form}{lr}"
            with anyrank.capture(model, self.path / folder):
                for _ in range(3):
                    if form in ("closure", "lbfgs"):
                        optimizer.step(closure)
                        continue
                    model.zero_grad()
                    for part in torch.ones(2, 3).chunk(2):
                        model(part).square().sum().backward()
                    for master, p in zip(masters, model.parameters()):
                        master.grad = p.grad
                    optimizer.step()
            names = set(self.files(folder))
            self.assertLessEqual({f"{n}{at}" for n in ("weight:grad", "weight:new", "loss:fwd", "output:fwd")
                                  for at in ("", "@2", "@3")}, names, (form, lr))
            self.assertFalse([name for name in names if name.endswith("@4") or "call2" in name], (form, lr))
            if lr == 0.0:
                self.assertTrue(torch.equal(self.value("weight:grad", folder), self.value("weight:grad@3", folder)))

    def test_the_micro_batch_within_the_step_is_one_of_its_own(self) -> None:
        values = []
        for closed in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            x = torch.randn(4, 3)

            def backward(part: typing.Any) -> None:
                (model(part).square().mean() / 2).backward()

            with anyrank.capture(model, self.path / f"{closed}"):
                for _ in range(2):
                    backward(x[:2])
                    if closed:
                        optimizer.step(lambda: backward(x[2:]))  # noqa: B023
                    else:
                        backward(x[2:])
                        optimizer.step()
                    optimizer.zero_grad()
            values.append({name: bytes(e.data) for name, e in self.files(f"{closed}").items()})
        self.assertEqual(*values)

    def test_passes_without_gradients_are_no_steps_of_a_run_that_trains(self) -> None:
        for steps in (None, {1}):
            model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with anyrank.capture(model, self.path / f"{steps}", steps=steps):
                for _ in range(2):
                    with torch.no_grad():
                        for length in (6, 1, 1):
                            model(torch.zeros(8, length, dtype=torch.long))
                    for part in range(2):
                        model(torch.zeros(8, 14, dtype=torch.long)).logsumexp(-1).mean().backward()
                        with torch.no_grad():  # a reference's pass between two micro-batches
                            model(torch.zeros(8, 3, dtype=torch.long))
                    optimizer.step()
            files = self.files(f"{steps}")
            self.assertEqual(files["1:fwd"].shape, (8, 14, 32))
            self.assertEqual("loss:fwd@2" in files, steps is None)
            self.assertFalse([name for name in files if name.endswith("@3")])
            self.assertTrue(anyrank.verify(self.path / f"{steps}", self.path / f"{steps}").ok)

    def test_micro_batches_of_other_lengths_are_left_out_and_the_rest_is_compared(self) -> None:
        for folder, factor in (("one", 1.0), ("two", 1.0), ("wrong", 1.5)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32), nn.Flatten(0, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with anyrank.capture(model, self.path / folder):
                for length in (12, 15):
                    (model(torch.ones(4, length, dtype=torch.long)).logsumexp(-1).mean() / 2 * factor).backward()
                optimizer.step()
        report = anyrank.verify(self.path / "one", self.path / "two")
        self.assertTrue(report.ok, str(report))
        self.assertIn("pads to a length of its own", report.text)
        self.assertEqual(report.ragged, 7)  # input.0, three outputs and the model's, two gradients
        wrong = anyrank.verify(self.path / "one", self.path / "wrong", rtol=1e-4)
        self.assertEqual(wrong.first.tensor if wrong.first else "", "loss:fwd")

    def test_what_is_one_for_all_samples_of_a_micro_batch_is_left_out_where_their_lengths_differ(self) -> None:
        class Padded(Module):  # type: ignore[misc]
            """A table [1, length, 4] and a mask [1, 1, length, length], which no sample has; and one of fixed size."""

            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(32, 4), nn.Linear(4, 32)
                self.table, self.mask, self.fixed = (Told(name) for name in ("table", "mask", "fixed"))

            def forward(self, ids: typing.Any, position_ids: typing.Any) -> typing.Any:
                x = self.embed(ids)
                x = (x @ x.mT + self.mask(position_ids)[0]).softmax(-1) @ (x * self.table(position_ids))
                return self.head(x + self.fixed(position_ids))

        class Told(Module):  # type: ignore[misc]
            def __init__(self, name: str) -> None:
                super().__init__()
                self.name = name

            def forward(self, positions: typing.Any) -> typing.Any:
                angles = positions[..., None] * torch.arange(1.0, 5.0)
                tables = {"table": angles.cos(), "mask": torch.full((1, 1, *2 * positions.shape[-1:]), -1e9).triu(1),
                          "fixed": torch.ones(1, 4)}
                return tables[self.name]

        rows = [torch.arange(n) + n for n in (5, 9, 7, 12)]
        for folder, micro in (("one", 1), ("two", 2), ("four", 4)):
            torch.manual_seed(0)
            model = Padded()
            with anyrank.capture(model, self.path / folder):
                for first in range(0, 4, 4 // micro):
                    part = rows[first:first + 4 // micro]
                    ids = nn.utils.rnn.pad_sequence(part, batch_first=True)
                    real = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in part], batch_first=True)
                    (model(ids, torch.arange(ids.shape[1])[None]).logsumexp(-1) * real).sum().backward()
        left = {"table:fwd", "mask:fwd", "embed:fwd", "head:bwd", "head:fwd", "output:fwd", "input.ids:fwd",
                "input.position_ids:fwd"}
        for one, two in (("one", "two"), ("one", "four"), ("two", "four"), ("four", "one")):
            report = anyrank.verify(self.path / one, self.path / two, rtol=1e-4, atol=1e-6)
            self.assertTrue(report.ok, str(report))
            self.assertEqual(report.ragged, len(left), str(report))
            self.assertIn("pads to a length of its own", report.text)
        self.assertEqual(len(self.files("one")) - len(left), anyrank.verify(self.path / "one", self.path / "four",
                                                                            rtol=1e-4, atol=1e-6).compared)

    def test_a_module_that_one_loss_needs_twice_is_called_twice_whoever_calls_it(self) -> None:
        """The model, or a program that calls its towers: one after another or with what a target is made of.
        Micro-batches that go forward before one goes backward are none of that."""
        class Towers(Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.tower, self.head = nn.Linear(3, 4), nn.Linear(4, 4)

            def forward(self, a: typing.Any, b: typing.Any, form: str) -> typing.Any:
                if form == "chained":
                    return self.head(self.head(self.tower(a) + self.tower(b))).square().mean()
                target = self.tower(b)
                target = target.detach() if form == "detached" else target
                return (self.head(self.tower(a)) - target).square().mean()

        def run(folder: str, form: str, called: bool, at_once: bool) -> dict[str, typing.Any]:
            torch.manual_seed(0)
            model = Towers()
            step = model if called else model.forward
            with anyrank.capture(model, self.path / folder, only=["tower*", "head*", "loss*"]):
                pairs = list(zip(torch.randn(4, 3).chunk(2), torch.randn(4, 3).chunk(2)))
                losses = []
                for a, b in pairs:
                    losses.append(step(a, b, form))
                    if not at_once:
                        losses.pop().backward()
                for loss in losses:
                    loss.backward()
            with anyrank.open_dump(self.path / folder) as dump:
                return {name: tuple(dump[name].shape) for name in dump}

        for form in ("joint", "chained", "detached"):
            for at_once in (False, True) if form != "detached" else (False,):
                name = f"{form}-{at_once}"
                one, two = (run(f"{name}-{called}", form, called, at_once) for called in (True, False))
                self.assertEqual(one, two, name)
                self.assertIn("tower.call2:fwd", one)
                self.assertEqual(one["tower.call2:fwd"], (4, 4))
                self.assertEqual("head.call2:bwd" in one, form == "chained")
                report = anyrank.verify(self.path / f"{name}-True", self.path / f"{name}-False")
                self.assertTrue(report.ok, str(report))

    def test_what_is_given_buffers_averages_and_what_is_logged(self) -> None:
        class Net(Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.lin, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
                self.register_buffer("scale", torch.ones(3), persistent=False)
                self.register_buffer("table", torch.ones(2**18 + 1), persistent=False)

            def forward(self, x: typing.Any, mask: typing.Any = None) -> typing.Any:
                return self.norm(self.lin(x)) * self.scale

        torch.manual_seed(0)
        model = Net()
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with anyrank.capture(model, self.path / "dump", ema=average) as c:
            model(torch.randn(4, 3), mask=torch.ones(4, dtype=torch.bool)).square().sum().backward()
            optimizer.step()
            average.update_parameters(model)
            c.logged("loss", 2.5)
        files = self.files()
        self.assertLessEqual({"input.0:fwd", "input.mask:fwd", "scale:buffer", "norm.running_mean:buffer",
                              "ema.lin.weight:new", "logged.loss:fwd"}, set(files))
        self.assertTrue(torch.equal(self.value("norm.running_mean:buffer"), model.norm.running_mean))
        self.assertTrue(torch.equal(self.value("ema.lin.weight:new"), average.module.lin.weight))
        self.assertNotIn("table:buffer", files)
        text = anyrank.verify(self.path / "dump", self.path / "dump").text
        self.assertIn("note: not in the dump of the other: buffers that are large: 1, first table", text)

    def test_a_resumed_run_counts_on(self) -> None:
        for folder, begin in (("whole", 1), ("resumed", 3)):
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
            x = torch.randn(4, 3)

            def steps(count: int) -> None:
                for _ in range(count):
                    optimizer.zero_grad()
                    model(x).square().sum().backward()
                    optimizer.step()

            if begin == 1:
                with anyrank.capture(model, self.path / folder):
                    steps(3)
                continue
            steps(2)
            with anyrank.capture(model, self.path / folder, optimizer, first_step=3):
                steps(1)
        report = anyrank.verify(self.path / "whole", self.path / "resumed", common=True)
        self.assertTrue(report.ok, str(report))
        names = set(self.files("resumed"))
        self.assertLessEqual({"weight:new@2", "weight:m@2", "weight:new@3", "output:fwd@3"}, names)
        self.assertEqual([name for name in names if "@" not in name], ["steps:count"])
        with self.assertRaisesRegex(AnyrankError, "first_step: 0 has to be"):
            anyrank.capture(nn.Linear(3, 2), self.path / "none", first_step=0)

    def test_states_of_optimizers_and_those_that_are_not_known(self) -> None:
        class Strange(torch.optim.SGD):  # type: ignore[misc]
            def step(self, closure: typing.Any = None) -> None:
                super().step()
                for p in self.param_groups[0]["params"]:
                    self.state[p]["z"] = p.detach().clone()

        rows: list[tuple[typing.Any, dict[str, typing.Any], set[str]]] = [
            (torch.optim.Adagrad, {}, {"weight.sum:state"}),
            (torch.optim.Adamax, {}, {"weight.exp_inf:state", "weight:m"}),
            (torch.optim.Adam, {"amsgrad": True}, {"weight.max_exp_avg_sq:state", "weight:m", "weight:v"}),
            (torch.optim.RMSprop, {"momentum": 0.9}, {"weight:v"}), (Strange, {"lr": 0.1}, set())]
        if hasattr(torch.optim, "Adafactor"):
            rows.append((torch.optim.Adafactor, {}, {"weight.row_var:state", "weight.col_var:state"}))
        if hasattr(torch.optim, "Muon"):
            rows.append((torch.optim.Muon, {}, {"weight:m"}))
        for kind, options, states in rows:
            model = nn.Linear(3, 2, bias=False)
            optimizer = kind(model.parameters(), **options)
            folder = self.path / kind.__name__
            with anyrank.capture(model, folder):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            self.assertEqual({name for name in self.files(kind.__name__) if name.endswith((":m", ":v", ":state"))},
                             states, kind)
            text = anyrank.verify(folder, folder).text
            self.assertEqual("states of Strange: 1, first weight.z" in text, kind is Strange, text)

    def test_rounding_is_measured_and_changes_nothing(self) -> None:
        for checkpoint in (None, True, False):
            for autocast in (False, True):
                name = f"{checkpoint}{autocast}"
                options: dict[str, typing.Any] = {"steps": 2, "micro": 2, "autocast": autocast}
                model = self.captured(lambda: Model(checkpoint=checkpoint), name, rounding=True, **options)
                state = torch.get_rng_state()
                plain = self.captured(lambda: Model(checkpoint=checkpoint), name + "plain", **options)
                self.assertTrue(torch.equal(state, torch.get_rng_state()))
                for (key, p), q in zip(model.named_parameters(), plain.parameters()):
                    self.assertTrue(torch.equal(p, q), key)
                allowed = {key: struct.unpack("<d", entry.data)[0] for key, entry in
                           read(self.path / name / "allowed.safetensors")[0].items()}
                one = anyrank.verify(self.path / name, self.path / (name + "plain"), rounding=True)
                self.assertTrue(one.ok, str(one))
                self.assertEqual(set(allowed) & set(self.files(name + "plain")), set(self.files(name + "plain")))
                size = self.value("head.weight:grad", name + "plain").abs().max().item()
                share = allowed["head.weight:grad"] / size
                self.assertTrue(1e-3 < share < 1.0 if autocast else 1e-7 < share < 1e-3, (name, share))

    def test_a_right_run_in_bf16_passes_by_its_rounding_and_a_factor_of_one_percent_is_seen(self) -> None:
        def run(folder: str, micro: int, factor: float) -> None:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            ids = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(1))
            with anyrank.capture(model, self.path / folder, rounding=True):
                for part in ids.chunk(micro):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = nn.functional.cross_entropy(model(part[:, :-1]).flatten(0, 1).float(),
                                                           part[:, 1:].flatten()) / micro
                    loss.backward()
                model[1].weight.grad *= factor
                optimizer.step()

        for folder, micro, factor in (("one", 1, 1.0), ("right", 4, 1.0), ("wrong", 4, 1.01)):
            run(folder, micro, factor)
        self.assertFalse(anyrank.verify(self.path / "one", self.path / "right", rtol=1e-4, atol=1e-6).ok)
        report = anyrank.verify(self.path / "one", self.path / "right", rounding=True)
        self.assertTrue(report.ok, str(report))
        wrong = anyrank.verify(self.path / "one", self.path / "wrong", rounding=True)
        self.assertEqual(wrong.first.tensor if wrong.first else "", "1.weight:grad", str(wrong))
        self.assertAlmostEqual((wrong.first and wrong.first.scale) or 0.0, 1.01, 3)

    def test_rounding_that_cannot_be_measured_is_said(self) -> None:
        class Counting(Module):  # type: ignore[misc]
            calls = 0

            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(3, 3)

            def forward(self, x: typing.Any) -> typing.Any:
                self.calls += 1
                return self.lin(x) * self.calls

        model = Counting()
        with self.assertWarnsRegex(UserWarning, "could not be measured: .* gives other values when it is called again"):
            with anyrank.capture(model, self.path / "dump", rounding=True):
                model(torch.ones(2, 3)).sum().backward()
        with self.assertRaisesRegex(AnyrankError, "--rounding: there is no allowed.safetensors in or beside"):
            anyrank.verify(self.path / "dump", self.path / "dump", rounding=True)

    def test_what_torch_func_does_is_left_alone(self) -> None:
        for beside in (False, True):
            model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
            x, parameters = torch.ones(4, 3), {n: p.detach() for n, p in model.named_parameters()}

            def loss(values: typing.Any, row: typing.Any) -> typing.Any:
                return torch.func.functional_call(model, values, (row,)).square().sum()  # noqa: B023

            c = anyrank.capture(model, self.path / f"{beside}").start()
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
            if beside:
                model(x).square().sum().backward()
                torch.func.jvp(model, (x,), (x,))
                c.stop()
                self.assertTrue(torch.allclose(each["0.weight"].sum(0), self.value("0.weight:grad", f"{beside}")))
            else:
                with self.assertRaisesRegex(AnyrankError, "Calls under torch.func are not seen"):
                    c.stop()

    def test_the_gradient_that_a_penalty_is_made_of_is_not_the_loss_s(self) -> None:
        values = []
        for penalty in (0.0, 1.0):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
            x = torch.randn(4, 3, requires_grad=True)
            with anyrank.capture(model, self.path / f"{penalty}"):
                y = model(x)
                (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                (y.square().mean() + 0.0 * penalty * force.sum()).backward()
            values.append(self.value("1:bwd", f"{penalty}"))
            self.assertTrue(torch.allclose(self.value("2:bwd", f"{penalty}"), 2 * y / 4 @ model[2].weight))
        self.assertTrue(torch.equal(*values))

    def test_a_tensor_of_the_inputs_memory_is_the_input(self) -> None:
        """Hooks of an engine put another tensor around what each module reads and gives out. What is computed in place,
        or of another shape, is no input."""
        class Around(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(_ctx: typing.Any, x: typing.Any) -> typing.Any:
                return x.detach()

            @staticmethod
            def backward(_ctx: typing.Any, grad: typing.Any) -> typing.Any:
                return grad

        class Beside(Module):  # type: ignore[misc]
            def forward(self, x: typing.Any) -> typing.Any:
                return x, 3 * x

        def run(folder: str, engine: bool) -> None:
            torch.manual_seed(0)
            names = {"lin": nn.Linear(6, 6), "drop": nn.Dropout(0.0).eval(), "act": nn.ReLU(inplace=True),
                     "turn": nn.Flatten(0), "back": nn.Unflatten(0, (4, 6)), "beside": Beside()}
            model = nn.ModuleDict(names)
            for m in names.values() if engine else ():
                m.register_forward_pre_hook(lambda _m, args: (Around.apply(args[0]),))
                m.register_forward_hook(lambda _m, _args, out: tuple(map(Around.apply, out))
                                        if isinstance(out, tuple) else Around.apply(out))
            with anyrank.capture(model, self.path / folder, values=["fwd", "bwd"]):
                x: typing.Any = torch.randn(4, 6).requires_grad_()
                for m in names.values():
                    x = m(x)
                (x[0].square() + x[1]).sum().backward()

        run("plain", False)
        run("engine", True)
        report = anyrank.verify(self.path / "plain", self.path / "engine")
        self.assertTrue(report.ok, str(report))
        self.assertEqual({name for name in self.files("engine") if name.endswith(":bwd")},
                         {f"{path}:bwd" for path in ("lin", "act", "turn", "back", "beside")})
        self.assertTrue(torch.equal(self.value("beside:bwd", "engine"), torch.full((4, 6), 3.0)))

    def test_inputs_that_count_within_each_of_several_parts_of_a_batch_are_left_out(self) -> None:
        class Pooled(Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(3, 1)

            def forward(self, nodes: typing.Any, graph: typing.Any, labels: typing.Any) -> typing.Any:
                y = self.lin(nodes)[:, 0]
                return (torch.zeros(4).index_add(0, graph, y)[graph] - labels).square().mean()

        def run(folder: str, graphs: list[list[int]], labels: list[list[int]]) -> None:
            torch.manual_seed(0)
            model, x = Pooled(), torch.arange(24.0).view(8, 3)
            with anyrank.capture(model, self.path / folder, values=["fwd"]):
                for rows, graph, y in zip(x.chunk(len(graphs)), graphs, labels):
                    model(rows, torch.tensor(graph), torch.tensor(y)).backward()

        run("one", [[0, 0, 0, 1, 1, 1, 2, 3]], [[0, 1, 2, 2, 3, 2, 1, 0]])
        run("other", [[0, 0, 0, 1, 1, 1, 3, 3]], [[0, 1, 2, 2, 3, 2, 1, 0]])
        report = anyrank.verify(self.path / "one", self.path / "other", only="input.1:fwd")
        self.assertEqual((report.ok, report.compared), (False, 1), str(report))  # one part, counted through
        run("many", [[0, 0, 0, 1], [0, 0, 1, 2]], [[0, 1, 2, 2], [3, 2, 1, 0]])
        report = anyrank.verify(self.path / "one", self.path / "many", only="input.*")
        self.assertEqual((report.ok, report.compared, report.ragged), (True, 2, 1), str(report))
        run("wrong", [[0, 0, 0, 1], [0, 0, 1, 2]], [[0, 1, 2, 2], [3, 2, 0, 1]])
        report = anyrank.verify(self.path / "one", self.path / "wrong", only="input.*")
        self.assertEqual([row.tensor for row in report.tensors], ["input.2:fwd"], str(report))

    def test_terms_that_go_backward_apart_are_one_loss_and_those_of_other_models_none(self) -> None:
        model, other = nn.Linear(3, 3), nn.Linear(3, 3)
        with anyrank.capture(model, self.path / "dump"):
            y = model(torch.ones(2, 3))
            other(torch.ones(2, 3)).sum().backward()
            y.sum().backward(retain_graph=True)
            y.square().sum().backward()
            other(torch.ones(2, 3)).sum().backward()
        self.assertTrue(torch.equal(self.value("loss:fwd"), y.sum() + y.square().sum()))

    def test_micro_batches_follow_one_another(self) -> None:
        self.captured(Model, folder="one", steps=1)
        self.captured(Model, steps=1, micro=2)
        paths = sorted((self.path / "dump").glob("*.safetensors"))
        self.assertEqual([p.name for p in paths], ["rank-00000-2.safetensors", "rank-00000.safetensors"])
        rows = [read(path)[0]["embed:fwd"] for path in reversed(paths)]
        self.assertEqual(b"".join(bytes(e.data) for e in rows), bytes(self.files("one")["embed:fwd"].data))
        self.assertTrue(torch.equal(self.value("loss:fwd"), torch.stack(self.losses).sum()))

    def test_all_micro_batches_may_go_forward_before_one_goes_backward(self) -> None:
        for folder in ("one", "dump"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            x = torch.randn(4, 3)
            with anyrank.capture(model, self.path / folder):
                for loss in [model(b).square().sum() for b in x.chunk(1 if folder == "one" else 2)]:
                    torch.autograd.backward([loss]) if folder == "one" else loss.backward()
        self.assertTrue(anyrank.verify(self.path / "one", self.path / "dump", rtol=1e-5, atol=1e-6).ok)

    def test_targets_are_counted_in_the_labels_that_the_model_is_given(self) -> None:
        class Labelled(Model):
            def forward(self, ids: typing.Any, labels: typing.Any = None) -> typing.Any:
                return super().forward(ids).sum()

        model, labels = Labelled(), batch()
        labels[0, 3] = labels[1, 0] = -100  # nothing predicts a first token
        with anyrank.capture(model, self.path / "dump"):
            for ids, own in zip(batch().chunk(2), labels.chunk(2)):
                model(ids, labels=own).backward()
        self.assertEqual(read(self.path / "dump/rank-00000.safetensors")[1]["targets"], "15")

    def test_a_model_that_calls_itself_counts_its_samples_once(self) -> None:
        """As Lightning's training_step does, which is called through the module and calls the module."""
        class Redirected(Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.is_step = nn.Linear(6, 3), True

            def forward(self, x: typing.Any) -> typing.Any:
                if not self.is_step:
                    return self.layer(x)
                self.is_step = False
                loss = self(x).square().mean()
                self.is_step = True
                return loss

        torch.manual_seed(0)
        model, x = Redirected(), torch.randn(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with anyrank.capture(model, self.path / "dump"):
            model(x).backward()
            optimizer.step()
        samples = json.loads(read(self.path / "dump/rank-00000.safetensors")[1]["anyrank.samples"])
        self.assertEqual(len(samples["1"]), 4)

    def test_a_rank_that_begins_again_leaves_the_files_of_others(self) -> None:
        """Another rank may have begun its new file of inputs before rank 0 discards its old one."""
        inputs, folder = Inputs.__new__(Inputs), self.path / "dump/inputs"
        inputs.handles, inputs.finished, inputs.folder = [], False, folder
        inputs.record = typing.cast(typing.Any, types.SimpleNamespace(files=unittest.mock.Mock()))
        inputs.groups = typing.cast(typing.Any, types.SimpleNamespace(mesh=types.SimpleNamespace(rank=0)))
        folder.mkdir(parents=True)
        part = folder / "rank-00001.safetensors.part"
        part.touch()
        inputs.discard(begins_again=True)
        self.assertTrue(part.exists())
        inputs.discard()
        self.assertFalse(folder.exists())

    def test_evaluations_are_left_out(self) -> None:
        self.captured(Model, folder="without")
        self.captured(Model, folder="with", evaluate=True)
        self.assertEqual({n: e.shape for n, e in self.files("without").items()},
                         {n: e.shape for n, e in self.files("with").items()})

    def test_a_model_that_only_infers_has_a_step_a_pass(self) -> None:
        model = Model().eval()
        with torch.no_grad(), anyrank.capture(model, self.path / "dump"):
            model(batch())
            model(batch(3))
        names = self.files()
        self.assertEqual((names["fork.a:fwd"].shape, names["fork.a:fwd@2"].shape), ((4, 5, 6), (3, 5, 6)))
        self.assertFalse([name for name in names if name.endswith((":bwd", ":grad", ":new"))])

    def test_chosen_steps_are_complete_when_they_are_over(self) -> None:
        torch.manual_seed(0)
        model = Model()
        optimizer = adamw(model)
        with anyrank.capture(model, self.path / "dump", steps={2, 3}, only=["head*", "loss:*"]):
            train(model, optimizer, 3)
            there = {p.name for p in (self.path / "dump").iterdir()} - {"inputs"}
            self.assertEqual(there, {"rank-00000.safetensors.part"})
            train(model, optimizer, 1)
            names = self.files()
        self.assertEqual(names.keys(), self.files().keys())
        self.assertEqual({name.partition("@")[2] for name in names if not name.endswith(":new@1")}, {"2", "3", ""})
        self.assertEqual([name for name in names if "@" not in name], ["head.weight:new"])  # what step 2 began with
        self.assertFalse([name for name in names if not name.startswith(("head", "loss"))])

    def test_a_function_chooses_steps_and_values_choose_kinds(self) -> None:
        self.captured(Model, steps=3, values=["grad"])
        self.assertTrue(all(":grad" in name for name in self.files()))
        torch.manual_seed(0)
        model = Model()
        with anyrank.capture(model, self.path / "odd", steps=lambda step: step % 2 == 1, values=["fwd"]):
            train(model, adamw(model), 3)
        self.assertEqual({name.partition("@")[2] for name in self.files("odd")}, {"", "3"})

    def test_every_optimizer_shows_its_moments(self) -> None:
        makers: dict[str, typing.Callable[[typing.Any], typing.Any]] = {
            "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
            "foreach": lambda m: adamw(m, foreach=True), "fused": lambda m: adamw(m, fused=True)}
        for name, make in makers.items():
            model = self.captured(Model, folder=name, optimizer=make)
            names = self.files(name)
            self.assertIn("head.weight:m@2", names)
            self.assertEqual("head.weight:v@2" in names, name != "sgd")
            self.assertTrue(torch.equal(self.value("head.weight:new@2", name), model.head.weight))

    def test_the_bias_by_which_a_router_chooses_is_written_before_and_after_a_step(self) -> None:
        model = nn.Linear(3, 2)
        model.register_buffer("e_score_correction_bias", torch.tensor([0.5, -0.5]))
        model.register_buffer("other", torch.ones(2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with anyrank.capture(model, self.path / "dump", optimizer):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            model.e_score_correction_bias += 1.0
        self.assertEqual(self.value("e_score_correction_bias:init").tolist(), [0.5, -0.5])
        self.assertEqual(self.value("e_score_correction_bias:new").tolist(), [1.5, 0.5])
        self.assertEqual([name for name in self.files() if name.startswith("other")], ["other:buffer"])

    def test_two_optimizers_make_one_step(self) -> None:
        torch.manual_seed(0)
        model = Model()
        one, two = torch.optim.SGD(model.embed.parameters(), 0.1), torch.optim.Adam(model.head.parameters(), 0.1)
        with anyrank.capture(model, self.path / "dump", [one, two]):
            for _ in range(2):
                model(batch()).square().mean().backward()
                one.step()
                two.step()
        names = self.files()
        self.assertIn("head.weight:m@2", names)
        self.assertFalse([name for name in names if name.endswith("@3")])

    def test_an_update_by_hand_ends_a_step(self) -> None:
        """However the program clears gradients, and whether it says anything or not."""
        def run(folder: str, told: tuple[str, ...], clear: str) -> list[str]:
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            c = anyrank.capture(model, self.path / folder).start()
            for _ in range(2):
                loss = model(torch.ones(2, 3)).square().sum()
                if clear == "before":  # the next backward pass
                    model.zero_grad()
                loss.backward()
                if "gradients" in told:
                    c.gradients()
                for p in model.parameters():
                    p.data -= 0.1 * p.grad
                if clear == "after":
                    model.zero_grad()
                if clear == "zero":
                    model.zero_grad(set_to_none=False)
                if "step" in told:
                    c.step()
            c.stop()
            names = set(self.files(folder)) - {"steps:count"}
            return [f"{name}: {self.value(name, folder).tolist()}" for name in sorted(names)]
        right = run("right", ("gradients", "step"), "after")
        self.assertEqual({line.split(": ")[0] for line in right if line.startswith("weight:")},
                         {f"weight:{name}" for name in ("init", "grad", "grad@2", "new", "new@2")})
        for told in ((), ("gradients",), ("step",), ("gradients", "step")):
            for clear in ("before", "after", "zero") if "gradients" in told else ("before", "after"):
                self.assertEqual(run(f"{clear}-{len(told)}-{told[:1]}", told, clear), right, (told, clear))
        with self.assertWarnsRegex(UserWarning, r"step 1: weight.grad was set to zero .* call gradients\(\)"):
            lost = run("lost", (), "zero")
        self.assertEqual(lost, [line for line in right if ":grad" not in line])

    def test_micro_batches_without_an_optimizer_are_one_step(self) -> None:
        model = nn.Linear(3, 2)
        with anyrank.capture(model, self.path / "dump"):
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
        self.assertEqual([name for name in self.files() if "@2" in name or ":new" in name], [])

    def test_a_program_that_ends_without_stop_has_its_files(self) -> None:
        from anyrank.tests import run_python
        code = ("import os, sys, torch, anyrank\n"
                "child = os.fork()\n"  # two programs, and torch is imported once
                "m = torch.nn.Linear(2, 2)\n"
                "c = anyrank.capture(m, sys.argv[1 + (child == 0)]).start()\n"
                "m(torch.ones(1, 2)).sum().backward()\n"
                "if child == 0:\n"
                "    raise SystemError('no')\n"
                "os.waitpid(child, 0)\n")
        ended, raised = self.path / "ended", self.path / "raised"
        run_python(code, str(ended), str(raised))
        self.assertEqual({p.name for p in ended.iterdir()}, {"model.json", "rank-00000.safetensors"})
        self.assertEqual([p.name for p in raised.iterdir()], [])


class Types(CaptureCase):
    def test_every_type_is_written_with_its_bytes(self) -> None:
        for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float64, "F64"),
                            (torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64"), (torch.bool, "BOOL")):
            t = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).to(dtype).t()
            entry = entry_of(t)
            self.assertEqual(entry.dtype, name)
            self.assertEqual(bytes(entry.data), bytes(t.contiguous().view(torch.uint8).flatten().tolist()))

    def test_a_big_endian_machine_writes_little_endian_bytes(self) -> None:
        t = torch.tensor([1.0, -2.5], dtype=torch.float32)
        with unittest.mock.patch("anyrank._arrays.sys.byteorder", "big"):
            data = bytes(entry_of(t).data)
        self.assertEqual(data, b"".join(bytes(entry_of(x).data)[::-1] for x in t))

    def test_a_full_disk_is_an_error_with_the_file(self) -> None:
        import resource
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        model = nn.Linear(64, 64)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        for room in (1 << 10, (1 << 14) + 50_000):  # none for the first tensor; for some that are still in memory
            with self.assertRaisesRegex(AnyrankError, r"dump/rank-00000.safetensors: File too large"):
                with anyrank.capture(model, self.path / "dump"):
                    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # as a disk that is full
                    model(torch.ones(1, 64)).sum().backward()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            self.assertFalse(list((self.path / "dump").iterdir()))
        (self.path / "file").write_text("")
        with self.assertRaisesRegex(AnyrankError, "the folder has no name"):  # as of a variable that is not set
            anyrank.capture(model, "")
        with self.assertRaisesRegex(AnyrankError, r"'a\\x00b': a path has no byte 0"):
            anyrank.capture(model, "a\0b")
        for value in (0, -1, float("nan"), "5", None):
            with self.assertRaisesRegex(AnyrankError, "timeout: .* has to be more than 0 seconds"):
                anyrank.capture(model, "d", timeout=value)  # type: ignore[arg-type]
        with self.assertRaisesRegex(AnyrankError, "only: 3 has to be a glob, or several"):
            anyrank.capture(model, "d", only=3)  # type: ignore[arg-type]
        with self.assertRaisesRegex(AnyrankError, "file: File exists"), anyrank.capture(model, self.path / "file"):
            model(torch.ones(1, 64))

    def test_a_type_that_files_lack_is_an_error(self) -> None:
        model = nn.Linear(2, 2).to(torch.complex128)
        with self.assertRaisesRegex(AnyrankError, "weight:init: tensors of torch.complex128"):
            with anyrank.capture(model, self.path / "dump"):
                model(torch.zeros(1, 2, dtype=torch.complex128))
        self.assertFalse(list((self.path / "dump").iterdir()))


class LeftBehind(CaptureCase):
    def untouched(self, model: typing.Any) -> None:
        from torch.optim import optimizer as home
        for m in model.modules():
            self.assertFalse(m._forward_hooks or m._forward_pre_hooks)
        for p in model.parameters():
            self.assertFalse(p._post_accumulate_grad_hooks)
        self.assertFalse(nn.modules.module._global_forward_pre_hooks)
        self.assertFalse(home._global_optimizer_pre_hooks or home._global_optimizer_post_hooks)
        self.assertFalse(_patches._undo or _patches._watchers)
        self.assertFalse(hasattr(torch.autograd.backward, "__wrapped__"))

    def test_nothing_of_ours_stays_in_the_program(self) -> None:
        self.untouched(self.captured(Model))

    def test_an_exception_passes_through_and_no_file_stays(self) -> None:
        model = Model()
        error = KeyError("mine")
        with self.assertRaises(KeyError) as caught, anyrank.capture(model, self.path / "dump"):
            train(model, adamw(model), 1)
            self.assertTrue(list((self.path / "dump").iterdir()))
            raise error
        self.assertIs(caught.exception, error)
        self.assertFalse(list((self.path / "dump").iterdir()))
        self.untouched(model)

    def test_a_process_that_is_forked_leaves_the_files_alone(self) -> None:
        model = nn.Linear(2, 2)
        with anyrank.capture(model, self.path / "dump") as capture:
            model(torch.ones(1, 2)).sum().backward()
            child = os.fork()
            if child == 0:
                capture._abandon("as an exception in the child does")
                os._exit(0)
            os.waitpid(child, 0)
        self.assertIn("weight:grad", self.files())

    def test_an_earlier_run_is_replaced_and_nothing_else(self) -> None:
        folder = self.path / "dump"
        folder.mkdir()
        for name in ("rank-00000-3", "rank-00007", "rank-00000", "mine"):
            (folder / f"{name}.safetensors").write_bytes(b"old")
        self.captured(Model, steps=1)
        self.assertEqual({p.name for p in folder.iterdir()},
                         {"model.json", "inputs", "rank-00000.safetensors", "mine.safetensors"})

    def test_what_modules_read_is_written_once(self) -> None:
        model = self.captured(lambda: nn.Sequential(nn.Embedding(11, 6), Doubled(), nn.Linear(6, 11)), steps=2)
        self.assertEqual(self.files("dump/inputs").keys(), {"1.inner.in:fwd"})
        references = json.loads((self.path / "dump/model.json").read_text(encoding="utf-8"))["inputs"]
        self.assertEqual(references, {"0": {"0": "input.0:fwd"}, "2": {"0": "1:fwd"}})
        twice = 2.0 * self.value("0:fwd")
        self.assertTrue(torch.equal(self.value("1.inner.in:fwd", "dump/inputs"), twice))
        self.captured(lambda: nn.Sequential(nn.Embedding(11, 6), Doubled(), nn.Linear(6, 11)), "named", steps=1,
                      keep_inputs="1", only=["1*", "2*"])
        self.assertEqual(self.files("named/inputs").keys(), {"1.in:fwd", "1.inner.in:fwd"})
        self.untouched(model)

    def test_inputs_of_an_earlier_run_do_not_stay(self) -> None:
        self.captured(Model, steps=1)
        self.captured(Model, steps=1, keep_inputs=False)
        self.assertFalse((self.path / "dump/inputs").exists())

    def test_two_models_at_once_keep_apart(self) -> None:
        one, two = Model(), Model()
        with anyrank.capture(one, self.path / "one"), anyrank.capture(two, self.path / "two"):
            train(one, adamw(one), 1)
            train(two, adamw(two), 2)
        self.assertNotIn("head.weight:new@2", self.files("one"))
        self.assertTrue(torch.equal(self.value("head.weight:new@2", "two"), two.head.weight))
        self.untouched(one)


class Refused(CaptureCase):
    def refused(self, words: str, model: typing.Any = None, *arguments: typing.Any, **options: typing.Any) -> None:
        with self.assertRaisesRegex(AnyrankError, words):
            with anyrank.capture(Model() if model is None else model, self.path / "dump", *arguments, **options):
                self.fail("it began")
        self.assertFalse((self.path / "dump").exists())

    def test_what_cannot_be_captured_is_said(self) -> None:
        other = Model()
        self.refused("no torch.nn.Module", torch.zeros(2))
        self.refused("DistributedDataParallel", nn.DataParallel(Model()))
        self.refused("updates none of the model's parameters", Model(), adamw(other))
        self.refused("no torch.optim.Optimizer", Model(), optimizer=3)
        with anyrank.capture(other, self.path / "other"):
            self.refused("captured already", other)
            other(batch())

    def test_bad_arguments_are_said(self) -> None:
        self.refused("'mehs'.*is 'mesh' meant", spec={"mehs": {}})
        self.refused("has 4 ranks, without a process group", spec={"mesh": {"tp": 4}})
        self.refused("rank=4: .* has 4 ranks", spec={"mesh": {"tp": 4}}, rank=4)
        self.refused("rank=3: without a process group", rank=3)
        self.refused("no dimension 'x'", spec={"mesh": {"tp": 1}, "shard": {"*": {"x": 0}}})
        self.refused("dimension of the tensor", spec={"shard": {"*": {"tp": "0"}}})
        self.refused("relative sizes", spec={"shard": {"*": {"tp": 0, "blocks": [0]}}})
        self.refused("samples", spec={"samples": "mixed"})
        self.refused("no such file|No such file", spec=str(self.path / "none.json"))
        self.refused("count from 1", steps={0})
        self.refused("steps", steps=1.5)
        self.refused("values", values=["grads"])

    def test_a_glob_of_outputs_says_of_inputs_how_the_batch_is_dealt_out_alone(self) -> None:
        from anyrank.capture._spec import Spec

        for said, meant in (({"dp": 1, "tp": 0}, {}), ({"dp": None}, {"dp": None}), ({"cp": 1}, {}),
                            ({"dp": 0, "blocks": [1, 1]}, {"dp": 0, "blocks": [1, 1]}), ({"tp": -1}, {})):
            spec = Spec({"shard": {"*:fwd": said}})
            self.assertEqual((spec.dims_of("a.b:fwd"), spec.dims_of("input.0:fwd@3")), (said, meant))
            self.assertEqual(Spec({"shard": {"input.*:fwd": said}}).dims_of("input.ids:fwd"), said)

    def test_a_spec_that_does_not_fit_a_tensor_leaves_no_file(self) -> None:
        model = Model()
        with self.assertRaisesRegex(AnyrankError, "head.weight:init: has 2 dimensions, the spec divides dimension 2"):
            with anyrank.capture(model, self.path / "dump", spec={"mesh": {"tp": 1}, "shard": {"head.*": {"tp": 2}}}):
                train(model, adamw(model), 1)
        self.assertFalse(list((self.path / "dump").iterdir()))

    def test_a_capture_without_what_was_asked_for_is_said(self) -> None:
        rows: list[tuple[dict[str, typing.Any], str]] = [
            ({"steps": {5}}, r"dump: the run had 1 step, and steps=\{5\} chooses none of them"),
            ({"only": "head.wieght:*"}, "only: no tensor .* matches 'head.wieght:.' .the nearest is 'head.w"),
            ({"only": ["*:init", "zz*"]}, "only: no tensor of this run has a name that matches 'zz.'$"),
            ({}, "dump: replaces the dump that an earlier run left here; another folder keeps both")]
        for options, words in rows:
            model = Model()
            with self.assertWarnsRegex(UserWarning, words):
                with anyrank.capture(model, self.path / "dump", **options):
                    model(batch())

    def test_a_model_that_is_never_called_is_an_error_and_its_parts_are_seen(self) -> None:
        model = Model()
        with self.assertRaisesRegex(AnyrankError, "no forward pass of the model was seen, so nothing is written"):
            with anyrank.capture(model, self.path / "dump"):
                train(Model(), adamw(model), 1)
        self.assertFalse((self.path / "dump").exists())
        with anyrank.capture(model, self.path / "dump"):
            before = model.head.weight.detach().clone()
            optimizer = adamw(model)
            for _ in range(2):
                model.forward(batch()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        self.assertTrue(torch.equal(self.value("head.weight:init"), before))
        self.assertTrue(torch.equal(self.value("head.weight:new@2"), model.head.weight))
        self.assertLessEqual({"head:fwd@2", "head:bwd@2", "embed:fwd", "loss:fwd@2"}, set(self.files()))

    def test_a_capture_is_used_once(self) -> None:
        model = Model()
        c = anyrank.capture(model, self.path / "dump").start()
        with self.assertRaisesRegex(AnyrankError, "started already"):
            c.start()
        model(batch())
        c.stop()
        with self.assertRaisesRegex(AnyrankError, "has ended"):
            c.start()


if __name__ == "__main__":
    unittest.main()
