# SPDX-License-Identifier: Apache-2.0
"""The command that tests in Python run, and a test case with a folder of its own.

Such a test is also a program: tests/cli/NAME_test.py [BINARY] [unittest options]. BINARY (or the environment variable
ANYRANK) is another build; default build/anyrank.
"""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests/golden"
EXTENDED = bool(os.environ.get("ANYRANK_TEST_EXTENDED"))
LIMIT_S = 1800  # a guard against hanging


def given():
    return len(sys.argv) > 1 and not sys.argv[1].startswith("-") and os.path.isfile(sys.argv[1])


COMMAND = str(pathlib.Path(sys.argv.pop(1) if given() else os.environ.get("ANYRANK", ROOT / "build/anyrank")).resolve())


def start(words, text=True, **options):
    """Any program, without input."""
    return subprocess.run([word if isinstance(word, bytes) else str(word) for word in words], stdin=subprocess.DEVNULL,
                          capture_output=True, text=text, errors="replace" if text else None, timeout=LIMIT_S,
                          check=False, **options)


def run(*arguments, **options):
    return start([COMMAND, *arguments], **options)


def convert(*arguments, program=None, **options):
    """python -m anyrank.convert, or a program with its arguments, with the library beside the command."""
    library = os.environ.get("ANYRANK_LIBRARY") or pathlib.Path(COMMAND).with_name("libanyrank_abi.so")
    here = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "ANYRANK_LIBRARY": str(library)}
    what = ["-m", "anyrank.convert"] if program is None else ["-c", program]
    return start([sys.executable, *what, *arguments], env=here, **options)


class Case(unittest.TestCase):
    """Runs the command in a folder of its own, that is empty at first."""

    maxDiff = None
    subcommand = ()  # what all arguments of `done` and what stands on it follow

    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="anyrank-test-")
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)

    def put(self, name, content):
        """A file of the folder: text, bytes, or an object as JSON."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    def ran(self, *arguments, **options):
        return run(*self.subcommand, *arguments, **{"cwd": self.folder, **options})

    def done(self, *arguments, code=0, **options):
        """How the command ended, with that status."""
        done = self.ran(*arguments, **options)
        self.assertEqual(done.returncode, code, (arguments, done.stdout, done.stderr))
        return done

    def passes(self, *arguments, code=0, **options):
        """What it printed, and nothing beside that."""
        done = self.done(*arguments, code=code, **options)
        self.assertEqual(done.stderr, "", arguments)
        return done.stdout

    def result(self, *arguments, **options):
        return json.loads(self.passes(*arguments, "--json", "-", **options))

    def checkpoint_with(self, model, tensor, value):
        """The folder of a checkpoint of the model whose tensors of this name hold the value."""
        self.result("train", model, "--batch", 2, "--seq", 8, "--steps", 2, "--stop-after", 1, "--save", self.folder / "run")
        folder = self.folder / "run" / "step-00000001"
        file = folder / "model.safetensors"
        data = bytearray(file.read_bytes())
        start = 8 + struct.unpack("<Q", data[:8])[0]
        found = [t["data_offsets"] for name, t in json.loads(data[8:start]).items() if name.endswith(tensor)]
        self.assertTrue(found)
        for first, end in found:
            data[start + first:start + end] = struct.pack("<f", value) * ((end - first) // 4)
        file.write_bytes(data)
        return folder

    def refused(self, *arguments, says, code=2, **options):
        """One line beside notes on stderr that says it, nothing on stdout, no file more or less. Returns that line."""
        before = sorted(self.folder.rglob("*"))
        done = self.done(*arguments, code=code, **options)
        said = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
        self.assertEqual((done.stdout, len(said)), ("", 1), (arguments, done.stderr))
        self.assertTrue(said[0].startswith("anyrank"), said[0])
        for words in (says,) if isinstance(says, str) else says:
            self.assertIn(words, said[0])
        self.assertEqual(sorted(self.folder.rglob("*")), before, arguments)
        return said[0]
