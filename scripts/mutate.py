#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks the product on purpose, one mistake at a time, and expects the tests to see each: a mutation check.

    scripts/mutate.py [--table FILE ...] [--only NAME ...] [--base REV] [--likely-only] [--resume FILE]

In a copy of the tree, which is built once with a shared library: each mistake of a table is written into the copy, what
depends on it is built again, and tests are run until one fails. First those that the table calls likely to see it; only
if all of these pass, everything that ./test runs without sanitizers, what takes least time first. How tests are named,
built and run is scripts/run_tests.py's affair, that of the copy.

A table is a Python file with a list MUTANTS of tuples (what goes wrong, file, what stands there once, what stands there
instead, tests, needs); tests: names as ./test takes them, with spaces between, or the table's TESTS where there are
none; needs: a flag of /proc/cpuinfo without which no test can see the mistake, and may be left out. The texts are found
by what they say, not by line numbers, so that a table outlives other changes of the file.

Prints a line for each mistake and the score; exit status 1 where one was not seen, or no longer applies or builds.
"""

import argparse
import hashlib
import io
import json
import os
import pathlib
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/mutants.py"
MEMORY_LIMIT = 8 << 30  # a mistake may ask for much memory
ALLOWED = ("unused-variable", "unused-parameter", "unused-function", "sign-conversion", "type-limits")
SHORT_S, MIDDLING_S = 1.0, 5.0  # programs that take less run first
# Judges of the sources' text; and what is there to check that the tables apply.
NOT_RUN = ("check/", "scripts/test_mutate")

KILLED, SURVIVED, UNSEEN, SKIPPED = "killed", "survived", "unseen", "skipped"
NO_PLACE, NO_BUILD = "does not apply", "does not build"


class Mutant:
    """A mistake of a table."""

    def __init__(self, entry, tests):
        self.description, self.file, self.old, self.new, *rest = entry
        self.tests = (rest[0] if rest else tests).split()
        self.needs = rest[1] if len(rest) > 1 else ""

    def key(self):
        return [self.file, self.old, self.new]


def read_table(path):
    table = runpy.run_path(str(path))
    return [Mutant(entry, table.get("TESTS", "")) for entry in table["MUTANTS"]]


def places(tree, mutant):
    """How often the text that is to be replaced stands in its file."""
    path = tree / mutant.file
    return path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else 0


# --- the copy ---------------------------------------------------------------------------------------------------------


def files_of_tree():
    """{path: (content, executable)} of what git tracks or would track."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                           check=False)
    paths = [ROOT / name for name in names.stdout.splitlines()] if names.returncode == 0 else [
        path for path in ROOT.rglob("*") if path.relative_to(ROOT).parts[0] not in ("build", ".git")]
    return {str(path.relative_to(ROOT)): (path.read_bytes(), os.access(path, os.X_OK))
            for path in paths if path.is_file()}


def files_of_commit(revision):
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {item.name: (tar.extractfile(item).read(), bool(item.mode & 0o100)) for item in tar if item.isfile()}


def sync(tree, files):
    """Makes the tree hold these files and no others beside build/, and leaves alone what is the same already, which
    then need not be built again."""
    tree.mkdir(parents=True, exist_ok=True)
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree)
        if path.is_file() and name.parts[0] != "build" and str(name) not in files:
            path.unlink()
    for name, (content, executable) in files.items():
        path = tree / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        path.chmod(0o755 if executable else 0o644)


def identity(files):
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256(files[name][0]).digest())
    return digest.hexdigest()[:16]


# --- commands ---------------------------------------------------------------------------------------------------------


def environment(tree, jobs):
    variables = dict(os.environ, ANYRANK_JOBS=str(jobs), PYTHONDONTWRITEBYTECODE="1")
    if shutil.which("ninja"):
        variables.setdefault("CMAKE_GENERATOR", "Ninja")
    if shutil.which("ccache"):
        variables.update(CMAKE_C_COMPILER_LAUNCHER="ccache", CMAKE_CXX_COMPILER_LAUNCHER="ccache", CCACHE_NOHASHDIR="1")
        variables.setdefault("CCACHE_BASEDIR", str(tree))
    return variables


def kill_all(pid):
    """A process that this one started, and all that it started in turn: run_tests.py gives each a group of its own."""
    children = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    doomed = [pid]
    for process_id in doomed:
        doomed += children.get(process_id, [])
    for process_id in doomed:
        try:
            os.kill(process_id, signal.SIGKILL)
        except ProcessLookupError:
            pass


def limits():
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


RESULT = re.compile(r"(ok|skip|FAIL) +(\S+) ")
FAILED_TEST = re.compile(r"     \| \[(?:FAIL|CRASH|----)\] ([a-z0-9_]+::[A-Za-z0-9_]+)")


class Run:
    """What run_tests.py said of some tests: `failed`, [(program, its first failing test)]."""

    def __init__(self, status, failed, output, ended):
        self.status, self.failed, self.output, self.ended = status, failed, output, ended


class Suite:
    """The copy's tests."""

    def __init__(self, tree, jobs, limit):
        self.tree, self.jobs, self.limit = tree, jobs, limit
        self.environment = environment(tree, jobs)

    def command(self, arguments):
        process = subprocess.run(arguments, cwd=self.tree, env=self.environment, stdout=subprocess.PIPE, check=False,
                                 stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace")
        return process.returncode, process.stdout

    def configure(self):
        """A program that is linked with a shared library need not be linked again where that changes. What a mistake
        leaves unused is no reason not to build it."""
        return self.command(["cmake", "--preset", "release", "-DANYRANK_TESTS=ON", "-DBUILD_SHARED_LIBS=ON",
                             "-DCMAKE_LINK_DEPENDS_NO_SHARED=ON", "-DCMAKE_C_FLAGS=" + " ".join(
                                 f"-Wno-error={warning}" for warning in ALLOWED)])

    def build(self):
        return self.command(["scripts/build.sh", "release", "-DANYRANK_TESTS=ON"])

    def names(self):
        _, output = self.command([sys.executable, "scripts/run_tests.py", "--list"])
        return [name for name in output.split() if "/" in name and not name.startswith(NOT_RUN)]

    def seconds(self):
        """{program: seconds} of what has been run already."""
        try:
            return json.loads((self.tree / "build/test_seconds.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def run(self, names, stop=True):
        """Runs the tests of these names; `stop`: up to the first that fails."""
        command = [sys.executable, "scripts/run_tests.py", "--jobs", str(self.jobs), *names]
        process = subprocess.Popen(command, cwd=self.tree, env=self.environment, stdin=subprocess.DEVNULL, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
                                   preexec_fn=limits)
        late = threading.Event()
        timer = threading.Timer(self.limit, lambda: (late.set(), kill_all(process.pid)))
        timer.start()
        output, failed, stopped = [], [], False
        try:
            for line in process.stdout:
                output.append(line)
                result, test = RESULT.match(line), FAILED_TEST.match(line)
                if failed and not failed[-1][1] and test:
                    failed[-1][1] = test.group(1)
                if failed and stop and not line.startswith("     |") and not stopped:
                    stopped = True
                    kill_all(process.pid)
                if result and result.group(1) == "FAIL" and not stopped:
                    failed.append([result.group(2), ""])
            process.wait()
        except BaseException:
            kill_all(process.pid)
            raise
        finally:
            timer.cancel()
            process.stdout.close()
        return Run(process.returncode, failed, "".join(output), not late.is_set())


# --- a mistake --------------------------------------------------------------------------------------------------------


def stages(mutant, suite, likely_only, tried):
    """Lists of names, to be run one after the other: likely ones each for itself, then all others by their time."""
    for name in () if tried else mutant.tests:
        yield [name], True
    if likely_only:
        return
    seconds = suite.seconds()
    rest = [name for name in suite.names() if not any(part in name for part in mutant.tests)]
    cost = {name: seconds.get(name, MIDDLING_S) for name in rest}
    for low, high in ((-1.0, SHORT_S), (SHORT_S, MIDDLING_S), (MIDDLING_S, float("inf"))):
        stage = [name for name in rest if low < cost[name] <= high]
        if stage:
            yield stage, False


def last_line(output):
    return (output.strip().splitlines() or ["no output"])[-1]


def judge(mutant, suite, likely_only, tried, wrong):
    """(verdict, by what). wrong: programs that fail without a mistake; what they say does not count."""
    status, output = suite.build()
    if status != 0:
        errors = [line for line in output.splitlines() if "error:" in line] or [last_line(output)]
        return NO_BUILD, errors[0].strip()
    for names, is_likely in stages(mutant, suite, likely_only, tried):
        names = [name for name in names if name not in wrong]
        if not names:
            continue  # no name at all would run everything
        outcome = suite.run(names, stop=not wrong)
        failed = [failure for failure in outcome.failed if failure[0] not in wrong]
        if failed:
            return KILLED, " ".join(filter(None, failed[0])) + ("" if is_likely else " (not among the likely)")
        if not outcome.ended:
            return KILLED, f"{' '.join(names[:3])}: no end after {suite.limit} s"
        if outcome.status != 0 and not outcome.failed:
            return NO_BUILD, "run_tests.py: " + last_line(outcome.output)
    return (UNSEEN if likely_only else SURVIVED), " ".join(mutant.tests) if likely_only else "every test"


def trial(mutant, suite, options, tried, wrong):
    count = places(suite.tree, mutant)
    if count != 1:
        return NO_PLACE, f"the text stands there {count} times"
    path = suite.tree / mutant.file
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        return judge(mutant, suite, options.likely_only, tried, wrong)
    finally:
        path.write_text(text, encoding="utf-8")


def cpu_has(flag):
    return not flag or flag in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split()


def unbroken(suite, chosen, likely_only):
    """Builds the copy and runs what the mistakes will be shown to; gives the programs that fail already, or None where
    it is not built."""
    for step in (suite.configure, suite.build):
        status, output = step()
        if status != 0:
            print(output[-4000:] + "\nthe tree is not built before anything is broken")
            return None
    names = sorted({name for mutant in chosen for name in mutant.tests}) if likely_only else suite.names()
    outcome = suite.run(names, stop=False)
    if not outcome.ended or (outcome.status != 0 and not outcome.failed):
        print(outcome.output[-4000:] + "\nthe tests do not run before anything is broken")
        return None
    failures = suite.run([name for name, _ in outcome.failed], stop=False).failed if outcome.failed else []
    print("unbroken: " + last_line(outcome.output), flush=True)
    return {name for name, _ in failures}


# --- all of them ------------------------------------------------------------------------------------------------------


class Results:
    """What was found so far, in a file that is written after each mistake."""

    def __init__(self, path, base):
        self.path, self.base, self.list = path, base, []
        if path and path.exists():
            read = json.loads(path.read_text(encoding="utf-8"))
            self.list = read["results"] if read["base"] == base else []

    def find(self, mutant):
        return next((result for result in self.list
                     if [result["file"], result["old"], result["new"]] == mutant.key()), None)

    def add(self, mutant, verdict, reason, seconds):
        self.list = [result for result in self.list if [result["file"], result["old"], result["new"]] != mutant.key()]
        self.list.append({"what": mutant.description, "file": mutant.file, "old": mutant.old, "new": mutant.new,
                          "tests": mutant.tests, "verdict": verdict, "by": reason, "seconds": round(seconds, 1)})
        if self.path:
            self.path.write_text(json.dumps({"base": self.base, "results": self.list}, indent=1), encoding="utf-8")


def show(number, mutant, verdict, reason, seconds):
    print(f"{verdict:14} {number:3} {mutant.file}: {mutant.description} ({seconds:.0f} s): {reason}", flush=True)


def try_all(suite, chosen, results, options):
    """[(mutant, verdict)]; None where the copy does not stand unbroken."""
    fits = [mutant for mutant in chosen if cpu_has(mutant.needs)]
    known = {id(mutant): results.find(mutant) for mutant in fits}
    tried = {id(mutant) for mutant in fits if known[id(mutant)] and known[id(mutant)]["verdict"] == UNSEEN
             and known[id(mutant)]["tests"] == mutant.tests}
    judged = {mutant_id for mutant_id, result in known.items() if result and (
        result["verdict"] in (KILLED, SURVIVED) or (mutant_id in tried and options.likely_only))}
    wrong = set()
    if len(judged) < len(fits):
        wrong = unbroken(suite, [mutant for mutant in fits if id(mutant) not in judged], options.likely_only)
        if wrong is None:
            return None
        if wrong:
            print("these fail before anything is broken, and do not count: " + ", ".join(sorted(wrong)), flush=True)
    found = []
    for number, mutant in enumerate(chosen, 1):
        start, before = time.monotonic(), known.get(id(mutant))
        if id(mutant) not in {id(fit) for fit in fits}:
            verdict, reason = SKIPPED, f"this processor has no {mutant.needs}"
        elif id(mutant) in judged:
            verdict, reason = before["verdict"], before["by"] + " (before)"
        else:
            verdict, reason = trial(mutant, suite, options, id(mutant) in tried, wrong)
            results.add(mutant, verdict, reason, time.monotonic() - start)
        show(number, mutant, verdict, reason, time.monotonic() - start)
        found.append((mutant, verdict))
    return found


def close(found):
    """Prints the score and what was not seen; gives the exit status."""
    count = {}
    for _, verdict in found:
        count[verdict] = count.get(verdict, 0) + 1
    for verdict in (UNSEEN, SURVIVED, NO_PLACE, NO_BUILD):
        for mutant, its in found:
            if its == verdict:
                print(f"{verdict}: {mutant.file}: {mutant.description}")
    print(f"{len(found)} mistakes: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items())))
    return 0 if found and set(count) <= {KILLED, SKIPPED} and KILLED in count else 1


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", metavar="FILE", help="a table; default: tests/mutants.py")
    parser.add_argument("--only", action="append", metavar="NAME",
                        help="only mistakes whose description or file contains NAME; may be given several times")
    parser.add_argument("--base", metavar="REV", help="break this commit; default: the tree as it stands")
    parser.add_argument("--likely-only", action="store_true", help="run the likely tests and no others")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N",
                        help="compilers, and programs, at once (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=1800, metavar="S",
                        help="seconds after which tests are taken to hang (default: %(default)s)")
    parser.add_argument("--keep", metavar="DIR", help="make the copy there, and leave it: the next run builds less")
    parser.add_argument("--resume", metavar="FILE", help="write the results there as JSON, and go on where it ends")
    parser.add_argument("--check", action="store_true", help="see whether the tables apply, and build nothing")
    return parser.parse_args()


def check(chosen, files):
    """Whether each text stands once in its file; gives the exit status."""
    bad = 0
    for mutant in chosen:
        count = files.get(mutant.file, (b"",))[0].decode(errors="replace").count(mutant.old)
        if count != 1 or mutant.old == mutant.new:
            bad += 1
            print(f"{mutant.file}: {mutant.description}: stands there {count} times: {mutant.old}")
    print(f"{len(chosen)} mistakes, {bad} do not apply")
    return 1 if bad or not chosen else 0


def main():
    options = parse_arguments()
    mutants = [mutant for path in options.table or [TABLE] for mutant in read_table(path)]
    chosen = [mutant for mutant in mutants if not options.only
              or any(name in mutant.description or name in mutant.file for name in options.only)]
    files = files_of_commit(options.base) if options.base else files_of_tree()
    if options.check:
        return check(chosen, files)
    tree = pathlib.Path(options.keep or tempfile.mkdtemp(prefix="anyrank-mutate-")).resolve()
    if tree == ROOT or tree in ROOT.parents:
        print(f"mutate.py: {tree}: the copy cannot lie where the tree does", file=sys.stderr)
        return 2
    try:
        sync(tree, files)
        results = Results(pathlib.Path(options.resume) if options.resume else None, identity(files))
        found = try_all(Suite(tree, options.jobs, options.limit), chosen, results, options)
        return close(found) if found is not None else 1
    finally:
        if not options.keep:
            shutil.rmtree(tree, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
