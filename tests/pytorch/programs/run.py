# SPDX-License-Identifier: Apache-2.0
"""Programs that nobody here wrote, captured in three lines: right ones and broken ones, and what `anyrank verify` says.

    python tests/pytorch/programs/run.py --sources DIR [--anyrank build/anyrank] [--only GLOB..] [--json FILE] [-v]

DIR holds clones of the repositories of catalog.py at the commits it names; `--list-sources` prints how to get them.
Without it, the programs that come with torch and transformers run, and the others are counted as left out.
"""

import argparse
import collections
import fnmatch
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent), str(REPOSITORY / "python"), str(REPOSITORY / "examples/pytorch")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

import cases  # noqa: E402
import hf_trainer  # noqa: E402
import launch  # noqa: E402
import trial  # noqa: E402
from catalog import BY_NAME, PROGRAMS, SOURCES  # noqa: E402
from forks import fork_ranks  # noqa: E402
from runs import RIGHT  # noqa: E402
from wrong import BROKEN, BUGS  # noqa: E402


def prepared(program, sources, folder):
    """A copy of the program with anyrank's lines and the changed ones."""
    shutil.copytree(sources / program.source if program.source else HERE, folder,
                    ignore=None if program.source else lambda _, names: set(names) - {program.file})
    if program.source:
        subprocess.run(["git", "apply", program.patch], cwd=folder, check=True, capture_output=True)
    for name, lines in program.changed.items():
        text = (folder / name).read_text().split("\n")
        for old, new in lines.items():
            if text.count(old) != 1:
                raise SystemExit(f"run.py: {program.name}: {name} has {text.count(old)} lines {old.strip()!r}; is the "
                                 "clone at the commit that catalog.py names?")
            text[text.index(old)] = new
        (folder / name).write_text("\n".join(text))
    for name, make in program.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        make(folder / name)
    return folder


class Programs:
    """Runs cases, each with what it is compared with; references are made once."""

    def __init__(self, anyrank, sources, folder):
        self.anyrank, self.sources, self.folder, self.made = anyrank, sources, folder, {}

    def go(self, case, name, bug=None):
        """The dump of a run, or None where a rank failed; its output is in NAME/log."""
        program, at = BY_NAME[case.program], self.folder / name
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir(parents=True)
        run = prepared(program, self.sources, at / "run")
        if case.state:
            shutil.copytree(self.state(case), run / case.state)
        words = {"per_rank": 8 // case.dp, "batch": 8 // case.dp // case.micro, "micro": case.micro,
                 "dtype": case.dtype, "model": cases.model_folder(case.model) if case.model else ""}
        arguments = [a.format(**words) for a in (*program.arguments, *case.arguments)]
        whole = {"program": run / program.file, "arguments": arguments, "world": case.world, "folder": at,
                 "log": at / "log", "environment": {"TP": str(case.tp)}, "seed": case.seed, "bug": BUGS.get(bug)}
        return run / "dump" if fork_ranks(case.world, lambda rank: launch.run(rank=rank, **whole)) else None

    def state(self, case):
        """What the program leaves behind after a run on one rank, such as a checkpoint to begin from."""
        key = f"state-{case.program}-{case.seed}"
        if not (self.folder / key).exists():
            first = case.on_one(state=None)
            if not self.go(first, key):
                raise SystemExit(f"run.py: {key} failed: {self.folder / key / 'log'}")
        return self.folder / key / "run" / case.state

    def reference(self, case):
        one = case.on_one()
        key = one.name
        if key not in self.made:
            dump = self.go(one, key, None)
            if dump is None:
                raise SystemExit(f"run.py: {key} failed: {self.folder / key / 'log'}")
            self.made[key] = dump
        return self.made[key]

    def look(self, case):
        reference, rule = self.reference(case), cases.TOLERANCE
        if case.dtype != "fp32":
            ours = cases.allowances(self.anyrank, case.model, case.dtype, *hf_trainer.first_batch())
            reference = ours / "activations.safetensors"
            rule = ("--common", "--sensitivity", ours / "allowed.safetensors")
        elif case.micro > 1:
            rule = (*rule, "--common")  # a loss of several micro-batches is not written down
        other = self.go(case, case.name, case.bug)
        return trial.verify(self.anyrank, reference, other, rule, self.folder) if other else None


def left_out(program, sources):
    """Why a program is not run here, or None."""
    missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"without {', '.join(missing)}"
    if program.source and not (sources and (sources / program.source).exists()):
        return "without --sources"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sources", type=pathlib.Path)
    parser.add_argument("--list-sources", action="store_true")
    parser.add_argument("--anyrank", default=REPOSITORY / "build/anyrank", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    if args.list_sources:
        for name, (address, commit) in SOURCES.items():
            print(f"git clone {address} {name} && git -C {name} checkout {commit}")
        return 0
    folder = (args.folder or pathlib.Path(tempfile.mkdtemp(prefix="anyrank-programs-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    out = {p.name: left_out(p, args.sources) for p in PROGRAMS}
    programs, rows = Programs(args.anyrank.resolve(), args.sources and args.sources.resolve(), folder), []
    for case in [*RIGHT, *BROKEN]:
        if not any(fnmatch.fnmatchcase(case.name, glob) for glob in args.only):
            continue
        if out[case.program]:
            rows.append({"case": case.name, "program": case.program, "verdict": "left out", "why": out[case.program]})
            continue
        report = programs.look(case)
        verdict, tensor, cause = trial.judge(case, report)
        rows.append({"case": case.name, "program": case.program, "broken": bool(case.bug), "bug": case.of,
                     "layout": case.layout, "verdict": verdict, "tensor": tensor, "cause": cause})
        print(f"{verdict:12} {case.name:58} {tensor:48} {cause}", flush=True)
        if args.verbose and report and report["first"]:
            print(f"    {report['first'].get('pattern')}\n    {report['first'].get('hint')}", flush=True)
        if verdict == "error":
            print((folder / case.name / "log").read_text()[-1500:], flush=True)
    summary(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.folder is None:
        shutil.rmtree(folder)
    wrong = [row for row in rows if row["verdict"] in ("alarm", "error", "unseen", "other tensor", "wrong")]
    return 1 if wrong else 0


def summary(rows):
    """A line for each program: right runs and alarms, broken runs, first tensors and causes that are right."""
    print(f"{'program':28} {'lines':>5} " + " ".join(f"{word:>6}" for word in (
        "right", "alarms", "broken", "tensor", "cause", "partly")))
    total = collections.Counter()
    for program in PROGRAMS:
        of = [row for row in rows if row["program"] == program.name and row["verdict"] != "left out"]
        right, broken = ([row["verdict"] for row in of if row["broken"] == b] for b in (False, True))
        figures = (len(right), len(right) - right.count("right"), len(broken),
                   sum(broken.count(verdict) for verdict in ("right", "partly", "wrong")), broken.count("right"),
                   broken.count("partly"))
        total.update(dict(enumerate(figures)))
        if of:
            print(f"{program.name:28} {program.added_lines():5} " + " ".join(f"{n:6}" for n in figures))
    print(f"{'all':28} {'':5} " + " ".join(f"{total[i]:6}" for i in range(6)))
    for why, n in collections.Counter(row["why"] for row in rows if row["verdict"] == "left out").items():
        print(f"left out: {n} runs {why}")


if __name__ == "__main__":
    sys.exit(main())
