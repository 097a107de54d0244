# SPDX-License-Identifier: Apache-2.0
"""Weights after a step: what is looked at is the update, which the weights' own size hides."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, When
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.steps import (NEAR, USUAL_BETAS, before, betas_of, copied, flat, momenta_of, near, options, own_of,
                                   ranks_named, rates_of, right_moments, sum_of)
from anyrank.explain.tensors import Array, Case, Name, Tensors

KEPT, UPDATE, UPDATE_OF_RANKS, DECAY = "weights of before", "update scaled", "update scaled by rank", "weight added"
MOST_OWNED = 24  # other weights that are looked at
EPSILON, SIGNS, STEPPED, FIRST = "epsilon", "steps up and down", "one step apart", "a first step again"
MOST_PARAMETERS = 24  # whose updates are looked at besides
LARGEST_STEP = 0.1  # of Adam's first: any larger one is another thing
LEAST_RMS = 1e-3  # of a parameter, below which relative steps are those of this


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A copy's update: the expected times `factor`, and `decay` of the weight besides; unsure: how far off the factor
    may be by the weights' own rounding."""

    factor: float
    decay: float
    unsure: float


def _scaled(case: Case, i: int, w: Array, silent: Array | None = None) -> Scaled | None:
    """None: it is no multiple, or the weights' rounding hides it."""
    told = np.ones(case.shape) if silent is None else ~silent
    base = flat(case, i, w) * flat(case, i, told)
    own, expected = flat(case, i) * flat(case, i, told) - base, flat(case, i, case.ref) * flat(case, i, told) - base
    noise = 4.0 * float(((case.unit * base) ** 2).sum())
    square = float((expected ** 2).sum())
    if not square > 100.0 * noise or not np.isfinite(own).all():
        return None
    unsure = math.sqrt(noise / square) + 1e-6
    factor = float((own * expected).sum()) / square
    least = 2.0 * noise + 1e-8 * float((own ** 2).sum())
    if float(((own - factor * expected) ** 2).sum()) <= least:
        return Scaled(factor, 0.0, unsure)
    both = sum_of(own, (expected, base))
    if both is None or (both.left ** 2) * float((own ** 2).sum()) > least:
        return None
    factor, more = both.numbers
    decay = more / (factor - 1.0) if factor != 1.0 else math.inf  # the decay is not scaled with the rest
    return Scaled(factor, more, unsure) if 0.0 < decay < 0.1 else None


def _silent(case: Case) -> Array:
    """Elements of small gradients, in whose update Adam's epsilon has a part; none where that would be many."""
    v = case.beside(case.name.with_kind("v"))
    if v is None:
        return np.zeros(case.shape, bool)
    root = np.sqrt(np.maximum(v, 0.0))
    used = root[root > 0.0]
    silent = (root > 0.0) & (root < 0.03 * math.sqrt(float((used ** 2).mean()))) if used.size else root > 0.0
    return silent if silent.sum() < 0.3 * used.size else np.zeros(case.shape, bool)


def _may_be_correction(case: Case, factor: float, decays: bool) -> bool:
    """Whether a factor may be one of Adam's correction: a simple one is the learning rate's where no decay, which the
    correction leaves as it is, tells them apart."""
    names = [case.name.with_kind(kind) for kind in ("m", "v")]
    same = not any(name in case.runs.other and name not in case.runs.same for name in names)
    return same and (decays or ratio_of(factor, 20, 1e-4) is None)


def _correction(case: Case, factor: float, unsure: float) -> tuple[int, int] | None:
    """The steps t and s, if the factor is Adam's correction of step t over that of step s, which is this one."""
    def correction(b: tuple[float, float], t: int) -> float:
        return math.sqrt(1.0 - b[1] ** t) / (1.0 - b[0] ** t)

    if options(case) and "betas" not in options(case):
        return None
    if not {case.name.with_kind(kind) for kind in ("m", "v")} & {*case.runs.reference}:
        nearest = itertools.product(USUAL_BETAS[:2], (case.name.step,), (case.name.step + 1, case.name.step - 1))
        return next(((t, s) for b, s, t in nearest if t > 0 and near(
            factor, correction(b, t) / correction(b, s), 1e-4 + 2.0 * unsure)), None)
    betas = betas_of(case)
    # Of a resumed run whose history is not dumped, the number of the step is not known.
    steps = range(1, 16) if len(betas) == len(USUAL_BETAS) else (case.name.step,)
    return next(((t, s) for b, s, t in itertools.product(betas, steps, range(1, 16)) if t != s and near(
        factor, correction(b, t) / correction(b, s), 1e-4 + 2.0 * unsure)), None)


def _among_replicas(case: Case, moved: list[int]) -> bool:
    """Whether others hold the same elements, and hold them right."""
    right = {str(copy.boxes) for i, copy in enumerate(case.copies) if i not in moved}
    return any(str(case.copies[i].boxes) in right for i in moved)


def _updates(case: Case, w: Array) -> typing.Iterator[Pattern]:
    silent = _silent(case)
    found = [_scaled(case, i, w, silent) for i in range(len(case.copies))]
    scaled = [s for s in found if s is not None]
    if len(scaled) < len(found):
        return
    moved = [i for i, s in enumerate(scaled) if abs(s.factor - 1.0) > NEAR + s.unsure]
    if not moved:
        return
    factors = [scaled[i].factor for i in moved]
    low, high, unsure = min(factors), max(factors), max(s.unsure for s in scaled)
    one = high - low <= NEAR * abs(high) + 2.0 * unsure
    mean = sum(factors) / len(factors)
    ratio = ratio_of(mean, 16, max(1e-5, 2.0 * unsure))
    numbers: dict[str, typing.Any] = {
        "factor": mean, "low": low, "high": high, "unsure": unsure, "ranks": ranks_named(case, moved),
        "decays": any(s.decay for s in scaled), "replicas": _among_replicas(case, moved), "as": 0, "step": 0}
    numbers |= _among(case)
    numbers["of_adam"] = one and _may_be_correction(case, mean, numbers["decays"])
    if numbers["of_adam"] and (found_steps := _correction(case, mean, unsure)):
        numbers["as"], numbers["step"] = found_steps
    if not one or len(moved) < len(scaled):
        arrays = [np.where(silent, own_of(case, i), w + s.factor * (case.ref - w) + s.decay * w)
                  for i, s in enumerate(scaled)]
        yield Pattern(UPDATE_OF_RANKS if not one else UPDATE, copied(case, arrays), numbers,
                      fitted=len(moved) if not one else 0 if ratio else 1)
        return
    exact = ratio[0] / ratio[1] if ratio else mean
    expected = w + exact * (case.ref - w) + scaled[0].decay * w
    arrays = [np.where(silent, own_of(case, i), expected) for i in range(len(scaled))]
    yield Pattern(UPDATE, copied(case, arrays), numbers, fitted=0 if ratio else 1)


def _factor_of(case: Case, name: str) -> tuple[float, float] | None:
    """By what another parameter's update is off, and the root mean square of its weights before; None: by no factor."""
    own = Name.of(name)
    start = own.with_kind("new", own.step - 1) if own.step > 1 else own.with_kind("init")
    tensors = (case.runs.reference.get(start), case.runs.reference.get(name), case.runs.other.get(name))
    if any(x is None for x in tensors) or len({np.shape(x) for x in tensors}) > 1:
        return None
    w, ref, val = (np.asarray(x, np.float64).ravel()[:1 << 16] for x in tensors)
    expected, found = ref - w, val - w
    square = float((expected ** 2).sum())
    if not square > 100.0 * float(((case.unit * w) ** 2).sum()):
        return None
    factor = float((found * expected).sum()) / square
    left = float(((found - factor * expected) ** 2).sum())
    least = 1e-6 * float((found ** 2).sum()) + 8.0 * float(((case.unit * w) ** 2).sum())
    return (factor, math.sqrt(float((w ** 2).mean()))) if left <= least else None


def _among(case: Case) -> dict[str, typing.Any]:
    """How the updates of the step's other parameters are off: by one factor, or by one over, or times, the size of the
    parameter."""
    names = [name for name in case.runs.reference if (n := Name.of(name)).kind == "new" and n.step == case.name.step]
    found = [pair for name in names[:MOST_PARAMETERS] if (pair := _factor_of(case, name))]
    numbers: dict[str, typing.Any] = {"parameters": len(found), "law": "", "constant": 0.0, "alike": True}
    if len(found) < 3:
        return numbers
    factors = np.array([factor for factor, _ in found])
    sizes = np.array([max(rms, LEAST_RMS) for _, rms in found])
    numbers["alike"] = bool(np.ptp(factors) <= 1e-2 * np.abs(factors).max())
    for law, x in (("over", factors * sizes), ("times", factors / sizes)):
        if not numbers["alike"] and np.ptp(x) <= 1e-3 * np.abs(x).max():
            numbers |= {"law": law, "constant": float(x.mean())}
    return numbers


def _again(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """A later step's update is the rate times the sign of each gradient, as Adam's first step is."""
    g = case.beside(case.name.with_kind("grad"), True)
    if case.name.step < 2 or g is None:
        return
    told = options(case).get("eps")
    signs = g / (np.abs(g) + (float(told) if isinstance(told, (int, float)) else 1e-8))
    here, there = (sum_of(x - w, (signs, w)) for x in (case.val, case.ref))
    if here is None or there is None or here.left > 1e-3 or there.left < 0.05 or not here.numbers[0] < 0.0:
        return
    rate, decay = here.numbers
    rates = rates_of(case)
    of_decay = decay if abs(decay) * float(np.abs(w).max()) > 1e-3 * abs(rate) else 0.0
    yield Pattern(FIRST, w + rate * signs + of_decay * w, {"rate": -rate},
                  fitted=0 if rates is not None and near(-rate, rates[1]) else 1)


def _kept(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """What differs has the value of before: everywhere, on some ranks or in shares of them."""
    arrays, shares, held = [], [], case.ref == w
    kept, updated, partly = 0, 0, True
    for i, copy in enumerate(case.copies):
        off: Array = np.zeros(case.shape, bool)
        for box, values in zip(copy.boxes, copy.values):
            off[box] = case.differs(values, box)
        moved = own_of(case, i) != w
        held |= moved & ~off
        arrays.append(np.where(off, w, case.ref))
        shares.append(bool(off.any()))
        kept += int(off.sum())
        updated += int(flat(case, i, moved).sum())
        partly &= not off.any() or bool(flat(case, i, moved).any())
    yield Pattern(KEPT, copied(case, arrays), {
        "ranks": ranks_named(case, [i for i, off in enumerate(shares) if off]), "kept": kept, "updated": updated,
        "everywhere": bool(held.all()), "partly": partly, "total": kept + updated})


def _decay(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """The difference is a part of the weight before."""
    parts = []
    for i in range(len(case.copies)):
        base = flat(case, i, w)
        apart = flat(case, i) - flat(case, i, case.ref)
        square, noise = float((base ** 2).sum()), 4.0 * float(((case.unit * base) ** 2).sum())
        part = float((apart * base).sum()) / square if square > 0.0 else 0.0
        left = float(((apart - part * base) ** 2).sum())
        if not np.isfinite(left) or left > 2.0 * noise + 1e-6 * float((apart ** 2).sum()) or abs(part) > 0.5:
            return
        parts.append(part if part ** 2 * square > 16.0 * noise else 0.0)
    moved = [i for i, part in enumerate(parts) if part != 0.0]
    if not moved or max(parts[i] for i in moved) - min(parts[i] for i in moved) > NEAR * max(map(abs, parts)):
        return
    part = sum(parts[i] for i in moved) / len(moved)
    numbers = {"part": abs(part), "what": "left out" if part > 0.0 else "taken that the reference does not take",
               "ranks": ranks_named(case, moved), "still": bool((case.ref == w).all())}
    arrays = [case.ref + (part * w if i in moved else 0.0) for i in range(len(parts))]
    yield Pattern(DECAY, copied(case, arrays), numbers, fitted=1)


def _signs(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """What is moved by the same step up or down, some elements the other way, or not at all: a balancing bias."""
    own, expected = case.val - w, case.ref - w
    size = float(np.abs(expected).max(initial=0.0))
    steps = np.rint(own / size) if size > 0.0 else own
    noise = 8.0 * case.unit * (float(np.abs(w).max(initial=0.0)) + size)
    in_steps = size > 0.0 and bool((np.abs(np.rint(expected / size) * size - expected) <= noise).all())
    if in_steps and np.abs(steps).max() <= 1.0:
        yield Pattern(SIGNS, w + steps * size, {"size": size, "other": int((steps != np.rint(expected / size)).sum()),
                                                "total": steps.size}, fitted=1)


def _epsilon(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """One update is the other's over 1 + epsilon/root, or over the root of 1 + epsilon/root^2."""
    v, g = case.beside(case.name.with_kind("v")), case.beside(case.name.with_kind("grad"))
    if v is not None and right_moments(case):
        root = np.sqrt(np.maximum(v, 0.0))
    elif v is None and g is not None and case.name.step == 1:
        root = np.abs(g)
    else:
        return
    ref, val, off = case.ref - w, case.val - w, case.off
    for here in (True, False):
        small, large = (val, ref) if here else (ref, val)
        for inside in (False, True):
            y = (large ** 2 - small ** 2) * root ** 2 if inside else (large - small) * root
            columns = (small ** 2,) if inside else (small, w)  # a decay of d w is in both updates
            least = sum_of(y[off], tuple(column[off] for column in columns))
            if least is None or least.left > 2e-2 or not least.numbers[0] > 0.0:
                continue
            eps = least.numbers[0]
            decay = 0.0 if inside else -least.numbers[1] / eps * w
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.sqrt(1.0 + eps / root ** 2) if inside else 1.0 + eps / root
                expected = w + decay + ((ref - decay) / ratio if here else (ref - decay) * ratio)
            yield Pattern(EPSILON, np.where(root > 0.0, expected, case.ref), {
                "epsilon": eps, "where": "here" if here else "in the reference",
                "how": "inside of the root" if inside else "beside the root"}, fitted=2, trials=4)


def _one_step(case: Case) -> typing.Iterator[Pattern]:
    """Initial values that are one of Adam's first steps apart."""
    off = case.off
    apart = (case.val - case.ref)[off]
    if apart.size * 4 < off.size or apart.size < 8:
        return
    up = int((apart > 0.0).sum())
    found = sum_of(apart, (np.sign(apart), case.ref[off]))
    if found is None or found.left > 1e-2 or not apart.size < 4 * up < 3 * apart.size or abs(found.numbers[1]) > 0.1:
        return
    if not found.numbers[0] <= LARGEST_STEP:
        return
    expected = case.ref + found.numbers[0] * np.sign(case.val - case.ref) + found.numbers[1] * case.ref
    yield Pattern(STEPPED, np.where(off, expected, case.ref), {"size": found.numbers[0]}, fitted=3)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "init":
        yield from _one_step(case)
    w = before(case) if case.name.kind == "new" else None
    if w is not None:
        for looks in (_kept, _updates, _decay, _signs, _epsilon, _again):
            yield from looks(case, w)


# --- causes -----------------------------------------------------------------------------------------------------------


def _of(key: str, value: typing.Any) -> When:
    return lambda case, pattern: bool(pattern.numbers[key] == value)


def _uncorrected(case: Case, pattern: Pattern) -> bool:
    """Whether the factor is that of moments without correction: of the first, the second, or both."""
    step, factor = case.name.step, pattern.numbers["factor"]
    return pattern.numbers["of_adam"] and any(
        near(factor, of, 1e-4 + 2.0 * pattern.numbers["unsure"]) for b in betas_of(case)
        for of in (1.0 - b[0] ** step, 1.0 / math.sqrt(1.0 - b[1] ** step),
                   (1.0 - b[0] ** step) / math.sqrt(1.0 - b[1] ** step)))


def _nesterov(case: Case, pattern: Pattern) -> bool:
    """A first step of Nesterov's is 1 + momentum times as large."""
    factor = pattern.numbers["factor"]
    return case.name.step == 1 and case.name.with_kind("v") not in case.runs.reference and any(
        near(factor, x, 1e-4) for momentum in momenta_of(case) if momentum > 0.0
        for x in (1.0 + momentum, 1.0 / (1.0 + momentum)))


def _other_rate(case: Case, pattern: Pattern) -> bool:
    """Two rates that are recorded and have this ratio, or right moments with an update that its decay follows."""
    rates = rates_of(case)
    if rates is not None and rates[0] != rates[1] and rates[0]:
        return near(pattern.numbers["factor"], rates[1] / rates[0])
    return (rates is None and right_moments(case) and pattern.numbers["alike"] and not pattern.numbers["decays"]
            and not pattern.numbers["ranks"])


def _recorded_rate(case: Case, pattern: Pattern) -> bool:
    rates = rates_of(case)
    return rates is not None and rates[0] != rates[1] and _other_rate(case, pattern)


def _factor(value: float) -> When:
    return lambda case, pattern: abs(pattern.numbers["factor"] - value) < 1e-4 + 2.0 * pattern.numbers["unsure"]


def _without_gradient(case: Case, pattern: Pattern) -> bool:
    gradients = [name for name in case.runs.reference if Name.of(name).kind == "grad"]
    return bool(gradients) and case.name.with_kind("grad") not in case.runs.reference


def _of_owners(case: Case, pattern: Pattern) -> bool:
    """Whether some ranks have not updated this weight, and others another: each updates what it owns."""
    other, step = case.runs.other, case.name.step
    if not pattern.numbers["ranks"] or not isinstance(other, Tensors):
        return False
    own = {copy.rank for copy in case.copies if any(case.differs(v, b).any() for b, v in zip(copy.boxes, copy.values))}
    names = [name for name in case.runs.reference if (n := Name.of(name)).kind == "new" and n.step == step
             and name in other and name not in case.runs.same]
    for name in names[:MOST_OWNED]:
        last = Name.of(name).with_kind("new", step - 1) if step > 1 else Name.of(name).with_kind("init", 1)
        w, ref = case.runs.reference.get(last), case.runs.reference[name]
        if w is None or w.shape != ref.shape or w.shape != other.shape(name) or np.array_equal(w, ref):
            continue
        kept = {copy.rank for copy in other.parts(name) if copy.rank is not None and all(
            np.array_equal(values, w[box]) for box, values in zip(copy.boxes, copy.values))}
        if kept and not kept & own:
            return True
    return False


def _gathers(case: Case, pattern: Pattern) -> bool:
    """Every rank keeps a part and has updated another, and together they have updated all."""
    numbers = pattern.numbers
    return len(case.copies) > 1 and bool(numbers["everywhere"] and numbers["partly"])


CAUSES = (
    Cause("share_off_by_one", (KEPT,), "{kept} of {total} elements have the value before the step, bit for bit, and "
          "all others are updated: no rank's share of the optimizer has them", "edges of the optimizer's shares "
          "(ZeRO): `//`, padding of flat buffers",
          lambda case, pattern: pattern.numbers["kept"] < 8 and pattern.numbers["updated"] >= 64),
    Cause("shares_not_gathered", (KEPT,), "each rank has updated a share of this weight, and the rest is that of "
          "before the step", "the all-gather after a ZeRO step", _gathers),
    Cause("shares_not_gathered", (KEPT,), "no update{ranks}, whose updates of other weights the other ranks lack: each "
          "rank updates what it owns, and the updated weights are not gathered", "the all-gather or broadcast after a "
          "step of ZeRO or Muon", _of_owners),
    Cause("no_update", (KEPT,), "no update{ranks}: {kept} elements have the values of before the step",
          "the optimizer's parameter groups; a step that is skipped; the gather or broadcast of its result",
          _of("partly", False)),
    Cause("router_bias_update", (SIGNS,), "this has no gradient and moves by {size} up or down, as a router's "
          "balancing bias: {other} of {total} elements move another way", "the counts of tokens that the bias is moved "
          "by: summed over all ranks, of this step", _without_gradient),
    Cause("router_bias_update", (UPDATE,), "this has no gradient, as a router's balancing bias, and moves {factor} "
          "times the expected", "the sign and the counts that the bias is moved by",
          lambda case, pattern: _without_gradient(case, pattern) and _factor(-1.0)(case, pattern)),
    Cause("update_sign", (UPDATE,), "the update has the wrong sign{ranks}: the step goes up the gradient",
          "`maximize`, the sign of the step", _factor(-1.0)),
    Cause("other_learning_rate", (UPDATE,), "another learning rate, as both runs record: the update is {factor} times "
          "the expected{ranks}", "the learning rate or its schedule", _recorded_rate, sure=True),
    Cause("adam_step_not_synced", (UPDATE,), "Adam's correction of another step{ranks}: the update is {factor} times "
          "the expected, as that of step {as} would be in step {step}", "`state[\"step\"]` of each rank",
          lambda case, pattern: bool(pattern.numbers["replicas"] and pattern.numbers["as"])),
    Cause("adam_step_counter", (UPDATE,), "Adam's correction of another step{ranks}: the update is {factor} times the "
          "expected, as that of step {as} would be in step {step}", "`state[\"step\"]` after loading or skipping",
          lambda case, pattern: bool(pattern.numbers["as"])),
    Cause("adam_not_corrected", (UPDATE,), "the update is {factor} times the expected: moments that were not corrected",
          "the bias correction of this optimizer", _uncorrected),
    Cause("nesterov", (UPDATE,), "the update is {factor} times the expected: Nesterov's momentum in one run alone",
          "`nesterov=`", _nesterov),
    Cause("update_of_ranks_apart", (UPDATE,), "the update is {factor} times the expected{ranks}, and right on the "
          "others", "the learning rate and the clip factor of these ranks",
          lambda case, pattern: bool(pattern.numbers["ranks"])),
    Cause("other_learning_rate", (UPDATE,), "another learning rate: the moments are right, and the update is {factor} "
          "times the expected", "the learning rate or its schedule", _other_rate),
    Cause("update_scaled", (UPDATE,), "the update is {factor} times the expected, and that of each of {parameters} "
          "parameters {constant} {law} the root mean square of its weights: in one of the runs "
          "alone the step is relative to the parameter's size", "the step relative to the parameter's size "
          "(`scale_parameter`, trust ratios)",
          lambda case, pattern: bool(pattern.numbers["law"])),
    Cause("update_scaled", (UPDATE,), "the update is {factor} times the expected, as that of all {parameters} "
          "parameters that were looked at, and otherwise right", "the learning rate, the clip factor",
          lambda case, pattern: pattern.numbers["parameters"] > 2 and pattern.numbers["alike"]),
    Cause("update_scaled", (UPDATE,), "the update is {factor} times the expected, and otherwise right", "the learning "
          "rate, the clip factor, a gradient that is scaled on its way to the optimizer"),
    Cause("update_of_ranks_apart", (UPDATE_OF_RANKS,), "each rank's update is the expected times a number of its own, "
          "from {low} to {high}", "each rank's clip factor and learning rate"),
    Cause("decay_without_gradient", (DECAY,), "{part} of the weight was taken by decay, which the reference leaves as "
          "it was: a parameter without gradient", "`grad is None` against a gradient of zero", _of("still", True)),
    Cause("decay_of_ranks_apart", (DECAY,), "weight decay of {part} of the weight {what}{ranks} alone",
          "the weight decay of these ranks", lambda case, pattern: bool(pattern.numbers["ranks"])),
    Cause("weight_decay", (DECAY,), "weight decay of {part} of the weight {what}: the rest of the update is right",
          "`weight_decay`, the parameter's group"),
    Cause("adam_eps", (EPSILON,), "another epsilon in Adam: {where} the update is divided by more, as by an epsilon of "
          "{epsilon} {how}", "`eps` of the optimizer, whether it is inside of the root"),
    Cause("optimizer_state_lost", (FIRST,), "the update is {rate} times the sign of each gradient, as Adam's first "
          "step is, and the reference's is not: the optimizer's state was lost, or the optimizer made anew",
          "`optimizer.load_state_dict` at a resume; an optimizer that is made again during training"),
    Cause("other_point_of_step", (STEPPED,), "one step apart: each is moved up or down by {size}, whatever its size, "
          "as by a first step of Adam", "what a resume loads: weights of before the step, state of after it"),
)
