# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel and sequence-parallel layers by hand: what a team writes for itself, and test_layers.py tests.

Each layer begins as the full one, so that the ranks' parts are those of one model. `group`: None for the full layer.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


def part(x, group, dim=0):
    """This rank's part of x along dim; x itself without a group."""
    return x if group is None else x.chunk(group.size(), dim)[group.rank()].contiguous()


def gather(x, group, dim):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def summed(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class CopyToRanks(torch.autograd.Function):
    """Before a column-parallel layer: every rank has x; backward the gradients of all of them are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """After a row-parallel layer: the sum of all ranks' outputs."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherSequence(torch.autograd.Function):
    """Before a column-parallel layer under sequence parallelism: all tokens; backward a sum, of which each rank keeps its
    tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather(x, group, 1)

    @staticmethod
    def backward(ctx, grad):
        return part(summed(grad, ctx.group), ctx.group, 1), None


class ScatterSequence(torch.autograd.Function):
    """After a row-parallel layer under sequence parallelism: of the sum each rank keeps its tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return part(summed(x, group), group, 1)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group, 1), None


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs, outputs, group=None, sequence=False):
        super().__init__()
        full = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(part(full.weight.detach(), group))
        self.bias = nn.Parameter(part(full.bias.detach(), group))
        self.group, self.before = group, GatherSequence if sequence else CopyToRanks

    def forward(self, x):
        if self.group is not None:
            x = self.before.apply(x, self.group)
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, inputs, outputs, group=None, sequence=False):
        super().__init__()
        full = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(part(full.weight.detach(), group, 1))
        self.bias = full.bias
        self.group, self.after = group, ScatterSequence if sequence else SumOverRanks

    def forward(self, x):
        y = functional.linear(x, self.weight)
        if self.group is not None:
            y = self.after.apply(y, self.group)
        return y + self.bias


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, width, group=None, sequence=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = ColumnParallelLinear(width, 4 * width, group, sequence)
        self.down = RowParallelLinear(4 * width, width, group, sequence)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks; under sequence parallelism each rank has its part of the tokens, x is [samples, tokens, width]."""

    def __init__(self, width=32, blocks=2, group=None, sequence=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, group, sequence) for _ in range(blocks)])
        self.group, self.sequence = group, sequence

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def reduce_gradients(self):
        """After backward: what saw only this rank's tokens has only their share of the gradient."""
        if self.sequence and self.group is not None:
            for block in self.blocks:
                for p in (*block.norm.parameters(), block.down.bias):
                    p.grad = summed(p.grad, self.group)
