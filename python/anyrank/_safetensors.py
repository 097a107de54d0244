# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, without torch or numpy: a file is 8 bytes of length, a JSON header, and the tensors' bytes."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import typing

from anyrank._errors import AnyrankError
from anyrank._input import integer, list_of, map_of, open_file, parse_json, parsed, record, string
from anyrank._terminal import printable

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4,
         "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
HEADER_LIMIT = 100_000_000


class Entry(typing.NamedTuple):
    """A tensor of a file: its type, shape and bytes (row-major, little-endian)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Writer:
    """Writes tensors one after the other to a file that appears, complete, when it is closed.

    Bytes go to disk as they are given, so memory does not grow with the file: the header follows at the end, and the
    tensors' bytes are moved behind it only if it is larger than the room that was kept.
    """

    def __init__(self, path: str | os.PathLike[str], room: int = 1 << 20) -> None:
        self.path = os.fspath(path)
        self._half = self.path + ".part"
        self._room = room
        self._entries: dict[str, dict[str, typing.Any]] = {}
        self._at = 0
        with self._writing():
            self._file: typing.BinaryIO = open(self._half, "wb")
        self._file.seek(8 + room)

    @contextlib.contextmanager
    def _writing(self) -> typing.Iterator[None]:
        """Names the file where the system does not write to it, as a full disk."""
        try:
            yield
        except OSError as error:
            raise AnyrankError(f"{self.path}: {error.strerror}") from error

    def add(self, name: str, dtype: str, shape: typing.Sequence[int], data: typing.Any) -> None:
        """data: a contiguous buffer of that many bytes."""
        expected, actual = math.prod(shape) * SIZES[dtype], memoryview(data).nbytes
        if actual != expected:
            raise ValueError(f"{name}: {actual} bytes, {dtype} of shape {list(shape)} has {expected}")
        self.stream(name, dtype, shape, (data,))

    def stream(self, name: str, dtype: str, shape: typing.Sequence[int], parts: typing.Iterable[typing.Any]) -> None:
        """Writes a tensor's bytes part by part, from contiguous buffers that together have its size. After an error
        call discard()."""
        if name in self._entries:
            raise ValueError(f"{name} is in {self.path} already")
        start = self._at
        for part in parts:
            view = memoryview(part).cast("B")
            with self._writing():
                self._file.write(view)
            self._at += view.nbytes
        if self._at - start != math.prod(shape) * SIZES[dtype]:
            raise ValueError(f"{name}: {self._at - start} bytes, {dtype} of shape {list(shape)} has "
                             f"{math.prod(shape) * SIZES[dtype]}")
        self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, self._at]}

    def close(self, metadata: dict[str, str] | None = None) -> None:
        """Writes the header, and gives the file its name."""
        header: dict[str, typing.Any] = {"__metadata__": metadata} if metadata else {}
        header.update(self._entries)
        text = json.dumps(header).encode()
        with self._writing():
            if len(text) > self._room:
                self._move(-(-len(text) // 8) * 8)
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))
            self._file.close()
            os.replace(self._half, self.path)

    def _move(self, room: int) -> None:
        """Moves the tensors' bytes to behind a larger header, from the last on."""
        with open(self._half, "r+b") as source:
            piece = 1 << 24
            self._file.flush()
            end = self._at
            while end > 0:
                start = max(0, end - piece)
                source.seek(8 + self._room + start)
                data = source.read(end - start)
                self._file.seek(8 + room + start)
                self._file.write(data)
                self._file.flush()
                end = start
        self._room = room

    def discard(self) -> None:
        """Removes what was written, after an error."""
        with contextlib.suppress(OSError):  # what is left in memory finds no room either
            self._file.close()
        if os.path.exists(self._half):
            os.remove(self._half)


def write(path: str | os.PathLike[str], tensors: typing.Mapping[str, Entry],
          metadata: dict[str, str] | None = None) -> None:
    """Writes a file at once."""
    writer = Writer(path, room=8)
    try:
        for name, entry in tensors.items():
            writer.add(name, entry.dtype, entry.shape, entry.data)
        writer.close(metadata)
    except BaseException:
        writer.discard()
        raise


def _span(value: typing.Any) -> tuple[int, int]:
    begin, end = list_of(integer(0), 2)(value)
    return begin, end


_ENTRY = record({"dtype": string, "shape": list_of(integer(0)), "data_offsets": _span})


def _header(value: typing.Any) -> tuple[dict[str, dict[str, typing.Any]], dict[str, str]]:
    """Returns the entries of the tensors, and the metadata."""
    entries = map_of(lambda entry: entry)(value)
    metadata = record({}, {"__metadata__": map_of(string)})(entries).get("__metadata__", {})
    return map_of(_ENTRY)({name: entry for name, entry in entries.items() if name != "__metadata__"}), metadata


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Entry], dict[str, str]]:
    """Maps the tensors of a file and reads its metadata. Errors: AnyrankError, which names the file and the tensor."""
    name = os.fspath(path)
    with open_file(name) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little") if size >= 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size - 8):
            raise AnyrankError(f"{name}: not a safetensors file: its header does not fit")
        header, metadata = parsed(parse_json(file.read(length), f"{name}: header"), _header, f"{name}: header")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    tensors = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if entry["dtype"] not in SIZES or not 0 <= begin <= end <= size - 8 - length or (
                end - begin != math.prod(shape) * SIZES[entry["dtype"]]):
            raise AnyrankError(f"{name}: tensor {printable(key)!r}: {printable(entry['dtype'])} {list(shape)} is not "
                               f"what its bytes {begin}..{end} hold")
        tensors[key] = Entry(entry["dtype"], shape, mapped[8 + length + begin:8 + length + end])
    return tensors, metadata
