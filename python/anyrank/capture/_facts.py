# SPDX-License-Identifier: Apache-2.0
"""What is known of a run besides its tensors, written once, as model.json in the dump's folder (pytorch.md).

Nothing here may fail a capture: what cannot be read is left out.
"""

from __future__ import annotations

import argparse
import collections.abc
import contextlib
import dataclasses
import enum
import functools
import gc
import inspect
import json
import math
import os
import pathlib
import platform
import re
import sys
import types
import typing
import zlib

import torch
from torch import nn

from anyrank._names import folded
from anyrank._version import __version__
from anyrank.capture._exchange import Alone, Store
from anyrank.capture._listen import inputs_of, leaves_of, untraced
from anyrank.capture._mesh import Mesh
from anyrank.capture._model import WRAPPERS, FSDPModule, modules_of, tied_of
from anyrank.explain.facts import FILE, FORMAT, VERSION

MOST_BYTES = 100_000
MOST_CONFIGS, MOST_ITEMS, MOST_TEXT = 8, 64, 200
# Names of dictionaries that are a model's settings, and packages whose version is written.
SETTINGS = ("config", "cfg", "args", "params", "hparams")
PACKAGES = ("transformers", "accelerate", "peft", "trl", "deepspeed", "megatron.core", "lightning", "torchtitan")
_PLACE = re.compile(r"(layer|block|stage)?_?(idx|index|id|number|num)")
_NONE = object()  # no plain data
_F = typing.TypeVar("_F", bound=typing.Callable[..., typing.Any])
Json = typing.Dict[str, typing.Any]


def _tolerant(function: _F) -> _F:
    """Wraps a function so that it does nothing where it would raise, since it may run a model's own code."""
    @functools.wraps(function)
    def tried(self: Facts, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        try:
            return function(self, *args, **kwargs)
        except Exception as error:
            self.failed.setdefault(function.__name__.lstrip("_"), f"{type(error).__name__}: {error}"[:MOST_TEXT])
            return None
    return typing.cast(_F, tried)


# --- plain data -------------------------------------------------------------------------------------------------------


def plain_of(value: typing.Any, depth: int = 4) -> typing.Any:
    """Returns a value as JSON has it; _NONE for anything but plain data."""
    if value is None or isinstance(value, (bool, str)):
        return value[:MOST_TEXT] if isinstance(value, str) else value
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else "NaN" if value != value else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value).replace("torch.", "")
    if depth and isinstance(value, (list, tuple, set, frozenset)) and len(value) <= MOST_ITEMS:
        items = [plain_of(item, depth - 1) for item in (sorted(value, key=str) if isinstance(value, (set, frozenset))
                                                        else value)]
        return _NONE if any(item is _NONE for item in items) else items
    inner = _settings_of(value) if depth else None
    if inner is None:
        return _NONE
    pairs = {str(key): plain_of(item, depth - 1) for key, item in inner.items() if not str(key).startswith("_")}
    return {key: item for key, item in pairs.items() if item is not _NONE}


def _settings_of(value: typing.Any) -> collections.abc.Mapping[typing.Any, typing.Any] | None:
    """Returns the items of a dictionary, dataclass, namespace, or config of transformers; None for anything else."""
    if isinstance(value, (nn.Module, torch.Tensor, type)):
        return None
    if isinstance(value, collections.abc.Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, _NONE) for field in dataclasses.fields(value)}
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
        return vars(value)
    if "Config" in type(value).__name__ and callable(getattr(value, "to_dict", None)):
        attention = getattr(value, "_attn_implementation", None)
        return {**value.to_dict(), **({"attn_implementation": attention} if attention else {})}
    return None


def _attributes_of(path: str, module: nn.Module) -> Json:
    """Attributes that are plain numbers, words or short tuples of them; not a layer's number, which its path has."""
    numbers = {int(part) for part in path.split(".") if part.isdecimal()}
    found: Json = {}
    for key, value in vars(module).items():
        short = not isinstance(value, (list, tuple)) or len(value) <= 8
        plain = _NONE
        if not key.startswith("_") and short and isinstance(
                value, (int, float, str, type(None), list, tuple, torch.dtype, enum.Enum)):
            with contextlib.suppress(Exception):  # of a class of numbers of the model's own
                plain = plain_of(value, 2)
        is_layer_number = _PLACE.fullmatch(key) and isinstance(plain, int) and {plain, plain - 1} & numbers
        if plain is not _NONE and not is_layer_number:
            found[key] = plain
    return found


def _configs_of(modules: list[tuple[str, nn.Module]]) -> Json:
    """Settings that modules hold, outermost first, by the attributes that hold them; each once."""
    found: Json = {}
    visited_ids: set[int] = set()
    for path, module in modules:
        for key, value in vars(module).items():
            mapped = isinstance(value, collections.abc.Mapping)
            if key.startswith("_") or id(value) in visited_ids or (mapped and key not in SETTINGS):
                continue
            visited_ids.add(id(value))
            plain = None
            with contextlib.suppress(Exception):  # of a config's own code
                plain = plain_of(value) if _settings_of(value) is not None else None
            if plain and plain not in found.values() and len(found) < MOST_CONFIGS:
                found[f"{path}.{key}" if path else key] = plain
    return found


# --- modules ----------------------------------------------------------------------------------------------------------


def _own_module(module: nn.Module) -> nn.Module:
    """Returns the module inside of the wrappers of checkpointing and compilation."""
    for key in WRAPPERS * 2:
        inner = getattr(module, key, None)
        module = inner if isinstance(inner, nn.Module) else module
    return module


def _class_of(module: nn.Module) -> str:
    """Returns the class that the program gave a module, which fully_shard replaces."""
    kinds = [kind for kind in type(module).__mro__ if not FSDPModule or not issubclass(kind, FSDPModule)]
    return str(kinds[0].__name__)


def _arguments_of(module: nn.Module) -> list[str]:
    forward = type(module).forward
    return _parameters_of(forward) if forward is not nn.Module.forward else []  # of a container


@functools.lru_cache(maxsize=1024)
def _parameters_of(forward: typing.Callable[..., typing.Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def _described(t: torch.Tensor) -> str:
    return f"{str(t.dtype).replace('torch.', '')} {list(t.shape)}"


def _autocast() -> dict[str, str]:
    """Returns the devices on which operations are cast now, and the type."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {device: str(torch.get_autocast_dtype(device)).replace("torch.", "") for device in devices
            if torch.is_autocast_enabled(device)}


# --- a run ------------------------------------------------------------------------------------------------------------


class Facts:
    """What one rank knows of its run, from begin() to finish()."""

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self._clear()

    def _clear(self) -> None:
        self.failed: dict[str, str] = {}
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.names: dict[int, str] = {}
        self.handles: list[typing.Any] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self.calls: dict[nn.Module, Json] = {}  # the first of each module
        self.run: Json = {}
        self.stage: Json = {}  # what a pipeline's stages have apart
        self.rates: dict[int, list[typing.Any]] = {}  # of each optimizer's groups, by the step from which on
        self.optimizers: dict[int, Json] = {}
        self.by_step: dict[str, dict[int, typing.Any]] = {  # from that step on
            "calls": {}, "without_gradient": {}, "odd_clip": {}}

    def begin(self, model: nn.Module, wrapper: typing.Any, parameters: list[tuple[str, torch.Tensor]]) -> None:
        """Called before the first step. parameters: as the optimizer has them, by name."""
        self.remove()
        self._clear()
        self.parameters, self.names = parameters, {id(parameter): name for name, parameter in parameters}
        self.seed = int(torch.initial_seed())
        self.run["wrapper"] = type(wrapper).__name__ if wrapper is not None else None
        self._describe(model)

    @_tolerant
    def _describe(self, model: nn.Module) -> None:
        self.modules = modules_of(model)
        self.run["config"] = _configs_of([(path, _own_module(module)) for path, module in self.modules])
        dtypes: dict[str, list[str]] = {}
        for name, parameter in self.parameters:
            dtypes.setdefault(str(parameter.dtype).replace("torch.", ""), []).append(name)
        self.stage = {"dtypes": {dtype: folded(names) for dtype, names in dtypes.items()},
                      "frozen": folded(name for name, parameter in self.parameters if not parameter.requires_grad),
                      "tied": tied_of(model)}
        device = next((parameter.device for _, parameter in self.parameters), torch.device("cpu"))
        self.run["numerics"] = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "default_dtype": str(torch.get_default_dtype()).replace("torch.", ""),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled()}

    # --- as it goes on ------------------------------------------------------------------------------------------------

    @_tolerant
    def install(self) -> None:
        """Hears the first call of each module."""
        if self.handles or self.calls:
            return
        self.run["autocast"], hook = _autocast(), untraced(self._called)
        self.handles = [module.register_forward_hook(hook, with_kwargs=True) for _, module in self.modules]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @_tolerant
    def _called(self, module: nn.Module, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any],
                output: typing.Any) -> None:
        if module in self.calls:
            return
        self.calls[module] = {}
        names = _arguments_of(_own_module(module))
        arguments = {**dict(zip([*names, *map(str, range(len(names), len(args)))], args)), **kwargs}
        found = {name: _described(t) for name, t in list(inputs_of((), arguments).items())[:MOST_ITEMS]}
        autocast = _autocast()
        self.calls[module] = {"in": found, "out": [_described(t) for t in leaves_of(output)][:MOST_ITEMS],
                              **({"autocast": autocast} if autocast != self.run["autocast"] else {})}

    @_tolerant
    def on_update(self, optimizers: list[typing.Any], step: int) -> None:
        """These have updated parameters, or are about to: what they do it by in this step."""
        for optimizer in optimizers:
            if id(optimizer) not in self.optimizers:
                self.optimizers[id(optimizer)] = self._described_optimizer(optimizer)
        rates = [[plain_of(_number(group.get("lr"))) for group in optimizer.param_groups] for optimizer in optimizers]
        if rates and step not in self.rates and (not self.rates or rates != next(reversed(self.rates.values()))):
            self.rates[step] = rates

    def rates_now(self) -> list[typing.Any]:
        """Returns the learning rates of the last update, for each optimizer's groups."""
        return next(reversed(self.rates.values()), [])

    def _described_optimizer(self, optimizer: typing.Any) -> Json:
        groups = []
        for group in optimizer.param_groups:
            plain = {key: plain_of(_number(value), 2) for key, value in group.items() if key != "params"}
            names = [self.names[id(parameter)] for parameter in group["params"] if id(parameter) in self.names]
            groups.append({"options": {key: value for key, value in plain.items() if value is not _NONE},
                           "parameters": folded(names), "others": len(group["params"]) - len(names)})
        return {"class": type(optimizer).__name__, "groups": groups}

    @_tolerant
    def on_scaler(self, scaler: typing.Any) -> None:
        if "scaler" not in self.run:
            self.run["scaler"] = {key.lstrip("_"): plain_of(value) for key, value in scaler.state_dict().items()}

    @_tolerant
    def on_step(self, step: int, calls: int, missing: list[str] | None, odd_clip: str) -> None:
        """Called after a captured step. missing: parameters that got no gradient; None: no backward pass was seen.
        odd_clip: what is odd about where it clipped; "": nothing."""
        clip = odd_clip if odd_clip or self.by_step["odd_clip"] else None
        for key, value in (("calls", calls), ("without_gradient", None if missing is None else folded(missing)),
                           ("odd_clip", clip)):
            known = self.by_step[key]
            if value is not None and (not known or next(reversed(known.values())) != value):
                known[step] = value

    # --- at the end ---------------------------------------------------------------------------------------------------

    def finish(self, exchange: Alone | Store, folder: pathlib.Path, mesh: Mesh, steps: int, micro_batches: int,
               optimizers: list[typing.Any]) -> None:
        """Writes, on the first rank, what all ranks know. If several ranks have a part of the model, such as a stage,
        the lowest one describes it."""
        local_facts = self._of_rank(steps, micro_batches, optimizers)
        of_ranks: list[Json | None] = exchange.tell(local_facts)
        while any(
            rank_facts and "shapes" in rank_facts for rank_facts in of_ranks
        ):  # a rank sketches a further step, and hears of this
            of_ranks = exchange.tell(local_facts)
        parts = [rank_facts["parts"] if rank_facts else 0 for rank_facts in of_ranks]
        stages = [self.stage]
        if len({*parts}) > 1:
            lowest = parts.index(parts[mesh.rank]) == mesh.rank
            stages = list(filter(None, exchange.tell(self.stage if lowest else None)))
        if mesh.rank == 0:
            self._write(folder, mesh, of_ranks, stages)
        self._clear()

    @_tolerant
    def _of_rank(self, steps: int, micro_batches: int, optimizers: list[typing.Any]) -> Json:
        """Returns what only this rank knows. "parts" is the same on ranks that have the same part of the model."""
        for optimizer in optimizers:
            self.optimizers.setdefault(id(optimizer), self._described_optimizer(optimizer))
        self.stage["optimizers"] = list(self.optimizers.values())
        self.stage["modules"] = self._described_modules()
        self.run["schedulers"] = _described_schedulers(optimizers)
        return {"seed": self.seed, "steps": steps, "micro_batches": micro_batches, **self.by_step,
                "parts": zlib.crc32("\n".join([*(path for path, _ in self.modules), *self.names.values()]).encode())}

    def known(self) -> Json:
        """Returns what is known already of model.json's contents."""
        return {"frozen": self.stage.get("frozen", ()), "modules": self._described_modules(),
                "learning_rates": self.rates, "wrapper": self.run.get("wrapper")}

    def _described_modules(self) -> list[Json]:
        """Modules that are alike but for their paths together."""
        groups: dict[str, tuple[Json, list[str]]] = {}
        for path, module in self.modules:
            inner_module = _own_module(module)
            try:
                found = {
                    "class": _class_of(inner_module),
                    "arguments": _arguments_of(inner_module),
                    **self.calls.get(module, {}),
                    "attributes": _attributes_of(path, inner_module),
                }
            except Exception:  # of a module's own code
                found = {"class": type(inner_module).__name__}
            groups.setdefault(json.dumps(found), (found, []))[1].append(path)
        return [{"paths": folded(paths), **found} for found, paths in groups.values()]

    @_tolerant
    def _write(self, folder: pathlib.Path, mesh: Mesh, of_ranks: list[Json | None], stages: list[Json]) -> None:
        keys = ["seed", "steps", "micro_batches", "calls", "without_gradient"]
        keys += ["odd_clip"] if any(rank_facts and rank_facts["odd_clip"] for rank_facts in of_ranks) else []
        packages = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES}
        document: Json = {"format": FORMAT, "version": VERSION, "by": "anyrank.capture", "versions": {
            "anyrank": __version__, "torch": str(torch.__version__), "python": platform.python_version(),
            **{name: str(version) for name, version in packages.items() if version}}}
        document.update(world=mesh.world, mesh=mesh.sizes, first_step=self.first_step, **self.run)
        document["learning_rates"] = self.rates
        document["ranks"] = {key: [rank_facts[key] if rank_facts else None for rank_facts in of_ranks] for key in keys}
        document.update(_joined(stages))
        if self.failed:
            document["left_out"] = self.failed
        (folder / FILE).unlink(missing_ok=True)
        half = folder / f".anyrank-{os.getpid()}.tmp"
        half.write_text(bounded(document), encoding="utf-8")
        os.replace(half, folder / FILE)


def _number(value: typing.Any) -> typing.Any:
    """Returns a hyper-parameter as a number, also if it is kept as a tensor."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def referring(objects: typing.Sequence[typing.Any], kind: type, attribute: str) -> list[typing.Any]:
    """Finds the objects of this class that refer to one of these by an attribute. kind has this attribute too."""
    holders = gc.get_referrers(*objects) if objects else []
    tables = [holder for holder in holders if type(holder) is dict and attribute in holder]
    found = {id(holder): holder for holder in (*holders, *(gc.get_referrers(*tables) if tables else ()))
             if isinstance(holder, kind)}
    return list(found.values())


def schedulers_of(optimizers: typing.Sequence[typing.Any]) -> list[typing.Any]:
    """Learning rate schedulers, which alone know of their optimizers."""
    # A scheduler marks the groups. Where none did, a search, which takes a tenth of a second, finds none.
    marked = [optimizer for optimizer in optimizers if any("initial_lr" in group for group in optimizer.param_groups)]
    return referring(marked, torch.optim.lr_scheduler.LRScheduler, "last_epoch")


def _described_schedulers(optimizers: list[typing.Any]) -> list[Json]:
    found = []
    for scheduler in schedulers_of(optimizers):
        state = {key: plain_of(value, 2) for key, value in vars(scheduler).items() if not key.startswith("_")}
        found.append({"class": type(scheduler).__name__,
                      "options": {key: value for key, value in state.items() if value is not _NONE}})
    return sorted(found, key=lambda description: json.dumps(description, sort_keys=True))


def _joined(stages: list[Json]) -> Json:
    """Parts of one model as that of the whole."""
    modules: dict[str, Json] = {}
    dtypes: dict[str, list[str]] = {}
    optimizers: list[Json] = []
    for stage in stages:
        for module in stage.get("modules", ()):
            known = modules.setdefault(json.dumps({**module, "paths": []}), {**module, "paths": []})
            known["paths"] += [path for path in module["paths"] if path not in known["paths"]]
        for dtype, names in stage.get("dtypes", {}).items():
            dtypes.setdefault(dtype, []).extend(name for name in names if name not in dtypes.get(dtype, ()))
        for index, optimizer in enumerate(stage.get("optimizers", ())):
            if index == len(optimizers):
                optimizers.append({"class": optimizer["class"], "groups": []})
            for group in optimizer["groups"]:
                matching_group = next(
                    (
                        candidate
                        for candidate in optimizers[index]["groups"]
                        if candidate["options"] == group["options"]
                    ),
                    None,
                )
                if matching_group is None or stage is stages[0]:
                    optimizers[index]["groups"].append({**group, "parameters": list(group["parameters"])})
                else:
                    matching_group["parameters"] += [
                        name for name in group["parameters"] if name not in matching_group["parameters"]
                    ]
    return {"frozen": list(dict.fromkeys(name for stage in stages for name in stage.get("frozen", ()))),
            "tied": [names for stage in stages for names in stage.get("tied", ())],
            "dtypes": dtypes, "optimizers": optimizers, "modules": list(modules.values()),
            "inputs": {path: names for stage in stages for path, names in stage.get("inputs", {}).items()}}


def bounded(document: Json) -> str:
    """Returns a document as text of at most MOST_BYTES; a larger model's document lacks some of it, and has
    "truncated": true."""
    text = json.dumps(document, allow_nan=False)
    steps: list[typing.Callable[[], object]] = [
        *(functools.partial(_drop, document.get("modules", ()), key)
          for key in ("attributes", "in", "out", "arguments")),
        *(functools.partial(document.pop, key, None) for key in (
            "inputs", "modules", "config", "tied", "learning_rates", "ranks", "dtypes", "frozen", "optimizers",
            "schedulers", "mesh"))]
    for drop in steps:
        if len(text) <= MOST_BYTES:
            break
        drop()
        text = json.dumps({**document, "truncated": True}, allow_nan=False)
    return text


def _drop(modules: typing.Iterable[Json], key: str) -> None:
    for module in modules:
        module.pop(key, None)
