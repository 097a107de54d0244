# SPDX-License-Identifier: Apache-2.0
"""What a model is made of: its own module below wrappers, parameters and modules by name, and over which ranks it is
replicated or sharded."""

from __future__ import annotations

import sys
import typing

import torch
import torch.distributed as dist
from torch import nn

from anyrank._errors import AnyrankError
from anyrank.capture._mesh import Line, Mesh, lines_of_device_mesh, mesh_of_lines, ranks_of_group, root_of
from anyrank.capture._pipelines import stages_of

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # before PyTorch 2.5
    from torch.distributed._tensor import DTensor, Replicate, Shard
try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # before PyTorch 2.6
    import torch.distributed._composable.fsdp as composable

    FSDPModule = getattr(composable, "FSDPModule", None) or getattr(composable, "FSDP", ())

__all__ = ["DTensor", "FSDPModule", "Groups", "Replicate", "Shard", "divided", "gathered_over", "groups_of",
           "modules_of", "parameters_of", "plain", "roots_of", "tied_of", "unwrapped", "wrapped_in"]

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
SAMPLES = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")  # names of dimensions that share out samples
OTHERS = ("tp", "cp", "pp", "ep", "sp", "tensor", "context", "pipe", "expert", "sequence", "model")
# Attributes of wrappers: of DDP and fairscale, DeepSpeed (ranks of sequence parallelism too), Megatron.
GROUPS = ("process_group", "seq_data_parallel_group", "data_parallel_group", "dp_cp_group", "dp_group")


def is_wrapper(module: typing.Any) -> bool:
    """Returns whether a module is another one's data parallelism, such as DDP or an engine, or Megatron's change of its
    format."""
    if not isinstance(module, nn.Module) or not isinstance(getattr(module, "module", None), nn.Module):
        return False
    return type(module).__name__ == "Float16Module" or group_of(module) is not None


def plain(name: str) -> str:
    """Returns a parameter's or module's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


class Stages(nn.Module):  # type: ignore[misc]
    """The modules of a pipeline's stages that one rank has: parts of one model."""

    def __init__(self, parts: typing.Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def roots_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that the program calls, below wrappers."""
    return [unwrapped(part)[0] for part in model.parts] if isinstance(model, Stages) else [model]


def group_of(module: nn.Module | None) -> typing.Any:
    """Returns the ranks over which a wrapper, or replicate(), averages gradients; None for any other module."""
    if module is None:
        return None
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    state = replicate.replicate.state(module) if replicate is not None else None
    if state is not None:
        mesh = state._init_kwargs.get("device_mesh")
        group = mesh.get_group() if mesh is not None else state._init_kwargs.get("process_group")
        return state._ddp.process_group if hasattr(state, "_ddp") else group or dist.group.WORLD
    if not isinstance(getattr(module, "module", None), nn.Module):
        return None
    groups = {name.lstrip("_"): value for name, value in vars(module).items() if isinstance(value, dist.ProcessGroup)}
    return next((groups[name] for name in GROUPS if name in groups), None)


def _named_modules(model: nn.Module) -> typing.Iterator[tuple[str, nn.Module]]:
    """Modules by plain name, outermost first; instead of a DDP within the model what it wraps, by the DDP's name.
    Layers that know their number in the whole model, as Megatron's do in a pipeline's stage, are named by it."""
    if isinstance(model, Stages):
        for part in model.parts:
            yield from _named_modules(part)
        return
    wrapped = {path for path, module in model.named_modules() if is_wrapper(module)}
    numbers = {path: str(module.layer_number - 1) for path, module in model.named_modules()
               if isinstance(getattr(module, "layer_number", None), int) and path.rpartition(".")[2].isdigit()}
    for path, module in model.named_modules():
        parts = path.split(".")
        ends = [".".join(parts[:i + 1]) for i in range(len(parts))]
        parts = [numbers.get(end, part) for end, part in zip(ends, parts)]
        visible_parts = [part for i, part in enumerate(parts) if ".".join(parts[:i]) not in wrapped]
        if path not in wrapped:
            yield plain(".".join(visible_parts)), module


def unwrapped(model: typing.Any) -> tuple[nn.Module, typing.Any]:
    """Returns the module that a user wrote, or those of a pipeline's stages; and the DDP or engine around it, or
    None."""
    parts = [getattr(stage, "submod", stage) for stage in stages_of(model)]
    if len(parts) > 1:
        for part in parts:
            unwrapped(part)  # which refuses what cannot be captured
        return Stages(parts), None
    model, wrapper = parts[0] if parts else model, None
    for module in model.modules() if isinstance(model, nn.Module) else []:
        if type(module).__name__ == "FullyShardedDataParallel":
            raise AnyrankError("FSDP1 (FullyShardedDataParallel) has flat parameters: all those of a wrapped module in "
                               "one vector, cut over the ranks, of which no rank knows a tensor's place; wrap with "
                               "fully_shard (FSDP2), or capture a copy of the model made in summon_full_params")
    while True:
        if is_wrapper(model):
            wrapper = wrapper if group_of(wrapper) is not None else model
            model = model.module
        elif isinstance(model, nn.DataParallel):
            raise AnyrankError("torch.nn.DataParallel runs copies of the model in threads, which cannot be captured: "
                               "wrap it with DistributedDataParallel")
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            break
    if not isinstance(model, nn.Module):
        raise AnyrankError(f"capture: the model is a {type(model).__name__}, which is no torch.nn.Module")
    return model, wrapper


def wrapped_in(module: nn.Module | None) -> list[nn.Module]:
    """Returns the modules below this one that each contain the next as theirs."""
    found: list[nn.Module] = []
    while module is not None:
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        module = inner if isinstance(inner, nn.Module) and inner not in found else None
        found += [module] if module is not None else []
    return found


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules by plain name, outermost first; of a wrapper and what it holds the wrapper."""
    found: dict[str, nn.Module] = {}
    for path, module in _named_modules(model):
        found.setdefault(path, module)
    return list(found.items())


def _fsdp_groups(model: nn.Module) -> typing.Iterator[typing.Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
            yield from (group for group in groups if group is not None)


def _named_parameters(model: nn.Module) -> typing.Iterator[tuple[str, torch.Tensor]]:
    """Parameters by plain name, those that are tied by each of theirs; those of FSDP2 as the shards that the optimizer
    has."""
    shards = {}
    for group in _fsdp_groups(model):
        for p in group.fsdp_params:
            if p.sharded_state.name == "SHARDED":
                continue  # the module has it itself; FSDP learns at the first pass what loading has replaced
            info = p._module_info
            for module, name in zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]):
                shards[(id(module), name)] = p.sharded_param
    for path, module in _named_modules(model):
        for key, parameter in module.named_parameters(recurse=False):
            yield plain(f"{path}.{key}" if path else key), shards.get((id(module), key), parameter)


def parameters_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters by plain name, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, p in _named_parameters(model):
        found.setdefault(id(p), (name, p))
    return list(found.values())


def tied_of(model: nn.Module) -> list[list[str]]:
    """Returns the names of parameters that share their memory, those of each tensor together."""
    found: dict[typing.Any, list[str]] = {}
    for name, p in _named_parameters(model):
        local = p.to_local() if isinstance(p, DTensor) else p
        address = local.data_ptr() if local.numel() and not local.is_meta else 0
        names = found.setdefault((address, tuple(local.shape)) if address else id(p), [])
        names += [name] if name not in names else []
    return [names for names in found.values() if len(names) > 1]


def router_biases_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers by which routers choose experts, which the step moves: of transformers, Megatron and torchtitan."""
    return [(plain(f"{path}.{name}" if path else name), b) for path, module in _named_modules(model)
            for name, b in module.named_buffers(recurse=False) if name in ("e_score_correction_bias", "expert_bias")]


def buffers_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers of floating point by plain name, saved or not, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in _named_modules(model):
        for name, b in module.named_buffers(recurse=False):
            if b.is_floating_point() and not b.is_meta:
                found.setdefault(id(b), (plain(f"{path}.{name}" if path else name), b))
    return list(found.values())


def averages_of(averages: typing.Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Averaged weights by the names of the model's parameters: those of a module such as AveragedModel, or tensors in
    the order of the parameters, as diffusers' EMAModel.shadow_params are."""
    if averages is None:
        return {}
    names = [name for name, _ in parameters_of(model)]
    if isinstance(averages, nn.Module):
        inner = getattr(averages, "module", averages)
        return dict(parameters_of(inner if isinstance(inner, nn.Module) else averages))
    tensors = list(getattr(averages, "shadow_params", averages))
    if len(tensors) != len(names) or not all(isinstance(t, torch.Tensor) for t in tensors):
        raise AnyrankError(f"ema: {len(tensors)} averaged weights, of a model with {len(names)} parameters: expected a "
                           "module, or a tensor for each parameter in their order")
    return dict(zip(names, tensors))


def formats_of(model: nn.Module, wrapper: typing.Any) -> dict[str, typing.Any]:
    """Returns the 16-bit format in which gradients are reduced: by a communication hook of DDP, or FSDP2's policy."""
    names = [str(getattr(hook, "__qualname__", hook)) for hook, _ in getattr(wrapper, "_comm_hooks", [])]
    for group in _fsdp_groups(model):
        for owner in (group, *group.fsdp_params):  # of which has it depends on the version of PyTorch
            policy = getattr(owner, "mp_policy", None)
            names.append(str(getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)))
    for format_, texts in (("bf16", ("bf16", "bfloat16")), ("f16", ("fp16", "float16"))):
        if any(text in name for name in names for text in texts):
            return {"reduced": format_}
    return {}


class Groups(typing.NamedTuple):
    """mesh; the dimensions that share out samples; those over which gradients and losses are averaged; whether nothing
    but the number of ranks is known."""

    mesh: Mesh
    data: list[str]
    mean: list[str]
    assumed: bool = False
    unsaid: tuple[str, ...] = ()  # dimensions of the mesh of which nothing says what they are for


def shares_samples(name: str | None) -> bool:
    return name is not None and name.split("_")[0] in SAMPLES and not any(part in OTHERS for part in name.split("_"))


def _data_groups(model: nn.Module, wrapper: typing.Any) -> list[Line]:
    """Returns the groups over which FSDP2, DDP and engines average."""
    lines = []
    for group in _fsdp_groups(model):
        info = group.mesh_info
        process_groups = [getattr(info, f"{kind}_process_group", None) for kind in ("shard", "replicate")]
        names = ["dp_shard", "dp_replicate"] if all(process_groups) else ["dp", "dp"]
        lines += [Line(name, ranks_of_group(g)) for name, g in zip(names, process_groups) if g is not None]
    groups = [group_of(module) for module in [wrapper, *model.modules()] if module is not None]
    lines += [Line("dp", ranks_of_group(group)) for group in groups if group is not None]
    return list({line.ranks: line for line in lines}.values())


def gathered_over(model: nn.Module) -> set[tuple[int, ...]]:
    """Returns the groups of ranks over which FSDP2 divides weights, which each module has whole when it is called."""
    return {line.ranks for line in _data_groups(model, None)}


def divided(module: nn.Module, gathered: set[tuple[int, ...]]) -> bool:
    """Returns whether ranks have parts of this module's weights when it is called."""
    for p in module.parameters():
        if isinstance(p, DTensor):
            cut = [getattr(x, "dim", None) is not None for x in p.placements]
            if any(c and line.ranks not in gathered for c, line in zip(cut, lines_of_device_mesh(p.device_mesh))):
                return True
    return False


def groups_of(model: nn.Module, wrapper: typing.Any, rank: int, world: int, stated_sizes: dict[str, int] | None,
              mean: list[str] | None, stages: typing.Any = None) -> Groups:
    """Returns the mesh and what its dimensions are for: found from the model, or as stated. stages: the group of a
    pipeline's stages."""
    averaged = _data_groups(model, wrapper) if world > 1 else []
    lines = [Line("pp", ranks_of_group(stages))] if stages is not None else []
    if stated_sizes is None:
        meshes = {id(p.device_mesh): p.device_mesh for _, p in parameters_of(model) if isinstance(p, DTensor)}
        roots = {id(root): root for root in map(root_of, meshes.values())}
        for device_mesh in sorted([*roots.values(), *meshes.values()], key=lambda m: -m.mesh.numel()):
            lines += lines_of_device_mesh(device_mesh)
        lines.sort(key=lambda line: line.name is None)
        mesh = mesh_of_lines([*lines, *averaged], rank, world)
    else:
        mesh = Mesh(stated_sizes, rank, world)
    covered = [name for line in averaged for name in mesh.covered(line.ranks, "the group of FSDP or DDP")]
    data = [name for name in mesh.sizes if shares_samples(name) or
            (name in covered and name.split("_")[0] not in OTHERS)]
    assumed = stated_sizes is None and world > 1 and not [line for line in [*lines, *averaged] if len(line.ranks) > 1]
    line_dims = {
        name for line in lines if len(line.ranks) > 1 for name in mesh.covered(line.ranks, "a mesh of DTensors")
    }
    unsaid = [name for name, size in mesh.sizes.items() if size > 1 and name not in line_dims | {*covered}]
    return Groups(mesh, data, mesh.ordered(covered if mean is None else mean), assumed,
                  tuple(unsaid) if stated_sizes is None else ())
