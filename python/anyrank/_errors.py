# SPDX-License-Identifier: Apache-2.0
"""What anyrank raises where an input cannot be used, or the machine failed. A difference found is no error."""

from __future__ import annotations

import os


class AnyrankError(Exception):
    """The command's message, on one line as it printed it. `exit_status`: 2 wrong usage or input, 3 the machine failed,
    negative: ended by that signal; None where no command ran."""

    def __init__(self, message: str, exit_status: int | None = None) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def path_name(path: str | os.PathLike[str]) -> str:
    """Returns a path as text. Errors: TypeError for anything else; AnyrankError for a path with a 0 byte, which no file
    has."""
    name = os.fsdecode(os.fspath(path))
    if "\0" in name:
        raise AnyrankError(f"{name!r}: a path has no byte 0")
    return name
