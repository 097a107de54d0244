# SPDX-License-Identifier: Apache-2.0
"""A rank's files: tensors are written as they come, and where they are in the full ones is said at the end.

The rows of a further micro-batch are a part of their own, in the rank's second file, as one file has a name once.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import typing

from anyrank._arrays import entry_of
from anyrank._errors import AnyrankError
from anyrank._safetensors import Writer
from anyrank.capture._places import Box

ENTRY_BYTES = 700  # of a header for one tensor, with its place in the metadata
NAME_BYTES = 100  # of a header for one name in the order of execution
MOST_ENTRIES = 4000


def rank_file(rank: int, number: int) -> str:
    return f"rank-{rank:05d}.safetensors" if number == 0 else f"rank-{rank:05d}-{number + 1}.safetensors"


class Placed(typing.NamedTuple):
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    boxes: list[Box]
    partial: list[str]
    assumed: bool
    replica: int
    replicas: int
    left_out: str = ""  # why it is a part of no tensor
    sample_rows: int = 0  # rows of dimension 0 that each sample has
    shares_boxes: bool = False  # other ranks may have copies of some of its boxes


class RankFiles:
    """The files of one rank. entries: about how many tensors there will be."""

    def __init__(self, folder: pathlib.Path, rank: int, entries: int) -> None:
        self.folder, self.rank = folder, rank
        self.entries = max(16, min(entries, MOST_ENTRIES))
        self.writers: list[Writer] = []
        self.entry_names: list[list[str]] = []
        self.current: dict[int, int] = {}  # of each micro-batch: the file that it is written to

    def _open(self, part: int) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AnyrankError(f"{self.folder}: {error.strerror}") from error
        path = self.folder / rank_file(self.rank, len(self.writers))
        self.writers.append(Writer(path, room=self.entries * (ENTRY_BYTES + NAME_BYTES)))
        self.entry_names.append([])
        self.current[part] = len(self.writers) - 1
        return self.current[part]

    def add(self, name: str, tensor: typing.Any, part: int, _placed: Placed | None = None) -> int:
        """Writes a tensor, which is micro-batch `part` of its name. Returns the number of its file."""
        number = self.current.get(part, -1)
        if number < 0 or len(self.entry_names[number]) >= self.entries:
            number = self._open(part)
        try:
            entry = entry_of(tensor)
        except TypeError as error:
            raise AnyrankError(f"{name}: {error}") from None
        if entry.shape != tuple(tensor.shape):
            raise AnyrankError(f"{name}: tensors of {tensor.dtype} have no place in a safetensors file")
        self.writers[number].add(name, entry.dtype, entry.shape, entry.data)
        self.entry_names[number].append(name)
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
        for number, (writer, file_places) in enumerate(zip(self.writers, places)):
            tensors = {name: _text(placed, rank["mesh"]) for name, placed in file_places.items()}
            single = [name for name, placed in file_places.items() if len(placed.boxes) == 1]
            dcp = {name: {"saved_offsets": list(file_places[name].boxes[0].full)} for name in single}
            placement = {"version": 1, **rank, "tensors": tensors, **({"order": order} if number == ordering else {})}
            writer.close({"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(dcp),
                          "ANYRANK_PLACEMENT": json.dumps(placement), **metadata})
        return [pathlib.Path(writer.path) for writer in self.writers]

    def remove_older(self, world: int) -> None:
        """Removes what an earlier run left of this rank, and the first rank what ranks left that this run has not."""
        current_names = {rank_file(self.rank, i) for i in range(max(1, len(self.writers)))}
        for path in self.folder.glob("rank-*.safetensors*"):
            match = re.fullmatch(r"rank-(\d{5,})(-\d+)?\.safetensors(\.part)?", path.name)
            if match is None or path.name in current_names or path.name.replace(".part", "") in current_names:
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
    if placed.sample_rows:
        out["sample_rows"] = placed.sample_rows
    if placed.left_out:
        out["left_out"] = placed.left_out
    if placed.replicas:
        out.update(replica=placed.replica, replicas=placed.replicas)
    return out
