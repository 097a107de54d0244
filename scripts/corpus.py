#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The corpus of differences: every case that the explaining engine of BASE saw, with what it answered.

    scripts/corpus.py make FOLDER [test|faults|trial ..]   builds BASE in FOLDER/tree and collects into FOLDER/corpus:
                                                           from the tests, the faults and the PyTorch trials (all three)
    scripts/corpus.py truths FOLDER                        writes tests/corpus/truths.tsv from BASE's own lists
    scripts/corpus.py manifest FOLDER                      writes tests/corpus/manifest.tsv.xz
    scripts/corpus.py compare FOLDER                       tells how much of the manifest a corpus holds
    scripts/corpus.py judge FOLDER [GLOB ..]               explains the cases, those whose labels or old causes match,
                                                           by anyrank.explain: writes build/judged.tsv
    scripts/corpus.py reliability                          of build/judged.tsv: how often each cause was right, into the
                                                           package, which prints it beside the cause

A case is a JSON file in corpus/cases, named by its SHA-256. Kind "verify": the files of two dumps (in corpus/files, by
SHA-256), options and report. Without a kind: one tensor's full reference and its ranks' copies (in corpus/arrays, raw
fp32) with the facts of the run and the answer; `check` and the engine's own tests make these. A label names what was
done: "fault:NAME", or the folders of the other dump, of which the last is a trial's case. truths.tsv gives a label's
right causes; a case without a truth counts as right.

tests/corpus/cases.patch makes BASE write the second kind; tests/corpus/keep_verify.py, which stands in the command's
place, keeps the first. An engine that replaces BASE's is run over the corpus and must keep its right answers; where it
has another name for a cause, tests/corpus/renamed.tsv has both.
"""

import csv
import hashlib
import json
import lzma
import os
import pathlib
import re
import subprocess
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = ROOT / "tests/corpus"
BASE = "d540d0c8ccae7dab83317bc6c83063c5c2fb7b44"  # the last commit before faults went
MANIFEST, DIGITS = HERE / "manifest.tsv.xz", 16
FOLDERS = ("cases", "files", "arrays")


def run(words, **options):
    print("+", *map(str, words), flush=True)
    return subprocess.run(list(map(str, words)), check=False, **options).returncode


def build(tree):
    """BASE with the patch, its command behind the wrapper."""
    if not tree.exists():
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", tree, BASE], check=True)
        subprocess.run(["git", "-C", tree, "apply", HERE / "cases.patch"], check=True)
    real = tree / "build/anyrank.real"
    if real.exists():
        real.rename(tree / "build/anyrank")
    subprocess.run([tree / "scripts/build.sh", "release"], check=True)
    (tree / "build/anyrank").rename(real)
    (tree / "build/anyrank").write_bytes((HERE / "keep_verify.py").read_bytes())
    (tree / "build/anyrank").chmod(0o755)


def python_with_torch():
    """Of the environment that the tests make for themselves."""
    venv = pathlib.Path.home() / ".cache/anyrank/python-venv/bin/python"
    return venv if venv.exists() else sys.executable


def collect(folder, stages):
    tree, corpus = folder / "tree", folder / "corpus"
    for name in FOLDERS:
        (corpus / name).mkdir(parents=True, exist_ok=True)
    build(tree)
    os.environ |= {"ANYRANK_CASES": str(corpus), "ANYRANK": str(tree / "build/anyrank"), "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(tree / "python"), "DS_ACCELERATOR": "cpu"}
    for stage in stages or ("faults", "trial", "test"):
        before = len(list((corpus / "cases").iterdir()))
        if stage == "faults":
            cases = ["^grads-faults", "^spoiled", "^faults$", "^check-inject"]
            words = ["record", tree / "build/anyrank", folder / "frozen", *cases]
            status = run([sys.executable, tree / "scripts/frozen.py", *words], cwd=tree)
            for name in faults_of(tree):
                run([tree / "build/anyrank", "check", "--inject", name, "-q"], cwd=tree, stdout=subprocess.DEVNULL)
        elif stage == "trial":
            words = ["--anyrank", tree / "build/anyrank", "--jobs", 2, "--folder", folder / "trial"]
            status = run([python_with_torch(), tree / "tests/pytorch/trial.py", *words], cwd=tree)
        else:  # the release tree is built; its command must not be built again over the wrapper
            status = run_tests(tree)
        print(f"{stage}: status {status}, {len(list((corpus / 'cases').iterdir())) - before} cases", flush=True)


def run_tests(tree):
    """The programs that explain differences, and the tests of the command and of Python that verify."""
    status = 0
    for suite in ("verify", "dump", "check"):
        for program in sorted((tree / "build/tests").glob(f"{suite}*")):
            if program.is_file() and os.access(program, os.X_OK):
                status |= run([program, "-j2"], cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for test in sorted([*(tree / "tests/cli").glob("*_test.py"), *(tree / "tests/verify").glob("*_test.py"),
                        *(tree / "tests/pytorch").glob("*_test.py"), *(tree / "tests/python").glob("*_test.py")]):
        if test.name != "trial_test.py":
            status |= run([python_with_torch(), test], cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status |= run([python_with_torch(), "-m", "pytest", "-q", "-n", "2", tree / "python/anyrank/tests"], cwd=tree,
                  stdout=subprocess.DEVNULL)
    return status


def faults_of(tree):
    words = [tree / "build/anyrank.real", "bugs", "--json", "-"]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    return [fault["name"] for fault in json.loads(process.stdout)["faults"]]


def truths(folder):
    """{label: (right causes, partly right ones)} of the faults' table of expectations and of the trials' lists."""
    tree = folder / "tree"
    paths = sorted((tree / "tests/verify").glob("fault*.[ch]"))
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    rows = {}
    for row in re.split(r"\{F\(", text)[1:]:
        cause = re.search(r',\s*-?\d+,\s*"([a-z_0-9]+)', row)  # after the first tensor and its rank
        if cause:
            rows.setdefault("fault:" + row.split(")")[0], (set(), set()))[0].add(cause.group(1))
    listing = """import sys, json
sys.path[:0] = ["tests/pytorch", "python"]
import trial as t
lists = (t.cases, t.blind_cases, t.blind2_cases, t.blind3_cases, t.experts_cases, t.other_kinds_cases)
rows = [[c.name, list(c.causes), list(c.partly)] if c.bug else [c.name, [], []] for l in lists for c in l.CASES]
print(json.dumps(rows))
"""
    process = subprocess.run([python_with_torch(), "-c", listing], cwd=tree, capture_output=True, text=True, check=True)
    for name, right, partly in json.loads(process.stdout.splitlines()[-1]):
        rows[name] = (set(right), set(partly))
    with open(HERE / "truths.tsv", "w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, delimiter="\t", lineterminator="\n")
        out.writerow(("label", "right", "partly"))
        out.writerows((label, " ".join(sorted(right)), " ".join(sorted(partly)))
                      for label, (right, partly) in sorted(rows.items()))
    print(f"{len(rows)} labels")


def rows_of(folder):
    """(SHA-256, kind, label, the answer's cause) of each case."""
    for path in sorted((folder / "corpus/cases").glob("*.json")):
        data = path.read_bytes()
        assert hashlib.sha256(data).hexdigest() == path.stem, path
        case = json.loads(data)
        if case.get("kind") == "verify":
            cause = (case["report"].get("first") or {}).get("cause")
        else:
            cause = case["answer"]["cause"]
        yield path.stem, case.get("kind", "tensor"), case["label"], cause or ""


def manifest(folder):
    rows = list(rows_of(folder))
    with lzma.open(MANIFEST, "wt", encoding="utf-8", newline="") as file:
        out = csv.writer(file, delimiter="\t", lineterminator="\n")
        out.writerow(("sha256", "kind", "label", "cause"))
        out.writerows((name[:DIGITS], *row) for name, *row in rows)
    print(f"{len(rows)} cases, {sum(kind == 'verify' for _, kind, _, _ in rows)} of two dumps")


def compare(folder):
    with lzma.open(MANIFEST, "rt", encoding="utf-8", newline="") as file:
        known = {row["sha256"] for row in csv.DictReader(file, delimiter="\t")}
    present = {name[:DIGITS] for name, *_ in rows_of(folder)}
    print(f"{len(known & present)} of the manifest's {len(known)} cases are here, and {len(present - known)} others")
    return 0 if known <= present else 1


# --- the engine that replaces BASE's ----------------------------------------------------------------------------------


def _open(case, folder, scratch):
    """The dumps of a case of two dumps."""
    from anyrank.dump import Dump
    paths = []
    for side, dump in zip(("reference", "other"), case["inputs"]):
        root = pathlib.Path(scratch, side)
        for name, digest in dump["files"].items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(folder / "corpus/files" / digest)
        paths.append(root / next(iter(dump["files"])) if dump["is_file"] else root)
    maps = {}
    for option, value in zip(case["options"], case["options"][1:]):
        if option in ("--map", "--reference-map"):
            side = next(entry for entry in case["inputs"][2:] if entry["path"] == value)
            maps[option] = folder / "corpus/files" / next(iter(side["files"].values()))
    return Dump(paths[0], maps.get("--reference-map")), Dump(paths[1], maps.get("--map"))


def _tensor_case(case, folder):
    """The engine's case of one tensor, as the patch wrote it."""
    import numpy as np
    from anyrank.explain import tensors

    def array(digest, shape, dtype=np.float32):
        return digest and np.fromfile(folder / "corpus/arrays" / digest, dtype).reshape(shape)

    shape = tuple(case["shape"])
    kinds = {"i": "init", "f": "fwd", "b": "bwd", "g": "grad", "c": "clip", "n": "new", "w": "weight", "?": "weight"}
    name = tensors.Name(case["name"].split(":")[0], kinds[chr(case["pass"])], max(case["step"], 1))
    reference = array(case["reference"], shape)
    copies = []
    for rank, copy in enumerate(case["copies"]):
        layout, boxes, values = copy["layout"], [], []
        if copy["data"] is None:
            continue
        if tuple(layout["shape"]) != shape:
            return None  # heads apart from their features: the patch keeps the layout of another shape
        local = array(copy["data"], tuple(copy["shape"]))
        for box in layout["boxes"]:
            boxes.append(tuple(slice(start, start + extent) for start, extent in zip(box["global"], box["extent"])))
            values.append(local[tuple(slice(start, start + extent)
                                      for start, extent in zip(box["local"], box["extent"]))])
        copies.append(tensors.Copy(case["first_rank"] + rank, tuple(boxes), tuple(values)))
    dumped = {}
    for entry in case["dump"]:
        if entry["data"]:
            dumped[entry["name"]] = array(entry["data"], tuple(entry["shape"]))
    for key, text in (("before", name.with_kind("new", name.step - 1) if name.step > 1 else name.with_kind("init")),
                      ("last", name.with_kind("grad", name.step - 1))):
        if case[key]:
            dumped.setdefault(text, array(case[key], shape))
    axes = [extent for extent in case["mesh"]]
    mesh = {label: extent for label, extent in zip(AXES, axes) if extent > 1}
    runs = tensors.Runs(dumped, {}, mesh=mesh, batch=case["batch"], seq=case["seq"],
                        micro_batches=max(case["micro_batches"], 1), exact=case["flags"]["exact"])
    from anyrank.explain.dumps import worst_of
    return tensors.thinned(tensors.Case(name, reference, worst_of(reference, copies), tuple(copies), runs,
                                        float(case["allowed"] or 0.0)))


AXES = ("pp", "dp", "cp", "cp_inner", "tp")  # ARI_AXIS_PP, .. (outermost first)


def judge_one(job):
    path, folder = job
    import tempfile
    import traceback
    from anyrank.explain import explain
    from anyrank.explain.run import explain_run
    warnings.filterwarnings("error", ".* ended at ", RuntimeWarning)  # a generator that fails
    case = json.loads(path.read_bytes())
    try:
        if case.get("kind") == "verify":
            old = (case["report"].get("first") or {}).get("cause") or ""
            with tempfile.TemporaryDirectory() as scratch:
                reference, other = _open(case, folder, scratch)
                answer = explain_run(reference, other, case["report"]).answer
        else:
            old = case["answer"]["cause"] or ""
            built = _tensor_case(case, folder)
            answer = explain.explain(built) if built else explain.Answer("not_tried")
    except Exception as error:  # noqa: BLE001  a defect of the engine, which is counted
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        return path.stem, case["label"], "", "error", f"{location}: {error!r}"[:300]
    return path.stem, case["label"], old, answer.cause, answer.sentence[:300]


def judge(folder, globs):
    import concurrent.futures
    import fnmatch
    import collections
    sys.path.insert(0, str(ROOT / "python"))
    with open(HERE / "truths.tsv", encoding="utf-8") as file:
        known = {row["label"]: (row["right"].split(), row["partly"].split())
                 for row in csv.DictReader(file, delimiter="\t")}
    names = collections.defaultdict(set)
    for line in (HERE / "renamed.tsv").read_text(encoding="utf-8").splitlines():
        old, new = line.split("\t")
        names[old].add(new)

    def today(cause):
        return {cause}.union(*map(today, names[cause])) if cause in names else {cause}

    def judgement(label, cause):
        """How a cause is judged: right, partly, unknown or wrong; "": there is no truth."""
        right, partly = known.get(label) or known.get(label.rpartition("/")[2]) or (None, None)
        if right is None:
            return ""
        for verdict, causes in (("right", right), ("partly", partly)):
            if any(fnmatch.fnmatchcase(cause, glob) for old in causes for glob in today(old)):
                return verdict
        return "unknown" if cause in ("unknown", "") else "wrong"

    jobs = [(path, folder) for path in sorted((folder / "corpus/cases").glob("*.json"))]
    if globs:
        jobs = [job for job in jobs
                if any(fnmatch.fnmatchcase(text, glob) for glob in globs for text in texts_of(job[0]))]
    counts, preserved = collections.Counter(), collections.Counter()
    judged = ROOT / "build/judged.tsv"
    with concurrent.futures.ProcessPoolExecutor(2) as pool, open(judged, "w", encoding="utf-8") as out:
        print("sha256", "label", "old", "old_is", "new", "new_is", "sentence", sep="\t", file=out)
        for name, label, old, new, sentence in pool.map(judge_one, jobs, chunksize=4):
            old_verdict, new_verdict = judgement(label, old), judgement(label, new)
            counts[f"old {old_verdict}"] += 1
            counts[f"new {new_verdict if new != 'error' else 'error'}"] += 1
            if old_verdict == "right":
                preserved[new_verdict == "right"] += 1
            plain = sentence.replace("\t", " ").replace("\n", " ")
            print(name, label, old, old_verdict, new, new_verdict, plain, sep="\t", file=out)
    print(", ".join(f"{key}: {n}" for key, n in sorted(counts.items())))
    print(f"right answers kept: {preserved[True]} of {preserved.total()}")
    return 0


def reliability():
    import collections
    stated, right = collections.Counter(), collections.Counter()
    with open(ROOT / "build/judged.tsv", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            if row["new_is"] in ("right", "partly", "wrong"):
                stated[row["new"]] += 1
                right[row["new"]] += row["new_is"] == "right"
    lines = ["cause\tright\tstated", *(f"{cause}\t{right[cause]}\t{n}" for cause, n in sorted(stated.items()))]
    (ROOT / "python/anyrank/explain/reliability.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def texts_of(path):
    case = json.loads(path.read_bytes())
    is_verify = case.get("kind") == "verify"
    old = (case["report"].get("first") or {}).get("cause") if is_verify else case["answer"]["cause"]
    return case["label"], old or "", "kind:" + case.get("kind", "tensor")


def main():
    verb, *rest = sys.argv[1:] or [""]
    if verb == "make" and rest:
        return collect(pathlib.Path(rest[0]).resolve(), rest[1:]) or 0
    if verb == "judge" and rest:
        return judge(pathlib.Path(rest[0]).resolve(), rest[1:])
    if [verb, *rest] == ["reliability"]:
        return reliability()
    verbs = {"truths": truths, "manifest": manifest, "compare": compare}
    if verb not in verbs or len(rest) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    return verbs[verb](pathlib.Path(rest[0]).resolve()) or 0


if __name__ == "__main__":
    sys.exit(main())
