#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The hashes of docs/evidence/bits.tsv, on every exact path of this processor and on the emulated device.

    tests/verify/bits_test.py [--all [PATH ...] | --write]

That file is the only table of hashes. By default the rows that take a second are computed: each of the `grads` on one
path in turn, the others on all. --all: all rows, on every path or on those named, in minutes (an hour with the emulated
device's). --write puts what this machine computes into the file: for a change that is meant to change bits.

The environment variable ANYRANK is another command, of several words where another program has to run it
("qemu-aarch64-static build/aarch64/anyrank").
"""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import unittest

import pages

COMMAND = shlex.split(os.environ.get("ANYRANK", str(pages.ROOT / "build/anyrank")))
NAMED = set(sys.argv[2:]) if "--all" in sys.argv[1:2] else set()
ALL = "--all" in sys.argv or "ANYRANK_TEST_EXTENDED" in os.environ
EXACT_PATH, IMMA_PATH = "ANYRANK_EXACT_PATH", "ANYRANK_IMMA_PATH"
TABLE = pages.ROOT / "docs/evidence/bits.tsv"
KEYS = {"check": "hash", "train": "weights_hash", "grads": "outputs_hash"}


def rows(takes=("second", "minute")):
    """(hash, command) of the rows that take so long."""
    with TABLE.open(encoding="utf-8") as lines:
        return [(row["hash"], row["command"]) for row in csv.DictReader(lines, delimiter="\t") if row["takes"] in takes]


def words_of(command, out):
    """The words of a command as the table abbreviates them."""
    kind, *rest = command.split()
    if kind == "check":
        return [kind, *rest, "--skip-f64", "--strict-predictions"]
    if kind == "train":
        return [kind, *rest]
    folder = f"tests/golden/{rest[0]}"
    if rest[0].startswith("block-"):
        return [kind, "--block", folder, *rest[1:], "--out", out]
    return [kind, folder, "--input", f"{folder}/batch.safetensors", *rest[1:], "--out", out]


def hash_of(command, variable=None, value=None, device="cpu"):
    """What a command's hash is, with the environment variable set; where it fails, what it says."""
    environment = {key: text for key, text in os.environ.items() if key not in (EXACT_PATH, IMMA_PATH)}
    with tempfile.TemporaryDirectory(prefix="anyrank-bits-") as out:
        done = subprocess.run([*COMMAND, *words_of(command, out), "--device", device, "--quiet", "--json", "-"],
                              capture_output=True, text=True, timeout=4 * 3600, check=False, stdin=subprocess.DEVNULL,
                              cwd=pages.ROOT, env=environment | ({variable: value} if variable else {}))
    if done.returncode != 0:
        return f"exit status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return json.loads(done.stdout)[KEYS[command.split()[0]]]


def paths():
    """The ways to make exact sums here, each as hash_of takes it: those of this processor, of the program's own list,
    and the emulated device's if it is built."""
    short = rows()[0][1]
    names = re.search(r"expected (.+)$", hash_of(short, EXACT_PATH, "?"), re.MULTILINE).group(1)
    own = [(EXACT_PATH, name, "cpu") for name in re.split(", | or ", names)
           if "this processor has no" not in hash_of(short, EXACT_PATH, name)]
    emulated = [(IMMA_PATH, name, "emulated") for name in ("imma10", "imma16")]
    return own + (emulated if "no emulated device" not in hash_of(short, *emulated[0]) else [])


class Bits(unittest.TestCase):
    def test_the_hashes_are_those_of_the_table_on_every_path(self):
        found, wanted = paths(), rows() if ALL else rows(("second",))
        self.assertIn((EXACT_PATH, "portable", "cpu"), found)
        found = [path for path in found if not NAMED or path[1] in NAMED]
        self.assertGreaterEqual({path[1] for path in found}, NAMED)
        for i, path in enumerate(found):
            for j, (want, command) in enumerate(wanted):
                if ALL or j % len(found) == i or not command.startswith("grads "):
                    start = time.monotonic()
                    with self.subTest(command=command, path=path):
                        self.assertEqual(hash_of(command, *path), want)
                    if ALL:
                        print(f"{path[1]:12} {time.monotonic() - start:7.1f} s  {command}", flush=True)

    def test_every_golden_case_has_its_row(self):
        golden = {path.parent.name for name in ("grads", "expected_f64")
                  for path in (pages.ROOT / "tests/golden").glob(f"*/{name}.safetensors")}
        listed = {command.split()[1] for _, command in rows(("second",)) if command.startswith("grads ")}
        self.assertEqual(golden, listed)


def write():
    text = TABLE.read_text(encoding="utf-8")
    for old, command in rows():
        new = hash_of(command)
        if not re.fullmatch("[0-9a-f]{64}", new):
            sys.exit(f"{command}: {new}")
        text = re.sub(f"^{old}(\t.*\t{re.escape(command)})$", rf"{new}\1", text, flags=re.MULTILINE)
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        unittest.main(argv=sys.argv[:1] if "--all" in sys.argv else sys.argv)
