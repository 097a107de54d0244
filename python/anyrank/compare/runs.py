# SPDX-License-Identifier: Apache-2.0
"""Runs a training script on N ranks with a Watcher in each of its processes, and ends all of them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import typing
import uuid

from anyrank._errors import AnyrankError
from anyrank.compare.options import Options, Run, arguments_for
from anyrank.compare.script import Settings
from anyrank.ranks import LOST

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1
SETTLE_SECONDS = 20.0  # that processes get to end after the last report
LOG_LINES = 30  # lines of a script's output that a failure shows
FULL = 1 << 20  # bytes: with fewer left, a run fails for lack of space
LINKED = 4_000  # files of a working folder that get a link each; further folders get one link as a whole
NO_TORCH = "No module named 'torch'"
DEAD = re.compile(r"Root Cause.*?rank +: (?P<rank>\d+).*?exitcode +: (?P<code>-?\d+)", re.DOTALL)  # torchrun's report
LAUNCHERS_REPORT = re.compile(r"^[WE]\d{4} [^\n]*torch/distributed/elastic", re.MULTILINE)
# Trackers would upload a run of two steps, or ask for a login.
TRACKERS_OFF = {"WANDB_MODE": "disabled", "WANDB_DISABLED": "true", "WANDB_SILENT": "true", "COMET_MODE": "disabled",
                "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1", "DISABLE_MLFLOW_INTEGRATION": "TRUE",
                "SWANLAB_MODE": "disabled", "DVCLIVE_TEST": "true"}


@dataclasses.dataclass
class Result:
    """A run that is over. reports: one of each process, by rank."""

    run: Run
    dump: pathlib.Path
    seconds: float
    reports: list[dict[str, typing.Any]]
    files: list[str]  # that the script wrote
    log: pathlib.Path

    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for report in self.reports for note in report["notes"]))


class RunFailed(AnyrankError):
    """A run that gave nothing to compare. The text says which run, why, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 2)


def run_script(options: Options, run: Run, home: pathlib.Path, weights: pathlib.Path | None,
               capture: typing.Mapping[str, typing.Any], show: typing.Callable[[str], None]) -> Result:
    """Runs the script to its last captured step. home: the run's folder. weights: a dump whose initial weights the
    model gets. capture: further arguments of anyrank.capture. Errors: RunFailed, AnyrankError. No process remains,
    whatever happens."""
    for name in ("work", "reports", "hook", "tmp"):
        shutil.rmtree(home / name, ignore_errors=True)
        (home / name).mkdir(parents=True)
    token = uuid.uuid4().hex
    source = pathlib.Path.cwd()
    with _checkout(run, home, source) as tree:
        mirror(tree, home / "work", skip=[home.parent])
        before = _files(home / "work")
        words = _command(options, run, tree, source)
        settings = Settings(str(home / "dump"), str(home / "reports"), options.steps, options.first_step,
                            options.to_the_end, {**options.capture, **capture},
                            str(weights) if weights else None)
        log = home / "output.txt"
        started = time.monotonic()
        with open(log, "wb") as out:
            try:
                child = subprocess.Popen(words, cwd=home / "work", stdin=subprocess.DEVNULL, start_new_session=True,
                                         stdout=None if options.verbose else out,
                                         stderr=None if options.verbose else subprocess.STDOUT,
                                         env=_environment(run, home, settings, token))
            except OSError as error:
                raise RunFailed(f"{run.label}: {words[0]}: {error.strerror}") from None
            try:
                status = _wait(child, home / "reports", run, options, started, show)
            finally:
                _end(child, token)
    result = Result(run, home / "dump", time.monotonic() - started, read_reports(home / "reports"),
                    sorted(_files(home / "work") - before), log)
    try:
        _judge(result, status, options)
    except RunFailed as error:
        is_full = shutil.disk_usage(home).free < FULL
        shutil.rmtree(home, ignore_errors=True)
        raise RunFailed(f"{run.label}: no space left in {home.parent}") if is_full else error
    _tidy(home)
    return result


def _tidy(home: pathlib.Path) -> None:
    """Leaves the dump, the script's output, and the files that the script wrote."""
    for name in ("hook", "tmp", "reports"):
        shutil.rmtree(home / name, ignore_errors=True)
    for folder, names, files in os.walk(home / "work", topdown=False):
        for name in [*names, *files]:
            if os.path.islink(path := os.path.join(folder, name)):
                os.unlink(path)
        if not os.listdir(folder):
            os.rmdir(folder)


# --- starting ---------------------------------------------------------------------------------------------------------


def _command(options: Options, run: Run, tree: pathlib.Path, source: pathlib.Path) -> list[str]:
    if run.command is not None:
        return shlex.split(run.command)
    target = list(options.target)
    if run.commit is not None and target[0] != "-m":
        try:
            target[0] = str(tree / pathlib.Path(target[0]).relative_to(source))
        except ValueError:
            raise RunFailed(f"--commit {run.commit}: {target[0]} is not below the working directory") from None
    words = [*target, *arguments_for(options, run)]
    if starts_ranks(options.target, source):
        return [run.python, *words]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(run.ranks), "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return [run.python, *launcher, *words]


def starts_ranks(target: typing.Sequence[str], source: pathlib.Path) -> bool:
    """Returns whether a script starts its ranks itself, by torch.multiprocessing.spawn."""
    path = pathlib.Path(target[0])
    if target[0] == "-m":
        path = source.joinpath(*target[1].split(".")).with_suffix(".py")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(call in text for call in ("mp.spawn(", "multiprocessing.spawn(", "start_processes("))


def _environment(run: Run, home: pathlib.Path, settings: Settings, token: str) -> dict[str, str]:
    """Returns the run's environment. The hook comes first on Python's path, with a link to this package, so that
    another Python finds the package without this Python's other packages."""
    hook = home / "hook"
    (hook / "sitecustomize.py").symlink_to(PACKAGE / "compare" / "hook" / "sitecustomize.py")
    (hook / "anyrank").symlink_to(PACKAGE)
    path = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH", "")]))
    env = {**TRACKERS_OFF, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, "PYTHONPATH": path,
           "ANYRANK_COMPARE": settings.text(), "ANYRANK_COMPARE_RUN": token, "PYTHONUNBUFFERED": "1",
           "TMPDIR": str(home / "tmp")}
    return {key: value for key, value in env.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR",
                                                                    "MASTER_PORT", "LOCAL_WORLD_SIZE")}


class _checkout:
    """The folder of the sources: the working directory, or a temporary git worktree of another commit."""

    def __init__(self, run: Run, home: pathlib.Path, source: pathlib.Path) -> None:
        self.commit, self.home, self.source = run.commit, home, source
        self.tree: pathlib.Path | None = None

    def __enter__(self) -> pathlib.Path:
        if self.commit is None:
            return self.source
        top = pathlib.Path(_git(self.source, "rev-parse", "--show-toplevel"))
        self.tree = self.home / "tree"
        if self.tree.exists():
            self.__exit__()
        _git(top, "worktree", "add", "--detach", "--force", str(self.tree), self.commit)
        return self.tree / self.source.resolve().relative_to(top.resolve())

    def __exit__(self, *_error: object) -> None:
        if self.tree is not None:
            subprocess.run(["git", "-C", str(self.source), "worktree", "remove", "--force", str(self.tree)],
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            shutil.rmtree(self.tree, ignore_errors=True)


def _git(folder: pathlib.Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RunFailed(f"--commit: git: {error.strerror}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RunFailed(f"--commit: git {words[0]}: {lines[-1]}")
    return done.stdout.strip()


def mirror(source: pathlib.Path, work: pathlib.Path, skip: typing.Sequence[pathlib.Path]) -> None:
    """Fills `work` with folders as in `source` and a link for each file, so that relative paths work and new files stay
    in `work`."""
    budget = LINKED
    pending = [(source, work)]
    left_out = {path.resolve() for path in skip}
    while pending:
        folder, copy = pending.pop(0)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:  # another program has removed it, or it cannot be read
            continue
        for entry in entries:
            path = pathlib.Path(entry.path)
            if path.resolve() in left_out or entry.name in (".git", "__pycache__"):
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and budget > 0 and not (path / "pyvenv.cfg").exists():
                (copy / entry.name).mkdir()
                pending.append((path, copy / entry.name))
            else:
                (copy / entry.name).symlink_to(path)
            budget -= 1


def _files(work: pathlib.Path) -> set[str]:
    """Paths of files that are no links, relative to the folder."""
    return {str(path.relative_to(work)) for folder, _, names in os.walk(work) for name in names
            if not (path := pathlib.Path(folder, name)).is_symlink() and "__pycache__" not in path.parts}


# --- waiting and ending -----------------------------------------------------------------------------------------------


def read_reports(folder: pathlib.Path) -> list[dict[str, typing.Any]]:
    reports = []
    for path in folder.glob("process-*.json"):
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            pass
    return sorted(reports, key=lambda report: (not report["rank"].isdigit(), report["rank"].zfill(6)))


def _wait(child: subprocess.Popen[bytes], reports: pathlib.Path, run: Run, options: Options, started: float,
          show: typing.Callable[[str], None]) -> int | None:
    """Waits for a run. Returns the exit status; None if the run took too long."""
    complete_since = None
    while child.poll() is None:
        now = time.monotonic()
        known = read_reports(reports)
        step = max((report.get("step", 0) for report in known), default=0)
        captured = f"step {step} of {options.steps}" if step else "starting"
        show(f"{run.label}: {captured}, {now - started:.0f} s")
        if now - started > options.timeout:
            return None
        finished = [report for report in known if report["complete"]]
        if len(finished) >= run.ranks and not options.to_the_end:
            complete_since = complete_since or now
            if now - complete_since > SETTLE_SECONDS:
                return 0  # a process of the script's does not end, but all ranks have written their files
        time.sleep(POLL_SECONDS)
    return child.returncode


def _end(child: subprocess.Popen[bytes], token: str) -> None:
    """Kills whatever the run has started and is still there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        pids = _started(token)
        if not pids and child.poll() is not None:
            return
        try:
            os.killpg(child.pid, number)
        except OSError:
            pass
        for pid in pids:
            try:
                os.kill(pid, number)
            except OSError:
                pass
        deadline = time.monotonic() + (2.0 if number == signal.SIGTERM else 10.0)
        while time.monotonic() < deadline and (child.poll() is None or _started(token)):
            time.sleep(POLL_SECONDS / 2)
    child.wait()


def _started(token: str) -> list[int]:
    """Processes of a run, by the token in their environment."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "environ").read_bytes() and (
                    (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"):
                found.append(int(folder.name))
        except (OSError, IndexError, ValueError):
            pass
    return found


# --- failures ---------------------------------------------------------------------------------------------------------


def _judge(result: Result, status: int | None, options: Options) -> None:
    """Raises RunFailed if there is nothing to compare."""
    run, reports = result.run, [report for report in result.reports if report["rank"].isdigit()]
    refused = next((report for report in reports if "refused" in report), None)
    if refused is not None:
        raise RunFailed(f"{run.label}: rank {refused['rank']}: {refused['refused']}")
    complete = [report for report in reports if report["complete"]]
    if len(complete) >= (run.ranks if run.command is None else 1):
        return
    if status is None:
        raise RunFailed(f"{run.label}: no {options.steps} training steps within {options.timeout:g} s (--timeout)"
                        f"{_seen(reports)}{_tail(result.log)}")
    # A rank that lost another one fails as a consequence.
    failed = sorted((report for report in reports if "failed" in report), key=lambda report: (
        any(text in report["failed"] for text in LOST), report["time"]))
    dead = DEAD.search(_read(result.log))
    lost_a_rank = bool(failed) and any(text in failed[0]["failed"] for text in LOST)
    if failed and not (lost_a_rank and dead and dead["rank"] not in {report["rank"] for report in failed}):
        raise RunFailed(f"{run.label}: the script failed on rank {failed[0]['rank']}\n{failed[0]['failed'].rstrip()}")
    if NO_TORCH in _read(result.log):
        raise RunFailed(f"{run.label}: {run.python} has no torch; name the Python that has it by --python or "
                        "ANYRANK_PYTHON")
    if dead:
        code = int(dead["code"])
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        raise RunFailed(f"{run.label}: rank {dead['rank']} {end}{_tail(result.log)}")
    if complete:
        spawned = next((report["spawned"] for report in result.reports if "spawned" in report), None)
        raise RunFailed(f"{run.label}: {len(complete)} of {run.ranks} ranks captured steps" + (
            f": the script starts {spawned} ranks itself; give it their number by an argument, for example "
            "--world {ranks}" if spawned is not None else ""))
    if status != 0:
        end = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        raise RunFailed(f"{run.label}: the script {end} before its first training step{_tail(result.log)}")
    if reports:
        raise RunFailed(f"{run.label}: no training step was found{_seen(reports)}\nTo name the model yourself, add two "
                        "lines to the script (docs/guide/pytorch.md):\n"
                        "    with anyrank.capture(model, \"dump\"):   # on every rank\n"
                        "        train(model)")
    raise RunFailed(f"{run.label}: the script ended without importing torch{_tail(result.log)}")


def _seen(reports: typing.Sequence[dict[str, typing.Any]]) -> str:
    """Describes what a script did, for a user who expected training."""
    report = max(reports, key=lambda report: len(report["called"]), default=None)
    if report is None:
        return ""
    called = ", ".join(report["called"]) or "no module with parameters"
    optimizers = ", ".join(report["optimizers"]) or "no optimizer of torch was made"
    return f": called with gradients: {called}; optimizers: {optimizers}; captured steps: {report['captured_steps']}"


def _read(log: pathlib.Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _tail(log: pathlib.Path) -> str:
    """Returns the last lines that the script printed, without the launcher's report."""
    text = LAUNCHERS_REPORT.split(_read(log), maxsplit=1)[0]
    return "".join(f"\n  | {line}" for line in text.splitlines()[-LOG_LINES:])


def new_folder(options: Options) -> pathlib.Path:
    """Creates the folder of all runs. Errors: AnyrankError if it cannot be written."""
    if options.out is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="anyrank-compare-"))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        probe = options.out / f".anyrank-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise AnyrankError(f"--out {options.out}: {error.strerror}", 2) from None
    return options.out.resolve()
