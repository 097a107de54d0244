# SPDX-License-Identifier: Apache-2.0
"""What holds in every right run, without a reference: `python -m anyrank.watch RUN` of a run that capture(..,
keep="sketch") has written, and anyrank.watch(model, optimizer, every=100) beside one that runs. watch.md has the rules.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import sys
import types
import typing

from anyrank._errors import AnyrankError, path_name
from anyrank._input import (anything, folded_names, integer, list_of, nullable, number, open_file, parse_json, parsed,
                            record, string)
from anyrank._library import given_json, library
from anyrank._terminal import Parser, refuse, say
from anyrank.explain.facts import FILE, read_model
from anyrank.explain.words import counted
from anyrank.watch_rules import Entry, Finding, Watched

if typing.TYPE_CHECKING:
    from anyrank.capture._watch import Watch

# --- a finished run ---------------------------------------------------------------------------------------------------

MAGIC_BYTES, HEAD_BYTES = 16, 24  # sketch.h has the format
_FIGURE = number(-math.inf, math.inf, words=True)
_ENTRY = record({
    "name": string, "step": integer(1), "digest": string, "shape": list_of(integer(0)), "zeros": integer(),
    "nan": integer(), "inf": integer(), "sum": _FIGURE, "sum_squares": number(0.0, math.inf, words=True),
    "max_abs": _FIGURE, "differing": integer(), "left_out": string})
_RUN = record({"ranks": integer(0), "tensors": list_of(_ENTRY)})
_STATE = record({}, {
    "parts": integer(), "rates": list_of(list_of(anything)), "zero_rate": folded_names,
    "updates": list_of(nullable(integer())), "scale": number(), "samples": integer(), "random": integer(),
    "clipped": integer(), "weights": integer(), "saved": list_of(integer()), "data": list_of(string),
    "unsaid": list_of(string), "schedules": list_of(list_of(nullable(integer()), 3))})


def _dimension(value: typing.Any) -> tuple[str, int]:
    """Checks a dimension of the mesh: its name and size."""
    pair = list_of(anything, 2)(value)
    return string(pair[0]), integer(1)(pair[1])


_RECORD = record({"step": integer(1), "rank": integer(0), "mesh": list_of(_dimension)},
                 {"at": list_of(integer(0)), "state": _STATE})


def tensors_of(folder: str | os.PathLike[str]) -> tuple[list[Entry], int]:
    """Returns the tensors of a run's sketches in order, and the number of ranks. Errors: AnyrankError for a folder
    without sketches."""
    run = parsed(given_json(library()["sketches_json"](os.fsencode(path_name(folder)))), _RUN, path_name(folder))
    return run["tensors"], run["ranks"]


def watched_of(folder: str | os.PathLike[str]) -> tuple[list[Finding], list[str]]:
    """Finds what is wrong or odd in a run whose tensors are sketched. Errors: AnyrankError for a folder without
    sketches."""
    path = pathlib.Path(path_name(folder))
    entries, ranks = tensors_of(path)
    watched, states = Watched(read_model(path / FILE) if os.path.lexists(path / FILE) else {}), states_of(path, ranks)
    steps: dict[int, list[Entry]] = {}
    for entry in entries:
        steps.setdefault(entry["step"], []).append(entry)
    found = [finding for number, step_entries in sorted(steps.items())
             for finding in watched.step(number, step_entries, states.get(number, ()))]
    return found, watched.notes


def states_of(folder: pathlib.Path, ranks: int) -> dict[int, list[typing.Any]]:
    """Returns what each rank recorded about itself in the steps of a run that tensors_of() has read, with the rank's
    place in the mesh."""
    found: dict[int, list[typing.Any]] = {}
    for rank in range(ranks):
        path = folder / f"rank-{rank:05d}.sketch"
        for number, document in enumerate(_records_of(path), 1):
            source = f"{path}: record {number}"
            rank_record = parsed(parse_json(document, source), _RECORD, source)
            place = {name: i for (name, _), i in zip(rank_record["mesh"], rank_record.get("at", ()))}
            found.setdefault(rank_record["step"], []).append(
                {**rank_record.get("state", {}), "rank": rank, "at": place}
            )
    return found


def _records_of(path: pathlib.Path) -> typing.Iterator[bytes]:
    """Yields the text of each record, up to the last whole one."""
    with open_file(path) as file:
        size, offset = os.fstat(file.fileno()).st_size, MAGIC_BYTES
        while offset + HEAD_BYTES <= size:
            file.seek(offset)
            length, digest, text_bytes = (int.from_bytes(file.read(8), "little") for _ in range(3))
            end = offset + 16 + length
            if end > size or text_bytes + 8 > length:
                return
            if end == size and not _is_whole(file, offset + 16, length, digest):
                return
            file.seek(offset + HEAD_BYTES)
            yield file.read(text_bytes)
            offset = end


def _is_whole(file: typing.BinaryIO, offset: int, length: int, digest: int) -> bool:
    """Returns whether the last record is complete. The library has read the earlier ones, and refuses incomplete
    ones."""
    file.seek(offset)
    data = file.read(length)
    return bool(library()["sketch_hash"](data, len(data)) == digest)


def main(words: typing.Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m anyrank.watch", description="What is wrong in a run, without a "
                    "reference: by the sketches that capture(.., keep=\"sketch\") has written.")
    parser.add_argument("run", help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(words)
    try:
        found, notes = watched_of(args.run)
    except AnyrankError as error:
        return refuse("anyrank.watch", error)
    if args.json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in found], "notes": notes}, indent=1))
    else:
        say(*map(str, found), *(f"note: {text}" for text in notes), f"{counted(len(found), 'finding')} in {args.run}")
    return 1 if found else 0


def watch(model: typing.Any, optimizer: typing.Any = None, **further: typing.Any) -> Watch:
    """with anyrank.watch(model, optimizer, every=100): train(). Watch has the arguments."""
    from anyrank.capture._watch import Watch as Live  # which needs torch

    return Live(model, optimizer, **further)


class _Callable(types.ModuleType):
    def __call__(self, *args: typing.Any, **further: typing.Any) -> Watch:
        return watch(*args, **further)


if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__].__class__ = _Callable
