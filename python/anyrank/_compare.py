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
    said = _said_in_vain(spec, sizes, dimensions)
    if bits + (rtol is not None or atol is not None) > 1:
        raise ValueError("bits, or rtol and atol: give at most one rule")
    kept = pathlib.Path(folder) if folder is not None else pathlib.Path(tempfile.mkdtemp(prefix="anyrank-compare-"))
    options = {key: value for key, value in (("steps", steps), ("only", only)) if value is not None}
    from anyrank.runs import verify

    run = _Run(build, step, sizes, seed, spec, options)
    start = {"seed": seed, "timeout": timeout, "threads": threads, "env": env}
    rule: dict[str, typing.Any] = {"rtol": rtol, "atol": atol} if rtol is not None or atol is not None else {}
    allowed: dict[str, typing.Any] = {}
    keep = folder is not None
    try:
        said += _one_rank(run, kept / "one", start)
        if not rule and not bits:
            allowed = _allowances(run, kept, start)
            rule = {"sensitivity": kept / "allowed.safetensors"}
        said += _ranks(run, kept / "ranks", start)
        for text in dict.fromkeys(said):
            warnings.warn(text, stacklevel=2)
        judge = functools.partial(verify, kept / "one", kept / "ranks", ignore=ignore or [], common=common, **rule)
        report = judge()
        if report.unjudged:
            raise AnyrankError(cannot_judge(report, allowed))
        if not report.ok:
            report = _with_operations(run, kept, start, judge, report)
            words = ["anyrank", "verify", str(kept / "one"), str(kept / "ranks"), *_words(rule, ignore, common)]
            where = "" if folder is not None else f"{kept}: both runs, for `look`; nothing else removes them"
            raise RanksDiffer(explain(report, sizes, seed, repeat, shlex.join(words), where), report)
    except RanksDiffer:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(kept, ignore_errors=True)
    weak = tuple(name for name, one in allowed.items() if one.allowed > WEAK * one.largest > 0)
    worst, tensor = _closest(report)
    return Compared(report, worst, tensor, weak, allowed)


def layout_of(ranks: int | None, layout: Layout | None) -> dict[str, int]:
    """The mesh that either of the two says."""
    if ranks is not None and layout is not None:
        raise ValueError("ranks, or the layout that has them: give one of the two")
    sizes = dict(layout) if layout is not None else {"tp": 2 if ranks is None else ranks}
    for name, size in sizes.items():
        if not isinstance(name, str) or not name or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"layout {sizes}: {name!r} has the size {size!r}; a layout is as {{'dp': 2, 'tp': 4}}")
    if not sizes:
        raise ValueError("layout {} has no dimension; a layout is as {'dp': 2, 'tp': 4}")
    return sizes


def _said_in_vain(given: typing.Any, layout: Layout, dimensions: typing.Collection[str]) -> list[str]:
    """What to warn of in a spec that names dimensions of no layout; refuses a spec that cannot be read."""
    __tracebackhide__ = True
    from anyrank.capture._model import shares_samples
    from anyrank.capture._spec import Spec

    try:
        spec = Spec(given)
        mesh = spec.mesh or dict(layout)
        spec.check(mesh)
    except AnyrankError as error:
        raise AnyrankError(str(error)) from None  # without the frames that found it
    known = {*mesh, *dimensions}
    if any(map(shares_samples, known)):
        known.add("dp")  # means all of those
    absent: dict[str, list[str]] = {}
    for what, name in spec.named():
        if name not in known:
            absent.setdefault(name, []).append(what)
    return [f"{spec.where}: {whats[0]}{f' and {len(whats) - 1} more' if len(whats) > 1 else ''}: no effect, as the "
            f"layout {mesh} has no dimension {name!r}; if the spec serves other layouts too, give it the size 1 here"
            for name, whats in absent.items()]


# --- runs -------------------------------------------------------------------------------------------------------------


def _captured(rank: int, run: _Run, folder: pathlib.Path, alone: bool) -> list[str]:
    """A rank's run, which writes to folder. Returns what it warns of."""
    return _run(run, folder, 0, alone)


def _captured_again(rank: int, run: _Run, folders: typing.Sequence[pathlib.Path]) -> None:
    """One of several runs of one rank: the first without errors, the others with."""
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


def _spec(given: typing.Any, mesh: dict[str, int]) -> typing.Any:
    if isinstance(given, (str, os.PathLike)):
        given = json.loads(pathlib.Path(given).read_text(encoding="utf-8"))
    return {"mesh": mesh, **(given or {})}


def _failure(failed: ranks.RanksFailed, where: str) -> Exception:
    """A rank's failure, with where it was. What anyrank refuses is said in its one line, without the rank's frames."""
    if isinstance(failed.exception, AnyrankError):
        return AnyrankError(f"{where}: {failed.exception}")
    return ranks.RanksFailed(f"{where}: {failed}", failed.kind, failed.rank, failed.exception)


def _one_rank(run: _Run, folder: pathlib.Path, start: dict[str, typing.Any]) -> list[str]:
    """One rank, whose failure is that of the plain model."""
    __tracebackhide__ = True
    try:
        said: list[str] = ranks.spawn(1, _captured, run, folder, True, **start)[0]
    except ranks.RanksFailed as failed:
        raise _failure(failed, "one rank, which the others are compared with, failed") from None
    return said


def _ranks(run: _Run, folder: pathlib.Path, start: dict[str, typing.Any]) -> list[str]:
    __tracebackhide__ = True
    try:
        of_all = ranks.spawn(math.prod(run.layout.values()), _captured, run, folder, False, **start)
    except ranks.RanksFailed as failed:
        raise _failure(failed, name_of(run.layout)) from None
    return [text for said in of_all for text in said]


def _with_operations(run: _Run, kept: pathlib.Path, start: dict[str, typing.Any],
                     verify: typing.Callable[[], VerifyReport], report: VerifyReport) -> VerifyReport:
    """The report, once both runs have been made again with a record of their operations, by which the first wrong one
    is found; as it is where they cannot be."""
    from anyrank.capture._operations import FOLDER

    again = run._replace(capture={**run.capture, "operations": True})
    try:
        for name, of in (("one", _one_rank), ("ranks", _ranks)):
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), (
                    contextlib.redirect_stderr(io.StringIO())):  # what was printed and warned of already
                warnings.simplefilter("ignore")
                of(again, kept / f"{name}-again", start)
            shutil.rmtree(kept / name / FOLDER, ignore_errors=True)
            (kept / f"{name}-again" / FOLDER).rename(kept / name / FOLDER)
        return verify()
    except (OSError, AnyrankError, ranks.RanksFailed):
        return report
    finally:
        for name in ("one", "ranks"):
            shutil.rmtree(kept / f"{name}-again", ignore_errors=True)


def _allowances(run: _Run, kept: pathlib.Path, start: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Measures what rounding explains, and writes it to allowed.safetensors."""
    __tracebackhide__ = True
    from anyrank import rounding
    from anyrank.runs import verify

    again, *draws = [kept / f"again-{draw}" for draw in range(1 + rounding.DRAWS)]
    try:
        ranks.run(1 + rounding.DRAWS, _captured_again, (run, [again, *draws]), alone=True, **start)
    except ranks.RanksFailed as failed:
        raise _failure(failed, "one rank runs well, but not with errors as large as rounding in each operation (give "
                               "rtol and atol, or bits=True, to do without)") from None
    report = verify(kept / "one", again)
    if not report.ok:
        name = report.first.tensor if report.first else ""
        raise AnyrankError(f"one rank has other values when it runs again, first in {name}: what build or step draws "
                           "does not come from the seed, so nothing can be compared")
    allowed = rounding.allowances(kept / "one", draws, kept / "allowed.safetensors")
    for path in (again, *draws):
        shutil.rmtree(path)
    return allowed


# --- the failure's text -----------------------------------------------------------------------------------------------


def cannot_judge(report: VerifyReport, allowed: dict[str, typing.Any]) -> str:
    """Which tensors may differ by as much as they are, and what to do."""
    shares = [f"{name} ({allowed[name].allowed / allowed[name].largest:.2g} of its largest element)"
              if name in allowed and allowed[name].largest > 0 else name for name in report.unjudged[:NAMES]]
    more = f" and {len(report.unjudged) - NAMES:,} more" if len(report.unjudged) > NAMES else ""
    return (f"cannot judge {len(report.unjudged):,} of {report.compared:,} tensors, which rounding alone may change by "
            f"as much as they are: {', '.join(shares)}{more}. The step amplifies rounding: it quantises, or chooses by "
            "values (experts, top-k). Fix the scale or the choice in the test, compare what goes into it (only=), or "
            "give rtol= and atol=")



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
    """The worst difference over what is allowed, and its tensor, of a report without a difference."""
    head, _, tail = report.text.partition("the worst difference is ")
    number, _, name = tail.partition(" of what is allowed, in ")
    return (float(number), name.split()[0]) if name else (0.0, "")


def explain(report: VerifyReport, layout: Layout, seed: int, repeat: str, verifying: str, kept: str = "") -> str:
    """The cause first, then tensor, rank, element; how to see it again, and where what is kept for that is."""
    first = report.first
    if first is None:
        return f"{name_of(layout)} do not compute what one rank does:\n{report}"
    lines = [f"{first.tensor} {_KINDS[_state(first)].replace('%', name_of(layout))}"
            + (f": {_short(first.hint)}" if first.hint else "")]
    operation = [("at" if i == 0 else "", text) for i, text in enumerate(
        (report.explanation or {}).get("operation", ()))]
    for label, text in [("cause", _cause(first)), *operation, ("check", first.look), *_facts(first, report, layout),
                        ("seed", str(seed)), ("repeat", repeat), ("look", verifying + " --html report.html"),
                        ("kept", kept)]:
        if text:
            wrap = label not in ("repeat", "look", "kept")
            parts = textwrap.wrap(text, WIDTH - 11, break_long_words=False, break_on_hyphens=False) if wrap else [text]
            lines += [f"  {label if i == 0 else '':8} {part}" for i, part in enumerate(parts)]
    return "\n".join(lines)


_KINDS = {"different": "differs between one rank and %", "replicas": "has copies that differ from each other on %",
          "shape": "has another shape on one rank than on %", "dtype": "has another dtype on one rank than on %",
          "missing": "is there on one rank, and not on %", "unexpected": "is not there on one rank, but on %"}


def _state(first: Difference) -> str:
    """Ranks with parts of which nothing is said hold copies that differ; what shows is their shape."""
    return "shape" if first.other_shape and first.other_shape != first.shape else first.state


def _short(hint: str) -> str:
    """The hint's first clause. Code in it is kept whole."""
    match = re.match("(?:`[^`]*`|(?!(?<!looks like): |; ).)*", hint)
    return match[0] if match else hint


def _cause(first: Difference) -> str:
    sure = f" ({first.confidence})" if first.confidence else ""
    known = f"{sure} [{first.cause}]" if first.cause and first.cause != "unknown" else ""
    return first.hint + known if first.hint else ""


def _facts(first: Difference, report: VerifyReport, layout: Layout) -> typing.Iterator[tuple[str, str]]:
    several = report.different + len(report.missing) + len(report.unexpected)
    which = f", the first of {several:,} that differ in the order of the step" if several > 1 else ", the only one"
    yield "tensor", f"{first.tensor} ({_meaning(first)}){which}; {report.compared:,} are compared"
    state = _state(first)
    if state == "different":
        alone = f"on rank {first.rank} alone" in first.pattern
        yield "rank", str(first.rank) if alone else ""
        yield _judged(first, report, f"on rank {first.rank}" if alone else "here")
    elif state == "replicas":
        values = " and ".join(f"{_number(value)} on rank {rank}"
                              for value, rank in zip((first.reference, first.actual), first.ranks))
        yield "element", f"{list(first.index)}: {values}"
    elif state == "shape":
        yield "shape", f"{list(first.shape)} on one rank, {list(first.other_shape)} on {name_of(layout)}"
        yield "spec", _advice(first, layout)
    elif state == "dtype":
        yield "dtype", f"{first.dtype} on one rank, {first.other_dtype} on {name_of(layout)}"
    elif first.tensor in report.lost_gradients:
        yield "note", f'both have this parameter; ignore="{first.tensor}" leaves its gradient out'
    elif state in ("missing", "unexpected"):
        yield "note", "common=True compares the tensors that both have; a module in both runs needs the same name"
    yield "pattern", first.pattern
    yield "recorded", "; ".join((report.explanation or {}).get("differences", [])[:NAMES]) if (
        first.cause == "unknown") else ""
    lost = [name for name in report.lost_gradients if name != first.tensor]
    yield "lost", f"gradients of parameters that both have: {', '.join(lost[:NAMES])}" + (
        f", and {len(lost) - NAMES:,} more" if len(lost) > NAMES else "") if lost else ""
    others = [row.tensor for row in report.tensors if row.tensor != first.tensor]
    more = several - 1 - len(others[:NAMES])
    yield "also", ", ".join(others[:NAMES]) + (f", and {more:,} more" if more > 0 else "") if others else ""


def _judged(first: Difference, report: VerifyReport, here: str) -> tuple[str, str]:
    """The worst element, or the factor of all."""
    if first.off_by_factor:
        return "factor", f"{_number(first.scale)}; rounding explains {first.factor_allowed:.2g} more or less than 1"
    return "element", (f"{list(first.index)}: {_number(first.reference)} on one rank, {_number(first.actual)} {here}"
                       f"{_times(first, report)}")


_PASSES = {"fwd": "an output in the forward pass", "bwd": "the gradient of a module's input",
           "grad": "a parameter's gradient", "init": "a parameter before the step",
           "new": "a parameter after the update", "m": "the optimizer's first moment",
           "v": "the optimizer's second moment", "clip": "the gradients' norm",
           "state": "a state of the optimizer", "buffer": "a buffer after the step",
           "count": "how many steps were made"}


def _meaning(first: Difference) -> str:
    kind = first.tensor.split("@")[0].rsplit(":", 1)[-1]
    step = f", step {first.step}" if first.step > 1 else ""
    if first.tensor.startswith("input."):
        return "what the model is given" + step
    return _PASSES.get(kind, f"{first.pass_} pass") + step


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _times(first: Difference, report: VerifyReport) -> str:
    rule = report.data["rule"]["name"]
    if first.ratio is None or first.allowed is None or rule == "bits":
        return ""
    ratio = f"{first.ratio:,.3g} times" if math.isfinite(first.ratio) else "infinitely more than"
    return f"; {ratio} what {'rounding explains' if rule == 'sensitivity' else 'the rule allows'}, {first.allowed:.2g}"


def _advice(first: Difference, layout: Layout) -> str:
    """What a spec would say where a rank has a part of the tensor."""
    for name, size in layout.items():
        cut = [d for d, (a, b) in enumerate(zip(first.shape, first.other_shape)) if a != b]
        if len(first.shape) == len(first.other_shape) and len(cut) == 1 and size > 1 and (
                first.shape[cut[0]] == size * first.other_shape[cut[0]]):
            glob = first.tensor.split("@")[0]
            return f'if this is the part of a rank, say so: spec={{"shard": {{"{glob}": {{"{name}": {cut[0]}}}}}}}'
    return ""


__all__ = ["Compared", "RanksDiffer", "compare_ranks"]
