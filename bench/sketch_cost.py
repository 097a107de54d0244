#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What sketching a step costs: processor time of captured steps over plain ones, bytes, and seconds of verify.

torchrun --nproc-per-node 2 bench/sketch_cost.py --folder run [--fsdp] [--dtype bf16] [--width 1024 --layers 20]
"""
import argparse
import json
import os
import pathlib
import resource
import time

import torch
import torch.distributed as dist
from torch import nn

import anyrank


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("width", 1024), ("layers", 20), ("vocabulary", 32000), ("tokens", 2048), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--only-weights", action="store_true", help="without activations")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, args.vocabulary)
    if args.dtype == "bf16":
        model.bfloat16()
    parameters = sum(p.numel() for p in model.parameters())
    if args.fsdp:
        from torch.distributed.fsdp import fully_shard
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    chosen = set(range(1, args.steps + 1, 3))  # a step ends with the next one's forward pass; the third is plain
    sizes, clocks = [], []
    more = {"values": ["grad", "new", "m", "v"]} if args.only_weights else {}
    with anyrank.capture(model, args.folder, optimizer, keep="sketch", steps=chosen, **more):
        for step in range(1, args.steps + 2):
            clocks.append((time.process_time(), time.monotonic()))
            path = pathlib.Path(args.folder) / f"rank-{rank:05d}.sketch"
            sizes.append(path.stat().st_size if path.exists() else 0)
            ids = torch.randint(0, args.vocabulary, (1, args.tokens), generator=generator)
            nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(step, step in chosen, *(f"{b - a:.1f} s" for a, b in zip(clocks[-1], (
                    time.process_time(), time.monotonic()))), flush=True)
    if rank == 0:
        spent = [b[0] - a[0] for a, b in zip(clocks, clocks[1:])]  # from forward to forward, with what ends a step
        plain = spent[2::3]
        extra = [a + b - 2 * sum(plain) / len(plain) for a, b in zip(spent[::3], spent[1::3])]
        print(json.dumps({"parameters": parameters, "plain": plain, "extra of a captured step": extra, "elapsed": [
            b[1] - a[1] for a, b in zip(clocks, clocks[1:])], "bytes": [b - a for a, b in zip(sizes, sizes[1:])],
            "resident_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
