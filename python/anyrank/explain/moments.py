# SPDX-License-Identifier: Apache-2.0
"""Moments, and updates that are sums of gradient, former moment and weight: which of their numbers is another."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, When, every, has, kinds
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.steps import NEAR, Sum, before, betas_of, near, sum_of
from anyrank.explain.tensors import Array, Case, Name

LINEAR, STALE, CUT = "sum of others", "of last gradient", "gradient cut"
RESTARTED, MISPLACED = "gradient alone", "history of another"


def _columns(case: Case, other: bool) -> tuple[dict[str, Array], Array | None]:
    """What a moment, or SGD's update, is made of; and the gradient of the step before."""
    name, step = case.name, case.name.step
    g, w = case.beside(name.with_kind("grad"), other), before(case, other)
    g = case.beside(name.with_kind("grad")) if g is None else g
    w = before(case) if w is None else w
    kind = "m" if name.kind == "new" else name.kind
    kept = case.beside(name.with_kind(kind, step - 1), other) if step > 1 else None
    last = case.beside(name.with_kind("grad", step - 1), other) if step > 1 else None
    found = {"gradient": g, "moment": kept, "weight": w}
    if name.kind == "v":
        found = {"gradient": None if g is None else g ** 2, "moment": kept}
        last = None if last is None else last ** 2
    return {key: array for key, array in found.items() if array is not None}, last


def _close(case: Case, found: Sum | None) -> bool:
    return found is not None and found.left <= max(1e-4, 4.0 * case.unit)


def _sums(case: Case) -> typing.Iterator[Pattern]:
    """Both are sums of gradient, former moment and weight, with other numbers."""
    shift = before(case) if case.name.kind == "new" else np.zeros(())
    if shift is None or (case.name.kind == "new" and case.name.with_kind("v") in case.runs.reference):
        return
    (mine, _), (own, last) = _columns(case, False), _columns(case, True)
    if "gradient" not in mine or mine.keys() != own.keys():
        return
    known = sum_of(case.ref - shift, tuple(mine.values()))
    if known is None or not _close(case, known):
        yield from _histories(case, own)
        return
    p = dict(zip(mine, known.numbers))
    none = Sum((0.0,) * len(own), 0.0)
    found = sum_of(case.val - shift, tuple(own.values())) if (case.val - shift).any() else none
    if found is not None and _close(case, found):
        numbers = _compared(case, p, dict(zip(own, found.numbers)), own)
        expected = shift + sum(x * array for x, array in zip(found.numbers, own.values()))
        if numbers["changed"]:
            yield Pattern(LINEAR, expected, numbers, sum(
                not ratio_of(numbers[f"{key} ratio"]) for key in numbers["changed"]))
    if last is not None:
        stale = sum(p[key] * (last if key == "gradient" else own[key]) for key in own)
        yield Pattern(STALE, shift + stale, {"before": case.name.step - 1})
    yield from _cut(case, shift, p, own)


def _histories(case: Case, own: dict[str, Array]) -> typing.Iterator[Pattern]:
    """The reference's moment has a history that is not dumped: the other's has none, or that of another parameter."""
    if case.name.kind == "new" or "moment" in own:
        return
    g, name = own["gradient"], case.name
    found = sum_of(case.val, (g,))
    if _close(case, found) and found is not None:
        yield Pattern(RESTARTED, found.numbers[0] * g, {"first": found.numbers[0]}, fitted=1)
        return
    for text in case.runs.reference:
        parsed = Name.of(text)
        m, h = (case.beside(text), case.beside(parsed.with_kind("grad"))) if (parsed.kind, parsed.step) == (
            name.kind, name.step) and parsed.stem != name.stem else (None, None)
        if m is None or h is None:
            continue
        apart = g - h ** 2 if name.kind == "v" else g - h
        found = sum_of(case.val - m, (apart,))
        if _close(case, found) and found is not None:
            yield Pattern(MISPLACED, m + found.numbers[0] * apart, {"other": parsed.stem}, fitted=1)


def _compared(case: Case, p: dict[str, float], q: dict[str, float], own: dict[str, Array]) -> dict[str, typing.Any]:
    """Numbers of the reference, of the other run, their ratio and which of them differ."""
    total = float(np.linalg.norm(case.ref - (before(case) if case.name.kind == "new" else 0.0)))
    numbers: dict[str, typing.Any] = {"moment": 0.0, "weight": 0.0, "step": case.name.step, "second": _second(case)}
    for key, x in p.items():
        numbers |= {key: x, f"other {key}": q[key], f"{key} ratio": q[key] / x if x else math.inf}
    numbers["changed"] = {key for key, x in p.items() if abs(q[key] - x) * float(np.linalg.norm(own[key])) > max(
        1e-4, 16.0 * case.unit) * total}
    numbers["first"] = numbers["gradient ratio"]
    return numbers


def _second(case: Case) -> float:
    """The gradient's square in the second moment, as a part of the reference's; NaN: not known."""
    name = dataclasses.replace(case.name, kind="v")
    here, there = case.beside(str(name)), case.beside(str(name), True)
    if case.name.kind != "m" or here is None or there is None:
        return math.nan
    found = sum_of(there, (here,))
    if found is not None and _close(case, found):
        return found.numbers[0]
    g, kept = case.beside(name.with_kind("grad")), case.beside(name.with_kind("v", name.step - 1))
    if g is None or kept is None:
        return math.nan
    moved, mine = sum_of(there - here, (g ** 2, kept)), sum_of(here, (g ** 2, kept))
    if moved is None or mine is None or not _close(case, moved) or mine.numbers[0] == 0.0:
        return math.nan
    return 1.0 + moved.numbers[0] / mine.numbers[0]


def _cut(case: Case, shift: Array, p: dict[str, float], own: dict[str, Array]) -> typing.Iterator[Pattern]:
    """The gradient was cut element by element."""
    rest = shift + sum(p[key] * own[key] for key in own if key != "gradient")
    y, g = case.val - rest, own["gradient"]
    most = float(np.abs(y).max())
    by = float((y[g != 0.0] / g[g != 0.0]).max(initial=0.0))
    cut = np.abs(by * g) > (1.0 + NEAR) * most
    if most > 0.0 and "moment" not in own and 4 <= int(cut.sum()) < cut.size:
        yield Pattern(CUT, rest + np.clip(by * g, -most, most), {"limit": most / by, "cut": int(cut.sum())}, fitted=2)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind in ("new", "m", "v", "state"):
        yield from _sums(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _changed(*keys: str) -> When:
    """Whether these numbers of a sum differ, and no others."""
    return has(changed={*keys})


def _squared(case: Case, pattern: Pattern) -> bool:
    """The second moment has the square of the first's factor: the optimizer saw a gradient that was scaled."""
    return case.name.kind == "m" and near(pattern.numbers["second"], pattern.numbers["first"] ** 2, 4e-3)


def _power(case: Case, pattern: Pattern) -> bool:
    first = abs(pattern.numbers["first"])
    return first > 0.0 and abs(math.log2(first) - round(math.log2(first))) < 1e-4 and not 0.1 < first < 10.0


def _twice(case: Case, pattern: Pattern) -> bool:
    numbers = pattern.numbers
    return case.name.kind == "m" and any(near(numbers["first"], 1.0 + b[0]) and near(numbers["second"], 1.0 + b[1])
                                         for b in betas_of(case))


def _dampened(case: Case, pattern: Pattern) -> bool:
    """Less of the gradient, and of the weight that decay adds to it, and as much of the former moment."""
    numbers, changed = pattern.numbers, pattern.numbers["changed"]
    return bool(case.name.step > 1 and "gradient" in changed and "moment" not in changed and (
        "weight" not in changed or near(numbers["weight ratio"], numbers["gradient ratio"])))


def _has_second(case: Case, pattern: Pattern) -> bool:
    return case.name.with_kind("v") in case.runs.reference


def _other_rate_of_decay(case: Case, pattern: Pattern) -> bool:
    return case.name.kind == "v" or (case.name.kind == "m" and _has_second(case, pattern)
                                     and "weight" not in pattern.numbers["changed"]
                                     and math.isfinite(pattern.numbers["second"]))


_OPTIMIZER = "the gradients are equal, and the optimizer "
CAUSES = (
    Cause("stale_value", (STALE,), "what differs is the gradient of step {before}, or is made of it",
          "buckets and buffers that were not filled again, or were read before their reduction had ended"),
    Cause("clipped", (CUT,), _OPTIMIZER + "got them cut at {limit} each, which {cut} elements exceed",
          "`clip_grad_value_` in place of `clip_grad_norm_`"),
    Cause("optimizer_state_lost", (LINEAR, RESTARTED), "the optimizer's state was lost: the moment is this step's "
          "gradient alone, where the reference's has a history", "`optimizer.load_state_dict` at a resume",
          lambda case, pattern: pattern.kind == RESTARTED or (
              pattern.numbers["changed"] == {"moment"} and abs(pattern.numbers["other moment"]) < 1e-3)),
    Cause("optimizer_state_misplaced", (MISPLACED,), "the moment has the history of {other}", "the order of parameters "
          "when the optimizer's state was saved or loaded"),
    Cause("weight_decay", (LINEAR,), "weight decay: {other weight} of the weight is added to the gradient, {weight} in "
          "the reference", "`weight_decay` of the optimizer, `Adam(weight_decay=)` against `AdamW`", every(
              _changed("weight"), lambda case, pattern: not _has_second(case, pattern) or case.name.kind == "m")),
    Cause("update_twice", (LINEAR,), "the optimizer stepped twice with one gradient: the moments are {first} and "
          "{second} times the expected", "`optimizer.step()` by a hook and by hand", _twice),
    Cause("update_sign", (LINEAR,), _OPTIMIZER + "saw them with the other sign", "`maximize`",
          every(_changed("gradient"), has(first=lambda x: near(x, -1.0)))),
    Cause("loss_scale", (LINEAR,), _OPTIMIZER + "saw them times {first}", "the loss scale, divided out once",
          every(_changed("gradient"), _squared, _power)),
    Cause("clip_factor", (LINEAR,), _OPTIMIZER + "saw them times {first}", "the clip factor: left out, applied twice, "
          "of another norm or limit; what is copied to the optimizer's own gradients",
          every(_changed("gradient"), lambda case, pattern: (
              _squared(case, pattern) or pattern.numbers["first"] == 0.0))),
    Cause("sgd_dampening", (LINEAR,), "the momentum takes {other gradient} of the gradient, {gradient} in the "
          "reference", "`dampening=`", every(kinds("m", "state"), _dampened,
                                             lambda case, pattern: not _has_second(case, pattern))),
    Cause("other_betas", (LINEAR,), "another rate of decay of the moments: {other gradient} of the gradient is taken, "
          "{gradient} in the reference", "`betas=`, their order",
          _other_rate_of_decay),
)
