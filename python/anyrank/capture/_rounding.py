# SPDX-License-Identifier: Apache-2.0
"""What rounding may change in each tensor of a captured step: its forward and backward passes are repeated with errors
as large as rounding's in every operation (anyrank.rounding), on one rank, after the passes themselves.

A repeated pass begins with the same random state, and leaves parameters, gradients, buffers and random state as they
were. What follows from gradients (moments, new weights, the norm) is bounded by what theirs may be off.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import typing

import torch
from torch import nn

from anyrank.capture._listen import Listener, Pass, leaves_of, local_of
from anyrank.capture._model import FSDPModule
from anyrank.capture._record import magnitude_of
from anyrank.rounding import DRAWS, SAFETY, SAFETY_SINGLE, Noise, Size, size_of, write_allowances

Values = typing.Dict[str, torch.Tensor]
Outputs = typing.List[typing.Tuple[torch.Tensor, typing.List[torch.Tensor]]]  # with their gradients, once they came


class Call(typing.NamedTuple):
    """How a pass was called, and under what."""

    module: nn.Module
    args: tuple[typing.Any, ...]
    kwargs: dict[str, typing.Any]
    random: torch.Tensor
    autocast: list[tuple[str, bool, torch.dtype]]


class Replay:
    """A pass that is being repeated, and what it gives out."""

    def __init__(self, owner: Pass) -> None:
        self.replay_pass = Pass(owner.number, (), {})
        self.replay_pass.batch, self.replay_pass.samples, self.replay_pass.input_storages = (
            owner.batch, owner.samples, owner.input_storages)
        self.values: Values = {}

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            self.values.setdefault(name, local_of(tensor).clone())


class Rounding:
    """The allowances of one rank's run. parameters: by name."""

    def __init__(self, parameters: list[tuple[str, torch.Tensor]], model: nn.Module) -> None:
        self.parameters = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self.model, self.failed = model, ""
        self.whole_backward = any(isinstance(m, FSDPModule) for m in model.modules())
        self.sizes: dict[str, list[Size]] = {}  # of each tensor: each draw's
        self.bounds: dict[str, float] = {}  # of tensors that follow from gradients
        self.moments: dict[str, float] = {}  # of each parameter: the sum of what its gradients may be off so far
        self.share = 0.0  # of themselves, that matrices may be off after the last step
        self.moved: dict[str, float] = {}  # of each tensor of a step: that share before it
        self.updates: dict[str, float] = {}  # and of what optimizers that divide by a gradient's size make of that
        self._begin()

    def _begin(self) -> None:
        self.calls: dict[Pass, list[Call]] = {}
        self.outputs: dict[Pass, Outputs] = {}
        self.of_step: dict[str, list[Size]] = {}
        self.loss_off: list[list[float]] = [[] for _ in range(DRAWS)]
        self.off: list[dict[str, typing.Any]] = [{} for _ in range(DRAWS)]  # of the gradients, summed over passes
        self.exact: dict[str, typing.Any] = {}
        self.captured: Values = {}  # gradients as they were captured

    # --- as passes come -----------------------------------------------------------------------------------------------

    def called(self, owner: Pass, module: nn.Module, args: tuple[typing.Any, ...],
               kwargs: dict[str, typing.Any]) -> None:
        states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        self.calls.setdefault(owner, []).append(Call(module, args, kwargs, torch.get_rng_state(), states))

    def gave(self, owner: Pass, tensors: typing.Iterable[torch.Tensor]) -> None:
        """Keeps the gradients of a pass's outputs as they come, after the pass."""
        for t in tensors:
            if t.requires_grad and t.is_floating_point():
                grads: list[torch.Tensor] = []
                t.register_hook(grads.append)
                self.outputs.setdefault(owner, []).append((t.detach(), grads))

    def repeat(self, owner: Pass, listener: Listener, during: typing.Callable[[Replay | None], None]) -> None:
        """Repeats a pass whose backward pass is over, without errors and then with them."""
        outputs, calls = self.outputs.pop(owner, []), self.calls.pop(owner, [])
        if self.failed or not outputs or not any(grads for _, grads in outputs):
            return
        if len(calls) != 1:
            self.failed = f"a pass is {len(calls)} calls of parts of the model, and not one of the model"
            return
        try:
            with _restored(self.model):
                runs = [self._run(owner, calls[0], outputs, listener, during, noise)
                        for noise in (None, *(Noise(draw + 1) for draw in range(DRAWS)))]
        except Exception as error:  # noqa: BLE001: of the program's own modules, which ran well before
            if ".grad()" in str(error) and not self.whole_backward:
                self.whole_backward, self.outputs[owner], self.calls[owner] = True, outputs, calls
                self.repeat(owner, listener, during)
                return
            self.failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return
        self._measure(runs[0], runs[1:], outputs)

    def _run(self, model_pass: Pass, call: Call, outputs: Outputs, listener: Listener,
             during: typing.Callable[[Replay | None], None], noise: Noise | None) -> Values:
        replay = Replay(model_pass)
        during(replay)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.random.fork_rng())
                torch.set_rng_state(call.random)
                for kind, enabled, dtype in call.autocast:
                    stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
                stack.enter_context(torch.enable_grad())
                if noise is not None:
                    stack.enter_context(noise)
                replayed = [t for t in leaves_of(call.module(*call.args, **call.kwargs))
                         if t.requires_grad and t.is_floating_point()]
                if noise is None and not (len(replayed) == len(outputs) and all(
                        torch.equal(t.detach(), before) for t, (before, _) in zip(replayed, outputs))):
                    raise ValueError("the model gives other values when it is called again with the same inputs")
                pairs = [(t, grads[0]) for t, (_, grads) in zip(replayed, outputs) if grads]
                grads = self._backward([t for t, _ in pairs], [g for _, g in pairs])
            listener.flush()
        finally:
            during(None)
        values = replay.values
        values.update({f"{name}:grad": g for (name, _), g in zip(self.parameters, grads) if g is not None})
        values.update({f":{i}": t.detach() for i, t in enumerate(replayed)})
        return values

    def _backward(self, tensors: list[torch.Tensor], grad_outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the gradients of the parameters. FSDP2 and reentrant checkpoints support only a whole backward
        pass."""
        parameters = [parameter for _, parameter in self.parameters]
        if not self.whole_backward:
            return [None if grad is None else local_of(grad)
                    for grad in torch.autograd.grad(tensors, parameters, grad_outputs, allow_unused=True)]
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            torch.autograd.backward(tensors, grad_outputs)
            return [None if parameter.grad is None else local_of(parameter.grad) for parameter in parameters]
        finally:
            for parameter, grad in zip(parameters, before):
                parameter.grad = grad

    def _measure(self, exact: Values, draws: list[Values], outputs: Outputs) -> None:
        for draw, terms in zip(draws, self.loss_off):
            terms.append(sum(float(((draw[f":{i}"] - exact[f":{i}"]).double() * grads[0].double()).sum())
                             for i, (_, grads) in enumerate(outputs) if grads))
        for name, value in exact.items():
            drawn = [draw[name] for draw in draws if name in draw and draw[name].shape == value.shape]
            if name.endswith(":grad"):
                self.exact[name] = self.exact.get(name, 0.0) + value
                for total, noisy in zip(self.off, drawn):
                    total[name] = total.get(name, 0.0) + (noisy.double() - value.double())
            else:
                self._add("output:fwd" if name.startswith(":") else name, [size_of(value, noisy) for noisy in drawn])

    def _add(self, name: str, sizes: list[Size]) -> None:
        """Keeps the largest sizes over several micro-batches and several outputs."""
        before = self.of_step.get(name, [Size()] * len(sizes))
        self.of_step[name] = [Size(*map(max, a, b)) for a, b in zip(before, sizes)]

    # --- at a step's end ----------------------------------------------------------------------------------------------

    def end_step(self, name_of: typing.Callable[[str], str], optimizers: list[typing.Any]) -> None:
        """Allows what was captured of the step. name_of: a name with its step."""
        self._add("loss:fwd", [Size(abs(sum(off)), abs(sum(off)), 0.0) for off in self.loss_off])
        groups = [group for o in optimizers for group in o.param_groups]
        plain = {id(parameter) for o in optimizers if isinstance(o, torch.optim.SGD) for group in o.param_groups
                 for parameter in group["params"]}
        rates = {id(parameter): abs(float(group.get("lr", 0.0))) for group in groups for parameter in group["params"]}
        factor, squares = self._factor(), 0.0
        for name, parameter in self.parameters:
            key = f"{name}:grad"
            value, off = self.captured.get(key), [total[key] * factor for total in self.off if key in total]
            if value is None or not off:
                continue
            self._add(key, [size_of(value, (value.double() + error).to(value.dtype)) for error in off])
            squares += max(float((error ** 2).sum()) for error in off)
            largest, eps = magnitude_of(value)
            worst = SAFETY * max(size.largest for size in self.of_step[key]) + eps * largest
            moment = self.moments[name] = self.moments.get(name, 0.0) + worst
            self.bounds[name_of(f"{name}:m")] = moment
            self.bounds[name_of(f"{name}:v")] = 2 * (largest + worst) * moment
            rate = rates.get(id(parameter), 0.0)
            self.updates[name] = self.updates.get(name, 0.0) + 2.0 * rate * _usual_share(value, off)
            by_size = 0.0 if id(parameter) in plain else self.updates[name]
            self.bounds[name_of(f"{name}:new")] = max(rate * moment, by_size)
        self.bounds[name_of("grad_norm:clip")] = SAFETY * math.sqrt(squares)
        self.sizes.update({name_of(name): sizes for name, sizes in self.of_step.items()})
        self.moved.update(dict.fromkeys(map(name_of, [*self.of_step, "grad_norm:clip"]), self.share))
        self.share = max((self.bounds.get(name_of(f"{name}:new"), 0.0) / (magnitude_of(local_of(parameter))[0] or 1.0)
                          for name, parameter in self.parameters if parameter.dim() > 1), default=0.0)
        self._begin()

    def _factor(self) -> float:
        """Returns the factor by which the program has multiplied gradients after the backward pass: one over a loss
        scale, or a divisor."""
        along = squares = 0.0
        for name, value in self.exact.items():
            captured = self.captured.get(name)
            if captured is not None and captured.shape == value.shape:
                along += float((captured.double() * value.double()).sum())
                squares += float((value.double() ** 2).sum())
        return along / squares if squares > 0.0 and math.isfinite(along) else 1.0

    def write(self, path: pathlib.Path, dumped: typing.Mapping[str, tuple[float, float]]) -> None:
        """Writes the allowances of what was dumped, of which it is given the largest value and the format's step.

        What no pass gives out and no gradient bounds (buffers, averages, what is logged) may be off by as large a share
        of itself as an activation is."""
        share = max(
            (
                SAFETY * max(size.largest for size in sizes) / dumped[name][0]
                for name, sizes in self.sizes.items()
                if sizes and name.split("@")[0].endswith(":fwd") and dumped.get(name, (0.0, 0.0))[0] > 0.0
            ),
            default=0.0,
        )
        rows = {}
        for name, (largest, eps) in dumped.items():
            base, _, step = name.partition("@")
            kind = base.rsplit(":", 1)[-1]
            output_name = f"output:fwd@{step}" if step else "output:fwd"
            sizes = self.sizes.get(name, self.sizes.get(output_name, []) if base.startswith("output.") else [])
            safety = SAFETY_SINGLE if base == "loss:fwd" else SAFETY
            off = safety * max((size.largest for size in sizes), default=0.0) + self.bounds.get(name, 0.0)
            off += self.moved.get(name, 0.0) * largest
            if not sizes and name not in self.bounds and kind not in ("init", "count") and base[:6] != "input.":
                off = self._of_state(name, kind) if kind == "state" else share * largest
            rows[name] = off + eps * largest, ()
        write_allowances(path, rows)

    def _of_state(self, name: str, kind: str) -> float:
        """Handles a further state of an optimizer, NAME.KEY:state, like its moments."""
        base, _, step = name.partition("@")
        stem, end = base.rsplit(".", 1)[0], f"@{step}" if step else ""
        return max(self.bounds.get(f"{stem}:{moment}{end}", 0.0) for moment in "mv")


def _usual_share(value: torch.Tensor, off: list[torch.Tensor]) -> float:
    """Returns twice the relative error that all but a twentieth of a gradient's elements stay within, at most 1. The
    others are rounding themselves; verify reads the gradients for them."""
    max_error = torch.stack([error.abs() for error in off]).amax(0).flatten()
    step = max(1, max_error.numel() // 65536)
    share = max_error[::step] / value.double().abs().flatten()[::step].clamp(min=1e-300)
    return min(1.0, 2.0 * float(share.quantile(0.95)))


@contextlib.contextmanager
def _restored(model: nn.Module) -> typing.Iterator[None]:
    """Restores afterwards what a module writes into its buffers."""
    before = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for b, value in before:
                if not torch.equal(b, value):
                    b.copy_(value)
