# SPDX-License-Identifier: Apache-2.0
"""Ranks as forked processes, of which none outlives the others' failure."""

import contextlib
import os
import signal
import sys
import traceback

import torch


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
