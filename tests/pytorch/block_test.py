#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/torch_block.py measures every variant of both blocks, in two turns beside anyrank, of the same parameters; and
one variant alone.

ANYRANK names the command of another build than build/. Exit status 77 (skipped) where there is no torch."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = str(pathlib.Path(os.environ.get("ANYRANK", ROOT / "build/anyrank")).resolve().parent / "bench/block")
SIDES = {"torch eager", "torch fused", "torch compiled", "anyrank native", "anyrank exact"}


def main():
    if not importlib.util.find_spec("torch"):
        print("no torch here (scripts/install_deps.sh --pytorch)")
        sys.exit(77)
    small = [sys.executable, "bench/torch_block.py", "--threads", "1", "--batch", "1", "--seq", "32", "--repetitions",
             "1", "--json", "-"]
    alone = [*small, "--turns", "1", "--variants", "eager"]
    for command in (alone, [*small, "--turns", "2", "--beside", BLOCK]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"exit status {done.returncode}: {done.stdout}{done.stderr}")
    measured = {(row["block"], row["side"]) for row in json.loads(done.stdout)["rows"] if row["seconds"]}
    missing = {(block, side) for block in ("gpt2", "llama") for side in SIDES} - measured
    if missing:
        sys.exit(f"not measured: {missing}")


if __name__ == "__main__":
    main()
