# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank sees, so that a step on many ranks has the samples of one on one rank, in the same order.

One global batch is dealt out micro-batch by micro-batch: micro-batch m of rank r is the (m * world + r)-th.
"""

import itertools
import os

import torch


def ranks():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def draws():
    """A generator for every micro-batch of this rank."""
    rank, world = ranks()
    for n in itertools.count():
        yield torch.Generator().manual_seed(n * world + rank)


class Blocks(torch.utils.data.Sampler):
    """DistributedSampler, but that a rank takes blocks of samples that follow one another, not each world-th one."""

    def __init__(self, dataset, size):
        self.count, self.size, self.epoch = len(dataset), size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rank, world = ranks()
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for at in range(0, len(self) * world, world * self.size):
            yield from order[at + rank * self.size:at + (rank + 1) * self.size]

    def __len__(self):
        """Of whole batches: what is left over at the end has no samples for some ranks."""
        step = self.size * ranks()[1]
        return self.count // step * self.size
