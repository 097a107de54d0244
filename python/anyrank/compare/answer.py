# SPDX-License-Identifier: Apache-2.0
"""Compares the runs of a script and prints the result."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import typing

from anyrank._command import run_words
from anyrank._errors import AnyrankError
from anyrank._terminal import printable, say
from anyrank.compare import batches
from anyrank.compare.options import Options, parse
from anyrank.compare.runs import Result, new_folder, run_script

SHOWN_FILES = 6  # files written by a script that are named
RTOL, ATOL = "1e-4", "1e-5"  # where rounding could not be measured: fp32, other orders of sums
TOLERANCES = ("--rtol", RTOL, "--atol", ATOL)
NOTES = 6  # notes of a run that are shown


class Progress:
    """A line on standard error that is drawn again for each report: at most one a second without a terminal."""

    def __init__(self, quiet: bool) -> None:
        self.is_quiet, self.is_terminal, self.width, self.label = quiet, sys.stderr.isatty(), 0, ""

    def show(self, text: str) -> None:
        if self.is_quiet:
            return
        if self.is_terminal:
            print("\r" + text.ljust(self.width), end="", file=sys.stderr, flush=True)
            self.width = len(text)
        elif (label := text.split(",")[0]) != self.label:
            say(f"{label} ..", file=sys.stderr)
            self.label = label

    def clear(self) -> None:
        if self.width:
            print("\r" + " " * self.width + "\r", end="", file=sys.stderr, flush=True)
            self.width = 0


def run(words: typing.Sequence[str] | None) -> int:
    """Runs the command. Returns the exit status."""
    options = parse(sys.argv[1:] if words is None else words)
    progress = Progress(options.quiet)
    folder: pathlib.Path | None = None
    status = 2
    try:
        folder = new_folder(options)
        results = _run_all(options, folder, progress)
        status = _compare_all(options, results, folder, progress)
    except AnyrankError as error:
        progress.clear()
        message, *further = str(error).split("\n")
        say(f"anyrank compare: {message}", *further, file=sys.stderr)
        status = error.exit_status or 2
    except KeyboardInterrupt:
        progress.clear()
        say("anyrank compare: interrupted; all processes are ended", file=sys.stderr)
        status = 130
    except OSError as error:
        progress.clear()
        say(f"anyrank compare: {error.filename or folder}: {error.strerror}", file=sys.stderr)
        status = 3
    finally:
        progress.clear()
        if folder is not None and options.out is None and status != 1:
            shutil.rmtree(folder, ignore_errors=True)
    return status


def _run_all(options: Options, folder: pathlib.Path, progress: Progress) -> list[Result]:
    results: list[Result] = []
    for each_run in options.runs:
        weights = results[0].dump if results and options.same_weights else None
        # Rounding is measured in the reference, which repeats its passes for that. Ranks of a parallel run cannot.
        capture = {"rounding": True} if not results and not options.has_rule and each_run.ranks == 1 else {}
        results.append(run_script(options, each_run, folder / each_run.name, weights, capture, progress.show))
    progress.clear()
    return results


# --- the comparison ---------------------------------------------------------------------------------------------------


def _rule(options: Options, reference: Result) -> list[str]:
    """Returns the rule of the comparison: the user's, else what rounding changes as measured in the reference, else
    fixed tolerances."""
    if options.has_rule:
        return list(options.verify)
    measured = reference.dump / "allowed.safetensors"
    return [*options.verify, *(("--rounding",) if measured.exists() else TOLERANCES)]


def _compare_all(options: Options, results: list[Result], folder: pathlib.Path, progress: Progress) -> int:
    reference, status, answers, repeated = results[0], 0, [], False
    for candidate in results[1:]:
        words = [*_rule(options, reference), "--no-color", "--", str(reference.dump), str(candidate.dump)]
        progress.show(f"comparing {reference.run.label} with {candidate.run.label}")
        finished = run_words("verify", words)
        unjudged = finished.data.get("unjudged", []) if finished.data["result"] == "unjudged" else []
        if unjudged and not options.has_rule:
            # A ReLU that rounding turns over may change a gradient by all of it. Fixed tolerances need no measurement.
            with_tolerances = run_words("verify", [*options.verify, *TOLERANCES, *words[words.index("--no-color"):]])
            finished = with_tolerances if with_tolerances.exit_status == 0 else finished
        first_sentences = batches.judge(reference, candidate, finished.data, options)
        if finished.exit_status == 1 and not first_sentences and not options.capture.get("operations"):
            missing = [candidate] if repeated else [reference, candidate]
            repeated = _record_operations(options, missing, folder, progress)
            finished = run_words("verify", words) if repeated else finished
        progress.clear()
        _print(options, reference, candidate, finished, first_sentences)
        if unjudged and finished.exit_status == 0:
            say(f"note: rounding was measured, but it may change {unjudged[0]} by all of it, so rtol {RTOL} and atol "
                f"{ATOL} are used")
        answers.append({"reference": reference.run.label, "other": candidate.run.label,
                        "result": finished.data["result"], "first": first_sentences, "verify": finished.data})
        status = max(status, finished.exit_status)
    if len(options.runs) == 2 and options.runs[0].python != options.runs[1].python:
        for line in _versions(options.runs[0].python, options.runs[1].python):
            say(line)
    for result in results:
        _print_files(result)
    if options.out is not None or status == 1:
        say(f"dumps and output: {folder}")
    if options.json:
        text = json.dumps({"tool": "anyrank", "command": "compare", "result": "different" if status else "same",
                           "runs": [_run_json(result) for result in results], "comparisons": answers}, indent=1)
        if options.json == "-":
            print(text)
        else:
            part = pathlib.Path(f"{options.json}.part")
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, options.json)
    return status


def _record_operations(options: Options, results: typing.Sequence[Result], folder: pathlib.Path,
                       progress: Progress) -> bool:
    """Runs scripts once more with a record of their operations, by which verify finds the first wrong one. Returns
    false if a run fails or its record is missing."""
    from anyrank.capture._operations import FOLDER

    again = folder / "again"
    try:
        for result in results:
            weights = folder / options.runs[0].name / "dump" if options.same_weights and result.run != options.runs[0] \
                else None
            repeat = run_script(options, result.run, again, weights, {"operations": True}, lambda text: progress.show(
                f"recording operations, {text}"))
            shutil.rmtree(result.dump / FOLDER, ignore_errors=True)
            (repeat.dump / FOLDER).rename(result.dump / FOLDER)
        return True
    except (OSError, AnyrankError):
        return False
    finally:
        shutil.rmtree(again, ignore_errors=True)


def _run_json(result: Result) -> dict[str, typing.Any]:
    return {"label": result.run.label, "ranks": result.run.ranks, "seconds": round(result.seconds, 2),
            "models": result.reports[0]["models"] if result.reports else [], "notes": result.notes(),
            "files": result.files, "dump": str(result.dump)}


def _print(options: Options, reference: Result, candidate: Result, finished: typing.Any,
           first_sentences: typing.Sequence[str]) -> None:
    """Prints the answer: the sentences that come first, then verify's report."""
    model = ", ".join(candidate.reports[0]["models"]) if candidate.reports else ""
    say(f"{candidate.run.label} against {reference.run.label}: {model}, {options.steps} "
        f"step{'s' if options.steps > 1 else ''}")
    for sentence in first_sentences:
        say(sentence)
    print(finished.text.rstrip("\n"))
    notes = [_plain(result, note) for result in (reference, candidate) for note in result.notes()[:NOTES]]
    for note in dict.fromkeys(notes):
        say(f"note: {printable(note)}")


def _plain(result: Result, note: str) -> str:
    """Rewrites a capture's note for a user who did not call capture."""
    note = note.replace(f"{result.dump}: ", "")
    if note.startswith("rounding=True: "):
        note = f"{note.partition(': ')[2]}, so rtol {RTOL} and atol {ATOL} are used"
    return note


def _print_files(result: Result) -> None:
    if result.files:
        shown = ", ".join(result.files[:SHOWN_FILES])
        more = f" and {len(result.files) - SHOWN_FILES} more" if len(result.files) > SHOWN_FILES else ""
        say(f"the script wrote, with {result.run.label}: {shown}{more} (in a folder of its own)")


# --- versions ---------------------------------------------------------------------------------------------------------


LIST = ("import importlib.metadata as m, json, platform\n"  # of two versions, Python imports the first that it finds
        "names = {d.metadata['Name'] for d in m.distributions()} - {None}\n"
        "print(json.dumps({'python': platform.python_version(), **{name: m.version(name) for name in names}}))")


def _versions(old: str, new: str) -> list[str]:
    """Lists the packages that two Pythons have in different versions."""
    packages = []
    for python in (old, new):
        done = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=False)
        packages.append(json.loads(done.stdout) if done.returncode == 0 else {})
    lines = [f"  {name:<24} {packages[0].get(name, '-'):<16} {packages[1].get(name, '-')}"
             for name in sorted({*packages[0], *packages[1]}, key=str.lower)
             if packages[0].get(name) != packages[1].get(name)]
    return ["packages that differ:", *lines] if lines else ["both environments have the same packages"]
