# SPDX-License-Identifier: Apache-2.0
"""How far a run is: what the command reports as lines of JSON, to a function or as a line that is updated."""

from __future__ import annotations

import contextlib
import json
import sys
import typing

Progress = typing.Union[None, bool, typing.Callable[[typing.Optional[float], str], object]]

FIRST_SECONDS = 1.0  # shorter jobs show no line


def in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return running is not None and hasattr(running, "kernel")


class _Line:
    """One line on standard error, drawn again for each report and removed at the end."""

    def __init__(self) -> None:
        self.width = 0

    def show(self, text: str) -> None:
        text = text if len(text) < 80 else text[:45] + ".." + text[-32:]
        print("\r" + text.ljust(self.width), end="", file=sys.stderr, flush=True)
        self.width = len(text)

    def clear(self) -> None:
        if self.width:
            print("\r" + " " * self.width + "\r", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_of(progress: Progress) -> typing.Iterator[typing.Callable[[str], None]]:
    """Returns a function that takes a line of the command's progress. Lines that are no report are ignored."""
    line = _Line() if progress is True and (sys.stderr.isatty() or in_notebook()) else None

    def show(text: str) -> None:
        if not progress or (progress is True and line is None):
            return
        try:
            report = json.loads(text)
            fraction, seconds, label = report.get("fraction"), float(report.get("seconds", 0)), str(report.get("what"))
        except (ValueError, TypeError, AttributeError):
            return
        if callable(progress):
            progress(fraction, label)
        elif line is not None and seconds >= FIRST_SECONDS:
            line.show((f"{100 * fraction:3.0f} %  " if fraction is not None else "") + f"{seconds:.0f} s  {label}")

    try:
        yield show
    finally:
        if line is not None:
            line.clear()
