# SPDX-License-Identifier: Apache-2.0
"""What holds in every right run, without a reference: `python -m anyrank.watch RUN` of a run that capture(..,
keep="sketch") has written, and anyrank.watch(model, optimizer, every=100) beside one that runs. watch.md has the rules.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import types
import typing

from anyrank._errors import AnyrankError
from anyrank._library import given_json, library
from anyrank.explain.words import counted
from anyrank.watch_rules import Entry, Finding, Watched

if typing.TYPE_CHECKING:
    from anyrank.capture._watch import Watch

# --- a finished run ---------------------------------------------------------------------------------------------------


def watched_of(folder: str | os.PathLike[str]) -> tuple[list[Finding], list[str]]:
    """What is wrong in a run whose tensors are sketched, and what is odd. Raises AnyrankError for a folder that has
    none."""
    path = pathlib.Path(folder)
    run = given_json(library()["sketches_json"](os.fsencode(path)))
    facts: typing.Any = {}
    if (path / "model.json").is_file():
        facts = json.loads((path / "model.json").read_text(encoding="utf-8"))
    watched, states = Watched(facts), states_of(path)
    steps: dict[int, list[Entry]] = {}
    for entry in run["tensors"]:
        steps.setdefault(entry["step"], []).append(entry)
    found = [one for number, entries in sorted(steps.items())
             for one in watched.step(number, entries, states.get(number, ()))]
    return found, watched.notes


def states_of(folder: pathlib.Path) -> dict[int, list[typing.Any]]:
    """What each rank says of itself in the steps of a run that sketches_json has read, with its place in the mesh."""
    found: dict[int, list[typing.Any]] = {}
    for path in sorted(folder.glob("rank-*.sketch")):
        with open(path, "rb") as file:
            file.seek(16)  # sketch.h has the format
            while len(head := file.read(24)) == 24:
                length, said = (int.from_bytes(head[i:i + 8], "little") for i in (0, 16))
                text = file.read(said)
                if len(text) < said:
                    break
                whole = json.loads(text)
                place = {name: i for (name, _), i in zip(whole["mesh"], whole.get("at", ()))}
                found.setdefault(whole["step"], []).append({**whole.get("state", {}), "rank": whole["rank"],
                                                            "at": place})
                file.seek(length - 8 - said, os.SEEK_CUR)
    return found


def main(words: typing.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m anyrank.watch", description="What is wrong in a run, without a "
                                     "reference: by the sketches that capture(.., keep=\"sketch\") has written.")
    parser.add_argument("run", help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(words)
    try:
        found, notes = watched_of(args.run)
    except AnyrankError as error:
        print(f"anyrank.watch: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"findings": [dataclasses.asdict(one) for one in found], "notes": notes}, indent=1))
    else:
        print(*found, *(f"note: {text}" for text in notes), f"{counted(len(found), 'finding')} in {args.run}", sep="\n")
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
