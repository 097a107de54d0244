# SPDX-License-Identifier: Apache-2.0
"""Ranks as forked processes, of which none outlives the others' failure."""

import contextlib
import os
import signal
import sys
import traceback

import torch
import torch.distributed as dist


def torchrun(rank, world, store):
    """The environment that torchrun gives a rank, of one machine. Its process group meets at the file `store`: a port
    may be another program's by the time that it is listened on, and a rank that serves it may end before the others."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      GROUP_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0", TORCHELASTIC_RUN_ID="anyrank")
    rendezvous = sys.modules["torch.distributed.rendezvous"]  # dist.rendezvous is its function
    file = dist.FileStore(str(store), world)
    rendezvous._rendezvous_handlers["env"] = lambda *_args, **_more: iter([(file, rank, world)])


def _run(function, rank):
    # A process made by a fork makes PyTorch's pool of threads anew at its first use, and of two threads that come first
    # together one finds no pool.
    torch.set_num_threads(torch.get_num_threads())
    status = 1
    try:
        function(rank)
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def fork_ranks(world, function):
    """Runs function(rank) in `world` forked processes; True if all of them ended well. The first that does not ends the
    others, which would wait for it for half an hour."""
    left, good = set(), True
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _run(function, rank)
        left.add(pid)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and good:
            good = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    return good
