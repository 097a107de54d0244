#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The blocks of `anyrank bench block` in PyTorch: bench/torch_block.py [--batch B] [--seq S] [--threads N] [--json]

Prints the median time of one forward and backward pass of each block in fp32. For a fair comparison give PyTorch the
same BLAS with the same kernels: preload BLIS (LD_PRELOAD=libblis.so.4) where torch links another, and set
BLIS_ARCH_TYPE to what `anyrank info` says, BLIS_NUM_THREADS and OMP_NUM_THREADS to the number of threads.
"""

import argparse
import json
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS = 768, 12


def attend(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1]))
    return torch.matmul(torch.softmax(scores + mask, dim=-1), v)


def heads(x):
    return x.view(x.shape[0], x.shape[1], HEADS, HIDDEN // HEADS).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], HIDDEN)


class Gpt2(nn.Module):
    def __init__(self, seq):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, 3072), nn.Linear(3072, HIDDEN)
        self.register_buffer("mask", torch.full((seq, seq), float("-inf")).triu(1))

    def forward(self, x):
        q, k, v = (heads(t) for t in self.qkv(self.norm1(x)).split(HIDDEN, dim=-1))
        r = x + self.out(joined(attend(q, k, v, self.mask)))
        return r + self.second(F.gelu(self.first(self.norm2(r)), approximate="tanh"))


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Llama(nn.Module):
    def __init__(self, seq):
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(), RmsNorm()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(HIDDEN, 2048, bias=False), nn.Linear(HIDDEN, 2048, bias=False)
        self.down = nn.Linear(2048, HIDDEN, bias=False)
        self.register_buffer("mask", torch.full((seq, seq), float("-inf")).triu(1))
        half = HIDDEN // HEADS // 2
        angle = torch.outer(torch.arange(seq).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, dim=-1))
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], dim=-1))

    def rotated(self, x):
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([second, first], dim=-1) * self.sin

    def forward(self, x):
        n = self.norm1(x)
        q, k, v = self.rotated(heads(self.q(n))), self.rotated(heads(self.k(n))), heads(self.v(n))
        r = x + self.o(joined(attend(q, k, v, self.mask)))
        n = self.norm2(r)
        return r + self.down(F.silu(self.gate(n)) * self.up(n))


def seconds(block, x, dy):
    block.zero_grad(set_to_none=False)
    x.grad = None
    start = time.perf_counter()
    block(x).backward(dy)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    rows = []
    for name, make in (("gpt2", Gpt2), ("llama", Llama)):
        block = make(o.seq)
        x = torch.rand(o.batch, o.seq, HIDDEN).mul_(2).sub_(1).requires_grad_()
        dy = torch.rand(o.batch, o.seq, HIDDEN).mul_(2).sub_(1)
        times = sorted([seconds(block, x, dy) for _ in range(o.repetitions + 3)][3:])
        rows.append({"block": name, "batch": o.batch, "seq": o.seq, "threads": o.threads, "torch": torch.__version__,
                     "seconds": times[len(times) // 2], "smallest": times[0], "largest": times[-1]})
    if o.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(f"{row['block']:6} {1e3 * row['seconds']:7.1f} ms  (smallest {1e3 * row['smallest']:.1f}, "
              f"largest {1e3 * row['largest']:.1f}), torch {row['torch']}, {row['threads']} threads")


if __name__ == "__main__":
    main()
