# SPDX-License-Identifier: Apache-2.0
"""Weights after a step: what is looked at is the update, which the weights' own size hides."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has, kinds
from anyrank.explain.known import left_of_zero, rms_of_kind
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.steps import (NEAR, USUAL_BETAS, before, betas_of, copied, flat, last, near, options, own_of,
                                   ranks_named, rates_of, sum_of)
from anyrank.explain.tensors import Array, Case, Name, Tensors
from anyrank.explain.words import ranks_of

KEPT, UPDATE, DECAY = "weights of before", "update scaled", "weight added"
EPSILON, STEPPED, FIRST = "epsilon", "one step apart", "a first step again"
RESTING = "at rest"
FACTORED, OVERFLOW, ELSEWHERE = "second moment of own part", "step left out", "update of other weights"
MOST_PARAMETERS = 24  # that are looked at besides
LARGEST_STEP = 0.1  # of Adam's first: any larger one is another thing
LEAST_RMS = 1e-3  # of a parameter, below which relative steps are those of this
USUAL_MOMENTA = (0.9, 0.99, 0.95, 0.5)


# --- updates that are multiples of what they should be, and weights that are added to them ----------------------------


class Change(typing.NamedTuple):
    """A copy's update: the expected times `factor`, and `decay` of the weight besides; unsure: how far off the factor
    may be by the weights' own rounding."""

    factor: float
    decay: float
    unsure: float = 0.0


def _change(case: Case, i: int, w: Array, silent: Array) -> Change | None:
    """None: it is no multiple, or the weights' rounding hides it."""
    told = flat(case, i, ~silent)
    base = flat(case, i, w)
    own, expected = flat(case, i) - base, flat(case, i, case.ref) - base
    if not np.isfinite(own).all():
        return None
    noise, apart = 4.0 * float(((case.unit * base) ** 2).sum()), own - expected
    size = float(base @ base)
    part = float(apart @ base) / size if size > 0.0 else 0.0
    if abs(part) <= 0.5 and float(((apart - part * base) ** 2).sum()) <= 2.0 * noise + 1e-6 * float(apart @ apart):
        return Change(1.0, part if part ** 2 * size > 16.0 * noise else 0.0)
    own, expected, base = own * told, expected * told, base * told
    square, least = float(expected @ expected), 2.0 * noise + 1e-8 * float(own @ own)
    if not square > 100.0 * noise:
        return None
    unsure = math.sqrt(noise / square) + 1e-6
    factor = float(own @ expected) / square
    if float(((own - factor * expected) ** 2).sum()) <= least:
        return Change(factor, 0.0, unsure)
    both = sum_of(own, (expected, base))
    if both is None or (both.left ** 2) * float(own @ own) > least or both.numbers[0] == 1.0:
        return None
    factor, more = both.numbers  # the decay is not scaled with the rest
    return Change(factor, more, unsure) if 0.0 < more / (factor - 1.0) < 0.1 else None


def _silent(case: Case) -> Array:
    """Elements of small gradients, in whose update Adam's epsilon has a part; none where that would be many."""
    none: Array = np.zeros(case.shape, bool)
    v = case.beside(case.name.with_kind("v"))
    if v is None or not (v > 0.0).any():
        return none
    root = np.sqrt(np.maximum(v, 0.0))
    used = root[root > 0.0]
    silent: Array = (root > 0.0) & (root < 0.03 * math.sqrt(float((used ** 2).mean())))
    return silent if silent.sum() < 0.3 * used.size else none


def _correction(case: Case, factor: float, unsure: float, decays: bool) -> str:
    """Which step's correction of Adam's moments a factor is in place of this one's, or that they have none; "": it is
    none, or, as a simple one, the learning rate's where no decay, which the correction leaves as it is, tells."""
    step, close = case.name.step, 1e-4 + 2.0 * unsure
    names = {case.name.with_kind(kind) for kind in ("m", "v")}
    if any(name in case.runs.other and name not in case.runs.same for name in names) or (
            options(case) and "betas" not in options(case)) or (not decays and ratio_of(factor, 20, 1e-4) is not None):
        return ""

    def correction(b: tuple[float, float], t: int) -> float:
        return math.sqrt(1.0 - b[1] ** t) / (1.0 - b[0] ** t)

    dumped = bool(names & {*case.runs.reference})
    betas = betas_of(case) if dumped else USUAL_BETAS[:2]
    # Of a resumed run whose history is not dumped, the number of the step is not known.
    steps = range(1, 16) if len(betas) == len(USUAL_BETAS) else (step,)
    others = range(1, 16) if dumped else (step + 1, step - 1)
    for b, s, t in itertools.product(betas, steps, others):
        if 0 < t != s and near(factor, correction(b, t) / correction(b, s), close):
            return f"as that of step {t} would be in step {s}"
    of_none = [x for b in betas for x in (1.0 - b[0] ** step, 1.0 / math.sqrt(1.0 - b[1] ** step),
                                          1.0 / correction(b, step))] if dumped else []
    return "moments that were not corrected" if any(near(factor, x, close) for x in of_none) else ""


def _changes(case: Case, w: Array) -> typing.Iterator[Pattern]:
    silent = _silent(case)
    found = [change for i in range(len(case.copies)) if (change := _change(case, i, w, silent)) is not None]
    if len(found) < len(case.copies):
        return
    moved = [i for i, s in enumerate(found) if abs(s.factor - 1.0) > NEAR + s.unsure]
    decays = [i for i, s in enumerate(found) if s.decay != 0.0]
    if not moved:
        parts = [found[i].decay for i in decays]
        if parts and max(parts) - min(parts) <= NEAR * max(map(abs, parts)):
            part = sum(parts) / len(parts)
            yield Pattern(DECAY, copied(case, [case.ref + (part * w if i in decays else 0.0)
                                               for i in range(len(found))]),
                          {"part": abs(part), "ranks": ranks_named(case, decays), "what": "left out" if part > 0.0
                           else "taken that the reference does not take", "still": "" if (case.ref != w).any() else
                           ": the reference leaves it as it was"}, 1)
        return
    factors, unsure = [found[i].factor for i in moved], max(s.unsure for s in found)
    low, high, mean = min(factors), max(factors), sum(factors) / len(factors)
    one = high - low <= NEAR * abs(high) + 2.0 * unsure
    ratio = ratio_of(mean, 16, max(1e-5, 2.0 * unsure)) if one else None
    exact = ratio[0] / ratio[1] if ratio else None
    arrays = [np.where(silent, own_of(case, i), w + (exact if exact and i in moved else s.factor) * (case.ref - w)
                       + s.decay * w) for i, s in enumerate(found)]
    numbers = {"factor": mean, "times": f"{mean:.4g}" if one else f"{low:.4g} to {high:.4g}", "one": one,
               "unsure": unsure, "ranks": ranks_named(case, moved), "decays": bool(decays), **_among(case),
               "correction": _correction(case, mean, unsure, bool(decays)) if one else ""}
    yield Pattern(UPDATE, copied(case, arrays), numbers, 0 if ratio else 1 if one else len(moved))


def _factor_of(case: Case, name: str) -> tuple[float, float] | None:
    """By what another parameter's update is off, and the root mean square of its weights before; None: by no factor."""
    w = case.runs.reference.get(last(Name.of(name)))
    val = case.runs.other.get(name)
    if w is None or val is None or w.shape != val.shape:
        return None
    w, ref, val = (np.asarray(x, np.float64).ravel()[:1 << 16] for x in (w, case.runs.reference[name], val))
    found = sum_of(val - w, (ref - w,))
    noise = case.unit * float(np.linalg.norm(w))
    if found is None or not np.linalg.norm(ref - w) > 10.0 * noise or found.left > max(
            1e-3, 3.0 * noise / float(np.linalg.norm(val - w))):
        return None
    return found.numbers[0], max(math.sqrt(float((w ** 2).mean())), LEAST_RMS)


def _among(case: Case) -> dict[str, typing.Any]:
    """How the updates of the step's other parameters are off: by one factor, or by one over, or times, the parameter's
    size or, of matrices, what follows from the shape."""
    names = [name for name in case.runs.reference if (n := Name.of(name)).kind == "new" and n.step == case.name.step]
    known = {name: pair for name in names[:MOST_PARAMETERS] if (pair := _factor_of(case, name))}
    if len(known) < 3:
        return {"beside": "", "alike": True}
    factors, sizes = np.array([*known.values()]).T
    if np.ptp(factors) <= 1e-2 * np.abs(factors).max():
        return {"beside": f", as that of all {len(known)} parameters that were looked at", "alike": True}
    matrices = [(pair[0], *case.runs.reference[name].shape) for name, pair in known.items()
                if case.runs.reference[name].ndim == 2 and abs(pair[0] - 1.0) > NEAR]
    off, rows, columns = np.array(matrices).T if matrices else np.ones((3, 1))
    for found, size, text in (
            (factors, sizes, "root mean square of its weights: in one of the runs alone the step is relative to that"),
            (off, np.sqrt(rows / columns), "root of rows / columns"),
            (off, np.sqrt(np.maximum(rows, columns)), "root of its larger dimension")):
        for law, x in (("over", found * size), ("times", found / size)):
            if len(x) > 2 and np.ptp(size) > 1e-3 * size.max() and np.ptp(x) <= 1e-3 * np.abs(x).max():
                return {"alike": False, "shape": text if found is off else "", "beside": f", and that of each of "
                        f"{len(x)} {'matrices' if found is off else 'parameters'} {x.mean():.4g} {law} the {text}"}
    return {"beside": "", "alike": False}


# --- other updates ----------------------------------------------------------------------------------------------------


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


def _at_rest(case: Case, w: Array) -> Array:
    """Elements that the other run's optimizer has nothing to move by: gradient and momentum are exactly 0, and a weight
    decay that is recorded is less than the weight's own rounding."""
    names = [case.name.with_kind("grad"), case.name.with_kind("m")]
    if names[1] not in case.runs.other:
        names = [case.name.with_kind("grad", step) for step in range(1, case.name.step + 1)]
    held = [case.beside(name, True) for name in names]
    rest: Array = np.ones(case.shape, bool)
    for x in held:
        rest &= x == 0.0 if x is not None else False
    rates, decay = rates_of(case), options(case).get("weight_decay")
    if rates is not None and isinstance(decay, (int, float)) and rates[1] * decay > case.unit:
        rest &= w == 0.0
    return rest


def _resting(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """What differs has the value of before, as it must."""
    off, g = case.off, case.beside(case.name.with_kind("grad"))
    if not off.any() or g is None:
        return
    most = float(np.abs(g[off]).max())
    yield Pattern(RESTING, np.where(off, w, case.ref), {
        "count": int(off.sum()), "most": most, "size": rms_of_kind(case, "grad")})


def _kept(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """What differs has the value of before: everywhere, on some ranks or in shares of them."""
    rest = _at_rest(case, w)
    if not (case.off & ~rest).any():
        yield from _resting(case, w)
        return
    arrays, wrong, held = [], [], case.ref == w
    kept, updated, partly = 0, 0, True
    for i, copy in enumerate(case.copies):
        off: Array = np.zeros(case.shape, bool)
        for box, values in zip(copy.boxes, copy.values):
            off[box] = case.differs(values, box)
        moved = own_of(case, i) != w
        held |= moved & ~off
        arrays.append(np.where(off, w, case.ref))
        wrong += [i] if off.any() else []
        kept += int(off.sum())
        updated += int(flat(case, i, moved).sum())
        partly &= not off.any() or bool(flat(case, i, moved).any())
    yield Pattern(KEPT, copied(case, arrays), {
        "ranks": ranks_named(case, wrong), "kept": kept, "total": kept + updated, "partly": partly,
        "gathers": len(case.copies) > 1 and partly and bool(held.all()), "few": kept < 8 and updated >= 64})


def _epsilon(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """One update is the other's over 1 + epsilon/root, or over the root of 1 + epsilon/root^2."""
    v, g = case.beside(case.name.with_kind("v")), case.beside(case.name.with_kind("grad"))
    if v is not None and _right_moments(case):
        root = np.sqrt(np.maximum(v, 0.0))
    elif v is None and g is not None and case.name.step == 1:
        root = np.abs(g)
    else:
        return
    ref, val, off = case.ref - w, case.val - w, case.off
    for here, inside in itertools.product((True, False), (False, True)):
        small, large = (val, ref) if here else (ref, val)
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


def _factored(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """A first step is divided by means of squared gradients, along the dimension that is cut, over each rank's part in
    place of all of it; beside them the mean of all, or of the part, may be in it."""
    g, axes = case.beside(case.name.with_kind("grad")), {axis for axis, _ in case.cuts}
    if g is None or len(case.shape) != 2 or len(axes) != 1 or any(len(copy.boxes) != 1 for copy in case.copies):
        return
    square: Array = g ** 2
    axis, ratio = axes.pop(), np.ones(case.shape)
    of_all = ratio * square.mean(axis, keepdims=True)
    for beside in (False, True):
        for box in (copy.boxes[0] for copy in case.copies):
            own = square[box].mean(axis, keepdims=True)
            more = (square[box].mean() / square.mean()) ** beside
            ratio[box] = np.where(own > 0.0, np.sqrt(of_all[box] / own * more), 1.0)
        found = sum_of(case.val - w, ((case.ref - w) * ratio,))
        if found is not None and found.left < 0.05:
            yield Pattern(FACTORED, w + found.numbers[0] * (case.ref - w) * ratio, {
                "along": ("columns", "rows")[axis], "over": ("rows", "columns")[axis]}, fitted=1)


def _overflow(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """The reference leaves the step out, as some ranks do, which have a gradient that is not finite; others make it."""
    made = {copy.rank or 0 for i, copy in enumerate(case.copies) if (flat(case, i) != flat(case, i, case.ref)).any()}
    known = case.runs.other
    if not isinstance(known, Tensors) or len(made) == len(case.copies) or (case.ref != w).any():
        return
    for name in known:
        own = Name.of(name)
        if (own.kind, own.step) == ("grad", case.name.step) and not np.isfinite(case.runs.reference.get(name, 0)).all():
            odd = {part.rank or 0 for part in known.parts(name) if not all(np.isfinite(x).all() for x in part.values)}
            if odd and not odd & made:
                yield Pattern(OVERFLOW, [list(copy.values) for copy in case.copies], {
                    "name": name, "made": ranks_of(made), "odd": ranks_of(odd)})
                return


def _elsewhere(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """The new weights have nothing to do with those before, as the reference's have; a later step goes on from them."""
    then = case.beside(case.name.with_kind("new", case.name.step + 1), True)
    if w.size < 64 or then is None or not np.ptp(w) > 0.0:
        return
    apart, moved, on = (float(np.sqrt(((x - y) ** 2).mean())) for x, y in (
        (case.val, w), (case.ref, w), (then, case.val)))
    along = float(np.corrcoef(case.val.ravel(), w.ravel())[0, 1])
    if apart > 0.5 * float(np.std(w)) and max(moved, on) < 0.1 * apart and abs(along) < 5.0 / math.sqrt(w.size):
        yield Pattern(ELSEWHERE, case.val, {"apart": apart, "moved": moved}, fitted=8)


def _one_step(case: Case) -> typing.Iterator[Pattern]:
    """Initial values that are one of Adam's first steps apart."""
    off = case.off
    apart = (case.val - case.ref)[off]
    up = int((apart > 0.0).sum())
    found = sum_of(apart, (np.sign(apart), case.ref[off])) if apart.size >= max(8, off.size / 4) else None
    if found is not None and found.left <= 1e-2 and apart.size < 4 * up < 3 * apart.size and (
            abs(found.numbers[1]) <= 0.1 and found.numbers[0] <= LARGEST_STEP):
        expected = case.ref + found.numbers[0] * np.sign(case.val - case.ref) + found.numbers[1] * case.ref
        yield Pattern(STEPPED, np.where(off, expected, case.ref), {"size": found.numbers[0]}, fitted=3)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "init":
        yield from _one_step(case)
    w = before(case) if case.name.kind == "new" else None
    if w is not None:
        for looks in (_kept, _changes, _epsilon, _again, _factored, _overflow, _elsewhere):
            yield from looks(case, w)


# --- causes -----------------------------------------------------------------------------------------------------------


def _right_moments(case: Case) -> bool:
    kinds = [kind for kind in ("m", "v") if case.name.with_kind(kind) in case.runs.reference]
    return bool(kinds) and all(case.name.with_kind(kind) in case.runs.same for kind in kinds)


def _is_left_of_zero(case: Case, pattern: Pattern) -> bool:
    return bool(pattern.numbers["most"] <= left_of_zero(case.unit) * pattern.numbers["size"])


def _is_nesterov(case: Case, pattern: Pattern) -> bool:
    """A first step of Nesterov's is 1 + momentum times as large."""
    told = options(case).get("momentum")
    momenta = (float(told),) if isinstance(told, (int, float)) else USUAL_MOMENTA
    return case.name.step == 1 and case.name.with_kind("v") not in case.runs.reference and any(
        near(pattern.numbers["factor"], x, 1e-4) for momentum in momenta if momentum > 0.0
        for x in (1.0 + momentum, 1.0 / (1.0 + momentum)))


def _other_rate(case: Case, pattern: Pattern) -> bool:
    """Two rates that are recorded and have this ratio, or right moments with an update that its decay follows."""
    rates, numbers = rates_of(case), pattern.numbers
    if rates is not None and rates[0] != rates[1] and rates[0]:
        return near(numbers["factor"], rates[1] / rates[0])
    return (rates is None and _right_moments(case) and numbers["alike"] and not numbers["decays"]
            and not numbers["ranks"])


def _is_negative(case: Case, pattern: Pattern) -> bool:
    return bool(abs(pattern.numbers["factor"] + 1.0) < 1e-4 + 2.0 * pattern.numbers["unsure"])


_TIMES = "the update is {times} times the expected"
CAUSES = (
    Cause("overflow_of_rank", (OVERFLOW,), "{made} made this step, which the reference and all other ranks left out: "
          "{name} is not finite on {odd} alone", "whether a gradient overflowed, decided for all ranks together: "
          "`found_inf` reduced (max) over every group that shares the model out", kinds("new")),
    Cause("second_moment_by_parts", (FACTORED,), "the update is divided by means of squared gradients over each rank's "
          "own {over}, one for each of the {along}, in place of all {over}", "factored second moments "
          "(Adafactor) of a sharded matrix: their means over the dimension that is sharded, averaged over the ranks"),
    Cause("stale_weights_updated", (ELSEWHERE,), "the step began from other weights than those before it, as from an "
          "old copy: the new ones are {apart} from these, where the reference's are {moved}, and the next step goes on "
          "from them", "the copy that the optimizer keeps and updates (fp32 master weights): made before weights were "
          "loaded, and not renewed; what else writes weights within a step"),
    Cause("rounding", (RESTING,), "{count} elements have a gradient of exactly 0 in the other run, which does not move "
          "them, and of {most} at most in the reference: rounding, of which an optimizer that divides by its size "
          "makes a whole step", "", _is_left_of_zero),
    Cause("no_gradient", (RESTING,), "no gradient reaches {count} elements in the other run: it is exactly 0 there, "
          "which does not move them, and {most} at most in the reference", "the gradient: what is "
          "detached, masked or not reduced"),
    Cause("no_update", (KEPT,), "{kept} of {total} elements have the value before the step, bit for bit, and all "
          "others are updated: no rank's share of the optimizer has them", "edges of the optimizer's shares (ZeRO): "
          "`//`, padding of flat buffers", has(few=True)),
    Cause("no_update", (KEPT,), "each rank has updated a share of this weight, and the rest is that of before the step",
          "the all-gather after a ZeRO step", has(gathers=True)),
    Cause("no_update", (KEPT,), "no update{ranks}: {kept} elements have the values of before the step",
          "the optimizer's parameter groups; a step that is skipped; the all-gather or broadcast of what each rank "
          "updates (ZeRO, Muon)", has(partly=False)),
    Cause("update_sign", (UPDATE,), "the update has the wrong sign{ranks}: the step goes up the gradient",
          "`maximize`, the sign of the step", _is_negative),
    Cause("other_learning_rate", (UPDATE,), "another learning rate, as both runs record: " + _TIMES + "{ranks}",
          "the learning rate or its schedule", lambda case, pattern: (
              rates := rates_of(case)) is not None and rates[0] != rates[1] and _other_rate(case, pattern), sure=True),
    Cause("adam_step_counter", (UPDATE,), "Adam's correction of another step{ranks}: " + _TIMES + ", {correction}",
          "`state[\"step\"]` of each rank, after loading or skipping; the bias correction",
          has(correction=bool)),
    Cause("nesterov", (UPDATE,), _TIMES + ": Nesterov's momentum in one run alone", "`nesterov=`", _is_nesterov),
    Cause("other_learning_rate", (UPDATE,), "another learning rate: the moments are right, and " + _TIMES,
          "the learning rate or its schedule", _other_rate),
    Cause("muon_scale", (UPDATE,), _TIMES + "{ranks}, and otherwise right{beside}", "the factor of an update for its "
          "matrix's shape (Muon: `max(1, rows / columns) ** 0.5`): in one run alone, or of a shard", has(shape=bool)),
    Cause("update_scaled", (UPDATE,), _TIMES + "{ranks}, and otherwise right{beside}", "the learning rate, the clip "
          "factor, of each rank; a step relative to the parameter's size (`scale_parameter`, trust ratios)"),
    Cause("decay_of_ranks_apart", (DECAY,), "weight decay of {part} of the weight {what}{ranks} alone",
          "the weight decay of these ranks", has(ranks=bool)),
    Cause("weight_decay", (DECAY,), "weight decay of {part} of the weight {what}{still}", "`weight_decay`, the "
          "parameter's group; `grad is None` against a gradient of zero"),
    Cause("adam_eps", (EPSILON,), "another epsilon in Adam: {where} the update is divided by more, as by an epsilon of "
          "{epsilon} {how}", "`eps` of the optimizer, whether it is inside of the root"),
    Cause("optimizer_state_lost", (FIRST,), "the update is {rate} times the sign of each gradient, as Adam's first "
          "step is, and the reference's is not: the optimizer's state was lost, or the optimizer made anew",
          "`optimizer.load_state_dict` at a resume; an optimizer that is made again during training"),
    Cause("other_point_of_step", (STEPPED,), "one step apart: each is moved up or down by {size}, whatever its size, "
          "as by a first step of Adam", "what a resume loads: weights of before the step, state of after it"),
)
