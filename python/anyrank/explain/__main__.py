# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.explain REFERENCE OTHER: what is wrong with the other run."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import typing

from anyrank import _command
from anyrank._errors import AnyrankError
from anyrank._terminal import Parser, refuse, say, with_clean_warnings
from anyrank.explain import facts

RULES = ("rtol", "atol", "ulp", "sensitivity", "map", "reference-map")


def _facts(reference: str, other: str) -> int:
    a, b = facts.read(reference), facts.read(other)
    for path, run in ((reference, a), (other, b)):
        if not run.recorded:
            say(f"{path}: has no {facts.FILE}: nothing is recorded of this run besides its tensors")
        elif run.truncated:
            say(f"{path}: the model is large, and {facts.FILE} records a part of it")
    if not (a.recorded and b.recorded):
        return 2
    found = facts.differences(a, b)
    for difference in found:
        say(difference.text)
    say(facts.layouts(a, b))
    if not found:
        say("what is recorded of the two runs is the same")
    return 1 if found else 0


def _explain(given: argparse.Namespace) -> int:
    from anyrank.explain import answers
    from anyrank.explain.run import finding_of

    rule = [f"--{name}={value}" for name in RULES if (value := getattr(given, name.replace("-", "_"))) is not None]
    done = _command.run_words("verify", ["--no-explain", *rule, *(["--common"] if given.common else []), "--",
                                         given.reference, given.other])
    if done.exit_status == 0:
        say("the runs are the same: there is nothing to explain")
        return 0
    run = answers.run_of(done.data, given.reference_map, given.map)
    finding = finding_of(run)
    say(*answers.lines_of(run, finding))
    case = run.case(finding.tensor) if given.module is not None and finding.tensor else None
    if given.module is not None and case is None:
        say("  --module: no module was run, since the first difference is not one of a tensor's values")
    elif case is not None:
        from anyrank.explain import own_module

        say(*(f"  {said}" for said in own_module.replay(own_module.load(given.module), case).sentences))
    return 1


def main(arguments: typing.Sequence[str] | None = None) -> int:
    """Exit status 0 where nothing differs, 1, or 2 for what cannot be read or compared, as of the command."""
    parser = Parser(prog="python -m anyrank.explain",
                    description="Says what is wrong with a run, by the dumps of it and a reference.")
    parser.add_argument("reference", metavar="REFERENCE", help="the dump that is right: a folder, or a file in it")
    parser.add_argument("other", metavar="OTHER", help="the dump of the other run")
    parser.add_argument("--facts", action="store_true", help="print only differences of configuration, optimizer, "
                        "steps and the like, as the dumps record them")
    parser.add_argument("--common", action="store_true", help="leave out tensors that only one dump has")
    parser.add_argument("--module", metavar="FILE.py:FUNCTION", help="what makes the reference's model, of which "
                        "modules are run on what the other run's read")
    for name in RULES:
        parser.add_argument(f"--{name}", help=f"as of anyrank verify --{name}")
    given = parser.parse_args(arguments)
    if given.facts and (given.common or given.module or any(getattr(given, name.replace("-", "_")) for name in RULES)):
        parser.error("--facts compares what is recorded: it takes no other option")
    try:
        if not given.facts and importlib.util.find_spec("numpy") is None:
            raise AnyrankError("explaining needs numpy, which is not installed; --facts does without")
        return with_clean_warnings(lambda: _facts(given.reference, given.other) if given.facts else _explain(given))
    except AnyrankError as error:
        return refuse("anyrank.explain", error)


if __name__ == "__main__":
    sys.exit(main())
