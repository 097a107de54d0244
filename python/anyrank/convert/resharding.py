# SPDX-License-Identifier: Apache-2.0
"""Checkpoints split over ranks and merged again (train.md, "Splitting and merging").

    from anyrank.convert.resharding import reshard
    reshard("model", "model-tp4", tp=4)         # or python -m anyrank.convert model --tp 4 --out model-tp4
    reshard("model-tp4", "model-merged")

Bits are copied, never computed, and no more than a tensor is in memory.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import os
import pathlib
import shutil
import typing

from anyrank._errors import AnyrankError, path_name
from anyrank._safetensors import SIZES, read
from anyrank.convert._layout import Box, Layout, Parameter, parameter_of
from anyrank.convert._pieces import new_folder
from anyrank.convert._tensors import View, row_major
from anyrank.dump import Dump, open_dump
from anyrank.explain.facts import FILE, FORMAT

Path = typing.Union[str, "os.PathLike[str]"]
_STATE = "optimizer.safetensors"
_SMALL = 64 << 20  # the largest other file that is taken along
_WEIGHTS = (".safetensors", ".index.json", ".npy", ".npz", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf",
            ".msgpack", ".h5", ".onnx")
# The official library puts tensors in a file by dtype, from the end of this list, then by name.
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64",
          "F64", "I64", "U64")


@dataclasses.dataclass(frozen=True)
class Resharded:
    """What reshard() wrote."""

    path: str
    layout: str  # "tp=2 pp=2"; "merged"
    tensors: int
    files: int
    bytes: int
    notes: tuple[str, ...]


@dataclasses.dataclass
class _Tensor:
    """A tensor of the source. rows: of dimension 0 that are taken; shape: of the output, with padding."""

    param: Parameter
    dtype: str
    shape: tuple[int, ...]
    rows: int
    order: tuple[typing.Any, ...]
    in_order: bool  # the source says so
    state: bool


@dataclasses.dataclass
class _Item:
    """What a file holds of a tensor."""

    tensor: _Tensor
    box: Box
    copy: int = 0
    copies: int = 1
    position: int = 0  # in the file

    @property
    def bytes(self) -> int:
        return math.prod(self.box[1]) * SIZES[self.tensor.dtype]


@dataclasses.dataclass
class _File:
    name: str
    items: list[_Item] = dataclasses.field(default_factory=list)
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)

    def create(self, folder: str) -> None:
        """Writes the header, after which every item has its place."""
        self.items.sort(key=lambda item: (-_ORDER.index(item.tensor.dtype), item.tensor.param.name.encode()))
        header: dict[str, typing.Any] = {"__metadata__": self.metadata} if self.metadata else {}
        size = 0
        for item in self.items:
            header[item.tensor.param.name] = {"dtype": item.tensor.dtype, "shape": list(item.box[1]),
                                              "data_offsets": [size, size + item.bytes]}
            item.position, size = size, size + item.bytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")
        text += b" " * (-len(text) % 8)
        with open(os.path.join(folder, self.name), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
        for item in self.items:
            item.position += 8 + len(text)


def reshard(source: Path, out: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, virtual_stages: int = 1,
            stages: typing.Sequence[int] = (), embedding_hidden: bool = False, pad_vocab: int = 1,
            shard_size: int = 5_000_000_000, shard: typing.Mapping[str, int | None] | None = None,
            map: Path | None = None, config: Path | None = None) -> Resharded:
    """Splits a checkpoint over ranks, merges what ranks hold, or does both at once.

    source            a Hugging Face folder, a folder with files of ranks, a checkpoint of anyrank train, or one file
    out               a new folder: a file of each rank, rank-00000.safetensors; with tp, pp and ep 1 a Hugging Face one
    tp, pp, ep        tensor-parallel, pipeline and expert-parallel ranks: rank (p, e, t) is (p * ep + e) * tp + t
    virtual_stages    of each pipeline rank: stage s is rank s mod pp's
    stages            the number of each stage's layers; default: even, and those in the middle have one more
    embedding_hidden  splits the embedding by columns, not along the vocabulary
    pad_vocab         adds rows of zeros to the vocabulary, up to a multiple of it
    shard_size        merged: the most bytes of one file's tensors
    shard             of names that are not known: {glob: dimension, or None for a copy}
    map               a mapping file for the source (pytorch.md)
    config            config.json, or a folder with one, where the source has none

    Raises AnyrankError: what is wrong, with the tensor; then `out` is not there.
    """
    source, out = path_name(source), path_name(out)
    if pad_vocab < 1 or shard_size < 1:
        raise ValueError(f"pad_vocab {pad_vocab} and shard_size {shard_size} have to be at least 1")
    latest = os.path.join(source, "latest")
    source = os.path.realpath(latest) if os.path.isdir(latest) else source
    if source.endswith(".safetensors") and os.path.isfile(source):
        world = json.loads(read(source)[1].get("ANYRANK_PLACEMENT", "{}")).get("world", 1)
        if world > 1:
            raise AnyrankError(f"{source}: is one rank's part, of {world}: give the folder that all of them are in")
    with open_dump(source, map) as dump:
        folder = source if os.path.isdir(source) else os.path.dirname(source) or "."
        about, path = _config(folder, config, tp * pp * ep > 1)
        layout = Layout(about, {}, tp, pp, ep, virtual_stages, tuple(stages), embedding_hidden, shard or {})
        job = _Job(dump, layout, pad_vocab, [])
        files = job.rank_files() if tp * pp * ep > 1 else job.merged_files(shard_size)
        with new_folder(out) as half:
            job.write(files, half)
            if tp * pp * ep == 1:
                _write_index(files, half)
            _take_along(source, half, {os.path.basename(part.file) for name in dump
                                       for part in dump.tensor(name).parts}, path, job.notes)
        size = sum(item.bytes for file in files for item in file.items)
        extents = [f"{name}={n}" for name, n in (("tp", tp), ("pp", pp), ("ep", ep)) if n > 1]
        return Resharded(out, " ".join(extents) or "merged", len(job.tensors), len(files), size, tuple(job.notes))


def _config(folder: str, config_file: Path | None, needed: bool) -> tuple[dict[str, typing.Any], str | None]:
    """config.json, and its path. Merging needs none."""
    path = os.path.join(folder, "config.json") if config_file is None else path_name(config_file)
    path = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if config_file is None and not os.path.exists(path):
        if needed:
            raise AnyrankError(f"{folder}: no config.json there, which says how tensors are split; give config "
                               "(--config FILE)")
        return {}, None
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise AnyrankError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise AnyrankError(f"{path}: is no JSON object")
    return config, path


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", .." if len(names) > 3 else "")


class _Job:
    """The source's tensors in the order of their use, and what is said of them."""

    def __init__(self, dump: Dump, layout: Layout, pad_vocab: int, notes: list[str]) -> None:
        self.dump, self.layout, self.notes = dump, layout, notes
        abouts = {name: dump.tensor(name) for name in dump}
        layout.shapes = {name: about.shape for name, about in abouts.items()}
        vocab = layout.config.get("vocab_size")
        if pad_vocab > 1 and not isinstance(vocab, int):
            raise AnyrankError("config.json: no 'vocab_size', which pad_vocab (--pad-vocab) needs")
        cut, padded, self.tensors = [], [], []
        for name, about in abouts.items():
            if about.dtype not in SIZES:
                raise AnyrankError(f"tensor {name!r}: {about.dtype} has elements of less than a byte, which are not "
                                   "copied")
            parameter, shape = parameter_of(name), about.shape
            rows = shape[0] if shape else 1
            if (parameter.role in ("tokens", "head") and isinstance(vocab, int) and shape and
                    layout.shapes.get(parameter.parameter, shape) == shape):
                cut += [name] * (rows > vocab)
                rows = min(rows, vocab)
                shape = (-(-rows // pad_vocab) * pad_vocab, *shape[1:])
                padded += [name] * (shape[0] > rows)
            use = (
                0 if parameter.role in ("tokens", "positions") else 1 if parameter.layer is not None else 2,
                parameter.layer or 0,
            )
            state = parameter.state or os.path.basename(about.parts[0].file) == _STATE
            order = math.inf if about.order is None else about.order
            self.tensors.append(
                _Tensor(parameter, about.dtype, shape, rows, (order, *use, name), about.order is not None, state)
            )
        layout.shapes = {tensor.param.name: tensor.shape for tensor in self.tensors}
        self.tensors.sort(key=lambda tensor: tensor.order)
        unknown = [tensor.param.name for tensor in self.tensors
                   if not tensor.param.known and math.prod(tensor.shape) > 1 and
                   not any(fnmatch.fnmatchcase(tensor.param.name, glob) for glob in layout.shard)]
        if unknown and layout.tp * layout.pp > 1:
            notes.append(f"{len(unknown)} tensors of names that are not known, copied whole: {_some(unknown)}")
        if cut:
            notes.append(f"rows past the vocabulary of {vocab} cut: {_some(cut)}")
        if padded:
            notes.append(f"the vocabulary of {vocab} is padded with zeros to a multiple of {pad_vocab}, of which "
                         f"config.json does not tell: {_some(padded)}")
        summed = [name for name, about in abouts.items() if about.partial]
        if summed:
            notes.append(f"summed over the ranks' parts: {_some(summed)}")
        self.copied = {name for name, about in abouts.items() if about.replicas > 1}

    # --- files ---

    def rank_files(self) -> list[_File]:
        """A file of each rank, and further ones for its further boxes of packed tensors: PyTorch's reader knows one box
        of a tensor in a file."""
        files: dict[tuple[int, int], _File] = {}
        layout = self.layout
        for rank in range(layout.pp * layout.ep * layout.tp):
            files[rank, 0] = _File(f"rank-{rank:05d}.safetensors")
        for tensor in self.tensors:
            for rank, boxes, copy, copies in layout.holders(tensor.param, tensor.shape):
                for k, box in enumerate(boxes):
                    file = files.setdefault((rank, k), _File(f"rank-{rank:05d}-{k + 1}.safetensors"))
                    file.items.append(_Item(tensor, box, copy, copies))
        for (rank, k), file in files.items():
            file.metadata = self._placement(rank, k, file.items)
        return [files[key] for key in sorted(files)]

    def _placement(self, rank: int, k: int, items: list[_Item]) -> dict[str, str]:
        layout = self.layout
        mesh = [(name, n) for name, n in (("pp", layout.pp), ("dp", layout.ep), ("tp", layout.tp))
                if n > 1 or name == "tp"]
        coordinates = {"pp": rank // (layout.ep * layout.tp), "dp": rank // layout.tp % layout.ep,
                       "tp": rank % layout.tp}
        place: dict[str, typing.Any] = {
            "version": 1, "rank": rank, "world": layout.pp * layout.ep * layout.tp, "mesh": mesh,
            "at": [coordinates[name] for name, _ in mesh],
            "tensors": {item.tensor.param.name: {
                "shape": item.tensor.shape,
                **({"replica": item.copy, "replicas": item.copies} if item.copies > 1 else {})} for item in items}}
        if k == 0 and all(item.tensor.in_order for item in items):
            place["order"] = [item.tensor.param.name for item in items]
        sharding = {item.tensor.param.name: {"saved_offsets": item.box[0]} for item in items}
        texts = (json.dumps(document, separators=(",", ":"), ensure_ascii=False) for document in (sharding, place))
        return {"DCP_VERSION": "1.0", **dict(zip(("DCP_SHARDING_INFO", "ANYRANK_PLACEMENT"), texts)), **self._format()}

    def merged_files(self, shard_size: int) -> list[_File]:
        """Hugging Face's: one file or shards, and a file of the optimizer's state."""
        shards: list[_File] = []
        size = 0
        state = _File(_STATE, metadata=self._format())
        for tensor in self.tensors:
            item = _Item(tensor, ((0,) * len(tensor.shape), tensor.shape))
            if tensor.state:
                state.items.append(item)
                continue
            if not shards or (size + item.bytes > shard_size and shards[-1].items):
                shards.append(_File("", metadata=self._format()))
                size = 0
            shards[-1].items.append(item)
            size += item.bytes
        for i, file in enumerate(shards):
            shard = f"-{i + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file.name = f"model{shard}.safetensors"
        return shards + [state] * bool(state.items)

    def _format(self) -> dict[str, str]:
        value = self.dump.metadata("format")
        return {} if value is None else {"format": value}

    # --- values ---

    def write(self, files: list[_File], folder: str) -> None:
        """Every tensor is read once, and its boxes go to where the headers have them."""
        holders: dict[str, list[tuple[_File, _Item]]] = {}
        for file in files:
            file.create(folder)
            for item in file.items:
                holders.setdefault(item.tensor.param.name, []).append((file, item))
        for tensor in self.tensors:
            self._check_copies(tensor.param.name)
            self._write_boxes(self._read(tensor), holders.get(tensor.param.name, []), folder)

    @staticmethod
    def _write_boxes(values: View, holders: list[tuple[_File, _Item]], folder: str) -> None:
        for file, item in holders:
            part = values
            for dim, (begin, count) in enumerate(zip(*item.box)):
                part = part.narrow(dim, begin, count)
            with open(os.path.join(folder, file.name), "r+b") as target:
                target.seek(item.position)
                target.write(part.bytes())

    def _read(self, tensor: _Tensor) -> View:
        """Its elements, with the output's rows."""
        data, shape = self.dump.entry(tensor.param.name).data, tensor.shape
        if shape and not shape[0] == tensor.rows == self.dump.tensor(tensor.param.name).shape[0]:
            row = math.prod(shape[1:]) * SIZES[tensor.dtype]
            out = memoryview(bytearray(shape[0] * row))
            out[:tensor.rows * row] = data[:tensor.rows * row]
            data = out
        return View(tensor.dtype, shape, row_major(shape), data)

    def _check_copies(self, name: str) -> None:
        found = self.dump.disagreement(name) if name in self.copied else None
        if found:
            (rank, peer_rank), index_text = found.ranks, ", ".join(map(str, found.index))
            raise AnyrankError(
                f"{self.dump.path}: tensor {name!r}: the copies of ranks {rank} and {peer_rank} differ in "
                f"{found.elements} of {found.count} elements, first at [{index_text}]"
            )


def _write_index(files: list[_File], folder: str) -> None:
    shards = [file for file in files if file.name != _STATE]
    if len(shards) < 2:
        return
    index = {"metadata": {"total_size": sum(item.bytes for file in shards for item in file.items)},
             "weight_map": dict(sorted((item.tensor.param.name, file.name) for file in shards for item in file.items))}
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as text:
        json.dump(index, text, indent=2)
        text.write("\n")


def _take_along(source: str, out: str, read: set[str], config: str | None, notes: list[str]) -> None:
    """The small files beside the tensors: config.json, tokenizer.json, .."""
    for name in sorted(os.listdir(source)) if os.path.isdir(source) else ():
        path = os.path.join(source, name)
        if name.startswith(".") or not os.path.isfile(path):
            continue
        if name.endswith(_WEIGHTS):
            if name not in read and not name.endswith(".index.json"):
                notes.append(f"not read and not taken along, for the model's tensors are in other files: {name}")
        elif name == FILE and f'"{FORMAT}"' in pathlib.Path(path).read_text(encoding="utf-8", errors="replace")[:99]:
            continue  # what a dump says of its run, which had another layout
        elif os.path.getsize(path) > _SMALL:
            notes.append(f"not taken along, for its size: {name}")
        else:
            shutil.copyfile(path, os.path.join(out, name))
    if config is not None:
        shutil.copyfile(config, os.path.join(out, "config.json"))
