# SPDX-License-Identifier: Apache-2.0
"""N ranks of torch.distributed on this machine, in processes that end, whatever happens. pytest.md is the manual.

    results = anyrank.ranks.spawn(4, function, x, seed=1, timeout=60)     # function(rank, x) on ranks 0 to 3
"""

from __future__ import annotations

import builtins
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import typing
import warnings

from anyrank import _collectives, _rank_process, _stacks
from anyrank._errors import AnyrankError
from anyrank._rank_process import Job, Report

TIMEOUT = 300.0
SETTLE = 0.5  # seconds that other ranks get to report an error of their own, after the first
LOOK = 5.0  # seconds after which what ranks call is looked at again
ANSWER = 20.0  # seconds that a rank gets to say where it stands
# What another rank's failure looks like to a rank: gloo's connections, and the exchange of a capture.
LOST = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "left the capture with an error")
PRINTED = 20_000  # characters of a rank's output that are shown


class RanksFailed(Exception):
    """A run that did not end well on every rank. The text is the whole story; besides:

    kind       "raised", "died" or "hangs"
    rank       the rank that is named first, the lowest of several
    exception  what it raised, where that could be sent; None otherwise
    """

    __module__ = "anyrank"

    def __init__(self, message: str, kind: str, rank: int, exception: BaseException | None = None) -> None:
        super().__init__(message)
        self.kind, self.rank, self.exception = kind, rank, exception


class _Rank:
    """A rank's process as the parent sees it: running, or with its last word (or its exit status)."""

    def __init__(self, number: int, process: typing.Any, pipe: typing.Any) -> None:
        self.number, self.process, self.pipe = number, process, pipe
        self.report: Report | None = None
        self.died: int | None = None
        self.stack: list[_stacks.Frame] | None = None

    def running(self) -> bool:
        return self.report is None and self.died is None

    def failed(self) -> bool:
        return self.died is not None or (self.report is not None and self.report.outcome == "raised")

    def listen(self) -> None:
        """Takes the report if there is one, or else notices the process's end."""
        code = self.process.exitcode  # before the pipe is looked at: a report that was sent is then in it
        try:
            if self.pipe.poll():
                self.report = self.pipe.recv()
                return
        except (EOFError, OSError):
            self.process.join(ANSWER)
            code = self.process.exitcode
        if code is not None:
            self.died = code

    def consequence(self) -> bool:
        """Returns whether it failed only because another rank's process was gone."""
        return self.report is not None and any(text in self.report.text for text in LOST)

    def end(self) -> None:
        """Kills the process with whatever it has started."""
        pid = self.process.pid
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except OSError:
                pass  # there is none
        self.process.join()
        self.pipe.close()


def spawn(world: int, function: typing.Callable[..., typing.Any], *args: typing.Any, seed: int = 0,
          timeout: float | None = TIMEOUT, env: typing.Mapping[str, str] | None = None, threads: int = 1,
          method: str | None = None) -> list[typing.Any]:
    """Calls function(rank, *args) on `world` processes of this machine and returns the results in the order of ranks.

    Every rank has a gloo group over all of them, the same random numbers (`seed`, of random, numpy and torch),
    `threads` threads, and what torchrun sets (RANK, WORLD_SIZE, ..) besides `env`. What ranks print is printed at the
    end, a rank at a time; what they warn of is warned of once. Results come back by pickle.

    method   "fork" (the default on Linux): a rank begins as a copy of this process, so that function may be a lambda, a
             closure or local to a test, and args need not be picklable. "spawn" (the default elsewhere, and where CUDA
             is in use already): a rank begins anew and imports torch, and function and args are sent by cloudpickle
             where that is installed, and by pickle otherwise: a function of a module, by name
    timeout  seconds until the run is ended and the rank that hangs is named; None waits for ever

    Raises RanksFailed where a rank raises, dies or hangs. All ranks' processes are gone when this function returns or
    raises, by Ctrl-C too.
    """
    __tracebackhide__ = True
    return run(world, function, args, seed, timeout, env, threads, method)


def run(world: int, function: typing.Callable[..., typing.Any], args: tuple[typing.Any, ...], seed: int = 0,
        timeout: float | None = TIMEOUT, env: typing.Mapping[str, str] | None = None, threads: int = 1,
        method: str | None = None, alone: bool = False) -> list[typing.Any]:
    """spawn. alone: each process is the only rank of a group of its own."""
    __tracebackhide__ = True
    if world < 1:
        raise ValueError(f"world is {world}, and has to be 1 or more")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout}, and has to be more than 0 seconds, or None")
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise AnyrankError(f"ranks need torch: {error}") from None
    if not dist.is_available() or not dist.is_gloo_available():
        raise AnyrankError("ranks need a torch with torch.distributed and gloo, which this one was built without")
    if method is None:
        method = "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() else "spawn"
    if method not in ("fork", "spawn"):
        raise ValueError(f"method is {method!r}, and has to be 'fork' or 'spawn'")
    folder = tempfile.mkdtemp(prefix="anyrank-ranks-")
    ranks: list[_Rank] = []
    try:
        # The group's own limit is far behind ours, which names the rank.
        limit = 86_400.0 if timeout is None else 2 * timeout + 600
        job = Job(world, alone, folder, seed, threads, dict(env or {}), limit, os.getpid(),
                  (function, args) if method == "fork" else None,
                  _payload(function, args) if method == "spawn" else None)
        _start(ranks, job, method)
        _wait(ranks, timeout, folder)
        if any(rank.report is None or rank.failed() for rank in ranks):
            raise _failure(ranks, folder, timeout)
        results = _results(ranks)
        _warn_of_calls(ranks, folder)
    finally:
        _end(ranks)
        _print(folder, world)
        shutil.rmtree(folder, ignore_errors=True)
    _warn(ranks)
    return results


def own_seed(rank: int, seed: int | None = None) -> int:
    """Returns a seed for what has to differ between ranks, such as dropout on a shard:
    torch.manual_seed(own_seed(rank)). seed: default torch.initial_seed(), which is the run's until someone calls
    manual_seed."""
    if seed is None:
        import torch
        seed = torch.initial_seed()
    # SplitMix64, so that seeds and ranks that follow one another have nothing in common.
    z = (seed + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> shift) * factor % 2**64
    return (z ^ z >> 31) % 2**63


# --- starting and waiting -------------------------------------------------------------------------------------------


def _payload(function: typing.Callable[..., typing.Any], args: tuple[typing.Any, ...]) -> bytes:
    try:
        dumps = importlib.import_module("cloudpickle").dumps
    except ImportError:
        dumps = pickle.dumps
    try:
        return typing.cast(bytes, dumps((function, args)))
    except Exception as error:
        raise AnyrankError(f"method 'spawn' sends the function and its arguments to the ranks by pickle, and cannot "
                           f"here ({error}): move the function to the top of its module, or install "
                           "cloudpickle") from None


_imported: set[str] = set()  # what ranks have imported of torch on top of what is here


def _start(ranks: list[_Rank], job: Job, method: str) -> None:
    """Starts all ranks' processes."""
    if method == "fork":
        for name in sorted(_imported):
            # Parts of torch that ranks load only when they use them take seconds, for each rank, and in each run.
            try:
                importlib.import_module(name)
            except Exception:
                pass  # the rank's own import says what is wrong
        _imported.clear()
    context = typing.cast(typing.Any, multiprocessing.get_context(method))
    pipes = [context.Pipe() for _ in range(job.world)]
    try:
        for number, (ours, theirs) in enumerate(pipes):
            peer_ends = [end for pair in pipes for end in pair if end is not theirs] if method == "fork" else []
            process = context.Process(target=_rank_process.main, args=(number, job, theirs, peer_ends),
                                      name=f"anyrank rank {number}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
                process.start()
            ranks.append(_Rank(number, process, ours))
            try:
                os.setpgid(process.pid, process.pid)
            except OSError:
                pass  # it has done so itself
    finally:
        for number, (ours, theirs) in enumerate(pipes):
            theirs.close()
            if number >= len(ranks):
                ours.close()


def _wait(ranks: list[_Rank], timeout: float | None, folder: str) -> None:
    """Until all ranks have returned, one has failed, or the time is over; or they call different collectives, and
    nothing goes on."""
    limit = None if timeout is None else time.monotonic() + timeout
    look, before = time.monotonic() + LOOK, None
    while True:
        running = _listen(ranks)
        if not running or any(rank.failed() for rank in ranks):
            break
        remaining = 1.0 if limit is None else limit - time.monotonic()
        if remaining <= 0:
            return
        multiprocessing.connection.wait([rank.pipe for rank in running], min(remaining, LOOK, 1.0))
        if len(ranks) > 1 and time.monotonic() >= look:
            called = _called(ranks, folder)
            if called == before and _collectives.is_certain(_collectives.disagreement(called)):
                return
            look, before = time.monotonic() + LOOK, called
    # The others may be about to fail of the same cause; or a rank that complains of a lost connection is first to.
    limit = time.monotonic() + SETTLE
    while running:
        failed = [rank for rank in ranks if rank.failed()]
        remaining = limit + (ANSWER if all(rank.consequence() for rank in failed) else 0) - time.monotonic()
        if remaining <= 0:
            break
        multiprocessing.connection.wait([rank.pipe for rank in running], min(remaining, 0.1))
        running = _listen(ranks)


def _listen(ranks: list[_Rank]) -> list[_Rank]:
    for rank in ranks:
        if rank.running():
            rank.listen()
    return [rank for rank in ranks if rank.running()]


def _results(ranks: list[_Rank]) -> list[typing.Any]:
    for rank in ranks:
        assert rank.report is not None
        _imported.update(name for name in rank.report.imported if name not in sys.modules)
    return [pickle.loads(rank.report.data) for rank in ranks if rank.report]


def _end(ranks: list[_Rank]) -> None:
    """Lets ranks that have returned come to their end, and kills the rest."""
    good = bool(ranks) and all(rank.report is not None and not rank.failed() for rank in ranks)
    try:
        for rank in ranks if good else []:
            rank.pipe.send("end")
        for rank in ranks if good else []:
            rank.process.join(ANSWER)
    except OSError:
        pass  # it is gone already
    finally:
        for rank in ranks:
            rank.end()


def _print(folder: str, world: int) -> None:
    for number in range(world):
        path = _rank_process.path_of(folder, number, "out")
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if text.strip():
            cut = f".. the last {PRINTED} of {len(text)} characters ..\n" if len(text) > PRINTED else ""
            print(f"--- rank {number} printed ---\n{cut}{text[-PRINTED:].rstrip()}")


_warned: set[tuple[str, str, str, int]] = set()  # what ranks have warned of, given once


def _warn(ranks: list[_Rank]) -> None:
    for warning in (
        warning for rank in ranks if rank.report for warning in rank.report.warned if warning not in _warned
    ):
        _warned.add(warning)
        text, name, path, line = warning
        category = getattr(builtins, name, UserWarning)
        warnings.warn_explicit(text, category if issubclass(category, Warning) else UserWarning, path, line)


# --- what went wrong --------------------------------------------------------------------------------------------------


def _ask(ranks: list[_Rank], folder: str) -> None:
    """Has every rank that still runs say where it stands."""
    silent = [rank for rank in ranks if rank.running()]
    signaled: set[int] = set()
    limit = time.monotonic() + ANSWER
    while silent and time.monotonic() < limit:
        for rank in silent:
            path = _rank_process.path_of(folder, rank.number, "stack")
            if path.exists() and rank.number not in signaled:
                signaled.add(rank.number)
                try:
                    os.kill(rank.process.pid, signal.SIGUSR1)
                except OSError:
                    pass  # it ends just now
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            rank.stack = _stacks.main_thread(text) if _stacks.complete(text) else None
        silent = [rank for rank in silent if rank.stack is None and rank.process.exitcode is None]
        if silent:
            time.sleep(0.01)


def _status(rank: _Rank) -> str:
    """Describes what a rank was doing when the run was ended."""
    if rank.report is not None:
        if rank.report.outcome == "returned":
            return "returned"
        return "failed as another rank had" if rank.consequence() else f"raised {rank.report.title}"
    if rank.died is not None:
        return _death(rank.died)
    return _stacks.line_of(rank.stack or [])


def _death(code: int) -> str:
    if code >= 0:
        return f"left with exit status {code}, without an exception"
    name = signal.Signals(-code).name
    why = " (out of memory?)" if name == "SIGKILL" else ""
    return f"died of {name}{why}"


def _numbers(ranks: typing.Sequence[_Rank]) -> str:
    """rank 3; ranks 0, 1 and 2."""
    words = [str(rank.number) for rank in ranks]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _meanwhile(ranks: list[_Rank], reported: typing.Sequence[_Rank]) -> str:
    rest = [rank for rank in ranks if rank not in reported]
    if not rest:
        return ""
    ranks_by_status: dict[str, list[_Rank]] = {}
    for rank in rest:
        ranks_by_status.setdefault(_status(rank), []).append(rank)
    return "\n\nmeanwhile\n" + "\n".join(f"  {_numbers(group)}: {text}" for text, group in ranks_by_status.items())


def _called(ranks: list[_Rank], folder: str) -> dict[int, list[_collectives.Call]]:
    """Returns the collectives that each rank has called."""
    paths = {rank.number: _rank_process.path_of(folder, rank.number, "calls") for rank in ranks}
    return {number: _collectives.read(path) for number, path in paths.items()}


def _failure(ranks: list[_Rank], folder: str, timeout: float | None) -> RanksFailed:
    _ask(ranks, folder)
    dead = [rank for rank in ranks if rank.died is not None]
    raised = [rank for rank in ranks if rank.report is not None and rank.report.outcome == "raised"]
    found = _collectives.disagreement(_called(ranks, folder))
    of_calls = all(rank.consequence() for rank in raised) and all(rank.died == -signal.SIGABRT for rank in dead)
    if of_calls and (_collectives.is_certain(found) or (found and (dead or raised))):
        return _disagree(ranks, found, "died" if dead else "raised" if raised else "hangs")
    if dead:
        return _died(ranks, dead[0], folder)
    if raised:
        return _raised(ranks, raised)
    return _hangs(ranks, timeout or 0)


def _disagree(ranks: list[_Rank], found: dict[int, _collectives.Call], kind: str) -> RanksFailed:
    """Names the call in which ranks do not agree, which gloo answers by a hang, an abort or some ranks' error."""
    call_groups = _alike(ranks, found)
    lines = "".join(f"\n  {_numbers(group)}: {call.label()}, called by {call.location()}"
                    for group, call in call_groups)
    named_rank = min((group for group, _ in call_groups), key=len)[0]
    return RanksFailed(f"{_said_of(call_groups)}{lines}{_meanwhile(ranks, [])}", kind, named_rank.number)


def _alike(ranks: list[_Rank], found: dict[int, _collectives.Call]) -> list[tuple[list[_Rank], _collectives.Call]]:
    """Ranks that call the same, and what."""
    ranks_by_call: dict[str, list[_Rank]] = {}
    for rank in ranks:
        if rank.number in found:
            ranks_by_call.setdefault(found[rank.number].agreed, []).append(rank)
    return [(group, found[group[0].number]) for group in ranks_by_call.values()]


def _said_of(call_groups: list[tuple[list[_Rank], _collectives.Call]]) -> str:
    summary = " and ".join(f"{_numbers(group)} {call.label()}" for group, call in call_groups)
    return f"ranks call {_collectives.kind_of([call for _, call in call_groups])}: {summary}"


def _warn_of_calls(ranks: list[_Rank], folder: str) -> None:
    """Warns of a run that ended well although its ranks called different collectives, so that its results are
    meaningless."""
    found = _collectives.disagreement(_called(ranks, folder))
    if _collectives.is_certain(found):
        call_sites = "; ".join(f"{_numbers(group)} in {call.location()}" for group, call in _alike(ranks, found))
        warnings.warn(f"no rank failed, but {_said_of(_alike(ranks, found))}; {call_sites}", stacklevel=3)


def _died(ranks: list[_Rank], rank: _Rank, folder: str) -> RanksFailed:
    text = f"rank {rank.number} of {len(ranks)} {_death(rank.died or 0)}"
    path = _rank_process.path_of(folder, rank.number, "stack")
    frames = _stacks.main_thread(path.read_text(errors="replace") if path.exists() else "")
    if frames:
        text += "\n\nIt stood at (innermost last):\n" + _listing(frames)
    last_calls = {number: calls[-1] for number, calls in _called(ranks, folder).items() if calls}
    if rank.died == -signal.SIGABRT and last_calls:
        text += "\n\nThe last collectives that ranks called:" + "".join(
            f"\n  rank {number}: {call.label()}, called by {call.location()}" for number, call in last_calls.items())
    return RanksFailed(text + _meanwhile(ranks, [rank]), "died", rank.number)


def _raised(ranks: list[_Rank], raised: list[_Rank]) -> RanksFailed:
    culprit = next((rank for rank in raised if not rank.consequence()), raised[0])
    assert culprit.report is not None
    matching = [rank for rank in raised if rank.report and rank.report.title == culprit.report.title]
    attribution = f", all alike; this is rank {culprit.number}'s" if len(matching) > 1 else ""
    text = (f"{_numbers(matching)} of {len(ranks)} raised {culprit.report.title}{attribution}\n\n{culprit.report.text}"
            f"{_meanwhile(ranks, matching)}")
    exception = pickle.loads(culprit.report.data) if culprit.report.data else None
    return RanksFailed(text, "raised", culprit.number, exception)


def _hangs(ranks: list[_Rank], timeout: float) -> RanksFailed:
    """Names the ranks that keep the others waiting: those in no collective, else those that have returned already, else
    those that are in another collective than most."""
    # A rank at the end of its capture has returned from what it captured. (All of them: then those are what hangs.)
    running = [rank for rank in ranks if rank.running()]
    running = [rank for rank in running if not _stacks.captured(rank.stack or [])] or running
    waits: dict[str, list[_Rank]] = {}
    for rank in running:
        waits.setdefault(_stacks.collective(rank.stack or []), []).append(rank)
    returned = [rank for rank in ranks if rank not in running]
    alone = waits.get("")
    after = f"after {timeout:g} s"
    if alone:
        named, shown = alone, alone[0]
        text = (f"{_numbers(alone)} of {len(ranks)} {'hangs' if len(alone) == 1 else 'hang'}: {after} "
                f"{'it is' if len(alone) == 1 else f'{_numbers(alone[:1])} is'} {_status(shown)}")
    elif returned:
        named, shown = returned, running[0]
        text = (f"{_numbers(returned)} of {len(ranks)} returned, and {_numbers(running)} still "
                f"{'waits' if len(running) == 1 else 'wait'} in {' and '.join(waits)} {after}: not every rank calls it")
    elif len(waits) > 1:
        named = min(waits.values(), key=len)
        shown = named[0]
        text = (
            f"{_numbers(named)} of {len(ranks)} {'hangs' if len(named) == 1 else 'hang'}: {after} ranks wait in "
            f"different collectives, " + " and ".join(f"{_numbers(group)} in {name}" for name, group in waits.items())
        )
    else:
        lines: dict[str, list[_Rank]] = {}
        for rank in running:
            lines.setdefault(_status(rank), []).append(rank)
        named = min(lines.values(), key=len)
        shown = named[0]
        reason = ("called at different lines" if len(lines) > 1 else
               "called at one line, with different groups or more often by one rank")
        text = (f"{_numbers(named)} of {len(ranks)} {'hangs' if len(named) == 1 else 'hang'}: {after} all ranks wait "
                f"in {next(iter(waits))}, {reason}")
    listing = _listing(shown.stack or [])
    stack_text = f"\n\n{_numbers([shown])} (innermost last)\n{listing}" if listing else ""
    return RanksFailed(text + _meanwhile(ranks, []) + stack_text, "hangs", named[0].number)


def _listing(frames: list[_stacks.Frame]) -> str:
    """Frames as in a traceback, those of libraries inside of the user's innermost one cut to three."""
    user_index = _stacks.users(frames) if frames else 0
    shown = [
        frame
        for i, frame in enumerate(frames)
        if i >= user_index - 3 and frame.function not in _stacks.WRAPPERS and not _rank_process.of_package(frame.path)
    ]
    return "\n".join(f"  {frame.location()} in {frame.function}" + (f": {frame.source()}" if frame.source() else "")
                     for frame in reversed(shown))
