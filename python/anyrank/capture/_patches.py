# SPDX-License-Identifier: Apache-2.0
"""How a step is seen that goes on outside of modules: backward, clipping, the optimizer; and calls of modules.

All is as it was when the last capture ends.

Functions are replaced in what they close over, or else in the modules that have them, so that one that was imported by
name before is seen too.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing

import torch
import torch.optim.optimizer as optim
from torch.nn.utils import clip_grad


class Watcher(typing.Protocol):
    def on_backward(self, loss: torch.Tensor) -> None: ...

    def after_backward(self) -> None: ...

    def on_clip(self, parameters: list[torch.Tensor]) -> bool: ...  # whether they are the model's

    def on_norm(self, norm: typing.Any, norm_type: float) -> None: ...

    def on_scaled(self, outputs: typing.Any, scaler: typing.Any) -> None: ...

    def before_update(self, optimizer: typing.Any) -> None: ...  # by gradients that are complete

    def on_closure(self, is_repeat: bool) -> None: ...  # is_repeat: an optimizer calls its closure once more

    def on_call(self, module: typing.Any, args: typing.Any, kwargs: typing.Any) -> bool: ...  # whether it is of it

    def after_call(self, output: typing.Any) -> None: ...

    def hears_calls(self) -> bool: ...  # whether on_call() may still say so

    def on_saved(self, saved: typing.Any) -> None: ...  # to a checkpoint

    def on_transfer(self, received: typing.Any) -> None: ...  # to another rank, or from one into this tensor


TRANSFERS = ("send", "isend", "recv", "irecv")  # of one rank to another; batch_isend_irecv calls them
_watchers: list[Watcher] = []
_undo: list[typing.Callable[[], None]] = []
_clipping_now: list[bool] = []  # one for the call that is at work
_backward_now: list[bool] = []  # likewise


def watch(watcher: Watcher) -> None:
    if not _watchers:
        _install()
    _watchers.append(watcher)
    hear_calls()


def unwatch(watcher: Watcher) -> None:
    if watcher in _watchers:
        _watchers.remove(watcher)
    if not _watchers:
        while _undo:
            _undo.pop()()


def _install() -> None:
    backward = torch.autograd.backward  # Tensor.backward calls it too

    @functools.wraps(backward)
    def heard(tensors: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        losses = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return _go_backward([t for t in losses if isinstance(t, torch.Tensor)],
                            functools.partial(backward, tensors, *args, **kwargs))

    torch.autograd.backward = heard
    _undo.append(lambda: setattr(torch.autograd, "backward", backward))
    # The second has an underscore in its module, and none in torch.nn.utils.
    for name in ("clip_grad_norm_", "_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
        if hasattr(clip_grad, name):
            _replace(getattr(clip_grad, name), _clipping)
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    for name in TRANSFERS:
        if hasattr(c10d, name):
            _replace(getattr(c10d, name), _transferring, (c10d, torch.distributed))
    _undo.append(optim.register_optimizer_step_pre_hook(_before_step).remove)
    _undo.append(optim.register_optimizer_step_post_hook(_after_step).remove)
    scaler = torch.amp.GradScaler
    _undo.append(functools.partial(setattr, scaler, "scale", scaler.scale))
    scaler.scale = _scaling(scaler.scale)
    for home in filter(None, (torch, sys.modules.get("torch.distributed.checkpoint"))):
        _undo.append(functools.partial(setattr, home, "save", home.save))
        setattr(home, "save", _saving(home.save))
    _undo.append(functools.partial(setattr, torch.nn.Module, "__call__", torch.nn.Module.__call__))
    _hear_megatron()


def _hear_megatron() -> None:
    """Megatron's schedules call the autograd engine themselves where they free what stages give out. A loss, of which
    nothing would be saved, stays until it has gone backward."""
    schedules: typing.Any = sys.modules.get("megatron.core.pipeline_parallel.schedules")
    backward = getattr(schedules, "custom_backward", None)
    free = getattr(schedules, "deallocate_output_tensor", None)
    if backward is None or free is None:
        return

    @functools.wraps(backward)
    def heard(output: torch.Tensor, grad_output: torch.Tensor | None) -> typing.Any:
        losses = [output] if grad_output is None else []  # a stage before the last is given its output's gradient
        return _go_backward(losses, functools.partial(backward, output, grad_output))

    @functools.wraps(free)
    def freed(output: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        return None if isinstance(output, torch.Tensor) and output.dim() == 0 else free(output, *args, **kwargs)

    schedules.custom_backward, schedules.deallocate_output_tensor = heard, freed
    _undo.append(functools.partial(setattr, schedules, "custom_backward", backward))
    _undo.append(functools.partial(setattr, schedules, "deallocate_output_tensor", free))


def _go_backward(losses: list[torch.Tensor], function: typing.Callable[[], typing.Any]) -> typing.Any:
    """Runs a backward pass on these losses; a pass inside of it is a part of it."""
    if _backward_now:
        return function()
    for watcher in list(_watchers):
        for loss in losses:
            watcher.on_backward(loss)
    _backward_now.append(True)
    try:
        result = function()
    finally:
        _backward_now.pop()
    for watcher in list(_watchers):
        watcher.after_backward()
    return result


def hear_stages(stage: typing.Any) -> None:
    """Listens from now on to the backward passes of pipeline stages, which not all schedules run by backward()."""
    base: typing.Any = next(kind for kind in type(stage).__mro__ if "backward_maybe_with_nosync" in vars(kind))
    function = base.backward_maybe_with_nosync
    if hasattr(function, "__wrapped__"):
        return

    @functools.wraps(function)
    def heard(stage: typing.Any, kind: str, bwd_kwargs: dict[str, typing.Any], *args: typing.Any,
              **kwargs: typing.Any) -> typing.Any:
        output = bwd_kwargs["stage_output"] if kind != "weight" and stage.is_last else ()
        losses = [output] if isinstance(output, torch.Tensor) else output
        return _go_backward([t for t in losses if isinstance(t, torch.Tensor)],
                            functools.partial(function, stage, kind, bwd_kwargs, *args, **kwargs))

    base.backward_maybe_with_nosync = heard
    _undo.append(lambda: setattr(base, "backward_maybe_with_nosync", function))


def _before_step(optimizer: typing.Any, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> typing.Any:
    """Handles the start of an optimizer's step. Its gradients are complete, unless a closure computes them."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        for watcher in list(_watchers):
            watcher.before_update(optimizer)
        return None
    calls: list[None] = []

    @functools.wraps(closure)
    def heard(*positional: typing.Any, **named: typing.Any) -> typing.Any:
        for watcher in list(_watchers):
            watcher.on_closure(bool(calls))
        result = closure(*positional, **named)
        for watcher in list(_watchers) if not calls else []:
            watcher.before_update(optimizer)
        calls.append(None)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": heard}
    return (args[0], heard, *args[2:]), kwargs


def _after_step(optimizer: typing.Any, _args: typing.Any, _kwargs: typing.Any) -> None:
    for watcher in list(_watchers):
        watcher.on_closure(False)
        watcher.before_update(optimizer)  # whose closure was not called


def _scaling(function: typing.Any) -> typing.Any:
    @functools.wraps(function)
    def heard(scaler: typing.Any, outputs: typing.Any) -> typing.Any:
        scaled = function(scaler, outputs)
        for watcher in list(_watchers) if scaler.is_enabled() else []:
            watcher.on_scaled(scaled, scaler)
        return scaled
    return heard


def hear_calls() -> None:
    """Calls of modules are heard while a watcher needs them: torch.compile compiles those that are apart."""
    module_call = torch.nn.Module.__call__
    original = getattr(module_call, "_of_anyrank", None)
    if any(watcher.hears_calls() for watcher in _watchers):
        torch.nn.Module.__call__ = module_call if original else _calling(module_call)
    elif original:
        torch.nn.Module.__call__ = original


def _saving(function: typing.Any) -> typing.Any:
    @functools.wraps(function)
    def heard(saved: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        for watcher in list(_watchers):
            watcher.on_saved(saved)
        return function(saved, *args, **kwargs)
    return heard


def _calling(function: typing.Any) -> typing.Any:
    """Calls of modules: those of a model that is not called itself are seen by these alone."""
    @functools.wraps(function)
    def heard(module: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        if torch.compiler.is_compiling():
            return function(module, *args, **kwargs)
        concerned = [watcher for watcher in _watchers if watcher.on_call(module, args, kwargs)]
        output = None
        try:
            output = function(module, *args, **kwargs)
        finally:
            for watcher in concerned:
                watcher.after_call(output)
        return output
    setattr(heard, "_of_anyrank", function)
    return heard


def _clipping(function: typing.Any) -> typing.Any:
    """Makes of a function that clips one that says so before and after; those that it calls itself say nothing."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def heard(parameters: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        if _clipping_now:
            return function(parameters, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        arguments = signature.bind(parameters, *args, **kwargs).arguments
        concerned = [watcher for watcher in list(_watchers) if watcher.on_clip(parameters)]
        _clipping_now.append(True)
        try:
            returned = function(parameters, *args, **kwargs)
        finally:
            _clipping_now.pop()
        norm = arguments.get("total_norm", returned)
        for watcher in concerned if norm is not None else []:
            watcher.on_norm(norm, float(arguments.get("norm_type", 2.0)))
        return returned
    return heard


def _transferring(function: typing.Any) -> typing.Any:
    receives = function.__name__.endswith("recv")

    @functools.wraps(function)
    def heard(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        tensor = args[0] if args else kwargs.get("tensor")
        for watcher in list(_watchers):
            watcher.on_transfer(tensor if receives else None)
        return function(*args, **kwargs)
    return heard


def _replace(function: typing.Callable[..., typing.Any], decorator: typing.Callable[[typing.Any], typing.Any],
             homes: typing.Sequence[typing.Any] = (torch.nn.utils, clip_grad)) -> None:
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        if callable(inner) and getattr(inner, "__name__", "") == function.__name__:
            cell.cell_contents = decorator(inner)
            _undo.append(lambda: setattr(cell, "cell_contents", inner))
            return
    changed, name = decorator(function), str(function.__name__)
    for module in homes:
        if getattr(module, name, None) is function:
            setattr(module, name, changed)
            _undo.append(functools.partial(setattr, module, name, function))
