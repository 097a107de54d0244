# SPDX-License-Identifier: Apache-2.0
"""Finds the anyrank command and runs it.

Each run is its own process: Ctrl-C ends it, its memory is given back, and what the calling program chose for its own
arithmetic (flushing denormals, OpenMP's threads) does not reach it.
"""

from __future__ import annotations

import os
import pathlib
import shutil

from anyrank._errors import AnyrankError

PACKAGE = pathlib.Path(__file__).resolve().parent


def find_command() -> str:
    """$ANYRANK; else the wheel's own; else, in a tree of the sources, what that built; else one on the path."""
    named = os.environ.get("ANYRANK")
    if named:
        return named
    for path in (PACKAGE / "bin" / "anyrank", PACKAGE.parents[1] / "build" / "anyrank"):
        if os.access(path, os.X_OK):
            return str(path)
    found = shutil.which("anyrank")
    if found is None:
        raise AnyrankError("there is no anyrank command: install the wheel, run ./quickstart in the sources, or set "
                           "ANYRANK to its path")
    return found
