# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.explain REFERENCE OTHER --facts: what differs between two runs, as their dumps record it."""

from __future__ import annotations

import argparse
import sys

from anyrank._errors import AnyrankError
from anyrank.explain import facts


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 where nothing differs, 1, or 2 for what cannot be read or compared, as of the command."""
    parser = argparse.ArgumentParser(prog="python -m anyrank.explain", description="Prints what differs between two "
                                     "runs, as their dumps record it.")
    parser.add_argument("reference", metavar="REFERENCE", help="the dump that is right: a folder, or a file in it")
    parser.add_argument("other", metavar="OTHER", help="the dump of the other run")
    parser.add_argument("--facts", action="store_true", required=True,
                        help="print differences of configuration, optimizer, steps and the like")
    given = parser.parse_args(arguments)
    try:
        a, b = facts.read(given.reference), facts.read(given.other)
    except AnyrankError as error:
        print(f"anyrank.explain: {error}", file=sys.stderr)
        return 2
    for path, run in ((given.reference, a), (given.other, b)):
        if not run.recorded:
            print(f"{path}: has no {facts.FILE}: nothing is recorded of this run besides its tensors")
        elif run.truncated:
            print(f"{path}: the model is large, and {facts.FILE} records a part of it")
    if not (a.recorded and b.recorded):
        return 2
    found = facts.differences(a, b)
    for difference in found:
        print(difference.text)
    print(facts.layouts(a, b))
    if not found:
        print("what is recorded of the two runs is the same")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
