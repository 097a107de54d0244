# SPDX-License-Identifier: Apache-2.0
"""Other people's checkpoints and dumps as dumps of anyrank (pytorch.md, "Checkpoints of other programs").

    anyrank.convert("checkpoint/step-100", "converted")     # or python -m anyrank.convert checkpoint/step-100 converted
    anyrank verify other converted

Reads torch.distributed.checkpoint's folders (.distcp, sharded safetensors), DeepSpeed's (ZeRO stages 0 to 3, universal
ones), Megatron's (torch_dist, and mp_rank_XX/model_optim_rng.pt) and the dumps of SGLang's dumper. Most files are
pickles: they are read without running any of it, and without torch. Bits are copied, never computed, and of each file
no more than a tensor is in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import sys
import tempfile
import types
import typing

from anyrank._errors import AnyrankError, path_name
from anyrank.convert import _pieces, shards

Path = typing.Union[str, "os.PathLike[str]"]


@dataclasses.dataclass(frozen=True)
class Converted:
    """What convert() wrote. `map`: a mapping file next to the dump's own, None where there is none; `needs_map`: the
    dump is only put together with it (--map)."""

    path: str
    kind: str
    tensors: int
    ranks: int  # 0: one file with full tensors
    bytes: int
    notes: tuple[str, ...]
    map: str | None = None
    needs_map: bool = False


def _find(folder: str) -> tuple[str, str] | None:
    """Which reader's a folder is, and the folder that is to be read; None: nobody's."""
    found = _find_all(folder)
    if len(found) > 1:
        raise several(folder, [os.path.basename(path) for _, path in found])
    if not found and shards.list_files(folder):
        return "shards", folder
    return found[0] if found else None


def several(folder: str, inner: typing.Sequence[str]) -> AnyrankError:
    return AnyrankError(f"{folder}: holds several checkpoints: give one of them: {', '.join(inner[:8])}")


def _find_all(folder: str) -> list[tuple[str, str]]:
    """The same of all checkpoints that a folder holds."""
    names = sorted(os.listdir(folder))
    latest = next((name for name in ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
                   if name in names), None)
    if latest:
        with open(os.path.join(folder, latest), encoding="utf-8", errors="replace") as file:
            named = file.read(200).strip().replace("\0", "?")
        inside = os.path.join(folder, f"iter_{int(named):07d}" if named.isdecimal() else named)
        if named not in ("", ".", "..") and not os.path.dirname(named) and os.path.isdir(inside):
            return _find_all(inside)
        if latest != "latest" or named.startswith("global_step"):  # this program's own checkpoints have a `latest` too
            raise AnyrankError(f"{folder}: {latest} names {named!r}, and there is no such checkpoint in the folder")
    if any(name.endswith(".distcp") for name in names) or ".metadata" in names:
        megatron = "common.pt" in names or "metadata.json" in names
        return [("megatron_dist" if megatron else "dcp", folder)]
    if any(re.match(r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_|mp_rank_\d+_model_states\.pt", name)
           for name in names):
        return [("deepspeed", folder)]
    if any(re.fullmatch(r"mp_rank_\d+(_\d+)?(_\d+)?", name) for name in names):
        return [("megatron", folder)]
    if any("___rank=" in name and name.endswith(".pt") for name in names):
        return [("sglang", folder)]
    steps = [name for name in names if re.fullmatch(r"global_step\d+|iter_\d+", name)]
    if len(steps) > 1:
        raise several(folder, steps)
    inner = steps or [name for name in names if os.path.isfile(os.path.join(folder, name, ".metadata"))]
    return [found for name in inner for found in _find_all(os.path.join(folder, name))]


def is_foreign(path: Path) -> bool:
    """Whether what is there has to be converted: a folder of another program's checkpoint or dump, and none of
    safetensors files, which are read as they are, whatever lies beside them (transformers' Trainer under DeepSpeed)."""
    folder = path_name(path)
    if not os.path.isdir(folder) or any(name.endswith((".safetensors", ".safetensors.index.json"))
                                        for name in os.listdir(folder)):
        return False
    return _find(folder) is not None


def convert(source: Path, out: Path, *, full: bool = False, weights: str = "master", suffix: str = "",
            step: int | None = None, shard: typing.Mapping[str, int | None] | None = None,
            placeholders: typing.Collection[str] = ()) -> Converted:
    """Writes a checkpoint of another program as a dump.

    source        the checkpoint's folder, or the one with `latest` in it
    out           a new folder, with a file of each rank that wrote the checkpoint and the place of what it holds; with
                  full, one file of full tensors: out itself where it ends in .safetensors, else out/model.safetensors
    weights       "master": the fp32 copies of parameters, where there are any; "model": what the model computes with
    suffix, step  names of weights: NAME; with suffix "new" or "init" NAME:new, NAME:init. Optimizer states are NAME:m
                  and NAME:v. From step 2 on, @STEP is added. models.md
    shard         of tensor-parallel files that do not say how they are cut: {glob: dimension, or None for a copy}
    placeholders  full names of classes that may stand in the pickles and hold no weights

    Raises AnyrankError: what is wrong, in which file; then `out` is not there.
    """
    source, out = path_name(source), path_name(out)
    if weights not in ("master", "model") or suffix not in ("", "new", "init"):
        raise ValueError(f"weights {weights!r} has to be 'master' or 'model', suffix {suffix!r} '', 'new' or 'init'")
    if not os.path.isdir(source):
        raise AnyrankError(f"{source}: is no folder; a checkpoint is given as its folder")
    found = _find(source)
    if found is None:
        raise AnyrankError(f"{source}: is no checkpoint of torch.distributed.checkpoint, DeepSpeed or Megatron, and "
                           f"no dump of SGLang: there is no .metadata, *_model_states.pt, mp_rank_XX, "
                           f"shard-*-model-*.safetensors or *___rank=*.pt in it")
    kind, folder = found
    try:
        checkpoint = _read(kind, folder, shard or {}, placeholders)
        pieces = _pieces.choose(checkpoint.pieces, weights)
        checkpoint.pieces = [_pieces.rename(piece, suffix, step) for piece in pieces]
        if full and checkpoint.needs_map:
            raise AnyrankError(f"{source}: {checkpoint.kind}: full tensors need the mapping; convert without full, and "
                               "compare with --map")
        return _write(checkpoint, out, full)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise AnyrankError(f"{folder}: damaged, or of a version that is not known: what is pickled in it is not made "
                           f"as checkpoints of this kind are ({type(error).__name__}: {error})") from error


def _read(kind: str, folder: str, shard: typing.Mapping[str, int | None],
          placeholders: typing.Collection[str]) -> _pieces.Checkpoint:
    module = importlib.import_module(f"anyrank.convert.{'megatron' if kind == 'megatron_dist' else kind}")
    if kind in ("deepspeed", "megatron"):
        return typing.cast(_pieces.Checkpoint, module.read(folder, placeholders, shard))
    if shard:
        raise AnyrankError(f"{folder}: its files say themselves how tensors are cut; shard is for those that do not")
    reader = module.read_dist if kind == "megatron_dist" else module.read
    return typing.cast(_pieces.Checkpoint, reader(folder, placeholders))


def _write(checkpoint: _pieces.Checkpoint, out: str, full: bool) -> Converted:
    tensors = len({piece.name for piece in checkpoint.pieces})
    ranks = len({piece.rank for piece in checkpoint.pieces})
    if full and out.endswith(".safetensors"):
        if os.path.lexists(out):
            raise AnyrankError(f"{out}: is there already; give the name of a new file")
        size = _pieces.write_full(checkpoint, out)
        return Converted(out, checkpoint.kind, tensors, 0, size, tuple(checkpoint.notes))
    with _pieces.new_folder(out) as folder:
        if full:
            size = _pieces.write_full(checkpoint, os.path.join(folder, "model.safetensors"))
        else:
            size = _pieces.write_ranks(checkpoint, folder)
        if checkpoint.mapping:
            with open(os.path.join(folder, "map.json"), "w", encoding="utf-8") as file:
                json.dump(checkpoint.mapping, file, indent=1)
                file.write("\n")
    return Converted(out, checkpoint.kind, tensors, 0 if full else ranks, size, tuple(checkpoint.notes),
                     os.path.join(out, "map.json") if checkpoint.mapping else None, checkpoint.needs_map)


@contextlib.contextmanager
def as_dump(path: Path, **options: typing.Any) -> typing.Iterator[tuple[str, str | None]]:
    """The path of a dump and the mapping file that it needs, or None: `path` itself, or a conversion of it in a
    temporary folder that is removed at the end. options: of convert()."""
    if not is_foreign(path):
        yield os.fspath(path), None
        return
    with tempfile.TemporaryDirectory(prefix="anyrank-convert-") as folder:
        dump = convert(path, os.path.join(folder, os.path.basename(os.path.abspath(path))), **options)
        yield dump.path, dump.map if dump.needs_map else None


class _Module(types.ModuleType):
    """So that anyrank.convert(...) is the function, and `from anyrank.convert import as_dump` works too."""

    def __call__(self, source: Path, out: Path, **options: typing.Any) -> Converted:
        return convert(source, out, **options)


sys.modules[__name__].__class__ = _Module
