# SPDX-License-Identifier: Apache-2.0
"""A folder of temporary files that lives as long as the value that holds it."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
import weakref


class Scratch:
    """path: a new folder, removed by remove(), or with this object."""

    def __init__(self) -> None:
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="anyrank-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
