# SPDX-License-Identifier: Apache-2.0
"""Programs of kinds that threads of 2024 to 2026 report mistakes of: a DDP loop whose micro-batches synchronise by a flag,
replicas of sharded weights, a pipeline of interleaved stages, attention to a text with padding, a vocabulary that the ranks
do not divide, and heads in groups with a window. Each is run(rank, world, fault, path), as those of other_kinds.py;
further_kinds_cases.py lists faults."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import anyrank
from more_kinds import Causal, rotate
from other_kinds import HEADS, WIDTH, WORDS, draw, filled, own, wrapped
from ranks import Ranks, Through, copy_to
from reports import heads_of


# --- micro-batches that synchronise by a flag -------------------------------------------------------------------------

def accumulating(rank, world, fault, path):
    model, micro = Causal(), 2
    model.head.weight = model.embed.weight
    ddp, g = wrapped(filled(model), world), draw(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            ids, prompts = torch.randint(0, WORDS, (8, 17), generator=g), torch.randint(0, 7, (8, 1), generator=g)
            labels = ids.where(torch.arange(17) >= prompts, -100)
            counted = labels if fault == "first_position_counted" else labels[:, 1:]
            n = int((counted != -100).sum()) / world
            optimizer.zero_grad()
            for i, part in enumerate(zip(ids.chunk(micro), labels.chunk(micro))):
                x, y = own(rank, world, *part)
                if fault != "flag_set_after_forward":
                    ddp.require_backward_grad_sync = i == micro - 1
                logits = ddp(x)
                ddp.require_backward_grad_sync = i == micro - 1
                (F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="sum") / n).backward()
                if fault == "doubled_by_each_micro_batch":
                    for p in model.parameters():
                        p.grad *= 2
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


# --- replicas of sharded weights --------------------------------------------------------------------------------------

def replicas(rank, world, fault, path):
    """Two replicas, each sharded over two ranks; the norm is of the shards of one replica."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model, g, limit = filled(Causal()), draw(5), 0.1
    if world > 1:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with anyrank.capture(model, path):
        for _ in range(2):
            (ids,) = own(rank, world, torch.randint(0, WORDS, (8, 17), generator=g))
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            local = [p.grad if world == 1 else p.grad.to_local() for p in model.parameters()]
            squares = torch.stack([t.square().sum() for t in local]).sum()
            if world > 1:
                dist.all_reduce(squares, group=None if fault == "norm_over_the_world" else mesh["dp_shard"].get_group())
            if fault != "replicas_not_clipped" or rank < world // 2:
                for t in local:
                    t.mul_(min(1.0, limit / float(squares.sqrt())))
            optimizer.step()


# --- a pipeline of interleaved stages ---------------------------------------------------------------------------------

def interleaved(rank, world, fault, path):
    """Each of two ranks has every second block, and the stream passes each rank twice."""
    whole, model = filled(Causal(layers=4)), nn.Module()
    first, last = rank == 0, rank == world - 1
    model.blocks = nn.ModuleDict({str(i): b for i, b in enumerate(whole.blocks) if i % world == rank})
    if fault == "blocks_in_a_row":
        model.blocks = nn.ModuleDict({str(2 * c + rank): whole.blocks[2 * rank + c] for c in range(2)})
    if first:
        model.embed = whole.embed
    if last:
        model.norm, model.head = whole.norm, whole.head

    def forward(x):
        made, came = [], []
        x = model.embed(x) if first else x
        for i in range(4):
            if i % world != rank:
                continue
            if world > 1 and i > 0:
                x = torch.empty(8, 16, WIDTH)
                dist.recv(x, 1 - rank)
                came.append(x.requires_grad_())
            x = model.blocks[str(i)](x)
            made.append(x)
            if world > 1 and i < 3:
                dist.send(x.detach(), 1 - rank)
        return (model.head(model.norm(x)) if last else x), made, came
    model.forward = forward
    optimizer, ids = torch.optim.SGD(model.parameters(), lr=0.05), torch.randint(0, WORDS, (8, 17), generator=draw(7))
    with anyrank.capture(model, path, spec={"mesh": {"pp": 2}} if world > 1 else None, values=["init", "fwd", "grad", "new"]):
        y, made, came = model(ids[:, :-1])
        if last:
            F.cross_entropy(y.flatten(0, 1), ids[:, 1:].flatten()).backward()
        for c in (1, 0) if world > 1 else ():
            if first or c == 0:
                back = torch.empty_like(made[c])
                dist.recv(back, 1 - rank)
                made[c].backward(back)
            if last or c == 1:
                grad = came[c if last else 0].grad
                dist.send(came[1].grad if fault == "gradient_of_other_stage" and last else grad, 1 - rank)
        optimizer.step()


# --- attention to a text with padding ---------------------------------------------------------------------------------

class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, other, seen):
        q, k, v = heads_of(self.q(x), HEADS), heads_of(self.k(other), HEADS), heads_of(self.v(other), HEADS)
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


class Summary(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.word, self.pos = fault, nn.Embedding(WORDS, WIDTH), nn.Embedding(24, WIDTH)
        self.encoder, self.decoder, self.cross = Attend(), Attend(), Attend()
        self.norm1, self.norm2, self.norm3, self.norm = (nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source, real, target):
        seen, n = real[:, None, None, :], target.shape[1]
        causal = torch.ones(n, n).tril().bool()
        x = self.word(source) + self.pos(torch.arange(source.shape[1]))
        x = self.norm1(x + self.encoder(x, x, seen))
        y = self.word(target) + self.pos(torch.arange(n))
        y = y + self.decoder(self.norm2(y), self.norm2(y), causal)
        if self.fault == "padding_seen_across":
            seen = torch.ones_like(seen)
        if self.fault == "causal_across":
            seen = seen & torch.ones(n, source.shape[1]).tril().bool()
        return self.head(self.norm(y + self.cross(self.norm3(y), x, seen)))


def summary(rank, world, fault, path):
    model = filled(Summary(fault))
    ddp, g = wrapped(model, world), draw(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            source, lengths = torch.randint(1, WORDS, (8, 18), generator=g), torch.randint(9, 17, (8,), generator=g)
            real, target = torch.arange(18) < lengths[:, None], torch.randint(1, WORDS, (8, 13), generator=g)
            source, real, target = own(rank, world, source * real, real, target)
            optimizer.zero_grad()
            F.cross_entropy(ddp(source, real, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten()).backward()
            optimizer.step()


# --- a vocabulary that the ranks do not divide ------------------------------------------------------------------------

class Uneven(nn.Module):
    """97 words on two ranks, 49 each with the padding, whose logits are no words'."""

    def __init__(self, r):
        super().__init__()
        self.r, own = r, -(-WORDS // r.tp)
        self.first, self.words = r.tp_rank * own, min(own, WORDS - r.tp_rank * own)
        self.word, self.mid, self.norm = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, self.words, bias=False)

    def forward(self, ids):
        x = self.word(ids)
        return self.head(copy_to(self.norm(x + torch.tanh(self.mid(x))), self.r))


def uneven(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    whole, model = filled(Uneven(Ranks())), Uneven(r)
    for (name, p), full in zip(model.named_parameters(), whole.parameters()):
        p.data = (r.part(full.data, 0) if name == "head.weight" else full.data).clone()
    spec = {"mesh": {"tp": world}, "shard": {"head.weight:*": {"tp": 0}, "head:fwd": {"tp": -1}, "output:fwd": {"tp": -1}},
            "partial": {"head:bwd": "tp"}}
    optimizer, g = torch.optim.AdamW(model.parameters(), lr=1e-3), draw(5)
    with anyrank.capture(model, path, spec=spec if world > 1 else None):
        for _ in range(2):
            ids = torch.randint(0, WORDS, (8, 13), generator=g)
            z, y = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            if fault == "padding_in_the_softmax" and model.words < 49:
                z = F.pad(z, (0, 1))
            mine = (y >= model.first) & (y < model.first + model.words)
            at = torch.where(mine, y - model.first, 0)
            if fault == "target_of_each_rank":
                mine, at = torch.ones_like(mine), y.clamp(model.first, model.first + model.words - 1) - model.first
            top = r.max(z.amax(-1))
            both = Through.apply(torch.stack([(z - top[:, None]).exp().sum(-1), z.gather(1, at[:, None])[:, 0] * mine]), r.sum,
                                 lambda t: t)
            optimizer.zero_grad()
            (both[0].log() + top - both[1]).mean().backward()
            optimizer.step()


# --- heads in groups with a window ------------------------------------------------------------------------------------

class Grouped(nn.Module):
    """Two groups of heads, each two of queries, one of keys and one of values in one weight."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.norm1, self.norm2 = fault, nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def attend(self, x):
        b, n, d = *x.shape[:2], WIDTH // HEADS
        at, window = torch.arange(n), 6 + (self.fault == "window_one_wider")
        if self.fault == "parts_in_a_row":
            q, k, v = (t.reshape(b, n, -1, d) for t in self.qkv(x).split([4 * d, 2 * d, 2 * d], -1))
        else:
            q, k, v = self.qkv(x).view(b, n, 2, 4, d).split([2, 1, 1], 3)
            q, k, v = (t.reshape(b, n, -1, d) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        seen = (at <= at[:, None]) & (at > at[:, None] - window)
        y = F.scaled_dot_product_attention(rotate(q, at), rotate(k, at), v, attn_mask=seen)
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Windowed(Causal):
    def __init__(self, fault):
        super().__init__()
        self.blocks = nn.ModuleList(Grouped(fault) for _ in range(2))


def windowed(rank, world, fault, path):
    model = filled(Windowed(fault))
    ddp, g = wrapped(model, world), draw(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            (ids,) = own(rank, world, torch.randint(0, WORDS, (8, 17), generator=g))
            optimizer.zero_grad()
            F.cross_entropy(ddp(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()


PROGRAMS = {"accumulating": accumulating, "replicas": replicas, "interleaved": interleaved, "summary": summary,
            "uneven": uneven, "windowed": windowed}
