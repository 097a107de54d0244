# SPDX-License-Identifier: Apache-2.0
"""What is known around a tensor that nothing explains: which of the things that it is made of are the same in both
runs, and which differ. Only what both dumps have is spoken of."""

from __future__ import annotations

import dataclasses
import re
import typing

from anyrank.explain.known import earlier
from anyrank.explain.tensors import Case, Name
from anyrank.explain.words import some

_INPUT = re.compile(r"in(\.\w+)?")  # what a module PATH reads is recorded as PATH.in, or PATH.in.0 ..
MOST = 3  # names in a sentence


@dataclasses.dataclass(frozen=True)
class Source:
    """Tensors that another is made of. what: as "its weights". plural: whether that is a plural."""

    what: str
    plural: bool
    same: tuple[str, ...]
    differ: tuple[str, ...]

    @classmethod
    def of(cls, case: Case, what: str, names: typing.Iterable[str], plural: bool = False) -> Source:
        both = [name for name in names if name in case.runs.reference and name in case.runs.other]
        return cls(what, plural, tuple(name for name in both if name in case.runs.same),
                   tuple(name for name in both if name not in case.runs.same))

    @property
    def known(self) -> bool:
        return bool(self.same or self.differ)

    @property
    def is_same(self) -> bool:
        return bool(self.same) and not self.differ

    def __str__(self) -> str:
        if self.differ:
            rest = f", of {len(self.same) + len(self.differ)}" if self.same else ""
            return f"{self.what} {'differ' if self.plural else 'differs'} ({some(self.differ, MOST)}{rest})"
        return f"{self.what} {'are' if self.plural else 'is'} the same ({some(self.same, MOST)})"


def _reads(case: Case, module: str) -> Source:
    """What a module reads, where that is recorded."""
    start = f"{module}." if module else ""
    names = (name for name in case.runs.reference if (own := Name.of(name)).kind == "fwd" and own.step == case.name.step
             and own.stem.startswith(start) and _INPUT.fullmatch(own.stem[len(start):]))
    return Source.of(case, "what it reads", names)


def _weights(case: Case, module: str) -> Source:
    """The parameters of a module and of those within it, as they were in this step."""
    kind, step = ("init", 1) if case.name.step == 1 else ("new", case.name.step - 1)
    return Source.of(case, "its weights", (name for name in case.runs.reference if (own := Name.of(name)).kind == kind
                                           and own.step == step and own.stem.startswith(f"{module}.")), True)


def _before(case: Case) -> Source:
    """The last tensor of the same kind and step before this one."""
    names = (name for name in earlier(case) if (own := Name.of(name)).kind == case.name.kind
             and own.step == case.name.step and name in case.runs.other)
    nearest = next(names, "")
    what = "the recorded output before it" if case.name.kind == "fwd" else "the recorded gradient before it"
    return Source.of(case, what, [nearest] if nearest else [])


def _sources(case: Case) -> tuple[list[Source], str]:
    """What the tensor is made of, and where to look if all of that is recorded and the same."""
    name, module = case.name, case.name.module
    if name.kind == "fwd":
        reads, weights = _reads(case, module), _weights(case, module)
        look = "look at this module's own computation, or the collective after it"
        return [reads if reads.known else _before(case), weights], look if reads.is_same else ""
    if name.kind == "bwd":
        output = Source.of(case, "the module's output", [name.with_kind("fwd")])
        return [_before(case), output, _weights(case, module)], ""
    if name.kind == "grad":
        others = (text for text in case.runs.reference if (own := Name.of(text)).kind == "grad" and own.module == module
                  and own.step == name.step and text != str(name))
        gradient = Source.of(case, f"the gradient of {module}", [str(Name(module, "bwd", name.step))])
        return [_reads(case, module), gradient, Source.of(case, "the module's other gradients", others, True)], ""
    if name.kind == "new":
        before = name.with_kind("new", name.step - 1) if name.step > 1 else name.with_kind("init", 1)
        gradient = Source.of(case, "its gradient", [name.with_kind("grad")])
        moments = Source.of(case, "its moments", [name.with_kind(kind) for kind in ("m", "v")], True)
        look = "look at the step itself: its rate, its decay, and what is written back"
        return [gradient, moments, Source.of(case, "the weight before the step", [before])], (
            look if gradient.is_same else "")
    return [], ""


def around(case: Case) -> str:
    """A sentence, or ""."""
    sources, look = _sources(case)
    known = [source for source in sources if source.known]
    said = [str(source) for source in known]
    if case.name.kind == "fwd" and not look and known and sources[0].what != "what it reads":
        said.append("what it reads is not recorded")
    if look and all(source.is_same for source in known):
        said.append(look)
    return "; ".join(said)
