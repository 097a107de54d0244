#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All-reduces of anyrank beside those of Open MPI and MPICH on this machine: bench/allreduce_peers.py [options]

Compiles bench/mpi/allreduce.c for each MPI and runs the three programs in turns, one short run of each a round, so that
a machine that changes its speed changes it for all of them. Prints a table of median times and of the medians of
per-round ratios, and which of the targets they meet. What of the two MPIs is missing is installed, on Debian and Ubuntu
(--no-install: it is left out).

The ranks of anyrank are threads, which read each other's memory where it lies. The ranks of an MPI are processes, which
cannot: part of the difference is that they have to copy, or to ask the kernel to. Each MPI gets the fastest of the
settings below for each number of ranks and size, found in runs that do not count. Nobody is bound to cores.

Exit status: 0 all targets met (or none among the cases), 1 some not met, 2 wrong usage or something missing.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
KIB, MIB = 1024, 1024 * 1024
SIZES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, MIB, 25 * MIB, 100 * MIB)
REPETITIONS = 5  # in one run, of which the run's figure is the median
LIMIT_S = 2.0  # no repetition of an MPI begins after this
RUN_LIMIT_S = 300  # longer than any run takes; one that takes longer has failed

# Ways of moving data, and algorithms in place of those that Open MPI chooses for itself.
OPEN_MPI = {
    "as installed": [],
    "copies through shared memory": ["--mca", "pml", "ob1", "--mca", "btl", "self,vader",
                                     "--mca", "btl_vader_single_copy_mechanism", "none"],
    "recursive doubling": ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "3"],
    "reduce, then broadcast": ["--mca", "coll_tuned_use_dynamic_rules", "1",
                               "--mca", "coll_tuned_allreduce_algorithm", "2"],
    "ring": ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4"],
}
MPICH = {
    "as installed": {},
    "yielding at once": {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
    "System V memory": {"UCX_TLS": "self,sysv,cma", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
}
PACKAGES = {"Open MPI": ("mpicc.openmpi", "mpirun.openmpi", ["openmpi-bin", "libopenmpi-dev"]),
            "MPICH": ("mpicc.mpich", "mpiexec.mpich", ["mpich", "libmpich-dev"])}


class Failed(Exception):
    """A message for the person who ran the script."""


# --- the programs -----------------------------------------------------------------------------------------------------


def run(command, environment=None, limit=RUN_LIMIT_S):
    """Standard output of a command. Ends its whole process group when it takes too long."""
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"no end after {limit} s: {' '.join(command)}") from None
        raise
    if process.returncode != 0:
        raise Failed(f"exit status {process.returncode}: {' '.join(command)}\n{(err or out).strip()[-2000:]}")
    return out


def json_line(text):
    """The program's line among whatever its launcher says."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise Failed(f"no result in: {text.strip()[-500:]}")
    return json.loads(lines[-1])


class Anyrank:
    def __init__(self, binary, algorithm):
        self.name = "anyrank" if algorithm == "auto" else f"anyrank {algorithm}"
        self.binary, self.algorithm = binary, algorithm

    def settings(self, _ranks):
        return ["-"]

    def measure(self, ranks, size, dtype, _setting):
        out = run([self.binary, "bench", "allreduce", "--ranks", str(ranks), "--bytes", str(size), "--dtype", dtype,
                   "--algorithm", self.algorithm, "--repetitions", str(REPETITIONS), "--quiet", "--json", "-"])
        return json.loads(out)["rows"][0]


class Mpi:
    """An MPI for which bench/mpi/allreduce.c is compiled into `folder`."""

    def __init__(self, name, folder):
        self.name = name
        self.compiler, self.launcher, _ = PACKAGES[name]
        self.program = str(pathlib.Path(folder) / self.compiler)
        run([self.compiler, "-O3", "-march=native", "-o", self.program, str(ROOT / "bench/mpi/allreduce.c")])

    def version(self):
        if self.name == "MPICH":
            return run(["mpichversion"]).split("\n")[0].split(":")[1].strip()
        return run([self.launcher, "--version"]).split("\n")[0].split()[-1]

    def settings(self, ranks):
        if self.name == "Open MPI":
            # Two ranks have one exchange, whatever it is called.
            return [name for name in OPEN_MPI if ranks > 2 or name in ("as installed", "copies through shared memory")]
        return list(MPICH)

    def measure(self, ranks, size, dtype, setting):
        arguments = [self.program, str(size), dtype, str(REPETITIONS), str(LIMIT_S)]
        if self.name == "Open MPI":
            # --oversubscribe also makes ranks that wait yield where there are more of them than cores.
            return json_line(run([self.launcher, "--oversubscribe", "--bind-to", "none", *OPEN_MPI[setting], "-n",
                                  str(ranks), *arguments],
                                 {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}))
        return json_line(run([self.launcher, "-n", str(ranks), *arguments], MPICH[setting]))


# --- installing -------------------------------------------------------------------------------------------------------


def install(packages):
    """Through apt-get, and sudo where not root."""
    if not shutil.which("apt-get"):
        raise Failed(f"this machine has no apt-get; install what it calls {', '.join(packages)} and run this again")
    if os.geteuid() != 0 and not shutil.which("sudo"):
        raise Failed(f"not root, and there is no sudo; as root: apt-get install {' '.join(packages)}")
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120"]
    print("installing " + " ".join(packages), file=sys.stderr)
    # A failed update is no reason to give up: the lists there are may be good enough.
    subprocess.run([*apt, "update"], stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    subprocess.run([*apt, "install", "--no-install-recommends", *packages], stdin=subprocess.DEVNULL,
                   stdout=sys.stderr, check=False)


def missing(name):
    compiler, launcher, _ = PACKAGES[name]
    return not (shutil.which(compiler) and shutil.which(launcher))


def peers(folder, may_install):
    wanted = [name for name in PACKAGES if missing(name)]
    if wanted and may_install:
        install([package for name in wanted for package in PACKAGES[name][2]])
    found = []
    for name in PACKAGES:
        if not missing(name):
            found.append(Mpi(name, folder))
        elif may_install:
            raise Failed(f"{name} is still missing: no {PACKAGES[name][0]} or no {PACKAGES[name][1]}")
        else:
            print(f"{name} is not here and left out", file=sys.stderr)
    return found


# --- targets ----------------------------------------------------------------------------------------------------------


def targets(row):
    """[(what, limit, measured)] of a case; measured None where a peer is missing."""
    size, found = row["bytes"], []
    over_open_mpi = {KIB: 0.7 if row["ranks"] == 2 else 0.6, 64 * KIB: 0.20, MIB: 0.25}.get(size)
    if size >= 25 * MIB:
        over_open_mpi = 0.30
    if over_open_mpi is not None:
        found.append(("of Open MPI", over_open_mpi, row["over"].get("Open MPI")))
    if size >= 64 * KIB and "anyrank ring" in row["seconds"]:
        found.append(("ring of Open MPI", 1.0, row["ring_over"].get("Open MPI")))
    if size >= MIB:
        found.append(("times a copy", 1.15 if size >= 25 * MIB else 1.4, row["over_copy"]))
    return [{"what": what, "at_most": limit, "measured": measured,
             "met": None if measured is None else measured <= limit} for what, limit, measured in found]


# --- measuring --------------------------------------------------------------------------------------------------------


def best_setting(program, case, trials):
    """The fastest of its settings in runs that do not count."""
    settings = program.settings(case[0])
    if len(settings) == 1:
        return settings[0]
    seconds = {s: min(program.measure(*case, s)["seconds"] for _ in range(trials)) for s in settings}
    return min(settings, key=lambda s: seconds[s])


def measure_case(programs, case, setting, rounds):
    ranks, size, dtype = case
    runs = {p.name: [] for p in programs}
    for number in range(rounds):
        # Each round begins with another program, so that none always follows the same one.
        turn = number % len(programs)
        for p in programs[turn:] + programs[:turn]:
            runs[p.name].append(p.measure(ranks, size, dtype, setting[p.name]))
    seconds = {name: [r["seconds"] for r in of] for name, of in runs.items()}

    def over(program):
        return {name: statistics.median(a / b for a, b in zip(seconds[program], seconds[name]))
                for name in seconds if not name.startswith("anyrank")} if program in seconds else {}

    def spread(name):
        return (max(seconds[name]) - min(seconds[name])) / statistics.median(seconds[name])

    row = {"ranks": ranks, "bytes": size, "numerics": dtype, "rounds": rounds,
           "seconds": {name: statistics.median(of) for name, of in seconds.items()},
           "spread": {name: spread(name) for name in seconds},
           "over": over("anyrank"), "ring_over": over("anyrank ring"),
           "over_copy": statistics.median(r["over_copy"] for r in runs["anyrank"]),
           "settings": {name: s for name, s in setting.items() if s != "-"}}
    row["targets"] = targets(row)
    return row


# --- telling ----------------------------------------------------------------------------------------------------------


def size_text(size):
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def time_text(seconds):
    if seconds is None:
        return "-"
    return f"{1e6 * seconds:.2f} us" if seconds < 0.9995e-3 else f"{1e3 * seconds:.2f} ms"


def ratio_text(ratio):
    if ratio is None:
        return "-"
    return "<0.001" if ratio < 0.001 else f"{ratio:.3f}" if ratio < 0.1 else f"{ratio:.2f}"


COLUMNS = ("ranks", "size", "type", "anyrank", "ring", "Open MPI", "MPICH", "of Open MPI", "of MPICH",
           "ring of Open MPI", "times a copy", "targets")


def cells(row):
    seconds = row["seconds"]
    missed = [f"{t['what']} {t['measured']:.2f} > {t['at_most']:.2f}" for t in row["targets"] if t["met"] is False]
    known = [t for t in row["targets"] if t["met"] is not None]
    return (str(row["ranks"]), size_text(row["bytes"]), row["numerics"], time_text(seconds["anyrank"]),
            time_text(seconds.get("anyrank ring")), time_text(seconds.get("Open MPI")),
            time_text(seconds.get("MPICH")), ratio_text(row["over"].get("Open MPI")),
            ratio_text(row["over"].get("MPICH")), ratio_text(row["ring_over"].get("Open MPI")),
            ratio_text(row["over_copy"]), "missed: " + "; ".join(missed) if missed else "met" if known else "-")


def print_markdown(rows):
    """The table of docs/measured.md."""
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in rows:
        print("| " + " | ".join(cells(row)) + " |")


def print_table(rows):
    table = [COLUMNS, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    left = {COLUMNS.index("type"), COLUMNS.index("targets")}
    for line in table:
        print("  ".join(text.ljust(width) if i in left else text.rjust(width)
                        for i, (text, width) in enumerate(zip(line, widths))).rstrip())
    print("""
Sums, not in place; medians. 'of Open MPI', 'of MPICH': anyrank's time over theirs, round by round. 'ring': anyrank's
ring algorithm, as an explicit choice. 'times a copy': over a copy with the same traffic, measured in anyrank's run.
anyrank's ranks are threads that read each other's memory where it lies; MPI's are processes, which cannot.
Targets: of Open MPI at most 0.70 (2 ranks) or 0.60 at 1 KiB, 0.20 at 64 KiB, 0.25 at 1 MiB, 0.30 from 25 MiB; ring at
most 1.00 of Open MPI from 64 KiB; at most 1.40 copies at 1 MiB and 1.15 from 25 MiB.""")


def machine():
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        pass
    return {"cpu": model or platform.machine(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
            "kernel": platform.release()}


# --- main -------------------------------------------------------------------------------------------------------------


def arguments_of(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(SIZES), metavar="D")
    parser.add_argument("--dtype", nargs="+", choices=("f32", "i64"), default=["f32", "i64"])
    parser.add_argument("--rounds", type=int, default=7, help="of which the medians are told (default 7)")
    parser.add_argument("--trials", type=int, default=2, help="runs of each setting of an MPI before (default 2)")
    parser.add_argument("--anyrank", default=str(ROOT / "build/anyrank"), metavar="FILE", help="default build/anyrank")
    parser.add_argument("--no-ring", action="store_true", help="leave out anyrank's ring")
    parser.add_argument("--no-install", action="store_true", help="install nothing; leave out what is missing")
    parser.add_argument("--dry-run", action="store_true", help="compile, tell what would run, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/measured.md has it")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is standard output")
    o = parser.parse_args(argv)
    if min(o.ranks) < 2 or min(o.bytes) < 8 or any(size % 8 for size in o.bytes) or o.rounds < 1 or o.trials < 1:
        parser.error("at least 2 ranks, sizes that are multiples of 8, at least 1 round and trial expected")
    return o


def write_json(result, to):
    text = json.dumps(result, indent=1) + "\n"
    if to == "-":
        sys.stdout.write(text)
    else:
        pathlib.Path(to).write_text(text, encoding="utf-8")


def compare(o, folder):
    if not os.access(o.anyrank, os.X_OK):
        raise Failed(f"there is no {o.anyrank}; build it (./quickstart does) or name it with --anyrank")
    mpis = peers(folder, not o.no_install)
    programs = [Anyrank(o.anyrank, "auto"), *mpis]
    if not o.no_ring:
        programs.insert(1, Anyrank(o.anyrank, "ring"))
    cases = [(n, size, dtype) for n in o.ranks for size in o.bytes for dtype in o.dtype]
    result = {"tool": "allreduce_peers", "date": time.strftime("%Y-%m-%d"), "machine": machine(),
              "versions": {p.name: p.version() for p in mpis}, "rows": []}
    if o.dry_run:
        result["cases"] = [list(case) for case in cases]
        print(f"{len(cases)} cases x {o.rounds} rounds of " + ", ".join(p.name for p in programs), file=sys.stderr)
    if result["machine"]["load"] > 0.5:
        print(f"this machine is busy (load {result['machine']['load']:.1f}): processes that wait for each other by "
              "spinning suffer most, and the ratios tell little", file=sys.stderr)
    settings = {}
    for number, case in enumerate([] if o.dry_run else cases):
        if sys.stderr.isatty():
            print(f"\r\033[K{number + 1}/{len(cases)}: {case[0]} ranks, {size_text(case[1])}, {case[2]}", end="",
                  file=sys.stderr, flush=True)
        if case[:2] not in settings:
            settings[case[:2]] = {p.name: best_setting(p, case, o.trials) for p in programs}
        result["rows"].append(measure_case(programs, case, settings[case[:2]], o.rounds))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return result


def main(argv):
    o = arguments_of(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = compare(o, folder)
    except Failed as error:
        print(f"allreduce_peers.py: {error}", file=sys.stderr)
        return 2
    if o.json:
        write_json(result, o.json)
    if o.json != "-" and not o.dry_run:
        (print_markdown if o.markdown else print_table)(result["rows"])
        print(", ".join(f"{name} {version}" for name, version in result["versions"].items()) +
              f"; {result['machine']['cpu']}, {result['machine']['cores']} cores; {result['date']}")
    return 1 if any(t["met"] is False for row in result["rows"] for t in row["targets"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
