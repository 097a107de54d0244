#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a job of a workflow (.github/workflows) here, as its file says:

    scripts/workflow.py FILE JOB [NAME=VALUE ...]

Its commands run in order in a fresh clone of this repository's HEAD, which is removed afterwards. NAME=VALUE: a value
of the matrix (without it the first) or a variable of the repository; artifacts=DIR: where artifacts are kept from one
job to the next. What only the service can do is named and left out: other actions, and the container, in whose place
this machine is. Exit status: 0 all passed, 1 a command failed, 2 wrong usage.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")
CHECKOUT = "actions/checkout@"


# --- the part of YAML that workflows are written in -------------------------------------------------------------------


def indent(line):
    return len(line) - len(line.lstrip(" "))


def word(text):
    if text.startswith("[") and text.endswith("]"):
        return [word(part.strip()) for part in text[1:-1].split(",")]
    return json.loads(text) if text.startswith('"') and text.endswith('"') else text


def value(rest, lines, depth):
    """What stands behind a colon or a dash, whose line is already taken."""
    if rest == "|":
        block = []
        while lines and (not lines[0].strip() or indent(lines[0]) > depth):
            block.append(lines.pop(0))
        margin = min(indent(line) for line in block if line.strip())
        return "\n".join(line[margin:] for line in block) + "\n"
    if rest:
        return word(re.sub(r" +# .*", "", rest))
    return node(lines, indent(lines[0])) if lines and indent(lines[0]) > depth else None


def node(lines, depth):
    """The list or mapping whose entries are indented so."""
    found = None
    while lines and indent(lines[0]) == depth:
        line = lines[0].strip()
        if line == "-" or line.startswith("- "):
            found = [] if found is None else found
            rest = line[1:].strip()
            if re.match(r"[\w.-]+:( |$)", rest):  # a mapping begins in the line of the dash
                lines[0] = " " * (depth + 2) + rest
                found.append(node(lines, depth + 2))
            else:
                lines.pop(0)
                found.append(value(rest, lines, depth))
        else:
            found = {} if found is None else found
            key, rest = re.fullmatch(r"([\w.-]+):(?: +(.*))?", line).groups()
            lines.pop(0)
            found[key] = value(rest or "", lines, depth)
    return found


def read_yaml(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip() and line.strip()[0] != "#"]
    found = node(lines, 0)
    assert not lines, lines
    return found


# --- a job ------------------------------------------------------------------------------------------------------------


def fill(text, values):
    """A text whose expressions have their values; those of what is not known here are empty."""
    return EXPRESSION.sub(lambda match: values.get(match.group(1).split(".", 1)[-1], ""), text)


def command_of(step, values):
    """What a step does here; None: nothing."""
    if "run" in step or step["uses"].startswith(CHECKOUT):
        return fill(step.get("run", f"git clone -q {ROOT} ."), values)
    artifact = re.match(r"actions/(upload|download)-artifact@", step["uses"])
    if not artifact or "artifacts" not in values:
        return None
    store, path = os.path.join(os.path.abspath(values["artifacts"]), step["with"]["name"]), step["with"]["path"]
    source, target = (path, store) if artifact.group(1) == "upload" else (store, path)
    return f"rm -rf {target}; mkdir -p {target}; cp -R {source}/. {target}"


def run_job(job, values, folder):
    """Whether all steps passed; prints a line of each."""
    home = pathlib.Path(folder, "repository")
    home.mkdir()
    inherited = {name: text for name, text in os.environ.items()
                 if not name.startswith(("GITHUB_", "ANYRANK", "PYTHON"))}
    inherited["GIT_CONFIG_GLOBAL"] = str(pathlib.Path(folder, "gitconfig"))  # a step changes it
    for step in job["steps"]:
        name = step.get("name", step.get("uses", "").split("@")[0])
        command = command_of(step, values)
        if command is None:
            print(f"not run: {name} needs the service", flush=True)
            continue
        print(f"--- {name}: {command.strip()}", flush=True)
        began = time.monotonic()
        variables = {name: fill(text, values) for name, text in step.get("env", {}).items() if fill(text, values)}
        process = subprocess.run(["sh", "-e", "-c", command], cwd=home, env={**inherited, **variables}, check=False,
                                 stdin=subprocess.DEVNULL)
        print(f"--- {'passed' if process.returncode == 0 else 'failed'} in {time.monotonic() - began:.0f} s",
              flush=True)
        if process.returncode:
            return False
    return True


def main():
    if len(sys.argv) < 3 or not all("=" in argument for argument in sys.argv[3:]):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    jobs = read_yaml(pathlib.Path(sys.argv[1]))["jobs"]
    if sys.argv[2] not in jobs:
        print(f"workflow.py: {sys.argv[1]} has no job {sys.argv[2]}, only {', '.join(jobs)}", file=sys.stderr)
        return 2
    job = jobs[sys.argv[2]]
    matrix = {name: values[0] for name, values in job.get("strategy", {}).get("matrix", {}).items()}
    values = {**matrix, **dict(argument.split("=", 1) for argument in sys.argv[3:])}
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run_job(job, values, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
