# SPDX-License-Identifier: Apache-2.0
"""Three small decoders as other people write them, each with its own names and parts, and the grid that they run on.

Mosaic: ALiBi, one head of keys and values, attention and MLP side by side, LayerNorm, a head of its own.
Vesper: learned positions, packed projections, norms after the sums, dropout, the head is the embedding.
Rover: pairs of neighbours rotated, norms of queries and keys, GeGLU, a window in each second block, capped logits;
split by hand: over heads (tp), tokens between the layers as well (sp), and tokens everywhere (cp).
"""

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranks import Through

BATCH, SEQ = 4, 16
C = SimpleNamespace(vocab=64, hidden=32, heads=4, kv_heads=2, dim=8, ffn=48, layers=2, positions=32)


# --- the grid ---------------------------------------------------------------------------------------------------------

class Grid:
    """dp times cp times tp ranks, and what a rank exchanges with those beside it."""

    def __init__(self, rank=0, dp=1, cp=1, tp=1, sp=False, zigzag=False, ring=False):
        self.rank, self.sizes, self.sp, self.zigzag, self.ring = rank, dict(dp=dp, cp=cp, tp=tp), sp, zigzag, ring
        self.mesh, self.at = None, dict(dp=rank // (cp * tp), cp=rank // tp % cp, tp=rank % tp)
        if dist.is_initialized() and dist.get_world_size() == dp * cp * tp:
            from torch.distributed.device_mesh import init_device_mesh
            self.mesh = init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))

    def group(self, over):
        return self.mesh[over].get_group()

    def sum(self, t, over):
        if self.sizes[over] > 1:
            t = t.detach().clone().contiguous()
            dist.all_reduce(t, group=self.group(over))
        return t

    def gather(self, t, dim, over):
        if self.sizes[over] == 1:
            return t
        parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(self.sizes[over])]
        dist.all_gather(parts, t.detach().contiguous(), group=self.group(over))
        return torch.cat(parts, dim)

    def own(self, t, dim, over):
        return t.chunk(self.sizes[over], dim)[self.at[over]].contiguous()

    # Tensor parallelism: into and out of the layers that are split.

    def enter(self, x):
        if self.sp:
            return Through.apply(x, lambda t: self.gather(t, 1, "tp"), lambda g: self.own(self.sum(g, "tp"), 1, "tp"))
        return Through.apply(x, lambda t: t, lambda g: self.sum(g, "tp"))

    def leave(self, y):
        if self.sp:
            return Through.apply(y, lambda t: self.own(self.sum(t, "tp"), 1, "tp"), lambda g: self.gather(g, 1, "tp"))
        return Through.apply(y, lambda t: self.sum(t, "tp"), lambda g: g)

    def scatter_tokens(self, x):
        if not self.sp:
            return x
        return Through.apply(x, lambda t: self.own(t, 1, "tp"), lambda g: self.gather(g, 1, "tp"))

    def gather_logits(self, x):
        return Through.apply(x, lambda t: self.gather(t, -1, "tp"), lambda g: self.own(g, -1, "tp"))

    # Context parallelism: a rank has its part of the tokens, and needs the keys and values of all.

    def tokens(self, t, dim=1):
        """This rank's part of what has one entry a token."""
        n, i = self.sizes["cp"], self.at["cp"]
        if self.zigzag:
            pieces = t.chunk(2 * n, dim)
            return torch.cat([pieces[i], pieces[2 * n - 1 - i]], dim)
        return t.chunk(n, dim)[i]

    def all_tokens(self, x):
        return Through.apply(x, lambda t: self.gather(t, 1, "cp"), lambda g: self.own(self.sum(g, "cp"), 1, "cp"))

    def swap(self, t, step):
        n = self.sizes["cp"]
        ranks = dist.get_process_group_ranks(self.group("cp"))
        there, here = ranks[(self.at["cp"] + step) % n], ranks[(self.at["cp"] - step) % n]
        t, out = t.detach().contiguous(), torch.empty_like(t, memory_format=torch.contiguous_format)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, there), dist.P2POp(dist.irecv, out, here)]):
            work.wait()
        return out

    def pass_on(self, x):
        """To the next rank of the ring; its gradient comes back."""
        return Through.apply(x, lambda t: self.swap(t, 1), lambda g: self.swap(g, -1))


# --- Mosaic -----------------------------------------------------------------------------------------------------------

class MosaicAttention(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.grid, self.first_head = grid, 0
        self.wq, self.wkv = nn.Linear(C.hidden, C.hidden), nn.Linear(C.hidden, 2 * C.dim)
        self.wo = nn.Linear(C.hidden, C.hidden)

    def slopes(self, heads):
        first = heads * self.grid.at["tp"]
        return 2.0 ** (-8.0 * torch.arange(first + 1, first + heads + 1) / C.heads)

    def bias(self, heads, s):
        """What is added to the scores: a slope times the distance, and the causal mask."""
        distance = torch.arange(s)[:, None] - torch.arange(s)[None]
        return (-self.slopes(heads)[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))

    def for_own_heads(self, kv):
        """Each rank's heads use all of k and v, which are whole on every rank."""
        return Through.apply(kv, lambda t: t, lambda g: self.grid.sum(g, "tp"))

    def forward(self, x):
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, -1, C.dim).transpose(1, 2)
        k, v = self.for_own_heads(self.wkv(x)).chunk(2, -1)
        score = q @ k[:, None].transpose(-1, -2) / math.sqrt(C.dim)
        p = (score + self.bias(q.shape[1], s)).softmax(-1)
        return self.wo((p.to(v.dtype) @ v[:, None]).transpose(1, 2).reshape(b, s, -1))


class MosaicFf(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(C.hidden, C.ffn), nn.Linear(C.ffn, C.hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MosaicBlock(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.ln, self.attn, self.ff = nn.LayerNorm(C.hidden), MosaicAttention(grid), MosaicFf()

    def forward(self, x):
        y = self.ln(x)
        return x + self.attn(y) + self.ff(y)


class Mosaic(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.tok_emb, self.emb_ln = nn.Embedding(C.vocab, C.hidden), nn.LayerNorm(C.hidden)
        self.blocks = nn.ModuleList(MosaicBlock(grid) for _ in range(C.layers))
        self.ln_f, self.unembed = nn.LayerNorm(C.hidden), nn.Linear(C.hidden, C.vocab, bias=False)

    def forward(self, ids, positions=None, documents=None):
        x = self.emb_ln(self.tok_emb(ids))
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln_f(x))


# --- Vesper -----------------------------------------------------------------------------------------------------------

class VesperAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(C.hidden, 3 * C.hidden), nn.Linear(C.hidden, C.hidden)

    def probabilities(self, score, allowed):
        return score.masked_fill(~allowed, float("-inf")).softmax(-1)

    def forward(self, x, allowed):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, C.heads, C.dim).transpose(1, 2) for t in self.in_proj(x).chunk(3, -1))
        p = self.probabilities(q @ k.transpose(-1, -2) / math.sqrt(C.dim), allowed)
        return self.out_proj((p.to(v.dtype) @ v).transpose(1, 2).reshape(b, s, -1))


class VesperFf(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(C.hidden, C.ffn), nn.Linear(C.ffn, C.hidden)

    def forward(self, x):
        return self.lin2(F.relu(self.lin1(x)))


class VesperLayer(nn.Module):
    """Norms after the sums; the stream counts `alpha` times."""

    def __init__(self, dropout, alpha=1.4):
        super().__init__()
        self.alpha = alpha
        self.attn, self.norm1, self.ff, self.norm2 = VesperAttention(), nn.LayerNorm(C.hidden), VesperFf(), nn.LayerNorm(C.hidden)
        self.drop = nn.Dropout(dropout)

    def join(self, norm, x, y):
        return norm(self.alpha * x + y)

    def forward(self, x, allowed):
        x = self.join(self.norm1, x, self.drop(self.attn(x, allowed)))
        return self.join(self.norm2, x, self.ff(x))


class Vesper(nn.Module):
    def __init__(self, grid, dropout=0.0):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(C.vocab, C.hidden), nn.Embedding(C.positions, C.hidden)
        self.layers = nn.ModuleList(VesperLayer(dropout) for _ in range(C.layers))
        self.head_bias = nn.Parameter(torch.zeros(C.vocab))

    def head(self):
        return self.tok_emb.weight

    def forward(self, ids, positions, documents):
        x = self.tok_emb(ids) * math.sqrt(C.hidden) + self.pos_emb(positions)
        s = ids.shape[1]
        allowed = torch.ones(s, s, dtype=torch.bool).tril() & (documents[:, None, :, None] == documents[:, None, None, :])
        for layer in self.layers:
            x = layer(x, allowed)
        return F.linear(x, self.head(), self.head_bias)


# --- Rover ------------------------------------------------------------------------------------------------------------

class Rms(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.eps, self.gain = 1e-5, nn.Parameter(torch.ones(width))

    def root(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        y = x.float()
        return (y * self.root(y)).to(x.dtype) * self.gain


class RoverAttention(nn.Module):
    def __init__(self, grid, window):
        super().__init__()
        self.grid, self.window, self.theta, n = grid, window, 1000.0, grid.sizes["tp"]
        self.wq, self.wo = nn.Linear(C.hidden, C.hidden // n, bias=False), nn.Linear(C.hidden // n, C.hidden, bias=False)
        self.wk, self.wv = (nn.Linear(C.hidden, C.kv_heads * C.dim // n, bias=False) for _ in "kv")
        self.q_norm, self.k_norm = Rms(C.dim), Rms(C.dim)

    def table(self, positions):
        angle = positions[..., None].float() * self.theta ** (-torch.arange(0, C.dim, 2) / C.dim)
        return angle.cos(), angle.sin()

    def turn(self, x, positions):
        """x [b, s, heads, dim]: neighbours are pairs."""
        cos, sin = (t[:, :, None] for t in self.table(positions))
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def query_and_key(self, q, k, positions):
        return self.turn(self.q_norm(q), positions), self.turn(self.k_norm(k), positions)

    def allowed(self, here, there):
        """here, there: (places in the row, documents) of queries and of keys."""
        (i, d), (j, e) = here, there
        good = (j[:, None] <= i[:, :, None]) & (d[:, :, None] == e[:, None])
        return good & (j[:, None] > i[:, :, None] - self.window) if self.window else good

    def score(self, q, k, good):
        score = torch.einsum("bqhd,bkhd->bhqk", q, k).float() / math.sqrt(C.dim)
        return score.masked_fill(~good[:, None], float("-inf"))

    def attend(self, q, k, v, here):
        """All keys and values at once."""
        g = self.grid
        if g.sizes["cp"] > 1:
            k, v, there = g.all_tokens(k), g.all_tokens(v), tuple(g.gather(t, 1, "cp") for t in here)
        else:
            there = here
        p = self.softmax(self.score(q, k, self.allowed(here, there)))
        return torch.einsum("bhqk,bkhd->bqhd", p.to(v.dtype), v)

    def softmax(self, score):
        return score.softmax(-1)

    def attend_around(self, q, k, v, here):
        """Block after block, as they come round the ring."""
        there, found = here, []
        for turn in range(self.grid.sizes["cp"]):
            if turn:
                k, v, there = self.grid.pass_on(k), self.grid.pass_on(v), tuple(self.grid.swap(t, 1) for t in there)
            score = self.score(q, k, self.allowed(here, there)).clamp(min=-1e9)
            found.append((torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), v), score.logsumexp(-1).transpose(1, 2)))
        return self.join(*zip(*found))

    def join(self, outputs, sums):
        share = torch.stack(sums).softmax(0)
        return (torch.stack(outputs) * share[..., None]).sum(0)

    def forward(self, x, positions, here):
        x = self.grid.enter(x)
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, C.dim) for w in (self.wq, self.wk, self.wv))
        q, k = self.query_and_key(q, k, positions)
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        y = (self.attend_around if self.grid.ring else self.attend)(q, k, v, here)
        return self.grid.leave(self.wo(y.reshape(b, s, -1)))


class RoverFf(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.grid, n = grid, grid.sizes["tp"]
        self.w1, self.w3 = (nn.Linear(C.hidden, C.ffn // n, bias=False) for _ in "13")
        self.w2 = nn.Linear(C.ffn // n, C.hidden, bias=False)

    def forward(self, x):
        x = self.grid.enter(x)
        return self.grid.leave(self.w2(F.gelu(self.w1(x)) * self.w3(x)))


class RoverBlock(nn.Module):
    def __init__(self, grid, window):
        super().__init__()
        self.scale = 0.6
        self.attn_norm, self.attn, self.ff_norm, self.ff = Rms(C.hidden), RoverAttention(grid, window), Rms(C.hidden), RoverFf(grid)

    def forward(self, x, positions, here):
        x = x + self.scale * self.attn(self.attn_norm(x), positions, here)
        return x + self.scale * self.ff(self.ff_norm(x))


class Rover(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.grid, self.cap = grid, 6.0
        self.tok_emb = nn.Embedding(C.vocab, C.hidden)
        self.blocks = nn.ModuleList(RoverBlock(grid, 6 if i % 2 else None) for i in range(C.layers))
        self.out_norm, self.unembed = Rms(C.hidden), nn.Linear(C.hidden, C.vocab // grid.sizes["tp"], bias=False)

    def capped(self, logits):
        return self.cap * torch.tanh(logits / self.cap)

    def forward(self, ids, positions, documents):
        """positions: those within documents; the mask goes by the places in the row."""
        g = self.grid
        here = (g.tokens(torch.arange(SEQ).expand(len(ids), -1)), documents)
        x = g.scatter_tokens(self.tok_emb(ids))
        for block in self.blocks:
            x = block(x, positions, here)
        return self.capped(g.gather_logits(self.unembed(g.enter(self.out_norm(x)))))


MODELS = {"mosaic": Mosaic, "vesper": Vesper, "rover": Rover}


def split_of(name):
    """The dimension that Rover's tensor parallelism by hand cuts."""
    part = name.split(".")[-2] if "." in name else name
    return 0 if part in ("wq", "wk", "wv", "w1", "w3", "unembed") else 1 if part in ("wo", "w2") else None


def placements(g):
    """`shard` and `partial` of the capture's spec for Rover by hand."""
    whole = {"dp": 0, "cp": {"dim": 1, "zigzag": True} if g.zigzag else 1}
    if g.sizes["tp"] == 1:
        shard = {"input.*": whole, "*:fwd": whole, "*:bwd": whole} if g.sizes["cp"] > 1 else {}
        return {"shard": shard, "partial": {"loss:fwd": ["dp", "cp"]}}
    shard = {"*.w[qkv13].weight:*": {"tp": 0}, "unembed.weight:*": {"tp": 0}, "*.w[o2].weight:*": {"tp": 1},
             "*.w[qkv13]:fwd": {"dp": 0, "tp": -1}, "unembed:fwd": {"dp": 0, "tp": -1}, "*.w[o2]:bwd": {"dp": 0, "tp": -1},
             "*.[qk]_norm:*wd": {"dp": 0, "tp": 2}}
    partial = {"*.w[qkv13]:bwd": "tp", "unembed:bwd": "tp", "*.w[o2]:fwd": "tp", "loss:fwd": "dp"}
    if g.sp:
        shard.update({f"{glob}:*wd": {"dp": 0, "tp": 1} for glob in ("*_norm", "*.attn", "*.ff", "blocks.?")})
    return {"shard": shard, "partial": partial}
