# SPDX-License-Identifier: Apache-2.0
"""The explanation of a report as JSON, for the command, pages and other programs."""

from __future__ import annotations

import math
import typing

import numpy as np

from anyrank.dump import Dump
from anyrank.explain import shapes, text
from anyrank.explain.causes import reliability
from anyrank.explain.explain import UNKNOWN
from anyrank.explain.run import Finding, Run, finding_of

Json = typing.Dict[str, typing.Any]


def run_of(report: typing.Mapping[str, typing.Any], reference_map: str | None = None, map: str | None = None) -> Run:
    """The two runs of a report, whose dumps are opened again."""
    reference, other = Dump(report["reference"], reference_map), Dump(report["other"], map)
    other.align(reference)
    return Run(reference, other, report)


def _numbers(numbers: typing.Mapping[str, typing.Any]) -> Json:
    """The numbers and texts of a pattern, as JSON has them: nothing infinite, no arrays."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in numbers.items()}
    return {key: value for key, value in plain.items()
            if isinstance(value, (str, int)) or isinstance(value, float) and math.isfinite(value)}


def answer_of(report: typing.Mapping[str, typing.Any], reference_map: str | None = None,
              map: str | None = None) -> Json:
    """first: the report's row of the tensor that is explained, with "hint", what happened to it ("" where that is not
    known), "pattern", where it differs, and "cause". lines: all that is said of it, as text."""
    run = run_of(report, reference_map, map)
    finding = finding_of(run)
    said = _of_tensor(run, finding)
    row = {**_row_of(report, finding.tensor), "look_at": said["look"],
           **{key: said[key] for key in ("pattern", "hint", "cause", "confidence", "evidence")}}
    return {**said, "first": row, "differences": _recorded(finding),
            "rounded_before_first": run.rows.index(finding.tensor) if finding.tensor in run.rows else 0,
            "shapes": shapes.of_report(run), "lines": lines_of(run, finding)}


def _row_of(report: typing.Mapping[str, typing.Any], tensor: str) -> Json:
    rows = [*report.get("worst", ()), *([report["first"]] if report.get("first") else [])]
    return next((dict(row) for row in rows if row["tensor"] == tensor), {"tensor": tensor})


def lines_of(run: Run, finding: Finding) -> list[str]:
    case = run.case(finding.tensor) if finding.tensor else None
    said = (text.lines(case, finding.answer, finding.operation) if case else
            text.without_arrays(finding.tensor, finding.answer))
    return said + [f"  {'recorded' if i == 0 else '':<10} {difference}"
                   for i, difference in enumerate(_recorded(finding)[:text.MOST_RECORDED])]


def _recorded(finding: Finding) -> list[str]:
    """What is recorded to differ. Seeds do in runs that set none, and say nothing where the cause is known."""
    return [difference.text for difference in finding.differences
            if difference.kind != "seeds" or finding.answer.cause == UNKNOWN]


def _of_tensor(run: Run, finding: Finding) -> Json:
    answer = finding.answer
    case = run.case(finding.tensor) if finding.tensor else None
    best = answer.fits[0] if answer.fits else None
    return {
        "tensor": finding.tensor, "cause": answer.cause, "confidence": answer.confidence, "hint": answer.sentence,
        "look": answer.look, "asked": finding.asked, "operation": list(finding.operation),
        "pattern": text.pattern(case) if case else "",
        "ranks": text.wrong_ranks(case)[0] if case else [],
        "evidence": _numbers(best.pattern.numbers)
        if best and answer.cause != UNKNOWN else {},
        "looks_like": [{"pattern": fit.pattern.kind, "unexplained": fit.unexplained} for fit in answer.fits[:2]
                       if math.isfinite(fit.unexplained)]
        if answer.cause == UNKNOWN else [],
        "others": list(answer.others), "reliability": list(reliability().get(answer.cause, (0, 0)))}
