# SPDX-License-Identifier: Apache-2.0
"""Names of torch that have another place in PyTorch 2.4, the oldest that is supported, than in the newest: tests import
them from here, and skip there what it cannot do."""

from __future__ import annotations

import unittest

import torch

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:  # before PyTorch 2.5
    from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before PyTorch 2.6
    from torch.distributed._composable.fsdp import fully_shard

__all__ = ["DTensor", "Partial", "Replicate", "Shard", "distribute_tensor", "fully_shard", "since"]


def since(version: str, what: str) -> None:
    """Skips a test of what torch can do since a version, "2.5"."""
    have, want = (tuple(map(int, text.split("+")[0].split(".")[:2])) for text in (torch.__version__, version))
    if have < want:
        raise unittest.SkipTest(f"{what} came with PyTorch {version}")
