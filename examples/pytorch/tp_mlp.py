# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel MLP by hand, right or broken on purpose, for `anyrank verify` to look at.

    python tp_mlp.py --folder dumps                 one rank: dumps/one
    python tp_mlp.py --folder dumps --tp 4 --bug B  four gloo processes on this machine: dumps/B
    python tp_mlp.py --folder dumps --tp 4 --dtensor  the same by PyTorch's own tensor parallelism: dumps/dtensor

A column-parallel and a row-parallel linear layer between a norm and a residual, two blocks deep. --bug says what is
wrong with it: see BUGS.
"""

import argparse
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import anyrank

HIDDEN, FFN, BATCH, SEQ, BLOCKS = 32, 128, 3, 10, 2

BUGS = {
    "none": "nothing",
    "dx_not_reduced": "the gradient of the column-parallel layer's input is not summed over the ranks",
    "bias_every_rank": "the row-parallel bias is added on every rank, before the sum",
    "sum_not_reduced": "the row-parallel output is not summed",
    "wrong_shard": "rank 2 holds rank 1's rows of the first block's first weight",
    "norm_grad_doubled": "the norm's gradient, equal on all ranks already, is summed over them",
}


class CopyToRanks(torch.autograd.Function):
    """The identity forward; backward sums what the ranks' parts give."""

    @staticmethod
    def forward(ctx, x, reduce):
        ctx.reduce = reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.reduce:
            grad = grad.contiguous()
            dist.all_reduce(grad)
        return grad, None


class SumOverRanks(torch.autograd.Function):
    """The sum forward; the identity backward."""

    @staticmethod
    def forward(_ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_ctx, grad):
        return grad


class RowParallelLinear(nn.Linear):
    """Each rank multiplies its columns; the bias comes once, after the sum."""

    def __init__(self, inputs, outputs, tp, bug):
        super().__init__(inputs // tp, outputs)
        self.tp, self.bug = tp, bug

    def forward(self, x):
        if self.tp == 1:
            return super().forward(x)
        part = nn.functional.linear(x, self.weight)
        if self.bug == "bias_every_rank":
            part = part + self.bias
        if self.bug != "sum_not_reduced":
            part = SumOverRanks.apply(part)
        return part if self.bug == "bias_every_rank" else part + self.bias


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))"""

    def __init__(self, layer, rank, tp, bug):
        super().__init__()
        self.tp, self.bug = tp, bug
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, FFN // tp)
        self.down = RowParallelLinear(FFN, HIDDEN, tp, bug)
        self.set_weights(layer, rank, tp)

    def set_weights(self, layer, rank, tp):
        draw = torch.Generator().manual_seed(100 + layer)
        up = torch.randn(FFN, HIDDEN, generator=draw) / HIDDEN ** 0.5
        down = torch.randn(HIDDEN, FFN, generator=draw) / FFN ** 0.5
        bias_up, bias_down = (torch.randn(n, generator=draw) / 4 for n in (FFN, HIDDEN))
        shard = 1 if self.bug == "wrong_shard" and layer == 0 and rank == 2 else rank
        with torch.no_grad():
            self.up.weight.copy_(up.chunk(tp)[shard])
            self.up.bias.copy_(bias_up.chunk(tp)[rank])
            self.down.weight.copy_(down.chunk(tp, dim=1)[rank])
            self.down.bias.copy_(bias_down)

    def forward(self, x):
        y = self.norm(x)
        if self.tp > 1:
            y = CopyToRanks.apply(y, self.bug != "dx_not_reduced")
        return x + self.down(nn.functional.gelu(self.up(y), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, rank, tp, bug):
        super().__init__()
        self.blocks = nn.ModuleList(Block(layer, rank, tp, bug) for layer in range(BLOCKS))
        self.final_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)


# Where the tensors of a rank stand in those of one rank; DTensors say it themselves.
SHARD = {"*.up.*:*": {"tp": 0}, "*.up:fwd": {"tp": -1}, "*.down.weight:*": {"tp": 1}, "*.down:bwd": {"tp": -1}}
# What leaves a column-parallel layer backward is a part of the sum, until CopyToRanks adds it up.
SPEC = {"shard": SHARD, "partial": {"*.up:bwd": "tp"}}


def parallel_model(rank, tp, bug, dtensor):
    if not dtensor:
        return Model(rank, tp, bug)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    model = Model(0, 1, "none")
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)), plan)


def step(rank, tp, bug, dtensor, folder, store):
    """Forward and backward on one rank, with the dump."""
    torch.set_num_threads(1)
    if tp > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=draw)
    target = torch.randn(BATCH, SEQ, HIDDEN, generator=draw)
    model = parallel_model(rank, tp, bug, dtensor)
    x.requires_grad_(True)
    with anyrank.capture(model, folder, spec={} if dtensor else SPEC):
        ((model(x) - target) ** 2).mean().backward()
        if bug == "norm_grad_doubled":
            for block in model.blocks:
                dist.all_reduce(block.norm.weight.grad)
    if tp > 1:
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--bug", choices=BUGS, default="none")
    parser.add_argument("--dtensor", action="store_true")
    args = parser.parse_args()
    if FFN % args.tp:
        parser.error(f"--tp {args.tp}: the {FFN} features of the MLP do not divide")
    if args.tp == 1:
        step(0, 1, "none", False, args.folder / "one", None)
    else:
        folder = args.folder / ("dtensor" if args.dtensor else args.bug)
        with tempfile.TemporaryDirectory() as store:
            mp.spawn(step, (args.tp, args.bug, args.dtensor, folder, f"{store}/store"), nprocs=args.tp)


if __name__ == "__main__":
    main()
