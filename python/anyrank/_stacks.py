# SPDX-License-Identifier: Apache-2.0
"""Where a rank stands: reads what faulthandler wrote of its threads, and says it in a line."""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import typing

from anyrank import _rank_process

FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
OWN = _rank_process.__file__
PYTHON = os.path.dirname(os.__file__) + os.sep
EXCHANGE = os.path.join(_rank_process.PACKAGE, "capture", "_exchange.py")
# Functions of torch.distributed that only hand on to others.
WRAPPERS = {"wrapper", "_fn", "__call__", "inner", "<lambda>"}


class Frame(typing.NamedTuple):
    path: str
    line: int
    function: str

    def location(self) -> str:
        path = os.path.relpath(self.path) if self.path.startswith(os.getcwd() + os.sep) else self.path
        return f"{path}:{self.line}"

    def source(self) -> str:
        return linecache.getline(self.path, self.line).strip()


def complete(text: str) -> bool:
    """Returns whether the dump has reached the bottom of the main thread's stack, or its limit."""
    return any(match and match[1] == OWN for match in map(FRAME.match, text.split("\n"))) or "\n  ...\n" in text


def main_thread(text: str) -> list[Frame]:
    """Returns the main thread's frames from the innermost on, without the callers of the user's function; [] if there
    are none."""
    threads: list[list[Frame]] = []
    for line in text.split("\n"):
        match = FRAME.match(line)
        if match and threads:
            threads[-1].append(Frame(match[1], int(match[2]), match[3]))
        elif "most recent call first" in line:
            threads.append([])
    for frames in threads:
        entry_indices = [i for i, frame in enumerate(frames) if frame.path == OWN]
        if entry_indices:
            return frames[:entry_indices[0]]
    return max(threads, key=len, default=[])


def _installed(path: str) -> bool:
    return path.startswith("<") or not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))


def _of_every_run(path: str) -> bool:
    """Returns whether a file belongs to Python, torch or this package, wherever these are installed."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin and path.startswith(os.path.dirname(torch.origin) + os.sep):
        return True
    python = path.startswith("<frozen ") or (path.startswith(PYTHON) and not _installed(path))
    return python or _rank_process.of_package(path)


def users(frames: list[Frame]) -> int:
    """Returns the index of the user's innermost frame: one outside of libraries or, since a program may be installed
    too, in a library that not every run has; 0 if there is none."""
    user_indices = [i for i, frame in enumerate(frames) if not _of_every_run(frame.path)]
    return next((i for i in user_indices if not _installed(frames[i].path)), next(iter(user_indices), 0))


def collective(frames: list[Frame]) -> str:
    """Returns the function of torch.distributed in which the user's code waits, as the code calls it; "" if it does not
    wait."""
    inner = frames[:users(frames)]
    for frame in reversed(inner):
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.path and frame.function not in WRAPPERS:
            return frame.function
    return ""


def captured(frames: list[Frame]) -> bool:
    """Returns whether a rank has reached the end of its capture and waits there for the others."""
    return any(frame.path == EXCHANGE for frame in frames)


def line_of(frames: list[Frame]) -> str:
    """Describes where a rank is: "waiting in all_reduce, called by forward (layers.py:41): dist.all_reduce(x)"."""
    if not frames:
        return "not answering: stopped, or inside the system"
    if captured(frames):
        return "at the end of its capture, waiting for the others"
    frame = frames[users(frames)]
    name, source = collective(frames), frame.source()
    tail = f"{frame.function} ({frame.location()})" + (f": {source}" if source else "")
    return f"waiting in {name}, called by {tail}" if name else f"in {tail}"
