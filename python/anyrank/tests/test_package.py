# SPDX-License-Identifier: Apache-2.0
"""The package itself: what importing it loads, its names, its version."""

from __future__ import annotations

import importlib.util
import subprocess
import typing
import unittest

import anyrank
from anyrank._command import find_command
from anyrank.tests import run_python

HEAVY = ["numpy", "torch", "transformers", "safetensors", "ctypes", "asyncio", "json", "subprocess", "email"]
NEED = {"capture": "torch", "rounding": "torch", "logprobs": "numpy"}  # names that stand for nothing without it


class Import(unittest.TestCase):
    def loaded(self, code: str) -> list[str]:
        done = run_python(f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*set(sys.modules) - before)")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.split()

    def test_importing_loads_nothing_that_takes_long(self) -> None:
        self.assertEqual([name for name in self.loaded("import anyrank") if name in HEAVY], [])

    def test_only_names_that_need_them_load_numpy_or_torch(self) -> None:
        loaded = self.loaded(f"import anyrank\nfor name in set(anyrank.__all__) - {set(NEED)}: getattr(anyrank, name)")
        self.assertEqual([name for name in loaded if name in ("numpy", "torch", "transformers")], [])


class Names(unittest.TestCase):
    def test_every_public_name_is_there_and_documented(self) -> None:
        for name in anyrank.__all__:
            if name in NEED and importlib.util.find_spec(NEED[name]) is None:
                continue
            with self.subTest(name):
                value: typing.Any = getattr(anyrank, name)
                self.assertIn(name, dir(anyrank))
                if callable(value):
                    self.assertTrue(value.__doc__)

    def test_an_unknown_name_is_an_attribute_error_that_says_so(self) -> None:
        with self.assertRaisesRegex(AttributeError, "module 'anyrank' has no attribute 'chekc'"):
            anyrank.chekc
        with self.assertRaises(ImportError):
            importlib.import_module("anyrank.chekc")

    def test_the_version_is_that_of_the_command(self) -> None:
        said = subprocess.run([find_command(), "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
        self.assertIn(f"anyrank {anyrank.__version__}", said)


class Info(unittest.TestCase):
    def test_it_is_what_the_command_says_of_this_machine(self) -> None:
        said = anyrank.info()
        self.assertEqual((said["version"], said["command"]), (anyrank.__version__, "info"))
        self.assertGreaterEqual(said["cpu"]["cores"], 1)
        self.assertTrue(said["exact_path"])


if __name__ == "__main__":
    unittest.main()
