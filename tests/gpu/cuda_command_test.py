#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The accelerated build where there need be no GPU: nvcc compiles every .cu file, the whole command is built and linked
with them and says plainly that it has no driver or no GPU; and every step of gpu/device-check.sh that a machine without
one can run. One architecture, since each costs as much again. Skipped without nvcc. ANYRANK_BUILD names another folder
with the build that gpu/device-check.sh takes its programs from."""

import os
import pathlib
import re
import shlex
import subprocess
import tempfile
import unittest

from nvcc import NVCC, ROOT, need_nvcc

BUILD = pathlib.Path(os.environ.get("ANYRANK_BUILD", ROOT / "build")).resolve()
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ANYRANK")}
CUDA = BUILD / "nvcc"  # kept: the next run compiles what has changed
ASSEMBLED = CUDA / "assembled.txt"  # the assembler's words about every kernel, the last ones of each at the end
COMMAND = CUDA / "anyrank"


def run(*command, **environment):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False, stdin=subprocess.DEVNULL, env={**ENVIRONMENT, **environment})


def must(*command, **environment):
    done = run(*command, **environment)
    if done.returncode != 0:
        said = "\n".join(line for line in done.stdout.splitlines() if not line.startswith(("ptxas info", "    0 bytes")))
        raise AssertionError(f"{shlex.join(map(str, command))}: exit status {done.returncode}\n{said}")
    return done.stdout


class Cuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        must("cmake", "-S", ROOT, "-B", CUDA, "-DANYRANK_CUDA=ON", "-DANYRANK_EMULATED=OFF", "-DANYRANK_MPI=OFF",
             "-DANYRANK_TESTS=OFF", "-DCMAKE_CUDA_ARCHITECTURES=90", "-DCMAKE_BUILD_TYPE=Release",
             # The C sources are compiled as they are shipped elsewhere; bits depend on no level of optimisation.
             "-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG", "-DCMAKE_CUDA_FLAGS=-Xptxas -v", "-G", "Unix Makefiles", CUDACXX=NVCC)
        said = must("cmake", "--build", CUDA, "-j", os.cpu_count(), "--target", "anyrank_cli", "--", "-Otarget")
        with ASSEMBLED.open("a", encoding="utf-8") as file:
            file.write(said)

    def test_needs_nothing_of_the_cxx_library(self):
        undefined = must("nm", "-u", CUDA / "anyrank_cuda.o")
        self.assertEqual(re.findall(r"\b(?:_ZS|_ZNS|_ZNKS|_Zn|_Zd|__cxa|__gxx)\w+", undefined), [])

    def test_every_kernel_keeps_its_numbers_in_registers(self):
        found = dict(re.findall(r"Function properties for (\w+)\n *(\d+ bytes stack frame, \d+ bytes spill stores, "
                                r"\d+ bytes spill loads)", ASSEMBLED.read_text(encoding="utf-8")))
        self.assertGreaterEqual(len(found), 100)
        self.assertEqual({name: kept for name, kept in found.items() if re.search(r"[1-9]", kept)}, {})

    def test_the_command_tells_what_is_missing(self):
        # No GPU, also where there is one.
        done = run(COMMAND, "check", "stack-demo", "--device", "cuda", CUDA_VISIBLE_DEVICES="-1")
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertRegex(done.stdout, "no NVIDIA driver|driver is for CUDA|shows no GPU")
        self.assertRegex(must(COMMAND, "info", CUDA_VISIBLE_DEVICES="-1"), r"\nCUDA +\d+\.\d+, but .*(driver|GPU)")

    def test_its_processor_gives_the_same_bits(self):
        self.assertIn("the same bits", must(COMMAND, "check", "gpt2-demo", "--tp", "2", "--steps", "1", "--skip-f64"))


class DeviceCheck(unittest.TestCase):
    def test_every_step_of_a_machine_without_a_gpu(self):
        with tempfile.TemporaryDirectory(prefix="anyrank-device-check-") as folder:
            for name in ("anyrank", "tests/conformance_main", "tests/gpu_smoke", "bench/gemm", "bench/block"):
                (pathlib.Path(folder) / name.replace("bench/", "bench_").split("/")[-1]).symlink_to(BUILD / name)
            said = must("sh", ROOT / "gpu/device-check.sh", "--host", "--prebuilt", folder, "--budget", "100000",
                        "--build", f"{folder}/device", OUT=f"{folder}/out")
        steps = dict(re.findall(r"^(\w+) +(ok|skip) ", said, re.MULTILINE))
        self.assertEqual([name for name, verdict in steps.items() if verdict == "ok"],
                         ["machine", "smoke", "conformance", "check1", "check2", "check4", "golden", "training", "bench_gemm",
                          "bench_block", "bits", "check8"], said)


if __name__ == "__main__":
    need_nvcc()
    unittest.main()
