# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torch.distributed.checkpoint: a folder of .distcp files and their index, .metadata. Megatron-core's
torch_dist is one with names of its own (megatron.py)."""

from __future__ import annotations

import collections
import functools
import os
import re
import typing

from anyrank._errors import AnyrankError
from anyrank._safetensors import SIZES
from anyrank.convert._pickles import Placeholder, attribute, class_of, map_file, read_pickle, read_torch
from anyrank.convert._pieces import Checkpoint, Piece, state_name
from anyrank.convert._tensors import View

METADATA = "torch.distributed.checkpoint.metadata."
OPTIMIZER_STATE = re.compile(r"(?:.*\.)?state\.(.+)\.([^.]+)")


def read_metadata(folder: str, placeholders: typing.Collection[str] = ()) -> Placeholder:
    """The checkpoint's index, as placeholders of PyTorch's classes."""
    path = os.path.join(folder, ".metadata")
    if not os.path.isfile(path):
        raise AnyrankError(f"{folder}: has no .metadata, which torch.distributed.checkpoint writes last: the save "
                           f"did not end, or the file was left behind when the folder was copied")
    with open(path, "rb") as file:
        found = read_pickle(file, path, placeholders)
    if class_of(found) != METADATA + "Metadata":
        raise AnyrankError(f"{path}: holds {class_of(found) or type(found).__name__}, expected {METADATA}Metadata")
    version = attribute(found, "version")
    if version is not None and str(version).split(".")[0] != "1":
        raise AnyrankError(f"{path}: version {version} of the format; version 1 is read here")
    for name in ("state_dict_metadata", "storage_data"):
        if not isinstance(attribute(found, name), dict):
            raise AnyrankError(f"{path}: has no {name}, which every version of the format has had: damaged, or "
                               f"written by another program")
    return typing.cast(Placeholder, found)


def _numbers(value: typing.Any, origin: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise AnyrankError(f"{origin}: a shape or an offset that is not made of numbers from 0: {str(value)[:80]}")
    return value


def _dtype(properties: typing.Any, origin: str) -> str:
    """Of TensorProperties, which are pickled as a tuple that begins with it, or with attributes."""
    state = attribute(properties, "_state")
    found = state[0] if isinstance(state, tuple) and state else attribute(properties, "dtype")
    if found not in SIZES:
        raise AnyrankError(f"{origin}: is of a dtype that is not supported: {class_of(found) or found}")
    return str(found)


class Item(typing.NamedTuple):
    """A chunk of a tensor, before it has a name."""

    key: str
    path: tuple[typing.Any, ...]  # of keys in the dictionary that was saved; () where it is not told
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    rank: int
    origin: str
    read: typing.Callable[[], View]


class _Files:
    """The .distcp files, mapped when they are first needed."""

    def __init__(self, folder: str, placeholders: typing.Collection[str]) -> None:
        self.folder, self.placeholders = folder, placeholders
        self.map = functools.lru_cache(maxsize=64)(map_file)
        self.sizes: dict[str, int] = {}

    def check(self, key: str, info: typing.Any) -> str:
        """The path of the file of a chunk, which has all of its bytes."""
        name = attribute(info, "relative_path")
        offset, length = attribute(info, "offset"), attribute(info, "length")
        if not isinstance(name, str) or type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise AnyrankError(f"{self.folder}: tensor {key!r}: .metadata does not say where its bytes are")
        if attribute(info, "transform_descriptors"):
            kinds = ", ".join(class_of(entry) or str(entry) for entry in attribute(info, "transform_descriptors"))
            raise AnyrankError(f"{self.folder}: tensor {key!r} is stored through {kinds}: save it without compression")
        path = os.path.normpath(os.path.join(self.folder, name))
        if os.path.isabs(name) or os.path.relpath(path, self.folder).startswith(".."):
            raise AnyrankError(f"{self.folder}: tensor {key!r}: .metadata points outside of the folder, to {name!r}")
        if path not in self.sizes:
            if not os.path.isfile(path):
                raise AnyrankError(f"MissingShard: {self.folder}: {name} is missing, which holds a part of {key!r}")
            self.sizes[path] = os.path.getsize(path)
        if offset + length > self.sizes[path]:
            raise AnyrankError(
                f"{path}: cut short: {self.sizes[path]} bytes, a part of {key!r} ends at {offset + length}")
        return path

    def read(self, path: str, offset: int, length: int, origin: str) -> View:
        value = read_torch(self.map(path)[offset:offset + length], origin, self.placeholders)
        if not isinstance(value, View):
            raise AnyrankError(f"{origin}: holds {class_of(value) or type(value).__name__}, expected a tensor")
        return value


def _rank_of(name: str) -> int:
    """__3_0.distcp is rank 3's first file."""
    found = re.fullmatch(r"(?:.*__)?(\d+)(?:_\d+)?\.distcp", os.path.basename(name))
    return int(found.group(1)) if found else 0


def read_items(folder: str, metadata: Placeholder, placeholders: typing.Collection[str]) -> tuple[list[Item], int]:
    """Every chunk of every tensor, and how many entries are none (numbers, texts, random states)."""
    files, items, skipped = _Files(folder, placeholders), [], 0
    stored: dict[tuple[str, tuple[int, ...]], typing.Any] = {}
    for index, info in metadata.storage_data.items():  # type: ignore[attr-defined]
        stored[str(attribute(index, "fqn")), tuple(attribute(index, "offset") or ())] = info
    paths = attribute(metadata, "planner_data")
    for key, entry in metadata.state_dict_metadata.items():  # type: ignore[attr-defined]
        if class_of(entry) != METADATA + "TensorStorageMetadata":
            skipped += 1
            continue
        origin = f"{folder}: tensor {key!r}"
        dtype = _dtype(attribute(entry, "properties"), origin)
        shape = _numbers(attribute(entry, "size"), origin)
        for chunk in attribute(entry, "chunks") or []:
            offset, extent = (_numbers(attribute(chunk, name), origin) for name in ("offsets", "sizes"))
            info = stored.get((key, offset))
            if info is None:
                raise AnyrankError(f"MissingShard: {origin}: .metadata lists a part at {list(offset)} that no file has")
            path = files.check(key, info)
            place = attribute(info, "offset")
            read = functools.partial(files.read, path, place, attribute(info, "length"), f"{path}, byte {place}")
            items.append(Item(key, tuple(nested_path(paths, key)), dtype, shape, offset, extent,
                              _rank_of(attribute(info, "relative_path")), path, read))
    return items, skipped


def nested_path(paths: typing.Any, key: str) -> tuple[typing.Any, ...]:
    found = paths.get(key) if isinstance(paths, dict) else None
    return found if isinstance(found, tuple) else (key,)


def name_entry(path: tuple[typing.Any, ...]) -> tuple[str, str, str]:
    """(what the dictionary with it is called, the parameter, the role) of an entry of the dictionary that was saved."""
    parts = [str(part) for part in path]
    if "state" in parts[:-2] and parts[-1] not in ("", None):
        state_index = parts.index("state")
        if state_index + 3 == len(parts) and not isinstance(path[state_index + 1], int):
            return "", *state_name(parts[state_index + 1], parts[-1])
    found = OPTIMIZER_STATE.fullmatch(parts[-1])
    if found and len(parts) <= 2 and (parts[-1].startswith("state.") or parts[0].startswith("optim")):
        return "", *state_name(found.group(1), found.group(2))
    if len(parts) == 1 or "state" in parts:
        return "", ".".join(parts), "weight" if len(parts) == 1 else ""
    return parts[0], ".".join(parts[1:]), "weight"


def read(folder: str, placeholders: typing.Collection[str] = ()) -> Checkpoint:
    """A checkpoint of torch.distributed.checkpoint."""
    metadata = read_metadata(folder, placeholders)
    items, skipped = read_items(folder, metadata, placeholders)
    if not items:
        raise AnyrankError(f"{folder}: its .metadata lists no tensor")
    names = {item.key: name_entry(item.path) for item in items}
    # "model" or "state_dict" around the parameters is left out, unless two dictionaries have the same names.
    count = collections.Counter(name for _, name, role in names.values() if role == "weight")
    checkpoint = Checkpoint("torch.distributed.checkpoint")
    for item in items:
        holder, name, role = names[item.key]
        if role == "weight" and holder and count[name] > 1:
            name = f"{holder}.{name}"
        checkpoint.pieces.append(Piece(item.rank, name, role, item.dtype, item.shape, item.offset, item.extent,
                                       item.read,
                                       item.origin))
    if any(isinstance(part, int) for item in items for part in item.path[1:-1]):
        checkpoint.notes.append("an optimizer's state is saved by number, not by parameter: it keeps its own names; "
                                "save it with torch.distributed.checkpoint.state_dict.get_state_dict")
    if skipped:
        checkpoint.notes.append(f"{skipped} entries that are no tensors are left out")
    return checkpoint
