# SPDX-License-Identifier: Apache-2.0
"""What holds in every right run, without a reference: `python -m anyrank.watch RUN` of a run that capture(..,
keep="sketch") has written, and anyrank.watch(model, optimizer, every=100) beside one that runs. watch.md has the rules.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import types
import typing

from anyrank._errors import AnyrankError
from anyrank._library import given_json, library
from anyrank.explain.words import counted

if typing.TYPE_CHECKING:
    from anyrank.capture._watch import Watch

STALE = 3  # captured steps in a row in which something never happens
Entry = typing.Mapping[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule that the run breaks: which, at what, in which step, and what it means."""

    rule: str
    tensor: str
    step: int
    says: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.tensor}: {self.says} [{self.rule}]"


@dataclasses.dataclass
class Step:
    """What is sketched of a step: by name without the step, and the parameters' values of before it."""

    number: int
    entries: dict[str, Entry]
    before: dict[str, str]  # digests of parameters

    def of_kind(self, *kinds: str) -> typing.Iterator[tuple[str, Entry]]:
        for name, entry in self.entries.items():
            if name.rpartition(":")[2] in kinds and not entry["left_out"]:
                yield name, entry


Rule = typing.Callable[["Watched", Step], typing.Iterator[Finding]]


class Watched:
    """The rules over the steps of a run, in order."""

    def __init__(self, facts: typing.Mapping[str, typing.Any] | None = None) -> None:
        self.facts = facts or {}
        self.digests: dict[str, str] = {}  # of the parameters as they were last seen
        self.idle: dict[tuple[str, str], int] = {}  # steps in a row, by rule and tensor
        self.found: set[tuple[str, str]] = set()

    def step(self, number: int, entries: typing.Iterable[Entry]) -> list[Finding]:
        """The findings of a step, each rule's of a tensor once."""
        own: dict[str, Entry] = {}
        before = dict(self.digests)
        for entry in entries:
            base, _, at = str(entry["name"]).partition("@")
            stem, _, kind = base.rpartition(":")
            if kind == "init" or kind == "new" and int(at or 1) < number:
                before[stem] = entry["digest"]
            if kind != "new" or int(at or 1) == number:
                own[base] = entry
        step = Step(number, own, before)
        findings = [one for rule in RULES for one in rule(self, step)]
        self.digests = {**before, **{name.rpartition(":")[0]: e["digest"] for name, e in step.of_kind("new")}}
        new = [one for one in findings if (one.rule, one.tensor) not in self.found]
        self.found.update((one.rule, one.tensor) for one in new)
        return new

    def lasts(self, rule: str, tensor: str, holds: bool) -> bool:
        """Whether this has been so for STALE steps."""
        self.idle[rule, tensor] = self.idle.get((rule, tensor), 0) + 1 if holds else 0
        return self.idle[rule, tensor] >= STALE

    def learning_rate(self, step: int) -> float | None:
        """The largest of a step; None: it is not recorded."""
        rates = {int(at): groups for at, groups in self.facts.get("learning_rates", {}).items() if int(at) <= step}
        groups = rates[max(rates)] if rates else []
        numbers = [x for group in groups for x in group if isinstance(x, (int, float))]
        return max(numbers) if numbers else None


# --- rules ------------------------------------------------------------------------------------------------------------


def copies(_run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Ranks that hold the same part of a tensor have the same bits."""
    for name, entry in step.entries.items():
        if entry["differing"] >= 0 and not entry["left_out"]:
            yield Finding("copies", name, step.number, f"rank {entry['differing']} has another copy of it than the "
                          "ranks before it: an all-reduce, a broadcast or a seed is missing, or ranks take other steps")


def not_finite(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """No tensor has a NaN, and no gradient, weight, moment or loss an infinity. The run's first one alone is told."""
    if any(rule == "not_finite" for rule, _ in run.found):
        return
    for name, entry in step.entries.items():
        kind = name.rpartition(":")[2]
        infinite = entry["inf"] if kind in ("grad", "new", "m", "v") or name.startswith("loss") else 0
        if (entry["nan"] or infinite) and not entry["left_out"]:
            said = f"{entry['nan']} NaN" if entry["nan"] else f"{infinite} infinite elements"
            yield Finding("not_finite", name, step.number, f"{said}; what was computed before it is finite")
            return


def no_gradient(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Each parameter that others' gradients say is trained gets one in some step; one that is zero for long is none."""
    frozen = set(run.facts.get("frozen", ()))
    gradients = dict(step.of_kind("grad"))
    for name, _ in step.of_kind("new") if gradients else ():
        stem = name.rpartition(":")[0]
        gradient = gradients.get(f"{stem}:grad")
        if stem in frozen or stem.startswith("ema."):
            continue
        if run.lasts("no_gradient", stem, gradient is None):
            yield Finding("no_gradient", f"{stem}:grad", step.number, f"none in {STALE} captured steps: the parameter "
                          "is detached, not used, or left out of the backward pass")
        zero = gradient is not None and gradient["zeros"] == _elements(gradient)
        if run.lasts("zero_gradient", stem, zero):
            yield Finding("zero_gradient", f"{stem}:grad", step.number, f"zero everywhere in {STALE} captured steps")


def not_updated(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """A parameter that has a gradient moves, unless the learning rate is 0."""
    if run.learning_rate(step.number) == 0.0:
        return
    gradients = dict(step.of_kind("grad"))
    for name, entry in step.of_kind("new"):
        stem = name.rpartition(":")[0]
        gradient = gradients.get(f"{stem}:grad")
        held = (gradient is not None and gradient["zeros"] < _elements(gradient)
                and step.before.get(stem) == entry["digest"])
        if run.lasts("not_updated", stem, held):
            yield Finding("not_updated", name, step.number, f"the same bits after {STALE} captured steps in which it "
                          "had a gradient: it is in no optimizer's group, its update is written to a copy, or is too "
                          "small for its format")


def steps_agree(run: Watched, step: Step) -> typing.Iterator[Finding]:
    """Ranks make as many steps, of as many micro-batches."""
    for what in ("steps", "micro_batches"):
        numbers = [n for n in run.facts.get("ranks", {}).get(what, ()) if isinstance(n, int)]
        if len(set(numbers)) > 1:
            said = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(numbers[:8]))
            yield Finding("steps_agree", what, step.number, f"ranks have other numbers of them: {said}")


RULES: tuple[Rule, ...] = (copies, not_finite, no_gradient, not_updated, steps_agree)


def _elements(entry: Entry) -> int:
    n = 1
    for extent in entry["shape"]:
        n *= extent
    return n


# --- a finished run ---------------------------------------------------------------------------------------------------


def findings_of(folder: str | os.PathLike[str]) -> list[Finding]:
    """What is wrong in a run whose tensors are sketched. Raises AnyrankError for a folder that has none."""
    path = pathlib.Path(folder)
    run = given_json(library()["sketches_json"](os.fsencode(path)))
    facts: typing.Any = {}
    if (path / "model.json").is_file():
        facts = json.loads((path / "model.json").read_text(encoding="utf-8"))
    watched = Watched(facts)
    steps: dict[int, list[Entry]] = {}
    for entry in run["tensors"]:
        steps.setdefault(entry["step"], []).append(entry)
    return [one for number, entries in sorted(steps.items()) for one in watched.step(number, entries)]


def main(words: typing.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m anyrank.watch", description="What is wrong in a run, without a "
                                     "reference: by the sketches that capture(.., keep=\"sketch\") has written.")
    parser.add_argument("run", help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(words)
    try:
        found = findings_of(args.run)
    except AnyrankError as error:
        print(f"anyrank.watch: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    else:
        print(*found, f"{counted(len(found), 'finding')} in {args.run}", sep="\n")
    return 1 if found else 0


def watch(model: typing.Any, optimizer: typing.Any = None, **further: typing.Any) -> Watch:
    """with anyrank.watch(model, optimizer, every=100): train(). Watch has the arguments."""
    from anyrank.capture._watch import Watch as Live  # which needs torch

    return Live(model, optimizer, **further)


class _Callable(types.ModuleType):
    def __call__(self, *args: typing.Any, **further: typing.Any) -> Watch:
        return watch(*args, **further)


if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__].__class__ = _Callable
