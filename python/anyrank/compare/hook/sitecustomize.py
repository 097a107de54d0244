# SPDX-License-Identifier: Apache-2.0
"""Python imports this module by itself at its start, in each process that `anyrank compare` starts and in those that
such a process starts. It lets anyrank.compare.script watch the user's script, and then runs the environment's own
sitecustomize."""

import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run_original() -> None:
    """Runs the sitecustomize that this one hides."""
    folders = [folder for folder in sys.path if os.path.abspath(folder or ".") != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("ANYRANK_COMPARE"):
    try:
        from anyrank.compare.script import begin

        begin(os.environ["ANYRANK_COMPARE"])
    except ImportError as error:
        print(f"anyrank compare: {error}", file=sys.stderr)
_run_original()
