# SPDX-License-Identifier: Apache-2.0
"""Averages over steps that a run keeps: of its weights, and of its batches' statistics."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.steps import near
from anyrank.explain.tensors import Array, Case, Name

WEIGHTS, STATISTICS = "average of weights", "average of statistics"
BUFFERS = (0.0, 1.0)  # what running statistics begin with


def averaged(case: Case) -> str:
    """The parameter whose average this is: of the same name below another module; "": there is none."""
    names, rest = case.runs.reference, case.name.stem
    while "." in rest:
        rest = rest.partition(".")[2]
        if str(Name(rest, "new", case.name.step)) in names:
            return rest
    return ""


def _share(case: Case, y: Array, x: Array, size: Array) -> float | None:
    """The part of x that y is; None: it is none, up to the rounding of values of this size."""
    square = float((x * x).sum())
    noise = 4.0 * float(((case.unit * size) ** 2).sum())
    if not square > 100.0 * noise:
        return None
    part = float((x * y).sum()) / square
    return part if float(((y - part * x) ** 2).sum()) <= 2.0 * noise + 1e-8 * float((y * y).sum()) else None


def _weights(case: Case) -> typing.Iterator[Pattern]:
    """The reference keeps `decay` of the average and takes the rest of the new weights: the other run takes those of
    before the step, keeps another part, or keeps nothing."""
    stem, step = averaged(case), case.name.step
    if not stem:
        return
    now = case.beside(str(Name(stem, "new", step)))
    before = case.beside(str(Name(stem, "new" if step > 1 else "init", max(step - 1, 1))))
    kept = case.beside(case.name.with_kind("new", step - 1)) if step > 1 else before
    if now is None or before is None or kept is None:
        return
    part = _share(case, case.ref - kept, now - kept, case.ref)
    if part is None or not 1e-6 < part < 1.0 - 1e-6:
        return
    numbers = {"decay": 1.0 - part, "stem": stem}
    yield Pattern(WEIGHTS, kept + part * (before - kept), numbers | {"how": "before"})
    yield Pattern(WEIGHTS, now, numbers | {"how": "none"})
    other = _share(case, case.val - kept, now - kept, case.ref)
    if other is not None and not near(other, part) and 0.0 < other < 1.0:
        yield Pattern(WEIGHTS, kept + other * (now - kept), numbers | {"how": "decay", "other": 1.0 - other}, fitted=1)


def _statistics(case: Case) -> typing.Iterator[Pattern]:
    """Both take a part of the batch's statistics, of which the other run takes another."""
    step = case.name.step
    kept = case.beside(case.name.with_kind("buffer", step - 1)) if step > 1 else None
    for base in (kept,) if kept is not None else tuple(np.full(case.shape, x) for x in BUFFERS) if step == 1 else ():
        times = _share(case, case.val - base, case.ref - base, np.abs(case.ref) + np.abs(base))
        if times is not None and times > 0.0 and not near(times, 1.0):
            yield Pattern(STATISTICS, base + times * (case.ref - base), {"times": times},
                          fitted=0 if ratio_of(times, 16) else 1)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.reference.dtype.kind == "f" and np.isfinite(case.ref).all() and np.isfinite(case.val).all():
        if case.name.kind == "new":
            yield from _weights(case)
        elif case.name.kind == "buffer" and "running" in case.name.stem.rpartition(".")[2]:
            yield from _statistics(case)


CAUSES = (
    Cause("other_point_of_step", (WEIGHTS,), "the average of {stem} takes the weights of before the step, where the "
          "reference keeps {decay} of the average and takes the rest of the updated weights", "the update of the "
          "average: after `optimizer.step()`", has(how="before")),
    Cause("average_of_weights", (WEIGHTS,), "this is {stem} after the step, of which the reference keeps an average "
          "(decay {decay})", "the update of the average, and what is saved as such", has(how="none")),
    Cause("average_of_weights", (WEIGHTS,), "the average of {stem} keeps {other} of itself, {decay} in the reference",
          "the decay of the average, its warm-up by the number of steps, and how often it is updated",
          has(how="decay")),
    Cause("statistics_momentum", (STATISTICS,), "running statistics take {times} times as much of the batch's as the "
          "reference: another momentum, or several updates", "`momentum` of the normalisation, which other frameworks "
          "count the other way round (1 - m); a forward pass that is made again (recomputation, evaluation)"),
)
