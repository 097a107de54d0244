#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/torch_block.py measures every variant of both blocks, in two turns beside anyrank, of the same parameters; and
one variant alone. A run that ends early leaves what it has measured.

ANYRANK names the command of another build than build/. Exit status 77 (skipped) where there is no torch."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = str(pathlib.Path(os.environ.get("ANYRANK", ROOT / "build/anyrank")).resolve().parent / "bench/block")
SIDES = {"torch eager", "torch fused", "torch compiled", "anyrank native", "anyrank exact"}


def check_early_end(command):
    """anyrank's program runs in the first of two turns, and fails in the second."""
    with tempfile.TemporaryDirectory(prefix="anyrank-block-") as folder:
        once, rows = pathlib.Path(folder, "once"), pathlib.Path(folder, "rows.json")
        once.write_text(f'#!/bin/sh\n[ ! -e "$0.ran" ] || exit 1\ntouch "$0.ran"\nexec {BLOCK} "$@"\n',
                        encoding="utf-8")
        once.chmod(0o755)
        done = subprocess.run([*command, "--turns", "2", "--variants", "eager", "--beside", once, "--json", rows],
                              cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0 or "CalledProcessError" not in done.stderr:
            sys.exit(f"exit status {done.returncode}: {done.stdout}{done.stderr}")
        sides = {row["side"] for row in json.loads(rows.read_text(encoding="utf-8"))["rows"] if row["seconds"]}
        if sides != {"torch eager", "anyrank native", "anyrank exact"}:
            sys.exit(f"left by a run that ended early: {sides}")


def main():
    if not importlib.util.find_spec("torch"):
        print("no torch here (scripts/install_deps.sh --pytorch)")
        sys.exit(77)
    small = [sys.executable, "bench/torch_block.py", "--threads", "1", "--batch", "1", "--seq", "32", "--repetitions",
             "1"]
    check_early_end(small)
    small += ["--json", "-"]
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
