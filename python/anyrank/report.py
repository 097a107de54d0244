# SPDX-License-Identifier: Apache-2.0
"""What the commands found, as values: a dataclass for the JSON of each.

A field is None, or empty, where this version of the command does not have it; what only a later version has is in
`data`, the JSON as it was written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import typing
import webbrowser

from anyrank import _html
from anyrank._errors import AnyrankError

_T = typing.TypeVar("_T")
Json = typing.Dict[str, typing.Any]
Value = typing.Union[float, int, str, bool, None]  # of an element: a number, or what JSON has for complex ones

_SPECIAL = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _numbers(value: typing.Any) -> typing.Any:
    """JSON has no NaN and no infinities: they are texts there."""
    if isinstance(value, list):
        return tuple(_numbers(entry) for entry in value)
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def _field(key: str | None = None, converter: typing.Callable[[typing.Any], typing.Any] = _numbers,
           default: typing.Any = None) -> typing.Any:
    """Declares a field of the JSON: its key, if it is not the field's name, and its converter."""
    return dataclasses.field(default=default, metadata={"key": key, "make": converter})


def _verbatim(value: typing.Any) -> typing.Any:
    return value


def _many(converter: typing.Callable[[typing.Any], _T]) -> typing.Callable[[typing.Any], tuple[_T, ...]]:
    return lambda rows: tuple(converter(row) for row in rows)


def _build(kind: type[_T], source: Json, **overrides: typing.Any) -> _T:
    values = {**overrides, "data": source}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        key = field.metadata.get("key") or field.name
        if field.name not in overrides and source.get(key) is not None and "make" in field.metadata:
            values[field.name] = field.metadata["make"](source[key])
    return kind(**values)


def _row(kind: type[_T]) -> typing.Callable[[Json], _T]:
    return lambda source: _build(kind, source)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that differs. Indices are of the full tensor."""

    tensor: str = _field(converter=_verbatim, default="")
    state: str = _field(default="different")  #: different, shape, dtype, replicas (copies), missing or unexpected
    pass_: str = _field("pass", default="")  #: of the names of tensors (models.md): forward, backward, ..
    step: int = _field(default=1)
    dtype: str | None = _field()
    other_dtype: str | None = _field()
    shape: tuple[int, ...] = _field(default=())
    other_shape: tuple[int, ...] = _field(default=())
    elements: int = _field(default=0)
    elements_different: int = _field(default=0)  #: by the rule
    bits_different: int | None = _field()
    max_abs: float | None = _field()  #: largest |other - reference|
    max_rel: float | None = _field()
    max_ulp: float | None = _field()  #: most steps of the reference's dtype
    rms: float | None = _field()
    rms_reference: float | None = _field()
    max_reference: float | None = _field()
    cosine: float | None = _field()
    scale: float | None = _field()  #: the factor that fits best
    factor_allowed: float | None = _field()  #: how far rounding leaves it from 1; 0: not judged
    nan: tuple[int, ...] = _field(default=())  #: elements of the reference, of the other
    inf: tuple[int, ...] = _field(default=())
    allowed: float | None = _field()  #: what the rule allows the worst element
    ratio: float | None = _field()  #: worst difference over what is allowed
    index: tuple[int, ...] = _field(default=())  #: of the worst element
    reference: Value = _field()  #: its value there, and
    actual: Value = _field()  #: here
    first_index: tuple[int, ...] = _field(default=())
    first_reference: Value = _field()
    first_actual: Value = _field()
    rank: int | None = _field()  #: that holds the first element, where one does
    ranks: tuple[int, ...] = _field(default=())  #: whose copies differ
    copies_of: str | None = _field()
    pattern: str = _field(converter=_verbatim, default="")
    hint: str = _field(converter=_verbatim, default="")
    cause: str | None = _field(converter=_verbatim)  #: of causes.md
    confidence: str = _field(converter=_verbatim, default="")  #: sure, likely or possible
    look: str = _field("look_at", converter=_verbatim, default="")  #: what to look at in the program
    evidence: Json = _field(converter=dict, default=None)
    data: Json = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def off_by_factor(self) -> bool:
        """Returns whether each element is within the rule although the factor of all together is not."""
        return bool(self.scale is not None and self.factor_allowed and abs(self.scale - 1) > self.factor_allowed)


@dataclasses.dataclass(frozen=True)
class Report:
    """What every command's result has. It is true where the command found the same: bool(report) is report.ok."""

    command: str = _field(default="")
    version: str = _field(default="")
    result: str = _field(default="")  #: in the command's word: same, different, clean, ..
    exit_status: int = 0
    text: str = dataclasses.field(default="", repr=False)  #: what the command prints
    data: Json = dataclasses.field(default_factory=dict, repr=False)  #: its JSON
    words: tuple[str, ...] = dataclasses.field(default=(), repr=False)  #: its command line
    keeps: object = dataclasses.field(default=None, repr=False, compare=False)  # folders that the words name

    @property
    def ok(self) -> bool:
        """Returns whether the command's exit status is 0: no difference, nothing found."""
        return self.exit_status == 0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self.text.rstrip("\n")

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the command's JSON, and writes it to a file if a path is given."""
        text = json.dumps(self.data, indent=2)
        if path is not None:
            pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows for a notebook; without columns, the text is shown."""
        return [], []

    def _title(self) -> str:
        return self.text.rstrip("\n").rsplit("\n", 1)[-1]

    def _repr_html_(self) -> str:
        columns, rows = self._table()
        return _html.table(self._title(), self.ok, columns, rows, str(self))

    def html(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the report as a page that needs no network, and returns its path."""
        page = pathlib.Path(path)
        page.write_text(_html.page(f"anyrank {self.command}", self._repr_html_()), encoding="utf-8")
        return page

    def open_html(self) -> pathlib.Path:
        """Writes the page to a folder of temporary files and opens it in the browser. Returns its path."""
        page = self.html(_html.temporary_page(self.command))
        webbrowser.open(page.as_uri())
        return page


@dataclasses.dataclass(frozen=True)
class VerifyReport(Report):
    """Two dumps, compared (verify.md)."""

    reference: str = _field(converter=_verbatim, default="")
    other: str = _field(converter=_verbatim, default="")
    rule: Json = _field(converter=dict, default=None)
    compared: int = _field("tensors", default=0)  #: tensors that both have
    different: int = _field("tensors_different", default=0)
    elements: int = _field(default=0)
    elements_different: int = _field(default=0)
    missing: tuple[str, ...] = _field(converter=tuple, default=())  #: only in the reference
    unexpected: tuple[str, ...] = _field(converter=tuple, default=())  #: only in the other
    lost_gradients: tuple[str, ...] = _field(converter=tuple, default=())  #: of these, of parameters that both have
    unjudged: tuple[str, ...] = _field(converter=tuple, default=())  #: the same by allowances as large as they are
    left_out: tuple[int, ...] = _field(default=(0, 0))  #: with common=True: tensors of one side alone
    ragged: int = _field("tensors_ragged", default=0)  #: without a place, as of other lengths: not compared
    reordered: int = _field("tensors_reordered", default=0)  #: samples in another order: compared one by one
    unwritten: tuple[str, ...] = _field(
        converter=tuple, default=("", "")
    )  #: of each run, in no file: as its capture says
    routed: int = _field("tensors_routed", default=0)  #: within experts, rows by rank or micro-batch: not compared
    renamed: int = _field("tensors_renamed", default=0)
    copies_different: int = _field("tensors_with_different_copies", default=0)
    drifting: int = _field("tensors_drifting", default=0)
    elements_doubted: int = _field(default=0)
    ranks: int = _field(default=0)
    seconds: float | None = _field()
    first: Difference | None = _field(converter=_row(Difference))  #: in execution order: nearest to the fault
    explanation: Json | None = _field(converter=dict)  #: of the first: confidence, look, ranks, lines, .. (verify.md)
    tensors: tuple[Difference, ...] = _field("worst", converter=_many(_row(Difference)), default=())  #: the worst first

    def html(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the command's own report as a page, for which it runs once more, and returns its path. The inputs must
        still be there."""
        from anyrank._command import run_words

        page = pathlib.Path(path).resolve()
        words = [word for word in self.words[1:] if not word.startswith("--html=")]
        finished = run_words(self.command, [f"--html={page}", *words])
        if finished.data.get("result") != self.data.get("result"):
            raise AnyrankError(f"anyrank {self.command}: the inputs have changed since the report was made: its result "
                               f"was {self.result}, that of the page {page} is {finished.data.get('result')}")
        return page

    def _table(self) -> tuple[list[str], list[list[str]]]:
        columns = ["tensor", "dtype, shape", "different", "max abs", "max ulp", "worst at", "reference", "other",
                   "cause"]
        first = [] if self.first is None else [self.first]
        rows = [*first, *(row for row in self.tensors if first == [] or row.tensor != first[0].tensor)]
        return columns, [_html.difference_cells(row) for row in rows]


@dataclasses.dataclass(frozen=True)
class CheckedRun:
    """A layout of `check`, against one rank."""

    layout: Json = _field(converter=dict, default=None)
    result: str = _field(default="")  #: same, mispredicted (the bits are equal), vacuous, different or error
    ok: bool = _field("passed", default=False)  #: with strict_predictions=True mispredicted is not
    tensors: int = _field(default=0)
    tensors_different: int = _field(default=0)
    elements: int = _field(default=0)
    elements_different: int = _field(default=0)
    max_ulp: float | None = _field()
    seconds: float | None = _field()
    loss: tuple[float, ...] = _field(default=())
    weights_hash: str | None = _field()
    gradients_hash: str | None = _field()
    outputs_hash: str | None = _field()
    first: Difference | None = _field("first_difference", converter=_row(Difference))
    error: Json | None = _field(converter=dict)  #: {"message": .., "ranks": [..]} of a run that did not end
    data: Json = dataclasses.field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Returns the layout as "dp=2 tp=4 sp"."""
        return _html.layout_name(self.layout)


@dataclasses.dataclass(frozen=True)
class CheckedModel:
    """A model of `check`."""

    name: str = _field(converter=_verbatim, default="")
    parameters: int = _field(default=0)
    weights: str = _field(default="")  #: fresh, or of the folder
    batch: int = _field(default=0)
    seq: int = _field(default=0)
    steps: int = _field(default=0)
    baseline: Json = _field(converter=dict, default=None)  #: of one rank: losses and hashes
    runs: tuple[CheckedRun, ...] = _field(converter=_many(_row(CheckedRun)), default=())
    notes: tuple[str, ...] = _field(converter=tuple, default=())
    data: Json = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class CheckReport(Report):
    """Training steps under layouts, compared with one rank's (check.md)."""

    numerics: str = _field(default="exact")
    hash: str | None = _field()  #: of all outputs, gradients and weights, the same on every machine
    models: tuple[CheckedModel, ...] = _field(converter=_many(_row(CheckedModel)), default=())

    @property
    def runs(self) -> tuple[CheckedRun, ...]:
        """Returns the layouts of all models."""
        return tuple(run for model in self.models for run in model.runs)

    @property
    def first(self) -> Difference | None:
        """Returns the first difference of the first layout that has one."""
        return next((run.first for run in self.runs if run.first is not None), None)

    @property
    def tensors(self) -> tuple[Difference, ...]:
        """Returns the first difference of each layout that has one."""
        return tuple(run.first for run in self.runs if run.first is not None)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        columns = ["model", "layout", "tensors", "elements", "different", "worst ulp", "time", "result",
                   "first difference", "cause"]
        return columns, [[model.name, run.name, f"{run.tensors:,}", f"{run.elements:,}", f"{run.elements_different:,}",
                          _html.number(run.max_ulp), _html.seconds(run.seconds), run.result,
                          run.first.tensor if run.first else (run.error or {}).get("message", ""),
                          (run.first.cause or run.first.hint) if run.first else ""]
                         for model in self.models for run in model.runs]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What `lint` found at one place of a step, or in the same place of several layers."""

    rule: str = _field(default="")
    text: str = _field(default="")
    module: str | None = _field(converter=_verbatim)
    operation: str = _field(default="")
    pass_: str = _field("pass", default="")
    layers: tuple[int, ...] = _field(default=())  #: the first and the last
    axis: str | None = _field()
    has: str = _field(default="")
    needs: str = _field(default="")
    repair: str = _field(default="")
    data: Json = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class LintReport(Report):
    """The types of a step's values under a layout (planner.md)."""

    model: str = _field(converter=_verbatim, default="")
    layout: Json = _field(converter=dict, default=None)
    operations: int = _field(default=0)
    values: int = _field(default=0)
    findings: tuple[Finding, ...] = _field(converter=_many(_row(Finding)), default=())
    notes: tuple[str, ...] = _field(converter=tuple, default=())

    def _title(self) -> str:
        return self.text.split("\n", 1)[0]

    @property
    def first(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    def _table(self) -> tuple[list[str], list[list[str]]]:
        return (["rule", "module", "operation", "pass", "axis", "has", "needs", "repair"],
                [[f.rule, f.module or "", f.operation, f.pass_, f.axis or "", f.has, f.needs, f.repair]
                 for f in self.findings])


@dataclasses.dataclass(frozen=True)
class PlannedLayout:
    """A layout with its predicted time and memory. seconds, bytes: of a step, and of a rank."""

    name: str = _field(default="")
    layout: Json = _field(converter=dict, default=None)
    legal: bool = _field(default=False)
    reason: str | None = _field()  #: why it is not
    fits: bool | None = _field()
    seconds: float | None = _field()
    bytes: int | None = _field()
    tokens_per_second: float | None = _field()
    mfu: float | None = _field()
    bound: str | None = _field()
    advice: str | None = _field()
    data: Json = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class PlanReport(Report):
    """What layouts of a model take (planner.md); with flow=True, what each rank does (planner.md)."""

    model: str = _field(converter=_verbatim, default="")
    parameters: int | None = _field()
    gpus: int | None = _field()
    cluster: Json | None = _field(converter=dict)
    layouts: tuple[PlannedLayout, ...] = _field(converter=_many(_row(PlannedLayout)), default=())  #: the best first
    rows: tuple[Json, ...] = _field(converter=tuple, default=())  #: of table=".."
    notes: tuple[str, ...] = _field(converter=tuple, default=())

    @property
    def best(self) -> PlannedLayout | None:
        return next((layout for layout in self.layouts if layout.legal), None)

    def html(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the layouts as a page to filter and sort; of one layout's flow and of a table, what the text says."""
        from anyrank.page import text_of

        if not (self.layouts and self.gpus):
            return super().html(path)
        page = pathlib.Path(path)
        page.write_text(text_of(self.data), encoding="utf-8")
        return page

    def _title(self) -> str:
        return self.text.split("\n", 1)[0]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows = [[l.name, _html.seconds(l.seconds), _html.bytes_of(l.bytes), _html.number(l.tokens_per_second),
                 "" if l.mfu is None else f"{100 * l.mfu:.1f} %", l.bound or l.reason or ""] for l in self.layouts]
        return (["layout", "step", "memory", "tokens/s", "MFU", "bound by"] if rows else []), rows


@dataclasses.dataclass(frozen=True)
class TrainReport(Report):
    """A training run (train.md)."""

    model: str = _field(converter=_verbatim, default="")
    parameters: int = _field(default=0)
    layout: Json = _field(converter=dict, default=None)
    first_step: int = _field(default=1)
    steps: int = _field(default=0)
    loss: tuple[float, ...] = _field(default=())
    gradient_norms: tuple[float, ...] = _field(default=())
    lr: tuple[float, ...] = _field(default=())
    seconds: float | None = _field()
    tokens_per_second: float | None = _field()
    weights_hash: str | None = _field()  #: the same for every layout
    checkpoint: str | None = _field(converter=_verbatim)
    notes: tuple[str, ...] = _field(converter=tuple, default=())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        numbers = range(self.first_step, self.first_step + len(self.loss))
        steps = list(zip(numbers, self.loss, self.gradient_norms, self.lr))
        every = max(1, len(steps) // 40)
        return (["step", "loss", "norm", "lr"],
                [[str(n), f"{loss:.6f}", f"{norm:.4f}", f"{lr:.3g}"] for n, loss, norm, lr in steps
                 if (n - self.first_step) % every == 0 or n == steps[-1][0]])


@dataclasses.dataclass(frozen=True)
class GradsReport(Report):
    """A forward and backward pass whose tensors are in files (check.md)."""

    numerics: str = _field(default="exact")
    layout: Json = _field(converter=dict, default=None)
    loss: tuple[float, ...] = _field(default=())
    outputs_hash: str | None = _field()
    tensors: int = _field(default=0)
    weights: str | None = _field()
    files: tuple[str, ...] = _field(converter=tuple, default=())
    seconds: float | None = _field()
    notes: tuple[str, ...] = _field(converter=tuple, default=())
    against: Json | None = _field(converter=dict)  #: of against=: `device`, and what verify says of the two runs


@dataclasses.dataclass(frozen=True)
class LogprobsReport(Report):
    """Log-probabilities of given tokens, and whose are off (logprobs.md)."""

    numerics: str = _field(default="exact")  #: or native, binary64
    weights: str | None = _field()
    sequences: int = _field(default=0)
    tokens: int = _field(default=0)
    mean_logprob: float | None = _field()
    mean_entropy: float | None = _field()
    hash: str | None = _field()  #: the same for every batch, packing and layout
    trainer: Json | None = _field(converter=dict)  #: off, rms, cause, says, ..
    rollout: Json | None = _field(converter=dict)
    seconds: float | None = _field()


def report_of(kind: type[_T], finished: typing.Any, keeps: object = None) -> _T:
    """Returns the report of a command that ran (anyrank._command.Finished)."""
    return _build(kind, finished.data, exit_status=finished.exit_status, text=finished.text,
                  words=finished.words, keeps=keeps)
