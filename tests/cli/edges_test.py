#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of check and grads at the edges: names that are not UTF-8, options that meet.

    tests/cli/edges_test.py [BINARY] [unittest options]

BINARY (or the environment variable ANYRANK) is another build; default build/anyrank.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests/golden/llama-gqa-tiny"
COMMAND = os.environ.get("ANYRANK", str(ROOT / "build/anyrank"))
CONFIG = (GOLDEN / "config.json").read_bytes()
SMALL = ["--tp", "2", "--batch", "1", "--seq", "4", "--skip-f64"]


def run(*arguments):
    return subprocess.run([COMMAND, *arguments], capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)


class EdgesTest(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="anyrank-cli-")
        self.addCleanup(holder.cleanup)
        self.folder = os.fsencode(holder.name)

    def model(self, name):
        path = os.path.join(self.folder, name)
        os.mkdir(path)
        with open(os.path.join(path, b"config.json"), "wb") as file:
            file.write(CONFIG)
        return path

    def test_the_json_of_check_holds_every_run_whatever_the_folder_is_called(self):
        names = [(b"plain", "plain"), ("\u00e9\u4e16\U0001f600".encode(), "\u00e9\u4e16\U0001f600"),
                 (b"a\xffb\xc3", "a?b?"), (b"\xe0\x80\xaf\xed\xa0\x80\xf5x", "???????x")]
        for name, expected in names:
            with self.subTest(name=name):
                done = run("check", self.model(name), *SMALL, "--json", "-")
                self.assertEqual(done.returncode, 0, done.stderr)
                models = json.loads(done.stdout)["models"]
                self.assertEqual([model["name"] for model in models], [expected])
                self.assertEqual(len(models[0]["runs"]), 1)

    def test_a_name_cut_within_a_character_is_still_a_name(self):
        for length in range(58, 64):
            with self.subTest(length=length):
                done = run("check", self.model(b"x" * length + "\u00e9".encode() * 4), *SMALL, "--json", "-")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(len(json.loads(done.stdout)["models"]), 1)

    def test_the_json_of_grads_names_its_files_whatever_they_are_called(self):
        done = run("grads", str(GOLDEN), "--input", str(GOLDEN / "batch.safetensors"), "--out",
                   os.path.join(self.folder, b"out\xff"), "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        files = json.loads(done.stdout)["files"]
        self.assertEqual([file.rsplit("/", 2)[1:] for file in files],
                         [["out?", "outputs.safetensors"], ["out?", "grads.safetensors"]])

    def test_one_layout_and_all_of_them_exclude_each_other(self):
        done = run("check", "gpt2-demo", "--tp", "2", "--sweep", "4")
        self.assertEqual(done.returncode, 2)
        self.assertIn(b"--sweep", done.stderr)

    def test_a_given_order_of_the_mlp_stands_beside_a_fault(self):
        done = run("check", "--inject", "column_dx_not_reduced", "--mlp-order", "row-column", "--batch", "1", "--seq", "4",
                   "--skip-f64", "--json", "-")
        given = json.loads(done.stdout)["models"][0]["runs"][0]["bytes"]["predicted"]
        done = run("check", "llama-demo", *SMALL, "--mlp-order", "row-column", "--json", "-")
        self.assertEqual(json.loads(done.stdout)["models"][0]["runs"][0]["bytes"]["predicted"], given)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-") and os.path.exists(sys.argv[1]):
        COMMAND = sys.argv.pop(1)
    unittest.main()
