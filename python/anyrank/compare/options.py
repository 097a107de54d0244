# SPDX-License-Identifier: Apache-2.0
"""The command line of `anyrank compare`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import operator
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import typing

from anyrank._command import find_command
from anyrank._errors import AnyrankError
from anyrank._options import OPTIONS
from anyrank._terminal import Parser

OPERATORS: dict[type[ast.AST], typing.Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod}
TEMPLATE = re.compile(r"\{([^{}]*\branks\b[^{}]*)\}")
LAUNCHERS = ("torchrun", "python", "python3", "accelerate", "deepspeed")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a script: which ranks, which code, which Python."""

    label: str  # as the report names it: "1 rank", "2 ranks, HEAD~1"
    name: str  # of its folder
    ranks: int
    python: str
    commit: str | None = None
    command: str | None = None  # replaces the script


@dataclasses.dataclass(frozen=True)
class Options:
    runs: tuple[Run, ...]  # the reference first
    target: tuple[str, ...]  # ("-m", MODULE) or (SCRIPT,)
    arguments: tuple[str, ...]  # of the script, with {ranks} in them
    extra: dict[int, str]  # further arguments by number of ranks
    steps: int
    first_step: int
    out: pathlib.Path | None
    capture: dict[str, typing.Any]
    verify: tuple[str, ...]
    has_rule: bool  # the user gave tolerances
    same_weights: bool
    to_the_end: bool
    timeout: float
    json: str | None
    quiet: bool
    verbose: bool


def parse(words: typing.Sequence[str]) -> Options:
    """Errors: SystemExit (2) for a wrong usage, AnyrankError."""
    parser = Parser(prog="anyrank compare", add_help=False, allow_abbrev=False,
                    usage="anyrank compare [options] -- SCRIPT|-m MODULE [ARGUMENTS]")
    flag: dict[str, typing.Any] = {"action": "store_true"}
    kinds: dict[str, dict[str, typing.Any]] = {"bool": flag, "int": {"type": int}, "float": {"type": float},
                                               "Texts": {"action": "append", "default": []}}
    for name, option in OPTIONS["compare"].items():
        parser.add_argument(f"--{name.replace('_', '-')}", **kinds.get(option.type, {}))
    for names in (["-h", "--help"], ["--help-all"], ["-q", "--quiet"], ["--no-color"]):
        parser.add_argument(*names, **flag)
    parser.add_argument("--json")
    parser.set_defaults(steps=2, first_step=1, timeout=1800.0)
    words = list(words)
    cut = words.index("--") if "--" in words else len(words)
    parsed = parser.parse_args(words[:cut])
    if parsed.help or parsed.help_all:
        parser.exit(subprocess.call([find_command(), "compare", "--help" if parsed.help else "--help-all"]))
    target, arguments = target_of(words[cut + 1:], parser)
    if parsed.steps < 1 or parsed.first_step < 1:
        parser.error("--steps and --first-step count from 1")
    if (parsed.commit is not None) + (parsed.reference is not None) + (len(parsed.python) > 1) > 1:
        parser.error("--commit, --reference and two --python name a reference each: give one of them")
    if len(parsed.python) > 2:
        parser.error("--python: give at most two")
    verify = [f"--{name}={value}" for name in ("rtol", "atol", "only", "ignore", "map", "html", "threads")
              for value in _values(getattr(parsed, name))]
    verify += ["--bits"] if parsed.bits else []
    capture: dict[str, typing.Any] = {"operations": True} if parsed.operations else {}
    if parsed.spec:
        capture["spec"] = parsed.spec
    if capture.get("spec", "megatron") != "megatron":
        capture["spec"] = os.path.abspath(capture["spec"])
    has_rule = parsed.bits or parsed.rtol is not None or parsed.atol is not None
    return Options(runs_of(parsed, parser), target, arguments, _extra(parsed.args_for, parser), parsed.steps,
                   parsed.first_step, pathlib.Path(parsed.out) if parsed.out else None, capture, tuple(verify),
                   has_rule, parsed.same_weights, parsed.to_the_end,
                   parsed.timeout, parsed.json, parsed.quiet, parsed.verbose)


def runs_of(parsed: argparse.Namespace, parser: Parser) -> tuple[Run, ...]:
    """Returns the runs that the options ask for, the reference first."""
    has_reference = parsed.commit or parsed.reference or len(parsed.python) > 1
    try:
        counts = [int(text) for text in (parsed.ranks or ("1" if has_reference else "1,2")).split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        parser.error(f"--ranks: {parsed.ranks!r} has to be numbers from 1, for example 1,2")
    pythons = [_python(name, parser) for name in parsed.python] or [sys.executable]
    labels = [f"{n} rank{'s' if n > 1 else ''}" for n in counts]
    if not has_reference:
        if len(set(counts)) < 2:
            parser.error(f"--ranks {parsed.ranks}: would compare a run with itself: give two numbers, for example 1,2, "
                         "or another reference (--commit, --reference, --python twice)")
        return tuple(Run(label, f"ranks-{n}", n, pythons[0]) for label, n in zip(labels, counts))
    if len(counts) > 2:
        parser.error("--ranks: with another reference, give one number for both runs, or two")
    pair = [Run(labels[0], "reference", counts[0], pythons[0], parsed.commit, parsed.reference),
            Run(labels[-1], "script", counts[-1], pythons[-1])]
    if parsed.commit:
        pair[0] = dataclasses.replace(pair[0], label=f"{labels[0]}, commit {parsed.commit}")
        pair[1] = dataclasses.replace(pair[1], label=f"{labels[-1]}, working tree")
    elif parsed.reference:
        pair[0] = dataclasses.replace(pair[0], label="the reference command")
    else:
        pair = [dataclasses.replace(run, label=f"{run.label}, {name}") for run, name in zip(pair, parsed.python)]
    return tuple(pair)


def _python(name: str, parser: Parser) -> str:
    path = shutil.which(name)
    if path is None:
        parser.error(f"--python {name}: there is no such program")
    return os.path.abspath(path)


def _values(value: typing.Any) -> list[typing.Any]:
    """Returns the values of an option, which may be none, one or a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _extra(texts: typing.Iterable[str], parser: Parser) -> dict[int, str]:
    extra: dict[int, str] = {}
    for text in texts:
        ranks, _, arguments = text.strip().partition(" ")
        if not ranks.isdigit():
            parser.error(f"--args-for {text!r}: expected a number of ranks and then arguments, as one word: "
                         "--args-for '1 --accumulate 2'")
        extra[int(ranks)] = f"{extra.get(int(ranks), '')} {arguments}".strip()
    return extra


def target_of(words: list[str], parser: Parser) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the script or module, and its arguments. Words of a launcher before it (`torchrun --nproc-per-node 2`)
    are dropped."""
    if words and os.path.basename(words[0]) in LAUNCHERS and not os.path.isfile(words[0]):
        words = _without_launcher(words, parser)
    if words and words[0] == "-m":
        if len(words) < 2:
            parser.error("-m: the name of a module is missing")
        return ("-m", words[1]), tuple(words[2:])
    if not words:
        parser.error("there is no script: anyrank compare [options] -- train.py ARGUMENTS")
    if not os.path.isfile(words[0]):
        parser.error(f"{words[0]}: there is no such script" + (
            " (options of anyrank compare come before --)" if words[0].startswith("-") else ""))
    return (os.path.abspath(words[0]),), tuple(words[1:])


def _without_launcher(words: list[str], parser: Parser) -> list[str]:
    for position, word in enumerate(words[1:], 1):
        if word == "-m" and words[0].startswith("python") or word.endswith(".py") and os.path.isfile(word):
            if word != "-m" and words[position - 1] in ("-m", "--module"):
                return words[position - 1:]
            return words[position:]
        if word in ("-m", "--module") and position + 1 < len(words):
            return ["-m", *words[position + 1:]]
    parser.error(f"{shlex.join(words[:3])} ..: there is no script in it")


def arguments_for(options: Options, run: Run) -> list[str]:
    """Returns the script's arguments for a run, with {ranks} and arithmetic replaced. Errors: AnyrankError."""
    words = [TEMPLATE.sub(lambda m: str(_calculate(m.group(1), run.ranks)), word) for word in options.arguments]
    return words + shlex.split(options.extra.get(run.ranks, ""))


def _calculate(text: str, ranks: int) -> int:
    """Calculates an expression such as `8//ranks`, of whole numbers, ranks and + - * // %."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id == "ranks":
            return ranks
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        raise AnyrankError(f"{{{text}}}: expected whole numbers, ranks, and + - * // %, for example {{8//ranks}}"
                           ) from None
