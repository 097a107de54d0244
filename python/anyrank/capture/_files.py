# SPDX-License-Identifier: Apache-2.0
"""A rank's files: tensors are written as they come, and where they are in the full ones is said at the end.

The rows of a further micro-batch are a part of their own, in the rank's second file, as one file has a name once.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import re
import sys
import typing

from anyrank._errors import AnyrankError
from anyrank._safetensors import Writer
from anyrank.capture._places import Box

ENTRY_BYTES = 700  # of a header for one tensor, with its place in the metadata
NAME_BYTES = 100  # of a header for one name in the order of execution
MOST_ENTRIES = 4000


def rank_file(rank: int, number: int) -> str:
    return f"rank-{rank:05d}.safetensors" if number == 0 else f"rank-{rank:05d}-{number + 1}.safetensors"


def dtype_names() -> dict[typing.Any, str]:
    import torch

    names = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
             "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
             "bool": "BOOL",
             "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64"}
    return {getattr(torch, key): name for key, name in names.items() if hasattr(torch, key)}


def bytes_of(tensor: typing.Any) -> tuple[str, typing.Any, typing.Any]:
    """A CPU tensor as safetensors has it: type, a buffer of its bytes, little-endian, and what keeps that alive."""
    import torch

    dtype = dtype_names().get(tensor.dtype)
    if dtype is None:
        raise AnyrankError(f"tensors of {tensor.dtype} have no place in a safetensors file")
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if sys.byteorder == "big" and tensor.element_size() > 1:
        word = 4 if tensor.is_complex() else tensor.element_size()
        tensor = tensor.view(-1).view(torch.uint8).view(-1, word).flip(1).contiguous()
    count = tensor.numel() * tensor.element_size()
    return dtype, (ctypes.c_char * count).from_address(tensor.data_ptr()) if count else b"", tensor


class Placed(typing.NamedTuple):
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    boxes: list[Box]
    partial: list[str]
    assumed: bool
    replica: int
    replicas: int


class RankFiles:
    """The files of one rank. entries: about how many tensors there will be."""

    def __init__(self, folder: pathlib.Path, rank: int, entries: int) -> None:
        self.folder, self.rank = folder, rank
        self.entries = max(16, min(entries, MOST_ENTRIES))
        self.writers: list[Writer] = []
        self.held: list[list[str]] = []
        self.current: dict[int, int] = {}  # of each micro-batch: the file that it is written to

    def _open(self, part: int) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / rank_file(self.rank, len(self.writers))
        self.writers.append(Writer(path, room=self.entries * (ENTRY_BYTES + NAME_BYTES)))
        self.held.append([])
        self.current[part] = len(self.writers) - 1
        return self.current[part]

    def add(self, name: str, tensor: typing.Any, part: int) -> int:
        """Writes a tensor, which is micro-batch `part` of its name. Returns the number of its file."""
        number = self.current.get(part, -1)
        if number < 0 or len(self.held[number]) >= self.entries:
            number = self._open(part)
        dtype, data, _alive = bytes_of(tensor)
        self.writers[number].add(name, dtype, tuple(tensor.shape), data)
        self.held[number].append(name)
        return number

    def close(self, rank: dict[str, typing.Any], places: list[dict[str, Placed]], order: list[str],
              metadata: dict[str, str]) -> list[pathlib.Path]:
        """Gives the files their names. rank: what each says of it; places: of each file's tensors."""
        if not self.writers:
            self._open(0)
            places = [{}]
        # One file says the order of all: the first, or one of its own where that has no room for it.
        if sum(len(name.encode()) + 8 for name in order) > self.entries * NAME_BYTES:
            self._open(-1)
            places.append({})
        ordering = self.current.get(-1, 0)
        for number, (writer, here) in enumerate(zip(self.writers, places)):
            tensors = {name: _text(placed, rank["mesh"]) for name, placed in here.items()}
            single = [name for name, placed in here.items() if len(placed.boxes) == 1]
            dcp = {name: {"saved_offsets": list(here[name].boxes[0].full)} for name in single}
            own = {"version": 1, **rank, "tensors": tensors, **({"order": order} if number == ordering else {})}
            writer.close({"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(dcp),
                          "ANYRANK_PLACEMENT": json.dumps(own), **metadata})
        return [pathlib.Path(writer.path) for writer in self.writers]

    def remove_older(self, world: int) -> None:
        """Removes what an earlier run left of this rank, and the first rank what ranks left that this run has not."""
        keep = {rank_file(self.rank, i) for i in range(max(1, len(self.writers)))}
        for path in self.folder.glob("rank-*.safetensors*"):
            match = re.fullmatch(r"rank-(\d{5,})(-\d+)?\.safetensors(\.part)?", path.name)
            if match is None or path.name in keep or path.name.replace(".part", "") in keep:
                continue
            rank = int(match[1])
            if rank == self.rank or (self.rank == 0 and rank >= world):
                os.remove(path)

    def discard(self) -> None:
        for writer in self.writers:
            writer.discard()


def _text(placed: Placed, mesh: list[tuple[str, int]]) -> dict[str, typing.Any]:
    boxes = [{"global": list(b.full), "local": list(b.local), "extent": list(b.extent)} for b in placed.boxes]
    out: dict[str, typing.Any] = {"shape": list(placed.shape), "boxes": boxes}
    sizes = dict(mesh)
    partial = [name for name in placed.partial if sizes[name] > 1]
    if partial:
        out["partial"] = partial[0] if len(partial) == 1 else partial
    if placed.assumed:
        out["assumed"] = True
    if placed.replicas:
        out.update(replica=placed.replica, replicas=placed.replicas)
    return out
