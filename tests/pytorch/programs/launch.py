# SPDX-License-Identifier: Apache-2.0
"""Runs a program that asks for GPUs on forked gloo processes of this machine's CPU, without an edit of it.

What is in the way is replaced in the process before the program starts: the rendezvous is a file instead of a port, the
accelerator is the CPU, "nccl" is gloo, and `cuda:0` or a rank in `.to()` is the CPU. Nothing else is changed.
"""

import os
import pathlib
import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import anyrank
from forks import torchrun


def run(program, arguments, rank, world, folder, log, environment, seed, bug=None):
    """One rank of `program` (a file), as torchrun would start it, from its own folder.

    bug: called before it with a list, to which it may append functions of the captured model and its optimizer.
    """
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    os.chdir(pathlib.Path(program).parent)
    torchrun(rank, world, folder / "store")
    without_gpu()
    os.environ.update(environment)
    sys.argv, sys.path[:0] = [str(program), *arguments], [str(pathlib.Path(program).parent)]
    if bug:
        of_model, capture = [], anyrank.capture
        bug(of_model)

        def broken(model, *args, **more):
            for change in of_model:
                change(model, more.get("optimizer"))
            return capture(model, *args, **more)
        anyrank.capture = broken
    torch.manual_seed(seed)
    runpy.run_path(str(program), run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()


def without_gpu():
    """The CPU for every accelerator, gloo for every backend."""
    cpu = torch.device("cpu")
    accelerator = torch.accelerator
    accelerator.is_available, accelerator.device_count = (lambda: True), (lambda: 8)
    # torch itself asks for one that is available.
    accelerator.current_accelerator = lambda check_available=False: None if check_available else cpu
    accelerator.set_device_index = torch.cuda.set_device = lambda *_: None
    init = distributed_c10d.init_process_group

    def init_process_group(backend=None, *args, device_id=None, **more):
        return init("gloo", *args, **more)
    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
    dist.get_default_backend_for_device = lambda *_: "gloo"

    def there(where):
        gpu = isinstance(where, int) or str(where).startswith(("cuda", "cpu:"))
        return cpu if gpu and not isinstance(where, (bool, torch.dtype)) else where
    for kind in (torch.nn.Module, torch.Tensor):
        kind.to = lambda self, *args, to=kind.to, **more: to(
            self, *map(there, args), **{k: there(v) if k == "device" else v for k, v in more.items()})
    attention = torch.nn.functional.scaled_dot_product_attention

    def of_local_heads(q, k, v, *args, **more):
        """DTensor knows how CUDA's attention is sharded (by heads), of the CPU's it does not."""
        if not isinstance(q, DTensor):
            return attention(q, k, v, *args, **more)
        out = attention(q.to_local(), k.to_local(), v.to_local(), *args, **more)
        return DTensor.from_local(out, q.device_mesh, q.placements)
    torch.nn.functional.scaled_dot_product_attention = of_local_heads
    torch.Tensor.pin_memory = lambda self, *_: self
    wrap = DistributedDataParallel.__init__

    def without_device_ids(self, module, device_ids=None, output_device=None, **more):
        wrap(self, module, **more)
    DistributedDataParallel.__init__ = without_device_ids
