#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The CUDA device where there need be no GPU: nvcc compiles every file of it, the whole command links with it, and says
plainly that it has no driver or no GPU. One architecture, since each costs as much again. Skipped without nvcc, and
without ANYRANK_TEST_EXTENDED, which ./test --extended sets.
ANYRANK_BUILD names another build folder, whose library and command are linked with the CUDA device."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(os.environ.get("ANYRANK_BUILD", ROOT / "build")).resolve()
SKIPPED = 77
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ANYRANK")}

CUDA = BUILD / "nvcc"  # kept: the next run compiles what has changed
OBJECTS = [CUDA / "anyrank_cuda.o", CUDA / "anyrank_cuda_sm90.o"]


def find_nvcc():
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda", "/opt/cuda"]
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), *(home + "/bin/nvcc" for home in homes if home)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def run(*command, **environment):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=1800, check=False,
                          stdin=subprocess.DEVNULL, env={**ENVIRONMENT, **environment})


def must(*command):
    done = run(*command)
    if done.returncode != 0:
        raise AssertionError(f"{shlex.join(map(str, command))}: exit status {done.returncode}\n"
                             f"{done.stdout}{done.stderr}")
    return done.stdout


def cached(variable):
    """A variable of the CUDA build's cache."""
    text = (CUDA / "CMakeCache.txt").read_text(encoding="utf-8")
    return re.search(rf"^{variable}:\w+=(.*)$", text, re.MULTILINE)[1]


def setUpModule():
    must("cmake", "-S", ROOT, "-B", CUDA, "-DANYRANK_CUDA=ON", "-DANYRANK_EMULATED=OFF", "-DANYRANK_MPI=OFF",
         "-DANYRANK_TESTS=OFF", "-DCMAKE_CUDA_ARCHITECTURES=80", "-DCMAKE_BUILD_TYPE=Release")
    must("cmake", "--build", CUDA, "-j", os.cpu_count(), "--target", "anyrank_cuda_object",
         "anyrank_cuda_sm90_object")


class Cuda(unittest.TestCase):
    def test_needs_nothing_of_the_cxx_library(self):
        undefined = must("nm", "-u", *OBJECTS)
        self.assertEqual(re.findall(r"\b(?:_ZS|_ZNS|_ZNKS|_Zn|_Zd|__cxa|__gxx)\w+", undefined), [])

    def test_the_command_links_and_tells_what_is_missing(self):
        package = (BUILD / "package/anyrank.pc").read_text(encoding="utf-8")
        private = shlex.split(re.search(r"^Libs.private: (.*)$", package, re.MULTILINE)[1])
        libraries = [cached("CUDA_cudart_LIBRARY")]
        command = CUDA / "anyrank-linked"
        must(shutil.which("cc") or "gcc", *sorted((BUILD / "CMakeFiles/anyrank_cli.dir").rglob("*.o")),
             *OBJECTS, BUILD / "libanyrank.a", *private, *libraries,
             *("-Wl,-rpath," + str(pathlib.Path(library).parent) for library in libraries), "-o", command)
        # No GPU, also where there is one.
        done = run(command, "check", "stack-demo", "--device", "cuda", CUDA_VISIBLE_DEVICES="-1",
                   ANYRANK_DATA=str(ROOT / "data"))
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertRegex(done.stderr, "no NVIDIA driver|driver is for CUDA|shows no GPU")
        done = run(command, "info", CUDA_VISIBLE_DEVICES="-1")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"\nCUDA +\d+\.\d+, but .*(driver|GPU)")


if __name__ == "__main__":
    if find_nvcc() is None:
        print("no nvcc here: the CUDA device is compiled by g++ alone (emulated)")
        sys.exit(SKIPPED)
    if "ANYRANK_TEST_EXTENDED" not in os.environ:
        print("a long test, of ./test --extended: all is compiled and linked (ptx_test compiles every kernel)")
        sys.exit(SKIPPED)
    unittest.main()
