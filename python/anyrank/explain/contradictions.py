# SPDX-License-Identifier: Apache-2.0
"""Recorded facts that contradict a cause: of two runs that recorded both, what is equal there cannot be the mistake."""

from __future__ import annotations

import math
import typing

from anyrank.explain import facts
from anyrank.explain.known import formats_apart
from anyrank.explain.steps import rates_of
from anyrank.explain.tensors import Case

Contradicts = typing.Callable[[Case], bool]


def _equal_rates(case: Case) -> bool:
    rates = rates_of(case)
    return rates is not None and math.isclose(rates[0], rates[1], rel_tol=1e-9)


def _options(run: facts.Facts, parameter: str) -> typing.Mapping[str, typing.Any]:
    """The optimizer's options for a parameter, where one optimizer alone has it."""
    groups = [group for optimizer in run.optimizers for group in optimizer.groups]
    own = [group.options for group in groups if parameter in group.parameters or len(groups) == 1]
    return own[0] if len(own) == 1 else {}


def equal_options(*keys: str) -> Contradicts:
    """Whether both runs recorded these options of the parameter's optimizer, those that they have, and equal ones."""
    def contradicts(case: Case) -> bool:
        a, b = (_options(run, case.name.stem) for run in case.runs.facts)
        known = [key for key in keys if key in a and key in b]
        return bool(known) and all(a[key] == b[key] for key in known)
    return contradicts


def equal_attributes(*keys: str) -> Contradicts:
    """Whether both runs recorded one of these attributes of the tensor's module, and equal ones."""
    def contradicts(case: Case) -> bool:
        a, b = (run.modules[case.name.module].attributes if case.name.module in run.modules else {}
                for run in case.runs.facts)
        known = [key for key in keys if key in a and key in b]
        return bool(known) and all(a[key] == b[key] for key in known)
    return contradicts


def _one_micro_batch(case: Case) -> bool:
    """Whether neither run had several micro-batches."""
    counts = [n for run in case.runs.facts for n in (run.micro_batches or (None,))]
    return set(counts) == {1}


def _alone(case: Case) -> bool:
    """Whether the other run had one rank."""
    other = case.runs.facts[1]
    return other.recorded and other.world == 1 and case.runs.world == 1


_RANKS = ("missing_all_reduce", "missing_average", "missing_reduce_scatter", "missing_all_gather", "wrong_group",
          "replicas_apart", "shards_seeded_alike", "overflow_of_rank", "second_moment_by_parts")
_MICRO = ("one_micro_batch", "input_of_other_micro_batch", "micro_batches_weighted")
CONTRADICTIONS: typing.Mapping[str, Contradicts] = {
    "other_learning_rate": _equal_rates,
    "weight_decay": equal_options("weight_decay"),
    "other_betas": equal_options("betas", "momentum"),
    "adam_eps": equal_options("eps"),
    "nesterov": equal_options("nesterov"),
    "sgd_dampening": equal_options("dampening"),
    "update_sign": equal_options("maximize"),
    "norm_epsilon": equal_attributes("eps", "variance_epsilon", "epsilon"),
    "statistics_momentum": equal_attributes("momentum"),
    **dict.fromkeys(_MICRO, _one_micro_batch),
    **dict.fromkeys(_RANKS, _alone),
    # Exact numerics have the same bits in any order of their sums, and other formats are more than another order.
    "rounding": lambda case: case.runs.exact or bool(formats_apart(case)),
    "low_precision": lambda case: case.runs.exact,
}


def contradicted(case: Case, cause: str) -> bool:
    """Whether what both runs recorded says that this cannot be the cause."""
    return cause in CONTRADICTIONS and CONTRADICTIONS[cause](case)
