# SPDX-License-Identifier: Apache-2.0
"""What a module read and what it has: the dumped tensors from which its output can be computed again."""

from __future__ import annotations

import re

import numpy as np

from anyrank.explain.patterns import Parts
from anyrank.explain.tensors import Array, Case, Name

Named = tuple[str, Array]
_INPUT = re.compile(r"(.+)\.in(\.\w+)?")


def earlier(case: Case) -> list[str]:
    """Outputs of modules that ran before the case's in its step, in the dump's order, of those that are the same in
    both runs. A dump that does not keep its order by execution has those of later modules too."""
    found = []
    for text in case.runs.reference:
        name = Name.of(text)
        if text == str(case.name):
            break
        if name.kind == "fwd" and name.step == case.name.step and (not case.runs.same or text in case.runs.same):
            found.append(text)
    return found


def parameter(case: Case, stem: str) -> Array | None:
    """The reference's value of a parameter in the case's step."""
    step = case.name.step
    names = [Name(stem, "new", step - 1)] if step > 1 else [Name(stem, "init", 1), Name(stem, "weight", 1)]
    for name in map(str, names):
        if name in case.runs.reference:
            return case.runs.reference[name]
    return None


def parameters(case: Case, module: str) -> list[str]:
    """Names of a module's own parameters, without their kinds."""
    prefix = module + "."
    found: dict[str, None] = {}
    for text in case.runs.reference:
        name = Name.of(text)
        if name.kind in ("init", "weight") and name.stem.startswith(prefix) and "." not in name.stem[len(prefix):]:
            found[name.stem] = None
    return list(found)


def inputs(case: Case, width: int = 0, most: int = 12) -> list[Named]:
    """What the module may have read, as (name, array): its dumped first input alone where there is one; else the
    outputs before it, the last one first, of the last dimension `width` and as many rows as the output has; 0:
    of its size."""
    reference = case.runs.reference
    read = case.runs.facts[0].inputs.get(case.name.stem, {}).get("0")
    own = [str(Name(f"{case.name.stem}.in", "fwd", case.name.step)), *((read,) if read else ())]
    for name in own:
        if name in reference:
            return [(name, reference[name])]
    size = int(np.prod(case.shape[:-1])) * width if width else case.reference.size
    found = []
    for name in reversed(earlier(case)):
        array = reference[name]
        fits = array.dtype.kind == "f" and array.ndim and array.size == size
        if fits and array.shape[-1] == (width or array.shape[-1]) and not _INPUT.fullmatch(Name.of(name).stem):
            found.append((name, array))
            if len(found) == most:
                break
    return found


def where_wrong(case: Case, expected: Array) -> Parts:
    """What each copy is expected to be where only some ranks have a fault: those of which something differs."""
    found = []
    for copy in case.copies:
        differs = any(case.differs(values, box).any() for box, values in zip(copy.boxes, copy.values))
        found.append([(expected if differs else case.ref)[box] for box in copy.boxes])
    return found


def thinned(case: Case) -> bool:
    """Whether the case has a part of its tensor's elements alone, which other tensors do not match."""
    whole = case.runs.reference.get(str(case.name))
    return whole is not None and whole.size > case.reference.size


def rows_of(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def left(found: Array, wanted: Array, against: Array | None = None) -> float:
    """Root mean square of found - wanted in parts of that of `against`, or of what is wanted."""
    size = float(np.linalg.norm(wanted if against is None else against))
    apart = float(np.linalg.norm(found - wanted))
    return apart / size if size > 0.0 else (0.0 if apart == 0.0 else np.inf)


def valid(case: Case) -> float:
    """How much of the reference a recipe may leave and still be looked at no further: rounding of its steps."""
    return min(256.0 * case.unit, 2e-3)


# What a recipe of steps in 16 bits leaves: a change of it, not the recipe itself, is added to the reference.
USABLE = 0.03
