#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of check_public.py on a made-up project: that each rule is seen to reject."""

import pathlib
import subprocess
import sys
import tempfile
import unittest
from typing import Dict, List
from unittest import mock

sys.dont_write_bytecode = True  # the checkout stays as it was
import check_public  # noqa: E402

SCRIPT = pathlib.Path(__file__).resolve().parent / "check_public.py"
HEADER = """/* ar_comment(int) declares nothing. */
#define AR_TWICE(x) ar_macro(x)
typedef ar_status (*ar_tap_fn)(void *user);
struct ar_ops {
    ar_status (*ar_member)(int x);
};
AR_NODISCARD ar_status ar_shown(ar_ctx *ctx,
                                const ar_tensor *x);
const char *ar_demanded(void);
static inline ar_buf ar_bound(ar_buf b, size_t bytes)
{
    return ar_call(b);
}
"""
FILES = {
    "include/anyrank/a.h": HEADER,
    "examples/own.c": "int main(void) { return 0; }\n",
    "README.md": "It calls `ar_shown(ctx, x)`.\n",
    "docs/guide/a.md": "A page.\n",
    "python/abi/abi.c": "int f(void) { return ar_bound(b); }\n",
    "tests/sim/ring_test.c": "Test(ring, sums_are_equal, .timeout = 9)\n{\n}\nCLAIM(it_moves)\n{\n}\n",
    "tests/cli/a_test.py": "class A:\n    def test_it(self):\n        pass\n",
}
SHOWN = ("example own; test sim/ring_test:sums_are_equal; test sim/ring_test:it_moves; page README.md; "
         "test tests/cli/a_test.py:test_it; test tests/cli/a_test.py; command anyrank info; missing: a test")
TABLE = ("# The demands.\nnumber\tdemand\tfunctions\tshown\n"
         f"1\tit sums\tar_demanded\t{SHOWN}\n2\tit runs\t\texample own\n")


class CheckPublic(unittest.TestCase):
    def run_on(self, table: str = TABLE, **files: str) -> List[str]:
        """What is wrong with the project of FILES, where files of other contents replace or join them."""
        with tempfile.TemporaryDirectory(prefix="anyrank-public-") as root, \
                mock.patch.object(check_public, "DEMANDS", 2), mock.patch.object(check_public, "ALLOWED", self.allowed):
            for name, content in {**FILES, check_public.TABLE: table, **files}.items():
                path = pathlib.Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
            return check_public.check(pathlib.Path(root))

    def setUp(self) -> None:
        self.allowed: Dict[str, str] = {}

    def test_functions_with_users_and_complete_rows_are_right(self) -> None:
        self.assertEqual(self.run_on(), [])

    def test_functions_are_declarations_and_inline_definitions(self) -> None:
        with tempfile.TemporaryDirectory(prefix="anyrank-public-") as root:
            path = pathlib.Path(root, "include/anyrank/a.h")
            path.parent.mkdir(parents=True)
            path.write_text(HEADER, encoding="utf-8")
            self.assertEqual(check_public.public_functions(pathlib.Path(root)),
                             {name: f"include/anyrank/a.h:{line}" for name, line in
                              (("ar_shown", 7), ("ar_demanded", 9), ("ar_bound", 10))})

    def test_a_function_without_a_user_is_named_with_its_header(self) -> None:
        unused = "include/anyrank/a.h:7: ar_shown has no user: "
        for page in ("It calls ar_shown in prose.\n", "`ar_shown_not`\n"):
            (wrong,) = self.run_on(**{"README.md": page})
            self.assertTrue(wrong.startswith(unused) and wrong.endswith("or make it private (ari_)"), wrong)
        evidence = {"README.md": "", "docs/evidence/a.md": "`ar_shown`\n", "examples/own.c": "/* ar_shown */\n"}
        self.assertEqual([line[:len(unused)] for line in self.run_on(**evidence)], [unused])
        for users in ({"examples/own.c": "ar_shown(0, 0);\n"}, {"docs/guide/a.md": "```c\nar_shown(0, 0);\n```\n"},
                      {"python/anyrank/a.py": "load('ar_shown')\n"}):
            self.assertEqual(self.run_on(**{"README.md": "", **users}), [])

    def test_an_exception_is_for_a_function_without_a_user_alone(self) -> None:
        self.allowed = {"ar_shown": "a reason"}
        self.assertEqual(self.run_on(**{"README.md": ""}), [])
        self.assertEqual(self.run_on(), ["scripts/check_public.py: ALLOWED has ar_shown, which needs no exception: "
                                         "remove it"])

    def test_every_demand_has_one_row(self) -> None:
        row = "2\tit runs\t\texample own\n"
        self.assertEqual(self.run_on(TABLE.replace(row, "")), [f"{check_public.TABLE}: demand 2 has no row"])
        for number in ("2", "3", "0", "x"):
            wrong = f"{check_public.TABLE}:5: number '{number}', expected one of 1 to 2 that no other row has"
            self.assertEqual(self.run_on(TABLE + row.replace("2", number, 1)), [wrong])
        self.assertEqual(self.run_on(TABLE + "3\tit runs\n"),
                         [f"{check_public.TABLE}:5: 2 columns, expected 4: number, demand, functions, shown"])

    def test_a_row_names_public_functions(self) -> None:
        for name in ("ar_member", "ari_demanded"):
            wrong = f"{check_public.TABLE}:3: {name} is no function of include/anyrank: name a public one or none"
            self.assertEqual(self.run_on(TABLE.replace("ar_demanded", f"ar_demanded, {name}")), [wrong])

    def test_evidence_exists(self) -> None:
        for item, error in (
                ("example other", "there is no examples/other.c"),
                ("page docs/b.md", "there is no page docs/b.md"),
                ("test sim/other_test:it_moves",
                 "there is no file tests/sim/other_test.c: name FOLDER/FILE_test:NAME, or the path of a Python test"),
                ("test sim/ring_test:sums_are", "tests/sim/ring_test.c has no test 'sums_are'"),
                ("test sim/ring_test", "tests/sim/ring_test.c has no test ''"),
                ("test tests/cli/a_test.py:test_i", "tests/cli/a_test.py has no test 'test_i'"),
                ("command ls",
                 "'command ls' is none of: example NAME, test .., command anyrank .., page PATH, missing: .."),
                ("", "demand 2 is shown by nothing: name a test, an example, a command or a page"),
                ("missing: all", "demand 2 is shown by nothing: name a test, an example, a command or a page")):
            with self.subTest(item=item):
                self.assertEqual(self.run_on(TABLE.replace("\t\texample own", f"\t\t{item}")),
                                 [f"{check_public.TABLE}:4: {error}"])

    def test_users_pages_name_no_private_function(self) -> None:
        text = "One.\nIt calls `ari_sum`.\n"
        for page in ("README.md", "docs/index.md", "docs/start/a.md", "docs/design/a.md", "docs/reference/a.md"):
            self.assertEqual(self.run_on(**{page: text + "`ar_shown`\n"}),
                             [f"{page}:2: ari_sum is private: name what a user can call"])
        for page in ("docs/design/architecture.md", "docs/design/baseline.md", "docs/evidence/a.md"):
            self.assertEqual(self.run_on(**{page: text}), [])

    def test_the_command_lists_and_refuses(self) -> None:
        with tempfile.TemporaryDirectory(prefix="anyrank-public-") as root:
            pathlib.Path(root, "README.md").write_text("`ari_sum`\n", encoding="utf-8")
            for arguments, status, line in (([root], 1, "README.md:1: ari_sum is private: name what a user can call"),
                                            ([root, "b"], 2, "")):
                command = [sys.executable, str(SCRIPT), *arguments]
                process = subprocess.run(command, capture_output=True, text=True, check=False)
                self.assertEqual((process.returncode, process.stdout.split("\n")[-2] if line else ""), (status, line))


if __name__ == "__main__":
    unittest.main()
