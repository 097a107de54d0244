# SPDX-License-Identifier: Apache-2.0
"""Programs with PyTorch and the frameworks on it, right and broken: N ranks against one, judged by verify.

    python tests/pytorch/frameworks/run.py [--only GLOB..] [--rounding] [--json FILE] [--tsv FILE] [--folder DIR]
    python tests/pytorch/frameworks/run.py --weights            # without anyrank: final weights of N ranks against one

Needs torch; a program whose framework is not installed is skipped (scripts/install_deps.sh --pytorch installs all).
ANYRANK names another command than build/anyrank. Right programs must be the same as on one rank, broken ones
(NAME!BUG) different; the exit status is 1 if a run is judged wrong.
"""

import argparse
import collections
import fnmatch
import importlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "python")]
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")

import torch  # noqa: E402
# Imported here once, instead of in each process.
import torch._dynamo  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch.distributed.nn.functional  # noqa: E402, F401

import engine_programs  # noqa: E402, F401  registers its programs, as the others do
import framework_programs  # noqa: E402, F401
import megatron_programs  # noqa: E402, F401
import programs  # noqa: E402
import sharded_programs  # noqa: E402, F401
import torch_programs  # noqa: E402, F401

sys.path.append(str(HERE.parent))
from forks import fork_ranks, torchrun  # noqa: E402

sys.path.remove(str(HERE.parent))  # it has a megatron.py, which is not the package of that name

COMMAND = os.path.abspath(os.environ.get("ANYRANK", ROOT / "build/anyrank"))
COLUMNS = ["program", "ranks", "spec", "kind", "rule", "result", "first", "cause", "seconds"]
LIMIT_S = 200  # of a process, beyond which it hangs
# What the programs use of packages that load their modules at the first use.
EAGER = {"transformers": ["LlamaForCausalLM", "BertModel", "Trainer"],
         "trl": ["SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer"]}


def train(program, folder, dumps):
    """Trains on one rank and on the program's ranks, all at once; whether they ended well. Final weights are in
    FOLDER/WORLD.RANK.pt, logs in FOLDER/WORLD.RANK.log, dumps, if `dumps` is given, in DUMPS/one and DUMPS/many."""
    def train_rank(process):
        world, rank = (1, 0) if process == 0 else (program.ranks, process - 1)
        log = os.open(f"{folder}/{world}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        signal.alarm(LIMIT_S)
        if world > 1:
            torchrun(rank, world, f"{folder}/store")
        # One rank has no mesh.
        if program.spec and (world > 1 or "mesh" not in program.spec):
            programs.CAPTURE_OPTIONS["spec"] = program.spec
        bug = {"bug": program.bug} if program.bug and world > 1 else {}
        dump = dumps and f"{dumps}/{'one' if world == 1 else 'many'}"
        torch.save(program.function(rank, world, dump, **bug), f"{folder}/{world}.{rank}.pt")
    return fork_ranks(1 + program.ranks, train_rank)


def failure(folder):
    """The last lines of the logs that have a traceback."""
    logs = [log.read_text(errors="replace") for log in sorted(folder.glob("*.log"))]
    return "\n".join(log[-1500:] for log in logs if "Traceback" in log) or "a process was killed, or ran into the limit"


def weights_difference(program, folder):
    """The largest difference of final weights between one rank and any of several, relative to a tensor's largest
    element, and the tensor that has it."""
    one = torch.load(folder / "1.0.pt")
    worst = 0.0, ""
    for rank in range(program.ranks):
        many = torch.load(folder / f"{program.ranks}.{rank}.pt")
        if many.keys() != one.keys():
            return float("inf"), min(many.keys() ^ one.keys())
        for name, tensor in one.items():
            if not any(fnmatch.fnmatchcase(name, glob) for glob in program.zero_gradients):
                difference = float((tensor - many[name]).abs().max() / tensor.abs().max().clamp(min=1e-30))
                worst = max(worst, (difference, name))
    return worst


def judge_weights(program, folder):
    difference, name = weights_difference(program, folder)
    # Ten times the tolerance, so that no program is on the border.
    same = difference <= program.weights_tolerance * (1 if program.expected == "same" else 10)
    return {"result": "same" if same else "different", "first": name, "cause": f"{difference:.1e}", "text": ""}


def verify(program, folder, dumps, rounding):
    rule = ["--rounding"] if rounding else program.tolerance
    report = folder / "report.json"
    done = subprocess.run([COMMAND, "verify", dumps / "one", dumps / "many", *rule, "--json", report],
                          capture_output=True, text=True, cwd=dumps)
    if done.returncode not in (0, 1):
        return {"result": "unreadable", "text": done.stdout + done.stderr}
    said = json.loads(report.read_text(encoding="utf-8"))
    first = said.get("first") or {}
    return {"result": said["result"], "first": first.get("tensor"), "cause": first.get("cause") or first.get("state"),
            "text": done.stdout + done.stderr}


def look(program, folder, options):
    """The result of a program, its first tensor and cause, text and seconds."""
    folder.mkdir(parents=True)
    dumps = None if options.weights else folder / "dumps"
    if dumps:
        dumps.mkdir()
    rounding = options.rounding and program.rounding
    rule = "weights" if options.weights else "rounding" if rounding else "tolerance"
    programs.CAPTURE_OPTIONS.update({"rounding": True} if rounding else {})
    start = time.monotonic()
    good = train(program, folder, dumps)
    seconds = round(time.monotonic() - start, 1)
    programs.CAPTURE_OPTIONS.clear()
    if not good:
        return {"rule": rule, "result": "failed", "text": failure(folder), "seconds": seconds}
    judged = judge_weights(program, folder) if options.weights else verify(program, folder, dumps, rounding)
    return {"rule": rule, **judged, "seconds": seconds}


def missing_package(program):
    for name in program.needs:
        try:
            if importlib.util.find_spec(name) is None:
                return name
        except ModuleNotFoundError:  # of what it is within
            return name
    return None


def import_packages(chosen):
    for package in dict.fromkeys(name for program in chosen for name in program.needs):
        module = importlib.import_module(package)
        for name in EAGER.get(package, ()):
            getattr(module, name)


def spec_lines(spec):
    return 1 if isinstance(spec, str) else sum(len(value) if isinstance(value, dict) else 1 for value in spec.values())


def print_row(row):
    print(f"{'WRONG' if row['wrong'] else '':5} {row['program']:36} {row['ranks']} {row['kind']:6} {row['result']:10} "
          f"{row['seconds']:5.1f} s  {row['first'] or ''}  {row['cause'] or ''}", flush=True)
    if row["wrong"]:
        print(textwrap.indent(row["text"][-3000:], "      "), flush=True)


def print_summary(rows):
    kinds = collections.Counter((row["kind"], row["result"]) for row in rows)
    for kind in ("right", "broken"):
        results = {result: count for (of_kind, result), count in kinds.items() if of_kind == kind}
        if results:
            print(f"{sum(results.values())} {kind}:", *(f"{count} {result}" for result, count in results.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="of names such as 'trl_*' or '*!*'")
    parser.add_argument("--rounding", action="store_true",
                        help="capture with rounding=True, judge by verify --rounding")
    parser.add_argument("--weights", action="store_true", help="compare final weights, without anyrank")
    parser.add_argument("--folder", type=pathlib.Path, help="keeps dumps and logs")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--tsv", type=pathlib.Path, metavar="FILE", help="appends the table to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [program for name, program in programs.PROGRAMS.items()
              if any(fnmatch.fnmatchcase(name, glob) for glob in options.only)]
    absent = {program.name: missing_package(program) for program in chosen}
    import_packages([program for program in chosen if absent[program.name] is None])
    folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix="anyrank-frameworks-")).resolve()
    rows = []
    for program in chosen:
        run_folder = folder / program.name.replace("!", "-")
        shutil.rmtree(run_folder, ignore_errors=True)
        row = {"program": program.name, "ranks": program.ranks, "spec": spec_lines(program.spec),
               "kind": "right" if program.expected == "same" else "broken", "rule": None, "result": "skipped",
               "first": None, "cause": None, "seconds": 0.0, "text": f"no {absent[program.name]} here"}
        if absent[program.name] is None:
            row.update(look(program, run_folder, options))
            if options.folder is None:
                shutil.rmtree(run_folder)
        row["wrong"] = row["result"] not in (program.expected, "skipped")
        rows.append(row)
        print_row(row)
    for package, count in collections.Counter(filter(None, absent.values())).items():
        print(f"no {package} here, which {count} programs need")
    print_summary(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.tsv:
        with options.tsv.open("a", encoding="utf-8") as table:
            table.writelines("\t".join(
                "" if row[column] is None else str(row[column]) for column in COLUMNS) + "\n" for row in rows)
    if options.folder is None:
        shutil.rmtree(folder)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
