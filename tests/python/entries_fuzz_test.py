#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files of others, spoiled, given to `python -m anyrank.watch`, `anyrank.page` and `anyrank.explain`.

Each input is one valid set of files with one to three changes: keys left out, added or doubled, values of another type,
numbers that no field can have, deep nesting, bytes that are not UTF-8, files cut off, escape sequences in every string,
pipes and devices instead of files. None may cause a traceback, a control character on a terminal, an exit status other
than 0, 1 and 2, a crash of the library or gigabytes of memory; none may take for ever.

    tests/python/entries_fuzz_test.py [--inputs N] [--seed S]      ANYRANK_TEST_SMALL: 150 inputs, else 3000
"""

import argparse
import collections
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
import typing
import xml.etree.ElementTree

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, ROOT  # noqa: E402

sys.path.insert(0, str(ROOT / "python"))
os.environ["ANYRANK"] = COMMAND
os.environ["ANYRANK_PYTHON"] = sys.executable

from anyrank._library import library  # noqa: E402
from anyrank.explain.__main__ import main as explain_main  # noqa: E402
from anyrank.page.__main__ import main as page_main  # noqa: E402
from anyrank.watch import main as watch_main  # noqa: E402

INPUTS_SMALL, INPUTS = 150, 3000
PROCESS_EVERY = 40  # one input in so many also runs as its own process
HANG_S = 300  # a guard against hanging, many times what an input takes on a busy machine
MOST_RESIDENT = 1 << 30  # bytes of memory: the programs need a tenth of it
PROGRAMS = {"watch": watch_main, "page": page_main, "explain": explain_main}
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffd]")
HOSTILE = "\x1b[2J\x1b]0;title\x07\u202e\x9b1m\r\x7f\u2028"
VALUES = (None, True, False, 0, -1, 7, 0.5, -0.0, 1e308, 1e-320, 10 ** 30, -2 ** 63, 2 ** 63, float("inf"), float("nan"),
          "", "x", "NaN", "1", "1" * 5000, HOSTILE, "\ud800", "a\nb", "a.{0-999999999}", "w:new@99999999999999999999",
          "F32", "../../x", [], {}, [[]], [None], {"a": 1}, [1, 2], ["a", 2], [[0.1]], {"1": [1]}, {HOSTILE: HOSTILE})
NUMBERS = ("NaN", "-Infinity", "1e999", "-1e999", "1e-400", "9" * 5000, "-" + "9" * 30, "01", "0x10", "1.", "--1")


# --- valid inputs -----------------------------------------------------------------------------------------------------


class Sample(typing.NamedTuple):
    """A program, the files that it reads, and its words."""

    program: str
    files: typing.Dict[str, typing.Any]  # by path: JSON, (header, data) of safetensors, or records of sketches
    words: typing.List[str]


def safetensors(tensors, metadata=None):
    """tensors: {name: (dtype, shape, bytes)}."""
    header, offset = {"__metadata__": metadata or {}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    return header, b"".join(data for _, _, data in tensors.values())


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


def model(learning_rate, world=2):
    return {
        "format": "anyrank model", "version": 1, "by": "anyrank.capture", "truncated": False, "world": world,
        "versions": {"torch": "2.8", "python": "3.11"}, "mesh": {"dp": world}, "first_step": 1, "wrapper": "DDP",
        "config": {"config": {"heads": 2, "kinds": ["full"], "rope": {"theta": 1e4}}},
        "modules": [{"paths": ["", "x.{0-2}"], "class": "Linear", "arguments": ["input"], "in": {"input": "float32 [2, 2]"},
                     "out": ["float32 [2, 2]"], "attributes": {"eps": 1e-5, "size": [2, None]}, "autocast": {"cpu": "bfloat16"}}],
        "inputs": {"x.1": {"0": "x.0"}}, "dtypes": {"float32": ["x.{0-2}.weight"], "bfloat16": ["y"]}, "frozen": ["y"],
        "tied": [["y", "z"]], "scaler": {"scale": 8.0}, "autocast": {"cpu": "bfloat16"}, "numerics": {"deterministic": True},
        "optimizers": [{"class": "AdamW", "groups": [{"options": {"lr": learning_rate, "betas": [0.9, 0.99]},
                                                      "parameters": ["x.{0-2}.weight"], "others": 0}]}],
        "schedulers": [{"class": "LambdaLR", "options": {"last_epoch": 2}}],
        "learning_rates": {"1": [[learning_rate]], "2": [[0.05, "NaN"]]},
        "ranks": {"seed": [7, None], "steps": [2, 2], "micro_batches": [1, 1], "calls": [{"1": 1}, {"1": 2}],
                  "without_gradient": [{"1": ["y"]}, None]}}


def dump(scale, with_steps):
    """A folder of a capture: tensors, a model.json, and the operations of its one rank. with_steps: the number of steps
    differs, and explains all else."""
    row = {"name": "aten.mm", "module": "x", "file": "a.py", "line": 3, "code": "x @ w", "calls": ["f"], "inputs": ["x.weight"],
           "results": [0], "numbers": {"dim": 1, "p": 0.5}, "backward": False}
    tensors = {"x.weight:init": ("F32", [8, 8], floats(range(64))), "x:fwd": ("F32", [4, 8], floats(range(32))),
               "x.weight:grad": ("F32", [8, 8], floats([scale * i for i in range(64)])),
               "x.weight:new": ("F32", [8, 8], floats([i - 0.1 * scale for i in range(64)])),
               "ids": ("I64", [4, 8], bytes(256))}
    if with_steps:
        tensors["steps:count"] = "I64", [1], bytes([scale] + [0] * 7)
    placement = {"version": 1, "rank": 0, "world": 1}
    metadata = {"micro_batches": "2", "targets": "32", "numerics": "exact", "ANYRANK_PLACEMENT": json.dumps(placement)}
    return {"rank-00000.safetensors": safetensors(tensors, metadata), "model.json": model(0.1 * scale, 1),
            "operations/rank-00000.json": {"format": "anyrank operations", "version": 1, "operations": [row]},
            "operations/rank-00000.safetensors": safetensors({"0": ("F32", [4, 8], floats([scale] * 32))})}


def sketches():
    """Two ranks with three steps each: a record is its JSON, and the figures of its tensors."""
    files = {"model.json": model(0.1)}
    for rank in range(2):
        records = []
        for step in (1, 2, 3):
            names = [f"w:{kind}" + (f"@{step}" if step > 1 else "") for kind in ("init", "grad", "new")]
            tensors = [{"name": name, "dtype": "F32", "shape": [4], "part": "0+4", "term": "", "left_out": ""} for name in names]
            state = {"parts": 1, "rates": [[0.1]], "zero_rate": ["y.{0-3}"], "updates": [step], "scale": 8.0,
                     "samples": 2 * step + rank, "random": step, "clipped": 1, "weights": step, "saved": [step],
                     "data": ["dp"], "unsaid": [], "schedules": [[step, step + 1, 1]]}
            text = {"step": step, "rank": rank, "world": 2, "mesh": [["dp", 2]], "at": [rank], "samples": [step, step],
                    "state": state, "tensors": tensors}
            figure = struct.pack("<8Q3d2Q", 5 * step, 4, 0, 0, 0, 0, 0, 3, 1.0, 4.0, 1.0, 0, 0)
            records.append((text, figure * len(tensors)))
        files[f"rank-{rank:05d}.sketch"] = records
    return files


def comparison():
    """As the command hands it over for --html."""
    row = {"tensor": "a.weight:grad", "state": "different", "pass": "g", "step": 1, "dtype": "F32", "other_dtype": "F32",
           "shape": [2, 3], "other_shape": [2, 3], "ratio": "Infinity", "max_abs": 1.0, "bins": [0] * 33 + [3],
           "map": [0.0, 2.5, "Infinity", 0.0, 1.0, 0.0], "map_shape": [2, 3], "matrix": [2, 3], "nan": [0, 1], "inf": [0, 0]}
    same = {"tensor": "b", "state": "same", "pass": "g", "step": 1, "dtype": "F32", "shape": [2]}
    return {"tool": "anyrank", "command": "verify", "result": "different", "rule": {"name": "tolerance", "rtol": 0.1, "atol": 0.0},
            "rows": [row, same], "worst": [row], "first": {**row, "pattern": "3 of 6", "hint": "x"}, "reference": "a", "other": "b",
            "missing": [], "unexpected": ["c"], "tensors": 2, "tensors_different": 1, "elements": 8, "elements_different": 3,
            "explanation": {"ranks": [1]}, "ranks": 4, "mesh": [["tp", 4]]}


def reports(folder):
    """JSON of the command: {name: (JSON, form of its page)}."""
    def made(*words):
        subprocess.run([COMMAND, *words], check=True, capture_output=True, cwd=folder)
    made("plan", "llama-demo", "--gpus", "4", "--json", "plan.json")
    made("train", "llama-demo", "--steps", "22", "--batch", "1", "--seq", "4", "--json", "train.json")
    made("check", "llama-demo", "--tp", "2", "--steps", "1", "--skip-f64", "--cluster", "h100", "--trace", "trace.json")
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    found["plan"]["layouts"] = found["plan"]["layouts"][:3]
    events = found["trace"]["traceEvents"]
    kinds = {(event["ph"], event.get("cat", event["name"])): [] for event in events}
    for event in events:
        kinds[event["ph"], event.get("cat", event["name"])].append(event)
    found["trace"]["traceEvents"] = [event for group in kinds.values() for event in group[:8 if group[0]["ph"] == "M" else 4]]
    return {"plan.json": [found["plan"], ".html", ".svg"], "train.json": [found["train"], ".svg"],
            "trace.json": [found["trace"], ".html"], "verify.json": [comparison(), ".html"]}


def samples(folder):
    """What is spoiled: each kind of input as often as it has kinds of values."""
    made = [Sample("watch", {f"run/{name}": content for name, content in sketches().items()}, words)
            for words in (["run"], ["run"], ["run"], ["run", "--json"])]
    for name, (content, *forms) in reports(folder).items():
        made += [Sample("page", {name: content}, [name, "--out", f"out{form}"]) for form in forms]
    made += 2 * [Sample("explain", {"a/model.json": model(0.1), "b/model.json": model(0.2)}, ["a", "b", "--facts"])]
    for with_steps in (False, True, False) if importlib.util.find_spec("numpy") else ():
        pair = {f"{run}/{name}": content for run, scale in (("a", 1), ("b", 2))
                for name, content in dump(scale, with_steps).items()}
        made.append(Sample("explain", pair, ["a", "b"]))
    return made


# --- spoiling ---------------------------------------------------------------------------------------------------------


def nodes(value, found=None):
    """Every (container, key) in JSON."""
    found = [] if found is None else found
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()):
        found.append((value, key))
        nodes(item, found)
    return found


def hostile(value):
    """Every string that is no word of the format, and every second key, with an escape sequence in it."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return value + HOSTILE if isinstance(value, str) and value not in ("anyrank model", "F32", "I64", "M", "X") else value


def change(document, draw):
    """One change of a JSON document."""
    kind = draw.randrange(9)
    if kind == 0:
        return hostile(document)
    if kind == 1:
        return draw.choice(VALUES)
    places = nodes(document)
    if not places:
        return draw.choice(VALUES)
    container, key = draw.choice(places)
    if kind == 2:
        del container[key]
    elif kind == 3:
        container[key] = draw.choice(VALUES)
        for _ in range(draw.choice((1, 40, 70, 3000))):
            container[key] = draw.choice(([container[key]], {"a": container[key]}))
    elif kind == 4 and isinstance(container, dict):
        container[draw.choice((HOSTILE, "\ud800", "", "1", "__metadata__", key + "x"))] = container.pop(key)
    elif kind == 5 and isinstance(container, list):
        container.extend([container[key]] * draw.choice((1, 3)))
    else:
        container[key] = draw.choice(VALUES)
    return document


def json_bytes(document, draw, spoil):
    """JSON as text, spoiled besides with a low chance: keys twice, numbers that are none, other bytes."""
    content = json.dumps(document, ensure_ascii=draw.random() < 0.5)
    kind = draw.randrange(12) if spoil else 99
    if kind == 0 and (keys := list(re.finditer(r'"(\w+)": ', content))):
        at = draw.choice(keys)
        content = f"{content[:at.start()]}{at[0]}{json.dumps(draw.choice(VALUES))}, {content[at.start():]}"
    if kind == 1 and (numbers := list(re.finditer(r"(?<=[\[ ])-?\d[\d.e+-]*(?=[,\]}])", content))):
        at = draw.choice(numbers)
        content = content[:at.start()] + draw.choice(NUMBERS) + content[at.end():]
    data = content.encode("utf-8", "surrogatepass")
    return other_bytes(data, draw) if kind in (2, 3) else data


def other_bytes(data, draw):
    """Bytes cut off, flipped, or put in."""
    at, kind = draw.randrange(len(data) + 1), draw.randrange(3)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + draw.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x1b[31m", b"\x00", b"\xef\xbb\xbf")) + data[at:]
    changed = bytearray(data)
    for _ in range(draw.choice((1, 4))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def record_bytes(text, figures, draw):
    """A record of a sketch file, whose hash is right, or whose sizes are absurd."""
    rest = len(text).to_bytes(8, "little") + text + figures
    digest = int(library()["sketch_hash"](rest, len(rest)))
    size = draw.choice((0, 7, 2 ** 31, 2 ** 63, 2 ** 64 - 1)) if draw.random() < 0.03 else len(rest)
    return size.to_bytes(8, "little") + digest.to_bytes(8, "little") + rest


def content_bytes(content, draw, changes):
    """A file's bytes, with so many changes."""
    copied = json.loads(json.dumps(content)) if isinstance(content, dict) else content
    for _ in range(changes if isinstance(content, dict) else 0):
        copied = change(copied, draw)
    if isinstance(content, dict):
        return json_bytes(copied, draw, changes > 0)
    if isinstance(content, tuple):  # safetensors
        header, data = content
        for _ in range(changes):
            header = change(json.loads(json.dumps(header)), draw)
        text = json_bytes(header, draw, changes > 0)
        size = draw.choice((0, 2 ** 31, 2 ** 63)) if changes and draw.random() < 0.1 else len(text)
        return size.to_bytes(8, "little") + text + data
    chosen = draw.randrange(len(content)) if changes else -1  # sketches
    out = [b"anyrank sketch 2"]
    for i, (text, figures) in enumerate(content):
        document = json.loads(json.dumps(text))
        for _ in range(changes if i == chosen else 0):
            document = change(document, draw)
        if i == chosen and draw.random() < 0.2:
            figures = other_bytes(figures, draw)
        out.append(record_bytes(json_bytes(document, draw, i == chosen), figures, draw if i == chosen else random.Random(3)))
    data = b"".join(out)
    return other_bytes(data, draw) if changes and draw.random() < 0.1 else data


def special(path, draw):
    """A pipe, a socket, a folder, a device, a link to nothing or to itself instead of a file."""
    kind = draw.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        before = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(before)
    elif kind == 2:
        path.mkdir()
    else:
        path.symlink_to(("/dev/zero", path.name, "nowhere")[kind - 3])


def spoiled(folder, sample, draw, changes):
    """Writes a sample's files, one of them spoiled by so many changes."""
    chosen, files = draw.choice(sorted(sample.files)), sample.files
    is_special = changes > 0 and draw.random() < 0.06
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == chosen and is_special:
            special(path, draw)
        elif name == chosen and changes and draw.random() < 0.04:
            path.write_bytes(b"")
        else:
            path.write_bytes(content_bytes(content, draw, changes if name == chosen else 0))


# --- judging ----------------------------------------------------------------------------------------------------------


def problem_of(status, out, err):
    """What is wrong with a run; "": nothing."""
    if "Traceback (most recent call last)" in err:
        return "a traceback"
    if status not in (0, 1, 2):
        return f"exit status {status}"
    if "ended by SIG" in err:
        return "the command crashed"
    if (found := CONTROLS.search(out + err)) is not None:
        return f"the character U+{ord(found[0]):04X} is printed"
    lines = [line for line in err.splitlines() if not line.startswith(("warning: ", "note: "))]
    if status == 2 and not out and (len(lines) != 1 or not lines[0].startswith("anyrank.")):
        return f"{len(lines)} lines of refusal"
    if status == 2 and len(err) > 1500:
        return f"a refusal of {len(err)} characters"
    if "warning: " in err and " ended at " in err:  # of explain.py: a generator of causes
        return "a generator of causes failed"
    return ""


def page_problem(folder):
    for path in folder.glob("out.*"):
        content = path.read_text(encoding="utf-8")
        if CONTROLS.search(content):
            return f"{path.name} has control characters"
        if path.suffix == ".svg":
            xml.etree.ElementTree.fromstring(content)
        elif content.count("</script") != 2:
            return f"{path.name}: a name ends the page's data"
    return ""


def run_here(program, words):
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = PROGRAMS[program](words)
        except SystemExit as ended:
            status = ended.code
        except Exception:  # what this test looks for
            traceback.print_exc()
            status = 1
    return status, out.getvalue(), err.getvalue()


def run_process(program, words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-m", f"anyrank.{program}", *words], capture_output=True, check=False,
                          stdin=subprocess.DEVNULL, timeout=HANG_S, env=environment)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def on_alarm(_number, _frame):
    raise TimeoutError(f"no end after {HANG_S} s")


class Fuzz:
    """Runs inputs, and counts."""

    def __init__(self, samples_folder, seed):
        self.samples, self.seed = samples(samples_folder), seed
        self.statuses, self.failures, self.processes = collections.Counter(), [], 0

    def judge(self, folder, number, unspoiled=False):
        """Runs one input, in a folder that is empty."""
        draw, sample = random.Random(f"{self.seed} {number}"), self.samples[number % len(self.samples)]
        named = draw.choice(("plain", "plain", "plain", f"run{HOSTILE}")) if number % 8 else "run\udcff"  # no UTF-8
        here = folder / named
        here.mkdir()
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(50000)  # to write what is nested deeply
        spoiled(here, sample, draw, 0 if unspoiled else draw.choice((1, 1, 1, 2, 3)))
        sys.setrecursionlimit(limit)
        words = [str(here / word) if word in ("run", "a", "b") or "." in word else word for word in sample.words]
        signal.alarm(HANG_S)
        results = [run_here(sample.program, words)]
        signal.alarm(0)
        if number % PROCESS_EVERY == 0:
            results.append(run_process(sample.program, words))
            self.processes += 1
        found = [problem_of(*result) or page_problem(here) for result in results]
        statuses = [status for status, _, _ in results]
        found += [f"exit status {statuses}"] if len({*statuses}) > 1 or unspoiled and statuses[0] == 2 else []
        self.statuses[sample.program, statuses[0]] += 1
        for problem in list(filter(None, found))[:1]:
            self.failures.append(problem)
            print(ascii(f"input {number}: {sample.program} {' '.join(sample.words)}: {problem}").strip("'"))
            print(*(ascii(line).strip("'") for line in results[0][2].splitlines()[-20:]), sep="\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=INPUTS_SMALL if "ANYRANK_TEST_SMALL" in os.environ else INPUTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one input, which stays in ./spoiled")
    given = parser.parse_args()
    signal.signal(signal.SIGALRM, on_alarm)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        fuzz = Fuzz(folder, given.seed)
        rounds = [(number, True) for number in range(len(fuzz.samples))] + [(i, False) for i in range(given.inputs)]
        for number, unspoiled in rounds if given.only is None else [(given.only, False)]:
            inputs = folder / "inputs" if given.only is None else pathlib.Path("spoiled").absolute()
            inputs.mkdir()
            fuzz.judge(inputs, number, unspoiled)
            if given.only is None:
                shutil.rmtree(inputs)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if resident > MOST_RESIDENT:
        fuzz.failures.append("memory")
    print("exit statuses: " + ", ".join(f"{program} {status}: {n}" for (program, status), n in sorted(fuzz.statuses.items())))
    tracebacks = fuzz.failures.count("a traceback")
    print(f"{given.inputs} inputs, {fuzz.processes} runs as processes too: {tracebacks} tracebacks, "
          f"{len(fuzz.failures) - tracebacks} other failures; {resident >> 20} MB of memory at most")
    return 1 if fuzz.failures else 0


if __name__ == "__main__":
    sys.exit(main())
