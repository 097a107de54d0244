#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands in the place of the command while the cases are collected: runs REAL, and keeps of each `verify` whose verdict
is a difference the two dumps' files, the options and the report. ANYRANK_CASES is the folder, ANYRANK_CASE_LABEL the
label. What goes wrong while keeping changes nothing for the caller."""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

REAL = str(pathlib.Path(__file__).resolve()) + ".real"
MOST = 192 << 20  # bytes of a pair of dumps

VALUED = {"--ulp", "--rtol", "--atol", "--sensitivity", "--map", "--reference-map", "--only", "--ignore", "--tp",
          "--dp", "--cp", "--heads", "--kv-heads", "--max-report", "--threads", "--seed", "--progress-fd", "--json",
          "--html"}
CHANCE = re.compile(r"^(?:tmp|pytest-|frozen-|anyrank-).*|.*\d{5,}.*")  # names of folders that differ between runs


def label_of(words, paths):
    """A fault's name, or the last two folders of the other dump, as they are without what is chance."""
    if "--inject" in words[:-1]:
        return "fault:" + words[words.index("--inject") + 1]
    return "/".join("" if CHANCE.match(part) else part for part in pathlib.Path(paths[-1]).parts[-2:]) if paths else ""


def put(folder, data, suffix=""):
    """The data's SHA-256, by which a file of the folder has it."""
    name = hashlib.sha256(data).hexdigest()
    path = folder / (name + suffix)
    if not path.exists():
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(data)
        part.rename(path)
    return name


def files_of(path):
    if path.is_file():
        folder = path.parent if path.name.endswith(".json") else None
        return [path] if folder is None else sorted(folder.iterdir())
    return sorted(p for p in path.rglob("*") if p.is_file())


def plain_of(words):
    """The two dumps and the options, without those of the report."""
    paths, options, i = [], [], 1
    while i < len(words):
        word = words[i]
        values = 2 if word in VALUED else 1
        if not word.startswith("-"):
            paths.append(word)
        elif word.split("=")[0] not in ("--json", "--html", "--progress-fd", "-q", "--quiet"):
            options += words[i:i + values]
        i += values
    return paths, options


def keep(words, folder):
    paths, options = plain_of(words)
    if len(paths) != 2:
        return
    inputs = ("--map", "--reference-map", "--sensitivity")
    files = [value for option, value in zip(options, options[1:]) if option in inputs]
    named = [pathlib.Path(p) for p in [*paths, *files]]
    listed = [files_of(p) for p in named]
    if sum(p.stat().st_size for group in listed for p in group) > MOST:
        with open(folder / "left-out", "a", encoding="utf-8") as log:
            log.write(" ".join(words) + ": too large\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "report.json")
        done = subprocess.run([REAL, "verify", *paths, *options, "--json", out, "-q"], stdin=subprocess.DEVNULL,
                              capture_output=True, check=False)
        if done.returncode != 1:
            return
        report = json.loads(pathlib.Path(out).read_text(encoding="utf-8"))
    sides, told = [], json.dumps(report)
    for path in named:  # as they were called here, which is chance
        for text, by in ((str(path), path.name), (f"{path.parent}/", "")):
            told = told.replace(json.dumps(text)[1:-1], by)
    report = json.loads(told)
    for path, group in zip(named, listed):
        entries = {}
        for p in group:
            entries[p.name if path.is_file() else str(p.relative_to(path))] = put(folder / "files", p.read_bytes())
        sides.append({"path": path.name, "is_file": path.is_file(), "files": entries})
    for key in ("seconds", "reference", "other"):
        report.pop(key, None)
    case = {"kind": "verify", "label": label_of(words, paths),
            "options": [pathlib.Path(word).name if "/" in word else word for word in options],
            "inputs": sides, "report": report}
    put(folder / "cases", json.dumps(case, indent=1, sort_keys=True).encode(), ".json")


def main():
    words, folder = sys.argv[1:], os.environ.get("ANYRANK_CASES")
    if "--inject" in words:
        os.environ["ANYRANK_CASE_LABEL"] = label_of(words, [])
    done = subprocess.run([REAL, *words], check=False, close_fds=False)
    if folder and words[:1] == ["verify"] and done.returncode == 1:
        try:
            keep(words, pathlib.Path(folder))
        except Exception as error:  # noqa: BLE001  whatever it is, the caller's answer stands
            with open(pathlib.Path(folder) / "left-out", "a", encoding="utf-8") as log:
                log.write(f"{' '.join(words)}: {error!r}\n")
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


if __name__ == "__main__":
    sys.exit(main())
