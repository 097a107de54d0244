#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of causes.md, from the command: build/anyrank causes --json - | scripts/causes_page.py --write

Without --write it prints the page. The text before the table is written by hand and stays.
"""

import json
import pathlib
import re
import sys

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/reference/causes.md"
HEAD = "|cause|what happened|look at|"


def cell(text):
    """Text of a table's cell, with the characters that Markdown would read escaped, except in code."""
    parts = re.split("(`[^`]*`)", text)
    return "".join(part.replace("|", r"\|") if i % 2 else re.sub(r"([*_<>\[\]|])", r"\\\1", part)
                   for i, part in enumerate(parts))


def row(cause, rows):
    """The line of a cause: its first sentence, and what to look at for any of them."""
    look = dict.fromkeys(part for entry in rows for part in entry["look_at"].split("; ") if part)
    return f"|`{cause}`|{cell(rows[0]['gist'])}|{cell('; '.join(look))}|"


def page(table, old):
    """The page, after the part of the old one that is written by hand."""
    causes = {}
    for entry in table:
        causes.setdefault(entry["cause"], []).append(entry)
    lines = [HEAD, "|---|---|---|", *(row(cause, rows) for cause, rows in causes.items())]
    return "\n".join([old[:re.search(r"\n\|cause\||\n## ", old).start()].rstrip("\n"), "", *lines, ""])


def main():
    text = page(json.load(sys.stdin)["causes"], PAGE.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
