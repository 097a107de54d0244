# SPDX-License-Identifier: Apache-2.0
"""Broken and right PyTorch runs, and what `anyrank verify` says of each: is the cause named, is a right run let alone?

    python tests/pytorch/trial.py --anyrank build/anyrank [--only GLOB..] [--every N] [--folder DIR [--again]]
                                  [--jobs N] [--json FILE] [-v]

Needs torch, transformers and safetensors. Every run is 1 to 4 gloo processes on this machine's CPU, forked from this
one. cases.py lists them: for each broken one the causes (causes.md) that are right, and those that are partly so.
The last lines are a table: runs of a kind by verdict, the share that is right, the share that is wrong. With --folder
all that is made stays, and --again only compares it: a minute. scripts/frozen.py causes tells two --json files apart.
"""

import argparse
import concurrent.futures
import fnmatch
import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]

os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads of a forked process find PyTorch's pool in pieces

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import blind2_cases  # noqa: E402
import blind3_cases  # noqa: E402
import blind_cases  # noqa: E402
import cases  # noqa: E402
import experts_cases  # noqa: E402
import other_kinds_cases  # noqa: E402
import strangers_cases  # noqa: E402
from forks import fork_ranks  # noqa: E402


def on_ranks(world, function, folder):
    """Runs function(rank) in `world` forked processes with a gloo group; True if all of them came back well."""
    store = tempfile.mktemp(dir=folder)

    def run(rank):
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        function(rank)
    return fork_ranks(world, run)


def verify(anyrank, reference, other, rule, folder):
    """The JSON report of verify, or None where it did not end well."""
    out = folder / f"report-{os.getpid()}.json"
    done = subprocess.run([anyrank, "verify", reference, other, *rule, "--json", out, "-q"], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        print(done.stdout, done.stderr, file=sys.stderr)
        return None
    report = json.loads(out.read_text())
    out.unlink()
    return report


def judge(case, report):
    """right, partly, wrong, unseen; of a right run: right, or alarm; unjudged where the allowance says nothing."""
    if report is None:
        return "error", "", ""
    if report["result"] == "unjudged":
        return "unjudged", report["unjudged"][0], ""
    first = report["first"]
    if not case.bug:
        return ("right", "", "") if report["result"] == "same" else ("alarm", first["tensor"], first.get("cause", ""))
    if report["result"] == "same":
        return "unseen", "", ""
    cause, tensor = first.get("cause") or "unknown", first["tensor"]
    given = tensor.startswith("input.")  # where a mistake in the data begins, whatever it is called
    if case.first and not given and not any(fnmatch.fnmatchcase(tensor, glob) for glob in case.first):
        return "other tensor", tensor, cause
    for verdict, causes in (("right", case.causes), ("partly", case.partly + ("unknown", ""))):
        if any(fnmatch.fnmatchcase(cause, glob) for glob in causes):
            return verdict, tensor, cause
    return ("partly" if given else "wrong"), tensor, cause


class Trial:
    def __init__(self, anyrank, folder, keep, again):
        self.anyrank, self.folder, self.keep, self.again, self.references = anyrank, folder, keep, again, {}

    def reference(self, case):
        """What this case is compared with, and verify's rule; made once."""
        key = case.reference()
        if key not in self.references:
            path = self.folder / ("one-" + "".join(c if c.isalnum() else "-" for c in "-".join(key)))
            if not (self.again and path.exists()):
                case.prepare()
                if not on_ranks(1, lambda rank: case.run_reference(path), self.folder):
                    raise SystemExit(f"trial.py: the reference of {case.name} failed")
            self.references[key] = case.against(self.anyrank, path)
        return self.references[key]

    def look(self, case):
        reference, rule = self.reference(case)
        if case.options.get("micro", 1) > 1:
            rule = (*rule, "--common")  # a loss of several micro-batches is not written down
        other = self.folder / case.name
        good = self.again and other.exists()
        if not good:
            shutil.rmtree(other, ignore_errors=True)
            good = on_ranks(case.world, lambda rank: case.run(rank, other), self.folder)
        report = verify(self.anyrank, reference, other, rule, self.folder) if good else None
        if not (self.keep and good):
            shutil.rmtree(other, ignore_errors=True)
        return report


VERDICTS = ("right", "partly", "wrong", "unseen", "other tensor", "alarm", "unjudged", "error")


def kind_of(case):
    """Broken or right, fp32 or bf16, written by hand or Hugging Face's."""
    return ("broken" if case.bug else "right", "fp32" if case.dtype == "fp32" else "bf16",
            "hand-written" if case.hand else "Hugging Face")


def totals(rows):
    """The lines of a table: each kind of run, and each kind of either origin; how many have which verdict."""
    kinds = sorted({row["kind"] for row in rows} | {(*row["kind"][:2], "all") for row in rows})
    yield f"{'runs':28} {'all':>5} " + " ".join(f"{v:>12}" for v in VERDICTS) + f" {'right':>7} {'wrong':>7}"
    for kind in kinds:
        of = [row["verdict"] for row in rows if row["kind"][:2] == kind[:2] and kind[2] in ("all", row["kind"][2])]
        counts = [of.count(verdict) for verdict in VERDICTS]
        yield (f"{' '.join(kind):28} {len(of):5} " + " ".join(f"{n:12}" for n in counts) +
               f" {100 * counts[0] / len(of):6.1f}% {100 * sum(counts[2:3] + counts[4:]) / len(of):6.1f}%")


def sample(asked, every):
    """The first of each N; of strangers' runs the first of each 2N, unless all are asked for."""
    strangers = [case for case in asked if isinstance(case, strangers_cases.Stranger)]
    ours = [case for case in asked if not isinstance(case, strangers_cases.Stranger)]
    return ours[::every] + strangers[::1 if every == 1 else 2 * every]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--anyrank", default="build/anyrank")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB")
    parser.add_argument("--every", type=int, default=1, metavar="N",
                        help="the first of each N of these alone, of strangers' runs of each 2N")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--again", action="store_true", help="compare what --folder holds of an earlier trial")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many runs at once")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="anyrank-trial-"))
    folder.mkdir(parents=True, exist_ok=True)
    cases.FOLDER = folder / "models"
    cases.FOLDER.mkdir(exist_ok=True)
    trial, rows = Trial(args.anyrank, folder, args.folder is not None, args.again), []
    asked = [case for case in [*cases.CASES, *blind_cases.CASES, *blind2_cases.CASES, *blind3_cases.CASES,
                         *experts_cases.CASES, *other_kinds_cases.CASES]
             if any(fnmatch.fnmatchcase(case.name, glob) for glob in args.only)]
    asked = sample(asked, args.every)
    for case in asked:
        trial.reference(case)  # no two processes make one
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        for case, report in zip(asked, pool.map(trial.look, asked)):
            verdict, tensor, cause = judge(case, report)
            worst = report["worst"] if report else []
            rows.append({"case": case.name, "kind": kind_of(case), "verdict": verdict, "tensor": tensor, "cause": cause,
                         "rows": [{key: row.get(key) for key in ("tensor", "cause")} for row in worst]})
            print(f"{verdict:12} {case.name:58} {tensor:48} {cause}", flush=True)
            if args.verbose and report and report["first"]:
                print(f"    {report['first'].get('pattern')}\n    {report['first'].get('hint')}", flush=True)
    print(*totals(rows), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
