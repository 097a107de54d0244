# SPDX-License-Identifier: Apache-2.0
"""What this machine has, as `anyrank info` says it."""

from __future__ import annotations

import typing

from anyrank._command import run_words


def info() -> dict[str, typing.Any]:
    """Returns the JSON of `anyrank info`: version, processor and its features, BLAS, the exact path, CUDA, NCCL, MPI,
    data_dir. Errors: AnyrankError."""
    return dict(run_words("info", []).data)
