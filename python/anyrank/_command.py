# SPDX-License-Identifier: Apache-2.0
"""Finds the anyrank command and runs it.

Runs are processes of their own: Ctrl-C ends them, their memory is given back, and what the calling program chose for
its own arithmetic (flushing denormals, OpenMP's threads) does not reach them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import typing

from anyrank._arguments import option_words
from anyrank._errors import AnyrankError, path_name
from anyrank._progress import Progress, progress_of

PACKAGE = pathlib.Path(__file__).resolve().parent


def own_command() -> str | None:
    """Returns the wheel's command or, in a tree of the sources, the command that was built there; None if there is
    none."""
    for path in (PACKAGE / "bin" / "anyrank", PACKAGE.parents[1] / "build" / "anyrank"):
        if os.access(path, os.X_OK):
            return str(path)
    return None


def find_command() -> str:
    """$ANYRANK; else the package's own; else one on the path."""
    found = os.environ.get("ANYRANK") or own_command() or shutil.which("anyrank")
    if found is None:
        raise AnyrankError("there is no anyrank command: install the wheel, run ./quickstart in the sources, or set "
                           "ANYRANK to its path")
    return found


def environment() -> dict[str, str]:
    """Returns the command's environment, in which the command asks this Python for causes if it has numpy."""
    defaults = {"ANYRANK_PYTHON": sys.executable} if sys.executable and importlib.util.find_spec("numpy") else {}
    return {**defaults, **os.environ}


class Finished(typing.NamedTuple):
    """A run that came to a result: its command line, status 0 or 1, JSON, and what it printed."""

    words: tuple[str, ...]
    exit_status: int
    data: dict[str, typing.Any]
    text: str


def run(command: str, positionals: typing.Sequence[str | os.PathLike[str]] = (),
        options: typing.Mapping[str, object] | None = None, progress: Progress = None) -> Finished:
    """Runs `anyrank COMMAND` and reads its JSON.

    progress: None, True (a line on a terminal or in a notebook), or a function of (fraction or None, text).
    Errors: TypeError for options that the command does not have; AnyrankError with the command's message for exit
    status 2 (usage, input) and 3 (the machine), a signal, a command that is not there. Any exception while it runs,
    KeyboardInterrupt above all, ends the process and all it started before it is raised.
    """
    words = [*option_words(command, options or {}), "--no-color"]
    files = [path_name(path) for path in positionals]
    return run_words(command, [*words, "--", *files], progress)


def run_words(command: str, words: typing.Sequence[str], progress: Progress = None) -> Finished:
    """Runs a command given as words of the command line."""
    program = find_command()
    for word in words:
        if "\0" in word:
            raise AnyrankError(f"{command}: {word!r}: an argument has no byte 0")
    with tempfile.TemporaryDirectory(prefix="anyrank-run-") as folder:
        result = pathlib.Path(folder, "result.json")
        status, text, messages = _wait(program, [command, f"--json={result}", *words], folder, progress)
        data = _read(result)
    if status not in (0, 1) or data is None:
        raise AnyrankError(_message(program, command, status, messages), status)
    if data.get("tool") != "anyrank" or data.get("command") != command:
        raise AnyrankError(f"{program}: its JSON is not that of anyrank {command}: is it another program, or version?")
    return Finished((command, *words), status, data, text)


def _wait(program: str, words: list[str], folder: str, progress: Progress) -> tuple[int, str, str]:
    """Runs a program to its end: its status, and what it printed to standard output and to standard error."""
    read_end, write_end = os.pipe()
    texts = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
    with os.fdopen(read_end, "r", encoding="utf-8", errors="replace") as lines:
        try:
            with open(texts[0], "wb") as out, open(texts[1], "wb") as err:
                # Its own session: Ctrl-C of a terminal reaches it once, by way of this process.
                child = subprocess.Popen([program, words[0], f"--progress-fd={write_end}", *words[1:]],
                                         stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=(write_end,),
                                         start_new_session=True, env=environment())
        except OSError as error:
            raise AnyrankError(f"{program}: {error.strerror}: this is what ANYRANK, the wheel or the tree names as the "
                               "anyrank command") from None
        finally:
            os.close(write_end)
        try:
            with progress_of(progress) as show:
                for line in lines:
                    show(line)
                child.wait()
        except BaseException:
            _end(child, lines)
            raise
    out_text, err_text = (path.read_text(encoding="utf-8", errors="replace") for path in texts)
    return child.returncode, out_text, err_text


def _end(child: subprocess.Popen[bytes], lines: typing.TextIO) -> None:
    """Ends a command and what it started: `train` saves a checkpoint first. A second Ctrl-C ends it at once. SIGTERM,
    since programs that were started in the background may have SIGINT ignored."""
    try:
        _signal(child, signal.SIGTERM)
        for _ in lines:  # a full pipe would keep it from ending
            pass
        child.wait()
    except BaseException:
        _signal(child, signal.SIGKILL)
        child.wait()
        raise


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if child.poll() is None:
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            pass


def _read(path: pathlib.Path) -> dict[str, typing.Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _message(program: str, command: str, status: int, messages: str) -> str:
    """Returns what the command wrote to standard error, or else what is known about its end."""
    lines = messages.strip().split("\n")
    # Notes follow the error, which is what the caller looks for.
    notes = [line for line in lines if line.startswith("note: ")]
    stderr_text = "\n".join([line for line in lines if line not in notes] + notes)
    if status < 0:
        end = f"anyrank {command}: ended by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            end += " (the system does that where memory runs out)"
        return f"{end}\n{stderr_text}" if stderr_text else end
    return (
        stderr_text
        or f"{program} {command}: exit status {status}, no result and no message: is it the anyrank command?"
    )
