# SPDX-License-Identifier: Apache-2.0
"""Moments, and updates that are sums of gradient, former moment and weight: which of their numbers is another."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, When
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
    mine, _ = _columns(case, False)
    own, last = _columns(case, True)
    if "gradient" not in mine or mine.keys() != own.keys():
        return
    known = sum_of(case.ref - shift, tuple(mine.values()))
    if known is None or not _close(case, known):
        yield from _histories(case, own)
        return
    p = dict(zip(mine, known.numbers))
    found = sum_of(case.val - shift, tuple(own.values()))
    if not (case.val - shift).any():
        found = Sum((0.0,) * len(own), 0.0)
    if found is not None and _close(case, found):
        q = dict(zip(own, found.numbers))
        numbers = {**_compared(case, p, q, own), "step": case.name.step}
        changed = [key for key in own if numbers[f"{key} differs"] and not ratio_of(numbers[f"{key} ratio"])]
        any_changed = any(numbers[f"{key} differs"] for key in own)
        expected = shift + sum(x * array for x, array in zip(found.numbers, own.values()))
        if any_changed:
            yield Pattern(LINEAR, expected, numbers, fitted=len(changed))
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
        if parsed.kind != name.kind or parsed.step != name.step or parsed.stem == name.stem:
            continue
        m, h = case.beside(text), case.beside(parsed.with_kind("grad"))
        if m is None or h is None:
            continue
        apart = g - h ** 2 if name.kind == "v" else g - h
        found = sum_of(case.val - m, (apart,))
        if _close(case, found) and found is not None:
            yield Pattern(MISPLACED, m + found.numbers[0] * apart, {"other": parsed.stem}, fitted=1)


def _compared(case: Case, p: dict[str, float], q: dict[str, float], own: dict[str, Array]) -> dict[str, typing.Any]:
    """Numbers of the reference, of the other run, their ratio and whether they differ."""
    numbers: dict[str, typing.Any] = {"moment": 0.0, "weight": 0.0, "moment differs": False, "weight differs": False}
    total = math.sqrt(float(((case.ref - (before(case) if case.name.kind == "new" else 0.0)) ** 2).sum()))
    for key, x in p.items():
        size = math.sqrt(float((own[key] ** 2).sum()))
        numbers[key], numbers[f"other {key}"] = x, q[key]
        numbers[f"{key} differs"] = abs(q[key] - x) * size > max(1e-4, 16.0 * case.unit) * total
        numbers[f"{key} ratio"] = q[key] / x if x else math.inf
    numbers["first"] = numbers["gradient ratio"]
    numbers["second"] = _second(case)
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
    moved = sum_of(there - here, (g ** 2, kept)) if g is not None and kept is not None else None
    mine = sum_of(here, (g ** 2, kept)) if moved is not None and g is not None and kept is not None else None
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
    if case.name.kind == "grad" and case.name.step > 1:
        last = case.beside(case.name.with_kind("grad", case.name.step - 1))
        if last is not None:
            yield Pattern(STALE, np.where(case.off, last, case.ref), {"before": case.name.step - 1})
    if case.name.kind in ("new", "m", "v", "state"):
        yield from _sums(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _moved(*keys: str) -> When:
    """Whether these numbers of a sum differ, and no others."""
    return lambda case, pattern: {k for k in ("gradient", "moment", "weight")
                                  if pattern.numbers.get(f"{k} differs")} == {*keys}


def _all(*whens: When) -> When:
    return lambda case, pattern: all(when(case, pattern) for when in whens)


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
    numbers = pattern.numbers
    return bool(case.name.step > 1 and numbers["gradient differs"] and not numbers["moment differs"] and (
        not numbers["weight differs"] or near(numbers["weight ratio"], numbers["gradient ratio"])))


def _of_kind(*kinds: str) -> When:
    return lambda case, pattern: case.name.kind in kinds


def _has_second(case: Case, pattern: Pattern) -> bool:
    return case.name.with_kind("v") in case.runs.reference


def _without_second(case: Case, pattern: Pattern) -> bool:
    return not _has_second(case, pattern)


def _other_rate_of_decay(case: Case, pattern: Pattern) -> bool:
    numbers = pattern.numbers
    return case.name.kind == "v" or (case.name.kind == "m" and _has_second(case, pattern)
                                     and not numbers["weight differs"] and math.isfinite(numbers["second"]))


_OPTIMIZER = "the gradients are equal, and the optimizer "
CAUSES = (
    Cause("gradient_of_last_step", (STALE,), "what differs is the gradient of step {before}, or is made of it",
          "buckets and buffers that were not filled again, or were read before their reduction had ended"),
    Cause("clipped", (CUT,), _OPTIMIZER + "got them cut at {limit} each, which {cut} elements exceed",
          "`clip_grad_value_` in place of `clip_grad_norm_`"),
    Cause("zeros_for_gradient", (LINEAR,), _OPTIMIZER + "got zeros", "what is copied to the optimizer's own gradients",
          lambda case, pattern: pattern.numbers["other gradient"] == 0.0),
    Cause("optimizer_state_lost", (LINEAR,), "the optimizer's state was lost: the moment is this step's gradient "
          "alone, where the reference keeps {moment} of the former", "`optimizer.load_state_dict` at a resume",
          _all(_moved("moment"), lambda case, pattern: abs(pattern.numbers["other moment"]) < 1e-3)),
    Cause("optimizer_state_lost", (RESTARTED,), "the optimizer's state was lost: the moment is {first} times this "
          "step's gradient and nothing else, where the reference's has a history", "`optimizer.load_state_dict` at a "
          "resume"),
    Cause("optimizer_state_misplaced", (MISPLACED,), "the moment has the history of {other}", "the order of parameters "
          "when the optimizer's state was saved or loaded"),
    Cause("decay_in_gradient", (LINEAR,), _OPTIMIZER + "added {other weight} of the weight to them, the reference "
          "{weight}", "`Adam(weight_decay=)` against `AdamW`", _all(_moved("weight"), _of_kind("m"), _has_second)),
    Cause("weight_decay", (LINEAR,), "weight decay: {other weight} of the weight is added to the gradient, {weight} in "
          "the reference", "`weight_decay` of the optimizer", _all(_moved("weight"), _without_second)),
    Cause("update_twice", (LINEAR,), "the optimizer stepped twice with one gradient: the moments are {first} and "
          "{second} times the expected", "`optimizer.step()` by a hook and by hand", _twice),
    Cause("update_sign", (LINEAR,), _OPTIMIZER + "saw them with the other sign", "`maximize`",
          _all(_moved("gradient"), lambda case, pattern: near(pattern.numbers["first"], -1.0))),
    Cause("loss_scale", (LINEAR,), _OPTIMIZER + "saw them times {first}", "the loss scale, divided out once",
          _all(_moved("gradient"), _squared, _power)),
    Cause("clip_factor", (LINEAR,), _OPTIMIZER + "saw them times {first}", "the clip factor: left out, applied twice, "
          "of another norm or limit", _all(_moved("gradient"), _squared)),
    Cause("sgd_dampening", (LINEAR,), "the momentum takes {other gradient} of the gradient, {gradient} in the "
          "reference", "`dampening=`", _all(_dampened, _without_second, _of_kind("m", "state"))),
    Cause("other_betas", (LINEAR,), "another rate of decay of the moments: {other gradient} of the gradient is taken, "
          "{gradient} in the reference", "`betas=`, their order",
          _other_rate_of_decay),
)
