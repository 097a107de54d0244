#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of run_tests.py: what it makes of a program's output and exit status."""

import contextlib
import io
import signal
import sys
import time
import unittest

sys.dont_write_bytecode = True  # the checkout stays as it was
import run_tests  # noqa: E402

CLOSING = "[====] Synthesis: Tested: {} | Passing: {} | Failing: {} | Crashing: {} \n"


def criterion(status, output, timed_out=False):
    result = run_tests.judge_criterion("x", status, output, 0.0, timed_out, 300)
    return result.passed, result.failed, len(result.skips)


def plain_main(status, output="", timed_out=False):
    result = run_tests.judge_main("x", status, output, 0.0, timed_out, 300)
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
        output = "[SKIP] gpu::gemm: CUDA device: none\n" + CLOSING.format(3, 3, 0, 0)
        self.assertEqual(criterion(0, output), (3, 0, 1))
        result = run_tests.judge_criterion("x", 0, output, 0.0, False, 300)
        self.assertEqual(result.skips, ["gpu::gemm: CUDA device: none"])
        self.assertEqual(criterion(0, "[SKIP] gpu::gemm: none\n" + CLOSING.format(0, 0, 0, 0)), (0, 0, 1))


class PlainMain(unittest.TestCase):
    def test_exit_status_decides(self):
        self.assertEqual(plain_main(0), (1, 0, 0))
        self.assertEqual(plain_main(1), (0, 1, 0))
        self.assertEqual(plain_main(-signal.SIGSEGV), (0, 1, 0))
        self.assertEqual(plain_main(77, "no GPU\n"), (0, 0, 1))

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

    def test_nothing_run_is_a_failure(self):
        self.assertEqual(self.close(), (1, "0 passed, 0 failed"))


class Limit(unittest.TestCase):
    def test_a_program_past_its_limit_is_killed_with_its_children(self):
        start = time.monotonic()
        # The child holds the pipe open: without the kill of the group, this waits for it.
        _, _, _, timed_out = run_tests.run(["sh", "-c", "sleep 30 & sleep 30"], 0.3)
        self.assertTrue(timed_out)
        self.assertLess(time.monotonic() - start, 10)


if __name__ == "__main__":
    sys.exit(unittest.main())
