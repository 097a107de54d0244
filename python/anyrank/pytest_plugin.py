# SPDX-License-Identifier: Apache-2.0
"""pytest's plugin: N gloo ranks in a test, compared with one. pytest.md is the manual.

    def test_mlp(anyrank_compare):
        anyrank_compare(build, step, ranks=4)

Loading it imports neither torch nor numpy; a test that uses a fixture does.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import shlex
import shutil
import typing

import pytest

MARKER = """anyrank(ranks=[2, 4], layouts=[{"dp": 2, "tp": 2}], seeds=[0, 1], timeout=300): for tests with the fixture
anyrank_compare or anyrank_spawn: each layout with each seed is a test of its own. `ranks` are along the dimension "tp"
of the mesh; `timeout` is in seconds until the rank that hangs is named."""
MARKS = ("ranks", "layouts", "seeds", "timeout")
KEY = "anyrank"  # of the properties of a test's report, which xdist hands on
NEAREST = 3


class Case(typing.NamedTuple):
    """One turn of a test. layout: None where neither the marker nor the command line has one."""

    layout: dict[str, int] | None
    seed: int
    timeout: float | None


# --- options ----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: typing.Any) -> None:
    group = parser.getgroup("anyrank", "anyrank: parallel layers on N ranks of this machine")
    for name, metavar, text in (
            ("ranks", "N,..", "numbers of ranks, along tp, instead of those of tests; of a test with layouts, those "
                              "with so many ranks alone"),
            ("seeds", "N,..", "seeds instead of those of tests"),
            ("timeout", "SECONDS", "until a run is ended and the rank that hangs is named; 0: never (default: 300)"),
            ("dump", "DIR", "keep what every test compares in DIR (default: in pytest's folder of temporary files)")):
        group.addoption(f"--anyrank-{name}", metavar=metavar, default=None, help=text)
        parser.addini(f"anyrank_{name}", f"--anyrank-{name}: {text}", default=None)


def pytest_configure(config: typing.Any) -> None:
    config.addinivalue_line("markers", " ".join(MARKER.split()))
    for name, read in (("ranks", _integers), ("seeds", _integers), ("timeout", _seconds)):
        read(_option(config, name), name)  # what cannot be read is said before any test runs


def _option(config: typing.Any, name: str) -> str | None:
    """Returns the command line's value, or else the ini file's."""
    value = config.getoption(f"--anyrank-{name}")
    return value if value is not None else config.getini(f"anyrank_{name}") or None


def _integers(value: typing.Any, name: str) -> list[int] | None:
    """Reads numbers given as 2,4, as a list, or as one number."""
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
    try:
        found = [int(part) for part in parts]
    except (TypeError, ValueError):
        found = []
    minimum = 1 if name == "ranks" else 0
    if not found or any(number < minimum for number in found):
        raise pytest.UsageError(f"anyrank: {name}: {value!r} is not a list of integers from {minimum}, as 2,4")
    return found


def _seconds(value: typing.Any, name: str) -> float | None:
    """Reads a number of seconds; None is the default."""
    try:
        seconds = None if value is None else float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if seconds is not None and not 0 <= seconds < math.inf:
        raise pytest.UsageError(f"anyrank: {name}: {value!r} is not a number of seconds from 0")
    return seconds


# --- a test's turns ---------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: typing.Any) -> None:
    if "_anyrank_case" not in metafunc.fixturenames:
        return
    marker = _marker(metafunc.definition)
    layouts = _layouts(metafunc.config, marker)
    line = _integers(_option(metafunc.config, "seeds"), "seeds")
    seeds = line if line is not None else _integers(marker.get("seeds"), "seeds")
    if layouts is None and seeds is None:
        return  # one turn, whose name needs no brackets
    turns: list[typing.Any] = []
    names = []
    for layout in [None] if layouts is None else layouts:
        for seed in seeds or [0]:
            turns.append((layout, seed))
            names.append("-".join(([_name(layout)] if layout else []) + ([f"seed{seed}"] if seeds else [])))
    if not turns:
        reason = "no layout of this test has the ranks of --anyrank-ranks"
        turns, names = [pytest.param(None, marks=pytest.mark.skip(reason=reason))], ["none"]
    metafunc.parametrize("_anyrank_case", turns, indirect=True, ids=names)


def _marker(node: typing.Any) -> dict[str, typing.Any]:
    """Returns what the markers of a test say, the nearest first."""
    found: dict[str, typing.Any] = {}
    for mark in node.iter_markers("anyrank"):
        unknown = [name for name in mark.kwargs if name not in MARKS]
        if mark.args or unknown:
            raise pytest.UsageError(f"{node.nodeid}: pytest.mark.anyrank has the arguments {', '.join(MARKS)}, by "
                                    f"name; not {', '.join([*map(repr, mark.args), *unknown])}")
        found = {**mark.kwargs, **found}
    return found


def _layouts(config: typing.Any, marker: dict[str, typing.Any]) -> list[dict[str, int]] | None:
    """Returns the meshes to try; None if nothing is said."""
    from anyrank._compare import layout_of

    numbers = _integers(_option(config, "ranks"), "ranks")
    requested = marker.get("layouts")
    try:
        if requested is not None:
            layouts = [
                layout_of(None, layout) for layout in ([requested] if isinstance(requested, dict) else requested)
            ]
            return [layout for layout in layouts if numbers is None or math.prod(layout.values()) in numbers]
        if numbers is None:
            numbers = _integers(marker.get("ranks"), "ranks")
        return None if numbers is None else [layout_of(number, None) for number in numbers]
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"pytest.mark.anyrank: {error}") from None


def _name(layout: typing.Mapping[str, int]) -> str:
    """dp2-tp4."""
    return "-".join(f"{name}{size}" for name, size in layout.items())


# --- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture  # type: ignore[untyped-decorator,unused-ignore]
def _anyrank_case(request: typing.Any) -> Case:
    pytest.importorskip("torch", reason="ranks need torch")
    layout, seed = getattr(request, "param", (None, 0))
    marked = _seconds(_marker(request.node).get("timeout"), "timeout")
    line = _seconds(_option(request.config, "timeout"), "timeout")
    from anyrank import ranks
    seconds = line if line is not None else marked if marked is not None else ranks.TIMEOUT
    return Case(layout, seed, seconds or None)


@pytest.fixture  # type: ignore[untyped-decorator,unused-ignore]
def anyrank_spawn(request: typing.Any, _anyrank_case: Case) -> typing.Callable[..., list[typing.Any]]:
    """anyrank_spawn(function, *args, ranks=2): calls function(rank, *args) on N gloo ranks of this machine and returns
    their results. Further arguments are those of anyrank.ranks.spawn. The marker and the command line say how many
    ranks there are, with which seed and timeout; `ranks` is for tests of which they say nothing.
    """

    def spawn(function: typing.Callable[..., typing.Any], *args: typing.Any, ranks: int | None = None,
              **options: typing.Any) -> list[typing.Any]:
        __tracebackhide__ = True
        from anyrank import ranks as home
        from anyrank._compare import layout_of

        layout = _chosen(_anyrank_case, request, ranks, None)
        world = math.prod((layout or layout_of(ranks, None)).values())
        options = {"seed": _anyrank_case.seed, "timeout": _anyrank_case.timeout, **options}
        try:
            return home.spawn(world, function, *args, **options)
        except home.RanksFailed as failed:
            raise _outcome(failed) from None

    return spawn


@pytest.fixture  # type: ignore[untyped-decorator,unused-ignore]
def anyrank_compare(request: typing.Any, tmp_path_factory: typing.Any,
                    _anyrank_case: Case) -> typing.Callable[..., typing.Any]:
    """anyrank_compare(build, step, ranks=4): fails unless N gloo ranks of this machine compute what one rank does.

    build(mesh) returns the module, step(model, mesh) runs forward, loss and backward; mesh is a DeviceMesh, None on one
    rank. Further arguments are those of anyrank.compare_ranks. The marker and the command line say how many ranks there
    are, or in which layout, with which seed and timeout; `ranks` and `layout` are for tests of which they say nothing.
    """
    turn = 0

    def compare(build: typing.Callable[..., typing.Any], step: typing.Callable[..., typing.Any],
                ranks: int | None = None, *, layout: typing.Mapping[str, int] | None = None,
                **options: typing.Any) -> typing.Any:
        __tracebackhide__ = True
        nonlocal turn
        from anyrank import _compare
        from anyrank.ranks import RanksFailed

        chosen = _chosen(_anyrank_case, request, ranks, layout)
        turn += 1
        options = {"seed": _anyrank_case.seed, "timeout": _anyrank_case.timeout, "repeat": _repeat(request),
                   "folder": _folder(request, tmp_path_factory, turn), "dimensions": _dimensions(request), **options}
        if chosen is not None:
            ranks, layout = None, chosen
        try:
            compared = _compare.compare_ranks(build, step, ranks, layout=layout, **options)
        except RanksFailed as failed:
            raise _outcome(failed) from None
        request.node.user_properties.append((KEY, [compared.worst, compared.tensor, list(compared.weak)]))
        return compared

    return compare


def _chosen(case: Case, request: typing.Any, ranks: int | None, layout: typing.Any) -> dict[str, int] | None:
    """Returns the layout of the marker or, also for a test with a marker, of the command line."""
    if case.layout is not None and (ranks is not None or layout is not None) and (
            {"ranks", "layouts"} & _marker(request.node).keys()):
        raise TypeError("the marker has the ranks of this test already: leave ranks and layout out of the call")
    return case.layout


def _dimensions(request: typing.Any) -> set[str]:
    """Returns the dimension names of all layouts of the test, which one spec may serve."""
    requested = _marker(request.node).get("layouts", [])
    return {name for layout in ([requested] if isinstance(requested, dict) else requested) for name in layout}


def _outcome(failed: typing.Any) -> BaseException:
    """Skips the test if a rank skips. pytest's exceptions cannot be sent from a rank, but their text can."""
    head, _, reason = str(failed).partition(" raised Skipped: ")
    if failed.kind == "raised" and reason and "\n" not in head:
        return typing.cast(BaseException, pytest.skip.Exception(reason.partition("\n")[0].partition(", all alike;")[0]))
    return typing.cast(BaseException, failed)


def _folder(request: typing.Any, factory: typing.Any, turn: int) -> pathlib.Path:
    """Creates a folder for a comparison's dumps that no other test uses."""
    dump_folder = _option(request.config, "dump")
    if dump_folder is None:
        return pathlib.Path(factory.mktemp("anyrank"))
    name = re.sub(r"[^\w.=-]+", "-", request.node.nodeid).strip("-") + (f"-{turn}" if turn > 1 else "")
    path = pathlib.Path(request.config.invocation_params.dir, dump_folder, name)
    for name in ("one", "ranks", "allowed.safetensors"):  # of an earlier session; nothing else is touched
        part = path / name
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _repeat(request: typing.Any) -> str:
    """Returns the command line that runs this turn alone."""
    options = [f"--anyrank-{name}={_option(request.config, name)}" for name in ("ranks", "seeds")
               if request.config.getoption(f"--anyrank-{name}") is not None]
    root, invocation_dir = request.config.rootpath, pathlib.Path(request.config.invocation_params.dir)
    path, mark, rest = request.node.nodeid.partition("::")
    path = os.path.relpath(root / path, invocation_dir)
    return shlex.join(["pytest", path + mark + rest, *options])


# --- the session's last line ------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: typing.Any) -> None:
    found = [(report.nodeid, *value) for report in terminalreporter.stats.get("passed", []) if report.when == "call"
             for key, value in report.user_properties if key == KEY]
    if not found:
        return
    node, worst, tensor, _ = max(found, key=lambda row: float(row[1]))
    margin_text = (
        f"; nearest to it: {worst:.2g} of what is allowed, in {tensor} of {node}" if tensor else ", bit for bit"
    )
    terminalreporter.write_line(f"anyrank: {len(found)} comparison{'s' if len(found) > 1 else ''} with one rank, all "
                                f"the same within what is allowed{margin_text}")
    weak = [(node, names) for node, _, _, names in found if names]
    for node, names in weak[:None if terminalreporter.verbosity > 0 else NEAREST]:
        remainder = f" and {len(names) - NEAREST} more" if len(names) > NEAREST else ""
        terminalreporter.write_line("  rounding explains more than 1 % of the largest value, so that a small bug may "
                                    f"hide, in {', '.join(names[:NEAREST])}{remainder} of {node}")
