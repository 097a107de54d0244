# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.page FILE.json: a page or a picture of a command's JSON."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from anyrank._errors import AnyrankError
from anyrank.page import FORMS, kind_of, write


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 2 for a file that cannot be read or written, as of the command."""
    parser = argparse.ArgumentParser(prog="python -m anyrank.page", description="Makes a page or a picture, which "
                                     "needs no network, of the JSON that anyrank writes: of --trace a page of the "
                                     "timeline, of anyrank plan a page of layouts or a picture of their memory and "
                                     "time, of anyrank train a picture of the losses.")
    parser.add_argument("file", metavar="FILE.json", help="what the command wrote; - for stdin")
    parser.add_argument("--out", metavar="FILE.html|FILE.svg", help="where to (default: beside FILE.json, as a page if "
                        "there is one of its kind)")
    given = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if given.file == "-" else pathlib.Path(given.file).read_text(encoding="utf-8")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise AnyrankError("no object of JSON")
        if given.file == "-" and not given.out:
            raise AnyrankError("give --out FILE too")
        out = given.out or pathlib.Path(given.file).with_suffix(next(iter(FORMS[kind_of(found)])))
        print(write(found, out))
    except (AnyrankError, OSError, ValueError) as error:
        where = "" if isinstance(error, OSError) else f"{'stdin' if given.file == '-' else given.file}: "
        print(f"anyrank.page: {where}{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
