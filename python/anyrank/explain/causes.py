# SPDX-License-Identifier: Apache-2.0
"""Causes: what a pattern means where the facts of the run fit."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import typing

from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Case

When = typing.Callable[[Case, Pattern], bool]


def always(case: Case, pattern: Pattern) -> bool:
    return True


def kinds(*names: str) -> When:
    """Whether the tensor is of one of these kinds."""
    return lambda case, pattern: case.name.kind in names


def has(**wanted: typing.Any) -> When:
    """Whether the pattern's numbers are these: of a tuple one of it, of a function what it says of the number."""
    def fits(case: Case, pattern: Pattern) -> bool:
        have = pattern.numbers
        return all(have.get(key) in value if isinstance(value, tuple) else bool(value(have.get(key)))
                   if callable(value) else have.get(key) == value for key, value in wanted.items())
    return fits


def every(*whens: When) -> When:
    return lambda case, pattern: all(when(case, pattern) for when in whens)


def activation(case: Case, pattern: Pattern) -> bool:
    return case.activation


def parameter(case: Case, pattern: Pattern) -> bool:
    return not case.activation


@dataclasses.dataclass(frozen=True)
class Cause:
    """name: as it is printed and judged. kinds: of the patterns that it leaves. sentence: what happened, with the
    pattern's numbers in braces. look: what to look at. when: whether the facts fit; of the causes of a pattern the
    first that fits is meant, so a special one stands before a general one. sure: the facts, not the pattern alone, say
    so."""

    name: str
    kinds: tuple[str, ...]
    sentence: str
    look: str = ""
    when: When = always
    sure: bool = False

    def text(self, pattern: Pattern) -> str:
        return self.sentence.format_map(_Shown(pattern.numbers))


@functools.cache
def reliability() -> typing.Mapping[str, tuple[int, int]]:
    """By cause: how often it was right, and how often it was stated, where the truth was known (the corpus)."""
    table = pathlib.Path(__file__).with_name("reliability.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in table]
    return {cause: (int(right), int(stated)) for cause, right, stated in rows}


class _Shown(dict[str, typing.Any]):
    """Numbers as they are read: four digits."""

    def __getitem__(self, key: str) -> typing.Any:
        value = super().__getitem__(key)
        return f"{value:.4g}" if isinstance(value, float) else value
