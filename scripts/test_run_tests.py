#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of run_tests.py: what it makes of a program's output and exit status."""

import contextlib
import fnmatch
import io
import pathlib
import signal
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

sys.dont_write_bytecode = True  # the checkout stays as it was
import run_tests  # noqa: E402

CLOSING = "[====] Synthesis: Tested: {} | Passing: {} | Failing: {} | Crashing: {} \n"


def ended(status, output="", timed_out=False):
    return run_tests.Ended(status, output, 0.0, 0.0, timed_out)


def criterion(status, output, timed_out=False):
    result = run_tests.judge_criterion("x", ended(status, output, timed_out), 300)
    return result.passed, result.failed, len(result.skips)


def plain_main(status, output="", timed_out=False):
    result = run_tests.judge_main("x", ended(status, output, timed_out), 300)
    return result.passed, result.failed, len(result.skips)


class Criterion(unittest.TestCase):
    def test_counts_come_from_the_closing_line(self):
        self.assertEqual(criterion(0, CLOSING.format(10, 10, 0, 0)), (10, 0, 0))
        self.assertEqual(criterion(1, CLOSING.format(10, 4, 6, 2)), (4, 6, 0))

    def test_colours_do_not_hide_the_closing_line(self):
        text = "\x1b[0;34m[====]\x1b[0m Synthesis: Tested: \x1b[1m2\x1b[0m | Passing: 1 | Failing: 1 | Crashing: 0"
        self.assertEqual(criterion(1, text), (1, 1, 0))

    def test_no_test_run_is_a_failure(self):
        self.assertEqual(criterion(0, CLOSING.format(0, 0, 0, 0)), (0, 1, 0))

    def test_no_closing_line_is_a_failure(self):
        self.assertEqual(criterion(0, "usage: ..."), (0, 1, 0))
        self.assertEqual(criterion(-11, ""), (0, 1, 0))

    def test_a_leak_is_a_failure_although_all_pass(self):
        self.assertEqual(criterion(0, "==1==ERROR: LeakSanitizer: detected\n" + CLOSING.format(3, 3, 0, 0)), (3, 1, 0))

    def test_a_bad_exit_status_is_a_failure_although_all_pass(self):
        self.assertEqual(criterion(1, CLOSING.format(3, 3, 0, 0)), (3, 1, 0))

    def test_a_hang_is_a_failure(self):
        self.assertEqual(criterion(-9, CLOSING.format(3, 3, 0, 0), timed_out=True), (0, 1, 0))

    def test_skipped_tests_are_counted_with_their_reason(self):
        output = "[SKIP] gpu::gemm: CUDA device: none\n[SKIP] gpu::of_another_file: Test is disabled\n" + CLOSING.format(3, 3, 0, 0)
        self.assertEqual(criterion(0, output), (3, 0, 1))
        self.assertEqual(run_tests.judge_criterion("x", ended(0, output), 300).skips, ["CUDA device: none"])
        self.assertEqual(criterion(0, "[SKIP] gpu::gemm: none\n" + CLOSING.format(0, 0, 0, 0)), (0, 0, 1))


class PlainMain(unittest.TestCase):
    def test_exit_status_decides(self):
        self.assertEqual(plain_main(0), (1, 0, 0))
        self.assertEqual(plain_main(1), (0, 1, 0))
        self.assertEqual(plain_main(-signal.SIGSEGV), (0, 1, 0))
        self.assertEqual(plain_main(77, "no GPU\n"), (0, 0, 1))

    def test_cases_that_are_skipped_inside_are_counted(self):
        said = "test_a (x.X.test_a) ... skipped 'no torch here'\ntest_b (x.X.test_b) ... ok\n\nOK (skipped=1)\n"
        self.assertEqual(run_tests.judge_main("x", ended(0, said), 300).skips, ["no torch here"])
        self.assertEqual(plain_main(0, said), (1, 0, 1))

    def test_a_race_is_a_failure_although_it_exits_0(self):
        self.assertEqual(plain_main(0, "WARNING: ThreadSanitizer: data race\n"), (0, 1, 0))


class Check(unittest.TestCase):
    def check(self, script):
        result = run_tests.simple_check("x", ["sh", "-c", script])
        return result.passed, result.failed, result.skips

    def test_exit_status_decides(self):
        self.assertEqual(self.check("exit 0"), (1, 0, []))
        self.assertEqual(self.check("exit 2"), (0, 1, []))
        self.assertEqual(self.check("echo why; exit 77"), (0, 0, ["why"]))


class Runner(unittest.TestCase):
    """Criterion's own process, and what becomes of its tests where it dies."""

    def result(self, *runs):
        program = mock.Mock(criterion=True, extended=False, path="..")
        program.name, program.command.return_value = "x", ["x"]
        with mock.patch.object(run_tests, "run", side_effect=runs):
            result = run_tests.run_program(program, "build", mock.Mock())
        return result.passed, result.failed

    def test_it_runs_again_once_where_it_died_before_its_closing_line(self):
        died, good = ended(-11, "[----] a test"), ended(0, CLOSING.format(3, 3, 0, 0))
        self.assertEqual(self.result(died, good), (3, 0))
        self.assertEqual(self.result(died, died), (0, 1))

    def test_what_its_tests_do_is_judged_at_once(self):
        for outcome in (ended(-11, CLOSING.format(3, 3, 0, 0)), ended(-11, "", timed_out=True), ended(-6), ended(1)):
            self.assertEqual(self.result(outcome)[1], 1)


class Package(unittest.TestCase):
    """A file of the Python package's tests: what is made of its runs."""

    def result(self, output, status=0, timed_out=False):
        with mock.patch.object(run_tests, "run", return_value=ended(status, output, timed_out)), \
                mock.patch.object(run_tests.package_checks, "too_old", return_value=None):
            return run_tests.package_test("python/test_x", pathlib.Path("test_x.py"))

    def test_counts_and_reasons_come_from_its_last_lines(self):
        result = self.result("..s\nskipped: anyrank.tests.test_x.A.test_b: no torch here\n2 passed, 0 failed, 1 skipped\n")
        self.assertEqual((result.passed, result.failed, result.skips), (2, 0, ["no torch here"]))
        result = self.result("2 passed, 3 failed\n", 1)
        self.assertEqual((result.passed, result.failed, result.skips), (2, 3, []))

    def test_a_crash_a_hang_and_silence_are_failures(self):
        for output, status, timed_out in (("", 0, False), ("", -11, False), ("2 passed, 0 failed\n", -9, True),
                                          ("2 passed, 0 failed\n", -11, False)):
            self.assertEqual(self.result(output, status, timed_out).failed, 1)

    def test_a_python_that_cannot_import_it_skips_it(self):
        with mock.patch.object(run_tests.package_checks, "interpreter", return_value=sys.executable), \
                mock.patch.object(sys, "version_info", (3, 8, 18)):
            result = run_tests.package_test("python/test_x", pathlib.Path("test_x.py"))
        self.assertEqual(result.skips, ["the package needs Python 3.9, this one is 3.8"])


class Sources(unittest.TestCase):
    def test_the_format_of_every_folder_is_checked(self):
        tops = {name.split("/")[0] for name in run_tests.sources(".c", ".h")}
        self.assertLessEqual({"include", "gpu", "ref", "sim", "verify", "cli", "tests"}, tops)


class Suites(unittest.TestCase):
    def test_every_test_gives_its_suite(self):
        source = "Test(b, x)\n{\nTest(c, y, .timeout = 60)\nTestSuite(a, .init = set_up);\nTested(d, z)\nPATH_SUITE(e);\n"
        source += "EVERY_CLAIM(f)\n"
        self.assertEqual(run_tests.suites_of(source), sorted(["a", "b", "c", "f", *(f"e_{path}" for path in run_tests.PATHS)]))
        self.assertIn("portable", run_tests.PATHS)

    def test_a_suite_that_no_file_names_is_found(self):
        with tempfile.TemporaryDirectory() as build:
            program = run_tests.Program(run_tests.ROOT / "tests/core/size_test.c")
            fake = pathlib.Path(build) / program.path
            fake.parent.mkdir()
            fake.write_text(f"#!/bin/sh\necho '{program.suites[0]}: 2 tests'\necho 'other: 1 test'\n")
            fake.chmod(0o755)
            self.assertEqual(run_tests.lost_suites([program], build), ["tests/core: other"])


class ClosingLine(unittest.TestCase):
    def close(self, *results):
        report = run_tests.Report()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for result in results:
                report.add(result)
            status = report.close()
        return status, out.getvalue().splitlines()[-1]

    def test_it_is_the_last_line_and_decides_the_exit_status(self):
        good, bad = run_tests.Result("a", 3, 0), run_tests.Result("b", 1, 2)
        skip = run_tests.Result("c", skips=["no GPU"])
        self.assertEqual(self.close(good), (0, "3 passed, 0 failed"))
        self.assertEqual(self.close(good, bad), (1, "4 passed, 2 failed"))
        self.assertEqual(self.close(good, skip), (0, "3 passed, 0 failed, 1 skipped"))

    def test_a_reason_to_skip_is_one_line_however_many_tests_it_skips(self):
        report = run_tests.Report()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            report.add(run_tests.Result("a", 1, 0, skips=["no GPU"] * 3))
            report.add(run_tests.Result("b", skips=["no GPU", "no MPI"]))
            report.close()
        lines = [line for line in out.getvalue().splitlines() if line.startswith("skipped:")]
        self.assertEqual(lines, ["skipped: no GPU (a 3, b)", "skipped: no MPI (b)"])
        self.assertTrue(out.getvalue().endswith("1 passed, 0 failed, 5 skipped\n"))

    def test_a_long_log_ends_with_the_reasons(self):
        report = run_tests.Report(reasons_last=True)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            report.add(run_tests.Result("a", 1, 0, skips=["no GPU", "no MPI"]))
            report.close()
        self.assertTrue(out.getvalue().endswith("\n1 passed, 0 failed, 2 skipped\nskipped: no GPU (a); no MPI (a)\n"))

    def test_what_plain_test_leaves_out_is_there(self):
        names = {program.name for program in run_tests.programs(False)} | {
            name for name, _ in run_tests.source_checks("build", False)}
        for glob in " ".join(run_tests.HELD.values()).split():
            self.assertTrue(any(fnmatch.fnmatchcase(name, glob) for name in names), glob)
        self.assertIsNone(run_tests.held_for("verify/check_test"))
        self.assertEqual(run_tests.held_for("gpu/cuda_command_test"), "the command with the CUDA device")

    def test_nothing_run_is_a_failure(self):
        self.assertEqual(self.close(), (1, "0 passed, 0 failed"))


class Arm(unittest.TestCase):
    """Where programs of 64-bit ARM cannot run beside the machine's own, they are skipped, and why is said."""

    def lacks(self, machine, *ends):
        with mock.patch("os.uname", return_value=types.SimpleNamespace(machine=machine)), \
             mock.patch.object(run_tests, "run", side_effect=ends):
            return run_tests.lacks_arm()

    def test_it_runs_where_both_checks_pass(self):
        self.assertIsNone(self.lacks("x86_64", ended(0), ended(0)))

    def test_what_is_missing_is_said(self):
        self.assertEqual(self.lacks("x86_64", ended(2, "no compiler")), "no build for 64-bit ARM: no compiler")
        self.assertEqual(self.lacks("x86_64", ended(0), ended(2, "a\nno qemu")), "no build for 64-bit ARM: no qemu")
        self.assertIn("itself", self.lacks("aarch64"))


class Limit(unittest.TestCase):
    def test_a_program_past_its_limit_is_killed_with_its_children(self):
        start = time.monotonic()
        # The child holds the pipe open: without the kill of the group, this waits for it.
        killed = run_tests.run(["sh", "-c", "sleep 3000 & sleep 3000"], 0.3)
        self.assertTrue(killed.timed_out)
        self.assertLess(time.monotonic() - start, 3000)


if __name__ == "__main__":
    sys.exit(unittest.main())
