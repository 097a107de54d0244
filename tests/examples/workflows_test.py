#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the workflows of .github say: actions are those of a commit, commands are of this tree, nobody may do more than
he must. `scripts/workflow.py` runs their jobs."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True  # the checkout stays as it was
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import workflow  # noqa: E402

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROGRAM = re.compile(r"^(?:[\w/]*python3? )?((?:\./|\.ci/|scripts/|tests/)[\w./-]+)", re.MULTILINE)
JOB = """\
jobs:
  one:
    strategy:
      matrix:
        word: ["first", "second"] # a list
    steps:
      - name: Asks
        env:
          GIVEN: ${{ vars.GIVEN }}
        run: |
          echo "$GIVEN ${{ matrix.word }}"
      - uses: actions/other@0 # v1
      - run: mkdir made && echo "$$" > made/file
      - uses: actions/upload-artifact@0 # v1
        with:
          name: kept
          path: made
      - name: Fails
        run: test "${{ matrix.word }}" = first
      - run: echo end
"""


class Workflows(unittest.TestCase):
    def steps(self):
        for path in FILES:
            for name, job in workflow.read_yaml(path)["jobs"].items():
                for step in job["steps"]:
                    yield f"{path.name}, {name}", step

    def test_actions_are_of_a_commit_whose_version_is_said(self):
        used = {}
        for path in FILES:
            for line in path.read_text(encoding="utf-8").splitlines():
                if "uses:" in line:
                    match = re.fullmatch(r" +(?:- )?uses: ([\w/-]+)@([0-9a-f]{40}) # v\d+\.\d+\.\d+", line)
                    self.assertTrue(match, f"{path.name}: {line}")
                    commit = used.setdefault(match.group(1), match.group(2))
                    self.assertEqual(commit, match.group(2), f"{match.group(1)} has two versions")
        self.assertIn("actions/checkout", used)

    def test_what_they_run_is_in_this_tree(self):
        ran = set()
        for where, step in self.steps():
            for program in PROGRAM.findall(step.get("run", "")):
                self.assertTrue(os.access(ROOT / program, os.R_OK), f"{where}: {program}")
                ran.add(program)
        self.assertLessEqual({"./test", ".ci/run", "scripts/wheel.sh", "tests/python/wheel_test.py"}, ran)

    def test_they_may_do_no_more_than_they_must_and_end(self):
        for path in FILES:
            text, whole = path.read_text(encoding="utf-8"), workflow.read_yaml(path)
            self.assertNotRegex(text, r"https?://")
            self.assertEqual(whole["permissions"], {"contents": "read"}, path.name)
            for name, job in whole["jobs"].items():
                self.assertIn("timeout-minutes", job, f"{path.name}, {name}")
                # Who may write runs nothing of this tree, and nothing that pip has fetched.
                runs = "\n".join(step.get("run", "") for step in job["steps"])
                self.assertFalse("permissions" in job and (PROGRAM.search(runs) or "pip " in runs), name)

    def test_a_job_runs_here_in_order_until_a_command_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "w.yml")
            path.write_text(JOB, encoding="utf-8")
            for given, status, says in (([], 0, "not run: actions/other needs the service"),
                                        (["word=second"], 1, "failed")):
                done = subprocess.run([sys.executable, ROOT / "scripts/workflow.py", path, "one", "GIVEN=7", *given],
                                      capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(says, done.stdout)
                self.assertIn("\n7 second\n" if given else "\n7 first\n", done.stdout)
                self.assertEqual("\nend\n" in done.stdout, status == 0)
                self.assertIn("not run: actions/upload-artifact needs the service", done.stdout)
            subprocess.run([sys.executable, ROOT / "scripts/workflow.py", path, "one", f"artifacts={folder}/artifacts"],
                           stdout=subprocess.DEVNULL, check=True)
            self.assertTrue(pathlib.Path(folder, "artifacts/kept/file").read_text(encoding="utf-8").strip().isdigit())


if __name__ == "__main__":
    unittest.main()
