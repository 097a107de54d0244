# SPDX-License-Identifier: Apache-2.0
"""Runs what documentation pages show: the fenced blocks of a page in order, in one folder, compared with what the page
says they print. table.py says what differs between machines, what a page takes as given, and what is not run.

A block is
    a session      lines "$ COMMAND", each with its output; ".." or "..." by itself stands for what the page leaves out
    commands       lines that begin with a program's name; they have to succeed
    an output      of the command that table.PRINTED_BY names
    python         run in the page's order; a block of kind text that follows has what it prints. <!-- needs NAME .. -->
                   before it names modules without which it is skipped, <!-- numbers differ --> before the text says so
    a file         its first line is "# NAME"; a file of the repository contains it, another is written
    diff           applied to the file that its first line names
    json           parsed, and written where table.WRITTEN names a file
    c              part of a program in examples/, or compiled with the declarations of table.DECLARED
Any other is in table.ELSEWHERE. A command of table.REASONS is left out, for the reason that stands there.
"""

import collections
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import traceback

import table

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "python"))
COMMAND = pathlib.Path(os.environ.get("ANYRANK", ROOT / "build/anyrank")).resolve()
BLOCK = re.compile(r"(?:^<!-- (?P<remark>[^>]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = re.compile(r"(\w+=\S* )*(anyrank|(build|examples|scripts|ci)/\S+|\./\w+|cmake|pip|python3|pytest|mpirun|"
                      r"torchrun|chromium|jq|for|\w+=\S+)(\s|$)|#!")
HEADERS = "".join(f"#include <anyrank/{path.name}>\n" for path in sorted((ROOT / "include/anyrank").glob("*.h")))
COMPILER = [*shlex.split(os.environ.get("CC", "cc")), "-std=c17", "-Wall", "-Wextra", "-Werror", "-Wno-unused"]
LIMIT_S = 1800  # a guard against hanging

Block = collections.namedtuple("Block", "page line kind text remark")
Step = collections.namedtuple("Step", "line command shown")


def pages():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path):
    page = path.read_text(encoding="utf-8")
    return [Block(path.name, page[:found.start("text")].count("\n") + 1, found["kind"], found["text"],
                  (found["remark"] or "").split()) for found in BLOCK.finditer(page)]


def whole_lines(text):
    """Lines with what a backslash continues; a loop is one."""
    text = re.sub(r"\\\n\s*", "", text)
    return re.findall(r"(?s:^for .*?^done$)|^.+$", text, re.MULTILINE)


def steps(block):
    """The commands of a block, each with its output if the block shows outputs; none if it has no commands."""
    if block.text.startswith("$ "):
        parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        found = [re.fullmatch(r"((?:[^\n]*\\\n)*[^\n]*)\n(.*)", part, re.DOTALL) for part in parts]
        return [Step(block.line, re.sub(r"\\\n\s*", "", one[1]), one[2]) for one in found]
    by = table.find(table.PRINTED_BY, block)
    if by:
        return [Step(block.line, by, block.text)]
    if block.kind in ("", "sh") and PROGRAMS.match(block.text):
        return [Step(block.line, block.text, None)] if block.text.startswith("#!") else \
               [Step(block.line, line, None) for line in whole_lines(block.text)]
    return []



def normal(text, page, rough=False):
    """Without what differs between machines, and with one space for any: times make columns wider, and pages wrap."""
    for pattern, word in table.DIFFERS.get("", []) + table.DIFFERS.get(page, []):
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    if rough:
        text = re.sub(r"-?\d+(\.\d+)?(e[+-]\d+)?", "#", text)
    return text.strip("\n") if page in table.SPACED else " ".join(text.split())


def missing(shown, printed, page, rough=False):
    """The first part of what a page shows that is not printed in its place; None if all is."""
    parts = [normal(part, page, rough) for part in re.split(r"(?:^|(?<=\s))\.{2,3}(?=\s|$)", shown)]
    printed = normal(printed, page, rough)
    if not printed.startswith(parts[0]) or len(parts) == 1 and printed != parts[0]:
        return parts[0]
    at = len(parts[0])
    for part in parts[1:-1]:
        at = printed.find(part, at)
        if at < 0:
            return part
        at += len(part)
    return None if len(parts) == 1 or printed[at:].endswith(parts[-1]) else parts[-1]


def plugin_words():
    """What gives pytest the plugin, if it is not installed."""
    installed = [entry.name for found in importlib.metadata.distributions() for entry in found.entry_points
                 if entry.group == "pytest11"]
    return "" if "anyrank" in installed else "-p anyrank.pytest_plugin"



class Page:
    """Runs a page's blocks. problems: a text for each that is not as the page says; left_out: a reason for each command
    that is not run."""

    def __init__(self, path, folder, run=True):
        self.path, self.folder, self.run_commands = path, pathlib.Path(folder), run
        self.problems, self.left_out = [], []
        self.names, self.printed, self.written = {}, None, list(table.WRITTEN.get(path.name, []))

    def all(self):
        for name in ("build", "tests", "data", "examples", "scripts"):
            (self.folder / name).symlink_to(ROOT / name)
        self.programs()
        given = table.GIVEN.get(self.path.name)
        if given and self.run_commands:
            for status, _, errors in self.shell([given]):
                self.problems += [f"{self.path.name}: what it takes as given: {errors}"] if status else []
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            found = blocks(self.path)
            if 2 * len(found) != self.path.read_text(encoding="utf-8").count("```"):
                self.problem(1, "a fence that does not begin its line")
            for block in found:
                self.block(block)
        finally:
            os.chdir(before)
        return self

    def programs(self):
        """A folder of programs for PATH, with those of this build and this Python."""
        place = self.folder / ".bin"
        place.mkdir()
        plugin = f"{plugin_words()} -p no:cacheprovider --anyrank-timeout=3600 --rootdir={self.folder}"
        for name, words in (("anyrank", COMMAND), ("python3", sys.executable),
                            ("pytest", f"{sys.executable} -m pytest {plugin}")):
            (place / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (place / name).chmod(0o755)
        self.environment = {**os.environ, **table.SETTINGS, "PATH": f"{place}:{os.environ['PATH']}",
                            "PYTHONPATH": str(ROOT / "python"), "ANYRANK": str(COMMAND), "PYTHONDONTWRITEBYTECODE": "1"}

    def shell(self, commands):
        """[(exit status, standard output, standard error)] of commands that one shell runs one after the other."""
        script = "".join(f"{{ {command}\n}} 2> .errors\nprintf '\\036%d\\036' $?\ncat .errors\nprintf '\\036'\n"
                         for command in commands)
        done = subprocess.run(["bash", "-o", "pipefail", "-c", script], cwd=self.folder, env=self.environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=LIMIT_S, check=False)
        parts = done.stdout.decode(errors="replace").split("\036")
        return [(int(parts[n + 1]), parts[n], parts[n + 2]) for n in range(0, len(parts) - 1, 3)]

    def problem(self, line, what):
        self.problems.append(f"{self.path.name}:{line}: {what}")

    def block(self, block):
        found = steps(block)
        head = re.match(r"# (\S+\.\w+)\n", block.text)
        if table.find(table.ELSEWHERE, block):
            return
        if found:
            self.commands(found)
        elif head:
            self.file(block, head[1], block.text[head.end():])
        elif block.kind in ("python", "text", "json", "c", "diff"):
            getattr(self, block.kind)(block)
        else:
            self.problem(block.line, f"a block that nothing runs, and tests/pages/table.py does not say why: "
                                     f"{block.text.splitlines()[0]}")

    def commands(self, found):
        reasons = [table.reason(step.command) for step in found]
        self.left_out += filter(None, reasons)
        chosen = [step for step, reason in zip(found, reasons) if not reason]
        if not self.run_commands or not chosen:
            return
        for step, (status, output, errors) in zip(chosen, self.shell([step.command for step in chosen])):
            if step.shown and step.shown.strip():
                # A page shows what it is about: one of the streams, or both.
                lost = [missing(step.shown, printed, self.path.name) for printed in (output, errors, output + errors)]
                if None not in lost:
                    self.problem(step.line, f"{step.command}\nprints\n{output}{errors}\nwithout\n{lost[0]}")
            if status not in table.statuses(step):
                self.problem(step.line, f"{step.command}\nexit status {status}:\n{output}{errors}")

    def file(self, block, name, text):
        if (ROOT / name).exists():
            if text not in (ROOT / name).read_text(encoding="utf-8"):
                self.problem(block.line, f"{name} does not have these lines")
        else:
            pathlib.Path(name).write_text(block.text, encoding="utf-8")

    def python(self, block):
        lacking = [name for name in block.remark[1:] if importlib.util.find_spec(name) is None]
        self.printed = None
        if lacking:
            self.left_out.append(f"no {' and no '.join(lacking)} here")
        elif self.run_commands:
            output = io.StringIO()
            try:
                with contextlib.redirect_stdout(output):
                    exec(compile("\n" * (block.line - 1) + block.text, str(self.path), "exec"), self.names)
            except Exception:  # whatever the page's code raises
                self.problem(block.line, traceback.format_exc())
            self.printed = output.getvalue()

    def text(self, block):
        if self.printed is not None:
            lost = missing(block.text, self.printed, self.path.name, rough=bool(block.remark))
            if lost is not None:
                self.problem(block.line, f"prints\n{self.printed}\nwithout\n{lost}")

    def diff(self, block):
        """"--- FILE", then the lines of the file that go and those that come in their place."""
        name, lines = block.text.split("\n", 1)
        old, new = ("".join(line[1:] for line in lines.splitlines(True) if line[0] == sign) for sign in "-+")
        path = pathlib.Path(name.removeprefix("--- "))
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            self.problem(block.line, f"{path} does not have these lines once")
        path.write_text(text.replace(old, new), encoding="utf-8")

    def json(self, block):
        try:
            json.loads(block.text)
        except ValueError as error:
            self.problem(block.line, error)
        name = self.written.pop(0) if self.written else None
        if name:
            pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(name).write_text(block.text, encoding="utf-8")

    def c(self, block):
        if any(block.text in source.read_text(encoding="utf-8") for source in ROOT.glob("examples/*.c")):
            return
        declared, inside = table.find(table.DECLARED, block) or ("", "")
        body = f"ar_status page({inside})\n{{\n{block.text}\ndone: failed: return AR_OK;\n}}\n"
        code = f'{HEADERS}{declared}\n#line {block.line} "{block.page}"\n' + (block.text if inside is None else body)
        done = subprocess.run([*COMPILER, f"-I{ROOT}/include", "-fsyntax-only", "-x", "c", "-"], input=code, text=True,
                              stderr=subprocess.PIPE, check=False)
        if done.returncode:
            self.problem(block.line, done.stderr)


def run_page(path, run=True):
    with tempfile.TemporaryDirectory(prefix="anyrank-page-") as folder:
        return Page(path, folder, run).all()
