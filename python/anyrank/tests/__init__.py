# SPDX-License-Identifier: Apache-2.0
"""Tests that are installed with the package, and what they share.

    python -m pytest --pyargs anyrank     with pytest
    python -m anyrank.tests [NAME ...]    with the standard library alone; NAME: test_package, test_package.Import, ..

What needs torch or numpy is skipped, with that reason, where there is none. Tests use bundled models only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import traceback
import typing
import unittest
import warnings

_T = typing.TypeVar("_T", bound=typing.Union[type, typing.Callable[..., object]])


def needs(*modules: str) -> typing.Callable[[_T], _T]:
    """Skips a test, or a class of tests, where one of these modules is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return unittest.skipIf(bool(missing), f"no {' and no '.join(missing)} here")


class FolderCase(unittest.TestCase):
    """Tests with a folder of their own, self.path, which is removed after each."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in its own interpreter, which finds this package where this one does, and which SIGINT interrupts, also
    where the tests were started with SIGINT ignored, as a shell starts what runs in the background."""
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    source = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path, **environment})


def fork(function: typing.Callable[[], object], out: str | os.PathLike[str], **environment: str) -> int:
    """The process that runs function, which may give its exit status, as a copy of this one: what takes seconds to
    import is there. Its output goes to a file, and SIGINT interrupts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        pid = os.fork()
    if pid:
        return pid
    try:
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        status = int(typing.cast(typing.Any, function()) or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def anyrank_json(*arguments: str) -> typing.Any:
    """What the command prints with --json -."""
    from anyrank._command import find_command

    done = subprocess.run([find_command(), *arguments, "--json", "-"], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)
    if done.returncode > 1:
        raise AssertionError(f"anyrank {' '.join(arguments)}: exit status {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)
