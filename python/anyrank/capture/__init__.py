# SPDX-License-Identifier: Apache-2.0
"""with anyrank.capture(model, folder, ...): what a PyTorch model computes on each rank, written for `anyrank verify`.

The module can be called as the class in it, whichever of the two `anyrank.capture` is at the time.
"""

from __future__ import annotations

import sys
import types
import typing

from anyrank._errors import AnyrankError

try:
    import torch  # noqa: F401
except ImportError as missing:
    raise AnyrankError(f"anyrank.capture needs PyTorch: {missing}") from None

from anyrank.capture._capture import Capture

capture = Capture
__all__ = ["Capture", "capture"]


class _Callable(types.ModuleType):
    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> Capture:
        return Capture(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
