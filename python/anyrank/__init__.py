# SPDX-License-Identifier: Apache-2.0
"""anyrank: whether distributed gradients are right. python.md is the manual.

Importing this module imports neither numpy nor torch: a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from anyrank import logprobs as logprobs
    from anyrank import page as page
    from anyrank import ranks as ranks
    from anyrank import report as report
    from anyrank import resume as resume
    from anyrank import testing as testing
    from anyrank._compare import Compared as Compared
    from anyrank._compare import RanksDiffer as RanksDiffer
    from anyrank._compare import compare_ranks as compare_ranks
    from anyrank._errors import AnyrankError as AnyrankError
    from anyrank._info import info as info
    from anyrank._version import __version__ as __version__
    from anyrank.callbacks import Callback as Callback
    from anyrank.capture import capture as capture
    from anyrank.ranks import RanksFailed as RanksFailed
    from anyrank.reference import Reference as Reference
    from anyrank.reference import grads as grads
    from anyrank.dump import Dump as Dump
    from anyrank.dump import open_dump as open_dump
    from anyrank.runs import check as check
    from anyrank.runs import lint as lint
    from anyrank.runs import plan as plan
    from anyrank.runs import train as train
    from anyrank.runs import verify as verify
    from anyrank.watch import watch as watch

_HOME = {
    "AnyrankError": "_errors",
    "Callback": "callbacks",
    "Reference": "reference",
    "Dump": "dump",
    "capture": "capture",
    "check": "runs",
    "grads": "reference",
    "info": "_info",
    "lint": "runs",
    "open_dump": "dump",
    "plan": "runs",
    "train": "runs",
    "verify": "runs",
    "watch": "watch",
    "__version__": "_version",
    "Compared": "_compare",
    "RanksDiffer": "_compare",
    "RanksFailed": "ranks",
    "compare_ranks": "_compare",
}
_MODULES = ("convert", "logprobs", "page", "ranks", "report", "resume", "rounding", "testing")
__all__ = [*sorted(_HOME), *_MODULES]


def __getattr__(name: str) -> typing.Any:
    if name in _MODULES:
        return importlib.import_module(f"anyrank.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'anyrank' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"anyrank.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
