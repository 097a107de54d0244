# SPDX-License-Identifier: Apache-2.0
"""A rank's sketches in place of its tensors: of each captured step a record, appended to one file.

A sketch needs to know where its elements are in the full tensor, which is known once all ranks have said how much they
have. Tensors whose place is known at once, or was the same in the step before, are sketched as they come; of others a
copy is kept until the step's end.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import re
import tempfile
import typing

from anyrank._arrays import NAMES, entry_of
from anyrank._errors import AnyrankError
from anyrank._library import checked, library
from anyrank._safetensors import Entry
from anyrank.capture._files import Placed
from anyrank.capture._places import Box

MAGIC = b"anyrank sketch 2"
ON_DEVICE = ("cuda",)  # where torch's operations sketch what is there; elsewhere it is copied first
MOST_IN_MEMORY = 256 << 20  # of copies
UNFORESEEN = "its place in the full tensor is another than in the step before"


def sketch_file(rank: int) -> str:
    return f"rank-{rank:05d}.sketch"


def _sizes(values: typing.Sequence[int]) -> typing.Any:
    return (ctypes.c_size_t * max(len(values), 1))(*values)


class Sketch:
    """A sketch of a full tensor of this dtype, a safetensors name, and shape."""

    def __init__(self, dtype: str, shape: typing.Sequence[int]) -> None:
        self.dtype, self.shape = dtype, tuple(shape)
        self._handle = ctypes.c_void_p()
        checked(library()["sketch_create"](ctypes.byref(self._handle), dtype.encode(), len(shape), _sizes(shape)))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            library()["sketch_destroy"](self._handle)

    def add(self, entry: Entry, boxes: typing.Sequence[Box]) -> None:
        """Adds boxes of a rank's tensor, which is row-major."""
        stride: list[int] = []
        n = 1
        for extent in reversed(entry.shape):
            stride.insert(0, n)
            n *= extent
        data = (ctypes.c_ubyte * entry.data.nbytes).from_buffer(entry.data) if not entry.data.readonly and (
            entry.data.nbytes) else bytes(entry.data)
        for box in boxes:
            local_offset = sum(offset * step for offset, step in zip(box.local, stride))
            checked(library()["sketch_add"](self._handle, data, local_offset, _sizes(stride), _sizes(box.full),
                                            _sizes(box.extent)))

    def add_on_device(self, tensor: typing.Any, boxes: typing.Sequence[Box]) -> None:
        """Adds a tensor of torch to an empty sketch, on the tensor's device."""
        from anyrank.capture._sketch_torch import Figures

        figures = Figures(self.shape, tensor.device)
        for box in boxes:
            figures.add(tensor, box)
        data = figures.encoded()
        checked(library()["sketch_decode"](self._handle, data, len(data)))

    def merge(self, part: Sketch) -> None:
        checked(library()["sketch_merge"](self._handle, part._handle))

    def encoded(self) -> bytes:
        out = ctypes.create_string_buffer(library()["sketch_bytes"](self._handle))
        library()["sketch_encode"](self._handle, out)
        return out.raw


class Spool:
    """Copies of tensors until a step's end: in memory, or in a file without a name once they are too many for that."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.in_memory = folder, 0
        self.file: typing.IO[bytes] | None = None

    def store(self, data: memoryview) -> typing.Callable[[], memoryview]:
        """Returns what releases the copy, once."""
        self.in_memory += data.nbytes
        if self.in_memory <= MOST_IN_MEMORY:
            copy = memoryview(bytearray(data))
            return lambda: copy
        try:
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
            file_offset, n, file = self.file.seek(0, os.SEEK_END), data.nbytes, self.file
            for pos in range(0, n, 1 << 30):  # a call writes 2 GB at most
                self.file.write(data[pos:pos + (1 << 30)])
        except OSError as error:
            raise AnyrankError(f"{self.folder}: {error.strerror}") from error
        return lambda: _read(file, file_offset, n)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Piece:
    """A tensor, or a micro-batch of one: its sketches and the place that they are of, or a copy of its values."""

    def __init__(self, entry: Entry, foreseen: Placed | None, spool: Spool, on_device: typing.Any = None) -> None:
        self.dtype, self.shape, self.foreseen = entry.dtype, entry.shape, foreseen
        self.stored = spool.store(entry.data) if foreseen is None else None
        self.by_part = _sketches_of(entry, foreseen, on_device) if foreseen is not None else {}

    def sketches(self, placed: Placed) -> dict[str, Sketch]:
        """Returns sketches by the part of the full tensor that they cover."""
        if self.stored is not None:
            self.by_part, self.stored = _sketches_of(Entry(self.dtype, self.shape, self.stored()), placed), None
        return self.by_part


def _read(file: typing.IO[bytes], file_offset: int, n: int) -> memoryview:
    data = memoryview(bytearray(n))
    file.seek(file_offset)
    bytes_read = 0
    while bytes_read < n:
        count = file.readinto(data[bytes_read:]) or 0  # type: ignore[attr-defined]
        if not count:
            raise AnyrankError("a copy of a tensor cannot be read back")
        bytes_read += count
    return data


def _sketches_of(entry: Entry, placed: Placed, on_device: typing.Any = None) -> dict[str, Sketch]:
    found = {}
    for boxes in [[box] for box in placed.boxes] if placed.shares_boxes else [placed.boxes]:
        sketch = Sketch(entry.dtype, placed.shape)
        if on_device is None:
            sketch.add(entry, boxes)
        else:
            sketch.add_on_device(on_device, boxes)
        found[" ".join(f"{','.join(map(str, box.full))}+{','.join(map(str, box.extent))}" for box in boxes)] = sketch
    return found


class SketchFiles:
    """The file of one rank, in place of RankFiles; of one step, after those of `before`."""

    def __init__(self, folder: pathlib.Path, rank: int, step: int, before: SketchFiles | None = None) -> None:
        self.folder, self.rank, self.step = folder, rank, step
        self.path = folder / sketch_file(rank)
        self.is_new = before is None  # else it is appended
        self.spool = Spool(folder)
        self.tiny: dict[str, int] = {}  # elements of gradients that may be rounding alone
        self.stage: int | None = None  # of a pipeline, whose stages name their layers alike
        self.samples: list[int] = []  # digests of the step's samples, in their order and without it
        self.state: dict[str, typing.Any] = {}  # what the rank says of itself
        # Places of the last step that is complete, which those of the run's steps have together.
        self.known: dict[tuple[str, int], tuple[tuple[int, ...], str, Placed]] = before.known if before else {}
        self.pieces: list[dict[str, Piece]] = []  # by micro-batch
        self.writers: list[dict[str, Piece]] = self.pieces  # as many as a list of places is wanted of

    def add(self, name: str, tensor: typing.Any, part: int, placed: Placed | None = None) -> int:
        """Takes a tensor, which is micro-batch `part` of its name, at this place if it is known. Its number."""
        while len(self.pieces) <= part:
            self.pieces.append({})
        dtype = NAMES.get(str(tensor.dtype).replace("torch.", ""), "")
        before = self.known.get((name.split("@")[0], part))
        if placed is None and before is not None and before[:2] == (tuple(tensor.shape), dtype):
            placed = before[2]
        try:
            on_device = placed is not None and tensor.device.type in ON_DEVICE and not tensor.is_complex()
            entry = Entry(dtype, tuple(tensor.shape), memoryview(b"")) if on_device else entry_of(tensor)
        except TypeError as error:
            raise AnyrankError(f"{name}: {error}") from None
        self.pieces[part][name] = Piece(entry, placed, self.spool, tensor if on_device else None)
        if name.split("@")[0].endswith(":grad"):
            self.tiny[name] = self.tiny.get(name, 0) + tiny_of(tensor)
        return part

    def close(self, rank: dict[str, typing.Any], places: list[dict[str, Placed]], order: list[str],
              _metadata: dict[str, str]) -> list[pathlib.Path]:
        """Appends the step. rank: what each record says of it; places: of each micro-batch's tensors."""
        self.known.clear()
        entries, figures = [], []
        for name in order:
            parts = [(part, batch[name]) for part, batch in enumerate(self.pieces) if name in batch]
            found = [(piece, places[part][name]) for part, piece in parts]
            moved = any(piece.foreseen and _place(piece.foreseen) != _place(placed) for piece, placed in found)
            why = next((placed.left_out for _, placed in found if placed.left_out), UNFORESEEN if moved else "")
            for (part, piece), (_, placed) in zip(parts, found):
                if not placed.left_out:
                    self.known[name.split("@")[0], part] = (piece.shape, piece.dtype, placed)
            coordinates = dict(zip((axis for axis, _ in rank["mesh"]), rank["at"]))
            term = " ".join(f"{axis}{coordinates[axis]}" for axis in found[0][1].partial)
            pieces = {"": Sketch(found[0][0].dtype, ())} if why else _sum(found)
            for region, sketch in pieces.items():
                of_stage = self.stage is not None and not name.startswith(("loss:", "grad_norm", "input.", "output"))
                entries.append({"name": f"stage{self.stage}.{name}" if of_stage else name, "dtype": sketch.dtype,
                                "shape": list(sketch.shape), "part": _short(region), "term": term, "left_out": why,
                                **({"tiny": self.tiny.pop(name)} if self.tiny.get(name) else {})})
                figures.append(sketch.encoded())
        self._append({"step": self.step, "rank": self.rank, "world": rank["world"], "mesh": rank["mesh"],
                      "at": rank["at"], "samples": self.samples, "state": self.state, "tensors": entries}, figures)
        self.discard()
        return [self.path]

    def _append(self, text: dict[str, typing.Any], figures: list[bytes]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.path, "wb" if self.is_new else "ab") as file:
                file.write((MAGIC if self.is_new else b"") + record(text, figures))
        except OSError as error:
            raise AnyrankError(f"{self.path}: {error.strerror}") from error

    def remove_older(self, world: int) -> None:
        """Removes what an earlier run left of this rank, and the first rank what ranks left that this run has not."""
        for path in self.folder.glob("rank-*"):
            match = re.fullmatch(r"rank-(\d{5,})(-\d+)?\.(safetensors(\.part)?|sketch)", path.name)
            rank = int(match[1]) if match else -1
            if path != self.path and (rank == self.rank or self.rank == 0 and rank >= world):
                os.remove(path)

    def discard(self) -> None:
        """Discards the current step; the steps before stay."""
        self.pieces.clear()
        self.spool.close()


def record(text: dict[str, typing.Any], figures: typing.Iterable[bytes]) -> bytes:
    """Returns a step's record as sketch.h defines it."""
    header = json.dumps(text, separators=(",", ":")).encode()
    rest = b"".join((len(header).to_bytes(8, "little"), header, *figures))
    return len(rest).to_bytes(8, "little") + int(library()["sketch_hash"](rest, len(rest))).to_bytes(8, "little") + rest


def tiny_of(t: typing.Any) -> int:
    """Elements that are not 0, and so small beside the largest that rounding may have made them."""
    if not t.numel() or not t.is_floating_point() or t.element_size() < 2:
        return 0
    limit = max(abs(float(x)) for x in t.detach().aminmax()) * 2.0 ** -18
    parts = t.detach().reshape(-1).split(1 << 18)  # that fit into a cache
    return int(sum(((part.abs() <= limit) & (part != 0)).sum() for part in parts))


def _sum(found: list[tuple[Piece, Placed]]) -> dict[str, Sketch]:
    """Sums a tensor's micro-batches to one sketch of each part."""
    by_batch = [piece.sketches(placed) for piece, placed in found]
    if len(by_batch) == 1:
        return by_batch[0]
    parts = [(part, sketch) for sketches in by_batch for part, sketch in sketches.items()]
    for _, sketch in parts[1:]:
        parts[0][1].merge(sketch)
    return {" ".join(part for part, _ in parts): parts[0][1]}


def _place(placed: Placed) -> typing.Any:
    return placed.shape, placed.boxes, placed.partial


def _short(text: str) -> str:
    """Returns a text, or a substitute for a long one."""
    import hashlib

    return text if len(text) <= 64 else hashlib.sha256(text.encode()).hexdigest()[:32]
