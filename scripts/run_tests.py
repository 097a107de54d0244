#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds anyrank, checks its sources and runs its tests; it ends with "N passed, M failed[, K skipped]", with --all
followed by a line of what was skipped and why.

What counts as one: each test of a Criterion program (from its own closing line), each program with a plain main, each
check of the sources, each build that fails, and each sanitizer's run of the programs as a whole. A Criterion program
that ran no test, printed no closing line or reported a leak counts as a failure, because Criterion itself exits 0 then.
"""

import argparse
import concurrent.futures
import contextlib
import fnmatch
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import check_includes
import package_checks

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM_LIMIT_S = 1800  # a guard against hanging: many times what a program takes on a busy machine
EXTENDED_LIMIT_S = 4 * 3600
SHOWN_LINES = 120  # of a failing program's output

SYNTHESIS = re.compile(r"Synthesis: Tested: (\d+) \| Passing: (\d+) \| Failing: (\d+) \| Crashing: (\d+)")
# Criterion names the tests that its filter leaves out "disabled".
SKIPPED_CASE = re.compile(r"^.* \.\.\. skipped (['\"])(.*)\1$", re.MULTILINE)  # of Python's unittest with -v
SKIPPED_TEST = re.compile(r"^\[SKIP\] (\S+?):? +(?!Test is disabled)(.*)$", re.MULTILINE)
NOISE = re.compile(r"\[(?:RUN |PASS)\] |\[SKIP\] .*: Test is disabled|\[(?:----|====)\] (?:Criterion v|Running )|.* \.\.\. ok$")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SANITIZER_REPORT = re.compile(r"ERROR: (?:Address|Leak)Sanitizer|WARNING: ThreadSanitizer|: runtime error: ")
# A sanitizer's shadow memory can be in the way of the kernel's address randomisation; without it the program runs.
SHADOW_MEMORY = re.compile(r"unexpected memory mapping|Shadow memory range interleaves")
EXIT_SKIPPED = 77


class Result:
    """What one program or check gave."""

    def __init__(self, name, passed=0, failed=0, skips=(), output="", seconds=0.0):
        """skips: a reason for each skipped test."""
        self.name, self.passed, self.failed, self.skips = name, passed, failed, list(skips)
        self.output, self.seconds, self.cpu_seconds = output, seconds, 0.0


class Report:
    """Prints a line for each result as it comes, with a moving line between on a terminal, and adds up."""

    def __init__(self, reasons_last=False):
        """reasons_last: why tests were skipped is the line after the counts, where a log of hundreds of lines ends."""
        self.reasons_last = reasons_last
        self.passed = self.failed = 0
        self.skips = {}  # reason: names of the programs, one for each skipped test
        self.failures = []
        self.results = []
        self.lock = threading.Lock()
        self.terminal = sys.stdout.isatty()
        self.started = time.monotonic()

    def clear(self):
        if self.terminal:
            print("\r\033[K", end="", flush=True)

    def running(self, text):
        if self.terminal:
            with self.lock:
                width = shutil.get_terminal_size().columns - 1
                print("\r\033[K" + text[:width], end="", flush=True)

    def heading(self, text):
        self.clear()
        print(f"--- {text} [{time.monotonic() - self.started:.0f} s]", flush=True)

    def add(self, result, counts=True):
        """Prints the result's line; counts it unless it belongs to a sanitizer's run, which counts as one."""
        with self.lock:
            self.clear()
            if counts:
                self.passed += result.passed
                self.failed += result.failed
                for reason in result.skips:
                    self.skips.setdefault(reason, []).append(result.name)
            self.results.append(result)
            word = "FAIL" if result.failed else "skip" if result.skips and not result.passed else "ok"
            tested = result.passed + result.failed
            count = f"{result.passed}/{tested}" if tested > 1 else ""
            print(f"{word:4} {result.name:44} {count:>9} {result.seconds:7.1f} s", flush=True)
            if result.failed:
                self.failures.append(result.name)
                self.show(result.output)

    def rerun(self, name, why):
        with self.lock:
            self.clear()
            print(f"again {name}: {why}", flush=True)

    def skip(self, name, reason):
        """Counts what is left out, without a line of its own."""
        self.skips.setdefault(reason, []).append(name)

    @staticmethod
    def show(output):
        lines = ESCAPES.sub("", output).rstrip().splitlines()
        lines = [line for line in lines if not NOISE.match(line)]
        for line in lines[:SHOWN_LINES]:
            print("     | " + line)
        if len(lines) > SHOWN_LINES:
            print(f"     | ... and {len(lines) - SHOWN_LINES} more lines")
        sys.stdout.flush()

    def show_slowest(self, count=20):
        """The programs and checks that took most of the processors' time, which is what two of them share."""
        print(f"--- the {count} slowest: processor seconds, wall seconds")
        for result in sorted(self.results, key=lambda result: -result.cpu_seconds)[:count]:
            print(f"{result.name:49} {result.cpu_seconds:9.1f} {result.seconds:7.1f} s")
        print(f"{'all ' + str(len(self.results)):49} {sum(r.cpu_seconds for r in self.results):9.1f}"
              f" {sum(r.seconds for r in self.results):7.1f} s")

    def close(self):
        """Prints why tests were skipped, what failed and the closing line; gives the exit status."""
        self.clear()
        reasons = []
        for reason, names in sorted(self.skips.items()):
            places = ", ".join(f"{name} {names.count(name)}" if names.count(name) > 1 else name
                               for name in sorted(set(names)))
            reasons.append(f"{reason} ({places})")
        if not self.reasons_last:
            print("".join(f"skipped: {reason}\n" for reason in reasons), end="")
        if self.failures:
            print("failed: " + ", ".join(self.failures))
        print(f"total time {time.monotonic() - self.started:.0f} s")
        line = f"{self.passed} passed, {self.failed} failed"
        if self.skips:
            line += f", {sum(map(len, self.skips.values()))} skipped"
        print(line, flush=True)
        if self.reasons_last:
            print("skipped: " + ("; ".join(reasons) or "nothing"), flush=True)
        return 1 if self.failed or not self.passed else 0


class Ended:
    """How a command ended: its exit status, output, wall and processor seconds, and whether it was killed at its limit."""

    def __init__(self, status, output, seconds, cpu_seconds, timed_out):
        self.status, self.output, self.timed_out = status, output, timed_out
        self.seconds, self.cpu_seconds = seconds, cpu_seconds


# With which the command would start itself again (cli/main.c), as half of all processes did; cli/edges_test holds
# that it does. Threads that spin while they wait keep others from running where programs share the cores.
STARTED = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "4000", "OMP_STACKSIZE": "8M"}


def run(command, limit, environment=None):
    """Runs a command in its own process group to its end, or kills the group when `limit` seconds are over."""
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env={**STARTED, **os.environ, **(environment or {})},
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    timed_out = threading.Event()

    def kill():
        # The whole group: Criterion's tests are processes too. A group that is gone needs no signal.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end():
        timed_out.set()
        kill()

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        kill()
        raise
    finally:
        timer.cancel()
        process.stdout.close()
    process.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return Ended(process.returncode, output.decode(errors="replace"), time.monotonic() - start,
                 usage.ru_utime + usage.ru_stime, timed_out.is_set())


def exit_text(status):
    """"exit status 3" or "killed by SIGSEGV"."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return "killed by " + signal.Signals(-status).name
    except ValueError:
        return f"killed by signal {-status}"


# --- programs ---------------------------------------------------------------------------------------------------------


SUITE = re.compile(r"^(?:Test(?:Suite)?|EVERY_CLAIM)\s*\(\s*(\w+)", re.MULTILINE)
PATH_SUITE = re.compile(r"^PATH_SUITE\(\s*(\w+)", re.MULTILINE)  # a suite for each path of the list in PATHS
PATHS = re.findall(r"\bX\((\w+), __VA_ARGS__\)",
                   (ROOT / "tests/cpu/contract_paths.h").read_text(encoding="utf-8"))


def suites_of(text):
    """The suites of a Criterion file; a suite has one file."""
    return sorted({*SUITE.findall(text), *(f"{suite}_{path}" for suite in PATH_SUITE.findall(text) for path in PATHS)})


class Program:
    """What runs as one: the suites of tests/<folder>/<noun>_test.c, a Criterion file that is linked with its folder's
    others into <build>/tests/<folder>; tests/<folder>/<noun>_main.c, which has a plain main and is
    <build>/tests/<noun>_main; tests/extended/<noun>.c likewise, which runs for minutes to hours and is built only with
    ANYRANK_EXTENDED; or examples/<noun>.c, <build>/example_<noun>."""

    def __init__(self, source):
        self.folder, self.stem = source.parent.name, source.stem
        self.criterion = self.stem.endswith("_test")
        self.extended = self.folder == "extended"
        self.name = f"{self.folder}/{self.stem}"
        self.suites = suites_of(source.read_text(encoding="utf-8")) if self.criterion else []
        self.path = (f"example_{self.stem}" if self.folder == "examples"
                     else f"tests/{self.folder}" if self.criterion else f"tests/{self.stem}")

    def command(self, build):
        """The command that runs it, with all its tests one after the other: a test of ranks takes all the cores."""
        path = str(ROOT / build / self.path)
        return [path, "-j1", "--verbose", "--filter", f"@({'|'.join(self.suites)})/*"] if self.criterion else [path]


def programs(extended):
    """All programs, the extended ones only if asked for; in the order of their names."""
    patterns = ["tests/*/*_test.c", "tests/*/*_main.c", "tests/extended/*.c", "examples/*.c"]
    found = {source for pattern in patterns for source in ROOT.glob(pattern)}
    return [program for program in map(Program, sorted(found)) if extended or not program.extended]


def lost_suites(selected, build):
    """Suites of the Criterion programs that no file of `selected` names: their tests would not run, unseen."""
    lost = []
    for path in sorted({program.path for program in selected if program.criterion}):
        named = {suite for program in selected if program.path == path for suite in program.suites}
        if (ROOT / build / path).exists():
            output = run([str(ROOT / build / path), "--list"], PROGRAM_LIMIT_S).output
            lost += [f"{path}: {suite}" for suite in re.findall(r"^(\w+): \d+ tests?", ESCAPES.sub("", output), re.MULTILINE)
                     if suite not in named]
    return lost


def runner_crashed(ended):
    """Tests run in processes of their own: the one that died then is Criterion's, as 2.4.1's does in its own code once in
    some thousands of runs on a busy machine."""
    return ended.status == -signal.SIGSEGV and not ended.timed_out and not SYNTHESIS.search(ESCAPES.sub("", ended.output))


def judge_criterion(name, ended, limit):
    """The result of a Criterion program, from its closing line and everything that line leaves out."""
    plain = ESCAPES.sub("", ended.output)
    lines = SYNTHESIS.findall(plain)
    if ended.timed_out:
        return Result(name, 0, 1, output=plain + f"\nno end after {limit} s: killed")
    if not lines:
        return Result(name, 0, 1, output=plain + f"\nno closing line; {exit_text(ended.status)}")
    tested, passing, failing, _ = (int(number) for number in lines[-1])
    skips = [why or test for test, why in SKIPPED_TEST.findall(plain)]
    if tested == 0 and not skips:
        return Result(name, 0, 1, output=plain + "\nthe program ran no test")
    if SANITIZER_REPORT.search(plain) and failing == 0:
        failing, plain = 1, plain + "\na sanitizer reported an error"
    if ended.status != 0 and failing == 0:
        failing, plain = 1, plain + f"\nall tests passed, but {exit_text(ended.status)}"
    return Result(name, passing, failing, skips, plain)


def skip_reason(output):
    lines = output.strip().splitlines()
    return lines[-1] if lines else "the program gave no reason"


def judge_main(name, ended, limit):
    """The result of a program with a plain main, or of a check: one test."""
    if ended.timed_out:
        return Result(name, 0, 1, output=ended.output + f"\nno end after {limit} s: killed")
    if ended.status == EXIT_SKIPPED:
        return Result(name, skips=[skip_reason(ended.output)])
    if ended.status != 0:
        return Result(name, 0, 1, output=ended.output + f"\n{exit_text(ended.status)}")
    if SANITIZER_REPORT.search(ended.output):
        return Result(name, 0, 1, output=ended.output + "\na sanitizer reported an error")
    return Result(name, 1, 0, [why for _, why in SKIPPED_CASE.findall(ended.output)], ended.output)


def timed(result, ended):
    result.seconds, result.cpu_seconds = ended.seconds, ended.cpu_seconds
    return result


RUNNERS = {"build/aarch64": ["scripts/run_aarch64.sh"]}  # what runs the programs of a build directory, if not the kernel


def run_program(program, build, report):
    """Runs one program of a build directory."""
    if not (ROOT / build / program.path).exists():
        return Result(program.name, 0, 1, output=f"{build}/{program.path} was not built")
    limit = EXTENDED_LIMIT_S if program.extended else PROGRAM_LIMIT_S
    environment = {"CRITERION_JOBS": "1", "LC_ALL": "C",  # the closing line untranslated
                   # Each thread maps stacks of freed frames, and freed memory lies unused until more is freed: of the
                   # smallest size, and up to 16 MB a process, both take a quarter less of it all.
                   "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:max_uar_stack_size_log=16:"
                                   "malloc_context_size=10:quarantine_size_mb=16",
                   "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=0:second_deadlock_stack=1"}
    command = RUNNERS.get(build, []) + program.command(build)
    report.running(f"running {build}: {program.name}")
    ended = run(command, limit, environment)
    if SHADOW_MEMORY.search(ended.output) and shutil.which("setarch"):
        ended = run(["setarch", "-R", *command], limit, environment)
    if program.criterion and runner_crashed(ended):
        report.rerun(program.name, f"Criterion's own process was {exit_text(ended.status)}")
        ended = run(command, limit, environment)
    return timed((judge_criterion if program.criterion else judge_main)(program.name, ended, limit), ended)


def read_seconds(path):
    """What each program took in an earlier run of this build directory; empty if there was none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def bits_on_arm(build):
    """The command of ARM gives the hashes of bits.tsv that take a second each."""
    return simple_check("verify/bits_test", ["env", f"ANYRANK={ROOT}/scripts/run_aarch64.sh {ROOT}/{build}/anyrank",
                                             sys.executable, "tests/verify/bits_test.py"])


# What takes longest, where no earlier run of the build directory tells.
LONG = ["python/wheel_test", "fuzz/run", "pages/long_test", "darwin/compiled", "gpu/cuda_command_test",
        "verify/pytorch_page_test", "pytorch/trial_test", "pytorch/frameworks_test",
        "python/pytest_example_test", "python/test_pytest_plugin", "check/clang", "python/logprobs_test", "python/test_capture_ranks",
        "python/test_callbacks",
        "verify/fault_test", "cli/command_test", "gpu/ptx_test", "install/install_test", "cli/process_test",
        "verify/check_test", "verify/steps_test", "cli/cluster_test", "check/format",
        "sim/collectives_test", "cli/device_test", "gpu/nccl_command_test", "verify/pages_test", "sim/trace_main",
        "python/resharding_test", "cli/edges_test", "gpu/conformance_main", "plan/lint_test", "verify/schedule_check_test",
        "cli/train_test", "verify/gradcheck_test", "verify/golden_training_test", "mpi/mpi_test",
        "verify/cluster_check_test", "verify/golden_test", "verify/compare_test", "cpu/contract_test", "cli/dump_test",
        "numerics/scalar_test", "verify/plans_test", "baseline/baseline_training_golden_test", "cli/golden_verify_test"]


def run_all(tasks, build, report, jobs, label=""):
    """Runs tasks, (name, function that gives a Result), `jobs` at a time, and reports each as it ends; gives the
    results. label: of a sanitizer, whose runs count as one in the end."""
    results = []
    seconds_path = ROOT / build / "test_seconds.json"
    seconds = read_seconds(seconds_path)
    # The longest first: none of them is left to run alone at the end.
    guess = {name: 10.0 - 0.1 * place for place, name in enumerate(LONG)}
    tasks = sorted(tasks, key=lambda task: -seconds.get(task[0], guess.get(task[0], 0.0)))
    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(function) for _, function in tasks]
        for future in concurrent.futures.as_completed(futures):
            result = future.result()
            seconds[result.name] = round(result.seconds, 2)
            result.name = label + result.name
            results.append(result)
            report.add(result, counts=not label)
    if seconds_path.parent.is_dir():
        seconds_path.write_text(json.dumps(seconds, indent=1), encoding="utf-8")
    return results


def program_tasks(selected, build, report):
    return [(program.name, functools.partial(run_program, program, build, report)) for program in selected]


# --- checks of the sources --------------------------------------------------------------------------------------------


def sources(*suffixes):
    """The project's files with these endings, relative to the root."""
    folders = check_includes.top_folders(ROOT)[0]
    found = [path for folder in folders for suffix in suffixes for path in (ROOT / folder).rglob("*" + suffix)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def simple_check(name, command, limit=PROGRAM_LIMIT_S):
    """Runs a script that checks or tests something: one test, judged as a program with a plain main."""
    ended = run(command, limit)
    return timed(judge_main(name, ended, limit), ended)


NEED_BUILD = {"check/baseline_symbols", "check/clang", "scripts/test_command"}


def needs_build(name):
    return name in NEED_BUILD or not name.startswith(("check/", "scripts/", "fuzz/", "darwin/"))


FORMAT_MAJOR = 14  # whose output the sources are kept in


def check_format(name):
    tool = shutil.which(f"clang-format-{FORMAT_MAJOR}") or shutil.which("clang-format")
    if not tool:
        return Result(name, skips=["no clang-format here (scripts/install_deps.sh --lint installs it)"])
    version = re.search(r"version (\d+)", run([tool, "--version"], PROGRAM_LIMIT_S).output)
    major = int(version.group(1)) if version else 0
    if major < FORMAT_MAJOR:
        return Result(name, skips=[f"clang-format {major} is too old; {FORMAT_MAJOR} or newer is needed"])
    result = simple_check(name, [tool, "--dry-run", "--Werror", *sources(".c", ".h", ".cu", ".cuh", ".cc")])
    complaint = re.compile(r"^(\S+?):\d+:\d+: error: code should be clang-formatted", re.MULTILINE)
    files = sorted(set(complaint.findall(result.output)))
    if files:
        result.output = f"clang-format -i (version {FORMAT_MAJOR}) puts these right:\n" + "\n".join(files)
    if result.failed and major > FORMAT_MAJOR:
        # Each major version changes a few rules, so a difference here is no fault of the sources.
        return Result(name, skips=[f"clang-format {major} wants a format other than that of {FORMAT_MAJOR}"])
    return result


def check_scripts_parse(name):
    """Every shell script parses, and every Python script compiles."""
    start, problems = time.monotonic(), []
    for path in [ROOT / "test", ROOT / "quickstart", ROOT / ".ci/run", *sorted((ROOT / "scripts").glob("*.sh")),
                 *sorted((ROOT / "gpu").glob("*.sh")), *sorted((ROOT / "examples").rglob("*.sh")),
                 ROOT / "examples/launch/slurm.sbatch"]:
        if path.exists():
            ended = run(["sh", "-n", str(path)], PROGRAM_LIMIT_S)
            if ended.status:
                problems.append(ended.output)
    for path in sorted([*(ROOT / "scripts").glob("*.py"), *ROOT.glob("tests/*/*.py")]):
        try:
            compile(path.read_text(encoding="utf-8"), str(path), "exec")
        except (SyntaxError, UnicodeDecodeError) as error:
            problems.append(f"{path}: {error}")
    problems += package_checks.problems()
    return Result(name, int(not problems), int(bool(problems)), output="\n".join(problems),
                  seconds=time.monotonic() - start)


def package_test(name, path):
    """The result of one file of the package's tests."""
    reason = package_checks.too_old()
    if reason:
        return Result(name, skips=[reason])
    ended = run(package_checks.test_command(path), PROGRAM_LIMIT_S, package_checks.test_environment())
    counted = package_checks.counts(ended.output)
    if ended.timed_out or not counted:
        return timed(judge_main(name, ended, PROGRAM_LIMIT_S) if ended.status or ended.timed_out else
                     Result(name, 0, 1, output=ended.output + "\nno closing line"), ended)
    passed, failed, skips = counted
    if ended.status and not failed:
        failed, ended.output = 1, ended.output + f"\nall tests passed, but {exit_text(ended.status)}"
    return timed(Result(name, passed, failed, skips, ended.output), ended)


def check_types(name):
    """mypy --strict over the package, where it is installed."""
    if run([package_checks.interpreter(), "-c", "import mypy"], PROGRAM_LIMIT_S).status:
        return Result(name, skips=["no mypy here (scripts/install_deps.sh --pytorch installs it)"])
    return simple_check(name, package_checks.types_command())


def source_checks(build, extended):
    """[(name, function)] of the checks beside the test programs; `build` is the release build directory, which only
    those in NEED_BUILD look into. The extended ones only if asked for."""
    python = package_checks.interpreter()
    checks = [
        ("check/includes", lambda name: simple_check(name, [python, "scripts/check_includes.py", "."])),
        ("check/numbers", lambda name: simple_check(name, [python, "scripts/check_numbers.py", "."])),
        ("check/public", lambda name: simple_check(name, [python, "scripts/check_public.py", "."])),
        ("check/measures", lambda name: simple_check(name, [python, "scripts/measures.py", "--check"])),
        ("check/format", check_format),
        ("check/scripts_parse", check_scripts_parse),
        ("check/types", check_types),
    ]
    checks.append(("check/clang", lambda name: simple_check(name, [python, "scripts/check_clang.py", str(build)])))
    symbols = ROOT / "scripts/check_baseline_symbols.sh"
    if os.access(symbols, os.X_OK):
        checks.append(("check/baseline_symbols", lambda name: simple_check(name, [str(symbols), build])))
    for name, *command in ("darwin/compiled", "scripts/check_darwin.sh"), ("fuzz/run", "tests/fuzz/run.sh", "--runs", "20000"):
        checks.append((name, lambda name, command=command: simple_check(name, command)))
    for path in sorted((ROOT / "scripts").glob("test_*.py")):
        checks.append((f"scripts/{path.stem}", lambda name, path=path: simple_check(name, [python, str(path)])))
    for path in sorted(ROOT.glob("tests/*/*_test.py")):
        name = f"{path.parent.name}/{path.stem}"
        verbose = ["-v"] if "unittest.main(" in path.read_text(encoding="utf-8") else []
        checks.append((name, lambda name, command=(python, str(path), *verbose): simple_check(name, command)))
    for path in package_checks.test_files():
        checks.append((f"python/{path.stem}", lambda name, path=path: package_test(name, path)))
    tables = sorted(["tests/mutants.py", *(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/*mutants.py"))])
    every = [word for table in tables for word in ("--table", table)]
    checks.append(("check/mutants_apply", lambda name: simple_check(name, [python, "scripts/mutate.py", "--check", *every])))
    for path in sorted(ROOT.glob("tests/*/*mutants.py")) if extended else []:
        name = f"{path.parent.name}/{path.stem}"
        command = [python, "scripts/mutate.py", "--likely-only", "--table", str(path)]
        checks.append((name, lambda name, command=command: simple_check(name, command, EXTENDED_LIMIT_S)))
    for path in sorted((ROOT / "scripts").glob("test_*.sh")):
        checks.append((f"scripts/{path.stem}", lambda name, path=path: simple_check(name, ["sh", str(path)])))
    return checks


# --- builds -----------------------------------------------------------------------------------------------------------


def build_preset(preset, report, extended=False, tests=True):
    """Configures and builds, with the tests or without; a failure counts as one failed test. True if it was built."""
    report.heading(f"building preset {preset}")
    start = time.monotonic()
    command = ["scripts/build.sh", preset, f"-DANYRANK_TESTS={'ON' if tests else 'OFF'}",
               f"-DANYRANK_EXTENDED={'ON' if extended else 'OFF'}"]
    if report.terminal:
        # The script moves a line of its own on a terminal, so its output goes there.
        status, output = subprocess.run(command, cwd=ROOT, check=False).returncode, "the messages are above"
    else:
        ended = run(command, EXTENDED_LIMIT_S)
        status, output = ended.status, ended.output
    if status != 0:
        report.add(Result(f"build/{preset}", 0, 1, output=output, seconds=time.monotonic() - start))
        return False
    if not report.terminal:
        print(output.rstrip(), flush=True)
    return True


def preset_run(preset, title, selected, report, jobs):
    """Builds another preset than release and runs programs of it: one test in all."""
    if not (selected or preset == "aarch64") or not build_preset(preset, report, tests=bool(selected)):
        return
    report.heading(f"running {title}")
    start = time.monotonic()
    os.environ["ANYRANK_TEST_SMALL"] = "1"  # tests/support/small.h
    build = f"build/{preset}"
    tasks = program_tasks(selected, build, report)
    if preset == "aarch64":
        tasks.append(("verify/bits_test", functools.partial(bits_on_arm, build)))
    results = run_all(tasks, build, report, jobs, label=preset + ":")
    failed = [result.name for result in results if result.failed]
    report.add(Result(f"preset/{preset}", int(not failed), int(bool(failed)), output="failed: " + ", ".join(failed),
                      seconds=time.monotonic() - start))


def is_quick(name):
    """Whether a program is of the minutes that look at every kernel and layer: what another processor needs."""
    return name.startswith(("arith/", "cpu/", "core/", "layers/", "numerics/", "sim/swap"))


SANITIZERS = {"asan": ("under AddressSanitizer and UndefinedBehaviorSanitizer", lambda program: True),
              # Criterion does not run under ThreadSanitizer, the baseline has no threads, and the longest example trains
              # as others do.
              "tsan": ("under ThreadSanitizer",
                       lambda program: not program.criterion and not program.name.startswith("baseline/")
                       and program.name != "examples/mlp_classifier")}


PRESETS = {**SANITIZERS, "aarch64": ("as programs of 64-bit ARM", lambda program: True)}


def lacks_arm():
    """Why this machine cannot build and run programs of 64-bit ARM beside its own; None if it can."""
    if os.uname().machine == "aarch64":
        return "this machine is of 64-bit ARM itself"
    for command in ["scripts/install_deps.sh", "--aarch64", "--check"], ["scripts/run_aarch64.sh", "--check"]:
        ended = run(command, PROGRAM_LIMIT_S)
        if ended.status:
            return "no build for 64-bit ARM: " + skip_reason(ended.output)
    return None


# What plain ./test leaves to ./test --all, which continuous integration runs, and to ./test NAME.
HELD = {
    "format, measures, types, clang, kernels' PTX, the wheel, the site and the project's own scripts":
        "check/format check/measures check/types check/clang darwin/compiled gpu/ptx_test gpu/device_check_test "
        "python/wheel_test "
        "install/install_test "
        "pages/site_test scripts/*",
    "the command with the CUDA device": "gpu/cuda_command_test",
    "processes, launchers, MPI and NCCL's host side":
        "cli/process_test cli/cluster_test cli/device_test examples/launch_test examples/ci_test "
        "gpu/nccl_command_test mpi/mpi_test",
    "kernels of other processors": "cpu/contract_integers_test cpu/contract_sharded_test",
    "long runs of single subjects": "cli/scale_test run/checkpoint_kill_main sim/trace_main sim/swap_main",
    "pages that take long, and pictures": "pages/long_test pages/pictures_test",
    "readers of other people's files, fuzzed": "fuzz/run",
    "conversions, and runs with PyTorch": "python/convert_test pytorch/*",
}


def held_for(name):
    """Why plain ./test leaves out a program or check; None if it runs it."""
    return next((reason for reason, globs in HELD.items() if any(fnmatch.fnmatchcase(name, glob) for glob in globs.split())),
                None)


def matching(names, name):
    return not names or any(part in name for part in names)


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="./test", description="Builds anyrank, checks its sources and runs its tests.",
        epilog="examples: ./test sim (every program and check with 'sim' in its name); ./test tsan; ./test asan sim; "
               "./test aarch64 --quick")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="run only programs and checks whose name contains NAME, without sanitizers; 'asan' and "
                             "'tsan' among the names run them under these sanitizers instead, 'aarch64' those of "
                             "64-bit ARM, by qemu on another processor")
    parser.add_argument("--all", action="store_true", help="also run the programs under both sanitizers, and the command "
                                                           "of 64-bit ARM where its compiler and qemu are installed")
    parser.add_argument("--quick", action="store_true", help="only the programs of kernels, layers and what they stand on")
    parser.add_argument("--extended", action="store_true", help="also run the long programs of tests/extended")
    parser.add_argument("--times", action="store_true", help="print the 20 slowest programs and checks at the end")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    # Two more than processors: tests of launchers and processes spend most of their time waiting for each other.
    parser.add_argument("--jobs", type=int, default=min(4, 2 + (os.cpu_count() or 1)), metavar="N",
                        help="programs run at once (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error("--jobs: expected a number from 1 on")
    return arguments


def main():
    arguments = parse_arguments()
    sanitizers = [name for name in PRESETS if name in arguments.names]
    names = [name for name in arguments.names if name not in PRESETS]
    asked = list(sanitizers)
    if arguments.all and not sanitizers:
        sanitizers = list(PRESETS)
    everything = programs(arguments.extended)
    thorough = bool(names or arguments.all or arguments.extended)
    package_checks.with_pytorch = thorough
    if not thorough:
        os.environ["ANYRANK_TEST_SMALL"] = "1"  # tests/support/small.h
    if arguments.extended:
        os.environ["ANYRANK_TEST_EXTENDED"] = "1"  # the long tests among the others
    only_sanitizers = bool(sanitizers) and not arguments.all
    fitting = [program for program in everything if matching(names, program.name)
               and (is_quick(program.name) or not arguments.quick)]
    selected = [] if only_sanitizers else fitting
    checks = [] if only_sanitizers or arguments.quick else [c for c in source_checks("build", arguments.extended)
                                                            if matching(names, c[0])]
    withheld = {}
    if not thorough:
        withheld = {name: held_for(name) for name in [name for name, _ in checks] + [
            program.name for program in selected] if held_for(name)}
        checks = [check for check in checks if check[0] not in withheld]
        selected = [program for program in selected if program.name not in withheld]
    if arguments.list:
        print("\n".join([*withheld] + [name for name, _ in checks] + [program.name for program in selected]
                        + sanitizers))
        return 0
    if names and not fitting and not checks:
        print(f"test: no program or check has {' or '.join(names)} in its name; ./test --list prints the names",
              file=sys.stderr)
        return 2

    report = Report(reasons_last=arguments.all)
    try:
        if selected or any(needs_build(name) for name, _ in checks):
            if not build_preset("release", report, arguments.extended or arguments.all):
                selected = []
                sanitizers = []  # they would say the same again
                checks = [check for check in checks if not needs_build(check[0])]
        if not os.path.exists("/proc/self/exe"):
            # Criterion finds its tests through it, and without it finds none and says nothing.
            report.add(Result("machine/proc", 0, 1, output="/proc is not mounted here, and the tests need it"))
            selected, sanitizers = [], []
        tasks = [(name, functools.partial(check, name)) for name, check in checks]
        tasks += program_tasks(selected, "build", report)
        if tasks:
            report.heading("checking the sources and running the tests")
            lost = lost_suites(everything, "build") if selected else []
            if lost:
                report.add(Result("tests/suites", 0, 1, output="suites that no file names in a Test(): " + ", ".join(lost)))
            run_all(tasks, "build", report, arguments.jobs)
        for name, reason in withheld.items():
            report.skip(name, reason + ": ./test --all")
        for preset in sanitizers:
            title, fits = PRESETS[preset]
            lacking = lacks_arm() if preset == "aarch64" else None
            if lacking:
                report.skip("preset/aarch64", lacking)
                continue
            # Programs of ARM run by qemu at a tenth of the speed: unless asked for, the command's hashes alone.
            chosen = [program for program in fitting if fits(program) and not program.extended] if (
                preset != "aarch64" or preset in asked) else []
            preset_run(preset, title, chosen, report, arguments.jobs)
    except KeyboardInterrupt:
        report.clear()
        print("interrupted")
        report.failed += 1
        report.failures.append("interrupted")
    if arguments.times:
        report.show_slowest()
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
