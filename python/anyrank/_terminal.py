# SPDX-License-Identifier: Apache-2.0
"""What the entry points print. Names and paths come from files of others, which may hold anything, and a terminal obeys
the escape sequences that it is sent."""

from __future__ import annotations

import argparse
import re
import sys
import typing
import warnings

# As ari_utf8_control of ref/core/text.h: control characters, ends of lines, and characters that turn the direction of
# the text behind them. Surrogates are bytes that are not UTF-8, or half a character in JSON.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_T = typing.TypeVar("_T")


def printable(text: str, limit: int | None = None) -> str:
    """Returns the text on one line, with a question mark for each control character and each byte that is not UTF-8. A
    text of more than `limit` characters is cut."""
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}.."
    return _CONTROLS.sub("?", text)


def say(*lines: str, file: typing.TextIO | None = None) -> None:
    """Prints each line so that it is one line, in whatever encoding the stream has."""
    out = sys.stdout if file is None else file
    encoding = getattr(out, "encoding", None) or "utf-8"
    for line in lines:
        print(printable(line).encode(encoding, "replace").decode(encoding), file=out)


def refuse(program: str, error: Exception) -> int:
    """Says why an input cannot be used. The exit status."""
    message, *notes = str(error).split("\n")
    say(f"{program}: {message}", *notes, file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_place: typing.Any, **_further: typing.Any) -> None:
    say(f"warning: {message}", file=sys.stderr)


def with_clean_warnings(function: typing.Callable[[], _T]) -> _T:
    """Calls a function whose warnings are printed by say()."""
    with warnings.catch_warnings():
        warnings.showwarning = typing.cast(typing.Any, _show_warning)
        return function()


class Parser(argparse.ArgumentParser):
    """A parser whose messages have the words of the command line made printable."""

    def error(self, message: str) -> typing.NoReturn:
        super().error(printable(message))
