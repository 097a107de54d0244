#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that each public function is used outside the library, and that users' pages name no private one:

    scripts/check_public.py [ROOT]

A function that a header of include/anyrank declares is used if its name is in code of examples/, in code of README.md
or a page of docs/ (fenced or inline; pages of docs/evidence do not count), in the Python binding, or in the column
`functions` of docs/evidence/demands.tsv. That table has a row for each of the 81 demands on the project: what was asked
for, the public functions that do it, and what shows it, separated by "; ":

    example NAME                    examples/NAME.c
    test FOLDER/FILE_test:NAME      a test or claim of tests/FOLDER/FILE_test.c
    test PATH.py[:FUNCTION]         a file of Python tests, and a function in it
    command anyrank ..              a command that shows it
    page PATH                       a page
    missing: ..                     what does not work, or what no test shows

Prints "file:line: what is wrong" for each violation; exit status 1 if there is one.
"""

import pathlib
import re
import sys
from typing import Dict, List, Set, Tuple

import check_includes

TABLE = "docs/evidence/demands.tsv"
DEMANDS = 81
COLUMNS = ["number", "demand", "functions", "shown"]
# Public functions without a user that stay, each with its reason: a public struct cannot be used without it.
ALLOWED: Dict[str, str] = {
    "ar_config_bit": "reads the bit sets of layers in ar_config (dense, full_attention, unturned)",
    # What a family's fields of ar_config and the options together mean.
    "ar_config_router_bias": "tells if routers have a bias that a training step moves",
    "ar_config_balance": "finds the load-balancing loss that is in force",
    "ar_config_router_losses": "tells if routers add losses",
    "ar_config_norm_before": "tells if norms come before their branches",
}

FUNCTION = re.compile(r"^(?!typedef\b|return\b)[A-Za-z_][\w *]*?\b(ar_\w+)\([^;{}]*\)[^;{}]*[;{]", re.MULTILINE)
PRIVATE = re.compile(r"\bari_\w+")
WORD = re.compile(r"\bar_\w+")
CODE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
FOR_DEVELOPERS = {"docs/design/architecture.md", "docs/design/baseline.md"}  # pages about the code itself
SOURCES = {".c", ".h", ".cu", ".py"}


def read(path: pathlib.Path) -> str:
    """The file's text; of C without comments, whose words call nothing."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return check_includes.without_comments(text) if path.suffix in {".c", ".h", ".cu"} else text


def pages(root: pathlib.Path) -> Dict[str, str]:
    """{page: its text}, without docs/evidence."""
    paths = [root / "README.md", *sorted(root.glob("docs/**/*.md"))]
    names = {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    return {name: path.read_text(encoding="utf-8") for name, path in names.items()
            if not name.startswith("docs/evidence/")}


def public_functions(root: pathlib.Path) -> Dict[str, str]:
    """{function: "header:line"} of the public headers."""
    found: Dict[str, str] = {}
    for path in sorted(root.glob("include/anyrank/*.h")):
        text = read(path)
        for match in FUNCTION.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            found.setdefault(match.group(1), f"{path.relative_to(root).as_posix()}:{line}")
    return found


def used_words(root: pathlib.Path) -> Set[str]:
    """The ar_ words of examples, of code in pages, and of the Python binding."""
    texts = [read(path) for folder in ("examples", "python") for path in sorted((root / folder).rglob("*"))
             if path.suffix in SOURCES and path.is_file()]
    texts += [match.group() for text in pages(root).values() for match in CODE.finditer(text)]
    return {word for text in texts for word in WORD.findall(text)}


def rows(root: pathlib.Path) -> List[Tuple[int, List[str]]]:
    """[(line, columns)] of the table."""
    lines = (root / TABLE).read_text(encoding="utf-8").splitlines() if (root / TABLE).is_file() else []
    return [(number, line.split("\t")) for number, line in enumerate(lines, 1)
            if line and not line.startswith("#") and line.split("\t") != COLUMNS]


def functions_of(columns: List[str]) -> List[str]:
    return [name.strip() for name in columns[2].split(",") if name.strip()]


def test_error(root: pathlib.Path, words: str) -> str:
    """What is wrong with the name of a test; "" if nothing is."""
    file, _, name = words.partition(":")
    path = file if file.endswith(".py") else f"tests/{file}.c"
    if not (root / path).is_file():
        return f"there is no file {path}: name FOLDER/FILE_test:NAME, or the path of a Python test"
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        found = not name or re.search(rf"^ *def {re.escape(name)}\(", text, re.MULTILINE)
    else:
        found = re.search(rf"^(?:\w*Test\([^;{{]*?\b|CLAIM\(){re.escape(name)}\b", text, re.MULTILINE) if name else None
    return "" if found else f"{path} has no test '{name}'"


def evidence_error(root: pathlib.Path, item: str) -> str:
    """What is wrong with an item of the column `shown`; "" if nothing is."""
    kind, _, words = item.partition(" ")
    if kind == "test":
        return test_error(root, words)
    if kind == "example":
        return "" if (root / f"examples/{words}.c").is_file() else f"there is no examples/{words}.c"
    if kind == "page":
        return "" if words.endswith(".md") and (root / words).is_file() else f"there is no page {words}"
    if (kind == "command" and words.startswith("anyrank ")) or (kind == "missing:" and words):
        return ""
    return f"'{item}' is none of: example NAME, test .., command anyrank .., page PATH, missing: .."


def table_errors(root: pathlib.Path, public: Dict[str, str]) -> List[str]:
    """["file:line: what is wrong"] of the table of demands."""
    wrong, seen = [], set()
    for line, columns in rows(root):
        prefix = f"{TABLE}:{line}: "
        if len(columns) != len(COLUMNS):
            wrong.append(f"{prefix}{len(columns)} columns, expected {len(COLUMNS)}: {', '.join(COLUMNS)}")
            continue
        number = int(columns[0]) if columns[0].isdecimal() else 0
        if not 1 <= number <= DEMANDS or number in seen:
            wrong.append(f"{prefix}number '{columns[0]}', expected one of 1 to {DEMANDS} that no other row has")
        seen.add(number)
        wrong += [f"{prefix}{name} is no function of include/anyrank: name a public one or none"
                  for name in functions_of(columns) if name not in public]
        if not any(item and not item.startswith("missing:") for item in columns[3].split("; ")):
            wrong.append(f"{prefix}demand {number} is shown by nothing: name a test, an example, a command or a page")
        errors = [evidence_error(root, item) for item in columns[3].split("; ") if item]
        wrong += [prefix + error for error in errors if error]
    wrong += [f"{TABLE}: demand {number} has no row" for number in range(1, DEMANDS + 1) if number not in seen]
    return wrong


def page_errors(root: pathlib.Path) -> List[str]:
    """["file:line: what is wrong"] of private names in users' pages."""
    return [f"{page}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()} is private: name what a user can call"
            for page, text in pages(root).items() if page not in FOR_DEVELOPERS for match in PRIVATE.finditer(text)]


def check(root: pathlib.Path) -> List[str]:
    """["file:line: what is wrong"]"""
    public = public_functions(root)
    used = used_words(root) | {name for _, columns in rows(root) if len(columns) == len(COLUMNS)
                               for name in functions_of(columns)}
    unused = [f"{location}: {name} has no user: show it in an example or a page, or make it private (ari_)"
              for name, location in public.items() if name not in used and name not in ALLOWED]
    stale = [f"scripts/check_public.py: ALLOWED has {name}, which needs no exception: remove it"
             for name in ALLOWED if name not in public or name in used]
    return unused + stale + table_errors(root, public) + page_errors(root)


def main() -> int:
    if len(sys.argv) > 2:
        print("usage: check_public.py [ROOT]", file=sys.stderr)
        return 2
    root = pathlib.Path(sys.argv[1] if len(sys.argv) == 2 else pathlib.Path(__file__).resolve().parent.parent)
    wrong = check(root)
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
