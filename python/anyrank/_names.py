# SPDX-License-Identifier: Apache-2.0
"""Lists of names of modules and parameters, written shorter: layers.0.w and layers.1.w are layers.{0-1}.w."""

from __future__ import annotations

import itertools
import math
import re
import typing

_SPAN = re.compile(r"\{(\d{1,9})-(\d{1,9})\}")
MOST_NAMES = 1 << 20  # that a list is expanded to
MOST_DIGITS = 9  # of a number in a name, as _SPAN reads them


def folded(names: typing.Iterable[str]) -> list[str]:
    """Folds names: each run of consecutive numbers at one position becomes a span."""
    rows = [tuple(name.split(".")) for name in dict.fromkeys(names)]
    for position in reversed(range(max(map(len, rows), default=0))):
        runs: dict[tuple[tuple[str, ...], tuple[str, ...] | None], list[int]] = {}
        for row in rows:
            text = row[position] if position < len(row) else ""
            is_number = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS and str(int(text)) == text
            numbers = runs.setdefault((row[:position], row[position + 1:]) if is_number else (row, None), [])
            numbers += [int(text)] if is_number else []
        rows = []
        for (before, after), numbers in runs.items():
            rows += [before] if after is None else [(*before, span, *after) for span in _spans(sorted(numbers))]
    return [".".join(row) for row in rows]


def _spans(numbers: list[int]) -> typing.Iterator[str]:
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield str(found[0]) if len(found) == 1 else f"{{{found[0]}-{found[-1]}}}"


def _choices(text: str) -> list[typing.Sequence[object]]:
    spans = [(part, _SPAN.fullmatch(part)) for part in text.split(".")]
    return [[part] if span is None else range(int(span[1]), int(span[2]) + 1) for part, span in spans]


def unfolded_count(text: str) -> int:
    """Returns the number of names that unfolded() makes of a text."""
    return math.prod(map(len, _choices(text)))


def unfolded(texts: typing.Iterable[str]) -> list[str]:
    """Returns the names that folded() has folded, in the order of each text. Errors: ValueError for more than
    MOST_NAMES."""
    found: list[str] = []
    for text in texts:
        if len(found) + unfolded_count(text) > MOST_NAMES:
            raise ValueError(f"{text!r} and those before it are more than {MOST_NAMES} names")
        found += [".".join(map(str, row)) for row in itertools.product(*_choices(text))]
    return found
