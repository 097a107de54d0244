# SPDX-License-Identifier: Apache-2.0
"""Dumps of tensors, read: files, sharded checkpoints, and folders with a file of each rank, put together."""

from __future__ import annotations

import collections.abc
import ctypes
import dataclasses
import importlib.util
import math
import os
import typing

from anyrank import _library
from anyrank._errors import path_name
from anyrank._safetensors import Entry


@dataclasses.dataclass(frozen=True)
class Box:
    """A part's elements within the full tensor: they begin at `offset` and have `extent` of each dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one file holds of a tensor. `rank`: None where the file is no rank's. `replica` of `replicas`: which copy.
    `partial`: the full tensor is the sum of such parts."""

    rank: int | None
    file: str
    boxes: tuple[Box, ...]
    replica: int
    replicas: int
    partial: bool


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A full tensor's description. `dtype` as safetensors spells it: "F32", "BF16". `order`: its place in execution
    order; None where the dump does not say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: int | None
    parts: tuple[Part, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks that hold a part, in order."""
        return tuple(sorted({part.rank for part in self.parts if part.rank is not None}))

    @property
    def replicas(self) -> int:
        """Returns the number of copies of each part; for a packed tensor, of the part with the most copies."""
        return max((part.replicas for part in self.parts), default=1)

    @property
    def partial(self) -> bool:
        """Returns whether the ranks hold summands."""
        return any(part.partial for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """The first copy of a part that differs in bits from another: two ranks, the lowest element that differs (its index
    in the full tensor) with both values, and how many of the part's `count` elements differ."""

    ranks: tuple[int, int]
    index: tuple[int, ...]
    values: tuple[float, float]
    elements: int
    count: int


class _Handle:
    """An open dump. It is closed when nothing uses it any more, so that closing ends no other thread's read."""

    def __init__(self, path: str | os.PathLike[str], map: str | os.PathLike[str] | None) -> None:
        self.functions = _library.library()
        self.pointer = ctypes.c_void_p()
        name = [None if text is None else os.fsencode(path_name(text)) for text in (path, map)]
        _library.checked(self.functions["dump_open"](ctypes.byref(self.pointer), *name))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.functions["dump_close"](self.pointer)


class Dump(collections.abc.Mapping[str, typing.Any]):
    """Full tensors by name: `dump["lm_head.weight"]` is an array of numpy where that is installed, else an Entry of
    dtype, shape and bytes. Names are in execution order as far as the dump has one, then by name.

    What is read is a copy: it stays when the dump is closed. Many threads may read an open dump.
    Errors: KeyError for a name that it has not, AnyrankError with the library's message, ValueError after close().
    """

    def __init__(self, path: str | os.PathLike[str], map: str | os.PathLike[str] | None = None) -> None:
        self._open: _Handle | None = _Handle(path, map)
        about = _library.given_json(self._handle.functions["dump_json"](self._handle.pointer))
        self.path: str = os.fspath(path)
        self.ranks: int = about["ranks"]
        """Ranks whose files were found; 0: the dump is no rank's."""
        self.mesh: dict[str, int] = dict(about["mesh"])
        """Sizes by name, outermost first; empty: not told."""
        self._list()

    def _list(self) -> None:
        handle = self._handle
        call = handle.functions
        tensors = [call["dump_at"](handle.pointer, i) for i in range(call["dump_count"](handle.pointer))]
        named = [(call["tensor_order"](tensor), os.fsdecode(call["tensor_name"](tensor)), tensor) for tensor in tensors]
        self._tensors = {name: tensor for _, name, tensor in sorted(named)}

    def align(self, reference: Dump) -> None:
        """Gives tensors the reference's names and parts, as `anyrank verify` compares them: without the names of
        wrappers, experts one by one where one of the dumps has a layer's together, and samples in the reference's
        order. What was put in order once stays so."""
        handles = (reference._handle, self._handle)
        _library.checked(handles[0].functions["dump_align"](*(handle.pointer for handle in handles)))
        reference._list()
        self._list()

    # --- a mapping ---

    def __getitem__(self, name: str) -> typing.Any:
        return self.numpy(name) if importlib.util.find_spec("numpy") else self.entry(name)

    def __iter__(self) -> typing.Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __repr__(self) -> str:
        ranks = f" of {self.ranks} ranks" if self.ranks else ""
        return f"<anyrank dump {self.path!r}: {len(self)} tensors{ranks}{'' if self._open else ', closed'}>"

    # --- tensors ---

    def numpy(self, name: str) -> typing.Any:
        """Returns the full tensor as an array of numpy. Types that numpy lacks, such as bfloat16, become float32 with
        the same values, unless the package ml_dtypes is loaded."""
        from anyrank._arrays import numpy_of

        return numpy_of(self.entry(name))

    def torch(self, name: str) -> typing.Any:
        """Returns the full tensor as a tensor of torch, in its type, on the CPU."""
        from anyrank._arrays import torch_of

        return torch_of(self.entry(name))

    def entry(self, name: str) -> Entry:
        """Returns the full tensor as dtype, shape and bytes (row-major, little-endian, writable)."""
        handle, tensor = self._find(name)
        about = self.tensor(name)
        room = bytearray(handle.functions["tensor_bytes"](tensor))
        address = (ctypes.c_char * len(room)).from_buffer(room)
        _library.checked(handle.functions["tensor_read"](tensor, address, len(room)))
        return Entry(about.dtype, about.shape, memoryview(room))

    def part(self, name: str, i: int) -> list[typing.Any]:
        """Returns part i of `tensor(name).parts` as fp32: an array of numpy for each of its boxes."""
        import numpy as np

        handle, tensor = self._find(name)
        extents = [box.extent for box in self.tensor(name).parts[i].boxes]
        sizes = [math.prod(extent) for extent in extents]
        room: typing.Any = np.empty(sum(sizes), np.float32)
        _library.checked(handle.functions["tensor_read_part"](tensor, i, room.ctypes.data, room.size))
        ends = np.cumsum([0, *sizes])
        return [room[start:end].reshape(extent) for start, end, extent in zip(ends, ends[1:], extents)]

    def tensor(self, name: str) -> Tensor:
        """Returns dtype, shape, position in execution order, and each rank's parts; reads no values."""
        handle, tensor = self._find(name)
        about = _library.given_json(handle.functions["tensor_json"](tensor))
        order = handle.functions["tensor_order"](tensor)
        return Tensor(name, about["dtype"], tuple(about["shape"]), None if order == _library.NO_ORDER else order,
                      tuple(_part(part) for part in about["parts"]))

    def disagreement(self, name: str) -> Disagreement | None:
        """Finds where two copies of a part of the tensor differ in bits; None if nowhere, or if there are no copies."""
        handle, tensor = self._find(name)
        text = ctypes.c_void_p()
        _library.checked(handle.functions["tensor_replicas"](tensor, ctypes.byref(text)))
        found = _library.given_json(text.value)
        if found is None:
            return None
        index, rest = [], found["index"]
        for extent in reversed(self.tensor(name).shape):
            index.append(rest % extent)
            rest //= extent
        (rank, peer_rank), (a, b) = found["ranks"], map(float, found["values"])
        return Disagreement((rank, peer_rank), tuple(reversed(index)), (a, b), found["elements"], found["count"])

    def metadata(self, key: str) -> str | None:
        """Returns a value of the files' metadata on which all files agree; None if there is none."""
        handle = self._handle
        value = handle.functions["dump_metadata"](handle.pointer, os.fsencode(key))
        return None if value is None else os.fsdecode(value)

    # --- closing ---

    def close(self) -> None:
        """Ends the dump's use of its files. Reading it further is a ValueError; what was read stays."""
        self._open = None

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def _handle(self) -> _Handle:
        if self._open is None:
            raise ValueError(f"the dump {self.path} is closed")
        return self._open

    def _find(self, name: str) -> tuple[_Handle, int]:
        handle = self._handle
        if name not in self._tensors:
            raise KeyError(name)
        return handle, self._tensors[name]


def _part(part: dict[str, typing.Any]) -> Part:
    boxes = tuple(Box(tuple(box["global"]), tuple(box["extent"])) for box in part["boxes"])
    return Part(part["rank"], part["file"], boxes, part["replica"], part["replicas"], part["partial"])


def open_dump(path: str | os.PathLike[str], map: str | os.PathLike[str] | None = None) -> Dump:
    """Opens a safetensors or npy file, a sharded checkpoint, or a folder with a file of each rank (pytorch.md), and
    checks all but values: every element of every tensor is in exactly one part, or in as many copies as there are.

    map: a mapping file that says what the dump does not say of itself. Gives a Dump, which is also a context manager.
    Errors: AnyrankError ("MissingShard: ...", "InvalidMapping: ..."), with tensor and ranks.
    """
    return Dump(path, map)
