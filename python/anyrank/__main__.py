# SPDX-License-Identifier: Apache-2.0
"""The command `anyrank`, and python -m anyrank: the program in the package takes this process over."""

from __future__ import annotations

import os
import sys

from anyrank._command import environment, own_command


def main() -> None:
    command = own_command()
    if command is None:
        sys.exit("anyrank: the package has no program: it was not installed from a wheel, and ./quickstart was not run")
    try:
        os.execve(command, ["anyrank", *sys.argv[1:]], environment())
    except OSError as error:
        sys.exit(f"anyrank: {command} cannot be started: {error}")


if __name__ == "__main__":
    main()
