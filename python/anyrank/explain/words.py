# SPDX-License-Identifier: Apache-2.0
"""How findings are said."""

from __future__ import annotations

import json
import typing

from anyrank._names import folded

RUNS = ("the reference", "the other run")


def some(names: typing.Iterable[str], most: int = 6) -> str:
    """Names in a list that is not long."""
    texts = folded(sorted(names, key=lambda name: [(len(part), part) if part.isdecimal() else (0, part)
                                                   for part in name.split(".")]))
    return ", ".join(text or "the model itself" for text in texts[:most]) + (
        f" and {len(texts) - most} more" if len(texts) > most else "")


def counted(n: int, noun: str, verbs: tuple[str, str] | None = None) -> str:
    """How many there are, with what is said of one or of several."""
    one = n == 1
    several = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    verb = f" {verbs[0 if one else 1]}" if verbs else ""
    return f"{n} {noun if one else several}{verb}"


def these(names: typing.Collection[str], noun: str) -> str:
    return f"{counted(len(names), noun)} ({some(names)})"


def shown(value: typing.Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def both_of(what: str, x: typing.Any, y: typing.Any) -> str:
    return f"{what}: {shown(x)} in {RUNS[0]}, {shown(y)} in {RUNS[1]}"


def ranks_of(ranks: typing.Iterable[int]) -> str:
    texts = [span.strip("{}").replace("-", " to ") for span in folded(map(str, sorted(ranks)))]
    return f"rank{'s' if len(texts) > 1 or ' ' in texts[0] else ''} {', '.join(texts)}"
