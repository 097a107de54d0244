# SPDX-License-Identifier: Apache-2.0
"""A rank's process in anyrank.ranks.spawn: joins the group, runs the function, reports, waits to be let go.

A rank that has reported keeps its process, and so its connections, until the parent lets it go: the others then fail,
or hang, where they stand, and not on a connection that was closed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import pathlib
import pickle
import random
import signal
import sys
import traceback
import typing
import warnings

from anyrank._collectives import Recorder

PR_SET_PDEATHSIG = 1
LINES = 200  # of a traceback
PACKAGE = os.path.dirname(os.path.abspath(__file__))


class Job(typing.NamedTuple):
    """What all ranks of a run share. alone: each has a group of its own. payload: `call`, for a rank that does not
    begin as a copy of its parent."""

    world: int
    alone: bool
    folder: str
    seed: int
    threads: int
    env: dict[str, str]
    group_seconds: float
    parent: int
    call: tuple[typing.Callable[..., typing.Any], tuple[typing.Any, ...]] | None
    payload: bytes | None


class Report(typing.NamedTuple):
    """A rank's last word. outcome: "returned" (data: the pickled result) or "raised" (data: the pickled exception, or
    nothing where it cannot be pickled); `title` is the traceback's last line. warned: message, name of the category,
    file and line of each warning, which the parent gives once."""

    outcome: str
    data: bytes
    title: str = ""
    text: str = ""
    imported: tuple[str, ...] = ()
    warned: tuple[tuple[str, str, str, int], ...] = ()


def path_of(folder: str, rank: int, kind: str) -> pathlib.Path:
    """kind: `out` for what the rank prints, `stack` for where it stands, `calls` for the collectives that it called."""
    return pathlib.Path(folder) / f"rank-{rank}.{kind}"


def of_package(path: str) -> bool:
    """Returns whether a file belongs to this package, apart from its tests."""
    return os.path.dirname(os.path.abspath(path)) in (PACKAGE, os.path.join(PACKAGE, "capture"))


def _own_process_group(parent: int) -> None:
    """Ctrl-C is the parent's affair, which ends this group; and a parent that is killed takes the ranks with it."""
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _redirect(folder: str, rank: int) -> typing.TextIO:
    """Standard output and error go to the rank's file; the file for stacks, open until the process ends."""
    out = os.open(path_of(folder, rank, "out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    path = path_of(folder, rank, "stack")
    stack = open(f"{path}.new", "a", encoding="utf-8")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    os.replace(f"{path}.new", path)  # now the signal can come
    return stack


def _join(rank: int, job: Job) -> None:
    """Joins a gloo group on this machine's loopback, with the same random numbers on every rank."""
    import datetime

    import torch
    import torch.distributed as dist

    # First of all: two threads that meet the pool of a forked process at once end it ("Invalid thread pool!").
    torch.set_num_threads(job.threads)
    random.seed(job.seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(job.seed % 2**32)
    torch.manual_seed(job.seed)
    group_rank, world = place(rank, job)
    store = dist.FileStore(os.path.join(job.folder, f"store-{rank - group_rank}"), world)
    dist.init_process_group("gloo", store=store, rank=group_rank, world_size=world,
                            timeout=datetime.timedelta(seconds=job.group_seconds))
    if world > 1:
        Recorder(path_of(job.folder, rank, "calls")).install()


def place(rank: int, job: Job) -> tuple[int, int]:
    """Returns the rank in its group, and the group's size."""
    return (0, 1) if job.alone else (rank, job.world)


def environment(rank: int, job: Job) -> dict[str, str]:
    """Returns what torchrun would set, a number of threads with which N ranks share a machine, and gloo on the loopback
    only."""
    group_rank, world = place(rank, job)
    names: dict[str, object] = {
        "RANK": group_rank, "LOCAL_RANK": group_rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "OMP_NUM_THREADS": job.threads, "MKL_NUM_THREADS": job.threads, "OPENBLAS_NUM_THREADS": job.threads}
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        names["GLOO_SOCKET_IFNAME"] = loopback
    return {**{name: str(value) for name, value in names.items()}, **job.env}


def _raised(error: BaseException) -> Report:
    """Returns an exception as text, from the user's function on."""
    report = traceback.TracebackException.from_exception(error)
    begin = next((i for i, frame in enumerate(report.stack) if not of_package(frame.filename)), 0)
    report.stack = traceback.StackSummary.from_list(report.stack[begin:])
    lines = "".join(report.format()).rstrip().split("\n")
    if len(lines) > LINES:
        lines[LINES // 2:-LINES // 2] = [f"  .. {len(lines) - LINES} more lines .."]
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = b""
    title = "".join(report.format_exception_only()).strip().split("\n")[0]
    return Report("raised", data, title, "\n".join(lines))


def _run(rank: int, job: Job) -> Report:
    before = set(sys.modules)
    try:
        if job.call:
            function, args = job.call
        else:
            function, args = pickle.loads(job.payload or b"")
        _join(rank, job)
        result = function(rank, *args)
        try:
            data = pickle.dumps(result)
        except Exception as error:
            raise TypeError(f"a rank's result is sent to the parent by pickle, which {type(result).__name__} does not "
                            f"allow ({error}): return tensors, numbers, or containers of them") from None
        imported = tuple(name for name in sys.modules if name.startswith("torch.") and name not in before)
        return Report("returned", data, imported=imported)
    except BaseException as error:
        return _raised(error)


def _hear_warning(warned: list[tuple[str, str, str, int]], message: Warning | str, category: type[Warning],
                  filename: str, lineno: int, file: typing.Any = None, line: str | None = None) -> None:
    """Records a warning, and prints it too, in case the rank fails, hangs or dies."""
    warned.append((str(message), category.__name__, filename, lineno))
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def main(rank: int, job: Job, pipe: typing.Any, peer_ends: typing.Sequence[typing.Any] = ()) -> None:
    """Runs the process. peer_ends: ends of pipes that a fork has copied and that belong to other ranks."""
    for end in peer_ends:
        end.close()
    _own_process_group(job.parent)
    stack = _redirect(job.folder, rank)
    os.environ.update(environment(rank, job))
    warned: list[tuple[str, str, str, int]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = functools.partial(_hear_warning, warned)
        report = _run(rank, job)
    pipe.send(report._replace(warned=tuple(warned)))
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pipe.recv()
    except EOFError:
        pass  # the parent is no more
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.disable()
    stack.close()
