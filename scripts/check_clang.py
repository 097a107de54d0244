#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether clang, too, compiles the library and the command: scripts/check_clang.py BUILD

Reads compile_commands.json of a build by another compiler and has clang check the same files. Its warnings are left to
the compiler of the build; a function that clang's headers do not declare is an error. Exit status 77: no clang here.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("ref", "sim", "gpu", "verify", "cli", "bench", "python")
OPTIONS = ["-fsyntax-only", "-Wno-everything", "-Werror=implicit-function-declaration", "-Werror=int-conversion"]


def check(clang, entry):
    """What clang says against a file of compile_commands.json; empty where it says nothing."""
    words = shlex.split(entry["command"])
    words = words[next(i for i, word in enumerate(words) if word.startswith("-")):]
    output_index = words.index("-o")
    process = subprocess.run([clang, *words[:output_index], *words[output_index + 2:], *OPTIONS],
                             cwd=entry["directory"], capture_output=True, text=True, check=False)
    return process.stderr if process.returncode else ""


def main():
    clang = next(filter(None, map(shutil.which, ("clang", "clang-14"))), None)
    if clang is None:
        print("no clang here")
        return 77
    entries = json.loads(pathlib.Path(sys.argv[1], "compile_commands.json").read_text(encoding="utf-8"))
    tops = tuple(f"{ROOT / folder}/" for folder in FOLDERS)
    entries = [entry for entry in entries if entry["file"].startswith(tops) and entry["file"].endswith(".c")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(filter(None, pool.map(lambda entry: check(clang, entry), entries)))
    print("".join(said) + f"clang compiles {len(entries) - len(said)} of {len(entries)} files")
    return 1 if said or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
