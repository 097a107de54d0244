# SPDX-License-Identifier: Apache-2.0
"""spec="megatron": where tensors of Megatron-core's models are, from its process groups, the marks of its parameters
and the kinds of its modules. Experts and latent attention are not among them.

Activations are [s, b, h] and have their samples in dimension 1; under sequence parallelism ranks have other tokens
(dimension 0) of those between the divided layers.
"""

from __future__ import annotations

import functools
import sys
import typing

import torch
import torch.distributed as dist
from torch import nn

from anyrank._errors import AnyrankError
from anyrank.capture._mesh import Line, mesh_of_lines, ranks_of_group
from anyrank.capture._model import modules_of, parameters_of

Dims = typing.Dict[str, typing.Any]
HOME = "megatron.core.parallel_state"


def is_megatron(wrapper: typing.Any) -> bool:
    """Returns whether a wrapper is Megatron's data parallelism."""
    home = type(wrapper).__module__
    return home.startswith("megatron.core.distributed") and hasattr(wrapper, "module")


def _kinds(module: typing.Any) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _lines() -> list[Line]:
    state: typing.Any = sys.modules.get(HOME)
    if state is None or not state.model_parallel_is_initialized():
        raise AnyrankError('spec="megatron": megatron.core.parallel_state is not initialised, as it is for its models')
    groups = {"tp": state.get_tensor_model_parallel_group(), "cp": state.get_context_parallel_group(),
              "dp": state.get_data_parallel_group(), "pp": state.get_pipeline_model_parallel_group()}
    return [Line(name, ranks_of_group(group)) for name, group in groups.items()]


def _blocks(module: typing.Any, path: str) -> Dims:
    """Returns what is packed in a layer's rows: gate and up, of which each rank has a piece; q, k and v of each group
    of heads are adjacent, and are cut as one."""
    gated = "linear_fc1" in path.split(".") and getattr(getattr(module, "config", None), "gated_linear_unit", False)
    return {"blocks": [1, 1] if gated else None}


def _parameter(module: nn.Module, path: str, parameter: typing.Any) -> Dims:
    """Returns the rule of a parameter that Megatron marks as divided."""
    if not getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "partition_dim", -1) < 0:
        return {}
    return {"tp": parameter.partition_dim, **_blocks(module, path)}


def _copies(module: typing.Any) -> int:
    """Returns how many ranks have the keys of a group of heads: more than one if there are fewer groups than ranks."""
    config = getattr(module, "config", None)
    groups, ranks = getattr(config, "num_query_groups", None), getattr(config, "tensor_model_parallel_size", 1)
    return max(1, ranks // groups) if groups else 1


def _activations(path: str, module: typing.Any, parent: typing.Any, sequence: bool) -> tuple[Dims, Dims]:
    """Returns the rules of a module's output and of its input's gradient. parent: the module that contains it."""
    rows: Dims = {"dp": 1, **({"tp": 0} if sequence else {})}
    kinds, name = _kinds(module), path.rsplit(".", 1)[-1]
    sequence_dims = {**rows} if getattr(module, "sequence_parallel", sequence) else {"dp": 1}
    if "ColumnParallelLinear" in kinds:
        return {"dp": 1} if module.gather_output else {"dp": 1, "tp": -1, **_blocks(module, path)}, sequence_dims
    if "RowParallelLinear" in kinds:
        return sequence_dims, {"dp": 1, "tp": -1} if module.input_is_parallel else {"dp": 1}
    if "VocabParallelEmbedding" in kinds:
        return (rows if module.reduce_scatter_embeddings else {"dp": 0}), {"dp": 0}
    if "Embedding" in kinds:
        return {"dp": 0}, {"dp": 0}
    if "FusedScaleMaskSoftmax" in kinds or "DotProductAttention" in _kinds(parent):
        return {"dp": 0, "tp": 1}, {"dp": 0, "tp": 1}  # [b, heads, s, s]
    if "DotProductAttention" in kinds:
        return {"dp": 1, "tp": -1}, {"dp": 1, "tp": 2}  # of queries [s, b, heads, d]
    if name in ("q_layernorm", "k_layernorm"):
        copies = _copies(parent) if name == "k_layernorm" else 1
        return {"dp": 1, "tp": 2, "copies": copies}, {"dp": 1, "tp": 2, "copies": copies}
    if "RotaryEmbedding" in kinds:
        return {"dp": None}, {"dp": None}
    return rows, rows


def spec_of(model: nn.Module, rank: int, world: int) -> dict[str, typing.Any]:
    """Returns the spec of a model on this rank, as a user would write it."""
    lines = _lines()
    modules = dict(modules_of(model))
    configs: list[typing.Any] = [getattr(module, "config") for module in modules.values() if hasattr(module, "config")]
    sequence = any(getattr(c, "sequence_parallel", False) and c.tensor_model_parallel_size > 1 for c in configs)
    shard: dict[str, Dims] = {}
    for path, parameter in parameters_of(model):
        owner = modules.get(path.rpartition(".")[0])
        dims = _parameter(owner, path, parameter) if owner is not None else {}
        if dims:
            shard[f"{path}:*"] = dims
    for path, module in modules.items():
        if path:
            output_dims, back = _activations(path, module, modules.get(path.rpartition(".")[0]), sequence)
            shard.update({f"{path}:fwd": output_dims, f"{path}:bwd": back})
    shard["output:fwd"] = {"dp": 0, "tp": 2}  # logits [b, s, v]; losses of tokens [b, s] are whole
    spec: dict[str, typing.Any] = {"shard": shard}
    if world == 1:
        return spec
    spec["mesh"] = mesh_of_lines(lines, rank, world).sizes
    if any(getattr(c, "calculate_per_token_loss", False) for c in configs):  # sums, which are divided at the end
        spec.update(mean_over=[], partial={"loss:fwd": [name for name in ("dp", "cp") if name in spec["mesh"]]})
    if any(dims.get("copies", 1) > 1 for dims in shard.values()):  # each rank has its own heads' share of the gradient
        spec.setdefault("partial", {})["*.k_layernorm:bwd"] = "tp"
    root: typing.Any = model
    tied = "output_layer.weight", "embedding.word_embeddings.weight"
    if getattr(root, "share_embeddings_and_output_weights", False) and not getattr(root, "pre_process", True):
        spec["tied"] = dict([tied] if tied[0] in dict(parameters_of(model)) else [])
        shard.update({f"{tied[1]}:*": shard[f"{tied[0]}:*"]} if f"{tied[0]}:*" in shard else {})
    return spec


class Megatron:
    """Gradients in Megatron's buffers, and what its optimizers update."""

    def __init__(self) -> None:
        self.optimizers: list[typing.Any] = []
        self.clipped: typing.Any = None

    def hear_steps(self, before: typing.Callable[[], None], after: typing.Callable[[], None]
                   ) -> typing.Callable[[], None]:
        home: typing.Any = sys.modules["megatron.core.optimizer.optimizer"]
        kinds = [kind for kind in _all_kinds(home.MegatronOptimizer) if "step" in vars(kind)]
        undo: list[typing.Callable[[], None]] = []
        active: list[None] = []

        def hearing(function: typing.Any) -> typing.Any:
            @functools.wraps(function)
            def heard(optimizer: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
                if active:
                    return function(optimizer, *args, **kwargs)
                self.optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
                before()
                active.append(None)
                try:
                    result = function(optimizer, *args, **kwargs)
                finally:
                    active.pop()
                clips = any(chained_optimizer.config.clip_grad > 0.0 for chained_optimizer in self.optimizers)
                self.clipped = result[1] if clips and isinstance(result, tuple) else None
                after()
                return result
            return heard

        for kind in kinds:
            function = kind.step
            kind.step = hearing(function)
            undo.append(functools.partial(setattr, kind, "step", function))

        def restore() -> None:
            for action in undo:
                action()
        return restore

    def _share(self, parameter: torch.Tensor) -> tuple[typing.Any, slice | None]:
        """Returns the optimizer that divides a parameter over data-parallel ranks, and this rank's part; None: no
        part."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "model_param_gbuf_map"):
                if parameter in optimizer.model_param_gbuf_map:
                    local_range = optimizer._get_model_param_range_map(parameter)["param"]
                    return optimizer, slice(local_range.start, local_range.end)
                if any(parameter is member for bucket in optimizer.buffers for member in bucket.params):
                    return optimizer, None
        return None, None

    def _whole(self, parameter: torch.Tensor, optimizer: typing.Any, local_slice: slice | None,
               part: torch.Tensor | None) -> torch.Tensor:
        """Gathers a tensor of the parameter's shape from the parts of data-parallel ranks."""
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if local_slice is not None and part is not None:
            full[local_slice] = part.detach().float().flatten()
        dist.all_reduce(full, group=optimizer.data_parallel_group)
        return full.view(parameter.shape)

    def weight(self, parameter: torch.Tensor) -> torch.Tensor:
        main = getattr(parameter, "main_param", None)
        if parameter.element_size() >= 4:
            return parameter
        optimizer, local_slice = self._share(parameter)
        if optimizer is not None:
            return self._whole(parameter, optimizer, local_slice, main)
        return parameter if main is None or main.shape != parameter.shape else typing.cast(torch.Tensor, main)

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        grad = getattr(parameter, "main_grad", None)
        grad = parameter.grad if grad is None else grad
        optimizer, local_slice = self._share(parameter)
        if grad is not None and optimizer is not None:
            grad = self._whole(
                parameter, optimizer, local_slice, grad.flatten()[local_slice] if local_slice is not None else None
            )
        return None if grad is None else grad / self.loss_scale()

    def states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor] | None:
        optimizer, local_slice = self._share(parameter)
        if optimizer is not None:
            found = optimizer._get_main_param_and_optimizer_states(parameter) if local_slice is not None else {}
            keys: list[list[str] | None] = [None] * dist.get_world_size(optimizer.data_parallel_group)
            dist.all_gather_object(keys, sorted(key for key, value in found.items() if key != "param" and value.dim()),
                                   group=optimizer.data_parallel_group)
            names = dict.fromkeys(key for rank_keys in keys for key in rank_keys or [])
            return {key: self._whole(parameter, optimizer, local_slice, found.get(key)) for key in names}
        main = getattr(parameter, "main_param", parameter)
        inner = [
            chained_optimizer.optimizer.state
            for chained_optimizer in self.optimizers
            if getattr(chained_optimizer, "optimizer", None) is not None
        ]
        return next((dict(state[main]) for state in inner if main in state),
                    {} if not parameter.requires_grad else None)

    def loss_scale(self) -> float:
        scales = [float(chained_optimizer.get_loss_scale()) for chained_optimizer in self.optimizers]
        return scales[0] if scales else 1.0

    def norm(self) -> float | None:
        return None if self.clipped is None else float(self.clipped)


def _all_kinds(kind: typing.Any) -> list[typing.Any]:
    return [kind, *(deeper for sub in kind.__subclasses__() for deeper in _all_kinds(sub))]
