# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files hold, as pieces of full tensors, and how they are written as a dump (pytorch.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import struct
import tempfile
import typing

from anyrank._errors import AnyrankError
from anyrank._safetensors import SIZES, Writer
from anyrank.convert._tensors import View, row_major

BLOCK = 1 << 24  # bytes of a full tensor that are put together at a time
STATE = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}
NUMBERS = {int: ("I64", "<q"), float: ("F64", "<d")}  # a number of Python's has these bits


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a full tensor that one rank holds."""

    rank: int
    name: str  # of the parameter, or of what is none
    role: str  # "weight", "master" (its fp32 copy), "m", "v", or "" for what is no parameter's
    dtype: str
    shape: tuple[int, ...]  # of the full tensor
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    read: typing.Callable[[], View]  # of this extent
    origin: str  # the file, for messages

    @property
    def location(self) -> str:
        return "[" + ", ".join(f"{start}:{start + n}" for start, n in zip(self.offset, self.extent)) + "]"


def full_piece(rank: int, name: str, role: str, view: View, origin: str) -> Piece:
    """A tensor that is all in one file."""
    return Piece(rank, name, role, view.dtype, view.shape, (0,) * len(view.shape), view.shape, lambda: view, origin)


def state_name(name: str, kind: str) -> tuple[str, str]:
    """The name and the role of a parameter's state: exp_avg, step, .., or fp32, its master copy."""
    role = "master" if kind == "fp32" else STATE.get(kind, "")
    return name if role else f"{name}.{kind}", role


def scalar(value: typing.Any) -> View | None:
    """A step or the like: a tensor of one element, or a number; None for anything else."""
    if isinstance(value, View):
        return View(value.dtype, (), (), value.storage, value.offset) if value.count == 1 else None
    if type(value) not in NUMBERS:
        return None
    dtype, code = NUMBERS[type(value)]
    return View(dtype, (), (), memoryview(struct.pack(code, value)))


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint's pieces, without any value read yet."""

    kind: str
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    # outermost first; rank = row-major coordinates
    mesh: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    mapping: dict[str, typing.Any] | None = None  # a mapping file for anyrank verify --map, with pytorch.md's keys
    needs_map: bool = False  # without the mapping the parts do not fit


def choose(pieces: list[Piece], weights: str) -> list[Piece]:
    """Of parameters with a master copy, that one or the one the model computes with."""
    mastered = {piece.name for piece in pieces if piece.role == "master"}
    dropped = "weight" if weights == "master" else "master"
    available = {piece.name for piece in pieces if piece.role == "weight"} if weights == "model" else mastered
    return [piece for piece in pieces if piece.role != dropped or piece.name not in (mastered & available)]


def rename(piece: Piece, suffix: str, step: int | None) -> Piece:
    """The name of models.md: NAME or NAME:new, NAME:m, NAME:v, with @STEP behind it from the second step on."""
    role = {"weight": suffix, "master": suffix, "": ""}.get(piece.role, piece.role)
    step_suffix = f"@{step}" if role and step is not None and step > 1 else ""
    return dataclasses.replace(piece, name=f"{piece.name}:{role}{step_suffix}" if role else piece.name)


def by_name(pieces: typing.Iterable[Piece]) -> dict[str, list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.name, []).append(piece)
    return groups


def _overlap(a: Piece, b: Piece) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(a.offset, a.extent, b.offset, b.extent))


def check_cover(name: str, pieces: list[Piece]) -> list[Piece]:
    """That the boxes make the full tensor, each element once but for copies. Returns one piece for each box."""
    lead = pieces[0]
    for piece in pieces[1:]:
        if (piece.shape, piece.dtype) != (lead.shape, lead.dtype):
            raise AnyrankError(f"{piece.origin}: tensor {name!r} is {piece.dtype} {list(piece.shape)}, in "
                               f"{lead.origin} it is {lead.dtype} {list(lead.shape)}")
    different = {(piece.offset, piece.extent): piece for piece in reversed(pieces) if math.prod(piece.extent)}
    boxes = sorted(different.values(), key=lambda piece: piece.offset)
    for piece in boxes:
        if any(start + n > size for start, n, size in zip(piece.offset, piece.extent, piece.shape)):
            raise AnyrankError(f"{piece.origin}: tensor {name!r}: {piece.location} is outside of {list(piece.shape)}")
    for i, piece in enumerate(boxes):
        for neighbor in boxes[i + 1:]:
            if piece.offset and neighbor.offset[0] >= piece.offset[0] + piece.extent[0]:
                break
            if _overlap(piece, neighbor):
                raise AnyrankError(f"OverlappingShards: {neighbor.origin}: tensor {name!r}: {neighbor.location} "
                                   f"overlaps {piece.location} of {piece.origin}")
    covered = sum(math.prod(piece.extent) for piece in boxes)
    if covered != math.prod(lead.shape):
        raise AnyrankError(f"MissingShard: tensor {name!r}: the files hold {covered} of its {math.prod(lead.shape)} "
                           f"elements: "
                           + ", ".join(f"{piece.location} in {os.path.basename(piece.origin)}" for piece in boxes[:4]))
    return boxes


def _read(piece: Piece) -> View:
    view = piece.read()
    if (view.dtype, view.shape) != (piece.dtype, piece.extent):
        raise AnyrankError(f"{piece.origin}: tensor {piece.name!r} {piece.location}: {view.dtype} {list(view.shape)} "
                           f"in the file, {piece.dtype} {list(piece.extent)} expected")
    return view


def _whole_tensor(boxes: list[Piece], shape: tuple[int, ...], dtype: str) -> typing.Iterator[memoryview]:
    """The bytes of a full tensor, some rows at a time."""
    if len(boxes) == 1:
        view = _read(boxes[0])
        yield view.bytes()
        view.release()
        return
    row = math.prod(shape[1:]) * SIZES[dtype]
    step = max(1, BLOCK // row)
    views = [_read(piece) for piece in boxes]  # of mapped files: nothing is copied yet
    for start in range(0, shape[0], step):
        rows = min(step, shape[0] - start)
        out = memoryview(bytearray(rows * row))
        for piece, view in zip(boxes, views):
            begin, end = max(piece.offset[0], start), min(piece.offset[0] + piece.extent[0], start + rows)
            if begin < end:
                strides = row_major(shape)
                out_offset = sum(i * step for i, step in zip((begin - start, *piece.offset[1:]), strides))
                view.narrow(0, begin - piece.offset[0], end - begin).copy_into(out, strides, out_offset)
                view.release()
        yield out


def write_full(checkpoint: Checkpoint, path: str) -> int:
    """One file with every tensor whole. Returns the bytes of the tensors."""
    size = 0
    writer = Writer(path)
    try:
        for name, pieces in by_name(checkpoint.pieces).items():
            lead, boxes = pieces[0], check_cover(name, pieces)
            if boxes:
                writer.stream(name, lead.dtype, lead.shape, _whole_tensor(boxes, lead.shape, lead.dtype))
            else:
                writer.add(name, lead.dtype, lead.shape, b"")
            size += math.prod(lead.shape) * SIZES[lead.dtype]
        writer.close({"format": "pt", "converted_from": checkpoint.kind})
    except BaseException:
        writer.discard()
        raise
    return size


def _place(rank: int, mesh: list[tuple[str, int]]) -> dict[str, typing.Any]:
    place: dict[str, typing.Any] = {"version": 1, "rank": rank}
    if mesh:
        coordinates, rest = [], rank
        for _, n in reversed(mesh):
            coordinates.append(rest % n)
            rest //= n
        place.update(world=math.prod(n for _, n in mesh), mesh=[list(pair) for pair in mesh], at=coordinates[::-1])
    return place


def write_ranks(checkpoint: Checkpoint, folder: str) -> int:
    """A file of each rank, and further ones for its further boxes of a tensor. Returns the bytes written."""
    groups = by_name(checkpoint.pieces)
    for name, pieces in groups.items():
        if not checkpoint.needs_map:
            check_cover(name, pieces)
    ranks: dict[int, list[Piece]] = {}
    for piece in checkpoint.pieces:
        ranks.setdefault(piece.rank, []).append(piece)
    size = 0
    for rank, pieces in sorted(ranks.items()):
        layers: list[list[Piece]] = []  # the k-th box of each tensor
        for boxes in by_name(pieces).values():
            for k, piece in enumerate(sorted(boxes, key=lambda box: box.offset)):
                if k == len(layers):
                    layers.append([])
                layers[k].append(piece)
        for k, layer in enumerate(layers):
            path = os.path.join(folder, f"rank-{rank:05d}{f'-{k + 1}' if k else ''}.safetensors")
            size += _write_rank(path, rank, layer, checkpoint)
    return size


def _write_rank(path: str, rank: int, pieces: list[Piece], checkpoint: Checkpoint) -> int:
    dcp, tensors, size = {}, {}, 0
    writer = Writer(path)
    try:
        for piece in pieces:
            view = _read(piece)
            data = view.bytes()
            writer.add(piece.name, piece.dtype, piece.extent, data)
            view.release()
            size += data.nbytes
            dcp[piece.name] = {"saved_offsets": list(piece.offset)}
            tensors[piece.name] = {"shape": list(piece.shape)}
        metadata = {"format": "pt", "converted_from": checkpoint.kind}
        if not checkpoint.needs_map:
            place = _place(rank, checkpoint.mesh)
            place["tensors"] = tensors
            metadata.update(DCP_VERSION="1.0", DCP_SHARDING_INFO=json.dumps(dcp), ANYRANK_PLACEMENT=json.dumps(place))
        writer.close(metadata)
    except BaseException:
        writer.discard()
        raise
    return size


@contextlib.contextmanager
def new_folder(path: str) -> typing.Iterator[str]:
    """A folder that appears, complete, at the end. One that is there already must be empty."""
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise AnyrankError(f"{path}: is there already; give the name of a new folder")
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    half = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}-", dir=parent)
    try:
        yield half
        os.chmod(half, 0o777 & ~_umask())
        os.replace(half, path)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
