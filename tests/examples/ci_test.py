#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of examples/ci: the commands of the GitHub workflow and of GitLab's file run in a repository as pytest.md
sets it up, and what a change of bits and a wrong plan print there. What fetches something from a network is left out,
and building anyrank is done in the extended tests alone."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, EXTENDED, ROOT, Case  # noqa: E402
sys.path.insert(0, str(ROOT / "scripts"))
from workflow import read_yaml  # noqa: E402

CI = ROOT / "examples/ci"
NETWORK = re.compile(r"apt-get |git clone ")

# Of the summary of a job whose model has another epsilon.
CHANGED = """\
### Bits differ from golden.txt
-layout gradients_hash 65347a3cd8cc2d2bf922439c3bf8972d80dbed9a4a345b8f0139dcfc3fe40e89
+layout gradients_hash 3edb9bfb88966ffff5a08be583b9aa6490246a06c8c7abffe6179682739e6215
== layout: the baseline's tensors in that revision, and here
first in execution order: model.layers.0.input_layernorm:fwd
    where     step 1, forward pass; first element [0,0,0]
    first     -0.847184479 in the reference, -0.847183466 in the other
    how many  4,096 of 4,096 elements (100 %)
verify: DIFFERENT: 304 of 333 tensors not the same in every bit
"""


class Job(Case):
    def setUp(self):
        super().setUp()
        self.home = self.folder / "repository"
        shutil.copytree(CI, self.home / "ci", ignore=shutil.ignore_patterns("*.yml", "out"))
        (self.home / ".gitignore").write_text("/anyrank\n/anyrank-installed\n/ci/out\n", encoding="utf-8")
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "start"]):
            self.git(*words)
        self.base = self.git("rev-parse", "HEAD").strip()
        (self.home / "anyrank").symlink_to(ROOT)
        self.variables = {}

    def git(self, *words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=self.home, text=True,
                              capture_output=True, check=True, timeout=600).stdout

    def change(self, name, old, new):
        path = self.home / "ci" / name
        text = path.read_text(encoding="utf-8")
        self.assertEqual(text.count(old), 1, name)
        path.write_text(text.replace(old, new), encoding="utf-8")
        self.git("commit", "-q", "-a", "-m", "change")

    def keep(self, case):
        """Leaves one case: that is what the tests of a difference need."""
        for name in ("cases.txt", "golden.txt"):
            path = self.home / "ci" / name
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(line for line in lines if line.startswith(case + " ")), encoding="utf-8")
        self.git("commit", "-q", "-a", "-m", "one case")
        self.base = self.git("rev-parse", "HEAD").strip()

    def shell(self, script, **variables):
        """Runs a step as a runner does; its status, and what it printed."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("GITHUB_", "CI_", "ANYRANK"))}
        done = subprocess.run(["bash", "-e", "-c", script], cwd=self.home, text=True, timeout=1800,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                              env={**kept, **self.variables, **variables})
        return done.returncode, done.stdout

    def installed(self):
        """Where both files install anyrank: this build, unless the job has made its own."""
        place = self.home / "anyrank-installed/bin"
        if not place.exists():
            place.mkdir(parents=True)
            (place / "anyrank").symlink_to(COMMAND)

    def build(self, script):
        """Only in the extended tests, and then of the sources, which are not to be built in."""
        self.assertIn("cmake --install", script)
        if EXTENDED:
            status, out = self.shell(script.replace("anyrank/build", "../build"))
            self.assertEqual(status, 0, out)
        self.installed()


# --- the two files ----------------------------------------------------------------------------------------------------


class GitHub(Job):
    def setUp(self):
        super().setUp()
        self.workflow = read_yaml(CI / "github.yml")
        self.variables = {**self.workflow["jobs"]["bits"]["env"], "GITHUB_PATH": str(self.folder / "path"),
                          "GITHUB_STEP_SUMMARY": str(self.folder / "summary")}

    def path(self):
        added = (self.folder / "path").read_text(encoding="utf-8").split()
        return ":".join([*added, os.environ["PATH"]])

    def run_job(self, prepared):
        """[(name, status, output)] of the steps that have run, as a pull request's."""
        ran, failed = [], False
        for step in self.workflow["jobs"]["bits"]["steps"]:
            if "run" not in step or failed and "failure()" not in step.get("if", ""):
                continue
            if "failure()" in step.get("if", "") and not failed:
                continue
            if step["name"] in ("Libraries", "Build") and prepared:
                self.installed()
                continue
            if step["name"] == "Build":
                self.build(step["run"])
                continue
            of = {name: text.replace("${{ github.event.pull_request.base.sha }}", self.base)
                  for name, text in step.get("env", {}).items()}
            self.assertNotIn("${{", "".join(of.values()) + step["run"])
            status, out = self.shell(step["run"], **of, **({"PATH": self.path()} if step["name"] != "Path" and
                                                           (self.folder / "path").exists() else {}))
            ran.append((step["name"], status, out))
            failed = failed or status != 0
        return ran

    def test_the_repository_as_it_is_passes(self):
        self.assertEqual(set(self.workflow), {"name", "on", "jobs"})
        ran = self.run_job(prepared=False)
        self.assertEqual([(name, status) for name, status, _ in ran], [("Libraries", 0), ("Path", 0), ("Check", 0)], ran)
        self.assertIn("the hashes are those of golden.txt", ran[-1][2])
        self.assertEqual(ran[-1][2].count("check: the same bits"), 3)
        self.assertFalse((self.folder / "summary").exists())

    def test_a_change_of_bits_is_named(self):
        self.keep("layout")
        self.change("model/config.json", '"rms_norm_eps": 1e-05', '"rms_norm_eps": 1.0001e-05')
        ran = self.run_job(prepared=True)
        self.assertEqual([(name, status) for name, status, _ in ran], [("Path", 0), ("Check", 1), ("Explain", 0)], ran)
        summary = (self.folder / "summary").read_text(encoding="utf-8")
        for line in CHANGED.splitlines():
            self.assertIn("\n" + line, "\n" + summary)
        self.assertTrue((self.home / "ci/out/layout.html").exists())
        self.assertEqual(self.git("worktree", "list").count("\n"), 1)


class GitLab(Job):
    def setUp(self):
        super().setUp()
        self.job = read_yaml(CI / "gitlab.yml")["anyrank"]
        self.variables = {"CI_PROJECT_DIR": str(self.home)}
        self.variables["ANYRANK"] = self.job["variables"]["ANYRANK"].replace("$CI_PROJECT_DIR", str(self.home))

    def test_a_plan_that_leaves_a_sum_out_is_found(self):
        self.keep("plan")
        self.change("plan.json", '"layers.*.mlp.down_proj", "style": "rowwise"',
                    '"layers.*.mlp.down_proj", "style": "rowwise", "output": "P(sum)"')
        self.variables["CI_MERGE_REQUEST_DIFF_BASE_SHA"] = self.base
        for line in self.job["before_script"]:
            if "cmake" in line:
                self.build(line)
            elif not NETWORK.match(line) and "install_deps" not in line:
                self.assertEqual(self.shell(line)[0], 0, line)
        status, out = self.shell("\n".join(self.job["script"]))
        self.assertEqual(status, 1, out)
        self.assertIn("the first tensor that differs is model.layers.0.mlp.down_proj:fwd", out)
        self.assertIn("a missing sum over tp", out)
        # The baseline has the right bits, which is what explain compares: it says so.
        status, out = self.shell("\n".join(self.job["after_script"]), CI_JOB_STATUS="failed")
        self.assertIn("== plan: the baseline's tensors in that revision, and here", out)
        self.assertIn("verify: the same bits", out)
        self.assertEqual(self.shell("\n".join(self.job["after_script"]), CI_JOB_STATUS="success"), (0, ""))

    def test_the_files_use_the_same_commands(self):
        github = [step["run"] for step in read_yaml(CI / "github.yml")["jobs"]["bits"]["steps"] if "run" in step]
        for line in (*self.job["script"], "anyrank/scripts/install_deps.sh"):
            self.assertIn(line, github)
        self.assertTrue((ROOT / "scripts/install_deps.sh").is_file())


class Script(Job):
    def setUp(self):
        super().setUp()
        self.installed()
        self.variables = {"ANYRANK": str(self.home / "anyrank-installed/bin/anyrank")}

    def test_golden_is_what_is_checked_in(self):
        page = (ROOT / "docs/guide/pytest.md").read_text(encoding="utf-8")
        golden = (CI / "golden.txt").read_text(encoding="utf-8")
        names = re.findall(r"^(\w+)\s", re.sub(r"#.*", "", (CI / "cases.txt").read_text()), re.MULTILINE)
        self.assertEqual([line.split()[:2] for line in golden.splitlines()],
                         [[name, f"{kind}_hash"] for name in names for kind in ("gradients", "outputs", "weights")])
        shown = re.search(r"^```\n(layout gradients_hash.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
        self.assertIn(shown, golden)

    def test_wrong_input_is_no_difference(self):
        (self.home / "ci/cases.txt").write_text("one model --tp 3 --batch 2 --seq 8\n", encoding="utf-8")
        status, out = self.shell("ci/anyrank.sh check")
        self.assertEqual(status, 2, out)
        self.assertIn("cannot be split over tp=3", out)
        status, out = self.shell("ci/anyrank.sh golden")
        self.assertEqual(status, 2, out)
        self.assertEqual((self.home / "ci/golden.txt").read_bytes(), (CI / "golden.txt").read_bytes())

    def test_without_a_word_it_says_what_it_does(self):
        for words in ("", "chek"):
            status, out = self.shell(f"ci/anyrank.sh {words}")
            self.assertEqual(status, 2)
            self.assertEqual(len(re.findall(r"anyrank\.sh (check|explain|golden) ", out)), 3, out)

    def test_explaining_needs_a_difference(self):
        status, out = self.shell("ci/anyrank.sh explain HEAD")
        self.assertEqual(status, 2)
        self.assertIn("run 'ci/anyrank.sh check' first", out)


if __name__ == "__main__":
    unittest.main()
