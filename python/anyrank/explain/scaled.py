# SPDX-License-Identifier: Apache-2.0
"""The reference times one number, and what the number is by those of the run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import earlier, is_norm, listed, order, shape_of, targets_of
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.tensors import ACTIVATIONS, Array, Case, Name

FACTOR = "factor"
FEW = 4           # so few values fit any factor
LEFT = 0.02       # share of the difference's squares that factors may leave to be looked at closely
GRADIENTS = ("bwd", "grad")
_LARGE_POWER = 8  # 2^8 is the smallest loss scale that no other number of a run is likelier to be


@dataclasses.dataclass(frozen=True)
class Squares:
    """ref^2, ref * val and val^2 of the finite elements, to be added up over blocks."""

    rr: Array
    rv: Array
    vv: Array

    @classmethod
    def of(cls, case: Case) -> Squares:
        finite = np.isfinite(case.ref) & np.isfinite(case.val)
        ref, val = np.where(finite, case.ref, 0.0), np.where(finite, case.val, 0.0)
        return cls(ref * ref, ref * val, val * val)

    def over(self, grid: tuple[int, ...]) -> Squares:
        """The sums over each cell of a grid of equal blocks."""
        shape = tuple(x for n, extent in zip(grid, self.rr.shape) for x in (n, extent // n))
        inner = tuple(range(1, len(shape), 2))
        return Squares(*(x.reshape(shape).sum(inner) for x in (self.rr, self.rv, self.vv)))

    @property
    def factors(self) -> Array:
        """The factor that fits each cell best; NaN where the reference is zero."""
        with np.errstate(invalid="ignore", divide="ignore"):
            result: Array = self.rv / self.rr
        return result

    @property
    def left(self) -> float:
        """Of squares, what the factors do not explain."""
        known = self.rr > 0.0
        rest = self.vv - np.divide(self.rv ** 2, self.rr, out=np.zeros_like(self.rr), where=known)
        return float(np.maximum(rest, 0.0).sum())

    @property
    def difference(self) -> float:
        return float((self.rr - 2.0 * self.rv + self.vv).sum())

    @property
    def smaller(self) -> float:
        """Of the difference's and the values' squares the lesser: what is left is held against both."""
        return min(self.difference, float(self.vv.sum()))


def _unsure(case: Case, squares: Squares) -> float:
    """How far noise takes a factor from what it is."""
    count = max(int(np.count_nonzero(case.ref)), 1)
    total = float(squares.rr.sum())
    noise = math.sqrt(squares.left / total) if total > 0.0 else 0.0
    size = abs(float(squares.rv.sum())) / total if total > 0.0 else 1.0
    return min(max(2e-6, max(8.0 / math.sqrt(count), 0.25) * noise / max(size, 1e-300),
                   case.unit / math.sqrt(count) * 8.0), 3e-3)


# --- what one factor is -----------------------------------------------------------------------------------------------

Number = tuple[float, str]


def groups_of(case: Case) -> list[Number]:
    """Numbers of ranks and micro-batches that values are added up or averaged over."""
    micro = case.runs.micro_batches  # stages of a pipeline add nothing up
    sizes = [(float(n), f"{name} = {n}") for name, n in case.runs.mesh.items() if n > 1 and name != "pp"]
    sizes += [(float(micro), f"{micro} micro-batches")] if micro > 1 else []
    return [(math.prod(n for n, _ in some), " times ".join(text for _, text in some))
            for k in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, k)]


def _counts(case: Case) -> list[Number]:
    """Numbers of tokens, targets and samples."""
    runs, targets = case.runs, targets_of(case)
    counts = [(targets, "targets"), (runs.batch * runs.seq, "tokens"), (runs.seq, "positions"), (runs.batch, "samples"),
              (runs.batch * (runs.seq - 1), "tokens that have a next one")]
    parts = [n for n in (*runs.group_sizes, runs.micro_batches) if n > 1]
    counts += [(runs.batch // n, f"samples of one of {n} parts") for n in parts if runs.batch % n == 0]
    counts += [(runs.batch * runs.seq // n, f"tokens of one of {n} parts") for n in parts]
    return [(float(n), f"{n} {what}") for n, what in counts if n > 1]


def _root(case: Case, x: float, near: float) -> str:
    """The root of a size of the model that a factor is, or is one over."""
    known = case.runs.reference
    sizes = {*case.shape, *case.runs.group_sizes, *(n for name in known for n in shape_of(known, name))}
    sizes |= {n for facts in case.runs.facts for module in facts.modules.values()
              for n in module.attributes.values() if type(n) is int}
    return match(x, [(math.sqrt(n), f"sqrt({n})") for n in sorted(sizes)
                     if n > 16 or math.isqrt(max(n, 0)) ** 2 != n], near)[1]


def is_near(x: float, y: float, near: float) -> bool:
    return abs(x - y) <= near * abs(y)


def match(x: float, numbers: typing.Iterable[Number], near: float) -> tuple[bool, str]:
    """Whether x is one of the numbers or its inverse, and which."""
    for n, text in numbers:
        if is_near(x, n, near):
            return True, text
        if is_near(x, 1.0 / n, near):
            return True, f"1/({text})"
    return False, ""


def _of_others(case: Case, x: float) -> tuple[str, str]:
    """What the same factor in other gradients says: of experts alone, or growing from stage to stage."""
    factors = _factors_of_gradients(case) if case.name.kind == "grad" else {}
    experts = {name for name in factors if "expert" in name}
    has = {name for name, y in factors.items() if y is not None and is_near(y, x, 1e-4)}
    ranks = [(float(case.runs.mesh["ep"]), "ep")] if case.runs.mesh.get("ep") else groups_of(case)
    of_ranks = match(x, ranks, 1e-4)[0] == ("ep" in case.runs.mesh)
    if experts and has == experts and len(experts) < len(factors) and of_ranks:
        return "divisor_of_experts", f"{len(experts)} gradients of experts have it, and no others of {len(factors)}"
    known = [y for y in factors.values() if y is not None]
    levels: list[float] = []
    for y in known:
        if not any(is_near(y, z, 1e-4) for z in levels):
            levels.append(y)
    if len(factors) < 3 or any(sum(is_near(z, y, 1e-4) for z in known) < 2 for y in levels):
        return "", ""
    if len(levels) > 1 and case.runs.mesh.get("pp", 1) > 1 and is_near(sum(y ** -2 for y in levels), 1.0, 1e-3):
        # Each part is clipped to the same norm, so a factor is norm / norm of the part, and the parts' squares add up.
        text = f"{len(levels)} parts, of whose factors the inverse squares sum to 1: {listed(levels)}"
        return "norm_of_own_shards", text
    steady = len(levels) > 2 and all(is_near(b * b, a * c, 1e-3) for a, b, c in zip(levels, levels[1:], levels[2:]))
    grows = len(levels) == 2 and (is_near(levels[0], 1.0, 1e-3) or is_near(levels[1], levels[0] ** 2, 1e-3))
    if steady or (grows and case.runs.mesh.get("pp", 1) > 1 and 10 * len(known) >= 9 * len(factors)):
        return "scaled_by_stage", "factors from the last stage to the first: " + listed(levels)
    return "", ""


def _factors_of_gradients(case: Case) -> dict[str, float | None]:
    """The factor of up to 64 gradients of the step, in the order of the backward pass; None: it is no multiple."""
    found: dict[str, float | None] = {}
    a, b = case.runs.reference, case.runs.other
    names = [name for name in a if (own := Name.of(name)).kind == "grad" and own.step == case.name.step and name in b
             and a[name].shape == b[name].shape and a[name].size >= 8]
    for name in names[:64]:
        some = slice(None, None, max(1, a[name].size // 512))
        ref: Array = a[name].reshape(-1)[some].astype(np.float64)
        val: Array = b[name].reshape(-1)[some].astype(np.float64)
        y = float(ref @ val) / (float(ref @ ref) or math.nan)
        found[name] = y if float(((val - y * ref) ** 2).sum()) <= 1e-6 * float(val @ val) else None
    return found


def starts_right(case: Case) -> bool:
    """Whether an earlier gradient of the backward pass is right, so that the loss and its divisor are. Of a case
    without the other run's tensors, which is the first that differs, earlier ones are."""
    right = case.runs.same if case.runs.other else case.runs.reference
    return any(name in right and Name.of(name).kind == "bwd" and Name.of(name).step == case.name.step
               for name in earlier(case))


def _is_logits(case: Case) -> bool:
    """Whether it is the last output of the model before the loss."""
    names, at = list(case.runs.reference), order(case).get(str(case.name), 0)
    after = [name for name in names[at + 1:] if (n := Name.of(name)).kind == "fwd" and n.step == case.name.step]
    return case.name.kind == "fwd" and at > 0 and all(
        math.prod(shape_of(case.runs.reference, name)) < FEW for name in after)


def meaning(case: Case, x: float, near: float) -> tuple[str, str]:
    """The cause that a factor has by the numbers of the run, and how it is put together; "": it is none of them."""
    kind, mesh, micro = case.name.kind, case.runs.mesh, case.runs.micro_batches
    few = int(np.count_nonzero(case.ref)) < FEW
    if kind not in (*ACTIVATIONS, "init", "grad", "weight") or (few and case.runs.other and any(
            Name.of(name).kind == "bwd" and name not in case.runs.same for name in case.runs.reference)):
        return "", ""  # a gradient that differs says more of a loss than its one number
    if case.name.stem.partition(".")[0] == "input":
        return "other_input", ""
    if is_near(x, -1.0, near):
        return "sign_flipped", "-1"
    if kind == "init":
        return "init_scale", _root(case, x, near)
    x = abs(x)
    if (of_others := _of_others(case, x))[0]:
        return of_others
    right = starts_right(case)
    if mesh.get("pp", 1) > 1 and kind == "bwd" and right and micro > 1 and match(x, [(float(micro), "")], near)[0]:
        return "scaled_by_stage", f"{micro} micro-batches; the gradient of a later stage is right"
    found, text = match(x, groups_of(case), near)
    if found:
        return ("reduced_again" if x > 1.0 else "averaged_again"), text
    if not few and _is_logits(case):
        return "logits_scale", _root(case, x, near)
    if not few and match(x, [(2.0, "")], near)[0]:
        return "counted_twice", ""
    of_loss = few or (kind in GRADIENTS and not right)
    power = round(math.log2(x))
    if abs(power) >= _LARGE_POWER and is_near(x, 2.0 ** power, near) and (of_loss or kind == "grad"):
        return "loss_scale", f"2^{power}"
    counts, targets = _counts(case) if of_loss else [], targets_of(case)
    found, text = match(x, counts + [(targets / n, f"{what} in place of {targets} targets") for n, what in counts
                                     if targets not in (0, n)], near)
    divisor = targets / x
    most = min(max(case.runs.batch * case.runs.seq, targets + 2), int(0.02 / near))
    if of_loss and targets and 0.5 < divisor <= most and is_near(divisor, round(divisor), near):
        found, text = True, text or f"{round(divisor)} in place of {targets} targets"
    if found or few:
        return ("target_count", text) if found else ("", "")
    root = _root(case, x, near)
    small = ratio_of(x, 16, near) is None and abs(x - 1.0) < 0.02
    if not root and small and (kind in GRADIENTS or is_norm(case, str(case.name))):
        return "", ""  # a norm's epsilon and statistic, or another forward pass, may do the same
    return "wrong_scalar", root


def patterns(case: Case) -> typing.Iterator[Pattern]:
    squares = Squares.of(case)
    total = Squares(*(np.atleast_1d(x.sum()) for x in (squares.rr, squares.rv, squares.vv)))
    x = float(total.factors[0])
    if not math.isfinite(x) or x == 0.0 or x == 1.0 or total.left > LEFT * total.smaller:
        return
    near = _unsure(case, total)
    ratio = ratio_of(x, min(64, int(0.5 / math.sqrt(near))), near)
    tag, text = meaning(case, x, near)
    name = f"{ratio[0]}/{ratio[1]}" if ratio and ratio[1] > 1 else str(ratio[0]) if ratio else f"{x:.6g}"
    numbers = {"factor": x, "meaning": tag, "name": f"{name} ({text})" if text else name,
               "text": f"every element is the reference times {name}"}
    vague = tag in ("", "wrong_scalar") and not text
    yield Pattern(FACTOR, np.asarray((ratio[0] / ratio[1] if ratio else x) * case.ref), numbers,
                  fitted=2 if vague else 0 if ratio else 1)


# --- causes -----------------------------------------------------------------------------------------------------------


_ONE = "every element is the reference times {name}: "
CAUSES = tuple(Cause(name, (FACTOR,), sentence, look, has(meaning=name)) for name, sentence, look in (
    ("sign_flipped", "the sign is flipped", "the sign of this term, or of the loss"),
    ("init_scale", _ONE + "another scale of the initial values", "standard deviation, fan and scheme of the "
     "initialiser; of a shard's sizes in place of the full tensor's"),
    ("divisor_of_experts", _ONE + "the gradients of experts alone are divided by another number of ranks",
     "the group over which experts' gradients are averaged"),
    ("scaled_by_stage", _ONE + "each pipeline stage multiplies the gradient that it receives once more",
     "divide the loss alone by the number of micro-batches, not each stage's gradient"),
    ("norm_of_own_shards", _ONE + "each part of the parameters is clipped by its own norm",
     "the all-reduce of the squared norms over all ranks and stages, before the root"),
    ("averaged_again", _ONE + "averaged over these where the sum was wanted, or averaged twice",
     "a mean over ranks or micro-batches that the loss or the collective has taken already"),
    ("reduced_again", _ONE + "summed over these where it was complete, or where the mean was wanted",
     "a second all-reduce, an all-reduce of what every rank has in full, or a sum in place of the mean"),
    ("counted_twice", _ONE + "it counts twice, or one of two equal contributions is missing",
     "a second backward pass, a value added to itself, divisions by 2"),
    ("loss_scale", _ONE + "a loss scale that is not divided out, or divided out once too often",
     "`GradScaler.unscale_`, and where the scale is applied"),
    ("target_count", _ONE + "the loss is divided by another count, or by none",
     "what the loss's divisor counts: padding, ignored labels, a rank's own tokens; `reduction=`"),
    ("wrong_scalar", _ONE + "one wrong scalar, a divisor or a multiplier, and no wrong data",
     "multipliers and divisors between the last tensor that is right and this one: 1/sqrt(d), sqrt(width)"),
    ("logits_scale", _ONE + "the model's output is multiplied by another number", "the scale of the logits"),
    ("other_input", _ONE + "the input itself is on another scale", "where the inputs are made"),
))
