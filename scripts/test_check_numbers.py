#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of check_numbers.py on made-up pages: what is a measured number, and that each rule is seen to reject."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True  # the checkout stays as it was
import check_numbers  # noqa: E402

SCRIPT = pathlib.Path(__file__).resolve().parent / "check_numbers.py"
PAGE = "docs/guide/a.md"
TEXT = "Right runs stay\nwithin 14 % of it, and 12 tests print that.\n"
ROWS = (f"page\twords\tsource\n{PAGE}\tstay within 14 % of it\ttests/a_test.py\n"
        f"{PAGE}\t12 tests print\tcommand: anyrank info\n")


class CheckNumbers(unittest.TestCase):
    def run_on(self, text, rows="", page=PAGE):
        """What is wrong with a page and a table beside tests/a_test.py."""
        with tempfile.TemporaryDirectory(prefix="anyrank-numbers-") as root:
            for name, content in {page: text, check_numbers.TABLE: rows, "tests/a_test.py": ""}.items():
                path = pathlib.Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
            return check_numbers.check(pathlib.Path(root))[0]

    def numbers(self, text, page=PAGE):
        return [" ".join(text[begin:end].split()) for begin, end in check_numbers.numbers(page, text)]

    def test_rows_cover_their_numbers(self):
        self.assertEqual(self.run_on(TEXT, ROWS), [])

    def test_an_unmatched_number_is_refused(self):
        wrong = self.run_on(TEXT, "\n".join(ROWS.split("\n")[:2]))
        self.assertEqual([line.split('"')[:2] for line in wrong], [[f"{PAGE}:2: what prints ", "12 tests"]])
        self.assertEqual(len(self.run_on(TEXT, ROWS.replace("stay within 14 %", "Right runs stay"))), 2)

    def test_a_row_without_an_occurrence_is_refused(self):
        wrong = self.run_on(TEXT, ROWS + f"{PAGE}\tfifteen tests\ttests/a_test.py\n")
        self.assertEqual(wrong, [f"{check_numbers.TABLE}:4: {PAGE} has no such words: fifteen tests"])

    def test_a_missing_source_is_refused(self):
        for source in ("tests/b_test.py", "", "command: ls"):
            wrong = self.run_on(TEXT, ROWS.replace("tests/a_test.py", source))
            self.assertEqual(wrong, [f"{check_numbers.TABLE}:2: no such source: {source}"])

    def test_measurements_and_counts_are_numbers(self):
        for text, numbers in (
                ("In 5.5 of them 3 of the 4 take 12 ms, 3.4us.", ["5.5", "3 of the 4", "12 ms", "3.4us"]),
                ("thirty-four injectable faults, twelve\nhashes", ["thirty-four injectable faults", "twelve hashes"]),
                ("2 to 4 times as fast, one run in a hundred", ["2 to 4 times", "one run in a hundred"]),
                ("within 1e-6, [185 faults](a.md#b)", ["1e-6", "185 faults"])):
            with self.subTest(text=text):
                self.assertEqual(self.numbers(text), numbers)
        self.assertEqual(self.numbers("0.5 and 1e-6, 9 tests take 20 s", "docs/design/numerics.md"), ["20 s"])

    def test_what_is_defined_dated_or_code_is_none(self):
        for text in ("Since 2026-11-29 with torch 2.15.0, CUDA 13.0 and gcc 12.2, at 29967da0.", "# 12 tests",
                     "two layouts on 4 ranks of tp=2", "1. `take 14 %`, section 2.5\n", "[a](12-tests)",
                     "```\n12 tests\n```\n", "a:\n\n    12 tests\n\nb", "<!-- 12 tests --> ![12 tests](a.svg)",
                     "8 times the spread, 2^-24, fp32, [4, 16, 32], an int64 of 2.5·x"):
            with self.subTest(text=text):
                self.assertEqual(self.numbers(text), [])

    def test_evidence_and_generated_pages_are_left_out(self):
        for page in ("docs/evidence/a.md", "docs/reference/causes.md"):
            self.assertEqual(self.run_on(TEXT, page=page), [])

    def test_the_command_lists_and_refuses(self):
        with tempfile.TemporaryDirectory(prefix="anyrank-numbers-") as root:
            (pathlib.Path(root) / "docs").mkdir()
            (pathlib.Path(root) / "docs/a.md").write_text("It takes 12 ms.\n", encoding="utf-8")
            for arguments, status, out in (["--list", root], 1, "docs/a.md:1\t12 ms\t-"), ([root + "/none"], 2, ""):
                command = [sys.executable, str(SCRIPT), *arguments]
                process = subprocess.run(command, capture_output=True, text=True, check=False)
                self.assertEqual((process.returncode, process.stdout.split("\n")[0]), (status, out))


if __name__ == "__main__":
    unittest.main()
