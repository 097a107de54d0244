# SPDX-License-Identifier: Apache-2.0
"""nvcc for tests: where it is, what the build gives it, and how it is run. Tests without it skip (exit status 77)."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXIT_SKIPPED = 77


def find_nvcc():
    named = os.environ.get("CUDACXX")
    if named and shutil.which(named):
        return named
    folders = [os.environ[name] + "/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders, "/usr/local/cuda/bin", "/opt/cuda/bin"])
    return shutil.which("nvcc", path=path)


NVCC = find_nvcc()


def need_nvcc():
    """Ends the test where there is no nvcc."""
    if not NVCC:
        print("no nvcc here (the CUDA toolkit has it)")
        sys.exit(EXIT_SKIPPED)


def build_options():
    """What gpu/cuda/CMakeLists.txt gives nvcc itself."""
    text = (ROOT / "gpu/cuda/CMakeLists.txt").read_text(encoding="utf-8")
    options = re.search(r"target_compile_options\(anyrank_cuda PRIVATE(.*?)\)", text, re.DOTALL).group(1)
    return [option for option in re.sub(r'"[^"]*"', "", options).split() if option.startswith("-")]


def run_nvcc(sources, architecture, code, *options):
    """nvcc's two outputs, of files for an architecture as one: each alone costs most of a second for CUDA's own headers.
    RuntimeError with its complaints."""
    with tempfile.TemporaryDirectory(prefix="anyrank-nvcc-") as folder:
        joined = pathlib.Path(folder, "joined.cu")
        joined.write_text("".join(f'#include "{source}"\n' for source in sources), encoding="utf-8")
        command = [NVCC, f"-gencode=arch={architecture},code={code}", "-std=c++17", "-O3", "-D_GNU_SOURCE",
                   '-DANYRANK_BUILT_WITH_CUBLAS=""', *build_options(), "-I", ROOT, "-I", ROOT / "include", *options, joined]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc ended with {done.returncode}:\n{done.stderr}")
    return done.stdout, done.stderr


def compile_as_one(sources, architecture, *options):
    """What nvcc writes to standard output of files for a virtual architecture."""
    return run_nvcc(sources, architecture, architecture, *options)[0]
