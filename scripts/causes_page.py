#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of causes.md, from the command: build/anyrank causes --json - | scripts/causes_page.py --write

Without --write it prints the page. The text before the page's first section is written by hand and stays.
"""

import json
import pathlib
import re
import sys

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/reference/causes.md"
WORDS = 8  # of a sentence, on the page


def cell(text):
    """Text of a table's cell, with the characters that Markdown would read escaped, except in code."""
    parts = re.split("(`[^`]*`)", text)
    return "".join(part.replace("|", r"\|") if i % 2 else re.sub(r"([*_<>\[\]|])", r"\\\1", part)
                   for i, part in enumerate(parts))


def short(gist, look):
    """A sentence that is short; of a longer one that nothing stands beside, its beginning."""
    words = gist.split()
    if len(words) <= WORDS:
        return gist
    return "" if look else " ".join(words[:WORDS]).rstrip(",:") + " …"


def row(cause, rows):
    """The line of an identifier: its first sentence, and what to look at for any of them."""
    look = dict.fromkeys(part for one in rows for part in one["look_at"].split("; ") if part)
    return f"|`{cause}`|{cell(short(rows[0]['gist'], look))}|{cell('; '.join(look))}|"


def sections(table):
    """A cause is in the section of its first row."""
    causes = {}
    for one in table:
        causes.setdefault(one["cause"], []).append(one)
    for title in dict.fromkeys(rows[0]["section"] for rows in causes.values()):
        lines = [row(cause, rows) for cause, rows in causes.items() if rows[0]["section"] == title]
        yield "\n".join([f"## {title}", "", "|cause|what the values show|look at|", "|---|---|---|", *lines])


def page(table, old):
    """The page, after the part of the old one that is written by hand."""
    return "\n\n".join([old[:old.index("\n## ")].rstrip("\n"), *sections(table)]) + "\n"


def main():
    text = page(json.load(sys.stdin)["causes"], PAGE.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
