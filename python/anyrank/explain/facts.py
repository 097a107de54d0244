# SPDX-License-Identifier: Apache-2.0
"""Facts of runs, as their dumps record them in model.json (pytorch.md), and what differs between two runs.

Nothing is inferred: a difference is stated with both values. How ranks share the work is what runs are compared about,
and no difference; what follows from it alone, as a rank's share of the heads, is none either.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import typing

from anyrank._errors import AnyrankError, path_name
from anyrank._input import (Check, Json, Mismatch, anything, flag, folded_names, integer, kind_of, list_of, map_of,
                            mismatch, nullable, parsed, read_json, record, step_key, string)
from anyrank._names import MOST_NAMES, unfolded, unfolded_count
from anyrank.explain.words import RUNS, both_of, counted, ranks_of, shown, some, these

FILE = "model.json"
FORMAT, VERSION = "anyrank model", 1
# Keys of what a run is laid out by, as world_size, tp_rank and tensor_model_parallel_size.
_LAYOUT = re.compile(r"(global_|local_)?rank|(.*_)?world_size|(.*_)?mesh|"
                     r"(.*_)?(tp|dp|cp|pp|ep|sp|etp|fsdp|parallel)(_(world|size|rank|degree|index))*")
_T = typing.TypeVar("_T")
Options = typing.Mapping[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Module:
    """Modules are known by path. inputs, outputs: type and shape of each tensor of the first call."""

    kind: str
    arguments: tuple[str, ...] = ()
    inputs: Options = dataclasses.field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    attributes: Options = dataclasses.field(default_factory=dict)
    autocast: Options | None = None  # where it is not the run's


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that an optimizer updates by the same options; of a run that does not name them, none."""

    options: Options
    parameters: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    kind: str
    groups: tuple[Group, ...]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is recorded of a run. By rank: a value each, None where it is not known. By step: a value from that step on.
    recorded: whether there is a file at all; truncated: whether it leaves something out."""

    recorded: bool = False
    truncated: bool = False
    by: str = ""  # the program that wrote them
    versions: Options = dataclasses.field(default_factory=dict)
    world: int = 1
    mesh: typing.Mapping[str, int] = dataclasses.field(default_factory=dict)  # dimensions of more than one rank
    wrapper: str = ""  # the class of what is around the model; "": nothing is
    config: Options = dataclasses.field(default_factory=dict)  # by dotted names
    modules: typing.Mapping[str, Module] = dataclasses.field(default_factory=dict)
    # Of each module, by position or name: arguments of its first forward pass that are outputs of others.
    inputs: typing.Mapping[str, typing.Mapping[str, str]] = dataclasses.field(default_factory=dict)
    dtypes: typing.Mapping[str, str] = dataclasses.field(default_factory=dict)  # of parameters, by name
    frozen: frozenset[str] = frozenset()
    tied: frozenset[frozenset[str]] = frozenset()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Optimizer, ...] = ()  # each of one group
    scaler: Options = dataclasses.field(default_factory=dict)
    autocast: Options = dataclasses.field(default_factory=dict)  # the type, by device
    numerics: Options = dataclasses.field(default_factory=dict)
    learning_rates: typing.Mapping[int, typing.Any] = dataclasses.field(default_factory=dict)
    seeds: tuple[int | None, ...] = ()
    steps: tuple[int | None, ...] = ()
    micro_batches: tuple[int | None, ...] = ()
    calls: tuple[typing.Mapping[int, int], ...] = ()  # of the model, by step
    without_gradient: tuple[typing.Mapping[int, frozenset[str]], ...] = ()  # parameters, by step
    odd_clip: tuple[typing.Mapping[int, str], ...] = ()  # what is odd about where gradients were clipped, by step


@dataclasses.dataclass(frozen=True)
class Difference:
    """kind: the field of Facts. text: a sentence with both values."""

    kind: str
    text: str
    reference: typing.Any
    other: typing.Any


# --- reading ----------------------------------------------------------------------------------------------------------

MOST_DIMENSIONS = 8  # of a mesh
MOST_UNFOLDED = 4 * MOST_NAMES  # of a file, whose lists are expanded together


class _Names:
    """The check of the lists of names of one file, which are unfolded together."""

    def __init__(self) -> None:
        self.left = MOST_UNFOLDED

    def __call__(self, value: typing.Any) -> list[str]:
        names = folded_names(value)
        self.left -= sum(map(unfolded_count, names))
        if self.left < 0:
            raise Mismatch(f"has the file's name {MOST_UNFOLDED + 1}, expected at most {MOST_UNFOLDED}")
        return names


def _mesh(value: typing.Any) -> dict[str, int]:
    sizes = map_of(integer(1))(value)
    if len(sizes) > MOST_DIMENSIONS:
        raise Mismatch(f"has {len(sizes)} dimensions, expected at most {MOST_DIMENSIONS}")
    return sizes


def _optimizer_groups(value: typing.Any, names: Check[list[str]]) -> list[Json]:
    return list_of(record({}, {"options": map_of(anything), "parameters": names}))(value)


def _document() -> Check[Json]:
    """The check of a model.json. What is null is not known, as what is left out."""
    names = _Names()
    options = map_of(anything)
    texts = list_of(string)
    module = record({"class": string}, {
        "paths": names, "arguments": texts, "in": map_of(string), "out": texts, "attributes": options,
        "autocast": options})
    update_rule = record({"class": string}, {
        "groups": functools.partial(_optimizer_groups, names=names), "options": options})
    by_rank = list_of(nullable(integer()))
    ranks = record({}, {
        "seed": by_rank, "steps": by_rank, "micro_batches": by_rank,
        "calls": list_of(nullable(map_of(integer(), step_key))),
        "without_gradient": list_of(nullable(map_of(names, step_key))),
        "odd_clip": list_of(nullable(map_of(string, step_key)))})
    fields: dict[str, Check[typing.Any]] = {
        "truncated": flag, "by": string, "versions": map_of(string), "world": integer(1), "mesh": _mesh,
        "config": options, "modules": list_of(module), "inputs": map_of(map_of(string)), "dtypes": map_of(names),
        "frozen": names, "tied": list_of(texts), "optimizers": list_of(update_rule),
        "schedulers": list_of(update_rule), "scaler": options, "autocast": options, "numerics": options,
        "learning_rates": map_of(list_of(list_of(anything)), step_key), "ranks": ranks, "wrapper": string}
    return record({}, fields)


def read_model(file: str | os.PathLike[str]) -> Json:
    """What a model.json has, checked; names in it stay folded. {}: it is another program's. Errors: AnyrankError for
    one that cannot be read, is of a later version, or has a value of another type than it should."""
    found = read_json(file)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return {}
    if found.get("version") != VERSION:
        raise AnyrankError(f"{path_name(file)}: {mismatch(found.get('version'), f'version {VERSION}')}")
    return parsed(found, _document(), path_name(file))


def _by_step(value: typing.Mapping[str, typing.Any] | None, read_value: typing.Callable[[typing.Any], _T]
             ) -> dict[int, _T]:
    return {int(step): read_value(x) for step, x in (value or {}).items()}


def flat(value: typing.Any, name: str = "") -> dict[str, typing.Any]:
    """The values of nested objects by dotted names."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {key: x for inner, own in value.items()
            for key, x in flat(own, f"{name}.{inner}" if name else str(inner)).items()}


def _optimizer(told: Json) -> Optimizer:
    groups = told.get("groups") or [{"options": told.get("options", {})}]
    return Optimizer(told["class"], tuple(
        Group(group.get("options", {}), tuple(unfolded(group.get("parameters", ())))) for group in groups))


def _modules(value: list[Json]) -> dict[str, Module]:
    found: dict[str, Module] = {}
    for told in value:
        module = Module(told["class"], tuple(told.get("arguments", ())), told.get("in", {}),
                        tuple(told.get("out", ())), told.get("attributes", {}), told.get("autocast"))
        found.update(dict.fromkeys(unfolded(told.get("paths", ())), module))
    return found


def read(path: str | os.PathLike[str]) -> Facts:
    """What the dump in a folder, or that of a file, records. Errors: AnyrankError for a dump that is not there, and as
    of read_model()."""
    folder = pathlib.Path(path_name(path))
    if not folder.exists():
        raise AnyrankError(f"{folder}: there is no such file or folder")
    if not folder.is_dir() and (kind := kind_of(folder.stat().st_mode)):
        raise AnyrankError(f"{folder}: {kind}, expected a folder or a file")
    file = (folder if folder.is_dir() else folder.parent) / FILE
    told = read_model(file) if os.path.lexists(file) else {}
    return _facts(told) if told else Facts()


def _facts(told: Json) -> Facts:
    ranks = told.get("ranks", {})
    return Facts(
        True, told.get("truncated", False), told.get("by", ""), told.get("versions", {}), told.get("world", 1),
        {name: n for name, n in told.get("mesh", {}).items() if n > 1}, told.get("wrapper") or "",
        flat(told["config"]) if told.get("config") else {}, _modules(told.get("modules", [])), told.get("inputs", {}),
        {name: dtype for dtype, names in told.get("dtypes", {}).items() for name in unfolded(names)},
        frozenset(unfolded(told.get("frozen", ()))), frozenset(map(frozenset, told.get("tied", ()))),
        tuple(map(_optimizer, told.get("optimizers", ()))), tuple(map(_optimizer, told.get("schedulers", ()))),
        told.get("scaler", {}), told.get("autocast", {}), told.get("numerics", {}),
        _by_step(told.get("learning_rates"), lambda x: x), tuple(ranks.get("seed", ())), tuple(ranks.get("steps", ())),
        tuple(ranks.get("micro_batches", ())),
        tuple(_by_step(x, lambda n: n) for x in ranks.get("calls", ())),
        tuple(_by_step(x, lambda names: frozenset(unfolded(names))) for x in ranks.get("without_gradient", ())),
        tuple(_by_step(x, str) for x in ranks.get("odd_clip", ())))


def _same_layout(a: Facts, b: Facts) -> bool:
    return a.world == b.world and a.mesh == b.mesh


# --- layouts ----------------------------------------------------------------------------------------------------------


def layouts(a: Facts, b: Facts) -> str:
    """A sentence on what is compared: how many ranks each run had, and what for."""
    said = []
    for facts in (a, b):
        mesh = ", ".join(f"{name} {n}" for name, n in facts.mesh.items())
        text = f"{counted(facts.world, 'rank')}{f' ({mesh})' if mesh else ''}"
        several = (_one(facts.micro_batches) or 1) > 1
        said.append(text + (f" with {_one(facts.micro_batches)} micro-batches" if several else ""))
    return f"both runs had {said[0]}" if said[0] == said[1] else f"{RUNS[0]} had {said[0]}, {RUNS[1]} {said[1]}"


def _one(by_rank: tuple[int | None, ...]) -> int | None:
    """The value of all ranks; None: they have several, or none is known."""
    values = {value for value in by_rank if value is not None}
    return values.pop() if len(values) == 1 else None


def _is_share(x: typing.Any, y: typing.Any, a: Facts, b: Facts) -> bool:
    """Whether two values may differ only because the layouts do: one is the share of the other that a rank has."""
    if _same_layout(a, b):
        return False
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
        return all(p == q or _is_share(p, q, a, b) for p, q in zip(x, y))
    if type(x) is not int or type(y) is not int or min(x, y) < 1 or max(x, y) % min(x, y):
        return False
    sizes = [*a.mesh.values(), *b.mesh.values()]
    shares = {math.prod(some) for n in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, n)}
    return max(x, y) // min(x, y) in shares


# --- what differs -----------------------------------------------------------------------------------------------------

Found = typing.Iterator[Difference]


def _steps(a: Facts, b: Facts, kind: str = "steps", verb: str = "made", noun: str = "step") -> Found:
    """Counts that ranks of a run should agree on; and, of one number in each run, both."""
    by_run: list[tuple[int | None, ...]] = [getattr(a, kind), getattr(b, kind)]
    for run, by_rank in zip(RUNS, by_run):
        held: dict[int, list[int]] = {}
        for rank, n in enumerate(by_rank):
            if n is not None:
                held.setdefault(n, []).append(rank)
        if len(held) > 1:
            said = ", ".join(f"{ranks_of(ranks)} {verb} {counted(n, noun)}" for n, ranks in held.items())
            yield Difference(kind, f"ranks differ in {run}: {said}", *by_run)
    x, y = map(_one, by_run)
    if x is not None and y is not None and x != y and (kind == "steps" or _same_layout(a, b)):
        yield Difference(kind, f"{RUNS[0]} {verb} {counted(x, noun)}, {RUNS[1]} {y}", x, y)


def _missing(facts: Facts, step: int) -> dict[str, list[int]]:
    """Parameters without a gradient in a step, and the ranks without."""
    found: dict[str, list[int]] = {}
    for rank, by_step in enumerate(facts.without_gradient):
        last = max((at for at in by_step if at <= step), default=None)
        for name in by_step[last] if last is not None else ():
            found.setdefault(name, []).append(rank)
    return found


def _without_gradient(a: Facts, b: Facts) -> Found:
    steps = sorted({step for by_step in (*a.without_gradient, *b.without_gradient) for step in by_step})
    for step in steps if any(a.without_gradient) and any(b.without_gradient) else ():
        lost, found = [_missing(facts, step) for facts in (a, b)], False
        for run, here, there, facts in ((1, lost[1], lost[0], b), (0, lost[0], lost[1], a)):
            by_ranks: dict[tuple[int, ...], list[str]] = {}
            for name in here.keys() - there.keys():
                by_ranks.setdefault(tuple(here[name]), []).append(name)
            for ranks, names in sorted(by_ranks.items()):
                found, alone = True, f" on {ranks_of(ranks)}" if facts.world > 1 else ""
                lost_by = counted(len(names), "parameter", ("has", "have"))
                text = f"{lost_by} no gradient in {RUNS[run]}{alone}, in step {step}: {some(names)}"
                yield Difference("without_gradient", text, sorted(lost[0]), sorted(lost[1]))
        if found:
            return


def _clips(a: Facts, b: Facts) -> Found:
    """What is odd about where one run alone clips gradients, as its capture says it."""
    said = [min(((step, text) for by_step in facts.odd_clip for step, text in by_step.items() if text), default=None)
            for facts in (a, b)]
    for run, here, there in zip(RUNS, said, reversed(said)):
        if here and not there:
            yield Difference("odd_clip", f"in step {here[0]} of {run} {here[1]}", said[0], said[1])


def _alone(kind: str, noun: str, verbs: tuple[str, str], x: typing.Collection[str], y: typing.Collection[str]) -> Found:
    """What is so in one run alone: of x in the reference, of y in the other run."""
    for run, names in zip(RUNS, (x, y)):
        if names:
            text = f"{counted(len(names), noun, verbs)} in {run} alone: {some(names)}"
            yield Difference(kind, text, sorted(x), sorted(y))


def _parameters(a: Facts, b: Facts) -> Found:
    """Which require a gradient, are one tensor by several names, or are in one run alone; and their types."""
    both, tied = a.dtypes.keys() & b.dtypes.keys(), frozenset().union(*a.tied, *b.tied)
    yield from _alone("frozen", "parameter", ("requires a gradient", "require a gradient"),
                      (b.frozen - a.frozen) & both, (a.frozen - b.frozen) & both)
    for run, one, other in (RUNS[0], a, b), (RUNS[1], b, a):
        for names in sorted(map(sorted, one.tied - other.tied)) if "pp" not in {*a.mesh, *b.mesh} else ():
            if {*names} & other.dtypes.keys():
                yield Difference("tied", f"{' and '.join(names)} are one tensor in {run} alone", one.tied, other.tied)
    if a.dtypes and b.dtypes:
        yield from _alone("dtypes", "parameter", ("is", "are"), a.dtypes.keys() - both - tied,
                          b.dtypes.keys() - both - tied)
    for (x, y), found in _grouped((name, (a.dtypes[name], b.dtypes[name])) for name in sorted(both)):
        yield Difference("dtypes", both_of(f"type of {these(found, 'parameter')}", x, y), x, y)


def _grouped(pairs: typing.Iterable[tuple[str, tuple[typing.Any, ...]]]
             ) -> typing.Iterator[tuple[tuple[typing.Any, ...], list[str]]]:
    """Names with the same two values together, of those whose values (the last two) differ."""
    found: dict[str, tuple[tuple[typing.Any, ...], list[str]]] = {}
    for name, key in pairs:
        if key[-2] != key[-1] or type(key[-2]) is not type(key[-1]):
            found.setdefault(json.dumps(key), (key, []))[1].append(name)
    yield from found.values()


def _options(kind: str, what: str, x: Options, y: Options, a: Facts, b: Facts, lone: bool = False) -> Found:
    """Values by key; lone: also those that one run alone has."""
    for key in dict.fromkeys([*x, *y]):
        name = f"{what}{key}"
        if key in x and key in y:
            if x[key] != y[key] and not (_LAYOUT.fullmatch(key.rpartition(".")[2]) and not _same_layout(a, b)):
                yield Difference(kind, both_of(name, x[key], y[key]), x[key], y[key])
        elif lone:
            run, value = (0, x[key]) if key in x else (1, y[key])
            yield Difference(kind, f"{name}: {shown(value)} in {RUNS[run]}, {RUNS[1 - run]} has no such key",
                             x.get(key), y.get(key))


def _attributes(a: Facts, b: Facts) -> Found:
    both = [path for path in a.modules if path in b.modules]
    pairs = [(path, (key, value, b.modules[path].attributes[key])) for path in both
             for key, value in a.modules[path].attributes.items() if key in b.modules[path].attributes]
    pairs += [(path, ("autocast", a.modules[path].autocast, b.modules[path].autocast)) for path in both
              if a.modules[path].inputs and b.modules[path].inputs]
    for (key, x, y), paths in _grouped(pairs):
        if not _is_share(x, y, a, b) and (_same_layout(a, b) or not _LAYOUT.fullmatch(key)):
            yield Difference("modules", both_of(f"{key} of {these(paths, 'module')}", x, y), x, y)


def _modules_differ(a: Facts, b: Facts) -> Found:
    both = [path for path in a.modules if path in b.modules]
    for (x, y), paths in _grouped((path, (a.modules[path].kind, b.modules[path].kind)) for path in both):
        if _same_layout(a, b) or not any("Parallel" in kind or "Dist" in kind for kind in (x, y)):
            yield Difference("modules", both_of(f"class of {these(paths, 'module')}", x, y), x, y)
    outer = [[path for path in one.modules if path not in other.modules and (
        not path or path.rpartition(".")[0] in other.modules)] for one, other in ((a, b), (b, a))]
    yield from _alone("modules", "module", ("is", "are"), *(outer if a.modules and b.modules else ([], [])))


def _optimizers(a: Facts, b: Facts) -> Found:
    if len(a.optimizers) != len(b.optimizers) and a.optimizers and b.optimizers:
        x, y = ([one.kind for one in facts.optimizers] for facts in (a, b))
        yield Difference("optimizers", both_of("optimizers", x, y), x, y)
    for one, other in zip(a.optimizers, b.optimizers):
        if one.kind.lower() != other.kind.lower():
            yield Difference("optimizers", both_of("optimizer", one.kind, other.kind), one.kind, other.kind)
        yield from _groups(one, other, a, b)
    rates = a.learning_rates, b.learning_rates
    for step in sorted({*rates[0], *rates[1]}) if all(rates) else ():
        p, q = (_rates_at(by_step, step) for by_step in rates)
        if p != q:
            text = both_of(f"the learning rates differ from step {step} on", p, q)
            yield Difference("learning_rates", text + _scheduled(a, b), p, q)
            break
    x, y = ([one.kind for one in facts.schedulers] for facts in (a, b))
    if x != y and a.by == b.by:
        yield Difference("schedulers", both_of("learning rate schedulers", x, y), x, y)
    for one, other in zip(a.schedulers, b.schedulers):
        p, q = ({key: x for key, x in of.groups[0].options.items() if key not in ("last_epoch", "base_lrs")}
                for of in (one, other))  # which steps and learning rates say
        yield from _options("schedulers", f"{one.kind}'s ", p, q, a, b)
    if bool(a.scaler) != bool(b.scaler) and a.by == b.by:
        text = both_of("gradient scaler", a.scaler or "none", b.scaler or "none")
        yield Difference("scaler", text, a.scaler, b.scaler)
    yield from _options("scaler", "gradient scaler's ", a.scaler, b.scaler, a, b)


def _scheduled(a: Facts, b: Facts) -> str:
    """How often schedulers stepped, where that differs in as many steps of the optimizer; else ""."""
    x, y = (next((one.groups[0].options.get("last_epoch") for one in run.schedulers), None) for run in (a, b))
    steps, micro = _one(a.steps), _one(b.micro_batches) or 1
    if not isinstance(x, int) or not isinstance(y, int) or x == y or not steps or steps != _one(b.steps):
        return ""
    each = f", as where it steps in each of {micro} micro-batches" if y - x == steps * (micro - 1) else ""
    return (f": the scheduler is at step {x} in {RUNS[0]} and at {y} in {RUNS[1]}, after as many steps of the "
            f"optimizer ({steps} recorded){each}")


def _rates_at(by_step: typing.Mapping[int, typing.Any], step: int) -> typing.Any:
    """The learning rates of a step: one number where all groups of all optimizers have the same."""
    rates = by_step.get(max((at for at in by_step if at <= step), default=-1))
    numbers = [rate for group in rates or () for rate in group]
    return numbers[0] if numbers and numbers.count(numbers[0]) == len(numbers) else rates


def _groups(one: Optimizer, other: Optimizer, a: Facts, b: Facts) -> Found:
    """Options of each parameter, where both runs name those of each group; else of groups in their order."""
    x, y = ({name: group.options for group in optimizer.groups for name in group.parameters}
            for optimizer in (one, other))
    if not x or not y:
        for p, q in zip(one.groups, other.groups):
            yield from _options("optimizers", f"{one.kind}'s ", p.options, q.options, a, b)
        return
    rates = {"lr", "initial_lr"} if a.learning_rates and b.learning_rates else set()  # of which each step's are known
    for (key, p, q), names in _grouped((name, (key, x[name][key], y[name][key])) for name in x if name in y
                                       for key in x[name] if key in y[name] and key not in rates):
        what = f"{one.kind}'s {key} of {these(names, 'parameter')}"
        yield Difference("optimizers", both_of(what, p, q), p, q)
    yield from _alone("optimizers", "parameter", ("is updated", "are updated"),
                      *([name for name in here if name not in there and name in known]
                        for here, there, known in ((x, y, b.dtypes), (y, x, a.dtypes))))


def differences(a: Facts, b: Facts) -> list[Difference]:
    """What differs between the reference and another run, in the order in which it is likely to matter."""
    if not (a.recorded and b.recorded):
        return []
    alike = a.by == b.by and bool(a.config) and bool(b.config)
    none = dict.fromkeys([*a.autocast, *b.autocast], "none")
    seeds, other_seeds = ({"0": seed for seed in facts.seeds[:1] if seed is not None} for facts in (a, b))
    return [*_steps(a, b), *_without_gradient(a, b), *_clips(a, b), *_parameters(a, b),
            *_options("config", "", a.config, b.config, a, b, lone=alike), *_attributes(a, b), *_modules_differ(a, b),
            *_options("autocast", "autocast on ", {**none, **a.autocast}, {**none, **b.autocast}, a, b),
            *_options("numerics", "", a.numerics, b.numerics, a, b), *_optimizers(a, b),
            *_steps(a, b, "micro_batches", "went through", "micro-batch"),
            *_options("seeds", "seed of rank ", seeds, other_seeds, a, b),
            *_options("versions", "version of ", a.versions, b.versions, a, b)]
