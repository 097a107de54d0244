#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/measures.py: what it counts of small sources, by hand."""

import pathlib
import tempfile
import unittest

import measures
import size

FILES = {
    "ref/core/a.h": "/* What cp is. */\nint ar_a(int x);\nstatic inline int ari_b(void)\n{\n    return 1;\n}\n"
                    "typedef struct ar_pair {\n    int x, y[3];\n    void (*call)(int a, int b);\n    struct {\n"
                    "        int z;\n    } in;\n} ar_pair;\n",
    "ref/core/a.c": 'int ar_a(int x)\n{\n    return ar_c("give --cp", x);\n}\n',
    "include/anyrank/p.h": "int ar_p(int of);\n", "python/anyrank/x.py": "own = 1  # of\nif own: value = len(own)\n",
    "python/anyrank/tests/test_x.py": "a\nb\nc\n", "python/anyrank/explain/y.py": "of\nby\n", "bench/z.py": "of\n",
    "verify/bytes/b.c": "int of;\n",
    "ref/comm/c.c": "int ar_c(const char *s, int pp)\n{\n    return ar_a(pp);\n}\n",
    "tests/core/a_test.c": "one\ntwo\n",
    **{f"sim/{name}.c": "static int add(int x)\n{\n    return x; // " + "wide " * 24 + "\n}\n" for name in "xyz"},
}


class Measures(unittest.TestCase):
    def test_small_sources_are_counted_as_by_hand(self):
        with tempfile.TemporaryDirectory(prefix="anyrank-measures-") as folder:
            for name, text in FILES.items():
                path = pathlib.Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            got = {name: value for name, value, _ in measures.measures(pathlib.Path(folder))}
        expected = {"lines of C and CUDA outside tests": 35, "public functions": 1, "private functions in headers": 1,
                    "private functions with one calling file, of 100": 100.0,
                    "function words in include/, of 1,000 identifiers": 500.0,
                    "function words in Python outside LEFT_OUT, of 1,000 identifiers": 600.0,
                    "function words in C outside LEFT_OUT, of 1,000 identifiers": 62.5,
                    "names of one or two letters in Python outside LEFT_OUT, of 1,000 identifiers": 0.0,
                    "circles of calls across folders": 1, "circles of calls inside folders": 0,
                    "lines over 120 columns": 3, "lines of the Python package": 4,
                    "lines of tests/ and python/anyrank/tests": 5}
        self.assertEqual({name: got[name] for name in expected}, expected)

    def test_a_comment_is_no_token_and_a_string_is_one(self):
        count = len(measures.TOKEN.findall(measures.rules.without_comments('x += "a b"; /* none\n */ // nor this')))
        self.assertEqual(count, 5)


class Sizes(unittest.TestCase):
    def test_lines_tokens_and_words_of_small_files(self):
        sizes = size.sizes_of({"a/x.c": "int a; /* b */\n", "a/y.py": "x = 1  # one\n", "README.md": "two words\n"})
        self.assertEqual(sizes, {"a": (2, 6, 0), ".": (0, 0, 2)})


if __name__ == "__main__":
    unittest.main()
