# SPDX-License-Identifier: Apache-2.0
"""`anyrank compare`: runs an unchanged training script in two ways and compares the runs. docs/guide/compare.md is the
manual.

    options   the command line
    runs      starts the script's processes and ends them
    script    works inside of these processes: finds the model, captures, ends
    answer    compares the dumps and prints the result
"""

from __future__ import annotations

import typing


def main(words: typing.Sequence[str] | None = None) -> int:
    """Runs the command. words: its arguments; default: those of this process. Returns the exit status: 0 the same, 1 a
    difference, 2 a wrong usage or a script that cannot be compared, 3 the machine failed."""
    from anyrank.compare.answer import run

    return run(words)
