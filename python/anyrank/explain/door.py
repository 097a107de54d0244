# SPDX-License-Identifier: Apache-2.0
"""What the command asks of this package: a request as JSON on stdin, the answer as JSON on stdout.

    {"report": .., "map": .., "reference_map": ..}  a report of `anyrank verify --json`: why its first tensor differs
                                                    ("explain": false: not asked); "page": where to write it as a page
    {"causes": NAME or null}                        one cause in full, or all of them

The command starts this file by its absolute path as `python3 -I` (verify/explain/explain.h), so that no other folder
than this package's is searched for modules.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import typing

Answer = typing.Dict[str, typing.Any]
NO_NUMPY = 3  # exit status: the command then asks the next Python


def answer_of(request: typing.Mapping[str, typing.Any]) -> Answer:
    if "causes" in request:
        from anyrank.explain import catalogue

        name = request["causes"]
        rows = catalogue.rows(name)
        return {"causes": rows, "nearest": "" if rows else catalogue.nearest(name)}
    from anyrank import page

    report = request["report"]
    answer: Answer = {}
    if request.get("explain", True):
        from anyrank.explain import answers

        answer = answers.answer_of(report, request.get("reference_map"), request.get("map"))
    if request.get("page"):
        page.write({"command": "verify", **report, "first": answer.get("first", report["first"]),
                    "explanation": answer}, request["page"])
    return answer


def main() -> int:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
    request = json.load(sys.stdin)
    if request.get("explain", True) and importlib.util.find_spec("numpy") is None:  # a page alone needs none
        return NO_NUMPY
    output, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no part of the answer
    from anyrank._errors import AnyrankError

    try:
        answer = answer_of(request)
    except (AnyrankError, OSError) as error:
        answer = {"error": str(error)}
    json.dump(answer, output, allow_nan=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
