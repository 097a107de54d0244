# SPDX-License-Identifier: Apache-2.0
"""What a module read and what it has: the dumped tensors from which its output can be computed again."""

from __future__ import annotations

import itertools

import numpy as np

from anyrank.explain import known
from anyrank.explain.patterns import Parts
from anyrank.explain.tensors import READ, Array, Case, Name

Named = tuple[str, Array]


def earlier(case: Case) -> list[str]:
    """Outputs of modules that ran before the case's in its step, in the dump's order, but for those that differ between
    the runs. A dump that does not keep its order by execution has those of later modules too."""
    return [text for text in known.earlier(case)[::-1] if (name := Name.of(text)).kind == "fwd"
            and name.step == case.name.step and (not case.runs.same or text in case.runs.same
                                                 or text not in case.runs.other)]


def parameter_names(case: Case, stem: str) -> list[str]:
    """Names under which a parameter's value in the case's step may be dumped."""
    step = case.name.step
    return [str(Name(stem, "new", step - 1))] if step > 1 else [str(Name(stem, kind, 1)) for kind in ("init", "weight")]


def parameter(case: Case, stem: str) -> Array | None:
    """The reference's value of a parameter in the case's step."""
    return next((case.runs.reference[name] for name in parameter_names(case, stem) if name in case.runs.reference),
                None)


def parameters(case: Case, module: str) -> list[str]:
    """Names of a module's own parameters, without their kinds."""
    return list(dict.fromkeys(name.stem for name in map(Name.of, case.runs.reference)
                              if name.kind in ("init", "weight") and name.module == module and "." in name.stem))


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
    arrays = ((name, reference[name]) for name in reversed(earlier(case)) if not READ.search(Name.of(name).stem))
    return list(itertools.islice(((name, x) for name, x in arrays if x.dtype.kind == "f" and x.ndim and x.size == size
                                  and x.shape[-1] == (width or x.shape[-1])), most))


def where_wrong(case: Case, expected: Array) -> Parts:
    """What each copy is expected to be where only some ranks have a fault: those of which something differs."""
    return [[(expected if any(case.differs(values, b).any() for b, values in zip(copy.boxes, copy.values))
              else case.ref)[box] for box in copy.boxes] for copy in case.copies]


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
