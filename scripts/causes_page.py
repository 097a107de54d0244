#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The sections of causes.md, out of the table of causes: build/anyrank causes | scripts/causes_page.py --write

Without --write it prints the page. What stands before the page's first section is written by hand and stays.
"""

import collections
import json
import pathlib
import re
import sys
import textwrap

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/reference/causes.md"
WIDTH = 120


def plain(text):
    """Markdown that shows these characters: of what is no code."""
    return "".join(part if i % 2 else re.sub(r"([*_<>\[\]])", r"\\\1", part) for i, part in enumerate(re.split("(`[^`]*`)", text)))


def sentence(text):
    """What fills a place of it stands in braces, in whatever form it is printed."""
    return plain(re.sub(r"\{(\w+):[^}]*\}", r"{\1}", text))


def wrapped(text, first="", more=""):
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=more, break_long_words=False,
                         break_on_hyphens=False)


def lead(says):
    """How a sentence begins, up to what it says of the cause; "" where it says that at once."""
    return re.match(r"(.*?(?:: |squares\) with )|)", says)[0]


def entry(cause, rows, common):
    """One identifier: its sentences, without beginnings that many have, and what to look at."""
    said, look = [], []
    for row in rows:
        says, _, what = row["says"].partition("\n")
        says = "… " + says[len(lead(says)):] if lead(says) in common else says
        said += [sentence(says)] if sentence(says) not in said else []
        look += [plain(what)] if what else []
    lines = [f"### `{cause}`", "", *(wrapped(text, "- ", "  ") for text in said)]
    if look:
        lines += ["", wrapped(f"Look at: {'; '.join(look)}.")]
    if all(row["over_ranks"] for row in rows):
        lines += ["", "Of several ranks alone."]
    return "\n".join(lines)


def sections(table):
    """A cause stands in the section of its first row, with all of its sentences."""
    causes = {}
    beginnings = collections.Counter(lead(row["says"]) for row in table)
    common = {begin for begin, times in beginnings.items() if begin and times >= 3}
    for row in table:
        causes.setdefault(row["cause"], []).append(row)
    titles = dict.fromkeys(rows[0]["section"] for rows in causes.values())
    for title in titles:
        yield f"## {title}"
        yield from (entry(cause, rows, common) for cause, rows in causes.items() if rows[0]["section"] == title)


def page(table, old):
    """The page, after the part of the old one that is written by hand."""
    return "\n\n".join([old[:old.index("\n## ")].rstrip("\n"), *sections(table)]) + "\n"


def main():
    text = page(json.load(sys.stdin), PAGE.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
