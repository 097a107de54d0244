# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.convert SOURCE OUT: other people's checkpoints as dumps; with --tp and the like, or a source of
safetensors files: split over ranks, or merged."""

from __future__ import annotations

import argparse
import os
import re
import sys
import typing

from anyrank._errors import AnyrankError
from anyrank.convert import convert, resharding, shards

_CONVERTS = ("full", "weights", "suffix", "step", "placeholder")
_RESHARDS = ("tp", "pp", "ep", "virtual_stages", "stages", "embedding_hidden", "pad_vocab", "shard_size", "map",
             "config")


def _shard(text: str) -> tuple[str, int | None]:
    glob, equals, dim = text.rpartition("=")
    if not equals or not glob or not (dim == "copy" or dim.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected GLOB=DIMENSION or GLOB=copy")
    return glob, None if dim == "copy" else int(dim)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected layers of each stage, as 3,5,4")
    return [int(part) for part in text.split(",")]


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([kMGT]i?)?B?", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes above 0, as 5GB or 500MiB")
    unit = found[2] or ""
    return int(found[1]) * int((1024 if "i" in unit else 1000) ** (" kMGT".index(unit[0]) if unit else 0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m anyrank.convert", description="Writes a checkpoint of "
                                     "torch.distributed.checkpoint, DeepSpeed or Megatron, or a dump of SGLang, as a "
                                     "dump for anyrank verify: nothing that is pickled in it is run, and torch is not "
                                     "needed. Splits checkpoints of safetensors files over ranks, and merges them.",
                                     argument_default=argparse.SUPPRESS)
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint's folder")
    parser.add_argument("out", metavar="OUT", nargs="?", help="a new folder; with --full a new file where it ends in "
                        ".safetensors")
    parser.add_argument("--out", metavar="OUT", dest="folder", help="the same")
    parser.add_argument("--shard", type=_shard, action="append", metavar="GLOB=DIM",
                        help="how tensor-parallel ranks cut a tensor whose name is not known: a dimension, or copy")
    foreign = parser.add_argument_group("checkpoints of other programs")
    foreign.add_argument("--full", action="store_true", help="full tensors in one file, not a file of each rank")
    foreign.add_argument("--weights", choices=("master", "model"),
                       help="fp32 master copies where there are any (the default), or what the model computes with")
    foreign.add_argument("--suffix", choices=("new", "init"), help="name weights NAME:new or NAME:init, not NAME")
    foreign.add_argument("--step", type=int, metavar="N", help="add @N to the names of weights and optimizer states")
    foreign.add_argument("--placeholder", action="append", metavar="MODULE.CLASS",
                       help="a pickled class that holds no weights, to be read as inert data")
    split = parser.add_argument_group("splitting and merging", "Without --tp, --pp and --ep the output is a Hugging "
                                      "Face folder.")
    split.add_argument("--tp", type=_count, metavar="N", help="tensor-parallel ranks")
    split.add_argument("--pp", type=_count, metavar="N", help="pipeline ranks")
    split.add_argument("--ep", type=_count, metavar="N", help="ranks that share out a layer's experts")
    split.add_argument("--virtual-stages", type=_count, metavar="N", help="with --pp: stages that each rank has")
    split.add_argument("--stages", type=_numbers, metavar="LIST", help="with --pp: layers of each stage, as 3,5,4 "
                       "(default: evenly)")
    split.add_argument("--embedding-hidden", action="store_true", help="split the embedding along the hidden dimension")
    split.add_argument("--pad-vocab", type=_count, metavar="N", help="add rows of zeros to the vocabulary, up to a "
                       "multiple of N")
    split.add_argument("--shard-size", type=_bytes, metavar="BYTES", help="merged: the most tensors of one file, as "
                       "5GB (the default) or 500MiB")
    split.add_argument("--map", metavar="FILE", help="how the files of SOURCE fit together, where they do not say")
    split.add_argument("--config", metavar="FILE", help="config.json, or a folder with one (default: that of SOURCE)")
    return parser


def _reshards(source: str, options: typing.Mapping[str, typing.Any]) -> bool:
    """Whether a source is to be split or merged: an option says so, or its files are safetensors and not PyTorch's."""
    if any(name in options for name in _RESHARDS):
        return True
    if not os.path.isdir(source):
        return source.endswith((".safetensors", ".json"))
    return not shards.list_files(source) and any(name.endswith(".safetensors") for folder in ("", "latest")
                                                 if os.path.isdir(os.path.join(source, folder))
                                                 for name in os.listdir(os.path.join(source, folder)))


def _run(source: str, out: str, options: dict[str, typing.Any]) -> None:
    shard = dict(options.pop("shard", []))
    if _reshards(source, options):
        wrong = [name for name in _CONVERTS if name in options]
        if wrong:
            raise AnyrankError(f"--{wrong[0]} is for checkpoints of other programs, and {source} is split or merged")
        result = resharding.reshard(source, out, shard=shard, **options)
        for note in result.notes:
            print(f"note: {note}")
        print(f"{result.path}: {result.layout}: {result.tensors} tensors, {result.bytes:,} bytes, in {result.files} "
              f"file{'s' if result.files != 1 else ''}")
        return
    dump = convert(source, out, shard=shard, placeholders=options.pop("placeholder", ()), **options)
    for note in dump.notes:
        print(f"note: {note}")
    files = "one file of full tensors" if dump.ranks == 0 else f"the files of {dump.ranks} ranks"
    print(f"{dump.path}: {dump.kind}: {dump.tensors} tensors, {dump.bytes:,} bytes, as {files}")
    if dump.map:
        print(f"compare with: anyrank verify REFERENCE {dump.path} --map {dump.map}" if dump.needs_map else
              f"{dump.map}: a mapping to the names of Hugging Face, for anyrank verify --map")


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 2 for a source that cannot be read, as of the command."""
    parser = _parser()
    options = vars(parser.parse_intermixed_args(arguments))
    out, folder = options.pop("out", None), options.pop("folder", None)
    if (out is None) == (folder is None):
        parser.error("give OUT, a new folder" if out is None else "give OUT or --out, not both")
    try:
        _run(options.pop("source"), out or folder, options)
    except (AnyrankError, OSError) as error:
        print(f"anyrank convert: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
