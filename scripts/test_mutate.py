#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of mutate.py: its tables apply, and what it makes of a tree whose build and tests are scripts."""

import argparse
import contextlib
import io
import os
import pathlib
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True  # the checkout stays as it was
import mutate  # noqa: E402

BUILD = """#!/bin/sh
if grep -q broken sums.c; then echo "sums.c:1: error: broken"; exit 1; fi
"""

# Test x/NAME passes where sums.c has NAME in it; x/hang waits, in a process of its own.
RUN_TESTS = """import pathlib, subprocess, sys
names = ["x/plus", "x/minus", "x/hang"]
if "--list" in sys.argv:
    print("check/format", *names, "asan", sep="\\n")
    sys.exit(0)
print("--- building")
text, failed = pathlib.Path("sums.c").read_text(), 0
for name in [n for n in names if any(part in n for part in sys.argv[3:])]:
    pathlib.Path("log").open("a").write(name + "\\n")
    if name == "x/hang" and "stuck" in text:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        pathlib.Path("child").write_text(str(child.pid))
        child.wait()
    good = name == "x/hang" or name[2:] in text
    failed += not good
    print(("ok   " if good else "FAIL ") + name + "        0.1 s", flush=True)
    if not good:
        print(f"     | [FAIL] sums::{name[2:]}_is_there: (0.00s)\\nfailed: {name}", flush=True)
print(f"1 passed, {failed} failed")
sys.exit(1 if failed else 0)
"""

SUMS = "plus minus one two two\n"


class Suite(mutate.Suite):
    def configure(self):
        return 0, ""


class Tree(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="anyrank-test-mutate-")
        self.addCleanup(self.folder.cleanup)
        self.tree = pathlib.Path(self.folder.name) / "tree"
        files = {"sums.c": SUMS, "scripts/build.sh": BUILD, "scripts/run_tests.py": RUN_TESTS}
        mutate.sync(self.tree, {name: (text.encode(), name.endswith(".sh")) for name, text in files.items()})

    def verdicts(self, *entries, likely_only=False, resume=None):
        """[(verdict, by what)] of mistakes in sums.c."""
        mutants = [mutate.Mutant((description, "sums.c", *rest), "") for description, *rest in entries]
        results = mutate.Results(resume, "base")
        options = argparse.Namespace(likely_only=likely_only)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            mutate.try_all(Suite(self.tree, 1, 600), mutants, results, options)
        self.assertEqual((self.tree / "sums.c").read_text(), SUMS)
        self.output = output.getvalue()
        return [(results.find(mutant)["verdict"], results.find(mutant)["by"]) for mutant in mutants
                if results.find(mutant)]

    def names_run(self):
        """The tests that were run since the last call."""
        log = self.tree / "log"
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return names

    def test_a_mistake_is_killed_by_the_first_test_that_fails(self):
        self.assertEqual(self.verdicts(("lost", "plus", "", "x/plus x/minus")),
                         [("killed", "x/plus sums::plus_is_there")])
        self.assertEqual(self.names_run(), ["x/plus", "x/minus", "x/hang", "x/plus"])

    def test_tests_that_are_not_likely_run_where_the_likely_ones_pass(self):
        lost = ("lost", "minus", "", "x/plus")
        self.assertEqual(self.verdicts(lost), [("killed", "x/minus sums::minus_is_there (not among the likely)")])
        self.assertEqual(self.verdicts(lost, likely_only=True), [("unseen", "x/plus")])

    def test_what_no_test_sees_survives(self):
        self.assertEqual(self.verdicts(("unseen", "one", "1", "x/plus")), [("survived", "every test")])

    def test_a_text_that_is_not_there_once_does_not_apply(self):
        self.assertEqual([verdict for verdict, _ in self.verdicts(("twice", "two", "2", "x/plus"),
                                                                  ("never", "three", "3", "x/plus"))],
                         ["does not apply"] * 2)

    def test_what_the_compiler_refuses_does_not_build(self):
        self.assertEqual(self.verdicts(("refused", "one", "broken", "x/plus")),
                         [("does not build", "sums.c:1: error: broken")])

    def test_a_hang_is_seen_and_leaves_no_process(self):
        (self.tree / "sums.c").write_text("stuck")
        hangs = mutate.Mutant(("hangs", "sums.c", "one", "stuck", "x/hang"), "")
        self.assertEqual(mutate.judge(hangs, Suite(self.tree, 1, 1), True, False, set()),
                         ("killed", "x/hang: no end after 1 s"))
        started = self.tree / "child"  # not there, where a second was not enough to start it
        child = pathlib.Path("/proc") / (started.read_text() if started.exists() else "none")
        while child.exists() and " Z " not in (child / "stat").read_text():
            time.sleep(0.01)  # killed: it goes

    def test_a_mistake_that_this_processor_cannot_show_is_skipped(self):
        self.assertEqual(self.verdicts(("far", "plus", "", "x/plus", "no_such_flag")), [])
        self.assertIn("skipped", self.output)

    def test_results_are_gone_on_from(self):
        file = self.tree.parent / "results.json"
        killed, unseen = ("lost", "plus", "", "x/plus"), ("unseen", "one", "1", "x/plus")
        self.verdicts(killed, unseen, likely_only=True, resume=file)
        self.names_run()
        self.assertEqual([v for v, _ in self.verdicts(killed, unseen, resume=file)], ["killed", "survived"])
        self.assertEqual(self.names_run(), ["x/plus", "x/minus", "x/hang", "x/minus", "x/hang"])

    def test_a_test_that_fails_without_a_mistake_does_not_count(self):
        (self.tree / "scripts/run_tests.py").write_text(RUN_TESTS.replace("name[2:] in text", "name == 'x/minus'"))
        self.assertEqual(self.verdicts(("lost", "one", "", "x/plus"), likely_only=True), [("unseen", "x/plus")])
        self.assertIn("fail before anything is broken", self.output)

    def test_a_copy_loses_what_the_tree_has_not(self):
        (self.tree / "old.c").write_text("")
        (self.tree / "build").mkdir()
        (self.tree / "build/kept").write_text("")
        before = (self.tree / "sums.c").stat().st_mtime_ns
        mutate.sync(self.tree, {"sums.c": (SUMS.encode(), False), "new": (b"x", True)})
        self.assertEqual(sorted(p.name for p in self.tree.rglob("*") if p.is_file()), ["kept", "new", "sums.c"])
        self.assertEqual((self.tree / "sums.c").stat().st_mtime_ns, before)
        self.assertTrue(os.access(self.tree / "new", os.X_OK))


class Tables(unittest.TestCase):
    def test_every_mistake_stands_once_in_its_file(self):
        files = mutate.files_of_tree()
        for path in (mutate.TABLE, *sorted(mutate.ROOT.glob("tests/*/*mutants.py"))):
            with self.subTest(table=path.name), contextlib.redirect_stdout(io.StringIO()) as output:
                mutants = mutate.read_table(path)
                self.assertEqual(mutate.check(mutants, files), 0, output.getvalue())
                self.assertTrue(all(mutant.tests for mutant in mutants))


if __name__ == "__main__":
    unittest.main()
