# SPDX-License-Identifier: Apache-2.0
"""The version, which CMakeLists.txt says: the build of the wheel writes it to VERSION."""

from __future__ import annotations

import pathlib
import re

PACKAGE = pathlib.Path(__file__).resolve().parent


def _read() -> str:
    built = PACKAGE / "VERSION"
    if built.exists():
        return built.read_text(encoding="utf-8").strip()
    project = (PACKAGE.parents[1] / "CMakeLists.txt").read_text(encoding="utf-8")
    found = re.search(r"project\(anyrank VERSION ([0-9.]+)", project)
    assert found is not None
    return found.group(1)


__version__ = _read()
