# SPDX-License-Identifier: Apache-2.0
"""The reference times one number, and what the number is by those of the run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause
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
    groups = {name: n for name, n in case.runs.mesh.items() if n > 1 and name != "pp"}  # stages add nothing up
    found = [(float(n), f"{name} = {n}") for name, n in groups.items()]
    micro = case.runs.micro_batches
    if micro > 1:
        found.append((float(micro), f"{micro} micro-batches"))
    products = {math.prod(some) for k in range(1, len(groups) + 1)
                for some in itertools.combinations(groups.values(), k)}
    found += [(float(n), f"{n} ranks") for n in sorted(products)]
    if micro > 1:
        found += [(float(micro * n), f"{micro} micro-batches times {n} ranks") for n in sorted(products)]
    return found


def _counts(case: Case) -> list[Number]:
    """Numbers of tokens, targets and samples."""
    runs, targets = case.runs, targets_of(case)
    counts = [(targets, "targets"), (runs.batch * runs.seq, "tokens"), (runs.seq, "positions"), (runs.batch, "samples"),
              (runs.batch * (runs.seq - 1), "tokens that have a next one")]
    parts = [n for n in (*runs.group_sizes, runs.micro_batches) if n > 1]
    counts += [(runs.batch // n, f"samples of one of {n} parts") for n in parts if runs.batch % n == 0]
    counts += [(runs.batch * runs.seq // n, f"tokens of one of {n} parts") for n in parts]
    return [(float(n), f"{n} {what}") for n, what in counts if n > 1]


def _roots(case: Case) -> list[Number]:
    """Numbers whose roots values are scaled by."""
    sizes = {*case.shape, *case.runs.group_sizes, case.runs.heads, case.runs.micro_batches}
    for facts in case.runs.facts:
        for module in facts.modules.values():
            sizes |= {n for n in module.attributes.values() if isinstance(n, int) and not isinstance(n, bool)}
    for name in case.runs.reference:
        sizes |= set(shape_of(case.runs.reference, name))
    return [(math.sqrt(n), f"sqrt({n})") for n in sorted(sizes) if n > 1 and math.isqrt(n) ** 2 != n] + [
        (math.sqrt(n), f"sqrt({n})") for n in sorted(sizes) if n > 4 and math.isqrt(n) ** 2 == n]


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


def _fans(case: Case, x: float, near: float) -> str:
    """Xavier's scale from the sizes of a shard in place of the whole, or a fan's root."""
    for n in case.runs.group_sizes or (2, 4, 8):
        if len(case.shape) == 2:
            a, b = map(float, case.shape)
            if is_near(x * x, (a + b) / (a / n + b), near) or is_near(x * x, (a + b) / (a + b / n), near):
                return f"the fans of one of {n} shards"
        if n in case.runs.group_sizes and is_near(x * x, n, near):
            return f"the fan of one of {n} shards"
    return ""


def _dropped(case: Case, x: float) -> float:
    """The share of zeros on both sides, if the factor is that of a dropout of as many; else 0."""
    if case.name.kind not in ACTIVATIONS or case.ref.size < 64:
        return 0.0
    zero = (case.ref == 0.0) & (case.val == 0.0)
    share = float(zero.mean())
    if not 0.0 < share < 1.0 or zero.all(axis=-1).any():
        return 0.0
    kept = 1.0 - share
    error = 4.0 * math.sqrt(kept * share / zero.size)
    return share if abs(min(x, 1.0 / x) - kept) <= error else 0.0


def _of_others(case: Case, x: float) -> tuple[str, str]:
    """What the same factor in other gradients says: of experts alone, or growing from stage to stage."""
    factors = _factors_of_kind(case)
    if len(factors) < 3:
        return "", ""
    has = {name for name, y in factors.items() if y is not None and is_near(y, x, 1e-4)}
    experts, others = {name for name in factors if "expert" in name}, len(factors)
    of_group = match(x, [(float(case.runs.mesh["ep"]), "ep")], 1e-4)[0] if case.runs.mesh.get("ep") else (
        not match(x, groups_of(case), 1e-4)[0] and any(y > 1.5 and is_near(y, round(y), 1e-4) for y in (x, 1.0 / x)))
    if experts and has == experts and len(experts) < others and of_group:
        return "divisor_of_experts", f"{len(experts)} gradients of experts have it, and no others of {others}"
    levels: list[float] = []
    for y in factors.values():
        if y is not None and not any(is_near(y, z, 1e-4) for z in levels):
            levels.append(y)
    if any(sum(z is not None and is_near(z, y, 1e-4) for z in factors.values()) < 2 for y in levels):
        return "", ""
    steady = len(levels) > 2 and all(is_near(b * b, a * c, 1e-3) for a, b, c in zip(levels, levels[1:], levels[2:]))
    multiples = sum(y is not None for y in factors.values())
    if steady or (len(levels) == 2 and case.runs.mesh.get("pp", 1) > 1 and 10 * multiples >= 9 * len(factors)):
        return "scaled_by_stage", "factors from the last stage to the first: " + listed(levels)
    return "", ""


def _factors_of_kind(case: Case) -> dict[str, float | None]:
    """The factor of up to 64 gradients of the step, in the order of the backward pass; None: it is no multiple."""
    found: dict[str, float | None] = {}
    if case.name.kind != "grad":
        return found
    for name in case.runs.reference:
        own = Name.of(name)
        if (own.kind, own.step) != (case.name.kind, case.name.step) or name not in case.runs.other or len(found) == 64:
            continue
        a, b = case.runs.reference[name], case.runs.other[name]
        if a.shape != b.shape or a.size < 8:
            continue
        every = max(1, a.size // 512)
        ref: Array = a.reshape(-1)[::every].astype(np.float64)
        val: Array = b.reshape(-1)[::every].astype(np.float64)
        square = float(ref @ ref)
        y = float(ref @ val) / square if square > 0.0 else math.nan
        found[name] = y if float(((val - y * ref) ** 2).sum()) <= 1e-6 * float(val @ val) else None
    return found


def _gradients_differ(case: Case) -> bool:
    """Whether a gradient of the backward pass differs, which says more of a loss than its one number."""
    return bool(case.runs.other) and any(Name.of(name).kind == "bwd" and name not in case.runs.same
                                         for name in case.runs.reference)


def starts_right(case: Case) -> bool:
    """Whether an earlier gradient of the backward pass is right, so that the loss and its divisor are. Of a case
    without the other run's tensors, which is the first that differs, earlier ones are."""
    right = case.runs.same if case.runs.other else case.runs.reference
    return any(name in right and Name.of(name).kind == "bwd" and Name.of(name).step == case.name.step
               for name in earlier(case))


def _is_logits(case: Case) -> bool:
    """Whether it is the last output of the model before the loss."""
    after = [name for name, at in order(case).items() if at > order(case).get(str(case.name), at)
             and Name.of(name).kind == "fwd" and Name.of(name).step == case.name.step]
    return case.name.kind == "fwd" and all(math.prod(shape_of(case.runs.reference, name)) < FEW for name in after) and (
        bool(earlier(case)))


def meaning(case: Case, x: float, near: float) -> tuple[str, str]:
    """The cause that a factor has by the numbers of the run, and how it is put together; "": it is none of them."""
    kind = case.name.kind
    few = int(np.count_nonzero(case.ref)) < FEW
    if kind not in (*ACTIVATIONS, "init", "grad", "weight") or (few and _gradients_differ(case)):
        return "", ""
    if case.name.stem.partition(".")[0] == "input":
        return "other_input", ""
    if is_near(x, -1.0, near):
        return "sign_flipped", "-1"
    if kind == "init":
        fans = _fans(case, x, near)
        return ("init_scale_of_shard", fans) if fans else ("init_scale", "")
    share = _dropped(case, x)
    if share > 0.0:
        return "dropout_without_scale", f"{100.0 * share:.3g}% of the elements are zero on both sides"
    x = abs(x)
    of_others = _of_others(case, x)
    if of_others[0]:
        return of_others
    if case.runs.mesh.get("pp", 1) > 1 and kind == "bwd" and starts_right(case) and match(
            x, [(float(case.runs.micro_batches), "")] if case.runs.micro_batches > 1 else [], near)[0]:
        return "scaled_by_stage", f"{case.runs.micro_batches} micro-batches; the gradient of a later stage is right"
    found, text = match(x, groups_of(case), near)
    if found:
        return ("reduced_again" if x > 1.0 else "averaged_again"), text
    if not few and _is_logits(case):
        return "logits_scale", match(x, _roots(case), near)[1]
    if not few and (is_near(x, 2.0, near) or is_near(x, 0.5, near)):
        return ("counted_twice" if x > 1.0 else "half_is_missing"), ""
    power = math.log2(x) if x > 0.0 else 0.0
    of_loss = few or (kind in GRADIENTS and not starts_right(case))
    is_power = abs(round(power)) >= _LARGE_POWER and is_near(x, 2.0 ** round(power), near)
    if is_power and (of_loss or kind == "grad"):
        return "loss_scale", f"2^{round(power)}"
    found, text = match(x, _counts(case), near)
    if found and of_loss:
        return "sum_for_mean", text
    targets = targets_of(case)
    found, text = match(x, [(targets / n, f"{what} in place of {targets} targets") for n, what in _counts(case)
                             if targets not in (0, n)], near)
    if found and of_loss:
        return "divisor_of_other_count", text
    divisor = targets / x
    most = min(max(case.runs.batch * case.runs.seq, targets + 2), int(0.02 / near))
    if of_loss and targets and 0.5 < divisor <= most and is_near(divisor, round(divisor), near):
        return "divisor_of_other_count", f"{round(divisor)} in place of {targets} targets"
    if few:
        return "", ""
    found, text = match(x, _roots(case), near)
    if found:
        return "scale_by_root", text
    found, text = match(x, [(float(n), f"a size of {n}") for n in {*case.shape, case.ref.size} if n > 2], near)
    if found and kind in GRADIENTS:
        return "sum_for_mean", text
    small = ratio_of(x, 16, near) is None and abs(x - 1.0) < 0.02
    if small and (kind in GRADIENTS or is_norm(case, str(case.name))):
        return "", ""  # a norm's epsilon and statistic, or another forward pass, may do the same
    return "wrong_scalar", ""


def _one_factor(case: Case, squares: Squares) -> typing.Iterator[Pattern]:
    total = squares.over((1,) * len(case.shape))
    x = float(total.factors.reshape(-1)[0])
    if not math.isfinite(x) or x == 0.0 or x == 1.0 or total.left > LEFT * total.smaller:
        return
    near = _unsure(case, total)
    ratio = ratio_of(x, min(64, int(0.5 / math.sqrt(near))), near)
    tag, text = meaning(case, x, near)
    exact = ratio[0] / ratio[1] if ratio else x
    name = f"{ratio[0]}/{ratio[1]}" if ratio and ratio[1] > 1 else str(ratio[0]) if ratio else f"{x:.6g}"
    numbers = {"factor": x, "meaning": tag, "name": f"{name} ({text})" if text else name}
    yield Pattern(FACTOR, exact * case.ref, numbers, fitted=2 if tag in ("", "wrong_scalar") else 0 if ratio else 1)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if not case.shape or not case.ref.size:
        case = dataclasses.replace(case, reference=case.reference.reshape(1), other=case.other.reshape(1))
        for pattern in _one_factor(case, Squares.of(case)):
            yield dataclasses.replace(pattern, expected=np.asarray(pattern.expected).reshape(()))
    else:
        yield from _one_factor(case, Squares.of(case))


# --- causes -----------------------------------------------------------------------------------------------------------


def _means(tag: str) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: pattern.numbers["meaning"] == tag


_ONE = "every element is the reference times {name}: "
CAUSES = (
    Cause("sign_flipped", (FACTOR,), "the sign is flipped", "the sign of this term, or of the loss",
          _means("sign_flipped")),
    Cause("init_scale_of_shard", (FACTOR,), _ONE + "the initial scale is computed from the sizes of a shard",
          "initialise the full tensor and cut it, or compute the fans of the full tensor",
          _means("init_scale_of_shard")),
    Cause("init_scale", (FACTOR,), _ONE + "another scale of the initial values",
          "standard deviation, fan and scheme of the initialiser", _means("init_scale")),
    Cause("dropout_without_scale", (FACTOR,), _ONE + "a dropout mask without its scale 1/(1-p), or with it twice",
          "the scale of the dropout", _means("dropout_without_scale")),
    Cause("divisor_of_experts", (FACTOR,), _ONE + "the gradients of experts alone are divided by another number of "
          "ranks", "the group over which experts' gradients are averaged", _means("divisor_of_experts")),
    Cause("scaled_by_stage", (FACTOR,), _ONE + "each pipeline stage multiplies the gradient that it receives once more",
          "divide the loss alone by the number of micro-batches, not each stage's gradient", _means("scaled_by_stage")),
    Cause("averaged_again", (FACTOR,), _ONE + "averaged over these where the sum was wanted, or averaged twice",
          "a mean over ranks or micro-batches that the loss or the collective has taken already",
          _means("averaged_again")),
    Cause("reduced_again", (FACTOR,), _ONE + "summed over these where it was complete, or where the mean was wanted",
          "a second all-reduce, an all-reduce of what every rank has in full, or a sum in place of the mean",
          _means("reduced_again")),
    Cause("counted_twice", (FACTOR,), _ONE + "it counts twice", "a second backward pass, or a value added to itself",
          _means("counted_twice")),
    Cause("half_is_missing", (FACTOR,), _ONE + "one of two equal contributions is missing, or a division by 2 too many",
          "a second use of the value, and divisions by 2", _means("half_is_missing")),
    Cause("loss_scale", (FACTOR,), _ONE + "a loss scale that is not divided out, or divided out once too often",
          "`GradScaler.unscale_`, and where the scale is applied", _means("loss_scale")),
    Cause("divisor_of_other_count", (FACTOR,), _ONE + "the loss is divided by another count",
          "what the divisor of the loss counts: padding, ignored labels, one rank's or micro-batch's tokens",
          _means("divisor_of_other_count")),
    Cause("scale_by_root", (FACTOR,), _ONE + "a scale by the root of a size is left out, applied twice or of another "
          "size", "1/sqrt(d) of a softmax, sqrt(width) of an embedding, the fan of an initialiser",
          _means("scale_by_root")),
    Cause("sum_for_mean", (FACTOR,), _ONE + "a sum where the mean was wanted, or the other way round",
          'the divisor of the loss; `reduction="sum"` against `"mean"`', _means("sum_for_mean")),
    Cause("wrong_scalar", (FACTOR,), _ONE + "one wrong scalar, a divisor or a multiplier, and no wrong data",
          "multipliers and divisors between the last tensor that is right and this one", _means("wrong_scalar")),
    Cause("logits_scale", (FACTOR,), _ONE + "the model's output is multiplied by another number",
          "the scale of the logits", _means("logits_scale")),
    Cause("other_input", (FACTOR,), _ONE + "the input itself is on another scale", "where the inputs are made",
          _means("other_input")),
)
