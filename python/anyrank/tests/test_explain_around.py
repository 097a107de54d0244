# SPDX-License-Identifier: Apache-2.0
"""What is said of the things around a tensor that nothing explains: only of those that both runs have."""

from __future__ import annotations

import typing

from anyrank.explain import text
from anyrank.explain.around import around
from anyrank.explain.explain import UNKNOWN, Answer
from anyrank.tests.explained import case_of, values

X, Y = values(4, 8), values(4, 8, seed=1)
WITH_INPUT = ["a:fwd", "b.in:fwd", "b.weight:init", "b:fwd"]
LOOK = "look at this module's own computation, or the collective after it"
OUTPUT = "the recorded output before it is the same (a:fwd)"


def said(name: str, names: typing.Sequence[str], differ: typing.Sequence[str] = (), lacking: typing.Sequence[str] = (),
         ) -> str:
    both = [text for text in names if text not in lacking]
    return around(case_of(name, X, Y, reference=dict.fromkeys(names, X), other=dict.fromkeys(both, X),
                          same=[text for text in both if text not in (name, *differ)]))


def test_forward() -> None:
    weight = "its weights are the same (b.weight:init)"
    assert said("b:fwd", WITH_INPUT) == f"what it reads is the same (b.in:fwd); {weight}; {LOOK}"
    assert said("b:fwd", WITH_INPUT, ["b.weight:init"]) == (
        "what it reads is the same (b.in:fwd); its weights differ (b.weight:init)")
    assert said("b:fwd", WITH_INPUT, ["b.in:fwd"]) == f"what it reads differs (b.in:fwd); {weight}"
    without = ["a:fwd", "b.weight:init", "b:fwd"]
    assert said("b:fwd", without) == f"{OUTPUT}; {weight}; what it reads is not recorded"
    later = ["a:fwd@2", "b.weight:init", "b.weight:new", "b:fwd@2"]  # the weight that step 2 begins with
    assert "(b.weight:new)" in said("b:fwd@2", later) and "init" not in said("b:fwd@2", later)


def test_of_what_one_run_lacks_nothing_is_said() -> None:
    assert said("b:fwd", WITH_INPUT, lacking=["b.in:fwd", "b.weight:init"]) == (
        f"{OUTPUT}; what it reads is not recorded")
    assert said("b:fwd", ["b:fwd"]) == ""
    assert said("norm:clip", ["a:fwd", "norm:clip"]) == ""


def test_backward_and_step() -> None:
    names = ["a:fwd", "b:fwd", "c:bwd", "b:bwd", "b.weight:grad", "b.bias:grad", "b.weight:init", "b.weight:new"]
    assert said("b:bwd", names) == (
        "the recorded gradient before it is the same (c:bwd); the module's output is the same (b:fwd); its weights are "
        "the same (b.weight:init)")
    assert said("b.weight:grad", names, ["b.bias:grad"]) == (
        "the gradient of b is the same (b:bwd); the module's other gradients differ (b.bias:grad)")
    assert said("b.weight:new", names).endswith("look at the step itself: its rate, its decay, and what is written "
                                                     "back")
    assert "look" not in said("b.weight:new", names, ["b.weight:grad"])


def test_the_text_has_it() -> None:
    case = case_of("b:fwd", X, Y, reference=dict.fromkeys(WITH_INPUT, X), other=dict.fromkeys(WITH_INPUT, X),
                   same=WITH_INPUT[:3])
    lines = " ".join(" ".join(text.lines(case, Answer(UNKNOWN))).split())
    assert f"known what it reads is the same (b.in:fwd); its weights are the same (b.weight:init); {LOOK}" in lines
