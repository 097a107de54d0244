# SPDX-License-Identifier: Apache-2.0
"""The reference's own module, run on what the other run's module read: if it gives what the other run has, the module
is right, and what it read is wrong. The module is the user's, made by a function of theirs; no code comes from a dump.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
import typing

import numpy as np
import torch
from torch import nn

from anyrank._errors import AnyrankError
from anyrank.explain.facts import Facts
from anyrank.explain.tensors import Array, Case, Name, Runs

RIGHT, WRONG, UNTRIED = "right", "wrong", "not tried"
_Values = typing.Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Replay:
    """verdict: whether the module is "right" (what it read is wrong), "wrong", or it was "not tried". inputs, weights:
    names of those that differ between the runs. sentences: what is said of it."""

    path: str
    verdict: str
    inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()


class Untried(Exception):
    """Why the module cannot be run."""


def load(where: str) -> nn.Module:
    """The module that FILE.py:FUNCTION makes, called without arguments or with None for the mesh, as `build` is."""
    file, _, name = where.rpartition(":")
    path = pathlib.Path(file)
    if not name.isidentifier() or path.suffix != ".py" or not path.is_file():
        raise AnyrankError(f"module: {where!r} has to be FILE.py:FUNCTION, of a file that is there")
    spec = importlib.util.spec_from_file_location(f"_anyrank_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # of a .py file there are both
    code = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code
    spec.loader.exec_module(code)
    function = getattr(code, name, None)
    if not callable(function):
        raise AnyrankError(f"module: {file} has no function {name}")
    required = function.__code__.co_argcount - len(function.__defaults__ or ()) if hasattr(function, "__code__") else 0
    return model_of(function(None) if required == 1 else function())


def model_of(built: typing.Any) -> nn.Module:
    """The module, of a function that returns it or (module, optimizer)."""
    model = built[0] if isinstance(built, tuple) and built else built
    if not isinstance(model, nn.Module):
        raise AnyrankError(f"module: a {type(model).__name__} is no torch.nn.Module")
    return model


# --- what a run's module had ------------------------------------------------------------------------------------------


def path_of(name: Name) -> str:
    """The module of an activation, or the one that has a parameter."""
    stem = name.stem if name.kind in ("fwd", "bwd") else name.stem.rpartition(".")[0]
    parts = stem.split(".")
    return ".".join(parts[:-1]) if parts[-1].startswith("call") and parts[-1][4:].isdecimal() else stem


def output_index(model: nn.Module, path: str) -> tuple[str, int]:
    """The path of a module and which of its outputs PATH.1 is."""
    try:
        model.get_submodule(path)
        return path, 0
    except AttributeError:
        outer, _, number = path.rpartition(".")
        if number.isdecimal():
            return output_index(model, outer)[0], int(number)
        raise Untried(f"the module that was given has no {path}") from None


def inputs_of(values: _Values, facts: Facts, path: str, step: int) -> dict[str, str]:
    """Names of what a module read, by the argument's position or name."""
    read = facts.inputs.get(path, {})
    found = {key: str(dataclasses.replace(Name.of(name), step=step)) for key, name in read.items()}
    prefix = f"{path}.in"
    for text in values:
        name = Name.of(text)
        if name.kind == "fwd" and name.step == step and (name.stem == prefix or name.stem.startswith(prefix + ".")):
            key = name.stem[len(prefix) + 1:] or "0"
            if not key.startswith("call"):
                found[key] = text
    missing = [name for name in found.values() if name not in values]
    if missing:
        raise Untried(f"{missing[0]}, which {path} read, is not in the dump")
    if not found:
        raise Untried(f"the dump does not have what {path} read in step {step} (capture's keep_inputs)")
    return found


def weights_of(values: _Values, module: nn.Module, path: str, step: int) -> dict[str, str]:
    """Names of a module's parameters, as they were in the step."""
    found = {}
    for name, _ in module.named_parameters():
        stem = f"{path}.{name}"
        text = str(Name(stem, "new", step - 1) if step > 1 else Name(stem, "init", 1))
        if text not in values:
            raise Untried(f"{text} is not in the dump")
        found[name] = text
    return found


def gradient_of(values: _Values, facts: Facts, path: str, step: int) -> str:
    """The name of the gradient of a module's output: that of the input of the only module that reads it."""
    readers = [reader for reader, names in facts.inputs.items() if names.get("0") == f"{path}:fwd"]
    text = str(Name(readers[0], "bwd", step)) if len(readers) == 1 else ""
    if text not in values:
        raise Untried(f"the gradient of what {path} gives out is not in the dump")
    return text


# --- running it -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """The module as one of the runs has it: its values, and the names of what it reads."""

    module: nn.Module
    index: int
    values: _Values
    inputs: dict[str, str]
    weights: dict[str, str]
    gradient: str = ""

    def _load(self) -> None:
        for name, p in self.module.named_parameters():
            value = self.values[self.weights[name]]
            if tuple(value.shape) != tuple(p.shape):
                raise Untried(f"{self.weights[name]} has the shape {list(value.shape)}, the module's parameter "
                              f"{list(p.shape)}")
            with torch.no_grad():
                p.copy_(torch.from_numpy(np.array(value)))

    def _call(self, grad: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, and the first input that a gradient flows to."""
        given = {key: torch.from_numpy(np.array(self.values[name])) for key, name in self.inputs.items()}
        first = None
        for key, t in given.items():
            if grad and t.is_floating_point() and first is None:
                given[key] = first = t.requires_grad_()
        positions = sorted((key for key in given if key.isdecimal()), key=int)
        if positions != [str(i) for i in range(len(positions))]:
            raise Untried("some of its arguments are no tensors, or are not in the dump")
        output = self.module(*(given[key] for key in positions),
                             **{key: t for key, t in given.items() if not key.isdecimal()})
        parts = list(output.values()) if isinstance(output, dict) else output
        output = parts[self.index] if isinstance(parts, (tuple, list)) else parts
        if not isinstance(output, torch.Tensor):
            raise Untried(f"it gives out a {type(output).__name__}")
        return output, first

    def result(self, name: Name, training: bool) -> Array:
        """What the module gives for a tensor of the dump: an output, or a gradient."""
        self._load()
        self.module.train(training)
        self.module.zero_grad()
        if name.kind == "fwd":
            with torch.no_grad():
                return _array(self._call(False)[0])
        output, first = self._call(True)
        wanted: typing.Any = first if name.kind == "bwd" else dict(self.module.named_parameters()).get(
            name.stem.rpartition(".")[2])
        if wanted is None:
            raise Untried(f"{name} is no gradient of this module alone")
        given = torch.from_numpy(np.array(self.values[self.gradient])).reshape(output.shape).to(output.dtype)
        return _array(torch.autograd.grad(output, wanted, given)[0])


def _array(t: torch.Tensor) -> Array:
    result: Array = t.detach().to(torch.float64).numpy()
    return result


def _same(case: Case, found: Array, wanted: Array) -> bool:
    """Whether both are the same up to rounding."""
    if found.shape != wanted.shape:
        found = found.reshape(wanted.shape) if found.size == wanted.size else found
    if found.shape != wanted.shape:
        return False
    with np.errstate(invalid="ignore"):
        apart = np.abs(found - wanted.astype(np.float64))
    allowed = float(np.max(case.allowed)) if np.size(case.allowed) else 0.0
    return bool((apart <= case.rounding(wanted.astype(np.float64)) + allowed).all())


def _differ(a: _Values, b: _Values, names: dict[str, str], others: dict[str, str], case: Case) -> tuple[str, ...]:
    """Those of the names whose values differ between the runs."""
    found = []
    for key, name in names.items():
        x: Array = a[name].astype(np.float64)
        y = b[others[key]] if others.get(key) in b else None
        near = 4.0 * case.unit * float(np.abs(x).max(initial=0.0))
        if y is None or x.shape != y.shape or not bool((np.abs(x - y) <= near).all()):
            found.append(name)
    return tuple(found)


# --- the verdict ------------------------------------------------------------------------------------------------------


def replay(model: nn.Module, case: Case) -> Replay:
    """Runs the module of a tensor that differs as both runs had it. The model's parameters and mode change."""
    path = path_of(case.name)
    try:
        if case.name.kind not in ("fwd", "bwd", "grad"):
            raise Untried(f"{case.name} is not what a module gives out, and no gradient")
        path, index = output_index(model, path) if case.name.kind == "fwd" else (path, 0)
        return _verdict(_both(model, path, index, case), case, path)
    except Untried as error:
        return _untried(path, str(error))
    except Exception as error:  # of the user's module
        return _untried(path, f"{type(error).__name__}: {error}")


def _untried(path: str, why: str) -> Replay:
    said = f"the module {path} was not run on what the other run's read, because {why}"
    return Replay(path, UNTRIED, sentences=(said,))


def _both(model: nn.Module, path: str, index: int, case: Case) -> tuple[Run, Run]:
    runs: Runs = case.runs
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise Untried(f"the module that was given has no {path}") from None
    found = []
    for values, facts in zip((runs.reference, runs.other), runs.facts):
        step = case.name.step
        gradient = "" if case.name.kind == "fwd" else gradient_of(values, facts, path, step)
        found.append(Run(module, index, values, inputs_of(values, facts, path, step),
                         weights_of(values, module, path, step), gradient))
    return found[0], found[1]


def _verdict(both: tuple[Run, Run], case: Case, path: str) -> Replay:
    right, other = both
    recorded = case.runs.facts[0].modules.get(path)
    modes = [recorded.attributes["training"]] if recorded and "training" in recorded.attributes else [True, False]
    # Twice: numbers that are drawn may be the reference's once.
    training = next((mode for mode in modes if all(
        _same(case, right.result(case.name, bool(mode)), case.reference) for _ in range(2))), None)
    if training is None:
        raise Untried("it does not give the reference's own values again: it draws numbers (dropout), has state, or is "
                      "given what is no tensor")
    found = other.result(case.name, bool(training))
    inputs = _differ(right.values, other.values, right.inputs, other.inputs, case)
    if right.gradient:
        inputs += _differ(right.values, other.values, {"": right.gradient}, {"": other.gradient}, case)
    weights = _differ(right.values, other.values, right.weights, other.weights, case)
    said = f"the reference's {type(right.module).__name__} {path}, with the other run's weights and inputs,"
    if _same(case, found, case.other):
        what = [f"its input {name} differs" for name in inputs[:1]]
        what += [f"its weight {name} differs" for name in weights[:1]]
        reason = " and ".join(what) or "neither differs beyond rounding"
        return Replay(path, RIGHT, inputs, weights, (f"{said} gives what the other run has: the module is right, and "
                                                     f"{reason}: look at what comes before it",))
    equal = "its weights and inputs are the reference's" if not inputs + weights else ", ".join(
        (*inputs, *weights)) + (" differ too" if len(inputs + weights) > 1 else " differs too")
    return Replay(path, WRONG, inputs, weights, (f"{said} gives other values than the other run has: what this module "
                                                 f"computes, or a collective in it, is wrong ({equal})",))
