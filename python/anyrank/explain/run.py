# SPDX-License-Identifier: Apache-2.0
"""The explanation of a run: what is recorded to differ, and the first tensor that differs, explained."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank._errors import AnyrankError
from anyrank.dump import Dump
from anyrank.explain import facts, operations, shapes
from anyrank.explain.dumps import Report, case_of, runs_of
from anyrank.explain.explain import UNKNOWN, Answer, explain
from anyrank.explain.known import formats_apart, left_of_zero, rms_of_kind
from anyrank.explain.tensors import UNITS, Case, Name, Runs, parts_of, sums_of
from anyrank.explain.words import both_of, counted, some

MOST_PASSED = 32  # rows that are rounding
MOST_ASKED, MOST_READ = 4, 256  # tensors that may say more than the first; weights that are looked at for that
BACKWARD = ("bwd", "grad")
AFTER_BACKWARD = (*BACKWARD, "clip", "new", "m", "v", "state")
# Recorded options of an optimizer, and what it is that they explain.
OPTIONS = {"lr": "other_learning_rate", "weight_decay": "weight_decay", "betas": "other_betas", "eps": "adam_eps",
           "nesterov": "nesterov", "dampening": "sgd_dampening", "maximize": "update_sign", "momentum": "other_betas"}
OF_NO_LAYOUT = ("training", "eps", "p", "momentum")  # attributes of modules that no layout changes
# What the gradient of a loss says of the loss itself; anything else may be a mistake further on.
OF_LOSSES = {"mean_of_means", "sum_for_mean", "reduced_again", "averaged_again", "counted_twice", "samples_weighted",
             "micro_batches_weighted", "loss_scale", "target_count", "wrong_scalar", "balancing_loss"}
# What an update says where the moments may say more.
OF_UPDATES = {"update_scaled", "adam_eps", "wrong_scalar", "other_learning_rate"}
# What the gradient of a linear module's weight says of that of its output, of which that of its input is made.
OF_OUTPUTS = {"no_gradient", "missing_all_reduce", "missing_average"}
VAGUE = {*OF_UPDATES, UNKNOWN}  # where a recorded difference says more
STRUCTURE = {"no_gradient", "frozen_trained", "tied_weight"}  # recorded ones that no array can contradict


@dataclasses.dataclass(frozen=True)
class Finding:
    """differences: what is recorded of the runs and differs, that which concerns the first tensor first. tensor: the
    first one that differs; "": none. answer: its explanation. asked: the tensor that said so, where it is another."""

    differences: tuple[facts.Difference, ...]
    tensor: str
    answer: Answer
    asked: str = ""
    operation: tuple[str, ...] = ()  # the first operation that is wrong, where each was recorded


class Run:
    """Two dumps and what is reported of them."""

    def __init__(self, reference: Dump, other: Dump, report: Report) -> None:
        self.reference, self.other, self.report = reference, other, report
        self.runs = runs_of(reference, other, report)
        self._cases: dict[str, Case | None] = {}
        differing = {row["tensor"] for row in report.get("worst", ())}
        self.rows = [name for name in reference if name in differing]  # in execution order
        self.missing, self.unexpected = list(report.get("missing", ())), list(report.get("unexpected", ()))

    def case(self, name: str, within: bool = False) -> Case | None:
        """within: also what the report's rule allows is a difference."""
        case = self._cases[name] if name in self._cases else case_of(self.runs, name)
        self._cases = {name: case}  # the last one, which others ask for again
        return dataclasses.replace(case, allowed=0.0) if case is not None and within else case

    def answer(self, name: str, within: bool = False) -> Answer:
        case = self.case(name, within)
        if case is None:
            return Answer(UNKNOWN)
        if not case.off.any() and self.runs.row(name).get("state") == "different":
            return self._together(name)
        return explain(case) if case.off.any() else Answer(UNKNOWN)

    def _together(self, name: str) -> Answer:
        """A tensor whose elements are each within the rule, and all together are not."""
        row = self.runs.row(name)
        scale, near = float(row.get("scale") or 0.0), float(row.get("factor_allowed") or 0.0)
        within = self.case(name, True)
        answer = explain(within) if within is not None and within.off.any() else Answer(UNKNOWN)
        if answer.cause not in (UNKNOWN, "rounding", "low_precision") or not near or abs(scale - 1.0) <= near:
            return answer
        return Answer("wrong_scalar", f"as a whole the reference times {scale:.6g}: each element is within the rule, "
                      f"and rounding leaves a factor within {near:.1e} of 1", "a divisor, a scale, a number of tokens "
                      "or ranks", "likely")


# --- what is recorded -------------------------------------------------------------------------------------------------


def _sure(cause: str, sentence: str, look: str = "") -> Answer:
    return Answer(cause, sentence, look, "sure")


def recorded(runs: Runs, name: Name) -> typing.Iterator[Answer]:
    """Recorded differences that a tensor follows from."""
    a, b = runs.facts
    if not (a.recorded and b.recorded):
        return
    if name.kind in ("new", "m", "v", "state"):
        yield from _of_optimizer(runs, name)
    if name.kind in AFTER_BACKWARD:
        for kind, cause in (("frozen", "no_gradient"), ("without_gradient", "no_gradient"), ("tied", "tied_weight")):
            for difference in facts.differences(a, b):
                if difference.kind == kind:
                    less = kind == "frozen" and set(difference.reference) - set(difference.other)
                    zero = _of_zeros(runs, name, difference)
                    yield _sure("frozen_trained" if less else cause, difference.text + zero, ZEROED if zero else "")
    if name.kind in ("fwd", "buffer") and name.module in a.modules and name.module in b.modules:
        x, y = a.modules[name.module].attributes, b.modules[name.module].attributes
        for key in x:
            if key in y and x[key] != y[key] and (a.world == b.world or key in OF_NO_LAYOUT):
                yield _sure("other_configuration", both_of(f"{key} of {name.module}", x[key], y[key]))


ZEROED = ("`zero_grad(set_to_none=False)`, and gradients that are made by hand: an optimizer leaves a parameter alone "
          "only if its gradient is None")


def _of_zeros(runs: Runs, name: Name, difference: facts.Difference) -> str:
    """What is to be said of gradients that the reference lacks and that are zero in the other run."""
    grad = str(name.with_kind("grad"))
    zero = difference.kind == "without_gradient" and name.stem in difference.reference and grad in runs.other and not (
        runs.other[grad].any())
    return "; in the other run they are zero, and momentum and weight decay move the weights" if zero else ""


def _of_optimizer(runs: Runs, name: Name) -> typing.Iterator[Answer]:
    options = []
    for one in runs.facts:
        groups = [group for optimizer in one.optimizers for group in optimizer.groups]
        options.append(next((g.options for g in groups if name.stem in g.parameters or len(groups) == 1), {}))
    rates = all(one.learning_rates for one in runs.facts)
    for key, cause in OPTIONS.items():
        x, y = (of.get(key) for of in options)
        if x is not None and y is not None and x != y and not (key == "lr" and rates) and (
                name.kind == "new" or key in ("betas", "momentum", "dampening", "weight_decay", "maximize")):
            yield _sure(cause, both_of(f"the optimizer's {key}", x, y))
    by_step = [one.learning_rates for one in runs.facts]
    apart = rates and any(by_step[0].get(t) != by_step[1].get(t) for t in {*by_step[0], *by_step[1]} if t <= name.step)
    for difference in facts.differences(*runs.facts) if apart and name.kind == "new" else ():
        if difference.kind == "learning_rates":
            yield _sure("other_learning_rate", difference.text, "`scheduler.step()`: once for each `optimizer.step()`, "
                        "not for each micro-batch or rank; its total, its warm-up; what a resume restores")


def of_count(runs: Runs, name: Name) -> Answer | None:
    """The number of steps, of which each run keeps its own."""
    if name.kind != "count" or name.stem != "steps" or str(name) not in runs.reference or str(name) not in runs.other:
        return None
    x, y = (int(np.asarray(of[str(name)]).ravel()[0]) for of in (runs.reference, runs.other))
    told = [difference.text for difference in facts.differences(*runs.facts) if difference.kind == "steps"]
    text = told[0] if told else f"{counted(x, 'step')} in the reference, {y} in the other run"
    return _sure("number_of_steps", text, "calls of `optimizer.step()`, of clipping and of what else ends a step, for "
                 "each micro-batch in place of once; batches that one run has more of")


# --- what one run lacks -----------------------------------------------------------------------------------------------


def lacking(run: Run, first: Name) -> Answer | None:
    """Gradients that one run alone has, where the first tensor follows from them or is one."""
    steps = {name: Name.of(name) for name in (*run.missing, *run.unexpected) if Name.of(name).step <= first.step}
    if first.kind not in AFTER_BACKWARD and not (first.kind == "fwd" and any(
            n.step < first.step and n.kind in BACKWARD for n in steps.values())):
        return None
    lost = [name for name in run.missing if name in steps and steps[name].kind in BACKWARD]
    if lost and not any(Name.of(name).kind in BACKWARD for name in run.unexpected):
        return _without(run, lost, [name for name in lost if steps[name].kind == "grad"])
    trained = [name for name in run.report.get("lost_gradients", ()) if name in steps and name in run.unexpected]
    if trained and not lost:
        said = counted(len(trained), "parameter", ("has", "have"))
        return _sure("frozen_trained", f"{said} a gradient in the other run alone: "
                     f"{some(steps[name].stem for name in trained)}",
                     "`requires_grad` of frozen weights, set before wrapping")
    return None


FLAT = ("FSDP1's flat parameter: all parameters of a wrapped module in one vector, padded and cut over the ranks, "
        "instead of tensors that have names")
TWINS = 64  # tensors of its shape that are held against one that only one run has


def of_one_run(run: Run, first: str) -> Answer | None:
    """A tensor that only one run has: a flat parameter, or a weight that is tied in the other run."""
    one = run.reference if first in run.missing else run.other if first in run.unexpected else None
    flat = next((name for name in (*run.missing, *run.unexpected) if Name.of(name).stem.endswith("flat_param")), "")
    if flat:
        return Answer(UNKNOWN, f"{flat}: {FLAT}", "wrap with `fully_shard` (FSDP2), or dump what "
                      "`FullyShardedDataParallel.summon_full_params` gives")
    if one is None or Name.of(first).kind not in ("init", "weight"):
        return None
    values = np.asarray(one[first])
    alike = [name for name in one if name not in (*run.missing, *run.unexpected)
             and Name.of(name).kind == Name.of(first).kind and one.tensor(name).shape == values.shape]
    twin = next((name for name in alike[:TWINS] if np.array_equal(np.asarray(one[name]), values)), "")
    if not twin or values.size < 8 or np.ptp(values) == 0.0:
        return None
    where = "the reference" if first in run.missing else "the other run"
    return _sure("tied_weight", f"only {where} has this tensor, with the values of {twin}: it is not tied there",
                 "both uses belong to one parameter and one gradient")


def _without(run: Run, lost: list[str], parameters: list[str]) -> Answer | None:
    there = {Name.of(name).kind for name in run.other} & {*BACKWARD}
    if not there:
        return None
    branch = len(parameters) < len(lost)
    if parameters and not branch and "grad" not in there:
        return _sure("no_gradient", "the other run went backward and has no gradient of any parameter",
                     "a reduction that did not run (`set_requires_gradient_sync(False)`, `no_sync`); gradients that "
                     "were set to None too early")
    said = counted(len(parameters), "parameter", ("has", "have"))
    return _sure("no_backward" if branch else "no_gradient", f"{said} no gradient in the other run"
                 f"{', and modules no backward pass' if branch else ''}: "
                 f"{some(Name.of(name).stem for name in parameters or lost)}",
                 "what is frozen, detached, under no_grad or not used (a reentrant checkpoint of inputs that require "
                 "no gradient)")


# --- the first tensor -------------------------------------------------------------------------------------------------


def is_rounding(case: Case) -> bool:
    """Whether nothing is further off than another order of sums takes it."""
    if case.runs.exact or case.reference.dtype.kind != "f" or not case.off.any():
        return False
    return bool((np.abs(case.val - case.ref) <= case.rounding(case.ref)).all()) or _is_left_of_zero(case)


def _is_left_of_zero(case: Case) -> bool:
    """Whether a gradient is no more in either run than what rounding leaves of zero, beside others of its step."""
    if case.name.kind not in (*BACKWARD, "m") or not np.isfinite(case.val).all() or not np.isfinite(case.ref).all():
        return False
    size = max(float(np.sqrt((x ** 2).mean())) for x in (case.ref, case.val))
    enough = size / left_of_zero(case.unit)
    return rms_of_kind(case, case.name.kind, enough) >= enough


def _reported_as_rounding(run: Run, name: str) -> bool:
    """The same of all elements by what is reported of them together: nothing is further off than rounding takes the
    largest element."""
    row = run.runs.row(name)
    units = [UNITS.get(str(row.get(key)), 0.0) for key in ("dtype", "other_dtype")]
    off, largest = (float(row.get(key) or "nan") for key in ("max_abs", "max_reference"))
    finite = not any([*row.get("nan", ()), *row.get("inf", ())])
    return (not run.runs.exact and row.get("state") == "different" and finite and min(units) > 0.0
            and 0.0 < off <= sums_of(max(units)) * max(units) * largest < math.inf)


def first_of(run: Run) -> str:
    """The report's first tensor or, where it and others are rounding, the first that is more."""
    first = str((run.report.get("first") or {}).get("tensor") or "")
    if first not in run.rows:
        return first
    for name in run.rows[run.rows.index(first):][:MOST_PASSED]:
        if _reported_as_rounding(run, name):
            continue
        case = run.case(name)
        if case is None or not is_rounding(case):
            return name
    return first


def of_format(run: Run, first: str) -> tuple[str, Answer] | None:
    """The report's first tensor, where it has fewer bits and the one after it that is more than rounding is not off by
    more, in proportion, than those between them: roundings that add up."""
    reported = str((run.report.get("first") or {}).get("tensor") or "")
    if reported == first or reported not in run.rows or first not in run.rows:
        return None
    rows = run.rows[run.rows.index(reported):run.rows.index(first) + 1]
    off = [float(row.get("rms") or 0.0) / (float(row.get("rms_reference") or 0.0) or 1.0)
           for row in map(run.runs.row, rows)]
    case = run.case(reported) if off[-1] <= 2.0 * max(off[:-1]) else None
    if case is None:
        return None
    if is_rounding(case) and (apart := formats_apart(case)):
        return reported, _of_formats(apart)
    said = run.answer(reported)
    return (reported, said) if said.cause == "fewer_bits" else None


def _of_formats(apart: str) -> Answer:
    return Answer("low_precision", f"the runs have other formats: {apart}; no element is further off than these round",
                  "autocast, `param_dtype`, types of parameters, TF32: the same in both runs, or the tolerance of the "
                  "shorter format", "likely")


def others_of(run: Run, first: str) -> typing.Iterator[tuple[str, bool]]:
    """Tensors that may say more than the first, and whether what is allowed of them counts."""
    name = Name.of(first)
    alike = [row for row in run.rows if Name.of(row).step == name.step]
    if name.kind == "fwd" and run.reference.tensor(first).shape in ((), (1,)):
        backward = [row for row in alike if Name.of(row).kind == "bwd"]
        yield from ((row, False) for row in backward or alike if Name.of(row).kind in BACKWARD)
    elif name.kind == "bwd":  # rows of its weight's gradient are parts of its output
        yield from ((row, False) for row in alike if Name.of(row).kind == "grad" and Name.of(row).module == name.stem)
    elif name.kind == "grad":
        yield from ((row, False) for row in alike if Name.of(row).kind == "bwd" and Name.of(row).stem == name.module)
        if len(run.reference.tensor(first).shape) == 1:  # a bias: the weight beside it has more elements
            yield from ((row, False) for row in alike if (n := Name.of(row)).kind == "grad" and row != first
                        and n.module == name.module and len(run.reference.tensor(row).shape) == 2)
        elif not any(Name.of(row).kind == "bwd" for row in alike):  # what differs is how gradients are added up
            yield from ((row, False) for row in alike if Name.of(row).kind == "grad" and len(
                run.reference.tensor(row).shape) == 1)
    elif name.kind == "new":
        moments = [name.with_kind(kind) for kind in ("m", "v", "state")]
        yield from ((moment, True) for moment in moments if moment in run.reference)
    if name.kind in ("init", "new", "m", "v"):
        yield from ((row, False) for row in alike if Name.of(row).kind == name.kind and row != first)
    if name.kind == "fwd":  # what the module reads says what was made of it before, without its weight
        case = run.case(read := str(Name(f"{name.stem}.in", "fwd", name.step)), True)
        yield from ((row, True) for row in (*[read] * (case is not None and bool(case.seen.any())),
                                            *_off_as_much(run, first)))


def _off_as_much(run: Run, first: str) -> typing.Iterator[str]:
    """Updated weights of the step before and outputs just before that are off by as much, in proportion, within what
    is allowed of them."""
    row, own = run.runs.row(first), Name.of(first)
    least = 0.3 * float(row.get("rms") or 0.0) / (float(row.get("rms_reference") or 0.0) or 1.0)
    before = list(itertools.takewhile(lambda name: name != first, run.reference))
    outputs = [name for name in before if (n := Name.of(name)).kind == "fwd" and n.step == own.step][::-1]
    names = [name for name in before if (n := Name.of(name)).kind == "new" and n.step + 1 == own.step]
    for name in (*names[:MOST_READ], *outputs[:2 * MOST_ASKED][::-1]) if least > 0.0 else ():
        case = run.case(name, True)
        if case is not None and float(np.sqrt(np.mean((case.val - case.ref) ** 2))) > least * float(
                np.sqrt(np.mean(case.ref ** 2))):
            yield name


def ask(run: Run, first: str) -> tuple[str, Answer]:
    """The answer of the first tensor or, where it has none, of others that say more."""
    if of_shape := shapes.answer(run, first):
        return of_replicas(run, first) or ("", of_shape)
    answer = run.answer(first)
    name = Name.of(first)
    vague = name.kind == "new" and answer.cause in OF_UPDATES
    unsaid = name.kind == "grad" and answer.cause in OF_OUTPUTS and run.runs.micro_batches > 1  # of which of these
    if answer.cause != UNKNOWN and not (vague or unsaid):
        return "", answer
    scalar = first in run.reference and run.reference.tensor(first).shape in ((), (1,)) and Name.of(first).kind == "fwd"
    for other, within in itertools.islice(others_of(run, first) if first in run.reference else (), MOST_ASKED):
        said = run.answer(other, within)
        if vague and Name.of(other).kind == "new":
            break
        if said.cause in (UNKNOWN, "rounding") or name.kind == "bwd" and said.cause not in OF_OUTPUTS:
            continue
        more = not unsaid or any(fit.pattern.numbers.get("unreduced") for fit in said.fits[:1])
        if more and (not scalar or said.cause in OF_LOSSES):
            confidence = "possible" if said.confidence != "sure" else "likely"
            return other, dataclasses.replace(said, sentence=f"{other} says: {said.sentence}", confidence=confidence)
    return "", (of_loss(run, name) or answer) if scalar and answer.cause == UNKNOWN else answer


def of_replicas(run: Run, first: str) -> tuple[str, Answer] | None:
    """What gradients say of ranks that the layout takes for copies, and that together have the reference's samples."""
    parts = parts_of(run.other, first) if Name.of(first).kind == "fwd" and run.runs.world > 1 else ()
    values = [np.concatenate(part.values) for part in parts if part.values[0].ndim]
    if len({x.shape[1:] for x in values}) != 1 or not shapes.agree(
            run.runs.reference[first], np.concatenate(values)):
        return None
    step = Name.of(first).step
    row = next((row for row in run.rows if (own := Name.of(row)).kind == "grad" and own.step == step), "")
    said = run.answer(row) if row else Answer(UNKNOWN)
    return (row, dataclasses.replace(
        said, sentence=f"{row} says: {said.sentence}; ranks that hold the same weights have samples of their own, "
        "which this layout takes for copies", look="the mesh that `fully_shard` or DDP is given: all dimensions by "
        "which samples are shared out, that of the replicas too")) if said.cause in OF_OUTPUTS else None


# Gradients of which each rank has its own.
OF_OWN = {"missing_average", "missing_all_reduce"}


def of_order(run: Run, name: Name, answer: Answer) -> Answer:
    """Ranks' own gradients that come together after all: the momentum or the update is a sum of all of theirs."""
    kinds, last = ("m", "new"), name.step - 1
    texts = {kind: (str(name.with_kind(kind)), str(name.with_kind(kind, last) if last else name.with_kind("init")))
             for kind in kinds}
    kind = next((kind for kind in kinds if texts[kind][0] in run.other), "")
    if name.kind != "grad" or answer.cause not in OF_OWN or not kind or str(name) not in run.other:
        return answer
    held: dict[str, typing.Any] = {}  # by the part of the tensor
    copies = parts_of(run.other, texts[kind][0])
    if any(not np.array_equal(held.setdefault(str(box), values), values) for part in copies
           for box, values in zip(part.boxes, part.values)):
        return answer
    parts = [part for part in parts_of(run.other, str(name)) if len(part.values) == 1]
    update, before = np.asarray(run.other[texts[kind][0]]).ravel(), texts[kind][1]
    known = [np.asarray(run.other[before]).ravel()] if before in run.other and (kind == "new" or last) else []
    columns = [*(part.values[0].ravel() for part in parts), *known]
    if len(parts) < 2 or any(column.shape != update.shape or np.array_equal(column, update) for column in columns):
        return answer
    made, left, *_ = np.linalg.lstsq(np.stack(columns, 1).astype(np.float64), update.astype(np.float64), rcond=None)
    own = np.abs(made[:len(parts)])
    if not left.size or update.size < len(columns) + 4 or float(left[0]) > 1e-6 * float((update ** 2).sum()) or (
            own.min() < 0.1 * own.max()):
        return answer
    clips = [n for n in run.other if (own := Name.of(n)).kind == "clip" and own.step == name.step]
    norm = next((n for n in clips if len({float(part.values[0].flat[0]) for part in parts_of(run.other, n)}) > 1), "")
    read = f"each rank has another {norm}, made of its own" if norm else "what reads them before has each rank's own"
    sentence = ("each rank has its own gradient here, and the update is made of all of them: the average comes later, "
                f"and {read}")
    return dataclasses.replace(answer, cause="average_after_use", confidence="likely", sentence=sentence,
                               look="the order of the average, clipping, unscaling, norms and the update: the average "
                               "is first")


def of_loss(run: Run, name: Name) -> Answer | None:
    """A loss that is off, where the first gradient of the backward pass is right."""
    gradients = [n for n in run.reference if (own := Name.of(n)).kind in BACKWARD and own.step == name.step]
    first = next((n for n in gradients if Name.of(n).kind == "bwd"), "")
    if name.stem != "loss" or not first or first not in run.runs.same:
        return None
    x, y = (float(np.asarray(of[str(name)]).ravel()[0]) for of in (run.runs.reference, run.runs.other))
    off = [n for n in gradients if n in run.rows]
    if any(Name.of(n).kind == "bwd" for n in off):
        return None
    says = f"the loss is off by {y - x:.6g}, and the backward pass through all modules is right: "
    if not off:
        return Answer("loss_term", says + "the loss that is reported is not that of the backward pass, or a term "
                      "has no gradient", "what is reported as the loss, and its mean or sum over ranks", "possible")
    return Answer("loss_term", f"{says}a term is made of parameters alone, whose gradients differ ({some(off)})",
                  "penalties of weights in the loss, beside or in place of the optimizer's weight decay", "likely")


def _with_operation(run: Run, finding: Finding) -> Finding:
    """The finding with the first wrong operation, which is all that is said where no cause is known."""
    try:
        search = operations.search_of(run.reference.path, run.other.path, run.runs.mesh) if finding.tensor else None
        case = run.case(finding.tensor) if search is not None else None
        wrong = search.wrong(case) if search is not None and case is not None else None
    except (AnyrankError, LookupError, OSError, TypeError, ValueError) as error:
        message = str(error) if isinstance(error, AnyrankError) else f"{type(error).__name__}: {error}"
        why = f"the record of operations cannot be read: {message}"
        return dataclasses.replace(finding, operation=(why,))
    if wrong is None:
        return finding
    answer, said = finding.answer, operations.answer(wrong)
    fitted = answer.cause in VAGUE or any(fit.pattern.fitted for fit in answer.fits[:1])
    more = said.cause != UNKNOWN and fitted or answer.cause in VAGUE and (wrong.is_another or wrong.inputs)
    if answer.cause != UNKNOWN and not more:
        return dataclasses.replace(finding, operation=(wrong.sentence, *wrong.inputs_said, *wrong.alone_said))
    own = [answer.sentence] if answer.cause == UNKNOWN and answer.sentence else []
    first = f"{said.sentence}: {wrong.sentence}" if said.sentence else wrong.sentence
    sentence = "; ".join((first, *wrong.inputs_said, *own))
    confidence = "likely" if said.cause != UNKNOWN else ""
    return dataclasses.replace(finding, answer=dataclasses.replace(said, sentence=sentence, confidence=confidence,
                                                                   fits=()), operation=wrong.alone_said)


def explain_run(reference: Dump, other: Dump, report: Report) -> Finding:
    """Explains what `anyrank verify --json` reports of two dumps."""
    return finding_of(Run(reference, other, report))


BITS = "the values are equal, and only their bits differ: signs of zeros, or kinds of NaN"
SMALL = "no element is further off than another order of sums, in its format, takes it"


def finding_of(run: Run) -> Finding:
    return _with_operation(run, _by_arrays(run))


def _by_arrays(run: Run) -> Finding:
    differences = tuple(facts.differences(*run.runs.facts))
    first = first_of(run)
    if not first:
        return Finding(differences, "", Answer(UNKNOWN))
    case = run.case(first)
    row = run.runs.row(first)
    apart = abs(float(row.get("scale") or 1.0) - 1.0) > float(row.get("factor_allowed") or math.inf)
    if case is not None and case.off.any() and np.array_equal(case.val, case.ref, equal_nan=True):
        return Finding(differences, first, Answer(UNKNOWN, BITS))
    if case is not None and not apart and is_rounding(case):
        apart_by = formats_apart(case)
        return Finding(differences, first, _of_formats(apart_by) if apart_by else
                       Answer("rounding", SMALL, confidence="likely"))
    told = list(recorded(run.runs, Name.of(first)))
    if of_steps := of_count(run.runs, Name.of(first)):
        return Finding(tuple(sorted(differences, key=lambda difference: difference.kind != "steps")), first, of_steps)
    texts = {answer.sentence for answer in told}
    differences = tuple(sorted(differences, key=lambda difference: difference.text not in texts))
    lack = (next((answer for answer in told if answer.cause in STRUCTURE), None) or lacking(run, Name.of(first))
            or of_one_run(run, first))
    if lack:
        lost = [name for name in run.reference if name in run.missing and Name.of(name).kind in BACKWARD]
        return Finding(differences, lost[0] if lost and Name.of(first).kind not in BACKWARD else first, lack)
    asked, answer = ask(run, first)
    answer = of_order(run, Name.of(asked or first), answer)
    if answer.cause == UNKNOWN and (coarse := of_format(run, first)):
        first, answer = coarse
    if told and (answer.cause in VAGUE or answer.cause in {one.cause for one in told}):
        return Finding(differences, first, next((one for one in told if one.cause == answer.cause), told[0]))
    return Finding(differences, first, answer, asked)
