# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.convert SOURCE OUT: other people's checkpoints as dumps."""

from __future__ import annotations

import argparse
import sys

from anyrank._errors import AnyrankError
from anyrank.convert import convert


def _shard(text: str) -> tuple[str, int | None]:
    glob, equals, dim = text.rpartition("=")
    if not equals or not glob or not (dim == "copy" or dim.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected GLOB=DIMENSION or GLOB=copy")
    return glob, None if dim == "copy" else int(dim)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 2 for a source that cannot be read, as of the command."""
    parser = argparse.ArgumentParser(prog="python -m anyrank.convert", description="Writes a checkpoint of "
                                     "torch.distributed.checkpoint, DeepSpeed or Megatron, or a dump of SGLang, as a "
                                     "dump for anyrank verify. Nothing that is pickled in it is run, and torch is not "
                                     "needed.")
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint's folder")
    parser.add_argument("out", metavar="OUT", help="a new folder; with --full a new file where it ends in .safetensors")
    parser.add_argument("--full", action="store_true", help="full tensors in one file, not a file of each rank")
    parser.add_argument("--weights", choices=("master", "model"), default="master",
                        help="fp32 master copies where there are any (the default), or what the model computes with")
    parser.add_argument("--suffix", choices=("new", "init"), default="",
                        help="name weights NAME:new or NAME:init, not NAME")
    parser.add_argument("--step", type=int, metavar="N", help="add @N to the names of weights and optimizer states")
    parser.add_argument("--shard", type=_shard, action="append", default=[], metavar="GLOB=DIM",
                        help="how tensor-parallel files cut a tensor, where they do not say: a dimension, or copy")
    parser.add_argument("--placeholder", action="append", default=[], metavar="MODULE.CLASS",
                        help="a pickled class that holds no weights, to be read as inert data")
    given = parser.parse_args(arguments)
    try:
        done = convert(given.source, given.out, full=given.full, weights=given.weights, suffix=given.suffix,
                       step=given.step,
                       shard=dict(given.shard), placeholders=given.placeholder)
    except (AnyrankError, OSError) as error:
        print(f"anyrank convert: {error}", file=sys.stderr)
        return 2
    for note in done.notes:
        print(f"note: {note}")
    held = "one file of full tensors" if done.ranks == 0 else f"the files of {done.ranks} ranks"
    print(f"{done.path}: {done.kind}: {done.tensors} tensors, {done.bytes:,} bytes, as {held}")
    if done.map:
        print(f"compare with: anyrank verify REFERENCE {done.path} --map {done.map}" if done.needs_map else
              f"{done.map}: a mapping to the names of Hugging Face, for anyrank verify --map")
    return 0


if __name__ == "__main__":
    sys.exit(main())
