#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own pipeline schedules, as files and against anyrank's.

    tests/golden/make_schedules.py FOLDER             writes those of CASES as CSV (torch 2.15.0+cu132 made schedules/)
    tests/golden/make_schedules.py --compare BINARY   compares every schedule up to 8 ranks, 4 stages each, 16
                                                      micro-batches with what BINARY generates, operation by operation

Needs torch with torch.distributed.pipelining; not part of ./test. Where p does not divide the number of micro-batches,
PyTorch's interleaved schedule makes the rounds longer, or refuses, and anyrank's leaves micro-batches out of the last
one: these are not compared. Its zero bubble of several stages of a rank has no counterpart here.
"""

import pathlib
import subprocess
import sys
import tempfile

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

# File: anyrank's name of the kind, ranks, stages of each, micro-batches, and whether with transfers.
CASES = {
    "gpipe-4-6": ("gpipe", 4, 1, 6, False),
    "1f1b-4-6": ("1f1b", 4, 1, 6, False),
    "interleaved-2-3-4": ("interleaved", 2, 3, 4, False),
    "interleaved-2-2-4-transfers": ("interleaved", 2, 2, 4, True),
    "zero-bubble-4-6": ("zero-bubble", 4, 1, 6, False),
    "zero-bubble-3-4-transfers": ("zero-bubble", 3, 1, 4, True),
}
COMPUTES = ("F", "B", "I", "W")


class Stage(_PipelineStageBase):
    """What a schedule asks a stage for when it is made."""

    def __init__(self, ranks, stages):
        self.num_stages, self.group_size, self.group_rank, self.group = stages, ranks, 0, None
        self.stage_index, self.is_first, self.submod, self.device = 0, True, None, torch.device("cpu")

    is_first = is_last = False

    def _prepare_forward_infra(self, *_, **__):
        raise NotImplementedError

    _prepare_backward_infra = _create_grad_recv_info = _prepare_forward_infra


def pipeline_order(kind, ranks, each, micro_batches, transfers=False):
    """A list of actions for each rank; None where PyTorch refuses the numbers."""
    made = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zero-bubble": schedules.ScheduleInterleavedZeroBubble}[kind]
    stages = [Stage(ranks, ranks * each) for _ in range(each)]
    if kind in ("gpipe", "1f1b"):
        stage = stages[0]
        schedule = made.__new__(made)
        schedule._stage, schedule._num_stages, schedule._n_microbatches = stage, ranks, micro_batches
        return schedule._get_pipeline_order()
    try:
        schedule = made(stages, micro_batches)
    except ValueError:
        return None
    return schedule.pipeline_order_with_comms if transfers else schedule.pipeline_order


def computations(order):
    return [[str(a) for a in order[rank] if a is not None and a.computation_type.value in COMPUTES]
            for rank in sorted(order)]


def write(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        order = pipeline_order(*case)
        lines = [",".join("" if a is None else str(a) for a in order[rank]) for rank in sorted(order)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def generated(binary, kind, ranks, each, micro_batches, folder):
    path = pathlib.Path(folder) / "schedule.csv"
    more = ["--virtual-stages", str(each)] if kind == "interleaved" else []
    subprocess.run([binary, "plan", "llama-3-70b", "--pipeline", "--pp", str(ranks), "--schedule-pp", kind,
                    "--micro-batches", str(micro_batches), "--csv", str(path), "--quiet", *more], check=True)
    return [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]


def compare(binary):
    same = different = 0
    with tempfile.TemporaryDirectory(prefix="anyrank-schedules-") as folder:
        for kind in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
            for ranks in range(2, 9):
                for each in ((2, 3, 4) if kind == "interleaved" else (1,)):
                    for micro_batches in range(1, 17):
                        # PyTorch's list of 1F1B is not what it runs: with fewer micro-batches than ranks it has
                        # forward passes of more, and on the last rank it counts them from 1. Its rounds of other
                        # lengths are described above.
                        if kind == "1f1b" and micro_batches < ranks or \
                                kind == "interleaved" and micro_batches % ranks != 0:
                            continue
                        order = pipeline_order(kind, ranks, each, micro_batches)
                        if order is None:
                            continue
                        ours = generated(binary, kind, ranks, each, micro_batches, folder)
                        compared = ranks - 1 if kind == "1f1b" else ranks
                        equal = ours[:compared] == computations(order)[:compared]
                        same, different = same + equal, different + (not equal)
                        if not equal:
                            print(f"{kind} p={ranks} v={each} m={micro_batches}:\n  torch {computations(order)}\n"
                                  f"  here  {ours}")
    print(f"torch {torch.__version__}: {same} schedules the same, {different} different")
    return different > 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(compare(sys.argv[2]) if sys.argv[1] == "--compare" else write(sys.argv[1]))
