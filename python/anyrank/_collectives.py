# SPDX-License-Identifier: Apache-2.0
"""Collectives that a rank calls, recorded as they begin: in a file, which stays where a mismatch ends the process. Held
against those of the other ranks they tell the first call in which ranks do not agree.

What C++ calls itself, as DistributedDataParallel does for its buckets, is not recorded.
"""

from __future__ import annotations

import functools
import inspect
import json
import linecache
import os
import pathlib
import sys
import threading
import typing

SLOTS, WIDTH = 512, 1024  # the last calls that a rank keeps, and the bytes of each
MOST_CODE = 160  # characters of a line of code
# Functions of torch.distributed, and the argument in whose type and size ranks have to agree; None: they need not.
AGREED: dict[str, str | None] = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor", "reduce_scatter": "output", "reduce_scatter_tensor": "output",
    "gather": "tensor", "scatter": "tensor", "all_to_all": None, "all_to_all_single": None, "barrier": None,
    "monitored_barrier": None, "all_gather_object": None, "gather_object": None, "broadcast_object_list": None,
    "scatter_object_list": None}
SAME_SIZE = frozenset(("all_reduce", "broadcast", "reduce"))  # of one result for all ranks
# Those that hand their result back, which DTensors call.
AGREED_FUNCTIONAL = {"all_reduce": "self", "broadcast": "self", "all_gather_tensor": "self",
                     "reduce_scatter_tensor": "self", "all_to_all_single": None}


class Call(typing.NamedTuple):
    """group: its name and its ranks. number: of the group's calls, from 1. tensor: "float32 [4]". agreed: what ranks
    have to have alike."""

    group: str
    ranks: tuple[int, ...]
    number: int
    name: str
    tensor: str
    agreed: str
    path: str
    line: int
    function: str

    def label(self) -> str:
        return f"{self.name} of {self.tensor}" if self.tensor else self.name

    def location(self) -> str:
        path = os.path.relpath(self.path) if self.path.startswith(os.getcwd() + os.sep) else self.path
        source = linecache.getline(self.path, self.line).strip()[:MOST_CODE]
        return f"{self.function} ({path}:{self.line})" + (f": {source}" if source else "")


# --- a rank's own -----------------------------------------------------------------------------------------------------


class Recorder:
    """Writes the calls of this process to a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.calls = 0
        self.numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self.lock, self.thread_state = threading.Lock(), threading.local()

    def install(self) -> None:
        """Records calls from now on, until the process ends."""
        import torch.distributed.distributed_c10d as home

        for name, agreed in AGREED.items():
            function = getattr(home, name, None)
            if function is not None:
                self._put_around(function, agreed, [home, sys.modules["torch.distributed"]])
        functional = sys.modules.get("torch.distributed._functional_collectives")
        for name, agreed in AGREED_FUNCTIONAL.items() if functional is not None else ():
            function = getattr(functional, name, None)
            if function is not None:
                self._put_around(function, agreed, [functional])

    def _put_around(self, function: typing.Any, agreed: str | None, homes: typing.Sequence[typing.Any]) -> None:
        """Records the calls of a function in what it closes over, so that one that was imported by name before is seen
        too; or else in the modules that have it."""
        name = str(function.__name__)
        for cell in getattr(function, "__closure__", None) or ():
            inner = cell.cell_contents
            if callable(inner) and getattr(inner, "__name__", "") == name:
                cell.cell_contents = self._around(inner, agreed)
                return
        for home in homes:
            if getattr(home, name, None) is function:
                setattr(home, name, self._around(function, agreed))

    def _around(self, function: typing.Any, agreed: str | None) -> typing.Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def heard(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            import torch

            if torch.compiler.is_compiling() or getattr(self.thread_state, "call", False):
                return function(*args, **kwargs)
            self.thread_state.call = True
            try:
                self._note(function.__name__, agreed, signature, args, kwargs)
                return function(*args, **kwargs)
            finally:
                self.thread_state.call = False
        return heard

    def _note(self, name: str, agreed: str | None, signature: inspect.Signature, args: typing.Any,
              kwargs: typing.Any) -> None:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
            group, ranks = _group_of(arguments.get("group"))
            frame = _frame_of_user()
        except Exception:  # noqa: BLE001: the call itself says what is wrong with it
            return
        tensor, size = _described(arguments.get(agreed or "input"))
        with self.lock:
            number = self.numbers[group, ranks] = self.numbers.get((group, ranks), 0) + 1
            call = Call(group, ranks, number, name, tensor, f"{name} {size if agreed else ''}", *frame)
            self.calls += 1
            text = json.dumps([self.calls, *call]).encode()
            if len(text) <= WIDTH:
                os.pwrite(self.file, text.ljust(WIDTH), self.calls % SLOTS * WIDTH)


def _group_of(group: typing.Any) -> tuple[str, tuple[int, ...]]:
    import torch.distributed as dist

    if group is not None and not isinstance(group, dist.ProcessGroup):
        functional: typing.Any = sys.modules["torch.distributed._functional_collectives"]
        group = dist.distributed_c10d._resolve_process_group(functional._resolve_group_name(group))
    group = dist.group.WORLD if group is None else group
    return str(group.group_name), tuple(dist.get_process_group_ranks(group))


def _described(tensor: typing.Any) -> tuple[str, str]:
    """Type and shape of a tensor, and the same with its size alone, in which a shape is of no account."""
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "numel"):
        return "", ""
    dtype = str(tensor.dtype).replace("torch.", "")
    return f"{dtype} {list(tensor.shape)}", f"{dtype} {tensor.numel()}"


def _frame_of_user() -> tuple[str, int, str]:
    """File, line and function of the innermost frame outside of torch and this package."""
    torch: typing.Any = sys.modules["torch"]
    library_dirs = tuple(os.path.dirname(os.path.abspath(str(path))) + os.sep for path in (torch.__file__, __file__))
    tests = os.path.join(library_dirs[1], "tests") + os.sep
    frame: typing.Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and (path.startswith(tests) or not path.startswith(library_dirs)):
            return path, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "", 0, ""


# --- of all ranks -----------------------------------------------------------------------------------------------------


def read(path: pathlib.Path) -> list[Call]:
    """Reads the kept calls of a rank in order. A call that is being written is left out."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    found = []
    for offset in range(0, len(data), WIDTH):
        try:
            number, group, ranks, *rest = json.loads(data[offset:offset + WIDTH])
            found.append((number, Call(group, tuple(ranks), *rest)))
        except (ValueError, TypeError):
            continue
    return [call for _, call in sorted(found)]


def disagreement(of_ranks: typing.Mapping[int, typing.Sequence[Call]]) -> dict[int, Call]:
    """Finds the first call of a group in which its ranks disagree: the calls by rank; {} if there is none."""
    by_call: dict[tuple[str, tuple[int, ...], int], dict[int, Call]] = {}
    for rank, calls in of_ranks.items():
        for call in calls:
            by_call.setdefault((call.group, call.ranks, call.number), {})[rank] = call
    return next((found for found in by_call.values() if len({call.agreed for call in found.values()}) > 1), {})


def is_certain(found: typing.Mapping[int, Call]) -> bool:
    """Returns whether no program can intend the disagreement: different functions, or different sizes although all
    ranks get one result."""
    names = {call.name for call in found.values()}
    return len(names) > 1 or bool(names & SAME_SIZE)


def kind_of(calls: typing.Iterable[Call]) -> str:
    """Returns what the ranks disagree about."""
    names = {call.name for call in calls}
    return "different collectives" if len(names) > 1 else f"{names.pop()} with other sizes or types of tensors"
