#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The blocks of build/bench/block in PyTorch: bench/torch_block.py [--size large] [--device cuda] [--json FILE]

Times one forward and backward pass of each block: eager, with attention that stores its scores as anyrank's does;
fused, with scaled_dot_product_attention; compiled, that by torch.compile. --beside build/bench/block runs that in turns
with PyTorch in one run, checks that both blocks have as many parameters, and prints the ratios.

On a processor give PyTorch the same BLAS with the same kernels for a fair comparison: preload BLIS
(LD_PRELOAD=libblis.so.4) where torch links another, and set BLIS_ARCH_TYPE to what `anyrank info` says,
BLIS_NUM_THREADS and OMP_NUM_THREADS to the number of threads. On a GPU times are the GPU's own, between two events.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

VARIANTS = ("eager", "fused", "compiled")


def attend(q, k, v, mask, fused):
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k, v))
    if fused:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1]))
    return torch.matmul(torch.softmax(scores + mask, dim=-1), v)


def heads(x, size):
    return x.view(x.shape[0], x.shape[1], x.shape[2] // size, size).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


class Block(nn.Module):
    def __init__(self, width, query_heads, kv_heads, ffn, seq, fused):
        super().__init__()
        self.width, self.size, self.fused = width, width // query_heads, fused
        self.kv, self.ffn = kv_heads * self.size, ffn
        self.register_buffer("mask", torch.full((seq, seq), float("-inf")).triu(1))


class Gpt(Block):
    """LayerNorm, q, k and v in one matrix, GELU, an MLP of two matrices, biases."""

    def __init__(self, *shape):
        super().__init__(*shape)
        self.norm1, self.norm2 = nn.LayerNorm(self.width), nn.LayerNorm(self.width)
        self.qkv, self.out = nn.Linear(self.width, self.width + 2 * self.kv), nn.Linear(self.width, self.width)
        self.first, self.second = nn.Linear(self.width, self.ffn), nn.Linear(self.ffn, self.width)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).split([self.width, self.kv, self.kv], dim=-1)
        q, k, v = (heads(t, self.size) for t in parts)
        r = x + self.out(joined(attend(q, k, v, self.mask, self.fused)))
        return r + self.second(F.gelu(self.first(self.norm2(r)), approximate="tanh"))


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Llama(Block):
    """RMSNorm, rotary positions, a gated MLP of three matrices, no biases."""

    def __init__(self, *shape):
        super().__init__(*shape)
        self.norm1, self.norm2 = RmsNorm(self.width), RmsNorm(self.width)
        self.q, self.o = (nn.Linear(self.width, self.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(self.width, self.kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(self.width, self.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(self.ffn, self.width, bias=False)
        half = self.size // 2
        angle = torch.outer(torch.arange(self.mask.shape[0]).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, dim=-1))
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], dim=-1))

    def rotated(self, x):
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([second, first], dim=-1) * self.sin

    def forward(self, x):
        n = self.norm1(x)
        q, k, v = (heads(layer(n), self.size) for layer in (self.q, self.k, self.v))
        r = x + self.o(joined(attend(self.rotated(q), self.rotated(k), v, self.mask, self.fused)))
        n = self.norm2(r)
        return r + self.down(F.silu(self.gate(n)) * self.up(n))


# As `build/bench/block --blocks SIZE` has them: name, class, width, heads, KV heads, width of the MLP.
SIZES = {"small": (("gpt2", Gpt, 768, 12, 12, 3072), ("llama", Llama, 768, 12, 12, 2048)),
         "large": (("gpt", Gpt, 4096, 32, 8, 11008), ("llama", Llama, 4096, 32, 8, 11008))}


class Side:
    """One block in one variant and precision, with its input and the gradient of its output."""

    def __init__(self, block, variant, precision, o):
        self.name, make, width, *shape = block
        self.variant, self.precision, self.failed = variant, precision, None
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        self.module = make(width, *shape, o.seq, variant != "eager").to(device=o.device, dtype=kind)
        self.parameters = sum(p.numel() for p in self.module.parameters())
        self.call = None if variant == "compiled" else self.module
        self.x, self.dy = (torch.rand(o.batch, o.seq, width, device=o.device).mul_(2).sub_(1).to(kind)
                           for _ in range(2))
        self.x.requires_grad_()
        self.now = time.process_time if o.threads == 1 else time.perf_counter  # as anyrank's benchmarks have it
        self.times = []

    def seconds(self):
        """Of one pass; on one thread of a processor its own time, on a GPU by events, after all before is done."""
        self.module.zero_grad(set_to_none=False)
        self.x.grad = None
        if self.x.is_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.call(self.x).backward(self.dy)
            end.record()
            end.synchronize()
            return 1e-3 * begin.elapsed_time(end)
        start = self.now()
        self.call(self.x).backward(self.dy)
        return self.now() - start

    def measure(self, repetitions):
        """What this PyTorch lacks, or a compiler that is missing, is told in the row; the other variants go on."""
        if self.failed:
            return
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        try:
            if self.call is None:  # no truth value of it is asked for: that is its length, which a compiled block has not
                self.call = torch.compile(self.module)
            for _ in range(3):
                self.seconds()
            self.times += [self.seconds() for _ in range(repetitions)]
        except Exception as error:  # what the compiler raises has many types
            self.failed = f"{type(error).__name__}: {error}".splitlines()[0][:160]


class Anyrank:
    """anyrank's program: one turn has both blocks, native and exact."""

    def __init__(self, binary, precision, o):
        self.command = [binary, "--blocks", o.size, "--device", o.device, "--batch", str(o.batch), "--seq", str(o.seq),
                        "--precision", precision, "--repetitions", str(o.repetitions), "--json", "-"]
        if o.device == "cpu":
            self.command += ["--threads", str(o.threads)]
        self.times, self.parameters = {}, {}

    def measure(self):
        done = subprocess.run(self.command, check=True, timeout=600, stdout=subprocess.PIPE)
        for row in json.loads(done.stdout)["rows"]:
            self.times.setdefault((row["block"], row["numerics"]), []).append(row["seconds"])
            self.parameters[row["block"]] = row["parameters"]


def row_of(block, side, precision, times, parameters, o, failed=None):
    return {"block": block, "side": side, "precision": precision, "batch": o.batch, "seq": o.seq,
            "parameters": parameters, "seconds": statistics.median(times) if times else None,
            "smallest": min(times, default=None), "largest": max(times, default=None), "failed": failed}


def rows_of(sides, ours, precision, o):
    """Of what has been measured so far."""
    rows = [row_of(block, f"anyrank {numerics}", precision, times, ours.parameters[block], o)
            for (block, numerics), times in (ours.times if ours else {}).items()]
    for side in sides:
        if ours and ours.parameters[side.name] != side.parameters:
            sys.exit(f"{side.name}: anyrank's block has {ours.parameters[side.name]} parameters, PyTorch's "
                     f"{side.parameters}: they are not the same work")
        if side.times or side.failed:
            rows.append(row_of(side.name, f"torch {side.variant}", precision, side.times, side.parameters, o,
                               side.failed))
    return rows


def measure(precision, o, keep):
    """The rows of both blocks in one precision, the sides in turns, so that a GPU that slows down slows all of them.
    keep(rows) gets those so far after each measurement."""
    sides = [Side(block, variant, precision, o) for block in SIZES[o.size] for variant in o.variants]
    ours = Anyrank(o.beside, precision, o) if o.beside else None
    for turn in range(o.turns):
        for name, step in ([("anyrank", ours.measure)] if ours else []) + [
                (f"{side.name}, {side.variant}", lambda side=side: side.measure(o.repetitions)) for side in sides]:
            print(f"\r\033[Kturn {turn + 1} of {o.turns}: {name}", end="", file=sys.stderr, flush=True)
            step()
            keep(rows_of(sides, ours, precision, o))
    print("\r\033[K", end="", file=sys.stderr)
    return rows_of(sides, ours, precision, o)


def print_rows(rows):
    """Each row with its time over those of PyTorch's variants of the same block and precision."""
    for row in rows:
        head = f"{row['block']:6}{row['parameters'] / 1e6:7.1f} M {row['precision']:5}batch {row['batch']:<3}"
        if row["failed"]:
            print(f"{head}{row['side']:15} not measured: {row['failed']}")
            continue
        torchs = [t for t in rows if (t["block"], t["precision"]) == (row["block"], row["precision"])
                  and t["side"].startswith("torch") and t["seconds"]]
        ratios = ", ".join(f"{row['seconds'] / t['seconds']:.2f} of {t['side'][6:]}" for t in torchs if t is not row)
        print(f"{head}{row['side']:15}{1e3 * row['seconds']:9.2f} ms  ({1e3 * row['smallest']:.2f} to "
              f"{1e3 * row['largest']:.2f})  {ratios}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, help="default: small 2; large 2 in fp32, else 8")
    parser.add_argument("--seq", type=int, help="default: small 512, large 1024")
    parser.add_argument("--precision", help="of f32, tf32 and bf16, with commas between; default: cpu f32, cuda all")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of eager, fused and compiled; default all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=5, help="in a turn (default 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--beside", metavar="BINARY", help="build/bench/block, in turns with PyTorch")
    parser.add_argument("--turns", type=int, default=3, help="of each side (default 3)")
    parser.add_argument("--json", metavar="FILE", help="the rows; '-': standard output")
    o = parser.parse_args()
    o.seq = o.seq or (1024 if o.size == "large" else 512)
    o.precision = (o.precision or ("f32" if o.device == "cpu" else "f32,tf32,bf16")).split(",")
    o.variants = o.variants.split(",")
    for given, known in ((o.precision, ("f32", "tf32", "bf16")), (o.variants, VARIANTS)):
        for name in given:
            if name not in known:
                parser.error(f"'{name}' is none of {', '.join(known)}")
    return o


def replace_file(path, text):
    """Puts the file there in one piece, so that a run that is cut off leaves the one before."""
    path = pathlib.Path(path)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def main():
    o = arguments()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    given, rows = o.batch, []
    about = {"size": o.size, "device": o.device, "threads": o.threads, "torch": torch.__version__}
    # What takes longest, compiling, comes last, and after each measurement the file has what there is: a run may be cut
    # off.
    def keep(found):
        if o.json and o.json != "-":
            replace_file(o.json, json.dumps({"rows": rows + found, **about}))

    parts = [names for names in ([v for v in o.variants if v != "compiled"], [v for v in o.variants if v == "compiled"])
             if names]
    for o.variants in parts:
        for precision in o.precision:
            o.batch = given or (8 if o.size == "large" and precision != "f32" else 2)
            found = measure(precision, o, keep)
            rows += found
            if o.json != "-":
                print_rows(found)
                sys.stdout.flush()
    if o.json == "-":
        print(json.dumps({"rows": rows, **about}))
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
