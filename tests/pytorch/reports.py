# SPDX-License-Identifier: Apache-2.0
"""More kinds of programs, with mistakes that threads of training libraries tell of: an encoder whose texts have padding, a
translator with relative places and attention to another text, preferences, rewards, adapters on cut layers, a denoiser, tables
that are dealt out to ranks, and a decoder that accumulates. Each is run(rank, world, fault, path), as those of
other_kinds.py; other_kinds_cases.py lists faults."""

import torch
import torch.nn.functional as F
from torch import nn

import anyrank
from other_kinds import HEADS, INNER, WIDTH, WORDS, Recommender, draw, filled, own, wrapped
from ranks import Ranks, Through, copy_to, reduce_from


def heads_of(x, heads):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


# --- an encoder whose texts have padding ------------------------------------------------------------------------------

class Layer(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.causal, self.norm1, self.norm2 = causal, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def attend(self, x, real):
        q, k, v = (heads_of(m(x), HEADS) for m in (self.q, self.k, self.v))
        seen = real[:, None, None, :]
        if self.causal:
            seen = seen & torch.ones(x.shape[1], x.shape[1]).tril().bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x, real):
        x = x + self.attend(self.norm1(x), real)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.word, self.pos = fault, nn.Embedding(WORDS, WIDTH), nn.Embedding(24, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.pool, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids, real):
        x = self.word(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, torch.ones_like(real) if self.fault == "attention_without_padding_mask" else real)
        x, lengths = self.norm(x), real.sum(1)
        if self.fault == "mean_over_padding":
            x = x.mean(1)
        elif self.fault == "last_place_pooled":
            x = x[:, -1]
        else:
            x = (x * real[..., None]).sum(1) / lengths[:, None]
        return self.out(torch.tanh(self.pool(x)))


def encoder(rank, world, fault, path):
    model = filled(Encoder(fault))
    ddp, optimizer, g = wrapped(model, world), torch.optim.AdamW(model.parameters(), lr=1e-3), draw(5)
    smoothing = 0.0 if fault == "smoothing_left_out" else 0.1
    with anyrank.capture(ddp, path):
        for _ in range(2):
            ids, lengths = torch.randint(1, WORDS, (8, 20), generator=g), torch.randint(9, 19, (8,), generator=g)
            real, y = torch.arange(20) < lengths[:, None], torch.randint(0, 5, (8,), generator=g)
            ids, real, y = own(rank, world, ids * real, real, y)
            optimizer.zero_grad()
            F.cross_entropy(ddp(ids, real), y, label_smoothing=smoothing).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not (fault == "one_rank_skips_its_step" and rank == world - 1):
                optimizer.step()


# --- a translator, tensor parallel ------------------------------------------------------------------------------------

class Cross(nn.Module):
    """Attention over one's own text or another one, with T5's bias of relative places."""

    def __init__(self, r, causal, near):
        super().__init__()
        n = WIDTH // r.tp
        self.r, self.causal, self.own = r, causal, HEADS // r.tp
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=False) for _ in range(3))
        self.o, self.near = nn.Linear(n, WIDTH, bias=False), nn.Embedding(41, HEADS) if near else None

    def forward(self, x, other):
        x, other = copy_to(x, self.r), copy_to(other, self.r)
        q, k, v = heads_of(self.q(x), self.own), heads_of(self.k(other), self.own), heads_of(self.v(other), self.own)
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(other.shape[1])
        score = q @ k.transpose(-1, -2)
        if self.near:
            first = 0 if self.r.has("bias_of_first_heads") else self.r.tp_rank * self.own
            score = score + self.near(j - i + 20)[..., first:first + self.own].permute(2, 0, 1)
        if self.causal:
            score = score.masked_fill(j > i, float("-inf"))
        y = (score.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return reduce_from(self.o(y), self.r)


class Translator(nn.Module):
    def __init__(self, r):
        super().__init__()
        self.r, self.word = r, nn.Embedding(WORDS, WIDTH)
        self.encode, self.mid = Cross(r, False, True), nn.RMSNorm(WIDTH)
        self.decode, self.cross = Cross(r, True, True), Cross(r, False, False)
        self.norm1, self.norm2, self.norm3, self.norm = (nn.RMSNorm(WIDTH) for _ in range(4))

    def forward(self, source, target):
        x = self.word(source)
        x = x + self.encode(self.norm1(x), self.norm1(x))
        y = self.word(target)
        y = y + self.decode(self.norm2(y), self.norm2(y))
        h = self.norm3(y)
        y = y + self.cross(h, self.mid(x))
        y = self.norm(y)
        return F.linear(y if self.r.has("t5_scale_left_out") else y * WIDTH ** -0.5, self.word.weight)


def translator(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    whole, model = filled(Translator(Ranks())), Translator(r)
    for (name, p), full in zip(model.named_parameters(), whole.parameters()):
        dim = {"q": 0, "k": 0, "v": 0, "o": 1}.get(name.split(".")[-2])
        p.data = (full.data if dim is None else r.part(full.data, dim)).clone()
    split = {"*.[qkv].weight:*": {"tp": 0}, "*.[qkv]:fwd": {"tp": -1}, "*.o.weight:*": {"tp": 1}, "*.o:bwd": {"tp": -1}}
    spec = {"mesh": {"tp": world}, "shard": split, "partial": {"*.o:fwd": "tp", "*.[qkv]:bwd": "tp"}} if world > 1 else None
    optimizer, g = torch.optim.AdamW(model.parameters(), lr=1e-3), draw(5)
    with anyrank.capture(model, path, spec=spec):
        for _ in range(2):
            source, target = torch.randint(0, WORDS, (6, 14), generator=g), torch.randint(0, WORDS, (6, 11), generator=g)
            optimizer.zero_grad()
            F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten()).backward()
            for name, p in model.named_parameters():
                if ".near." in name:
                    p.grad = r.sum(p.grad)
            optimizer.step()


# --- a decoder --------------------------------------------------------------------------------------------------------

class Decoder(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.word, self.pos = nn.Embedding(WORDS, WIDTH), nn.Embedding(24, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer(causal=True) for _ in range(2)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.word.weight

    def forward(self, ids):
        x = self.word(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, torch.ones_like(ids).bool())
        return self.head(self.norm(x))


def decoder(rank, world, fault, path):
    """Two micro-batches a step; a scheduler; the gradient's norm is limited."""
    model = filled(Decoder())
    if fault == "head_untied_by_copy":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    ddp, micro, g = wrapped(model, world), 2, draw(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            ids = torch.randint(0, WORDS, (8, 17), generator=g)
            optimizer.zero_grad()
            for part in ids.chunk(micro):
                (part,) = own(rank, world, part)
                x, y = part[:, :-1], part[:, 1:]
                (F.cross_entropy(ddp(x).flatten(0, 1), y.flatten()) / micro).backward()
                if fault == "clipped_each_micro_batch":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            if fault == "noise_of_each_rank":
                for p in model.parameters():
                    p.grad += 1e-3 * torch.randn(p.shape, generator=draw(rank))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()


# --- preferences ------------------------------------------------------------------------------------------------------

def log_probabilities(model, ids, prompt, fault):
    logits, labels = model(ids)[:, :-1], ids[:, 1:]
    if fault == "log_probabilities_not_shifted":
        labels = ids[:, :-1]
    each = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    each = each * (torch.arange(labels.shape[1]) >= (0 if fault == "prompt_counted" else prompt - 1))
    return each.mean(1) if fault == "mean_for_sum" else each.sum(1)


def preferences(rank, world, fault, path):
    """DPO: two answers to each prompt, by a model and by the one that it began from."""
    model, before = filled(Decoder(tied=False)), filled(Decoder(tied=False), seed=2)
    ddp, g = wrapped(model, world), draw(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            chosen, rejected = torch.randint(0, WORDS, (2, 8, 16), generator=g)
            rejected[:, :6] = chosen[:, :6]
            chosen, rejected = own(rank, world, chosen, rejected)
            if fault == "answers_exchanged":
                chosen, rejected = rejected, chosen
            both = torch.stack([chosen, rejected], 1).flatten(0, 1)
            now = log_probabilities(ddp, both, 6, fault)
            with torch.no_grad():
                then = log_probabilities(before, both, 6, fault)
            better, worse = (now - then).view(-1, 2).t()
            optimizer.zero_grad()
            loss = -F.logsigmoid((1.0 if fault == "beta_left_out" else 0.1) * (better - worse)).mean()
            loss.backward()
            optimizer.step()


def rewards(rank, world, fault, path):
    """Policy gradients: advantages by the mean and deviation of all answers' rewards, a sum over tokens by their number."""
    model = filled(Decoder(tied=False))
    ddp, g = wrapped(model, world), draw(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            ids, lengths = torch.randint(0, WORDS, (8, 16), generator=g), torch.randint(8, 16, (8,), generator=g)
            reward, old = torch.randn(8, generator=g), -4.0 + torch.randn(8, 15, generator=g)
            mask = (torch.arange(15) < lengths[:, None]).float()
            advantage, count = (reward - reward.mean()) / (reward.std() + 1e-4), mask.sum() / world
            ids, mask, old, advantage, reward = own(rank, world, ids, mask, old, advantage, reward)
            if fault == "advantages_of_own_rank":
                advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
            if fault == "longest_for_own_length":
                count = torch.tensor(float(mask.numel()))
            now = ddp(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (now - old).exp()
            limited = ratio if fault == "ratio_not_limited" else ratio.clamp(0.8, 1.2)
            loss = -(torch.minimum(ratio * advantage[:, None], limited * advantage[:, None]) * mask).sum() / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# --- adapters on cut layers -------------------------------------------------------------------------------------------

class Adapted(nn.Module):
    """A row-parallel layer with an adapter: its first matrix is cut as the layer is, and what that makes is summed."""

    def __init__(self, r, rank=4):
        super().__init__()
        self.r, n = r, WIDTH // r.tp
        self.into = nn.Linear(20, n)
        self.base, self.a = nn.Linear(n, WIDTH, bias=False), nn.Linear(n, rank, bias=False)
        self.b = nn.Linear(rank, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 6)

    def forward(self, x):
        h = torch.tanh(self.into(copy_to(x, self.r)))
        low = self.a(h) if self.r.has("low_rank_not_summed") else reduce_from(self.a(h), self.r)
        scale = 2.0 / 4.0 if self.r.has("scale_by_rank_alone") else 8.0 / 4.0
        return self.out(reduce_from(self.base(h), self.r) + scale * self.b(low))


def adapters(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    whole, model = filled(Adapted(Ranks())), Adapted(r)
    dims = {"into.weight": 0, "into.bias": 0, "base.weight": 1, "a.weight": 1}
    for (name, p), full in zip(model.named_parameters(), whole.parameters()):
        p.data = (r.part(full.data, dims[name]) if name in dims else full.data).clone()
    model.base.weight.requires_grad_(fault == "base_not_frozen")
    spec = {"mesh": {"tp": world}, "shard": {**{f"{n}:*": {"tp": d} for n, d in dims.items()}, "into:fwd": {"tp": 1},
                                             "base:bwd": {"tp": 1}, "a:bwd": {"tp": 1}},
            "partial": {"base:fwd": "tp", "a:fwd": "tp", "into:bwd": "tp"}}
    optimizer, g = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), draw(3)
    with anyrank.capture(model, path, spec=spec if world > 1 else None):
        for _ in range(2):
            x, y = torch.randn(16, 20, generator=g), torch.randint(0, 6, (16,), generator=g)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


# --- a denoiser -------------------------------------------------------------------------------------------------------

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.time = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 16)
        self.norm, self.mid, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, t):
        angle = t[:, None] * torch.exp(-torch.arange(8) / 8 * 6.0)
        h = self.into(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        return self.out(F.silu(self.mid(F.silu(self.norm(h)))))


def denoiser(rank, world, fault, path):
    model = filled(Denoiser())
    ddp, optimizer, g = wrapped(model, world), torch.optim.AdamW(model.parameters(), lr=1e-3), draw(5)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            x, noise = torch.randn(2, 8, 3, 8, 8, generator=g)
            t = torch.randint(0, 1000, (8,), generator=g).float()
            x, noise, t = own(rank, world, x, noise, t)
            if fault == "noise_alike_on_ranks":
                noise = torch.randn(noise.shape, generator=draw(9))
            keep = (1 - t / 1000).view(-1, 1, 1, 1)
            noisy = keep.sqrt() * x + (1 - keep).sqrt() * noise
            wanted = keep.sqrt() * noise - (1 - keep).sqrt() * x if fault == "velocity_for_noise" else noise
            optimizer.zero_grad()
            F.mse_loss(ddp(noisy, t / 1000 if fault == "time_as_a_fraction" else t), wanted).backward()
            optimizer.step()


# --- tables that are dealt out to ranks -------------------------------------------------------------------------------

class Dealt(Recommender):
    """Table i of four is on rank i mod world, which looks up all samples' ids; what it found goes to the others."""

    def __init__(self, r):
        super().__init__()
        self.r, self.bags = r, nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum") for _ in range(4))
        self.top = nn.Linear(18, 1)

    def forward(self, dense, ids):
        x = F.relu(self.dense(dense))
        found = [bag(ids[:, i]) if i % self.r.tp == self.r.tp_rank else torch.zeros(len(ids), 8)
                 for i, bag in enumerate(self.bags)]
        found = [reduce_from(t, self.r) for t in found]
        if self.r.has("tables_by_rank"):  # what rank 0 has, then what rank 1 has
            found = [found[i] for i in (0, 2, 1, 3)]
        every = torch.stack([x, *found], 1)
        i, j = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([x, (every @ every.transpose(1, 2))[:, i, j]], 1))[:, 0]


def tables(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    model, g = filled(Dealt(r)), draw(5)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    spec = {"mesh": {"tp": world}} if world > 1 else None
    with anyrank.capture(model, path, spec=spec, values=["init", "fwd", "grad", "new"]):
        for _ in range(2):
            dense, ids = torch.randn(12, 5, generator=g), torch.randint(0, 30, (12, 4, 4), generator=g)
            y = torch.randint(0, 2, (12,), generator=g).float()
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(dense, ids), y).backward()
            for i, bag in enumerate(model.bags):
                bag.weight.grad = r.sum(bag.weight.grad if bag.weight.grad is not None else torch.zeros_like(bag.weight))
            optimizer.step()


# --- a sequence that is shared out ------------------------------------------------------------------------------------

class Shared(nn.Module):
    """Keys and values are gathered; each rank has its own queries."""

    def __init__(self, r):
        super().__init__()
        self.r, self.word = r, nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def gather(self, t):
        back = self.r.part if self.r.has("gathered_keeps_own_gradient") else lambda g, dim: self.r.part(self.r.sum(g), dim)
        return Through.apply(t, lambda x: self.r.gather(x, 1), lambda g: back(g, 1))

    def forward(self, ids):
        x, n = self.word(ids), ids.shape[1]
        k, v = (heads_of(self.gather(m(x)), HEADS) for m in (self.k, self.v))
        at = torch.arange(n)[:, None] + n * (0 if self.r.has("mask_of_first_part") else self.r.tp_rank)
        y = F.scaled_dot_product_attention(heads_of(self.q(x), HEADS), k, v, attn_mask=torch.arange(k.shape[2]) <= at)
        return self.head(self.norm(x + self.o(y.transpose(1, 2).flatten(2))))


def shared(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    model, g = filled(Shared(r)), draw(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cut = {"cp": 1}
    spec = {"mesh": {"cp": world}, "shard": {"input.*": cut, "*:fwd": cut, "*:bwd": cut}, "partial": {"loss:fwd": "cp"}}
    with anyrank.capture(model, path, spec=spec if world > 1 else None):
        for _ in range(2):
            text = torch.randint(0, WORDS, (4, 17), generator=g)
            ids, labels = r.part(text[:, :-1], 1), r.part(text[:, 1:], 1)
            if fault == "shifted_after_the_cut":
                labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
            targets = int(r.sum((labels != -100).sum()))
            optimizer.zero_grad()
            (F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / targets).backward()
            for p in model.parameters():
                p.grad = p.grad if fault == "gradients_not_summed" else r.sum(p.grad)
            optimizer.step()


PROGRAMS = {"encoder": encoder, "translator": translator, "decoder": decoder, "preferences": preferences, "rewards": rewards,
            "adapters": adapters, "denoiser": denoiser, "tables": tables, "shared": shared}
