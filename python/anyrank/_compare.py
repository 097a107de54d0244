# SPDX-License-Identifier: Apache-2.0
"""compare_ranks: a parallel model on N ranks of this machine against the same one on one rank."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import tempfile
import textwrap
import typing
import warnings

from anyrank import ranks
from anyrank._errors import AnyrankError
from anyrank.testing import NotSame

if typing.TYPE_CHECKING:
    from anyrank.report import Difference, VerifyReport

Build = typing.Callable[[typing.Any], typing.Any]
Step = typing.Callable[[typing.Any, typing.Any], typing.Any]
Layout = typing.Mapping[str, int]

WEAK = 0.01  # of a tensor's largest element: where rounding explains more, a bug may hide
WIDTH = 110
NAMES = 6


class RanksDiffer(NotSame):
    """Ranks that do not compute what one rank does. `report` is what `anyrank.verify` found."""

    __module__ = "anyrank"


class Compared(typing.NamedTuple):
    """A comparison that found no difference. worst: the largest difference over what is allowed, and its tensor; weak:
    tensors in which rounding explains more than a hundredth of the largest element; allowed: what each tensor may be
    off, and its largest element. Both are empty where a rule was given."""

    report: VerifyReport
    worst: float
    tensor: str
    weak: tuple[str, ...]
    allowed: dict[str, typing.Any]


class _Run(typing.NamedTuple):
    """What every rank of a run is told."""

    build: Build
    step: Step
    layout: Layout
    seed: int
    spec: typing.Any
    capture: dict[str, typing.Any]


def compare_ranks(build: Build, step: Step, ranks: int | None = None, *, layout: Layout | None = None, seed: int = 0,
                  timeout: float | None = ranks.TIMEOUT, spec: typing.Any = None, bits: bool = False,
                  rtol: float | None = None, atol: float | None = None, only: str | typing.Sequence[str] | None = None,
                  ignore: str | typing.Sequence[str] | None = None, common: bool = False,
                  steps: typing.Any = None, threads: int = 1, env: typing.Mapping[str, str] | None = None,
                  folder: str | os.PathLike[str] | None = None, repeat: str = "",
                  dimensions: typing.Collection[str] = ()) -> Compared:
    """Raises RanksDiffer, an AssertionError, unless N ranks compute what one rank does: every activation, gradient, and
    weight, before the step and after it.

        def build(mesh):                          # mesh: a DeviceMesh, None on one rank
            model = MLP()                         # the same weights on every rank: the seed is
            return parallelize(model, mesh) if mesh else model

        def step(model, mesh):
            model(torch.randn(8, 16)).square().mean().backward()

        anyrank.compare_ranks(build, step, ranks=4)

    build       returns the module, or (module, optimizer)
    step        forward, loss, backward, and the update if that is to be compared too
    ranks       so many, along the mesh's dimension "tp"; or
    layout      the mesh, {"dp": 2, "tp": 2}, outermost dimension first; default: two ranks
    spec        where plain tensors of hand-written layers are in the full ones (pytorch.md); DTensors know
    bits, rtol, atol  the rule. Default: what rounding explains, which is measured: one rank runs three times more, with
                errors as large as rounding in each operation (pytest.md)
    only, ignore, common  which tensors are compared (`anyrank verify`)
    steps       which steps are captured, where `step` has several
    folder      keeps the dumps, in one/ and ranks/; default: a temporary one, which stays where ranks differ, as the
                message says, and is removed otherwise
    dimensions  names that spec may speak of besides the layout's: those of other layouts that it serves

    Raises RanksFailed where a rank raises, dies or hangs (spawn has seed, timeout, threads and env), AnyrankError for
    what cannot be captured, where no gradient would be compared, and where rounding is amplified so much that nothing
    can be judged by it. Warns where a part of spec says nothing.
    """
    __tracebackhide__ = True
    sizes = layout_of(ranks, layout)
    if math.prod(sizes.values()) == 1:
        raise ValueError(f"{name_of(sizes)} would be compared with itself: give 2 or more")
    warning_texts = _said_in_vain(spec, sizes, dimensions)
    if bits + (rtol is not None or atol is not None) > 1:
        raise ValueError("bits, or rtol and atol: give at most one rule")
    dump_folder = (
        pathlib.Path(folder) if folder is not None else pathlib.Path(tempfile.mkdtemp(prefix="anyrank-compare-"))
    )
    options = {key: value for key, value in (("steps", steps), ("only", only)) if value is not None}
    from anyrank.runs import verify

    run = _Run(build, step, sizes, seed, spec, options)
    start = {"seed": seed, "timeout": timeout, "threads": threads, "env": env}
    rule: dict[str, typing.Any] = {"rtol": rtol, "atol": atol} if rtol is not None or atol is not None else {}
    allowed: dict[str, typing.Any] = {}
    is_kept = folder is not None
    try:
        warning_texts += _one_rank(run, dump_folder / "one", start)
        if not rule and not bits:
            allowed = _allowances(run, dump_folder, start)
            rule = {"sensitivity": dump_folder / "allowed.safetensors"}
        warning_texts += _ranks(run, dump_folder / "ranks", start)
        for text in dict.fromkeys(warning_texts):
            warnings.warn(text, stacklevel=2)
        judge = functools.partial(
            verify, dump_folder / "one", dump_folder / "ranks", ignore=ignore or [], common=common, **rule
        )
        report = judge()
        if report.unjudged:
            raise AnyrankError(cannot_judge(report, allowed))
        if not report.ok:
            report = _with_operations(run, dump_folder, start, judge, report)
            words = [
                "anyrank",
                "verify",
                str(dump_folder / "one"),
                str(dump_folder / "ranks"),
                *_words(rule, ignore, common),
            ]
            dump_note = "" if folder is not None else f"{dump_folder}: both runs, for `look`; nothing else removes them"
            raise RanksDiffer(explain(report, sizes, seed, repeat, shlex.join(words), dump_note), report)
    except RanksDiffer:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(dump_folder, ignore_errors=True)
    weak = tuple(name for name, allowance in allowed.items() if allowance.allowed > WEAK * allowance.largest > 0)
    worst, tensor = _closest(report)
    return Compared(report, worst, tensor, weak, allowed)


def layout_of(ranks: int | None, layout: Layout | None) -> dict[str, int]:
    """Returns the mesh, which either of the two may state."""
    if ranks is not None and layout is not None:
        raise ValueError("ranks, or the layout that has them: give one of the two")
    sizes = dict(layout) if layout is not None else {"tp": 2 if ranks is None else ranks}
    for name, size in sizes.items():
        if not isinstance(name, str) or not name or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"layout {sizes}: {name!r} has the size {size!r}; a layout is as {{'dp': 2, 'tp': 4}}")
    if not sizes:
        raise ValueError("layout {} has no dimension; a layout is as {'dp': 2, 'tp': 4}")
    return sizes


def _said_in_vain(raw_spec: typing.Any, layout: Layout, dimensions: typing.Collection[str]) -> list[str]:
    """Warns of a spec that names dimensions which no layout has; refuses a spec that cannot be read."""
    __tracebackhide__ = True
    from anyrank.capture._model import shares_samples
    from anyrank.capture._spec import Spec

    try:
        spec = Spec(raw_spec)
        mesh = spec.mesh or dict(layout)
        spec.check(mesh)
    except AnyrankError as error:
        raise AnyrankError(str(error)) from None  # without the frames that found it
    known_dimensions = {*mesh, *dimensions}
    if any(map(shares_samples, known_dimensions)):
        known_dimensions.add("dp")  # means all of those
    absent: dict[str, list[str]] = {}
    for spec_part, name in spec.named():
        if name not in known_dimensions:
            absent.setdefault(name, []).append(spec_part)
    return [f"{spec.source}: {whats[0]}{f' and {len(whats) - 1} more' if len(whats) > 1 else ''}: no effect, as the "
            f"layout {mesh} has no dimension {name!r}; if the spec serves other layouts too, give it the size 1 here"
            for name, whats in absent.items()]


# --- runs -------------------------------------------------------------------------------------------------------------


def _captured(rank: int, run: _Run, folder: pathlib.Path, alone: bool) -> list[str]:
    """Captures a rank's run into a folder. Returns its warnings."""
    return _run(run, folder, 0, alone)


def _captured_again(rank: int, run: _Run, folders: typing.Sequence[pathlib.Path]) -> None:
    """Captures one of several runs of one rank: the first without errors, the others with errors."""
    _run(run, folders[rank], rank, True)


def _run(run: _Run, folder: pathlib.Path, draw: int, alone: bool) -> list[str]:
    """draw: the seed of the errors; 0: none."""
    import torch

    from anyrank.capture import Capture
    from anyrank.rounding import Noise

    mesh = None
    if not alone:
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", tuple(run.layout.values()), mesh_dim_names=tuple(run.layout))
    built = run.build(mesh)
    model, optimizer = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"build returned a {type(model).__name__}: it has to return a torch.nn.Module, or the module "
                        "and its optimizer")
    torch.manual_seed(run.seed)  # whatever build has drawn
    spec = _spec(run.spec, {name: 1 if alone else size for name, size in run.layout.items()})
    with Capture(model, folder, optimizer, spec=spec, **run.capture) as capture:
        with Noise(draw) if draw else contextlib.nullcontext():
            run.step(model, mesh)
        if capture.passes == 0:
            raise AnyrankError("step made no forward pass of the model that build returned, so there is nothing to "
                               "compare: does it call another model, or a copy of this one?")
    if capture.without_backward:
        raise AnyrankError("step called no backward(), so no gradient would be compared: call it, or call the model "
                           "under torch.no_grad() if only its outputs are meant")
    return capture.notes


def _spec(raw_spec: typing.Any, mesh: dict[str, int]) -> typing.Any:
    if isinstance(raw_spec, (str, os.PathLike)):
        raw_spec = json.loads(pathlib.Path(raw_spec).read_text(encoding="utf-8"))
    return {"mesh": mesh, **(raw_spec or {})}


def _failure(failed: ranks.RanksFailed, context: str) -> Exception:
    """Describes a rank's failure and its place. An error of anyrank is one line, without the rank's frames."""
    if isinstance(failed.exception, AnyrankError):
        return AnyrankError(f"{context}: {failed.exception}")
    return ranks.RanksFailed(f"{context}: {failed}", failed.kind, failed.rank, failed.exception)


def _one_rank(run: _Run, folder: pathlib.Path, start: dict[str, typing.Any]) -> list[str]:
    """Runs one rank; its failure is the plain model's."""
    __tracebackhide__ = True
    try:
        warning_texts: list[str] = ranks.spawn(1, _captured, run, folder, True, **start)[0]
    except ranks.RanksFailed as failed:
        raise _failure(failed, "one rank, which the others are compared with, failed") from None
    return warning_texts


def _ranks(run: _Run, folder: pathlib.Path, start: dict[str, typing.Any]) -> list[str]:
    __tracebackhide__ = True
    try:
        of_all = ranks.spawn(math.prod(run.layout.values()), _captured, run, folder, False, **start)
    except ranks.RanksFailed as failed:
        raise _failure(failed, name_of(run.layout)) from None
    return [text for warning_texts in of_all for text in warning_texts]


def _with_operations(run: _Run, dump_folder: pathlib.Path, start: dict[str, typing.Any],
                     verify: typing.Callable[[], VerifyReport], report: VerifyReport) -> VerifyReport:
    """Repeats both runs with a record of their operations and returns the new report, which names the first wrong
    operation. Returns the old report if that is impossible."""
    from anyrank.capture._operations import FOLDER

    recorded_run = run._replace(capture={**run.capture, "operations": True})
    try:
        for name, runner in (("one", _one_rank), ("ranks", _ranks)):
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), (
                    contextlib.redirect_stderr(io.StringIO())):  # what was printed and warned of already
                warnings.simplefilter("ignore")
                runner(recorded_run, dump_folder / f"{name}-again", start)
            shutil.rmtree(dump_folder / name / FOLDER, ignore_errors=True)
            (dump_folder / f"{name}-again" / FOLDER).rename(dump_folder / name / FOLDER)
        return verify()
    except (OSError, AnyrankError, ranks.RanksFailed):
        return report
    finally:
        for name in ("one", "ranks"):
            shutil.rmtree(dump_folder / f"{name}-again", ignore_errors=True)


def _allowances(run: _Run, dump_folder: pathlib.Path, start: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Measures what rounding explains, and writes it to allowed.safetensors."""
    __tracebackhide__ = True
    from anyrank import rounding
    from anyrank.runs import verify

    repeat_folder, *draws = [dump_folder / f"again-{draw}" for draw in range(1 + rounding.DRAWS)]
    try:
        ranks.run(1 + rounding.DRAWS, _captured_again, (run, [repeat_folder, *draws]), alone=True, **start)
    except ranks.RanksFailed as failed:
        raise _failure(failed, "one rank runs well, but not with errors as large as rounding in each operation (give "
                               "rtol and atol, or bits=True, to do without)") from None
    report = verify(dump_folder / "one", repeat_folder)
    if not report.ok:
        name = report.first.tensor if report.first else ""
        raise AnyrankError(f"one rank has other values when it runs again, first in {name}: what build or step draws "
                           "does not come from the seed, so nothing can be compared")
    allowed = rounding.allowances(dump_folder / "one", draws, dump_folder / "allowed.safetensors")
    for path in (repeat_folder, *draws):
        shutil.rmtree(path)
    return allowed


# --- the failure's text -----------------------------------------------------------------------------------------------


def cannot_judge(report: VerifyReport, allowed: dict[str, typing.Any]) -> str:
    """Lists the tensors that may differ by as much as they are, with what to do about it."""
    shares = [f"{name} ({allowed[name].allowed / allowed[name].largest:.2g} of its largest element)"
              if name in allowed and allowed[name].largest > 0 else name for name in report.unjudged[:NAMES]]
    remainder_text = f" and {len(report.unjudged) - NAMES:,} more" if len(report.unjudged) > NAMES else ""
    return (
        f"cannot judge {len(report.unjudged):,} of {report.compared:,} tensors, which rounding alone may change by "
        f"as much as they are: {', '.join(shares)}{remainder_text}. The step amplifies rounding: it quantises, or "
        "chooses by values (experts, top-k). Fix the scale or the choice in the test, compare what goes into it "
        "(only=), or give rtol= and atol="
    )



def name_of(layout: Layout) -> str:
    """4 ranks (dp=2 tp=2)."""
    world = math.prod(layout.values())
    return f"{world} rank{'s' if world > 1 else ''} ({' '.join(f'{name}={size}' for name, size in layout.items())})"


def _words(rule: dict[str, typing.Any], ignore: typing.Any, common: bool) -> list[str]:
    words = [word for key, value in rule.items() if value is not None for word in (f"--{key}", str(value))]
    for glob in [ignore] if isinstance(ignore, str) else ignore or []:
        words += ["--ignore", glob]
    return words + ["--common"] * common


def _closest(report: VerifyReport) -> tuple[float, str]:
    """Returns the largest ratio of a difference to its allowance, and its tensor, in a report without a difference."""
    head, _, tail = report.text.partition("the worst difference is ")
    number, _, name = tail.partition(" of what is allowed, in ")
    return (float(number), name.split()[0]) if name else (0.0, "")


def explain(report: VerifyReport, layout: Layout, seed: int, repeat: str, verifying: str, dump_note: str = "") -> str:
    """Describes a difference: the cause, then tensor, rank and element, how to see it again, and where the files
    are."""
    difference = report.first
    if difference is None:
        return f"{name_of(layout)} do not compute what one rank does:\n{report}"
    lines = [f"{difference.tensor} {_KINDS[_state(difference)].replace('%', name_of(layout))}"
            + (f": {_short(difference.hint)}" if difference.hint else "")]
    operation = [("at" if i == 0 else "", text) for i, text in enumerate(
        (report.explanation or {}).get("operation", ()))]
    for label, text in [
        ("cause", _cause(difference)),
        *operation,
        ("check", difference.look),
        *_facts(difference, report, layout),
        ("seed", str(seed)),
        ("repeat", repeat),
        ("look", verifying + " --html report.html"),
        ("kept", dump_note),
    ]:
        if text:
            wrap = label not in ("repeat", "look", "kept")
            parts = textwrap.wrap(text, WIDTH - 11, break_long_words=False, break_on_hyphens=False) if wrap else [text]
            lines += [f"  {label if i == 0 else '':8} {part}" for i, part in enumerate(parts)]
    return "\n".join(lines)


_KINDS = {"different": "differs between one rank and %", "replicas": "has copies that differ from each other on %",
          "shape": "has another shape on one rank than on %", "dtype": "has another dtype on one rank than on %",
          "missing": "is there on one rank, and not on %", "unexpected": "is not there on one rank, but on %"}


def _state(difference: Difference) -> str:
    """Ranks with parts of which nothing is said hold copies that differ; what shows is their shape."""
    return "shape" if difference.other_shape and difference.other_shape != difference.shape else difference.state


def _short(hint: str) -> str:
    """Returns the hint's first clause, with whole code in it."""
    match = re.match("(?:`[^`]*`|(?!(?<!looks like): |; ).)*", hint)
    return match[0] if match else hint


def _cause(difference: Difference) -> str:
    sure = f" ({difference.confidence})" if difference.confidence else ""
    cause_label = f"{sure} [{difference.cause}]" if difference.cause and difference.cause != "unknown" else ""
    return difference.hint + cause_label if difference.hint else ""


def _facts(difference: Difference, report: VerifyReport, layout: Layout) -> typing.Iterator[tuple[str, str]]:
    several = report.different + len(report.missing) + len(report.unexpected)
    which = f", the first of {several:,} that differ in the order of the step" if several > 1 else ", the only one"
    yield "tensor", f"{difference.tensor} ({_meaning(difference)}){which}; {report.compared:,} are compared"
    state = _state(difference)
    if state == "different":
        alone = f"on rank {difference.rank} alone" in difference.pattern
        yield "rank", str(difference.rank) if alone else ""
        yield _judged(difference, report, f"on rank {difference.rank}" if alone else "here")
    elif state == "replicas":
        values = " and ".join(f"{_number(value)} on rank {rank}"
                              for value, rank in zip((difference.reference, difference.actual), difference.ranks))
        yield "element", f"{list(difference.index)}: {values}"
    elif state == "shape":
        yield "shape", f"{list(difference.shape)} on one rank, {list(difference.other_shape)} on {name_of(layout)}"
        yield "spec", _advice(difference, layout)
    elif state == "dtype":
        yield "dtype", f"{difference.dtype} on one rank, {difference.other_dtype} on {name_of(layout)}"
    elif difference.tensor in report.lost_gradients:
        yield "note", f'both have this parameter; ignore="{difference.tensor}" leaves its gradient out'
    elif state in ("missing", "unexpected"):
        yield "note", "common=True compares the tensors that both have; a module in both runs needs the same name"
    yield "pattern", difference.pattern
    yield "recorded", "; ".join((report.explanation or {}).get("differences", [])[:NAMES]) if (
        difference.cause == "unknown") else ""
    lost = [name for name in report.lost_gradients if name != difference.tensor]
    yield "lost", f"gradients of parameters that both have: {', '.join(lost[:NAMES])}" + (
        f", and {len(lost) - NAMES:,} more" if len(lost) > NAMES else "") if lost else ""
    other_names = [row.tensor for row in report.tensors if row.tensor != difference.tensor]
    remaining = several - 1 - len(other_names[:NAMES])
    yield "also", (
        ", ".join(other_names[:NAMES]) + (f", and {remaining:,} more" if remaining > 0 else "") if other_names else ""
    )


def _judged(difference: Difference, report: VerifyReport, location: str) -> tuple[str, str]:
    """Describes the worst element, or the factor that all elements have."""
    if difference.off_by_factor:
        return (
            "factor",
            f"{_number(difference.scale)}; rounding explains {difference.factor_allowed:.2g} more or less than 1",
        )
    return "element", (
        f"{list(difference.index)}: {_number(difference.reference)} on one rank, "
        f"{_number(difference.actual)} {location}"
        f"{_times(difference, report)}"
    )


_PASSES = {"fwd": "an output in the forward pass", "bwd": "the gradient of a module's input",
           "grad": "a parameter's gradient", "init": "a parameter before the step",
           "new": "a parameter after the update", "m": "the optimizer's first moment",
           "v": "the optimizer's second moment", "clip": "the gradients' norm",
           "state": "a state of the optimizer", "buffer": "a buffer after the step",
           "count": "how many steps were made"}


def _meaning(difference: Difference) -> str:
    kind = difference.tensor.split("@")[0].rsplit(":", 1)[-1]
    step = f", step {difference.step}" if difference.step > 1 else ""
    if difference.tensor.startswith("input."):
        return "what the model is given" + step
    return _PASSES.get(kind, f"{difference.pass_} pass") + step


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _times(difference: Difference, report: VerifyReport) -> str:
    rule = report.data["rule"]["name"]
    if difference.ratio is None or difference.allowed is None or rule == "bits":
        return ""
    ratio = f"{difference.ratio:,.3g} times" if math.isfinite(difference.ratio) else "infinitely more than"
    limit = "rounding explains" if rule == "sensitivity" else "the rule allows"
    return f"; {ratio} what {limit}, {difference.allowed:.2g}"


def _advice(difference: Difference, layout: Layout) -> str:
    """Suggests a spec for a rank that has part of the tensor."""
    for name, size in layout.items():
        cut = [d for d, (a, b) in enumerate(zip(difference.shape, difference.other_shape)) if a != b]
        if len(difference.shape) == len(difference.other_shape) and len(cut) == 1 and size > 1 and (
                difference.shape[cut[0]] == size * difference.other_shape[cut[0]]):
            glob = difference.tensor.split("@")[0]
            return f'if this is the part of a rank, say so: spec={{"shard": {{"{glob}": {{"{name}": {cut[0]}}}}}}}'
    return ""


__all__ = ["Compared", "RanksDiffer", "compare_ranks"]
