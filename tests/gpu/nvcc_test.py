#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The CUDA device's own files (gpu/cuda) where there need be no GPU: nvcc compiles each, and everything that they call of
the project is there to be linked. The kernels (gpu/*.cu) are compiled by every build, for the emulated device;
cuda_command_test.py compiles each by itself, the kernels too, and links. ANYRANK_BUILD names another build folder.
Skipped without nvcc."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

from nvcc import OWN_ARCHITECTURE, OWN_KERNEL, ROOT, compile_as_one, need_nvcc

BUILD = pathlib.Path(os.environ.get("ANYRANK_BUILD", ROOT / "build")).resolve()


def symbols(path, option):
    """The names that an object or library defines or needs, as C++ writes them."""
    done = subprocess.run(["nm", "-C", option, str(path)], stdout=subprocess.PIPE, text=True, check=True)
    return set(re.findall(r"^[0-9a-f ]{16} [A-Za-z] (.*)$", done.stdout, re.MULTILINE))


def undefined(folder, architecture, sources):
    """What files need of others, compiled."""
    made = pathlib.Path(folder, architecture + ".o")
    compile_as_one(sources, architecture, "-c", "-Xcicc=-O0", "-o", made)
    return symbols(made, "--undefined-only")


class Nvcc(unittest.TestCase):
    def test_every_file_compiles_and_what_it_calls_is_there(self):
        sources = [path for path in sorted((ROOT / "gpu/cuda").glob("*.cu")) if path != OWN_KERNEL]
        self.assertGreaterEqual(len(sources), 4)
        with tempfile.TemporaryDirectory(prefix="anyrank-nvcc-") as folder:
            needed = undefined(folder, "compute_80", sources) | undefined(folder, OWN_ARCHITECTURE, [OWN_KERNEL])
        ours = {name for name in needed if name.startswith(("ar_", "ari_")) and not name.startswith("ari_cuda::")}
        self.assertIn("ar_error_set", ours)
        self.assertEqual(sorted(ours - symbols(BUILD / "libanyrank.a", "--defined-only")), [])


if __name__ == "__main__":
    need_nvcc()
    unittest.main()
