# SPDX-License-Identifier: Apache-2.0
"""A grid of gloo processes, dp times tp, and the collectives that autograd goes through. One rank needs no process group."""

import torch
import torch.distributed as dist


class Ranks:
    """This process's place in the grid (tp innermost), its two groups, and the bug that the run has (None: none)."""

    def __init__(self, rank=0, dp=1, tp=1, sp=False, bug=None):
        self.rank, self.dp, self.tp, self.sp, self.bug = rank, dp, tp, sp, bug
        self.dp_rank, self.tp_rank = rank // tp, rank % tp
        self.tp_group = self.dp_group = None
        for d in range(dp if tp > 1 else 0):
            group = dist.new_group([d * tp + t for t in range(tp)])
            self.tp_group = group if d == self.dp_rank else self.tp_group
        for t in range(tp if dp > 1 else 0):
            group = dist.new_group([d * tp + t for d in range(dp)])
            self.dp_group = group if t == self.tp_rank else self.dp_group

    def has(self, *bugs):
        return self.bug in bugs

    def sum(self, t, over="tp"):
        """The sum of t over a dimension of the grid; t itself where that has one rank."""
        if getattr(self, over) == 1:
            return t
        t = t.detach().clone().contiguous()
        dist.all_reduce(t, group=getattr(self, f"{over}_group"))
        return t

    def max(self, t):
        if self.tp == 1:
            return t
        t = t.detach().clone().contiguous()
        dist.all_reduce(t, op=dist.ReduceOp.MAX, group=self.tp_group)
        return t

    def gather(self, t, dim, over="tp"):
        """The parts of all ranks one after the other along dim."""
        n = getattr(self, over)
        if n == 1:
            return t
        parts = [torch.empty_like(t) for _ in range(n)]
        dist.all_gather(parts, t.detach().contiguous(), group=getattr(self, f"{over}_group"))
        return torch.cat(parts, dim)

    def part(self, t, dim, over="tp"):
        """This rank's part of a whole tensor."""
        n = getattr(self, over)
        return t if n == 1 else t.chunk(n, dim)[getattr(self, f"{over}_rank")].contiguous()


class Through(torch.autograd.Function):
    """Any function forward, any function backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.back = backward
        y = forward(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def same(t):
    return t


def copy_to(x, r, reduce=True):
    """The input of a column-parallel layer: a copy forward, the sum of the ranks' gradients backward."""
    return Through.apply(x, same, r.sum if reduce else same)


def reduce_from(x, r, reduce=True):
    """The output of a row-parallel layer: the sum forward, a copy backward."""
    return Through.apply(x, r.sum if reduce else same, same)


def gather_sequence(x, r, reduce=True):
    """From a part of the sequence (dimension 1) to all of it; backward the sum, of which each rank keeps its part."""
    back = (lambda g: r.part(r.sum(g), 1)) if reduce else (lambda g: r.part(g, 1))
    return Through.apply(x, lambda t: r.gather(t, 1), back)


def scatter_sum(x, r):
    """The sum of partial outputs, of which each rank keeps its part of the sequence; backward an all-gather."""
    return Through.apply(x, lambda t: r.part(r.sum(t), 1), lambda g: r.gather(g, 1))
