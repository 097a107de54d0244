#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What libanyrank_abi exports, what its header declares and what the Python package calls: the same names."""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/libanyrank_abi.so"
HEADER = (ROOT / "include/anyrank/abi.h").read_text(encoding="utf-8")
DECLARED = set(re.findall(r"AR_ABI_EXPORT [^;(]*?\b(ar_abi_\w+)\(", HEADER))


class Names(unittest.TestCase):
    def test_the_shared_library_exports_what_the_header_declares_and_no_more(self):
        listed = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], stdout=subprocess.PIPE, text=True, check=True)
        self.assertEqual({line.split()[-1] for line in listed.stdout.splitlines()}, DECLARED)
        self.assertGreater(len(DECLARED), 10)

    def test_the_package_calls_functions_of_the_header_at_its_number(self):
        source = (ROOT / "python/anyrank/_library.py").read_text(encoding="utf-8")
        called = set(re.findall(r'^    "(\w+)": \(', source, re.MULTILINE))
        self.assertEqual({f"ar_abi_{name}" for name in called} - DECLARED, set())
        number = re.search(r"^#define AR_ABI_NUMBER (\d+)$", HEADER, re.MULTILINE).group(1)
        self.assertRegex(source, rf"(?m)^NUMBER = {number}\b")


if __name__ == "__main__":
    if not shutil.which("nm"):
        print("no nm here, which lists a library's symbols")
        sys.exit(77)
    unittest.main()
