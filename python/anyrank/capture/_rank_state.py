# SPDX-License-Identifier: Apache-2.0
"""What a rank says of itself in a captured step, beside its tensors: what ranks are to have alike, and what not."""

from __future__ import annotations

import random
import sys
import typing
import weakref
import zlib

import torch

from anyrank._names import folded
from anyrank.capture._facts import referring, schedulers_of
from anyrank.capture._listen import local_of
from anyrank.capture._model import plain
from anyrank.capture._record import Record, digest_of

MOST_DEPTH = 3  # of dictionaries in what is saved
Parameters = typing.Sequence[typing.Tuple[str, torch.Tensor]]


class RankState:
    """Of one rank, through a run."""

    def __init__(self) -> None:
        self.scale: float | None = None  # of the losses
        self.clipped = 0  # parameters whose gradients were clipped in this step
        self._saved: list[int] = []
        self._schedulers: list[tuple[weakref.ref[typing.Any], int]] = []  # and the steps that each makes for an update
        self._random = 0

    def begin(self) -> None:
        """Begins a captured step."""
        self._random, self.clipped = _random_state(), 0

    def on_saved(self, saved: typing.Any, parameters: Parameters) -> None:
        """Records what the program writes to a checkpoint."""
        self._saved += [_fingerprint(found) for found in _weights_in(saved, dict(parameters))]

    def report_of(self, record: Record, step: int, optimizers: typing.Sequence[typing.Any], rates: typing.Any,
                  parameters: Parameters) -> dict[str, typing.Any]:
        """Returns the report that a step's record contains."""
        samples = [digest for part in record.samples.get(step, ()) for digest in part]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        zero_rate = {id(parameter) for group in groups if group.get("lr") == 0 for parameter in group["params"]}
        state = {
            "parts": zlib.crc32("\n".join(name for name, _ in parameters).encode()),
            "rates": rates, "zero_rate": folded(name for name, parameter in parameters if id(parameter) in zero_rate),
            "updates": [_updates_of(optimizer) for optimizer in optimizers], "scale": self.scale,
            "samples": zlib.crc32(repr(sorted(samples)).encode()) if samples else None,
            "random": self._random if _random_state() != self._random else None,  # None: nothing was drawn
            "clipped": self.clipped, "weights": _fingerprint(dict(parameters)), "saved": self._saved,
            "data": record.groups.data, "unsaid": record.groups.unsaid,
            "schedules": self._schedules_of(optimizers, record.groups.mesh.world)}
        self._saved = []
        return state

    def _schedules_of(self, optimizers: typing.Sequence[typing.Any], world: int) -> list[list[int | None]]:
        """Returns, for each learning rate scheduler, its position, how often it was called, and how many steps it makes
        for an update: under accelerate one for each process, unless batches are split."""
        if not self._schedulers or any(scheduler() is None for scheduler, _ in self._schedulers):
            schedulers = schedulers_of(optimizers)
            accelerated = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
            wrappers = referring(schedulers, accelerated, "split_batches") if accelerated is not None else []
            several = {
                id(wrapper.scheduler)
                for wrapper in wrappers
                if wrapper.step_with_optimizer and not wrapper.split_batches
            }
            self._schedulers = [(weakref.ref(scheduler), world if id(scheduler) in several else 1)
                                for scheduler in schedulers]
        return [[*(n if isinstance(n := getattr(scheduler(), key, None), int) else None
                   for key in ("last_epoch", "_step_count")), factor] for scheduler, factor in self._schedulers]


def _random_state() -> int:
    """Returns a number for the states of the random generators."""
    numpy: typing.Any = sys.modules.get("numpy")
    states = [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    if numpy is not None:
        states.append(repr([*map(str, numpy.random.get_state()[1:3])]).encode() +
                      numpy.random.get_state()[1].tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return zlib.crc32(b"".join(states))


def _updates_of(optimizer: typing.Any) -> int | None:
    """Returns how many updates an optimizer has made by its own count; None if it does not count."""
    steps = [states.get("step") for states in optimizer.state.values() if isinstance(states, dict)]
    counts = [int(step) for step in steps if isinstance(step, (int, float)) or (
        isinstance(step, torch.Tensor) and step.numel() == 1)]
    return max(counts) if counts else None


def _weights_in(saved: typing.Any, parameters: dict[str, torch.Tensor], depth: int = 0
                ) -> typing.Iterator[dict[str, torch.Tensor]]:
    """Returns the nested dictionaries that have all of the model's parameters, as this rank has them."""
    if not isinstance(saved, typing.Mapping) or depth > MOST_DEPTH:
        return
    tensors = {plain(str(name)).replace("module.", ""): t for name, t in saved.items() if isinstance(t, torch.Tensor)}
    if all(name in tensors and tensors[name].shape == parameter.shape for name, parameter in parameters.items()):
        yield {name: tensors[name] for name in parameters}
    for value in saved.values():
        yield from _weights_in(value, parameters, depth + 1)


def _fingerprint(tensors: typing.Mapping[str, torch.Tensor]) -> int:
    return zlib.crc32(" ".join(str(digest_of(local_of(tensors[name]).detach())) for name in sorted(tensors)).encode())
