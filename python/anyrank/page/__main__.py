# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.page FILE.json: a page or a picture of a command's JSON."""

from __future__ import annotations

import pathlib
import sys

from anyrank._errors import AnyrankError
from anyrank._input import parse_json, parsed, read_json, record
from anyrank._terminal import Parser, refuse, say
from anyrank.page import FORMS, kind_of, write


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 2 for a file that cannot be read or written, as of the command."""
    parser = Parser(prog="python -m anyrank.page", description="Makes a page or a picture, which "
                    "needs no network, of the JSON that anyrank writes: of --trace a page of the "
                    "timeline, of anyrank plan a page of layouts or a picture of their memory and "
                    "time, of anyrank train a picture of the losses.")
    parser.add_argument("file", metavar="FILE.json", help="what the command wrote; - for stdin")
    parser.add_argument("--out", metavar="FILE.html|FILE.svg", help="where to (default: beside FILE.json, as a page if "
                        "there is one of its kind)")
    args = parser.parse_args(arguments)
    try:
        say(str(_write_page(args.file, args.out)))
    except AnyrankError as error:
        return refuse("anyrank.page", error)
    return 0


def _write_page(file: str, out: str | None) -> pathlib.Path:
    """Errors: AnyrankError, with the file that cannot be read or written."""
    source = "stdin" if file == "-" else file
    if file == "-" and not out:
        raise AnyrankError("stdin: give --out FILE too")
    found = parse_json(getattr(sys.stdin, "buffer", sys.stdin).read(), source) if file == "-" else read_json(file)
    report = parsed(found, record({}), source)
    try:
        path = pathlib.Path(out) if out else pathlib.Path(file).with_suffix(next(iter(FORMS[kind_of(report)])))
    except AnyrankError as error:
        raise AnyrankError(f"{source}: {error}") from None
    try:
        return write(report, path)
    except AnyrankError as error:
        raise AnyrankError(f"{source}: {error}") from None
    except OSError as error:
        raise AnyrankError(f"{path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
