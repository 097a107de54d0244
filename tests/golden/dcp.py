#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds dumps of ranks against PyTorch's distributed checkpoints (torch.distributed.checkpoint, safetensors with
sharding kept). Run by hand, never by the tests; it needs torch and safetensors from PyPI.

    python3 tests/golden/dcp.py write FOLDER            4 gloo processes save DTensors; the committed folder is
                                                        tests/golden/dcp-tiny, made with torch 2.11.0
    python3 tests/golden/dcp.py merge FOLDER OUT        PyTorch's reader puts the folder together, into one file

What anyrank writes is checked by `merge` and `anyrank verify OUT FOLDER`: the two merge the same parts.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

RANKS = 4


def counted(*shape, dtype=torch.float32):
    """Element i is i."""
    count = 1
    for n in shape:
        count *= n
    return torch.arange(count, dtype=dtype).reshape(shape)


def save(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def placed(tensor, *placements):
        return distribute_tensor(tensor, mesh, list(placements))

    state = {
        "rows": placed(counted(8, 6), Replicate(), Shard(0)),
        "columns": placed(counted(8, 6, dtype=torch.bfloat16), Replicate(), Shard(1)),
        "both": placed(counted(8, 6), Shard(0), Shard(1)),
        "twice": placed(counted(9, 2), Shard(0), Shard(0)),
        "uneven": placed(counted(5, 3, dtype=torch.int64), Replicate(), Shard(0)),
        "empty": placed(counted(1, 3), Replicate(), Shard(0)),
        "copies": placed(counted(4, dtype=torch.float16), Replicate(), Replicate()),
        "plain": counted(3),
        "scalar": torch.tensor(7.0),
    }
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path=folder, save_distributed=True))
    dist.destroy_process_group()


def merge(folder, out):
    found = dcp.HuggingFaceStorageReader(path=folder).read_metadata().state_dict_metadata
    state = {name: torch.zeros(tuple(t.size), dtype=t.properties.dtype) for name, t in found.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path=folder))
    save_file(state, out)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "write":
        torch.multiprocessing.spawn(save, args=(sys.argv[2],), nprocs=RANKS)
    elif len(sys.argv) == 4 and sys.argv[1] == "merge":
        merge(sys.argv[2], sys.argv[3])
    else:
        sys.exit(__doc__)
