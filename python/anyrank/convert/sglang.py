# SPDX-License-Identifier: Apache-2.0
"""Dumps of SGLang's dumper (sglang/srt/debug_utils/dumper.py, also in Megatron-LM under miles): a folder of files
step=0___rank=1___dump_index=7___name=attn_out___layer_id=3.pt, each with a value and what is known of it.

The value's `dims` ("t h[tp]", in the notation of sglang/srt/debug_utils/comparator/dims_spec) say where it is in the
full tensor. They become `shard` and `partial` of a mapping file (pytorch.md), which `anyrank verify --map` reads:

    dims      = word {" " word} ["#" remarks]
    word      = "1" | (name | "(" name "*" name {"*" name} ")") ["[" axis {"," axis} "]"]
    axis      = name [":" qualifier {"+" qualifier}]
    qualifier = "zigzag" | "natural" | "partial" | "sharded"

The axes of a word divide from left to right, the outermost first. A dimension "1" has one element and is left out.
Remarks say which ranks hold copies, which needs no word.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
import typing

from anyrank._errors import AnyrankError
from anyrank.convert._pickles import load
from anyrank.convert._pieces import Checkpoint, Piece
from anyrank.convert._tensors import View

# Tags that are no part of a tensor's name: where and when it was written, and by which rank.
_STEPS = ("step", "forward_pass_id", "curr_step")  # by version
_NOT_NAMED = {*_STEPS, "rank", "dump_index", "name", "recompute_status", "pp_rank", "tp_rank", "cp_rank", "ep_rank",
              "etp_rank"}
_INFO = ("sglang_parallel_info", "megatron_parallel_info")


@dataclasses.dataclass
class _Value:
    name: str
    rank: int
    index: int
    view: View
    dims: str | None
    axes: dict[str, tuple[int, int]]  # name: (coordinate, size), of more than one rank
    path: str


def _tags(path: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in os.path.basename(path)[:-len(".pt")].split("___")]
    if any(not equals for _, equals, _ in pairs):
        raise AnyrankError(f"{path}: is not named as SGLang's dumper names files: KEY=VALUE___KEY=VALUE.pt")
    return {key: value for key, _, value in pairs}


def _number(tags: dict[str, str], key: str, path: str) -> int:
    if not tags.get(key, "").isdigit():
        raise AnyrankError(f"{path}: its name has no number {key}=")
    return int(tags[key])


def _axes(meta: dict[str, typing.Any], path: str) -> dict[str, tuple[int, int]]:
    """The coordinates that SGLang or Megatron wrote: tp_rank with tp_size, and so on."""
    axes = {}
    found = [meta.get(key) for key in _INFO]
    for info in [*(entry for entry in found if isinstance(entry, dict)), meta]:
        for key, rank in info.items():
            axis, _, suffix = str(key).rpartition("_")
            size = info.get(f"{axis}_size")
            if suffix != "rank" or axis in ("", "world", "recompute_pseudo"):
                continue
            if not isinstance(rank, int) or not isinstance(size, int):
                continue
            if not 0 <= rank < size:
                raise AnyrankError(f"{path}: {axis}_rank {rank} of {axis}_size {size}")
            if size > 1:
                axes[axis] = rank, size
    return axes


def _read(path: str, placeholders: typing.Collection[str]) -> _Value | None:
    """None: the value is no tensor."""
    tags = _tags(path)
    content = load(path, placeholders)
    value: typing.Any = content
    meta: typing.Any = {}
    if isinstance(content, dict) and "value" in content:
        value, meta = content["value"], content.get("meta") or {}
    if not isinstance(value, View) or not isinstance(meta, dict):
        return None
    name, step = tags.get("name", ""), _number(tags, next((key for key in _STEPS if key in tags), "step"), path)
    if not name:
        raise AnyrankError(f"{path}: its name has no name=")
    kind = "fwd"
    for prefix, suffix in (("grad__param__", "grad"), ("grad__", "bwd"), ("param__", "init")):
        if name.startswith(prefix):
            name, kind = name[len(prefix):], suffix
            break
    tag_suffix = "".join(f".{key}={value}" for key, value in tags.items() if key not in _NOT_NAMED)
    dims = meta.get("dims")
    if dims is not None and not isinstance(dims, str):
        raise AnyrankError(f"{path}: dims {str(dims)[:60]!r} is no text")
    step_suffix = f"@{step + 1}" if step > 0 else ""
    return _Value(
        f"{name}{tag_suffix}:{kind}{step_suffix}",
        _number(tags, "rank", path),
        _number(tags, "dump_index", path),
        value,
        dims,
        _axes(meta, path),
        path,
    )


def _number_repeats(values: list[_Value]) -> None:
    """A name that a rank wrote more than once in a step: NAME.call2, in the order of writing."""
    count: collections.Counter[tuple[int, str]] = collections.Counter()
    for value in sorted(values, key=lambda entry: entry.index):
        key = value.rank, value.name
        count[key] += 1
        if count[key] > 1:
            name, _, kind = value.name.rpartition(":")
            value.name = f"{name}.call{count[key]}:{kind}"


def _coordinates(values: list[_Value], folder: str) -> dict[int, dict[str, tuple[int, int]]]:
    """Of each rank: its coordinate and the size along each axis of more than one rank."""
    axes: dict[int, dict[str, tuple[int, int]]] = {}
    for value in values:
        if axes.setdefault(value.rank, value.axes) != value.axes:
            raise AnyrankError(f"{value.path}: rank {value.rank} is elsewhere in the mesh than in its other files")
    sizes = {rank: {name: size for name, (_, size) in rank_axes.items()} for rank, rank_axes in axes.items()}
    differing_rank = next((rank for rank in sizes if sizes[rank] != sizes[min(sizes)]), None)
    if differing_rank is not None:
        raise AnyrankError(
            f"{folder}: rank {min(sizes)} says that the mesh is {sizes[min(sizes)]}, rank {differing_rank} that "
            f"it is {sizes[differing_rank]}"
        )
    return axes


def _mesh(values: list[_Value], folder: str) -> tuple[list[tuple[str, int]], dict[str, str], dict[int, int]]:
    """The mesh of all ranks, the axes that are another one by a second name (Megatron's sp is its tp), and each rank's
    number in the mesh."""
    axes = _coordinates(values, folder)
    brackets = [text for value in values for text in re.findall(r"\[([^]]*)\]", value.dims or "")]
    used = {part.partition(":")[0].strip() for text in brackets for part in text.split(",")}
    usual = ("pp", "dp", "cp", "tp")
    # Those that dims divide by come first: of two names of one axis such a one stays.
    aliases: dict[str, str] = {}
    mesh_axes: list[str] = []
    for name in sorted(axes[min(axes)], key=lambda name: (name not in used, name not in usual, name)):
        twin = next(
            (axis for axis in mesh_axes if all(rank_axes[axis] == rank_axes[name] for rank_axes in axes.values())), None
        )
        distinct_count = len({tuple(rank_axes[axis][0] for axis in mesh_axes) for rank_axes in axes.values()})
        if twin or (name not in used and distinct_count == len(axes)):  # a second name, or given by the others
            aliases[name] = twin or ""
        else:
            mesh_axes.append(name)
    mesh_axes.sort(key=lambda name: usual.index(name) if name in usual else -1)
    mesh = [(name, axes[min(axes)][name][1]) for name in mesh_axes]
    numbers: dict[int, int] = {}
    for rank, rank_axes in axes.items():
        numbers[rank] = 0
        for name, size in mesh:
            numbers[rank] = numbers[rank] * size + rank_axes[name][0]
    expected = math.prod(size for _, size in mesh)
    if len(set(numbers.values())) != len(numbers):
        raise AnyrankError(f"{folder}: {len(numbers)} ranks, of which some have the same coordinates along "
                           f"{', '.join(mesh_axes) or 'no axis'}: their parallel_info does not tell them apart")
    if expected != len(numbers):
        raise AnyrankError(
            f"MissingShard: {folder}: files of {len(numbers)} ranks, the mesh of {', '.join(mesh_axes)} has "
            f"{expected}; or one of these is a part of another"
        )
    return mesh, aliases, numbers


_NAME = r"[A-Za-z_]\w*"
_WORD = re.compile(rf"({_NAME}|\({_NAME}(?:\*{_NAME})+\))(?:\[([^]]+)\])?")
_QUALIFIERS = {"zigzag", "natural", "partial", "sharded"}


def _words(dims: str) -> list[str]:
    """One for each dimension of a rank's tensor."""
    return re.sub(r"\[[^]]*\]", lambda found: found.group().replace(" ", ""), dims.partition("#")[0]).split()


def _squeeze(value: _Value, several: bool) -> View:
    """Without the dimensions "1". Of several ranks each dimension has a word."""
    view, words = value.view, _words(value.dims or "")
    fits = len(words) == len(view.shape)
    kept_dims = [d for d, n in enumerate(view.shape) if not (fits and words[d] == "1" and n == 1)]
    if several and (not fits or any(words[d] == "1" for d in kept_dims)):
        raise AnyrankError(f"{value.path}: has the shape {list(view.shape)}, which its dims {value.dims!r} do not fit")
    return dataclasses.replace(view, shape=tuple(view.shape[d] for d in kept_dims),
                               strides=tuple(view.strides[d] for d in kept_dims))


def _rule(name: str, dims: str, mesh: list[tuple[str, int]], aliases: dict[str, str]) -> dict[str, typing.Any]:
    """The rule of a mapping. Axes of one rank divide nothing."""
    shard: list[list[typing.Any]] = []
    partial: list[str] = []
    dim_names: list[str] = []
    for dim, word in enumerate(word for word in _words(dims) if word != "1"):
        found = _WORD.fullmatch(word)
        if not found:
            raise AnyrankError(f"{name}: dims {dims!r}: {word!r} is no word for a dimension, such as h, (heads*d)[tp], "
                               "s[cp:zigzag,sp] or 1")
        dim_names += re.findall(_NAME, found.group(1))
        for part in (found.group(2) or "").split(","):
            axis, _, qualifier_text = part.partition(":")
            axis, qualifiers = aliases.get(axis) or axis, qualifier_text.split("+") if qualifier_text else []
            if not _QUALIFIERS.issuperset(qualifiers) or {"zigzag", "partial"} <= set(qualifiers):
                raise AnyrankError(
                    f"{name}: dims {dims!r}: {part!r} is qualified by {qualifier_text!r}, expected zigzag or "
                    "natural, and sharded; or partial"
                )
            if axis not in dict(mesh):
                continue
            if "partial" in qualifiers:
                partial.append(axis)
            else:
                shard.append([axis, {"dim": dim, "zigzag": True} if "zigzag" in qualifiers else dim])
    axes = [*partial, *(axis for axis, _ in shard)]
    duplicate = next(
        (candidate for names in (dim_names, axes) for candidate in names if names.count(candidate) > 1), None
    )
    if duplicate:
        raise AnyrankError(f"{name}: dims {dims!r}: {duplicate!r} is there twice")
    return {"match": re.sub(r"([*?{}\\])", r"\\\1", name), **({"shard": shard} if shard else {}),
            **({"partial": partial} if partial else {})}


def _shape(rule: dict[str, typing.Any], mesh: list[tuple[str, int]], shapes: dict[int, tuple[int, ...]]
           ) -> list[int | None]:
    """The full extents of dimensions of which ranks have more and less; [] where there are none. shapes: by number."""
    out: list[int | None] = [None] * len(next(iter(shapes.values())))
    for dim in range(len(out)):
        axes = [
            axis for axis, split in rule.get("shard", []) if (split["dim"] if isinstance(split, dict) else split) == dim
        ]
        sizes = {}
        for number, shape in shapes.items():
            coordinates, rest = {}, number
            for axis, n in reversed(mesh):
                coordinates[axis], rest = rest % n, rest // n
            sizes[tuple(coordinates[axis] for axis in axes)] = shape[dim]
        if len(set(sizes.values())) > 1:
            out[dim] = sum(sizes.values())
    return out if any(out) else []


def read(folder: str, placeholders: typing.Collection[str]) -> Checkpoint:
    """A dump of SGLang's dumper: every rank's values, and the mapping that puts them together."""
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".pt")]
    paths = [os.path.join(folder, name) for name in names if "___recompute_status=recompute" not in name]
    read_values = [_read(path, placeholders) for path in paths]
    values = [value for value in read_values if value is not None]
    if not values:
        raise AnyrankError(f"{folder}: none of its {len(paths)} files holds a tensor")
    _number_repeats(values)
    mesh, aliases, numbers = _mesh(values, folder)
    checkpoint = Checkpoint("dump of SGLang", needs_map=len(numbers) > 1)
    dims_of: dict[str, str] = {}
    empty = 0
    for value in values:
        if value.dims is None and len(numbers) > 1:
            raise AnyrankError(f"{value.path}: has no dims, of {len(numbers)} ranks: dump it with dims=\"...\", "
                               f"which say where it is in the full tensor")
        parallel = re.search(r"#.*\bdp:=(\w+)", value.dims or "")
        if value.view.count == 0 and (parallel or "dp" in value.axes):
            empty += 1
            continue
        if dims_of.setdefault(value.name, value.dims or "") != (value.dims or ""):
            raise AnyrankError(f"{value.path}: its dims are {value.dims!r}, another rank's {dims_of[value.name]!r}")
        view = _squeeze(value, len(numbers) > 1)

        def get(view: View = view) -> View:
            return view

        checkpoint.pieces.append(Piece(numbers[value.rank], value.name, "", view.dtype, view.shape,
                                       (0,) * len(view.shape), view.shape, get, value.path))
    if empty:
        checkpoint.notes.append(f"{empty} empty tensors of data-parallel ranks without samples are left out")
    if len(paths) < len(names):
        checkpoint.notes.append(f"{len(names) - len(paths)} values that activation checkpointing computed again are "
                                f"left "
                                "out")
    if len(read_values) > len(values):
        checkpoint.notes.append(f"{len(read_values) - len(values)} values that are no tensors are left out")
    if checkpoint.needs_map:
        rules = []
        for name, dims in sorted(dims_of.items()):
            rule = _rule(name, dims, mesh, aliases)
            shape = _shape(rule, mesh, {piece.rank: piece.shape for piece in checkpoint.pieces if piece.name == name})
            rules.append({**rule, "shape": shape} if shape else rule)
        checkpoint.mapping = {"version": 1, "mesh": [list(pair) for pair in mesh], "files": "rank-{rank}.safetensors",
                              "unmatched": "error", "tensors": rules}
    return checkpoint
