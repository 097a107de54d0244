#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that each measured number in the pages' prose has a test or script that prints it:

    scripts/check_numbers.py [--list] [ROOT]

A measured number is a percentage, "N of M", a number with a unit of time, bytes, speed or size, a decimal, or a count
of the project's own things (faults, tests, layouts, ..). Code, links' targets, headings, versions and dates are none.
Pages of definitions are searched for the first three alone. Each is covered by a row of docs/evidence/numbers.tsv: the
page, words of the sentence with the number, and its source, which is a file of the repository or "command: anyrank ..".
Prints "page:line: what is wrong" for each number without a row, and for each row whose words the page no longer has or
whose source does not exist; exit status 1 if there is one. --list prints each number with its source, by page.
"""

import pathlib
import re
import sys

TABLE = "docs/evidence/numbers.tsv"
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
EXCLUDED = {
    "docs/evidence/": "evidence itself: each row names how it was measured",
    "docs/reference/causes.md": "scripts/causes_page.py writes it",
    "docs/reference/faults.md": "scripts/fault_table.py writes its table and counts",
}
DEFINITIONS = {"docs/design/numerics.md", "docs/design/parallelism.md"}  # decimals and counts in them are formulas
NO_TABLES = {  # pages whose tables are left out
    "docs/design/simulated-cluster.md": "its numbers define names of links and machines",
    "docs/reference/dependencies.md": "its decimals are versions",
    "docs/reference/models.md": "its numbers are the defaults of other programs' configs",
}

UNDER_TEN = "one two three four five six seven eight nine".split()
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen hundred thousand".split()
TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
WORD = rf"\b(?:(?:{TENS})(?:-(?:{'|'.join(UNDER_TEN)}))?|{'|'.join(UNDER_TEN[4:] + TEENS)})\b"
FIGURES = r'(?<![\w.,"^/·=+-])(?<![·=+←] )\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?'
DIGITS = rf'{FIGURES}(?![\w/·^"]|[.,]\d)'
ONE = rf"(?:{DIGITS}|{WORD})"
NUMBER = rf"{ONE}(?:\s+(?:to|and|or)\s+{ONE})?"
COUNT = rf"(?!\b[0-4]\s){NUMBER}"  # fewer is grammar: "two layouts"
TIMES = r"times(?!\s+(?:the|a|per|that|it)\b)"  # "8 times the spread" is a formula
UNITS = rf"%|[mµun]?s|seconds|minutes?|hours?|days?|ulps?|[kMGT]i?B(?:/s)?|[GT]FLOPS|tokens/s|{TIMES}"
THINGS = ("lines words faults causes bugs tests checks cases programs kernels functions architectures families "
          "models runs layouts hashes options schedules figures pages files folders combinations frameworks "
          "subcommands commands examples algorithms mutants tensors inputs steps").replace(" ", "|")
MEASURED = [re.compile(pattern) for pattern in (
    rf"(?:{NUMBER}\s+|{FIGURES}\s*)(?:{UNITS})(?![\w/])",
    rf"{ONE}\s+of\s+(?:the\s+|all\s+)?{ONE}",
    rf"\bone\b[^.,;:|]{{0,30}}\s+in\s+(?:a\s+)?{ONE}")]
IN_OTHERS = [re.compile(pattern) for pattern in (
    rf"{COUNT}\s+(?:[a-z-]+\s+){{0,2}}(?:{THINGS})\b",
    rf"(?=[\d,]+(?:\.\d|e)){DIGITS}")]

VERSIONED = ("CUDA|NCCL|MPI|MPICH|Python|PyTorch|Debian|Ubuntu|RHEL|BLIS|OpenBLAS|Llama|GPT|gcc|glibc|nvcc|torch|"
             "transformers|version|capability|tested with")
BLANKED = [re.compile(pattern, flags) for pattern, flags in (
    (r"^(?P<fence> *```+|~~~+).*?^(?P=fence) *$", re.MULTILINE | re.DOTALL),
    (r"(?:\A|\n)\n(?:(?: {4,}|\t)\S.*\n|\n(?= {4}))+", 0),  # an indented block
    (r"<!--.*?-->", re.DOTALL), (r"^#+ .*$", re.MULTILINE), (r"!\[[^\]]*\]\([^)]*\)", 0),
    (r"(`+)(?:(?!\n\n)[^`]|(?!\1)`)+\1", 0), (r"\]\([^)\s]*\)", 0), (r"https?://\S+", 0),
    (r"^\s*\d+\.\s", re.MULTILINE),  # list markers
    (r"\b(?:19|20)\d\d(?:-\d\d){0,2}\b", 0), (r"\barXiv:\S+|\bdoi:\S+|\b[Ss]ections?\s+\d+", 0),
    (r"\b\d+\.\d+\.\d+\b", 0), (r"\b(?=[0-9]*[a-f])[0-9a-f]{7,40}\b", 0),
    (rf"\b(?:{VERSIONED})[ -]v?\d+(?:\.\d+)*\b", 0))]


def pages(root):
    """{page: its text} of those that are checked."""
    found = sorted({path for pattern in PAGES for path in root.glob(pattern)})
    names = {path.relative_to(root).as_posix(): path for path in found}
    return {name: path.read_text(encoding="utf-8") for name, path in names.items()
            if not name.startswith(tuple(EXCLUDED))}


def prose(page, text):
    """The page with everything else blank, each character where it was."""
    def blank(match):
        return re.sub(r"\S", "\0", match.group())
    for pattern in BLANKED:
        text = pattern.sub(blank, text)
    return re.sub(r"^\|.*$", blank, text, flags=re.MULTILINE) if page in NO_TABLES else text


def numbers(page, text):
    """Sorted [(begin, end)] of the measured numbers, none inside another."""
    shown = prose(page, text)
    spans = sorted({match.span() for pattern in MEASURED + (IN_OTHERS if page not in DEFINITIONS else [])
                    for match in pattern.finditer(shown)}, key=lambda span: (span[0], -span[1]))
    found = []
    for span in spans:
        if not found or span[0] >= found[-1][1]:
            found.append(span)
    return found


def rows(root):
    """[(line, page, words, source)] of the table."""
    lines = (root / TABLE).read_text(encoding="utf-8").splitlines() if (root / TABLE).exists() else []
    return [(number, *(line.split("\t") + ["", ""])[:3]) for number, line in enumerate(lines, 1)
            if line and not line.startswith(("#", "page\t"))]


def places(words, text):
    """Where a page has the words, on however many lines."""
    pattern = r"\s+".join(re.escape(word) for word in words.split())
    return [match.span() for match in re.finditer(pattern, text)] if words.strip() else []


def check(root):
    """(["page:line: what is wrong"], [(page, line, number, source or None)])"""
    texts, wrong, listed, covered = pages(root), [], [], {}
    for line, page, words, source in rows(root):
        prefix = f"{TABLE}:{line}: "
        spans = places(words, texts.get(page, ""))
        if not spans:
            wrong.append(f"{prefix}{page} has no such words: {words}")
        covered.setdefault(page, []).extend((*span, source) for span in spans)
        if not source.startswith("command: anyrank ") and not (source and (root / source).exists()):
            wrong.append(f"{prefix}no such source: {source}")
    for page, text in texts.items():
        for begin, end in numbers(page, text):
            sources = [source for span_begin, span_end, source in covered.get(page, ())
                       if span_begin <= begin and end <= span_end]
            line = text.count("\n", 0, begin) + 1
            number = " ".join(text[begin:end].split())
            listed.append((page, line, number, sources[0] if sources else None))
            if not sources:
                wrong.append(f"{page}:{line}: what prints \"{number}\"? Name it in {TABLE}, or leave the number out")
    return wrong, listed


def main():
    arguments = [word for word in sys.argv[1:] if word != "--list"]
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).resolve().parent.parent)
    if len(arguments) > 1 or not root.is_dir():
        print("usage: check_numbers.py [--list] [ROOT]", file=sys.stderr)
        return 2
    wrong, listed = check(root)
    if "--list" in sys.argv:
        for page, line, number, source in listed:
            print(f"{page}:{line}\t{number}\t{source or '-'}")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
