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
GIVEN, READ = "memory.given", "memory.read"  # no operations: a tensor from before, and one that others wrote
MOST_BYTES = 1 << 28  # of values that are kept
MOST_CALLS = 3  # expressions that called another one, by which operations of a helper function are told apart
# Folders whose code is no program's: torch's, of which the engine goes backward, and this package's but its tests.
_TORCH, _OWN = str(pathlib.Path(torch.__file__).parent), str(pathlib.Path(__file__).parent.parent)
_TESTS = str(pathlib.Path(_OWN, "tests"))
_CALLING = tuple(str(pathlib.Path(_TORCH, *path)) for path in (("nn", "modules"), ("optim",)))
_ENGINE = str(pathlib.Path("torch", "autograd", "graph.py"))
# Results that are not there when the call returns, and what says when they are.
_COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "reduce_", "gather", "scatter")


class Place(typing.NamedTuple):
    """Where in the program: the expression and its statement's first line, and the expressions that called it."""

    file: str
    line: int
    code: str
    calls: tuple[str, ...] = ()


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
        self.references: list[typing.Any] = []  # so that ids are of one tensor each
        self.awaited: dict[int, torch.Tensor] = {}  # results that are read when an operation takes them
        self.written: dict[int, list[tuple[int, int, int]]] = {}  # of each storage: first and last byte, result
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
        keywords = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **keywords)
        if any(hasattr(t, "__tensor_flatten__") for t in types):  # a DTensor, whose operations are those of its parts
            return NotImplemented
        place, backward = (None, False) if self.failed else _place(sys._getframe(1))
        inputs: list[int | str] = []
        try:
            inputs = [] if place is None else [self._input(t, place, backward) for t in tensors_of((args, keywords))]
        except Exception as error:  # noqa: BLE001  what is recorded is an extra
            self.failed = f"{func}: {type(error).__name__}: {error}"
        result = func(*args, **keywords)
        try:
            if place is not None and not self.failed:
                self._take(func, args, keywords, result, inputs, place, backward)
        except Exception as error:  # noqa: BLE001
            self.failed = f"{func}: {type(error).__name__}: {error}"
        return result

    def _input(self, t: torch.Tensor, place: Place, backward: bool) -> int | str:
        """Describes an operation's input: a result, a parameter, or a tensor from before; for memory written through
        another tensor, the value that this left."""
        if id(t) in self.awaited:
            self._keep(self.results[id(t)], self.awaited.pop(id(t)))
        number = self.results.get(id(t))
        storage, begin, end = _memory(t)
        writers = [n for low, high, n in self.written.get(storage, ()) if n > (-1 if number is None else number)
                   and low < end and begin < high]
        if not writers and (number is not None or id(t) in self.names):
            return self.names[id(t)] if number is None else number
        if t.is_meta or t.is_sparse:
            return ""
        self._add(READ if writers else GIVEN, place, [*([] if number is None else [number]), *writers], backward)
        return self._result(t)

    def _add(self, name: str, place: Place, inputs: list[int | str], backward: bool) -> dict[str, typing.Any]:
        row: dict[str, typing.Any] = {
            "name": name, "module": self.path[-1] if self.path else "", "file": place.file, "line": place.line,
            "code": place.code, "calls": place.calls, "inputs": inputs, "backward": backward, "numbers": {},
            "results": []}
        self.rows.append(row)
        return row

    def _result(self, t: torch.Tensor, later: bool = False) -> int:
        """Records a result of the last operation. later: its values are not there yet."""
        number = len(self.references)
        self.references.append(t)
        self.results[id(t)] = number
        self.rows[-1]["results"].append(number)
        if later:
            self.awaited[id(t)] = t
        else:
            self._keep(number, t)
        return number

    def _take(self, func: typing.Any, args: typing.Any, kwargs: dict[str, typing.Any], result: typing.Any,
              inputs: list[int | str], place: Place, backward: bool) -> None:
        collective = func.namespace in ("c10d", "_c10d_functional")
        name = func._schema.name.split("::")[-1]
        waited = collective and name.startswith(_COLLECTIVES)
        if waited and isinstance(result, (tuple, list)):
            result[-1].wait()
        written_args = [args[i] for i, a in enumerate(func._schema.arguments[:len(args)])
                 if a.alias_info is not None and a.alias_info.is_write or collective]
        row = self._add(f"{func.namespace}.{name}", place, inputs, backward)
        row["numbers"] = _numbers(func, args, kwargs)
        sequence = torch.autograd._get_sequence_nr() - 1
        node = torch._C._current_autograd_node() if backward else None
        forward_op = self.nodes.get(node._sequence_nr()) if node is not None else None
        if forward_op is not None:
            row.update(
                of=forward_op,
                module=self.rows[forward_op]["module"],
                file=self.rows[forward_op]["file"],
                line=self.rows[forward_op]["line"],
                code=self.rows[forward_op]["code"],
                calls=self.rows[forward_op]["calls"],
            )
        elif not backward:
            self.nodes.setdefault(sequence, len(self.rows) - 1)
        visited: set[int] = set()
        writes = {id(t) for t in tensors_of(written_args)}
        for t in (*tensors_of(result), *tensors_of(written_args)):
            if id(t) not in visited and not t.is_meta and not t.is_sparse:
                visited.add(id(t))
                number = self._result(t, collective and not waited)
                if id(t) in writes:
                    storage, begin, end = _memory(t)
                    self.written.setdefault(storage, []).append((begin, end, number))

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


def _memory(t: torch.Tensor) -> tuple[int, int, int]:
    """Returns a tensor's storage, and its range of bytes from the first to the last."""
    if t.is_meta or t.is_sparse or not t.numel():
        return 0, 0, 0
    begin, size = t.storage_offset(), t.element_size()
    end = begin + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) + 1
    return t.untyped_storage().data_ptr(), begin * size, end * size


def tensors_of(value: typing.Any) -> list[torch.Tensor]:
    """Returns the plain tensors of arguments or results."""
    if isinstance(value, torch.Tensor):
        return [] if isinstance(value, FakeTensor) or hasattr(value, "__tensor_flatten__") else [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, (list, tuple)) else []


def _numbers(func: typing.Any, args: typing.Any, kwargs: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Returns an operation's arguments besides tensors: numbers that no shape determines, dimensions, and words."""
    found = {}
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if isinstance(value, (float, bool, str)) or str(argument.type) == "number" and isinstance(value, int) or (
                argument.name in ("dim", "reduction") and isinstance(value, (int, list))):
            found[argument.name] = value
    return found


def _place(frame: types.FrameType | None) -> tuple[Place | None, bool]:
    """Returns the program's innermost frame, and whether the backward engine is inside of it. None: this package's own
    operation."""
    backward = is_inside = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN) and not file.startswith(_TESTS):
            if not is_inside:
                return None, False
        elif file.startswith(_TORCH):
            backward = backward or file.endswith(_ENGINE)
            is_inside = is_inside or backward or file.startswith(_CALLING)  # this package only passes a call on
        elif not file.startswith("<") and not file.endswith("contextlib.py"):
            return _place_of(frame)._replace(calls=tuple(_calls(frame.f_back))), backward
        frame = frame.f_back
    return None, False


def _calls(frame: types.FrameType | None) -> typing.Iterator[str]:
    """Returns the program's expressions that called a frame, the innermost first."""
    for _ in range(MOST_CALLS):
        while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OWN, "<")):
            frame = frame.f_back
        if frame is None:
            return
        yield _place_of(frame).code
        frame = frame.f_back


def _place_of(frame: types.FrameType) -> Place:
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    if hasattr(code, "co_positions"):  # of Python 3.11
        first_line, last_line, start, end = list(code.co_positions())[frame.f_lasti // 2]
        if first_line is not None and first_line == last_line:
            part = linecache.getline(code.co_filename, first_line).encode()[start:end].decode(errors="replace")
            text, line = part or text, first_line
    return Place(code.co_filename, line, text)


def remove(folder: pathlib.Path) -> None:
    """Removes what an earlier run left."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
