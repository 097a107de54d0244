# SPDX-License-Identifier: Apache-2.0
"""Rules that hold in every right run, held against what is sketched of its steps and what its ranks say of themselves.

A rule is a function that gives the findings of a step. watch.md has the rules for users.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing

from anyrank._names import MOST_DIGITS, unfolded
from anyrank.explain.words import counted

STALE = 3  # captured steps in a row in which something never happens
UNUSED = 5  # likewise, of what a part of a model may do without for a while
STILL = 4 * UNUSED  # likewise, in which a scaled loss may overflow, and the optimizer skip its update
TINY = 2.0 ** -18  # beside the model's largest gradient
NORM_NEAR = 2.0 ** -6  # of a norm, which is computed in whatever format the gradients have
OWN_STATISTICS = ("BatchNorm", "InstanceNorm", "LazyBatchNorm")  # modules whose buffers are of a rank's own samples
Entry = typing.Mapping[str, typing.Any]
State = typing.Mapping[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule that the run breaks: which, at what, in which step, and what it means."""

    rule: str
    tensor: str
    step: int
    says: str
    others: tuple[str, ...] = ()  # further tensors of which the same is to be said

    def __str__(self) -> str:
        remainder = f", and {counted(len(self.others), 'other')}" if self.others else ""
        return f"step {self.step}: {self.tensor}{remainder}: {self.says} [{self.rule}]"


@dataclasses.dataclass
class Step:
    """What is sketched of a step: by name without the step; the parameters of before it, and the ranks' states."""

    number: int
    entries: dict[str, Entry]
    before: dict[str, Entry]
    states: typing.Sequence[State] = ()

    def of_kind(self, *kinds: str) -> typing.Iterator[tuple[str, Entry]]:
        for name, entry in self.entries.items():
            if name.rpartition(":")[2] in kinds and not entry["left_out"]:
                yield name, entry

    def said(self, key: str, split_dims: typing.Collection[str] = ()) -> typing.Iterator[list[State]]:
        """Returns the recorded states of ranks that have the same place in these dimensions of the mesh."""
        groups: dict[typing.Any, list[State]] = {}
        for state in self.states:
            if state.get(key) is not None:
                place = tuple(i for name, i in state["at"].items() if name in split_dims)
                groups.setdefault(place, []).append(state)
        yield from groups.values()


Rule = typing.Callable[["Watched", Step], typing.Iterator[Finding]]


class Watched:
    """The rules over the steps of a run, in order. facts: as model.json has them."""

    def __init__(self, facts: typing.Mapping[str, typing.Any] | None = None) -> None:
        self.learn(facts or {})
        self.latest: dict[str, Entry] = {}  # the parameters as they were last seen
        self.initial: dict[str, Entry] = {}  # and as they were first
        self.idle: dict[tuple[str, str], int] = {}  # steps in a row, by rule and tensor
        self.found: set[tuple[str, str]] = set()
        self.seen: set[tuple[str, str]] = set()  # what has happened once: by rule and tensor
        self.parts: set[str] = set()  # parameters of which each rank has its own part, which nothing says
        self.of_ranks: dict[str, dict[int, typing.Any]] = {}  # what each rank said in the step before, by rule
        self.before = 0  # the number of that step
        self.saved: dict[int, int] = {}  # checkpoints by their fingerprints: the step
        self.notes: list[str] = []  # what is odd, and right in some runs

    def learn(self, facts: typing.Mapping[str, typing.Any]) -> None:
        self.facts = facts
        self.frozen = set(unfolded(facts.get("frozen", ())))
        self.sends_buffers = facts.get("wrapper") == "DistributedDataParallel"  # before each forward pass
        self.statistics = {path for module in facts.get("modules", ())
                           if str(module.get("class", "")).startswith(OWN_STATISTICS)
                           for path in unfolded(module.get("paths", ()))}

    def step(self, number: int, entries: typing.Iterable[Entry], states: typing.Sequence[State] = ()) -> list[Finding]:
        """Returns the findings of a step, each tensor once per rule."""
        current: dict[str, Entry] = {}
        before = dict(self.latest)
        for entry in entries:
            base, written = _name_and_step(entry["name"])
            stem, _, kind = base.rpartition(":")
            if kind == "init" or kind == "new" and written < number:
                before[stem] = entry
            if kind != "new" or written == number:
                current[base] = entry
        step = Step(number, current, before, states)
        findings = [finding for rule in RULES for finding in rule(self, step)]
        self.latest = {**before, **{name.rpartition(":")[0]: e for name, e in step.of_kind("new")}}
        self.before = number
        new = [finding for finding in findings if (finding.rule, finding.tensor) not in self.found]
        self.found.update((finding.rule, finding.tensor) for finding in new)
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in new:
            groups.setdefault((finding.rule, finding.says), []).append(finding)
        return [
            dataclasses.replace(ones[0], others=tuple(finding.tensor for finding in ones[1:]))
            for ones in groups.values()
        ]

    def lasts(self, rule: str, tensor: str, holds: bool, steps: int = STALE) -> bool:
        """Returns whether this has been so for so many captured steps."""
        self.idle[rule, tensor] = self.idle.get((rule, tensor), 0) + 1 if holds else 0
        return self.idle[rule, tensor] >= steps

    def never(self, rule: str, tensor: str, happened: bool) -> bool:
        """Returns whether this has not happened in any captured step, of which there were UNUSED."""
        if happened:
            self.seen.add((rule, tensor))
        return self.lasts(rule, tensor, True, UNUSED) and (rule, tensor) not in self.seen

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def learning_rate(self, step: int) -> float | None:
        """Returns the largest learning rate of a step; None if it is not recorded."""
        rates = {
            int(rate_step): groups
            for rate_step, groups in self.facts.get("learning_rates", {}).items()
            if int(rate_step) <= step
        }
        groups = rates[max(rates)] if rates else []
        numbers = [x for group in groups for x in group if isinstance(x, (int, float))]
        return max(numbers) if numbers else None


# --- tensors ----------------------------------------------------------------------------------------------------------


def copies(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Ranks that hold the same part of a tensor have the same bits. The first step alone in which they have not is
    told: what comes later follows from it."""
    _find_parts(run, step)
    if any(rule == "copies" for rule, _ in run.found):
        return
    unsaid = any(state.get("unsaid") for state in step.states)
    for name, entry in step.entries.items():
        stem, _, kind = name.rpartition(":")
        if entry["differing"] < 0 or entry["left_out"] or stem in run.parts or stem.removeprefix("ema.") in run.parts:
            continue
        if kind == "buffer" and (run.sends_buffers or _is_in(stem.rpartition(".")[0], run.statistics)):
            continue
        if unsaid and kind in ("fwd", "bwd", "buffer", "clip"):
            continue  # ranks may have other samples
        yield Finding("copies", name, step.number, f"rank {entry['differing']} has another copy of it than the ranks "
                      "before it: an all-reduce, a broadcast or a seed is missing, or ranks take other steps")


def _find_parts(run: Watched, step: Step) -> None:
    """Parameters that ranks have apart from the start, and their gradients too, are parts of which nothing tells."""
    for stem, entry in step.before.items() if not run.latest else ():
        gradient = step.entries.get(f"{stem}:grad")
        if entry["differing"] >= 0 and gradient is not None and gradient["differing"] >= 0:
            run.parts.add(stem)
    if run.parts:
        run.note(f"{len(run.parts)} parameters are other ones on each rank from the start, as are their gradients, "
                 f"first {min(run.parts)}: they are taken for parts, and not judged; where they are meant to be "
                 "copies, neither the parameters nor the gradients are synchronised")


def not_finite(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """No tensor has a NaN, and no gradient, weight, moment or loss an infinity. The run's first one alone is told. Of
    a loss that is scaled gradients may overflow, until the scale is small enough."""
    if any(rule == "not_finite" for rule, _ in run.found):
        return
    scaled = any(state.get("scale") not in (None, 1.0) for state in step.states)
    for name, entry in step.entries.items():
        kind = name.rpartition(":")[2]
        infinite = entry["inf"] if kind in ("grad", "new", "m", "v") or name.startswith("loss") else 0
        wrong = (entry["nan"] or infinite) and not entry["left_out"]
        if scaled and kind in ("grad", "bwd", "clip"):
            wrong = run.lasts("not_finite", name, bool(wrong), STILL)
        if wrong:
            said = f"{entry['nan']} NaN" if entry["nan"] else f"{infinite} infinite elements"
            yield Finding("not_finite", name, step.number, f"{said}; what was computed before it is finite")
            return


def no_gradient(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Each parameter that others' gradients say is trained gets one in some step; one that is zero for long is none."""
    gradients = dict(step.of_kind("grad"))
    for name, _ in step.of_kind("new") if gradients else ():
        stem = name.rpartition(":")[0]
        gradient = gradients.get(f"{stem}:grad")
        if _is_in(stem, run.frozen) or stem.startswith("ema."):
            continue
        initial = run.initial.setdefault(stem, step.before.get(stem, step.entries[name]))
        moved = stem in step.before and step.before[stem]["digest"] != initial["digest"]
        if run.never("no_gradient", stem, gradient is not None or moved):
            yield Finding("no_gradient", f"{stem}:grad", step.number, f"none in {UNUSED} captured steps: the parameter "
                          "is detached, not used, or left out of the backward pass")
        if gradient is not None and run.never("zero_gradient", stem, gradient["zeros"] < _elements(gradient)):
            if len(gradient["shape"]) > 1:
                yield Finding("zero_gradient", f"{stem}:grad", step.number, "zero everywhere in "
                              f"{UNUSED} captured steps")
            else:  # as of a bias that the next norm takes out again
                run.note(f"{stem} has no effect: its gradient is zero in {UNUSED} captured steps")


def not_updated(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """A parameter that has a gradient moves, unless its learning rate is 0; and an average of it with it."""
    unmoved = {name for state in step.states for name in unfolded(state.get("zero_rate", ()))}
    if run.learning_rate(step.number) == 0.0:
        return
    gradients = dict(step.of_kind("grad"))
    # A key's bias, or one that a norm takes out again, has a gradient that is rounding alone.
    rounding = TINY * max((e["max_abs"] for e in gradients.values() if math.isfinite(e["max_abs"])), default=0.0)
    for name, entry in step.of_kind("new"):
        stem = name.rpartition(":")[0]
        gradient = gradients.get(f"{stem.removeprefix('ema.')}:grad")
        is_unchanged = stem in step.before and step.before[stem]["digest"] == entry["digest"]
        is_stale = (
            gradient is not None
            and gradient["max_abs"] > rounding
            and is_unchanged
            and not _is_in(stem, unmoved)
            and not gradient["nan"]
            and not gradient["inf"]
        )
        if stem.startswith("ema."):
            weight = step.entries.get(f"{stem[4:]}:new")
            is_stale = (
                is_unchanged and weight is not None and step.before.get(stem[4:], weight)["digest"] != weight["digest"]
            )
        if run.lasts("not_updated", stem, is_stale):
            yield Finding("not_updated", name, step.number, f"the same bits after {STALE} captured steps in which it "
                          "had a gradient: it is in no optimizer's group, its update is written to a copy, or is too "
                          "small for its format")


def norm_of_gradients(_run: Watched, step: Step) -> typing.Iterator[Finding]:
    """The norm that gradients are clipped by is theirs, where all of them are clipped at once."""
    norm = step.entries.get("grad_norm:clip")
    gradients = list(step.of_kind("grad"))
    clipped = {state.get("clipped") for state in step.states}
    if norm is None or norm["left_out"] or clipped != {len(gradients)}:
        return
    total_norm = math.sqrt(sum(entry["sum_squares"] for _, entry in gradients))
    is_finite = all(math.isfinite(x) for x in (total_norm, norm["sum"])) and not any(
        e["inf"] or e["nan"] for _, e in gradients
    )
    if is_finite and abs(norm["sum"] - total_norm) > NORM_NEAR * total_norm:
        yield Finding("norm_of_gradients", "grad_norm:clip", step.number, f"is {norm['sum']:.6g}, and that of the "
                      f"gradients {total_norm:.6g}: of a rank's own part, of other gradients, or of another kind")


# --- ranks ------------------------------------------------------------------------------------------------------------


def steps_agree(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Ranks make as many steps, of as many micro-batches."""
    for quantity in ("steps", "micro_batches"):
        numbers = [n for n in run.facts.get("ranks", {}).get(quantity, ()) if isinstance(n, int)]
        if len(set(numbers)) > 1:
            said = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(numbers[:8]))
            yield Finding("steps_agree", quantity, step.number, f"ranks have other numbers of them: {said}")


def states_agree(_run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Ranks that have the same parameters update them at the same learning rates and as often; all scale alike."""
    for key, quantity in (
        ("rates", "learning rates"),
        ("updates", "counts of updates"),
        ("scale", "scale of the loss"),
    ):
        reference_states: dict[int, State] = {}
        for state in step.states:
            reference_state = reference_states.setdefault(0 if key == "scale" else state.get("parts", 0), state)
            if state.get(key) != reference_state.get(key):
                yield Finding(
                    "states_agree",
                    quantity,
                    step.number,
                    f"rank {state['rank']} has {_short(state.get(key))}, "
                    f"rank {reference_state['rank']} {_short(reference_state.get(key))}",
                )
                break


def counts_updates(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """An optimizer counts one update for each step, or less where it skips one, and never backwards."""
    before, current = run.of_ranks.get("updates", {}), {state["rank"]: state.get("updates") for state in step.states}
    run.of_ranks["updates"] = current
    for rank, counts in current.items():
        previous_counts = before.get(rank) or []
        for old_count, new_count in (
            zip(previous_counts, counts or []) if len(previous_counts) == len(counts or []) else ()
        ):
            if (
                old_count is not None
                and new_count is not None
                and not 0 <= new_count - old_count <= step.number - run.before
            ):
                yield Finding(
                    "counts_updates",
                    "counts of updates",
                    step.number,
                    f"rank {rank} goes from {old_count} to " f"{new_count} in {step.number - run.before} steps",
                )
                return


def schedulers_follow(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """A learning rate scheduler makes no more steps than the run, and none while its optimizers stand still. A scaled
    loss that overflows lets an optimizer skip updates for a while, and a checkpoint sets a scheduler forward once."""
    before = run.of_ranks.get("schedules", {})
    run.of_ranks["schedules"] = {state["rank"]: state for state in step.states}
    steps = step.number - run.before
    for state in step.states:
        rank, previous_state = state["rank"], before.get(state["rank"], {})
        still = _are_still(previous_state.get("updates") or [], state.get("updates") or [])
        pairs = zip(previous_state.get("schedules") or [], state.get("schedules") or [])
        for i, (old_schedule, new_schedule) in enumerate(pairs):
            steps_taken, steps_per_update = _steps_made(old_schedule, new_schedule), new_schedule[2] or 1
            key = f"{rank} {i}"
            if run.lasts("schedule_steps", key, steps_taken > steps_per_update * steps):
                times = f", of which accelerate makes {steps_per_update} for an update" if steps_per_update > 1 else ""
                yield Finding(
                    "counts_updates",
                    f"scheduler of rank {rank}",
                    step.number,
                    f"made {steps_taken} steps{times} "
                    f"in {counted(steps, 'step')} of the run, and too many in {STALE} captured steps in a "
                    "row: it is stepped for each micro-batch, or more than once",
                )
            if run.lasts("schedule_updates", key, steps_taken > 0 and still, STILL):
                yield Finding("counts_updates", f"scheduler of rank {rank}", step.number, "goes on while no optimizer "
                              f"has made an update in {STILL} captured steps")


def _are_still(before: typing.Sequence[int | None], current: typing.Sequence[int | None]) -> bool:
    """Returns whether all optimizers count their updates and none has made one."""
    return bool(current) and list(before) == list(current) and None not in current


def _steps_made(before: typing.Sequence[int | None], current: typing.Sequence[int | None]) -> int:
    """How often a scheduler was stepped. It may be set to a step by one call; accelerate counts calls in which it is
    not stepped; some classes do not count their calls."""
    moved, called = (
        new_count - old_count if old_count is not None and new_count is not None else 0
        for old_count, new_count in zip(before[:2], current[:2])
    )
    return min(moved, called) if called > 0 else moved


def samples_of_ranks(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Ranks that share out the samples have other ones, and others than in the step before."""
    names = {name for state in step.states for name in (*state.get("data", ()),
                                                        *(() if run.parts else state.get("unsaid", ())))}
    fixed_axes = {name for state in step.states for name in state["at"] if name not in names}
    before = run.of_ranks.get("samples", {}) if run.before == step.number - 1 else {}
    current = {state["rank"]: state["samples"] for state in step.states if state.get("samples") is not None}
    run.of_ranks["samples"] = current
    for group in step.said("samples", fixed_axes):
        sample_owners: dict[int, int] = {}
        for state in group:
            rank, owner = state["rank"], sample_owners.setdefault(state["samples"], state["rank"])
            if run.lasts("samples_of_ranks", f"{owner} {rank}", owner != rank):
                yield Finding("samples_of_ranks", f"samples of rank {rank}", step.number, f"are those of rank {owner} "
                              f"in {STALE} captured steps: a sampler without the rank, or the same seed; ranks that "
                              "are meant to work on the same samples need a mesh that says so (spec=)")
        repeating_ranks = [state["rank"] for state in group if before.get(state["rank"]) == state["samples"]]
        for state in group:
            stuck = state["rank"] in repeating_ranks and len(repeating_ranks) < len(group)
            if run.lasts("samples_again", str(state["rank"]), stuck):
                yield Finding("samples_of_ranks", f"samples of rank {state['rank']}", step.number, f"are the same "
                              f"in {STALE + 1} steps, while other ranks go on")
    constant = bool(before) and before == current
    if run.lasts("samples_constant", "", constant, UNUSED - 1) and not ("constant", "") in run.seen:
        if len(step.states) > 1:
            yield Finding("samples_of_ranks", "samples", step.number, f"are the same in {UNUSED} steps, on all ranks: "
                          "an iterator that begins anew, or one batch for all steps")
        else:
            run.note(f"the samples of the first {UNUSED} steps are the same")
    if before and not constant:
        run.seen.add(("constant", ""))


def random_states(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Ranks with other samples draw other random numbers: a note, as many programs give all ranks one seed."""
    names = {name for state in step.states for name in state.get("data", ())}
    fixed_axes = {name for state in step.states for name in state["at"] if name not in names}
    for group in step.said("random", fixed_axes) if names else ():
        if len(group) > 1 and len({state["random"] for state in group}) < len(group):
            run.note("ranks with other samples draw the same random numbers, as for dropout: they have one seed")
    yield from ()


def checkpoints(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """What is saved is not what was saved before, if the weights have moved since and are not saved as well."""
    for state in step.states:
        saved = state.get("saved", ())
        current_weights = {state.get("weights"), run.of_ranks.get("weights", {}).get(state["rank"])}
        for digest in saved:
            since = run.saved.get(digest, step.number)
            if since < step.number and not current_weights & {*saved}:
                yield Finding("checkpoints", "checkpoint", step.number, f"rank {state['rank']} saves the weights that "
                              f"it saved in step {since}, and not those that it has now")
                return
        run.saved.update({digest: run.saved.get(digest, step.number) for digest in saved})
    run.of_ranks["weights"] = {state["rank"]: state.get("weights") for state in step.states}


# What makes others differ comes first.
RULES: tuple[Rule, ...] = (steps_agree, states_agree, counts_updates, schedulers_follow, samples_of_ranks,
                           random_states, not_finite, copies, no_gradient, not_updated, norm_of_gradients, checkpoints)


def _name_and_step(name: str) -> tuple[str, int]:
    """ "w:new@3" is "w:new" of step 3; a name without a step is of the first."""
    base, sign, step = name.rpartition("@")
    is_step = bool(sign) and step.isascii() and step.isdecimal() and len(step) <= MOST_DIGITS
    return (base, int(step)) if is_step else (name, 1)


def _is_in(stem: str, names: typing.Collection[str]) -> bool:
    """Returns whether a module or parameter is in a list; stages that name their layers alike are not told apart."""
    return stem in names or re.sub(r"^stage\d+\.", "", stem) in names


def _elements(entry: Entry) -> int:
    return math.prod(entry["shape"])


def _short(value: typing.Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}.."
