#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The blocks of `anyrank bench block` in PyTorch: bench/torch_block.py [--device cuda] [--batch B] [--seq S] [--json]

Prints the median time of one forward and backward pass of each block in fp32. For a fair comparison give PyTorch the
same BLAS with the same kernels: preload BLIS (LD_PRELOAD=libblis.so.4) where torch links another, and set
BLIS_ARCH_TYPE to what `anyrank info` says, BLIS_NUM_THREADS and OMP_NUM_THREADS to the number of threads.

--device cuda: eager mode on the GPU, by its own clock; besides the two blocks a large one (width 4096, 32 heads, 8 KV
heads, MLP 11008, sequences of 1024), in fp32 with batch 2, in TF32 and in bf16 with batch 8. Attention stores its
scores as anyrank's does; --fused has PyTorch's scaled_dot_product_attention in its place.
"""

import argparse
import json
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS = 768, 12
FUSED = False


def attend(q, k, v, mask):
    if FUSED:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1]))
    return torch.matmul(torch.softmax(scores + mask, dim=-1), v)


def heads(x, number=HEADS):
    return x.view(x.shape[0], x.shape[1], number, x.shape[2] // number).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


class Gpt2(nn.Module):
    width = HIDDEN

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
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Llama(nn.Module):
    width, query_heads, kv_heads, ffn = HIDDEN, HEADS, HEADS, 2048

    def __init__(self, seq):
        super().__init__()
        size = self.width // self.query_heads
        self.norm1, self.norm2 = RmsNorm(self.width), RmsNorm(self.width)
        self.q, self.o = (nn.Linear(self.width, self.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(self.width, self.kv_heads * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(self.width, self.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(self.ffn, self.width, bias=False)
        self.register_buffer("mask", torch.full((seq, seq), float("-inf")).triu(1))
        half = size // 2
        angle = torch.outer(torch.arange(seq).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, dim=-1))
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], dim=-1))

    def rotated(self, x):
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([second, first], dim=-1) * self.sin

    def forward(self, x):
        n = self.norm1(x)
        q, k, v = heads(self.q(n), self.query_heads), heads(self.k(n), self.kv_heads), heads(self.v(n), self.kv_heads)
        k, v = (t.repeat_interleave(self.query_heads // self.kv_heads, dim=1) for t in (self.rotated(k), v))
        r = x + self.o(joined(attend(self.rotated(q), k, v, self.mask)))
        n = self.norm2(r)
        return r + self.down(F.silu(self.gate(n)) * self.up(n))


class LargeLlama(Llama):
    width, query_heads, kv_heads, ffn = 4096, 32, 8, 11008


def seconds(block, x, dy):
    """Of one pass; on a GPU by events, after a first look that all before is done."""
    block.zero_grad(set_to_none=False)
    x.grad = None
    if x.is_cuda:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        block(x).backward(dy)
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)
    start = time.perf_counter()
    block(x).backward(dy)
    return time.perf_counter() - start


def measure(name, make, precision, batch, seq, o):
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    block = make(seq).to(device=o.device, dtype=kind)
    x, dy = (torch.rand(batch, seq, make.width, device=o.device).mul_(2).sub_(1).to(kind) for _ in range(2))
    x.requires_grad_()
    times = sorted([seconds(block, x, dy) for _ in range(o.repetitions + 3)][3:])
    return {"block": name, "precision": precision, "batch": batch, "seq": seq, "threads": o.threads,
            "device": o.device, "fused": FUSED, "torch": torch.__version__, "seconds": times[len(times) // 2],
            "smallest": times[0], "largest": times[-1]}


def cases(o):
    small = [("gpt2", Gpt2), ("llama", Llama)]
    found = [(name, make, "f32", o.batch, o.seq) for name, make in small]
    if o.device == "cuda":
        found += [(name, make, precision, o.batch, o.seq) for precision in ("tf32", "bf16") for name, make in small]
        found += [("llama 4096", LargeLlama, precision, 2 if precision == "f32" else 8, 1024)
                  for precision in ("f32", "tf32", "bf16")]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fused", action="store_true", help="scaled_dot_product_attention")
    o = parser.parse_args()
    global FUSED
    FUSED = o.fused
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    rows = [measure(*case, o) for case in cases(o)]
    if o.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(f"{row['block']:10} {row['precision']:5} batch {row['batch']} seq {row['seq']:4} "
              f"{1e3 * row['seconds']:7.2f} ms  (smallest {1e3 * row['smallest']:.2f}, "
              f"largest {1e3 * row['largest']:.2f}), torch {row['torch']} on {row['device']}, {row['threads']} threads")


if __name__ == "__main__":
    main()
