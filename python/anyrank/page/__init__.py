# SPDX-License-Identifier: Apache-2.0
"""Pages and pictures of what the command writes as JSON: a trace, a plan, a training run, a comparison. Each is one
file that reaches for nothing outside.

    python -m anyrank.page FILE.json [--out FILE.html|FILE.svg]
"""

from __future__ import annotations

import os
import pathlib
import typing

from anyrank._errors import AnyrankError
from anyrank._input import Check, parsed
from anyrank.page import _losses, _plan, _timeline, _verify
from anyrank.page._parts import Json, filled

Form = typing.Callable[[Json], str]
#: Of each kind of JSON what can be made of it, by the end of the file's name; the first is made if none is given.
FORMS: dict[str, dict[str, Form]] = {
    "trace": {".html": lambda trace: filled("timeline.html", _timeline.data_of(trace))},
    "plan": {".html": lambda plan: filled("plan.html", plan), ".svg": _plan.picture},
    "training run": {".svg": _losses.picture},
    "comparison": {".html": lambda report: filled("verify.html", _verify.data_of(report))},
}
#: What each kind of JSON has to have.
CHECKS: dict[str, Check[Json]] = {"trace": _timeline.TRACE, "plan": _plan.checked, "training run": _losses.RUN,
                                  "comparison": _verify.checked}


def kind_of(found: Json) -> str:
    """Returns the kind of a command's JSON, a key of FORMS. Errors: AnyrankError for a kind without a page."""
    other_data = found.get("otherData")
    if "traceEvents" in found and isinstance(other_data, dict) and other_data.get("clock"):
        return "trace"
    command = found.get("command")
    if command == "train":
        return "training run"
    if command == "plan" and "layouts" in found:
        return "plan"
    if command == "verify" and "rows" in found:
        return "comparison"
    subject = f"the JSON of anyrank {command}" if isinstance(command, str) else "a file that anyrank did not write"
    raise AnyrankError(f"{subject} has no page: expected that of --trace, of anyrank plan about layouts, or of anyrank "
                       "train")


def text_of(found: Json, suffix: str = "") -> str:
    """Returns the page or picture as text. Errors: AnyrankError for a form that the kind lacks, and for a value of
    another type than the command writes."""
    kind = kind_of(found)
    form = FORMS[kind].get(suffix or next(iter(FORMS[kind])))
    if form is None:
        raise AnyrankError(f"{suffix}: expected {' or '.join(FORMS[kind])} of a {kind}")
    return form(parsed(found, CHECKS[kind], kind))


def write(found: Json, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes the page or picture, in the form of the file's name, and returns its path."""
    out = pathlib.Path(path)
    text = text_of(found, out.suffix)
    half = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(out)
    finally:
        half.unlink(missing_ok=True)
    return out
