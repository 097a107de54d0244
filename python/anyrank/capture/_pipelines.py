# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed.pipelining does around a stage's module: which micro-batch it is called for, and by what the
schedule divides the gradients of all of them after the last.

A schedule calls modules from its own functions, whose frames tell.
"""

from __future__ import annotations

import sys
import types
import typing

import torch.distributed as dist

HOME = "torch.distributed.pipelining.stage"


class Chunk(typing.NamedTuple):
    """A stage's call for one micro-batch. divisor: of the parameters' gradients, once all micro-batches have theirs;
    probe: the stage learns the shapes of its tensors."""

    stage: typing.Any
    number: int
    divisor: int
    probe: bool


def chunk_now() -> Chunk | None:
    """Returns what the schedule is doing whose functions call this; None without a schedule."""
    if HOME not in sys.modules:
        return None
    frame: types.FrameType | None = sys._getframe()
    stage: typing.Any = None
    number, probe = 0, False
    while frame is not None:
        caller: typing.Any = frame.f_locals.get("self")
        name = frame.f_code.co_name
        if stage is None and hasattr(caller, "submod") and hasattr(caller, "stage_index"):
            stage = caller
        if stage is caller is not None and name == "forward_one_chunk":
            number = frame.f_locals["fwd_chunk_id"]
        probe = probe or name == "_forward_metadata_inference"
        if stage is not None and hasattr(caller, "scale_grads") and hasattr(caller, "_n_microbatches"):
            return Chunk(stage, number, caller._n_microbatches if caller.scale_grads else 1, probe)
        frame = frame.f_back
    return Chunk(stage, number, 1, probe) if stage is not None else None


def group_of_stages(wrapper: typing.Any) -> typing.Any:
    """Returns the ranks of a pipeline: of the stage that is called now, or of DeepSpeed's engine; None if there is
    none."""
    chunk = chunk_now()
    if chunk is not None:
        return chunk.stage.group or dist.group.WORLD
    grid: typing.Any = getattr(wrapper, "grid", None)
    return grid.get_pipe_parallel_group() if hasattr(grid, "get_pipe_parallel_group") else None


def stages_of(schedule: typing.Any) -> list[typing.Any]:
    """Returns this rank's stages of a schedule, a stage or a list; [] for anything else."""
    if isinstance(schedule, (list, tuple)):
        return list(schedule)
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if hasattr(schedule, "submod"):
        stages = [schedule]
    return [stage for stage in stages if hasattr(stage, "submod")]
