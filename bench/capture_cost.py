#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What anyrank.capture costs: time and memory of a training step of a small GPT, with and without it, in one run.

    python bench/capture_cost.py [--ranks N] [--width H] [--layers L] [--batch B] [--sequence S] [--rounds R]
                                 [--folder DIR]

Each round takes a step without capture, a step that is captured but not chosen by `steps`, a chosen one, and one of
which only gradients are kept, in turns; medians over the rounds. Several ranks are gloo processes of one thread under
DDP. Processor time, which other programs disturb less, is the process's own.
Memory is the largest resident size during a step (Linux), above that before it. Needs torch.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import anyrank  # noqa: E402

VOCABULARY = 8192
KINDS = {"without": None, "not chosen": {"steps": {2}}, "captured": {"steps": {1}},
         "gradients alone": {"steps": {1}, "values": ["grad", "clip"]}}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def memory(key):
    """VmRSS or VmHWM of this process, in MB."""
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith(key))


def measure(rank, a):
    """{kind: [(seconds, seconds of the processor, MB, bytes on disk)]}"""
    torch.manual_seed(0)
    model = GPT(a.width, a.layers)
    wrapped = nn.parallel.DistributedDataParallel(model) if a.ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, VOCABULARY, (a.batch, a.sequence), generator=torch.Generator().manual_seed(rank))

    def step():
        F.cross_entropy(wrapped(ids).flatten(0, 1), ids.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found = {kind: [] for kind in KINDS}
    step()
    for _ in range(a.rounds):
        for kind, options in KINDS.items():
            folder = pathlib.Path(a.folder) / kind.replace(" ", "-")
            pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before, start, used = memory("VmRSS"), time.perf_counter(), time.process_time()
            if options is None:
                step()
            else:
                with anyrank.capture(wrapped, folder, optimizer, **options):
                    step()
            seconds, used = time.perf_counter() - start, time.process_time() - used
            size = sum(p.stat().st_size for p in folder.glob(f"rank-{rank:05d}*")) if options else 0
            found[kind].append((seconds, used, memory("VmHWM") - before, size))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 1), ("width", 512), ("layers", 6), ("batch", 8), ("sequence", 256), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", help="where dumps go; default: a temporary folder")
    a = parser.parse_args()
    own, a.folder = a.folder, a.folder or tempfile.mkdtemp(prefix="anyrank-cost-")
    try:
        found = anyrank.ranks.spawn(a.ranks, measure, a, timeout=None, threads=1)[0]
    finally:
        if own is None:
            shutil.rmtree(a.folder, ignore_errors=True)
    parameters = sum(p.numel() for p in GPT(a.width, a.layers).parameters())
    print(f"GPT of {parameters / 1e6:.1f} M parameters, {a.layers} blocks of width {a.width}, {a.batch} x {a.sequence} "
          f"tokens a rank, fp32, {a.ranks} rank(s), torch {torch.__version__}, {os.cpu_count()} cores; "
          f"medians of {a.rounds}")
    print(f"{'step':16} {'seconds':>8} {'processor':>10} {'of plain':>9} {'MB more':>8} {'MB on disk':>11}")
    plain = statistics.median(x[1] for x in found["without"])
    for kind, rows in found.items():
        seconds, used, more, size = (statistics.median(x[i] for x in rows) for i in range(4))
        print(f"{kind:16} {seconds:8.3f} {used:10.3f} {used / plain:9.2f} {more:8.0f} {size / 1e6:11.0f}")


if __name__ == "__main__":
    main()
