#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/pictures that are drawn from evidence, and from plans and traces on a described cluster's clock, are
what their scripts draw today. ANYRANK names another command than build/anyrank."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"
ANYRANK = str(pathlib.Path(os.environ.get("ANYRANK", ROOT / "build/anyrank")).resolve())
PRINTED = {"bf16.svg": ["curves_picture.py", "docs/evidence/2026-11/bf16-losses.tsv"],
           "losses.svg": ["losses_picture.py", "docs/evidence/2026-11/losses.tsv"],
           "overlap.svg": ["overlap_picture.py", ANYRANK],
           "pipeline.svg": ["pipeline_picture.py", ANYRANK],
           "context-parallel.svg": ["ring_picture.py", ANYRANK]}


def run(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{command}: exit status {done.returncode}: {done.stderr}")
    return done.stdout


class Pictures(unittest.TestCase):
    def same(self, name, drawn, script):
        if drawn != (PICTURES / name).read_text(encoding="utf-8"):
            self.fail(f"docs/pictures/{name} is not what scripts/{script} draws")

    def test_what_scripts_print(self):
        for name, (script, *given) in PRINTED.items():
            with self.subTest(name):
                self.same(name, run(sys.executable, f"scripts/{script}", *given), script)

    def test_the_exact_losses_of_the_table_are_those_of_today(self):
        table = [line.split("\t") for line in (ROOT / "docs/evidence/2026-11/losses.tsv").read_text().splitlines()]
        drawn = [line.split("\t") for line in run(sys.executable, "scripts/losses_picture.py", "--rows", ANYRANK,
                                                  "--tp 2", "--dp 2 --zero 3").splitlines()]
        names = table[0]
        exact = [0, names.index("exact bf16"), names.index("exact fp32")]
        self.assertEqual(drawn[0], [names[i] for i in exact])
        for row in drawn[1:]:
            self.assertIn(row, [[line[i] for i in exact] for line in table])
        self.assertEqual([len({line[names.index(name)] for line in table[1:]}) for name in names[1:]], [15, 5, 1, 1])

    def test_what_scripts_write(self):
        with tempfile.TemporaryDirectory() as folder:
            run(sys.executable, "scripts/looking_pictures.py", ANYRANK, folder)
            run("scripts/planner_picture.sh", ANYRANK, folder)
            written = sorted(pathlib.Path(folder).glob("*.svg"))
            self.assertGreater(len(written), 8)
            for path in written:
                with self.subTest(path.name):
                    script = "planner_picture.sh" if path.name == "planner.svg" else "looking_pictures.py"
                    self.same(path.name, path.read_text(encoding="utf-8"), script)


if __name__ == "__main__":
    unittest.main()
