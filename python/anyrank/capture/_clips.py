# SPDX-License-Identifier: Apache-2.0
"""Where a program clips: once the gradients of a step are complete, or before its forward pass has gone backward."""

from __future__ import annotations

import typing
import weakref

import torch

from anyrank.capture._listen import version_of

Left = typing.Tuple[typing.Optional["weakref.ref[torch.Tensor]"], int]  # a gradient, and how often it was written
SCALED = ("clipping comes before the forward pass has gone backward: it scales gradients that were left before, and "
          "none that follow")


class Clips:
    """Of one run. odd: what is odd about where the step's gradients were clipped; "": nothing."""

    def __init__(self) -> None:
        self.odd = ""
        self._left: dict[int, Left] = {}  # gradients that there were when the last pass began, by the parameter's id
        self._gone_backward = False  # something has, since then

    def begin_pass(self, parameters: typing.Iterable[torch.Tensor]) -> None:
        self._left = {id(parameter): _left_of(parameter) for parameter in parameters}
        self._gone_backward = False

    def after_backward(self) -> None:
        self._gone_backward = True

    def judge(self, parameters: typing.Sequence[torch.Tensor]) -> tuple[bool, str]:
        """Judges whether gradients of these are clipped before the last forward pass has gone backward, so that none
        has been added since that pass began and the step is not over. Also returns what is odd about it, or ""."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        early, odd = False, ""
        if trained and all(parameter.grad is None for parameter in trained):
            early = not self._gone_backward
            timing_note = ", before the forward pass has gone backward" if early else ""
            odd = f"clipping finds no gradient of {len(trained)} parameters{timing_note}: it clips nothing"
        elif trained and all(id(parameter) in self._left and _is_left(parameter, self._left[id(parameter)])
                             for parameter in trained):
            early, odd = True, SCALED
        self.odd = odd or self.odd
        return early, odd


def _left_of(parameter: torch.Tensor) -> Left:
    """Returns a parameter's current gradient; for a DTensor, of which only the part is written over, that of its
    part."""
    grad = parameter.grad
    if grad is None:
        return None, 0
    return weakref.ref(grad), version_of(getattr(grad, "_local_tensor", grad))


def _is_left(parameter: torch.Tensor, snapshot: Left) -> bool:
    """Returns whether a parameter's gradient is this snapshot and has not been written over since."""
    before = snapshot[0]() if snapshot[0] is not None else None
    is_freed = snapshot[0] is not None and before is None
    return not is_freed and parameter.grad is before and _left_of(parameter)[1] == snapshot[1]
