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
from anyrank.explain.tensors import Array, Case, Name

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
    """The module that FILE.py:FUNCTION makes, called without arguments or with None for the mesh, as `build` is; or the
    first of a tuple that it returns."""
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
    built = function(None) if required == 1 else function()
    model = built[0] if isinstance(built, tuple) and built else built
    if not isinstance(model, nn.Module):
        raise AnyrankError(f"module: a {type(model).__name__} is no torch.nn.Module")
    return model


# --- what a run's module had ------------------------------------------------------------------------------------------


def module_of(model: nn.Module, name: Name) -> tuple[str, nn.Module, int]:
    """The path and the module of an activation or a parameter, and which of its outputs PATH.1 is."""
    parts = name.module.split(".")
    parts = parts[:-1] if parts[-1].startswith("call") and parts[-1][4:].isdecimal() else parts
    for path, index in ((parts, 0), (parts[:-1], int(parts[-1]) if parts[-1].isdecimal() else -1)):
        try:
            if index >= 0:
                return ".".join(path), model.get_submodule(".".join(path)), index
        except AttributeError:
            continue
    raise Untried(f"the module that was given has no {'.'.join(parts)}")


def inputs_of(values: _Values, facts: Facts, path: str, step: int) -> dict[str, str]:
    """Names of what a module read, by the argument's position or name."""
    found = {key: str(dataclasses.replace(Name.of(name), step=step))
             for key, name in facts.inputs.get(path, {}).items()}
    prefix = f"{path}.in"
    for text in values:
        name = Name.of(text)
        key = name.stem[len(prefix) + 1:] or "0"
        if name.kind == "fwd" and name.step == step and f"{name.stem}.".startswith(f"{prefix}.") and (
                not key.startswith("call")):
            found[key] = text
    if not found:
        raise Untried(f"the dump does not have what {path} read in step {step} (capture's keep_inputs)")
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
    gradient: dict[str, str]

    def __post_init__(self) -> None:
        for name in (*self.inputs.values(), *self.weights.values()):
            if name not in self.values:
                raise Untried(f"{name} is not in the dump")

    def _value(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self.values[name]))

    def result(self, name: Name, training: bool) -> Array:
        """What the module gives for a tensor of the dump: an output, or a gradient."""
        parameters = dict(self.module.named_parameters())
        for own, p in parameters.items():
            value = self._value(self.weights[own])
            if value.shape != p.shape:
                raise Untried(f"{self.weights[own]} has the shape {list(value.shape)}, the module's parameter "
                              f"{list(p.shape)}")
            with torch.no_grad():
                p.copy_(value)
        self.module.train(training).zero_grad()
        given = {key: self._value(text) for key, text in self.inputs.items()}
        positions = sorted((key for key in given if key.isdecimal()), key=int)
        if positions != [str(i) for i in range(len(positions))]:
            raise Untried("some of its arguments are no tensors, or are not in the dump")
        first = next((t for t in given.values() if t.is_floating_point()), None)
        with torch.set_grad_enabled(name.kind != "fwd"):
            if first is not None and name.kind != "fwd":
                first.requires_grad_()
            output = self.module(*(given[key] for key in positions),
                                 **{key: t for key, t in given.items() if not key.isdecimal()})
        parts = list(output.values()) if isinstance(output, dict) else output
        output = parts[self.index] if isinstance(parts, (tuple, list)) else parts
        if not isinstance(output, torch.Tensor):
            raise Untried(f"it gives out a {type(output).__name__}")
        if name.kind != "fwd":
            wanted = first if name.kind == "bwd" else parameters.get(name.stem.rpartition(".")[2])
            if wanted is None:
                raise Untried(f"{name} is no gradient of this module alone")
            back = self._value(self.gradient[""]).reshape(output.shape).to(output.dtype)
            output = torch.autograd.grad(output, wanted, back)[0]
        result: Array = output.detach().to(torch.float64).numpy()
        return result


def _same(case: Case, found: Array, wanted: Array) -> bool:
    """Whether both are the same up to rounding."""
    if found.size != wanted.size:
        return False
    with np.errstate(invalid="ignore"):
        apart = np.abs(found.reshape(wanted.shape) - wanted.astype(np.float64))
    return bool((apart <= case.rounding(wanted.astype(np.float64)) + float(np.max(case.allowed))).all())


def _differ(case: Case, a: _Values, b: _Values, names: dict[str, str], others: dict[str, str]) -> tuple[str, ...]:
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
    path = case.name.module
    try:
        if case.name.kind not in ("fwd", "bwd", "grad"):
            raise Untried(f"{case.name} is not what a module gives out, and no gradient")
        path, module, index = module_of(model, case.name)
        runs = []
        for values, facts in zip((case.runs.reference, case.runs.other), case.runs.facts):
            step = case.name.step
            weights = {name: str(Name(f"{path}.{name}", *(("new", step - 1) if step > 1 else ("init", 1))))
                       for name, _ in module.named_parameters()}
            gradient = {} if case.name.kind == "fwd" else {"": gradient_of(values, facts, path, step)}
            runs.append(Run(module, index, values, inputs_of(values, facts, path, step), weights, gradient))
        return _verdict(runs[0], runs[1], case, path)
    except Untried as error:
        why = str(error)
    except Exception as error:  # of the user's module
        why = f"{type(error).__name__}: {error}"
    return Replay(path, UNTRIED, sentences=(
        f"the module {path} was not run on what the other run's read, because {why}",))


def _verdict(right: Run, other: Run, case: Case, path: str) -> Replay:
    recorded = case.runs.facts[0].modules.get(path)
    modes = [recorded.attributes["training"]] if recorded and "training" in recorded.attributes else [True, False]
    # Twice: numbers that are drawn may be the reference's once.
    training = next((mode for mode in modes if all(
        _same(case, right.result(case.name, bool(mode)), case.reference) for _ in range(2))), None)
    if training is None:
        raise Untried("it does not give the reference's own values again: it draws numbers (dropout), has state, or is "
                      "given what is no tensor")
    found = other.result(case.name, bool(training))
    inputs, weights, back = (_differ(case, right.values, other.values, a, b) for a, b in (
        (right.inputs, other.inputs), (right.weights, other.weights), (right.gradient, other.gradient)))
    inputs += back
    said = f"the reference's {type(right.module).__name__} {path}, with the other run's weights and inputs,"
    differ = " and ".join(f"{name} differs" for name in (*inputs[:1], *weights[:1]))
    if _same(case, found, case.other):
        return Replay(path, RIGHT, inputs, weights, (
            f"{said} gives what the other run has: the module is right, and {differ or 'what it reads is the same'}: "
            "look at what comes before it",))
    equal = "its weights and inputs are the reference's"
    return Replay(path, WRONG, inputs, weights, (
        f"{said} gives other values than the other run has: what this module computes, or a collective in it, is wrong "
        f"({differ or equal})",))
