# SPDX-License-Identifier: Apache-2.0
"""The layers on N ranks of this machine, against the same model on one rank. pytest.md explains it line by line."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from parallel_layers import Net, gather, part

WIDTH = 32

# Plain tensors do not know which part of the full one they are.
TENSOR_PARALLEL = {"shard": {"*.up.weight:*": {"tp": 0}, "*.up.bias:*": {"tp": 0}, "*.up:fwd": {"tp": -1},
                             "*.down.weight:*": {"tp": 1}, "*.down:bwd": {"tp": -1}}}
SEQUENCE_PARALLEL = {"shard": {**TENSOR_PARALLEL["shard"], "*.norm:*wd": {"tp": 1}, "*.up:bwd": {"tp": 1},
                               "*.down:fwd": {"tp": 1}, "blocks.?:*wd": {"tp": 1}, "output:fwd": {"tp": 1}},
                     "partial": {"loss:fwd": "tp"}}


def batch():
    """The same on every rank: the seed is."""
    return torch.randn(4, 16, WIDTH)


@pytest.mark.anyrank(ranks=[2, 4])
def test_tensor_parallel(anyrank_compare):
    def build(mesh):
        return Net(WIDTH, group=mesh and mesh.get_group("tp"))

    def step(model, mesh):
        model(batch()).square().mean().backward()

    anyrank_compare(build, step, spec=TENSOR_PARALLEL)


@pytest.mark.anyrank(ranks=[2, 4], seeds=[0, 1])
def test_sequence_parallel(anyrank_compare):
    def build(mesh):
        return Net(WIDTH, group=mesh and mesh.get_group("tp"), sequence=True)

    def step(model, mesh):
        x = batch()
        out = model(part(x, model.group, 1))
        (out.square().sum() / x.numel()).backward()  # each rank's share of the mean
        model.reduce_gradients()

    anyrank_compare(build, step, spec=SEQUENCE_PARALLEL)


@pytest.mark.anyrank(layouts=[{"dp": 2}, {"dp": 4}])
def test_data_parallel(anyrank_compare):
    def build(mesh):
        model = Net(WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return (DistributedDataParallel(model) if mesh else model), optimizer

    def step(model, mesh):
        x = part(batch(), mesh and mesh.get_group("dp"))
        model(x).square().mean().backward()

    anyrank_compare(build, step)


@pytest.mark.anyrank(layouts=[{"tp": 2}, {"tp": 4}])
def test_parallelize_module(anyrank_compare):
    """PyTorch's own plans: their DTensors say themselves where they are."""
    def build(mesh):
        model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        return parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()}) if mesh else model

    def step(model, mesh):
        model(batch()).square().mean().backward()

    anyrank_compare(build, step)


def test_gather_keeps_the_order(anyrank_spawn):
    """A function without a model: what each rank returns."""
    def run(rank):
        x = torch.arange(8.0).reshape(2, 4)
        group = torch.distributed.group.WORLD
        return gather(part(x, group, 1), group, 1)

    for gathered in anyrank_spawn(run, ranks=2):
        torch.testing.assert_close(gathered, torch.arange(8.0).reshape(2, 4))
