# SPDX-License-Identifier: Apache-2.0
"""Sharded safetensors files, as torch.distributed.checkpoint's HuggingFaceStorageWriter(save_distributed=True) writes
them: shard-RANK-model-FILE-of-FILES.safetensors, with the offset of each tensor's part in the metadata. A full shape is
nowhere: it ends where its last part ends, as for PyTorch's own reader."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import typing

from anyrank import _safetensors
from anyrank._errors import AnyrankError
from anyrank.convert import dcp
from anyrank.convert._pieces import Checkpoint, Piece
from anyrank.convert._tensors import View, row_major

NAME = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")
KEY = "DCP_SHARDING_INFO"


def list_files(folder: str) -> list[str]:
    return [name for name in sorted(os.listdir(folder)) if NAME.fullmatch(name)]


def _offset(path: str, info: typing.Any, key: str, dims: int) -> tuple[int, ...]:
    place = info.get(key) if isinstance(info, dict) else None
    found = place.get("saved_offsets") if isinstance(place, dict) else None
    if not isinstance(found, list) or len(found) != dims or not all(type(n) is int and n >= 0 for n in found):
        raise AnyrankError(f"{path}: tensor {key!r} of {dims} dimensions: {KEY} has {place!r}, expected "
                           f"{{\"saved_offsets\": [{dims} numbers from 0]}}")
    return tuple(found)


def _file_parts(path: str, rank: int) -> typing.Iterator[Piece]:
    """Of each tensor in a file its part, whose shape is as yet where it ends."""
    tensors, metadata = _safetensors.read(path)
    if KEY not in metadata:
        raise AnyrankError(f"{path}: has no {KEY} in its metadata, which says where its tensors belong")
    try:
        info = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise AnyrankError(f"{path}: {KEY} is not JSON: {error}") from None
    for key, entry in tensors.items():
        offset = _offset(path, info, key, len(entry.shape))
        end = tuple(begin + count for begin, count in zip(offset, entry.shape))
        view = View(entry.dtype, entry.shape, row_major(entry.shape), entry.data)
        yield Piece(rank, key, "", entry.dtype, end, offset, entry.shape, functools.partial(_same, view), path)


def _same(view: View) -> View:
    return view


def read_parts(folder: str) -> list[Piece]:
    """All parts, by the keys that were saved."""
    parts = [part for name in list_files(folder)
             for part in _file_parts(os.path.join(folder, name), int(name.split("-")[1]) - 1)]
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        shape = shapes.setdefault(part.name, part.shape)
        if len(shape) != len(part.shape):
            raise AnyrankError(f"{part.origin}: tensor {part.name!r} has {len(part.shape)} dimensions, in another file "
                               f"{len(shape)}")
        shapes[part.name] = tuple(map(max, shape, part.shape))
    return [dataclasses.replace(part, shape=shapes[part.name]) for part in parts]


def read(folder: str, _placeholders: typing.Collection[str] = ()) -> Checkpoint:
    """A checkpoint of sharded safetensors files."""
    checkpoint = Checkpoint("sharded safetensors")
    for part in read_parts(folder):
        _, name, role = dcp.name_entry((part.name,))
        checkpoint.pieces.append(dataclasses.replace(part, name=name, role=role))
    if not checkpoint.pieces:
        raise AnyrankError(f"{folder}: its files hold no tensor")
    checkpoint.notes.append("these files do not say full shapes: a tensor ends where the last part that is there ends")
    return checkpoint
