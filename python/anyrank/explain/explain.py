# SPDX-License-Identifier: Apache-2.0
"""The explanation of one tensor: the pattern that fits, and the cause that the facts of the run allow."""

from __future__ import annotations

import dataclasses
import functools
import typing
import warnings

import numpy as np

from anyrank.explain import (averages, balance, branches, combined, contrastive, copies, experts, factors, joined,
                             lookups, losses, mapped, masked, mixtures, moments, moved, muon, norms, pooled, products,
                             replay, routers, samples, scaled, shards, updates)
from anyrank.explain.causes import Cause, reliability
from anyrank.explain.contradictions import contradicted
from anyrank.explain.patterns import Fit, Pattern, fit
from anyrank.explain.tensors import Case

Generator = typing.Callable[[Case], typing.Iterator[Pattern]]
MODULES: tuple[typing.Any, ...] = (lookups, samples, routers, balance, experts, products, branches, updates, averages,
                                   moments, muon, norms, losses, contrastive, replay, shards, moved, joined, pooled,
                                   masked, copies, scaled, factors, combined, mixtures, mapped)
UNKNOWN = "unknown"
LEAST_RIGHT = 0.9  # of the known cases of a cause, so that it is more than possible
LIKE = 0.5  # of a difference that a pattern leaves at most unexplained to be named as what it looks like


@dataclasses.dataclass(frozen=True)
class Answer:
    """cause: "unknown" where no pattern fits. sentence: what happened. look: what to look at. confidence: "sure",
    "likely" or "possible"; "" for unknown. fits: the patterns that fit, best first; for unknown the nearest ones."""

    cause: str
    sentence: str = ""
    look: str = ""
    confidence: str = ""
    fits: tuple[Fit, ...] = ()
    others: tuple[str, ...] = ()  # causes of other patterns that fit as well


@functools.cache
def causes() -> tuple[Cause, ...]:
    """All causes, in the order in which they are asked."""
    return tuple(cause for module in MODULES for cause in module.CAUSES)


def cause_of(case: Case, pattern: Pattern) -> Cause | None:
    """The first cause of the pattern that the case allows and that no recorded fact contradicts."""
    return next((cause for cause in causes() if pattern.kind in cause.kinds and cause.when(case, pattern)
                 and not contradicted(case, cause.name)), None)


def fits_of(case: Case) -> typing.Iterator[Fit]:
    """How well each pattern fits, without what it expects, which is as large as the tensor. A generator that fails is
    warned of, and the others stand."""
    for module in MODULES:
        try:
            with np.errstate(all="ignore"):
                found = [dataclasses.replace(fit(case, pattern), pattern=dataclasses.replace(pattern, expected=()))
                         for pattern in module.patterns(case)]
            yield from found
        except np.linalg.LinAlgError:
            continue  # of values that are not finite, of which the generator has nothing to say
        except Exception as error:  # noqa: BLE001  a defect, which must not hide what other generators find
            warnings.warn(f"{module.__name__} ended at {case.name}: {error!r}", RuntimeWarning, stacklevel=2)


def rivals(best: Fit, cause: Cause, meant: typing.Sequence[tuple[Fit, Cause]]) -> tuple[str, ...]:
    """Causes of other patterns that fit by no more numbers and ask for another remedy."""
    return tuple(dict.fromkeys(other.name for f, other in meant if other.name != cause.name
                               and f.pattern.fitted <= best.pattern.fitted and other.look != cause.look))


def explain(case: Case) -> Answer:
    """Of the patterns that fit up to rounding, the one with the fewest numbers that were chosen to fit. It is
    "possible" where another one fits by as few, with a cause of another remedy or with none by fewer."""
    fits = list(fits_of(case))
    count = int(np.count_nonzero(case.off))  # as many numbers as elements would explain anything
    exact = sorted((f for f in fits if f.exact and f.pattern.fitted < count),
                   key=lambda f: (f.pattern.fitted, f.pattern.trials))
    meant = [(f, cause) for f in exact if (cause := cause_of(case, f.pattern)) is not None]
    if not meant:
        near = sorted((f for f in fits if f.unexplained < LIKE), key=lambda f: f.unexplained)
        told = str(exact[0].pattern.numbers.get("text", "")) if exact else ""
        return Answer(UNKNOWN, told, fits=(*exact, *(f for f in near if not f.exact))[:2])
    best, cause = meant[0]
    others = rivals(best, cause, meant)
    unsaid = exact[0].pattern.fitted < best.pattern.fitted  # a simpler map fits, which has no cause
    few = 2 * best.pattern.fitted > count
    right, stated = reliability().get(cause.name, (0, 0))
    weak = right < LEAST_RIGHT * stated
    confidence = "possible" if others or unsaid or few or weak else "sure" if cause.sure else "likely"
    return Answer(cause.name, cause.text(best.pattern), cause.look, confidence, tuple(f for f, _ in meant), others)
