# SPDX-License-Identifier: Apache-2.0
"""How a step is seen that goes on outside of modules: backward, clipping, the optimizer. All is as it was when the last
capture ends.

Functions are replaced in what they close over, or else in the modules that have them, so that one that was imported by
name before is seen too.
"""

from __future__ import annotations

import functools
import inspect
import typing

import torch
import torch.optim.optimizer as optim
from torch.nn.utils import clip_grad


class Watcher(typing.Protocol):
    def on_backward(self, loss: torch.Tensor) -> None: ...

    def after_backward(self) -> None: ...

    def on_clip(self, parameters: list[torch.Tensor]) -> bool: ...  # whether they are the model's

    def on_norm(self, norm: typing.Any, norm_type: float) -> None: ...

    def on_optimizer(self, optimizer: typing.Any, after: bool) -> None: ...


_watchers: list[Watcher] = []
_undo: list[typing.Callable[[], None]] = []
_clipping_now: list[bool] = []  # one for the call that is at work


def watch(watcher: Watcher) -> None:
    if not _watchers:
        _install()
    _watchers.append(watcher)


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
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        losses = [t for t in given if isinstance(t, torch.Tensor)]
        for watcher in list(_watchers):
            for loss in losses:
                watcher.on_backward(loss)
        result = backward(tensors, *args, **kwargs)
        for watcher in list(_watchers):
            watcher.after_backward()
        return result

    torch.autograd.backward = heard
    _undo.append(lambda: setattr(torch.autograd, "backward", backward))
    # The second has an underscore in its module, and none in torch.nn.utils.
    for name in ("clip_grad_norm_", "_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
        if hasattr(clip_grad, name):
            _replace(getattr(clip_grad, name), _clipping)
    for register, after in ((getattr(optim, "register_optimizer_step_pre_hook", None), False),
                            (getattr(optim, "register_optimizer_step_post_hook", None), True)):
        if register is not None:
            def hook(optimizer: typing.Any, _args: typing.Any, _kwargs: typing.Any, after: bool = after) -> None:
                for watcher in list(_watchers):
                    watcher.on_optimizer(optimizer, after)
            _undo.append(register(hook).remove)


def _clipping(function: typing.Any) -> typing.Any:
    """Makes of a function that clips one that says so before and after; those that it calls itself say nothing."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def heard(parameters: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        if _clipping_now:
            return function(parameters, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = signature.bind(parameters, *args, **kwargs).arguments
        concerned = [watcher for watcher in list(_watchers) if watcher.on_clip(parameters)]
        _clipping_now.append(True)
        try:
            returned = function(parameters, *args, **kwargs)
        finally:
            _clipping_now.pop()
        norm = given.get("total_norm", returned)
        for watcher in concerned if norm is not None else []:
            watcher.on_norm(norm, float(given.get("norm_type", 2.0)))
        return returned
    return heard


def _replace(function: typing.Callable[..., typing.Any], around: typing.Callable[[typing.Any], typing.Any]) -> None:
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        if callable(inner) and getattr(inner, "__name__", "") == function.__name__:
            cell.cell_contents = around(inner)
            _undo.append(lambda: setattr(cell, "cell_contents", inner))
            return
    changed, name = around(function), str(function.__name__)
    for module in (torch.nn.utils, clip_grad):
        if getattr(module, name, None) is function:
            setattr(module, name, changed)
            _undo.append(functools.partial(setattr, module, name, function))
