# SPDX-License-Identifier: Apache-2.0
"""Every operation of a step and what it gives: in operations/ of a run's folder, a list and a file of values for each
rank. What explains a difference finds the first operation that is wrong by it, and its place in the program.
"""

from __future__ import annotations

import json
import linecache
import pathlib
import shutil
import sys
import types
import typing

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from anyrank._arrays import entry_of
from anyrank._safetensors import Entry, write
from anyrank.capture._model import modules_of, parameters_of

FOLDER = "operations"
MOST_BYTES = 1 << 28  # of values that are kept
# Folders whose code is no program's: torch's, of which the engine goes backward, and capture's.
_TORCH, _OWN = (str(pathlib.Path(path).parent) for path in (torch.__file__, __file__))
_CALLING = tuple(str(pathlib.Path(_TORCH, *path)) for path in (("nn", "modules"), ("optim",)))
_ENGINE = str(pathlib.Path("torch", "autograd", "graph.py"))
# Results that are not there when the call returns, and what says when they are.
_COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "reduce_", "gather", "scatter")


class Place(typing.NamedTuple):
    """Where in the program: the expression and its statement's first line."""

    file: str
    line: int
    code: str


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """with Operations(model, folder, rank) as recorded: records what is done; recorded.write() writes it. Of a run that
    it cannot record it leaves nothing, and the run goes on."""

    def __init__(self, model: nn.Module, folder: pathlib.Path, rank: int) -> None:
        super().__init__()
        self.folder, self.rank = folder / FOLDER, rank
        self.rows: list[dict[str, typing.Any]] = []
        self.values: dict[str, Entry] = {}
        self.bytes = 0
        self.results: dict[int, int] = {}  # of each tensor that was seen: the result that it is, by its id
        self.kept: list[typing.Any] = []  # so that ids are of one tensor each
        self.awaited: dict[int, torch.Tensor] = {}  # results that are read when an operation takes them
        self.nodes: dict[int, int] = {}  # of each node of the backward pass: the operation it is of
        self.names = {id(p): name for name, p in parameters_of(model)}
        self.path: list[str] = []  # of modules that run now
        self.failed = ""
        self.handles = [hook for path, module in modules_of(model) for hook in (
            module.register_forward_pre_hook(self._enter(path), prepend=True),
            module.register_forward_hook(self._leave, always_call=True))]

    def _enter(self, path: str) -> typing.Callable[..., None]:
        def hook(_module: nn.Module, _args: typing.Any) -> None:
            self.path.append(path)
        return hook

    def _leave(self, *_given: typing.Any) -> None:
        del self.path[-1:]

    def __exit__(self, *about: typing.Any) -> None:
        super().__exit__(*about)
        for handle in self.handles:
            handle.remove()

    def __torch_dispatch__(self, func: typing.Any, types: typing.Any, args: typing.Any = (),
                           kwargs: typing.Any = None) -> typing.Any:
        given = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **given)
        if any(hasattr(t, "__tensor_flatten__") for t in types):  # a DTensor, whose operations are those of its parts
            return NotImplemented
        place, backward = (None, False) if self.failed else _place(sys._getframe(1))
        inputs = [] if place is None else [self._input(t) for t in tensors_of((args, given))]
        result = func(*args, **given)
        if place is not None and not self.failed:
            try:
                self._take(func, args, given, result, inputs, place, backward)
            except Exception as error:  # noqa: BLE001  what is recorded is an extra
                self.failed = f"{func}: {type(error).__name__}: {error}"
        return result

    def _input(self, t: torch.Tensor) -> int | str:
        if id(t) in self.awaited:
            self._keep(self.results[id(t)], self.awaited.pop(id(t)))
        return self.results.get(id(t), self.names.get(id(t), ""))

    def _take(self, func: typing.Any, args: typing.Any, kwargs: dict[str, typing.Any], result: typing.Any,
              inputs: list[int | str], place: Place, backward: bool) -> None:
        collective = func.namespace in ("c10d", "_c10d_functional")
        name = func._schema.name.split("::")[-1]
        waited = collective and name.startswith(_COLLECTIVES)
        if waited and isinstance(result, (tuple, list)):
            result[-1].wait()
        given = [args[i] for i, a in enumerate(func._schema.arguments[:len(args)])
                 if a.alias_info is not None and a.alias_info.is_write or collective]
        row: dict[str, typing.Any] = {
            "name": f"{func.namespace}.{name}", "module": self.path[-1] if self.path else "", "file": place.file,
            "line": place.line, "code": place.code, "inputs": inputs, "backward": backward,
            "numbers": _numbers(func, args, kwargs), "results": []}
        sequence = torch.autograd._get_sequence_nr() - 1
        node = torch._C._current_autograd_node() if backward else None
        of = self.nodes.get(node._sequence_nr()) if node is not None else None
        if of is not None:
            row.update(of=of, module=self.rows[of]["module"], file=self.rows[of]["file"], line=self.rows[of]["line"],
                       code=self.rows[of]["code"])
        elif not backward:
            self.nodes.setdefault(sequence, len(self.rows))
        self.rows.append(row)
        seen: set[int] = set()
        for t in (*tensors_of(result), *tensors_of(given)):
            if id(t) not in seen and not t.is_meta and not t.is_sparse:
                seen.add(id(t))
                number = len(self.kept)
                self.kept.append(t)
                self.results[id(t)] = number
                row["results"].append(number)
                if collective and not waited:
                    self.awaited[id(t)] = t
                else:
                    self._keep(number, t)

    def _keep(self, number: int, t: torch.Tensor) -> None:
        self.bytes += t.numel() * t.element_size()
        if self.bytes > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MB")
        with torch.utils._python_dispatch._disable_current_modes():
            self.values[str(number)] = entry_of(t.detach().clone())

    def write(self) -> str:
        """Writes what was recorded. Why nothing was, or ""."""
        if not self.failed:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.folder / f"rank-{self.rank:05d}.safetensors", self.values)
            text = json.dumps({"format": "anyrank operations", "version": 1, "operations": self.rows})
            (self.folder / f"rank-{self.rank:05d}.json").write_text(text + "\n", encoding="utf-8")
        return self.failed


def tensors_of(value: typing.Any) -> list[torch.Tensor]:
    """The plain tensors of arguments or results."""
    if isinstance(value, torch.Tensor):
        return [] if isinstance(value, FakeTensor) or hasattr(value, "__tensor_flatten__") else [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for part in value for one in tensors_of(part)] if isinstance(value, (list, tuple)) else []


def _numbers(func: typing.Any, args: typing.Any, kwargs: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """What an operation is told besides tensors: numbers that no shape decides, dimensions, and words."""
    found = {}
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if isinstance(value, (float, bool, str)) or str(argument.type) == "number" and isinstance(value, int) or (
                argument.name in ("dim", "reduction") and isinstance(value, (int, list))):
            found[argument.name] = value
    return found


def _place(frame: types.FrameType | None) -> tuple[Place | None, bool]:
    """The program's innermost frame, and whether the engine of the backward pass is within it. None: it is this
    package's own operation."""
    backward = within = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            if not within:
                return None, False
        elif file.startswith(_TORCH):
            backward = backward or file.endswith(_ENGINE)
            within = within or backward or file.startswith(_CALLING)  # this package only passes a call on
        elif not file.startswith("<") and not file.endswith("contextlib.py"):
            return _place_of(frame), backward
        frame = frame.f_back
    return None, False


def _place_of(frame: types.FrameType) -> Place:
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    if hasattr(code, "co_positions"):  # of Python 3.11
        first, last, start, end = list(code.co_positions())[frame.f_lasti // 2]
        if first is not None and first == last:
            part = linecache.getline(code.co_filename, first).encode()[start:end].decode(errors="replace")
            text, line = part or text, first
    return Place(code.co_filename, line, text)


def remove(folder: pathlib.Path) -> None:
    """Removes what an earlier run left."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
