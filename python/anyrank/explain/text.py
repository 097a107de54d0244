# SPDX-License-Identifier: Apache-2.0
"""A finding as text: the first line has the tensor, the ranks, the size and the cause; reasons follow."""

from __future__ import annotations

import math
import re
import textwrap
import typing

from anyrank.explain.around import around
from anyrank.explain.causes import reliability
from anyrank.explain.explain import UNKNOWN, Answer
from anyrank.explain.patterns import Fit
from anyrank.explain.tensors import Case
from anyrank.explain.words import counted, ranks_of

WIDTH = 116
MOST_RECORDED = 4  # differences of configuration, steps and the like that are printed


def wrong_ranks(case: Case) -> tuple[list[int], list[int]]:
    """The ranks whose part differs, and those whose part is right."""
    wrong: list[int] = []
    right: list[int] = []
    for copy in case.copies:
        if copy.rank is not None:
            off = any(case.differs(values, box).any() for box, values in zip(copy.boxes, copy.values))
            (wrong if off else right).append(copy.rank)
    return wrong, right


def place(case: Case) -> str:
    """On which ranks; "": the run's ranks are not known, or all are wrong."""
    wrong, right = wrong_ranks(case)
    return f" on {ranks_of(wrong)}" if wrong and right else ""


def size(case: Case) -> str:
    """The difference's root mean square in parts of the reference's; what is no number is counted."""
    row = case.runs.row(str(case.name))
    odd = int((~_finite(case.val) & _finite(case.ref)).sum())
    if odd:
        return f"{counted(odd, 'element')} of {case.reference.size} not finite"
    if case.reference.size == 1:
        return f"{case.val.item():.9g}, in the reference {case.ref.item():.9g}"
    rms, whole = row.get("rms"), row.get("rms_reference")
    if not isinstance(rms, float) or not isinstance(whole, float):
        rms, whole = math.sqrt(float(((case.val - case.ref) ** 2).mean())), math.sqrt(float((case.ref ** 2).mean()))
    if whole > 0.0 or rms == 0.0:
        return f"off by {_share(rms / whole if whole else 0.0)} of its size"
    return "not zero, as it is in the reference"


def _finite(array: typing.Any) -> typing.Any:
    import numpy as np

    return np.isfinite(array)


def _share(x: float) -> str:
    return f"{100 * x:.3g} %" if 1e-4 <= x < 10.0 else f"{x:.2g}"


def pattern(case: Case) -> str:
    """Where the tensor differs: how many elements, on which ranks."""
    wrong, right = wrong_ranks(case)
    return f"{extent(case)}{f', on {ranks_of(wrong)} alone' if wrong and right else ''}"


def extent(case: Case) -> str:
    """How many elements differ."""
    n, all_of_it = int(case.off.sum()), case.reference.size
    return f"all {counted(n, 'element')}" if n == all_of_it else f"{n} of {counted(all_of_it, 'element')}"


# What a program has, and a sentence has not: lists, dictionaries, values of Python.
_INTERNAL = re.compile(r"[{}\[\]]|\b(True|False|None|nan|array)\b")


def _looks(fit: Fit) -> str:
    """What a pattern near to an unknown difference says of it; "": its numbers have no text."""
    said = fit.pattern.numbers.get("text")
    if not isinstance(said, str) or not said or _INTERNAL.search(said):
        return ""
    return f"{said}; {100 * fit.unexplained:.2g} % of the difference is left"


def without_arrays(tensor: str, answer: Answer) -> list[str]:
    """The same of a tensor that one run alone has, or has in another shape; "": of none."""
    sure = f" ({answer.confidence})" if answer.confidence else ""
    said = f"{answer.sentence}{sure}" if answer.sentence else "the runs have no tensor to compare here"
    return _wrapped([("", f"{tensor}: {said}" if tensor else said), *_reasons(answer)])


def _reasons(answer: Answer) -> list[tuple[str, str]]:
    right, stated = reliability().get(answer.cause, (0, 0))
    known = f" (right in {right} of {counted(stated, 'known case')})" if stated else ""
    rows = [("cause", answer.cause + known)] if answer.cause != UNKNOWN else []
    rows += [("look at", answer.look)] if answer.look else []
    return rows + ([("or", ", ".join(answer.others[:3]))] if answer.others else [])


def _wrapped(rows: list[tuple[str, str]]) -> list[str]:
    head = textwrap.wrap(rows[0][1], WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return head + [line for name, text in rows[1:] for line in textwrap.wrap(
        text, WIDTH, initial_indent=f"  {name:<10} ", subsequent_indent=" " * 13, break_on_hyphens=False,
        break_long_words=False)]


def lines(case: Case, answer: Answer, operation: typing.Sequence[str] = ()) -> list[str]:
    """The first line, those of the first wrong operation, and at most five that give reasons."""
    said = answer.sentence or "no simple map explains it"
    sure = f" ({answer.confidence})" if answer.cause != UNKNOWN else ""
    rows = [("", f"{case.name}{place(case)}: {size(case)}: {said}{sure}")]
    rows += [("where", f"step {case.name.step}, {extent(case)}")]
    rows += [("operation" if i == 0 else "", line) for i, line in enumerate(operation)]
    if answer.cause == UNKNOWN:
        rows += [("looks like", near) for fit in answer.fits[:2] if (near := _looks(fit))]
        rows += [("known", known)] if not operation and (known := around(case)) else []
    return _wrapped([*rows, *_reasons(answer)])
