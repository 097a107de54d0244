#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of what configuring finds of CUDA's toolkit, by scripts/scripts/cmake/Nvcc.cmake alone, and of what a build without the CUDA
device says of it: no toolkit, one that cannot be used, and one that the build left out. ANYRANK_BUILD names another
build folder."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(os.environ.get("ANYRANK_BUILD", ROOT / "build")).resolve()
TO_BUILD = "run ./quickstart --cuda, or configure with -DANYRANK_CUDA=ON"


def run(*command, **environment):
    names = ("ANYRANK", "CUDA")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600, check=False,
                          stdin=subprocess.DEVNULL, env={**kept, **environment})
    if done.returncode != 0:
        raise AssertionError(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


class Toolkit(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="anyrank-toolkit-")
        self.root = pathlib.Path(self.folder.name)
        self.addCleanup(self.folder.cleanup)

    def nvcc(self, folder):
        """An nvcc of no use, in a folder of its own."""
        path = self.root / folder / "bin/nvcc"
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def configured(self, setting="OFF", problem="", hidden=True, **environment):
        """(nvcc that is found, why there is no CUDA device). hidden: this machine's own toolkit is not looked for."""
        script = self.root / "ask.cmake"
        script.write_text(f"""{'set(CMAKE_FIND_ROOT_PATH "' + str(self.root) + '")' if hidden else ''}
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM {'ONLY' if hidden else 'BOTH'})
include({ROOT}/scripts/cmake/Nvcc.cmake)
find_nvcc(nvcc)
why_no_cuda(why "${{nvcc}}" {setting} "{problem}")
message("${{nvcc}}|${{why}}")
""", encoding="utf-8")
        return tuple(run("cmake", "-P", script, **environment).strip().split("|"))

    def test_no_toolkit(self):
        for setting in ("OFF", "AUTO", "ON"):
            nvcc, why = self.configured(setting)
            self.assertEqual(nvcc, "")
            self.assertRegex(why, r"^no CUDA toolkit was found .*: install CUDA 12 or newer, and " + TO_BUILD + "$")

    def test_a_toolkit_that_was_left_out(self):
        own, home = self.nvcc("own"), self.nvcc("home")
        for expected, environment in ((own, {"CUDACXX": str(own), "CUDA_HOME": str(home.parents[1])}),
                                      (home, {"CUDA_HOME": str(home.parents[1])})):
            nvcc, why = self.configured(**environment)
            self.assertEqual(nvcc, str(expected))
            self.assertEqual(why, f"it was configured with -DANYRANK_CUDA=OFF, although a CUDA toolkit was there "
                                  f"({nvcc}): to have it, {TO_BUILD}")

    def test_a_toolkit_that_cannot_be_used(self):
        own = self.nvcc("own")
        _, why = self.configured("AUTO", "it compiles nothing", CUDACXX=str(own))
        self.assertEqual(why, f"the CUDA toolkit of {own} cannot be used: it compiles nothing: when that is mended, "
                              f"{TO_BUILD}")

    def test_the_command_says_which(self):
        setting = re.search(r"^ANYRANK_CUDA:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(encoding="utf-8"),
                            re.MULTILINE)[1]
        said = re.search(r"^CUDA +(.*)$", run(BUILD / "anyrank", "info"), re.MULTILINE)[1]
        if not said.startswith("not in this build"):
            self.skipTest("this build has the CUDA device")
        self.assertTrue(said.endswith(TO_BUILD), said)
        if setting == "OFF":
            self.assertRegex(said, r"^not in this build: (no CUDA toolkit was found when it was configured \(.*"
                                   r"|it was configured with -DANYRANK_CUDA=OFF, although a CUDA toolkit was there \(/)")


if __name__ == "__main__":
    unittest.main()
