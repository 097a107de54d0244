# SPDX-License-Identifier: Apache-2.0
"""anyrank: whether distributed gradients are right. docs/python.md is the manual.

Importing this module imports neither numpy nor torch: a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import typing

_HOME = {
    "AnyrankError": "_errors",
    "__version__": "_version",
}
_MODULES = ("ranks",)
__all__ = [*sorted(_HOME)]


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
