# SPDX-License-Identifier: Apache-2.0
"""Programs as users of DDP, FSDP2, pipelines, context parallelism, adapters and experts write them, each with the
mistakes that threads of training libraries report: a decoder fine-tuned on rows of several lengths in micro-batches, two
stages with a tied table, positions dealt in zigzag with rotary angles, adapters, fully sharded weights, a distilled
student, a diffusion transformer, and experts dealt out to ranks. Each is run(rank, world, fault, path), as those of
other_kinds.py; more_kinds_cases.py lists faults."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import anyrank
from other_kinds import HEADS, INNER, WIDTH, WORDS, draw, filled, own, wrapped
from ranks import Ranks, Through, copy_to, reduce_from
from reports import heads_of


def rotate(x, at):
    """Rotary positions `at` of queries or keys [b, h, s, d]."""
    half = x.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), nn.Dropout(dropout)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*n, bias=False) for n in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)))

    def attend(self, x):
        at = torch.arange(x.shape[1])
        q, k, v = (heads_of(m(x), HEADS) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, at), rotate(k, at), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.drop(self.attend(self.norm1(x)))
        h = self.norm2(x)
        return x + self.drop(self.down(F.silu(self.gate(h)) * self.up(h)))


class Causal(nn.Module):
    def __init__(self, dropout=0.0, layers=2):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- fine-tuning on rows of several lengths ---------------------------------------------------------------------------

def finetune(rank, world, fault, path):
    """Two micro-batches a step, of which DDP reduces after the last; each target counts alike; warm-up; a clipped norm."""
    model, micro = filled(Causal(0.2)).eval(), 2
    if fault == "dropout_on_one_rank" and rank == world - 1:
        model.train()
    ddp, g = wrapped(model, world), draw(5)
    torch.manual_seed(rank)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
              for matrix in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            ids, lengths = torch.randint(3, WORDS, (8, 17), generator=g), torch.randint(6, 18, (8,), generator=g)
            if fault == "sampler_of_own_seed":
                order = torch.randperm(8, generator=draw(40 + rank))
                ids, lengths = ids[order], lengths[order]
            real = torch.arange(17) < lengths[:, None]
            labels = (ids if fault == "padding_predicted" else ids.where(real, -100))[:, 1:]
            labels = labels.masked_fill(torch.arange(16) < 2, -100)
            targets, scale = int((labels != -100).sum()), 1024.0 if fault == "loss_scale_left_in" else 1.0
            optimizer.zero_grad()
            for i, part in enumerate(zip(ids.chunk(micro), labels.chunk(micro))):
                x, y = own(rank, world, *part)
                held = world > 1 and (i < micro - 1 or fault == "never_synced")
                with ddp.no_sync() if held else contextlib.nullcontext():
                    each = F.cross_entropy(ddp(x[:, :-1]).flatten(0, 1), y.flatten(), reduction="sum")
                    n = targets / world
                    if fault == "means_of_micro_batches":
                        n = int((part[1] != -100).sum()) * micro / world
                    if fault == "means_of_ranks_and_micro_batches":
                        n = int((y != -100).sum()) * micro
                    if fault == "accumulation_not_divided":
                        n = targets / world / micro
                    (each * scale / n).backward()
                if fault == "schedule_each_micro_batch":
                    schedule.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if fault != "schedule_each_micro_batch":
                schedule.step()


# --- two stages with a tied table -------------------------------------------------------------------------------------

def tied_stages(rank, world, fault, path):
    micro, whole, model = 4, filled(Causal()), nn.Module()
    whole.head.weight = whole.embed.weight
    first, last = rank == 0, rank == world - 1
    if first:
        model.embed = whole.embed
    model.blocks = nn.ModuleDict({str(i): b for i, b in enumerate(whole.blocks) if world == 1 or i == rank})
    if last:
        model.norm, model.head = whole.norm, whole.head

    def forward(x):
        x = model.embed(x) if first else x
        for block in model.blocks.values():
            x = block(x)
        return model.head(model.norm(x)) if last else x
    model.forward = forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = torch.randint(0, WORDS, (8, 13), generator=draw(7))
    n = 1 if fault == "loss_not_divided" else micro
    losses = [lambda y, t=t: F.cross_entropy(y.flatten(0, 1), t.flatten()) / n for t in ids[:, 1:].chunk(micro)]
    spec = {"mesh": {"pp": 2}, "tied": {"head.weight": "embed.weight"}} if world > 1 else None
    with anyrank.capture(model, path, spec=spec):
        if world == 1:
            for x, loss in zip(ids[:, :-1].chunk(micro), losses):
                loss(model(x)).backward()
        elif rank == 0:
            sent = [model(x) for x in ids[:, :-1].chunk(micro)]
            for y in sent:
                dist.send((y.bfloat16() if fault == "sent_in_bf16" else y).detach().float(), 1)
            for y in sent:
                back = torch.empty_like(y)
                dist.recv(back, 1)
                y.backward(back)
        else:
            received = [torch.empty(2, 12, WIDTH) for _ in range(micro)]
            for x in received:
                dist.recv(x, 0)
            for x, loss in zip(received, losses):
                loss(model(x.requires_grad_())).backward()
                dist.send(x.grad, 0)
        table = (model.embed if first else model.head).weight
        if world > 1 and fault != "tied_not_summed":
            dist.all_reduce(table.grad)
            if fault == "tied_averaged":
                table.grad /= world
        optimizer.step()


# --- positions in zigzag ----------------------------------------------------------------------------------------------

class Ring(nn.Module):
    """Keys and values are gathered; each rank has its own queries."""

    def __init__(self, r):
        super().__init__()
        self.r, self.norm = r, nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, places):
        n, h = x.shape[1], self.norm(x)
        at = torch.arange(n) + n * self.r.tp_rank if self.r.has("angles_contiguous") else places
        at = torch.arange(n) if self.r.has("angles_from_zero") else at
        q, k, v = (heads_of(m(h), HEADS) for m in (self.q, self.k, self.v))
        k, v = (Through.apply(t, lambda t: self.r.gather(t, 2), lambda g: self.r.part(self.r.sum(g), 2))
                for t in (rotate(k, at), v))
        every = torch.arange(n * self.r.tp) if self.r.has("keys_of_ranks_in_a_row") else zigzag_places(n * self.r.tp, self.r)
        y = F.scaled_dot_product_attention(rotate(q, at), k, v, attn_mask=every <= places[:, None])
        return x + self.o(y.transpose(1, 2).flatten(2))


class Zigzag(nn.Module):
    def __init__(self, r):
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Ring(r) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, places):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, places)
        return self.head(self.norm(x))


def zigzag_places(n, r, rank=None):
    """The places of a rank's tokens, or of all ranks' in a row."""
    piece = torch.arange(n).chunk(2 * r.tp)
    return torch.cat([torch.cat([piece[i], piece[2 * r.tp - 1 - i]]) for i in (range(r.tp) if rank is None else [rank])])


def zigzag(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    model, g = filled(Zigzag(r)), draw(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cut = {"cp": {"dim": 1, "zigzag": True}}
    spec = {"mesh": {"cp": world}, "shard": {"input.*": cut, "*:fwd": cut, "*:bwd": cut}, "partial": {"loss:fwd": "cp"}}
    with anyrank.capture(model, path, spec=spec if world > 1 else None):
        for _ in range(2):
            text = torch.randint(0, WORDS, (4, 17), generator=g)
            labels = text[:, 1:].masked_fill(torch.arange(16) < 5, -100)
            places = zigzag_places(16, r, rank) if world > 1 else torch.arange(16)
            ids, y = text[:, :-1][:, places], labels[:, places]
            if fault == "labels_of_contiguous_parts":
                y = r.part(labels, 1)
            n, own_n = int((labels != -100).sum()), int((y != -100).sum())
            optimizer.zero_grad()
            each = F.cross_entropy(model(ids, places).flatten(0, 1), y.flatten(), reduction="sum")
            (each / (own_n * world if fault == "mean_of_own_targets" else n)).backward()
            for p in model.parameters():
                p.grad = r.sum(p.grad) / (world if fault == "gradients_averaged" else 1)
            optimizer.step()


# --- adapters ---------------------------------------------------------------------------------------------------------

class Lora(nn.Module):
    def __init__(self, base, scale, dropout=0.0, rank=4):
        super().__init__()
        self.base, self.scale, self.dropout = base, scale, nn.Dropout(dropout)
        self.lora_A, self.lora_B = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        base.weight.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.scale * self.lora_B(self.lora_A(self.dropout(x)))


def lora(rank, world, fault, path):
    model = Causal()
    scale = 8 / 4 ** 0.5 if fault == "scale_by_root_of_rank" else 8 / 4
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.blocks:
        for name in ("q", "k" if fault == "adapter_on_k" else "v"):
            setattr(block, name, Lora(getattr(block, name), scale, 0.1))
    filled(model)
    if fault != "adapter_dropout_left_on":
        model.eval()
    torch.manual_seed(rank)
    ddp, g = wrapped(model, world), draw(5)
    if fault == "adapters_of_each_rank":
        filled(model.blocks[0].q.lora_A, seed=70 + rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            (ids,) = own(rank, world, torch.randint(0, WORDS, (8, 17), generator=g))
            optimizer.zero_grad()
            F.cross_entropy(ddp(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()


# --- fully sharded weights --------------------------------------------------------------------------------------------

def sharded(rank, world, fault, path):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    model, g, limit = filled(Causal()), draw(5), 0.1
    if world > 1:
        more = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)} if fault == "reduced_in_bf16" else {}
        if fault == "norms_ignored":
            more["ignored_params"] = {p for p in model.parameters() if p.dim() == 1}
        for block in model.blocks:
            fully_shard(block, **more)
        fully_shard(model, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with anyrank.capture(model, path):
        for _ in range(2):
            (ids,) = own(rank, world, torch.randint(0, WORDS, (8, 17), generator=g))
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            if fault == "norm_of_own_shards":
                local = [p.grad.to_local() for p in model.parameters()]
                norm = torch.stack([t.norm() for t in local]).norm()
                for t in local:
                    t.mul_(min(1.0, limit / float(norm)))
            else:
                for kind in {type(p) for p in model.parameters()}:
                    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if type(p) is kind], limit)
            optimizer.step()


# --- a distilled student ----------------------------------------------------------------------------------------------

def distil(rank, world, fault, path):
    model, teacher, t = filled(Causal()), filled(Causal(0.2), seed=2), 2.0
    teacher.train(fault == "teacher_drops_out")
    torch.manual_seed(rank)
    ddp, optimizer, g = wrapped(model, world), torch.optim.AdamW(model.parameters(), lr=1e-3), draw(5)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            (ids,) = own(rank, world, torch.randint(0, WORDS, (8, 17), generator=g))
            x, y = ids[:, :-1], ids[:, 1:].flatten()
            with torch.no_grad():
                wanted = (teacher(x).flatten(0, 1) / (1.0 if fault == "teacher_not_softened" else t)).log_softmax(-1)
            logits = ddp(x).flatten(0, 1)
            pair = (wanted, (logits / t).log_softmax(-1))
            if fault == "divergence_reversed":
                apart = F.kl_div(pair[0], pair[1], reduction="batchmean", log_target=True)
            else:
                apart = F.kl_div(pair[1], pair[0], reduction="mean" if fault == "mean_over_elements" else "batchmean",
                                 log_target=True)
            factor = 1.0 if fault == "square_of_temperature_left_out" else t * t
            optimizer.zero_grad()
            (0.5 * F.cross_entropy(logits, y) + 0.5 * factor * apart).backward()
            optimizer.step()


# --- a diffusion transformer ------------------------------------------------------------------------------------------

class Conditioned(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.norm = fault, nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulate, self.qkv, self.proj = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x, c):
        s1, b1, g1, s2, b2, g2 = self.modulate(F.silu(c))[:, None].chunk(6, -1)
        if self.fault == "shift_and_scale_exchanged":
            s1, b1, s2, b2 = b1, s1, b2, s2
        one = 0.0 if self.fault == "scale_without_one" else 1.0
        q, k, v = (heads_of(t, HEADS) for t in self.qkv(self.norm(x) * (one + s1) + b1).chunk(3, -1))
        y = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + (y if self.fault == "gate_left_out" else g1 * y)
        return x + g2 * self.fc2(F.gelu(self.fc1(self.norm(x) * (one + s2) + b2)))


class Diffusion(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.into, self.places, self.time = nn.Linear(12, WIDTH), nn.Parameter(torch.zeros(16, WIDTH)), nn.Linear(16, WIDTH)
        self.kind, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList(Conditioned(fault) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, x, t, kind):
        angle = t[:, None] * torch.exp(-torch.arange(8) / 8 * 6.0)
        c = self.time(torch.cat([angle.cos(), angle.sin()], 1)) + self.kind(kind)
        x = self.into(x) + self.places
        for block in self.blocks:
            x = block(x, c)
        return self.out(self.norm(x))


def diffusion(rank, world, fault, path):
    model = filled(Diffusion(fault))
    ddp, optimizer, g = wrapped(model, world), torch.optim.AdamW(model.parameters(), lr=1e-3), draw(5)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            x, noise = torch.randn(2, 8, 16, 12, generator=g)
            t, kind = torch.rand(8, generator=g), torch.randint(0, 11, (8,), generator=g)
            x, noise, t, kind = own(rank, world, x, noise, t, kind)
            if fault == "times_alike_on_ranks":
                t = torch.rand(len(t), generator=draw(9))
            if fault == "kinds_dropped":  # free guidance's null class, always
                kind = torch.full_like(kind, 10)
            mixed = (1 - t[:, None, None]) * x + t[:, None, None] * noise
            wanted = x - noise if fault == "flow_reversed" else noise - x
            optimizer.zero_grad()
            F.mse_loss(ddp(mixed, 1 - t if fault == "time_reversed" else t, kind), wanted).backward()
            optimizer.step()


# --- experts dealt out to ranks ---------------------------------------------------------------------------------------

class Mixture(nn.Module):
    """Four experts, of which each token goes to two; each rank has its own, all see all ranks' tokens."""

    def __init__(self, r):
        super().__init__()
        self.r, self.embed, self.norm = r, nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.router, self.head = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, WORDS, bias=False)
        self.mixer = Block()
        self.experts = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
                                      for i in range(4)})

    def forward(self, ids):
        x = self.mixer(self.embed(ids))
        h = self.norm(x)
        scores = self.router(h).softmax(-1)
        best, which = scores.topk(2, -1)
        if not self.r.has("weights_not_renormalised"):
            best = best / best.sum(-1, keepdim=True)
        share = torch.zeros_like(scores).scatter(-1, which, best)
        each = copy_to(h, self.r, not self.r.has("input_gradient_of_own_experts"))
        share = copy_to(share, self.r, not self.r.has("weights_gradient_of_own_experts"))
        mine = sum(share[..., int(i):int(i) + 1] * expert(each) for i, expert in self.experts.items())
        used = torch.zeros_like(scores).scatter(-1, which, 1.0).mean((0, 1))
        self.balance = 4 * (used * scores.mean((0, 1))).sum()
        return self.head(x + reduce_from(mine, self.r))


def mixture(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    model, g = filled(Mixture(r)), draw(5)
    for i in range(4):
        mine = i % world == rank if fault == "experts_dealt_in_turn" else i * world // 4 == rank
        if not mine:
            del model.experts[str(i)]
    if fault == "experts_dealt_in_turn":  # the program takes them for neighbours
        held = list(model.experts.values())
        model.experts = nn.ModuleDict({str(rank * 4 // world + i): e for i, e in enumerate(held)})
    optimizer, spec = torch.optim.AdamW(model.parameters(), lr=1e-3), {"mesh": {"ep": world}} if world > 1 else None
    with anyrank.capture(model, path, spec=spec, values=["init", "grad", "new", "fwd"] if fault != "outputs_left_out" else None):
        for _ in range(2):
            ids = torch.randint(0, WORDS, (8, 17), generator=g)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            (loss + 0.1 * (world if fault == "balance_times_ranks" else 1) * model.balance).backward()
            if fault == "shared_gradients_summed" and world > 1:
                for name, p in model.named_parameters():
                    if "experts" not in name:
                        p.grad = r.sum(p.grad)
            optimizer.step()


PROGRAMS = {"finetune": finetune, "tied_stages": tied_stages, "zigzag": zigzag, "lora": lora, "sharded": sharded,
            "distil": distil, "diffusion": diffusion, "mixture": mixture}
