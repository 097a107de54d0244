# SPDX-License-Identifier: Apache-2.0
"""Engines that keep weights, gradients and moments elsewhere than the model's parameters and a torch optimizer do: what
a parameter's are is read by the engine's own functions. All ranks have to ask for the same parameters in one order.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import typing

import torch
from torch import nn

from anyrank.capture._megatron import Megatron, is_megatron


class Engine(typing.Protocol):
    """weight(), gradient() and states() give full tensors; gradient(): None where a parameter has none."""

    def hear_steps(self, before: typing.Callable[[], None], after: typing.Callable[[], None]
                   ) -> typing.Callable[[], None]:
        """Calls these around each update, when gradients are complete and not yet clipped. What undoes it."""

    def weight(self, parameter: torch.Tensor) -> torch.Tensor: ...

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None: ...

    def states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Returns a parameter's state by the optimizer's names; {} for a torch optimizer's parameter; None if not
        found."""

    def loss_scale(self) -> float:
        """Returns the factor of losses and gradients."""

    def norm(self) -> float | None:
        """Returns the norm by which the last step clipped."""


def is_divided(parameter: torch.Tensor) -> bool:
    """Returns whether ranks have parts of the parameter (DeepSpeed's ZeRO-3), or of its master (ZeRO-1, -2, bf16)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def _part(flat: torch.Tensor, before: int, parameter: torch.Tensor) -> torch.Tensor:
    return flat.detach().reshape(-1)[before:before + parameter.numel()].view(parameter.shape)


class DeepSpeed:
    """A DeepSpeedEngine of any ZeRO stage. Weights of 16 bits are their fp32 masters, which it updates."""

    def __init__(self, engine: typing.Any) -> None:
        self.engine, self.clipped = engine, None
        self.read: typing.Any = sys.modules["deepspeed"].utils

    def hear_steps(self, before: typing.Callable[[], None], after: typing.Callable[[], None]
                   ) -> typing.Callable[[], None]:
        function = self.engine._take_model_step
        home: typing.Any = sys.modules["deepspeed.runtime.engine"]

        @functools.wraps(function)
        def heard(*args: typing.Any, **kwargs: typing.Any) -> None:
            before()
            clip = home.clip_grad_norm_  # without ZeRO and in fp32 the engine keeps no norm
            home.clip_grad_norm_ = functools.partial(self._clip, clip)
            try:
                function(*args, **kwargs)
            finally:
                home.clip_grad_norm_ = clip
            after()

        self.engine._take_model_step = heard
        return functools.partial(delattr, self.engine, "_take_model_step")

    def _clip(self, clip: typing.Callable[..., typing.Any], *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        self.clipped = clip(*args, **kwargs)
        return self.clipped

    def _masters(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Without ZeRO: returns for each 16-bit parameter the fp32 tensor that holds its master, and where in it."""
        optimizer, found = self.engine.optimizer, dict[int, tuple[torch.Tensor, int]]()
        flat = getattr(optimizer, "fp32_groups_flat", None)
        for i, group in enumerate(getattr(optimizer, "fp16_groups", ())):
            before = 0
            for j, parameter in enumerate(group):
                found[id(parameter)] = (flat[i], before) if flat else (optimizer.fp32_groups[i][j], 0)
                before += parameter.numel()
        return found

    def weight(self, parameter: torch.Tensor) -> torch.Tensor:
        if hasattr(parameter, "ds_id"):
            master = self.read.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if master is not None:
                return typing.cast(torch.Tensor, master)
            is_available = (
                getattr(getattr(parameter, "ds_status", None), "name", "") == "AVAILABLE"
            )  # which must not be freed then
            with contextlib.nullcontext() if is_available else (
                    sys.modules["deepspeed"].zero.GatheredParameters([parameter])):
                return parameter.detach().clone()
        if parameter.element_size() < 4 and parameter.requires_grad:
            flat, before = self._masters().get(id(parameter), (parameter, 0))
            master = (self.read.safe_get_full_fp32_param(parameter) if is_divided(parameter) else
                      _part(flat, before, parameter))
            return parameter if master is None else typing.cast(torch.Tensor, master)
        return parameter

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        grad = parameter.grad
        if not is_divided(parameter) or not parameter.requires_grad:
            return None if grad is None else grad / self.loss_scale()
        parameter.grad = None  # the rank's own, which is taken for the sum's
        try:
            full = self.read.safe_get_full_grad(parameter)
        finally:
            parameter.grad = grad
        return None if full is None else full / self.loss_scale()

    def states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor] | None:
        inner = getattr(self.engine.optimizer, "optimizer", None)
        if not parameter.requires_grad or inner is None:
            return {}
        of_flat = getattr(inner, "state", {})
        keys = {key: None for state in of_flat.values() for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.dim() > 0}
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None and not mapping.optim_fragment:
            # DeepSpeed 0.19 links states after the first group's step, when further groups have none yet.
            memory = mapping.hp_fragment.untyped_storage().data_ptr()
            for flat in [flat for flat in of_flat if flat.untyped_storage().data_ptr() == memory]:
                mapping.set_optim_state_fragment(flat, of_flat[flat])
        if is_divided(parameter):
            return {key: self.read.safe_get_full_optimizer_state(parameter, key) for key in keys}
        flat, before = self._masters().get(id(parameter), (parameter, 0))
        return {key: _part(of_flat[flat][key], before, parameter) for key in keys} if flat in of_flat else None

    def loss_scale(self) -> float:
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0) or 1.0)

    def norm(self) -> float | None:
        norm = self.engine.get_global_grad_norm() if self.engine.gradient_clipping() > 0 else None
        norm = self.clipped if norm is None else norm
        return None if norm is None else float(norm)


def engine_of(wrapper: nn.Module | None) -> Engine | None:
    """Returns the engine of a model's wrapper; None if the parameters' own gradients and values are right."""
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(wrapper).__mro__):
        return DeepSpeed(wrapper)
    return Megatron() if is_megatron(wrapper) else None
