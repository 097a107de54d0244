# SPDX-License-Identifier: Apache-2.0
"""All causes, for `anyrank causes` and its page."""

from __future__ import annotations

import difflib
import re
import typing

from anyrank.explain.causes import Cause
from anyrank.explain.explain import causes
from anyrank.explain.operations import OWN_PART

# Causes that no generator has: of what is recorded, of shapes, of what only one run has (run.py, shapes.py), and of
# what `check` counts itself (verify/check).
OF_RUNS = tuple(Cause(name, (), sentence, look) for name, sentence, look in (
    ("rounding", "no element is further off than another order of sums, in its format, takes it", ""),
    ("other_configuration", "a number of the module is another in the two runs", "the configuration of both runs"),
    ("other_learning_rate", "the learning rates differ", "the scheduler: when it steps, and with which total"),
    ("weight_decay", "the optimizer's weight decay differs", "`weight_decay` of all groups"),
    ("other_betas", "the optimizer's betas or momentum differ", "`betas`, `momentum` of all groups"),
    ("adam_eps", "the optimizer's epsilon differs", "`eps`"),
    ("nesterov", "Nesterov's momentum in one run alone", "`nesterov`"),
    ("sgd_dampening", "the dampening of SGD differs", "`dampening`"),
    ("number_of_steps", "the runs made other numbers of steps", "calls of `optimizer.step()`; batches that one run "
     "has more of"),
    ("no_gradient", "parameters have no gradient in the other run", "what is frozen, detached, under no_grad or "
     "not used"),
    ("no_backward", "modules have no backward pass in the other run", "a reentrant checkpoint of inputs that require "
     "no gradient"),
    ("frozen_trained", "parameters have a gradient in the other run alone", "`requires_grad` of frozen weights, set "
     "before wrapping"),
    ("tied_weight", "a weight is tied in one run alone", "both uses belong to one parameter and one gradient"),
    ("loss_term", "the loss is off, and the backward pass through all modules is right", "what is reported as the "
     "loss; penalties of weights"),
    ("average_after_use", "each rank has its own gradient, and the update is made of all of them", "the order of "
     "the average, clipping, unscaling, norms and the update"),
    ("same_samples", "an input has as many times the reference's rows as there are ranks: each rank got the whole "
     "batch", "each rank's part of the batch: `batch.chunk(world)[rank]`, DistributedSampler"),
    ("one_micro_batch", "each step is of one micro-batch", "clipping or steps inside the loop over micro-batches"),
    ("unordered_sum", "the same run has other values the second time", "buffers that are reused before a "
     "transfer ends"),
    ("collective_repeated", "a collective is made more often than the layout needs", ""),
    ("collective_added", "a collective is made that the layout does not need", ""),
    ("collective_left_out", "a collective that the layout needs is not made", ""))) + (OWN_PART,)

Row = typing.Dict[str, str]
SHORT = 72


def _plain(sentence: str) -> str:
    """A sentence in which {ratio:.4g} is {ratio}."""
    return re.sub(r"\{(\w+)[^}]*\}", r"{\1}", sentence)


def _gist(sentence: str) -> str:
    """As much of a sentence as a table has room for."""
    return re.split(r"; |: | \(|, which ", sentence, maxsplit=1)[0] if len(sentence) > SHORT else sentence


def rows(name: str | None = None) -> list[Row]:
    """The sentences of each cause, or of one: cause, gist, says, look_at; a cause's one after the other."""
    found: dict[str, dict[tuple[str, str], None]] = {}
    for cause in (*causes(), *OF_RUNS):
        if name in (None, cause.name):
            found.setdefault(cause.name, {})[_plain(cause.sentence), cause.look] = None
    return [{"cause": cause, "gist": _gist(says), "says": says, "look_at": look}
            for cause, sentences in sorted(found.items()) for says, look in sentences]


def nearest(name: str) -> str:
    """The cause that a wrong name may mean; "": none."""
    return next(iter(difflib.get_close_matches(name, sorted({cause.name for cause in (*causes(), *OF_RUNS)}), 1)), "")
