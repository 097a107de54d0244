#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How large each folder is, and what a change did to it: scripts/size.py [--since COMMIT] [--at COMMIT]

Lines and tokens (words, strings and other characters, without comments) of C, CUDA and Python, and words of Markdown.
With --since also what was added since that commit.
"""

import argparse
import collections
import io
import pathlib
import re
import subprocess
import sys
import tarfile

import check_includes as rules
import measures

ROOT = pathlib.Path(__file__).resolve().parent.parent
Size = collections.namedtuple("Size", "lines tokens words")


def texts_at(commit):
    """{path: text} of the files that are counted; commit None: of the working tree."""
    def counted(name):
        return pathlib.PurePath(name).suffix in rules.SUFFIXES | {".py", ".md"}

    if commit is None:
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                                capture_output=True, text=True).stdout.splitlines()
        return {name: (ROOT / name).read_text(encoding="utf-8", errors="replace") for name in listed
                if counted(name) and (ROOT / name).is_file()}
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read().decode("utf-8", "replace") for member in tar
                if member.isfile() and counted(member.name)}


def size_of(name, text):
    if name.endswith(".md"):
        return Size(0, 0, len(text.split()))
    code = re.sub(r"#.*", "", text) if name.endswith(".py") else rules.without_comments(text)
    return Size(text.count("\n"), len(measures.TOKEN.findall(code)), 0)


def sizes_of(texts):
    """{folder: Size}; files at the top are "."."""
    found = collections.defaultdict(lambda: Size(0, 0, 0))
    for name, text in texts.items():
        room = name.split("/")[0] if "/" in name else "."
        found[room] = Size(*map(sum, zip(found[room], size_of(name, text))))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--at", metavar="COMMIT", help="of that commit in place of the working tree")
    parser.add_argument("--since", metavar="COMMIT", help="what was added since then")
    options = parser.parse_args()
    current = sizes_of(texts_at(options.at))
    base = sizes_of(texts_at(options.since)) if options.since else None
    titles = [title for field in Size._fields for title in ((field, "added") if base is not None else (field,))]
    print(f"{'folder':12}" + "".join(f"{title:>12}" for title in titles))
    zero = Size(0, 0, 0)
    for room in [*sorted(set(current) | set(base or ())), "all"]:
        sums, base_sums = ((Size(*map(sum, zip(zero, *sizes.values()))) if room == "all" else sizes.get(room, zero))
                           for sizes in (current, base or {}))
        cells = [cell for count, base_count in zip(sums, base_sums) for cell in (
            (f"{count:,}", f"{count - base_count:+,}") if base is not None else (f"{count:,}",))]
        print(f"{room:12}" + "".join(f"{cell:>12}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
