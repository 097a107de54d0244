# SPDX-License-Identifier: Apache-2.0
"""Passes of a model that is not called itself, whose parts the program calls: a LightningModule on one rank, a pipeline
by hand. Which calls are one pass, and which are micro-batches, shows when a loss goes backward.
"""

from __future__ import annotations

import typing

import torch

from anyrank.capture._listen import Pass, leaves_of, local_of, source_of


class Transfers:
    """What a rank sends another one, or receives, outside of modules: by these stages of a pipeline are told."""

    def __init__(self) -> None:
        self.count = self._before = 0  # of all steps; before the step
        self._received: dict[int, int] = {}  # by the memory of what another rank sent: the transfer's number

    def begin_step(self) -> None:
        """Begins a step; what is received for its first pass comes before."""
        self._received = {memory: n for memory, n in self._received.items() if n > self._before}
        self._before = self.count

    def hear(self, received: typing.Any) -> None:
        self.count += 1
        if isinstance(received, torch.Tensor):
            self._received[_memory(received)] = self.count

    def numbers_of(self, tensors: typing.Iterable[torch.Tensor]) -> set[int]:
        """Returns the transfers by which these tensors came."""
        return {self._received[_memory(t)] for t in tensors if _memory(t) in self._received}


def _memory(t: torch.Tensor) -> int:
    return int(local_of(t).untyped_storage().data_ptr())


def pass_of_call(module: int, inputs: typing.Any, current: Pass, still_open: list[Pass]) -> Pass | None:
    """The pass that the call of a module, by its id, belongs to: that which made what it is given. A module that was
    called already and is given something new may begin another micro-batch (None), or be called once more in this one,
    as the towers of a contrastive loss are."""
    if module not in current.called and len(still_open) == 1:
        return current
    sources = {source_of(t, still_open) for t in leaves_of(inputs)} - {None}
    if len(sources) == 1:
        return sources.pop()
    return current if sources or module not in current.called else None


def join(reached: list[Pass], of_step: list[Pass], transfers: int) -> tuple[list[Pass], list[Pass]]:
    """Makes one pass of those that a loss is computed from (reached), and without transfers also of those before, of
    which a loss has what no gradient flows to. What other ranks sent apart stays apart. Returns the passes that the
    loss is computed from, and those that are parts of them now."""
    if not reached:
        return [], []
    last_reached = max(map(of_step.index, reached))
    group = [
        member
        for i, member in enumerate(of_step)
        if member in reached or (member.open and i < last_reached and not transfers)
    ]
    parts = [member for member in group[1:] if member.pending is not None and not group[0].is_apart(member)]
    group[0].release()
    for member in parts:
        group[0].join(member)
        member.release()
    remaining = [member for member in of_step if member is group[0] or (member in reached and member not in parts)]
    for member in remaining:
        member.release()
    return remaining, parts
