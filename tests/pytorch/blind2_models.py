# SPDX-License-Identifier: Apache-2.0
"""Decoders of another shape than those of strangers.py: heads do not add up to the width, and there are three blocks.

Harbor: biases everywhere, a norm over all heads of queries and keys, part of each head is rotated by halves, two windows
and one block without, gate and up in one layer, the head is the embedding; split by hand over heads and vocabulary (tp),
tokens between the layers as well (sp), tokens everywhere (cp: a gather, a ring or Ulysses' exchange) and blocks (pp).
Skiff: the same with one head of keys and values, which all ranks hold. Anchor: the same with LoRA.
Quarry: learned positions, one packed projection, norms of the branches, sinks and capped scores in attention, squared ReLU.
"""

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranks import Through
from strangers import Grid

BATCH, SEQ = 6, 20
D = SimpleNamespace(vocab=88, hidden=40, heads=8, kv_heads=4, dim=6, turned=4, ffn=72, layers=3, positions=24, window=7, rank=4)


class Grid2(Grid):
    """With Ulysses' exchange, and stages of a pipeline: pp of them, which have no other dimension beside them."""

    def __init__(self, rank=0, pp=1, ulysses=False, **options):
        super().__init__(0 if pp > 1 else rank, **options)
        self.pp, self.stage, self.ulysses = pp, rank if pp > 1 else 0, ulysses

    def to_heads(self, x):
        """From a rank's tokens of all heads [b, s/n, heads, dim] to all tokens of its heads."""
        return Through.apply(x, lambda t: self.own(self.gather(t, 1, "cp"), 2, "cp"),
                             lambda g: self.own(self.gather(g, 2, "cp"), 1, "cp"))

    def to_tokens(self, x):
        return Through.apply(x, lambda t: self.own(self.gather(t, 2, "cp"), 1, "cp"),
                             lambda g: self.own(self.gather(g, 1, "cp"), 2, "cp"))

    def sum_both_ways(self, x):
        """The sum over tp of what each rank has a share of, and of its gradient too."""
        return Through.apply(x, lambda t: self.sum(t, "tp"), lambda g: self.sum(g, "tp"))


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.eps, self.gain = 1e-6, nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.gain


class WideNorm(Norm):
    """Over the features of all heads, of which this rank has a part."""

    def __init__(self, grid, width, parts):
        super().__init__(width // parts)
        self.width, self.add = width, grid.sum_both_ways if parts > 1 else lambda t: t

    def forward(self, x):
        y = x.float()
        root = torch.rsqrt(self.add(y.square().sum(-1, keepdim=True)) / self.width + self.eps)
        return (y * root).to(x.dtype) * self.gain


class Row(nn.Module):
    """A row-parallel layer, whose bias is added once, after the sum."""

    def __init__(self, grid, width, out):
        super().__init__()
        self.grid, self.weight = grid, nn.Parameter(torch.empty(out, width // grid.sizes["tp"]))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return self.grid.leave(F.linear(x, self.weight)) + self.bias


class Lora(nn.Module):
    """A layer and its low-rank adapter."""

    def __init__(self, width, out):
        super().__init__()
        self.base, self.scale = nn.Linear(width, out), 8 / D.rank
        self.lora_A, self.lora_B = nn.Linear(width, D.rank, bias=False), nn.Linear(D.rank, out, bias=False)

    def forward(self, x):
        return self.base(x) + self.scale * self.lora_B(self.lora_A(x))


class HarborAttention(nn.Module):
    def __init__(self, grid, kv_heads, window, lora):
        super().__init__()
        self.grid, self.window, self.theta, n = grid, window, 500.0, grid.sizes["tp"]
        self.kv_parts = n if kv_heads >= n else 1
        width, kv = D.heads * D.dim, kv_heads * D.dim
        self.q_proj = Lora(D.hidden, width) if lora else nn.Linear(D.hidden, width // n)
        self.k_proj = nn.Linear(D.hidden, kv // self.kv_parts)
        self.v_proj = Lora(D.hidden, kv) if lora else nn.Linear(D.hidden, kv // self.kv_parts)
        self.q_norm, self.k_norm = WideNorm(grid, width, n), WideNorm(grid, kv, self.kv_parts)
        self.o_proj = Row(grid, width, D.hidden)

    def angles(self, positions):
        return positions[..., None].float() * self.theta ** (-torch.arange(0, D.turned, 2) / D.turned)

    def turn(self, x, positions):
        """x [b, s, heads, dim]: the first features turn, halves are pairs."""
        angle = self.angles(positions)[:, :, None]
        cos, sin = angle.cos(), angle.sin()
        a, b, rest = x[..., :D.turned // 2], x[..., D.turned // 2:D.turned], x[..., D.turned:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest.to(cos.dtype)), -1).to(x.dtype)

    def allowed(self, here, there):
        """here, there: (places in the row, documents) of queries and of keys."""
        (i, d), (j, e) = here, there
        good = (j[:, None] <= i[:, :, None]) & (d[:, :, None] == e[:, None])
        return good & (j[:, None] > i[:, :, None] - self.window) if self.window else good

    def score(self, q, k, good):
        score = torch.einsum("bqhd,bkhd->bhqk", q, k).float() / math.sqrt(D.dim)
        return score.masked_fill(~good[:, None], float("-inf"))

    def for_heads(self, q, t):
        return t.repeat_interleave(q.shape[2] // t.shape[2], 2)

    def attend(self, q, k, v, here, there):
        p = self.score(q, self.for_heads(q, k), self.allowed(here, there)).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p.to(v.dtype), self.for_heads(q, v))

    def gathered(self, q, k, v, here):
        g = self.grid
        return self.attend(q, g.all_tokens(k), g.all_tokens(v), here, tuple(g.gather(t, 1, "cp") for t in here))

    def ulysses(self, q, k, v, here):
        g = self.grid
        everywhere = tuple(g.gather(t, 1, "cp") for t in here)
        return g.to_tokens(self.attend(*(g.to_heads(t) for t in (q, k, v)), everywhere, everywhere))

    def around(self, q, k, v, here):
        """Block after block, as they come round the ring; each has its outputs and the logarithm of its sums."""
        there, found = here, []
        for turn in range(self.grid.sizes["cp"]):
            if turn:
                k, v, there = self.grid.pass_on(k), self.grid.pass_on(v), tuple(self.grid.swap(t, 1) for t in there)
            score = self.score(q, self.for_heads(q, k), self.allowed(here, there)).clamp(min=-1e9)
            found.append((torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), self.for_heads(q, v).float()),
                          score.logsumexp(-1).transpose(1, 2)))
        return self.join(*zip(*found)).to(q.dtype)

    def join(self, outputs, sums):
        return (torch.stack(outputs) * torch.stack(sums).softmax(0)[..., None]).sum(0)

    def heads(self, x, positions):
        b, s, _ = x.shape
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (t.view(b, s, -1, D.dim) for t in (q, k, v))
        return self.turn(q, positions), self.turn(k, positions), v

    def forward(self, x, positions, here):
        g = self.grid
        q, k, v = self.heads(g.enter(x), positions)
        if g.sizes["cp"] == 1:
            y = self.attend(q, k, v, here, here)
        else:
            y = (self.around if g.ring else self.ulysses if g.ulysses else self.gathered)(q, k, v, here)
        return self.o_proj(y.flatten(2))


class HarborMlp(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.grid, self.gate_up_proj = grid, nn.Linear(D.hidden, 2 * D.ffn // grid.sizes["tp"])
        self.down_proj = Row(grid, D.ffn, D.hidden)

    def halves(self, y):
        return y.chunk(2, -1)

    def forward(self, x):
        gate, up = self.halves(self.gate_up_proj(self.grid.enter(x)))
        return self.down_proj(F.silu(gate) * up)


class HarborLayer(nn.Module):
    def __init__(self, grid, kv_heads, window, lora):
        super().__init__()
        self.attn_norm, self.attn = Norm(D.hidden), HarborAttention(grid, kv_heads, window, lora)
        self.mlp_norm, self.mlp = Norm(D.hidden), HarborMlp(grid)

    def forward(self, x, positions, here):
        x = x + self.attn(self.attn_norm(x), positions, here)
        return x + self.mlp(self.mlp_norm(x))


class Embed(nn.Module):
    """Rows of this rank's part of the ids, added over tp."""

    def __init__(self, grid):
        super().__init__()
        self.grid, self.weight = grid, nn.Parameter(torch.empty(D.vocab // grid.sizes["tp"], D.hidden))

    def forward(self, ids):
        n = len(self.weight)
        local = ids - self.grid.at["tp"] * n
        inside = (local >= 0) & (local < n)
        rows = F.embedding(local.clamp(0, n - 1), self.weight) * inside[..., None]
        return Through.apply(rows, lambda t: self.grid.sum(t, "tp"), lambda g: g)


class Head(nn.Module):
    def forward(self, x, weight):
        return F.linear(x, weight)


class Sent:
    """What a stage gives to the next: no output of the model."""

    def __init__(self, hidden):
        self.hidden = hidden


class Harbor(nn.Module):
    KV_HEADS, LORA = D.kv_heads, False

    def __init__(self, grid):
        super().__init__()
        self.grid, self.embed = grid, Embed(grid)
        self.layers = nn.ModuleList(HarborLayer(grid, self.KV_HEADS, self.window_of(i), self.LORA) for i in range(D.layers))
        self.out_norm, self.head = Norm(D.hidden), Head()

    @staticmethod
    def window_of(i):
        return None if i % 3 == 2 else D.window

    def stages(self):
        """The blocks that this rank has."""
        pp = getattr(self.grid, "pp", 1)
        return range(D.layers) if pp == 1 else (range(2), range(2, D.layers))[self.grid.stage]

    def keep_own_stage(self):
        for i in range(D.layers):
            if i not in self.stages():
                self.layers[i] = nn.Identity()
        if self.grid.stage == 0:
            self.out_norm = nn.Identity()

    def forward(self, x, positions, documents):
        """x: ids, or what the stage before gave."""
        g = self.grid
        here = (g.tokens(torch.arange(SEQ).expand(len(x), -1)), documents)
        if getattr(g, "stage", 0) == 0:
            x = g.scatter_tokens(self.embed(x))
        for i in self.stages():
            x = self.layers[i](x, positions, here)
        if getattr(g, "pp", 1) > 1 and g.stage == 0:
            return Sent(x)
        return g.gather_logits(self.head(g.enter(self.out_norm(x)), self.embed.weight))


class Skiff(Harbor):
    KV_HEADS = 1


class Anchor(Harbor):
    LORA = True


class QuarryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.cap, self.sinks = 3.0, nn.Parameter(torch.zeros(5))
        self.c_attn, self.c_proj = nn.Linear(D.hidden, 3 * D.hidden, bias=False), nn.Linear(D.hidden, D.hidden)

    def masked(self, score, allowed):
        return (self.cap * torch.tanh(score / self.cap)).masked_fill(~allowed[:, None], float("-inf"))

    def probabilities(self, score):
        """A sink takes its share of each softmax and has no value."""
        sinks = self.sinks[None, :, None, None].expand(*score.shape[:3], 1)
        return torch.cat((score, sinks), -1).softmax(-1)[..., :-1]

    def forward(self, x, allowed):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 5, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        p = self.probabilities(self.masked((q @ k.transpose(-1, -2)).float() / math.sqrt(8), allowed))
        return self.c_proj((p.to(v.dtype) @ v).transpose(1, 2).reshape(b, s, -1))


class QuarryFf(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_out = nn.Linear(D.hidden, D.ffn), nn.Linear(D.ffn, D.hidden)

    def forward(self, x):
        return self.c_out(F.relu(self.c_fc(x)).square())


class QuarryBlock(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.attn, self.norm1, self.ff, self.norm2 = QuarryAttention(), nn.LayerNorm(D.hidden), QuarryFf(), nn.LayerNorm(D.hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, allowed):
        x = x + self.drop(self.norm1(self.attn(x, allowed)))
        return x + self.norm2(self.ff(x))


class Quarry(nn.Module):
    def __init__(self, grid, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(D.vocab, D.hidden), nn.Embedding(D.positions, D.hidden)
        self.scale, self.logit_scale = math.sqrt(D.hidden) / 4, D.hidden ** -0.5
        self.layers = nn.ModuleList(QuarryBlock(dropout) for _ in range(D.layers))
        self.norm_f = nn.LayerNorm(D.hidden)

    def allowed(self, documents):
        s = documents.shape[1]
        return torch.ones(s, s, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None])

    def forward(self, ids, positions, documents):
        x = self.wte(ids) * self.scale + self.wpe(positions)
        allowed = self.allowed(documents)
        for layer in self.layers:
            x = layer(x, allowed)
        return F.linear(self.norm_f(x), self.wte.weight) * self.logit_scale


MODELS2 = {"harbor": Harbor, "skiff": Skiff, "anchor": Anchor, "quarry": Quarry}
SHAPE = dict(vocab_size=D.vocab, hidden_size=40, num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=5,
             intermediate_size=56, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0)
HUGGING_FACE2 = {
    "qwen3": ("Qwen3", dict(SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=12)),
    "cohere2": ("Cohere2", dict(SHAPE, head_dim=8, sliding_window=6, logit_scale=0.5,
                                layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "olmo2": ("Olmo2", dict(SHAPE)),
    "smollm3": ("SmolLM3", dict(SHAPE, num_attention_heads=4, num_key_value_heads=2, hidden_size=48,
                                no_rope_layers=[1, 1, 0], no_rope_layer_interval=3)),
}


def cut_of(name, model):
    """The dimension of a parameter that tp cuts, and whether it is gate and up."""
    if name == "embed.weight" or ".q_norm." in name or ".q_proj." in name:
        return 0
    if any(part in name for part in (".k_norm.", ".k_proj.", ".v_proj.")):
        return 0 if model == "harbor" else None
    if ".gate_up_proj." in name:
        return "halves"
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else None


def places(g, model):
    """`shard` and `partial` of the capture's spec for Harbor by hand."""
    if g.pp > 1:
        return {}  # a stage has its own tensors, and the table is a copy
    whole = {"dp": 0, "cp": {"dim": 1, "zigzag": True} if g.zigzag else 1}
    if g.sizes["tp"] == 1:
        return {"shard": {"input.*": whole, "*:fwd": whole, "*:bwd": whole}, "partial": {"loss:fwd": ["dp", "cp"]}}
    heads, packed = {"dp": 0, "tp": -1}, {"dp": 0, "tp": -1, "blocks": [1, 1]}
    own = "qkv" if model == "harbor" else "q"
    shard = {"embed.weight:*": {"tp": 0}, "*.gate_up_proj.weight:*": {"tp": 0, "blocks": [1, 1]},
             "*.gate_up_proj.bias:*": {"tp": 0, "blocks": [1, 1]}, "*.gate_up_proj:fwd": packed,
             f"*.[{own}]_proj.*:*": {"tp": 0}, f"*.[{own}]_proj:fwd": heads, f"*.[{own}]_norm.gain:*": {"tp": 0},
             f"*.[{own}]_norm:*wd": heads, "*.o_proj.weight:*": {"tp": 1}, "*.down_proj.weight:*": {"tp": 1},
             "*.o_proj:bwd": heads, "*.down_proj:bwd": heads, "head:fwd": heads}
    partial = {"*.[qkv]_proj:bwd": "tp", "*.k_norm:bwd": "tp", "*.gate_up_proj:bwd": "tp", "head:bwd": "tp", "loss:fwd": "dp"}
    if model == "harbor":
        del partial["*.k_norm:bwd"]
    if g.sp:
        for glob in ("*.attn_norm", "*.mlp_norm", "out_norm", "*.attn", "*.mlp", "layers.?"):
            shard[f"{glob}:*wd"] = {"dp": 0, "tp": 1}
        shard.update({"*.o_proj:fwd": {"dp": 0, "tp": 1}, "*.down_proj:fwd": {"dp": 0, "tp": 1}})
    return {"shard": shard, "partial": partial}


def of_own_part(name, model, g):
    """Whether a rank of tp has only a share of this parameter's gradient: of its tokens, or of its heads."""
    if model == "skiff" and any(part in name for part in (".k_norm.", ".k_proj.", ".v_proj.")):
        return True
    between = any(part in name for part in ("attn_norm", "mlp_norm", "out_norm", "o_proj.bias", "down_proj.bias"))
    return g.sp and between


def talk(t, there, send):
    """A blocking message to or from the other stage."""
    (dist.send if send else dist.recv)(t, there)
    return t
