#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`anyrank verify` with the reference's tensors sketched first, for trial.py --anyrank: what of a trial is seen by
sketches.

    tests/pytorch/trial.py --folder FOLDER --json full.json
    tests/pytorch/trial.py --folder FOLDER --again --json sketched.json --anyrank tests/pytorch/sketched.py
    tests/pytorch/sketched.py full.json sketched.json

The last line compares the two: runs that are seen, first tensors that are equal, right runs with an alarm.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("ANYRANK", str(ROOT / "build/anyrank"))


def sketch(dump, folder):
    """Writes a dump's full tensors as the sketches of a run on one rank, a record for each step."""
    import torch
    from anyrank._arrays import entry_of
    from anyrank.capture._places import Box
    from anyrank.capture._sketches import MAGIC, Sketch, record, sketch_file, tiny_of
    from anyrank.dump import Dump
    steps = {}
    opened = Dump(dump)
    for name in opened:
        steps.setdefault(int((name.split("@") + ["1"])[1]), []).append(name)
    out = bytearray(MAGIC)
    for step, names in sorted(steps.items()):
        entries, figures = [], []
        for name in names:
            entry = entry_of(opened[name])
            try:
                one = Sketch(entry.dtype, entry.shape)
            except Exception:  # noqa: BLE001  a dtype without a sketch
                continue
            zeros = (0,) * len(entry.shape)
            one.add(entry, [Box(zeros, zeros, entry.shape)])
            entries.append({"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "part": "", "term": "",
                            "tiny": tiny_of(torch.as_tensor(opened[name])) if ":grad" in name else 0})
            figures.append(one.encoded())
        out += record({"step": step, "rank": 0, "world": 1, "mesh": [], "tensors": entries}, figures)
    folder.mkdir()
    (folder / sketch_file(0)).write_bytes(out)


def verify(words):
    """As the command: its own words, and its report's rows as those of dumps."""
    at = words.index("--json") + 1
    with tempfile.TemporaryDirectory() as scratch:
        one = pathlib.Path(scratch, "one")
        sketch(words[1], one)
        unknown = [word for word in words if word in ("--no-explain",)]
        said = subprocess.run([COMMAND, "verify", str(one), *(word for word in words[2:] if word not in unknown)],
                              check=False)
    path = pathlib.Path(words[at])
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
        unjudged = [row["tensor"] for row in report["rows"] if row["unjudged"]]
        report.update(worst=report["rows"], unjudged=unjudged, first=report["first"] or {"tensor": ""})
        path.write_text(json.dumps(report), encoding="utf-8")
    return said.returncode


def compare(full, sketched):
    rows = [{row["case"]: row for row in json.loads(pathlib.Path(path).read_text(encoding="utf-8"))}
            for path in (full, sketched)]
    missed = ("unseen", "unjudged", "error")
    names = [name for name in rows[0] if name in rows[1]]
    right = [name for name in names if rows[0][name]["kind"][0] == "right"]
    broken = [name for name in names if name not in right and rows[0][name]["verdict"] not in missed]
    seen = [name for name in broken if rows[1][name]["verdict"] not in missed]
    equal = [name for name in seen if rows[0][name]["tensor"] == rows[1][name]["tensor"]]
    alarms = [name for name in right if rows[1][name]["verdict"] == "alarm"]
    for name in broken:
        if name not in equal:
            print(f"{name}: {rows[0][name]['tensor']}, by sketches {rows[1][name]['tensor'] or rows[1][name]['verdict']}")
    print(*(f"{name}: alarm at {rows[1][name]['tensor']}" for name in alarms), sep="\n")
    print(f"seen {len(seen)} of {len(broken)}, first tensor equal {len(equal)} of {len(seen)}, alarms {len(alarms)} of "
          f"{len(right)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["verify"]:
        sys.path.insert(0, str(ROOT / "python"))
        sys.exit(verify(sys.argv[1:]))
    if not sys.argv[1:2] or not sys.argv[1].endswith(".json"):
        os.execv(COMMAND, [COMMAND, *sys.argv[1:]])
    compare(*sys.argv[1:3])
