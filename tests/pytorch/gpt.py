# SPDX-License-Identifier: Apache-2.0
"""A GPT by hand with Megatron's names: packed interleaved q|k|v, biases, LayerNorm, learned positions, tied embedding.

Tensor, sequence and data parallel, right or with one bug.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from llama import token_losses
from ranks import copy_to, gather_sequence, reduce_from, scatter_sum

MODEL = "Gpt"
CONFIG = dict(vocab=160, hidden=64, heads=4, ffn=256, layers=2, positions=32, eps=1e-5, tied=True)


def config(**changes):
    c = SimpleNamespace(**{**CONFIG, **changes, "tied": True})
    c.dim = c.hidden // c.heads
    return c


class Column(nn.Module):
    def __init__(self, r, inputs, outputs):
        super().__init__()
        self.r = r
        self.weight, self.bias = nn.Parameter(torch.empty(outputs // r.tp, inputs)), nn.Parameter(torch.empty(outputs // r.tp))

    def forward(self, x):
        x = copy_to(x, self.r, not self.r.has("dx_not_reduced"))
        y = F.linear(x, self.weight, self.bias)
        return y + self.bias if self.r.has("bias_added_twice") else y


class Row(nn.Module):
    def __init__(self, r, inputs, outputs, at):
        super().__init__()
        self.r, self.at = r, at
        self.weight, self.bias = nn.Parameter(torch.empty(outputs, inputs // r.tp)), nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        r = self.r
        y = F.linear(x, self.weight)
        if r.has("row_bias_on_every_rank"):
            y = y + self.bias
        if r.has("row_bias_divided"):
            y = y + self.bias / r.tp
        if r.has("row_bias_left_out"):
            return reduce_from(y, r)
        if r.sp:
            y = scatter_sum(y, r)
        else:
            y = reduce_from(y, r, not (r.has("row_output_not_reduced") and "linear_proj" in self.at))
        return y if r.has("row_bias_on_every_rank", "row_bias_divided") else y + self.bias


class Attention(nn.Module):
    def __init__(self, c, r, at):
        super().__init__()
        self.c, self.r = c, r
        self.linear_qkv = Column(r, c.hidden, 3 * c.hidden)
        self.linear_proj = Row(r, c.hidden, c.hidden, at + ".linear_proj")

    def forward(self, x):
        c, r = self.c, self.r
        b, s, _ = x.shape
        heads = c.heads // r.tp
        y = self.linear_qkv(x)
        if r.has("qkv_not_interleaved"):
            q, k, v = (t.view(b, s, heads, c.dim).transpose(1, 2) for t in y.chunk(3, -1))
        else:
            q, k, v = (t.squeeze(3).transpose(1, 2) for t in y.view(b, s, heads, 3, c.dim).split(1, 3))
        if r.has("q_and_k_exchanged"):
            q, k = k, q
        scale = 1 / math.sqrt(c.dim * (r.tp if r.has("softmax_scale_local") else 1))
        score = q @ k.transpose(-1, -2) * scale
        score = score.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(1 if r.has("mask_off_by_one") else 0), float("-inf"))
        p = score.softmax(-1)
        return self.linear_proj((p @ v).transpose(1, 2).reshape(b, s, -1))


class Mlp(nn.Module):
    def __init__(self, c, r, at):
        super().__init__()
        self.r = r
        self.linear_fc1 = Column(r, c.hidden, c.ffn)
        self.linear_fc2 = Row(r, c.ffn, c.hidden, at + ".linear_fc2")

    def forward(self, x):
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="none" if self.r.has("gelu_exact") else "tanh"))


class Norm(nn.LayerNorm):
    def __init__(self, c, r):
        super().__init__(c.hidden, eps=1e-2 if r.has("norm_eps") else c.eps)


class Layer(nn.Module):
    def __init__(self, c, r, at):
        super().__init__()
        self.r = r
        self.input_layernorm = Norm(c, r)
        self.self_attention = Attention(c, r, at + ".self_attention")
        self.pre_mlp_layernorm = Norm(c, r)
        self.mlp = Mlp(c, r, at + ".mlp")

    def forward(self, x):
        r = self.r
        def whole(t):
            return gather_sequence(t, r, False) if r.sp else t
        if r.has("norm_after"):
            x = self.input_layernorm(x + self.self_attention(whole(x)))
        else:
            x = x + self.self_attention(whole(self.input_layernorm(x)))
        y = x if r.has("norm_skipped") else self.pre_mlp_layernorm(x)
        return x + self.mlp(whole(y))


class Vocabulary(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.r, self.rows = r, c.vocab // r.tp
        self.weight = nn.Parameter(torch.empty(self.rows, c.hidden))

    def forward(self, ids):
        r = self.r
        local = ids - r.tp_rank * self.rows
        own = (local >= 0) & (local < self.rows)
        table = self.weight.detach() if r.has("tied_use_in_embedding_lost") else self.weight
        y = F.embedding(local.clamp(0, self.rows - 1), table)
        if not r.has("embedding_mask_missing"):
            y = y * own[..., None]
        return scatter_sum(y, r) if r.sp else reduce_from(y, r)


class Positions(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.positions, c.hidden))

    def forward(self, positions):
        return F.embedding(positions, self.weight)


class Embeddings(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.r = r
        self.word_embeddings = Vocabulary(c, r)
        self.position_embeddings = Positions(c, r)

    def forward(self, ids):
        r = self.r
        x = self.word_embeddings(ids)
        s = ids.shape[1]
        positions = torch.arange(s)
        if r.sp:
            positions = torch.arange(s // r.tp) if r.has("positions_local") else r.part(positions, 0)
        if r.has("positions_left_out"):
            return x
        if r.has("positions_reversed"):
            positions = positions.flip(0)
        return x + self.position_embeddings(positions)


class Decoder(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.layers = nn.ModuleList(Layer(c, r, f"decoder.layers.{i}") for i in range(c.layers))
        self.final_layernorm = Norm(c, r)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class Gpt(nn.Module):
    def __init__(self, c, r, weights):
        super().__init__()
        self.c, self.r = c, r
        self.embedding = Embeddings(c, r)
        self.decoder = Decoder(c, r)
        if weights is not None:
            self.load(weights)

    def load(self, weights):
        r = self.r
        with torch.no_grad():
            for name, p in self.named_parameters():
                full, dim = weights[name], split_of(name)
                if dim is None or r.tp == 1:
                    p.copy_(full)
                elif r.has("qkv_cut_straight") and "linear_qkv" in name:
                    # As if q, k and v stood one after the other; each rank takes its third of every block.
                    p.copy_(torch.cat([t.chunk(r.tp)[r.tp_rank] for t in full.chunk(3)]))
                else:
                    p.copy_(full.chunk(r.tp, dim)[r.tp_rank])
                if r.has("replica_differs") and r.rank == 1 and name.endswith("position_embeddings.weight"):
                    p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(9)) * 0.02)

    def forward(self, ids, labels, targets):
        r = self.r
        x = self.decoder(self.embedding(ids))
        x = gather_sequence(x, r, False) if r.sp else x
        table = self.embedding.word_embeddings.weight
        if r.has("tied_use_in_head_lost"):
            table = table.detach()
        logits = F.linear(copy_to(x, r, not r.has("dx_of_head_not_reduced")), table)
        return SimpleNamespace(loss=token_losses(logits[:, :-1], labels[:, 1:], r).sum() / targets, logits=logits)


def split_of(name):
    if "linear_qkv" in name or "linear_fc1" in name or "word_embeddings" in name:
        return 0
    return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None


def placements(r):
    shard = {}
    for name in ("linear_qkv", "linear_fc1"):
        shard.update({f"*.{name}.weight:*": {"tp": 0}, f"*.{name}.bias:*": {"tp": 0}, f"*.{name}:fwd": {"dp": 0, "tp": -1}})
    for name in ("linear_proj", "linear_fc2"):
        shard.update({f"*.{name}.weight:*": {"tp": 1}, f"*.{name}:bwd": {"dp": 0, "tp": -1}})
    shard["*.word_embeddings.weight:*"] = {"tp": 0}
    # Positions are the same for every sample, so that this module's output has no sample to split.
    shard["*.position_embeddings:fwd"] = {"dp": None, "tp": 0} if r.sp else {"dp": None}
    if r.sp:
        for name in ("embedding", "*.word_embeddings", "*layernorm", "*.linear_proj", "*.linear_fc2", "*.self_attention",
                     "*.mlp", "decoder", "decoder.layers.?"):
            shard[f"{name}:fwd"] = {"dp": 0, "tp": 1}
        for name in ("*layernorm", "decoder", "decoder.layers.?"):
            shard[f"{name}:bwd"] = {"dp": 0, "tp": 1}
    shard = {glob: {d: n for d, n in dims.items() if n is None or getattr(r, d) > 1} for glob, dims in shard.items()}
    return dict(shard=shard, partial={"loss:fwd": "dp"})
