# SPDX-License-Identifier: Apache-2.0
"""A Llama by hand: tensor, sequence and data parallel, right or with one bug. Names of modules are Hugging Face's.

`BUGS` lists what can be wrong with it; whatever else differs from a run on one rank is a bug of this file.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from ranks import copy_to, gather_sequence, reduce_from, scatter_sum

MODEL = "Llama"
CONFIG = dict(vocab=176, hidden=96, heads=6, kv_heads=2, ffn=160, layers=3, theta=10000.0, eps=1e-6, tied=False)


def config(**changes):
    c = SimpleNamespace(**{**CONFIG, **changes})
    c.dim = c.hidden // c.heads
    return c


class Norm(nn.Module):
    """RMSNorm; under sequence parallelism its weight sees the rank's own tokens alone."""

    def __init__(self, c, r, at):
        super().__init__()
        self.r, self.eps, self.at = r, c.eps, at
        self.weight = nn.Parameter(torch.ones(c.hidden))

    def forward(self, x):
        r, eps = self.r, self.eps
        if r.has("norm_eps") or (r.has("norm_eps_one_rank") and r.rank == 1):
            eps = 1e-2
        if r.has("norm_eps_one_layer") and self.at == "model.layers.1.post_attention_layernorm":
            eps = 1e-2
        if r.has("norm_mean_subtracted"):
            x = x - x.mean(-1, keepdim=True)
        if r.has("norm_over_local_features"):
            half = x.chunk(2, -1)[0]
            return x * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + eps) * self.weight
        w = self.weight + 1 if r.has("norm_weight_plus_one") else self.weight
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w
        return y.bfloat16().float() if r.has("norm_output_bf16") else y


class Linear(nn.Module):
    """y = x·Wᵀ + b with a part of W; `kind` is column or row."""

    def __init__(self, c, r, at, inputs, outputs, kind, bias=False):
        super().__init__()
        self.r, self.at, self.kind = r, at, kind
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x, reduce=True):
        r = self.r
        if self.kind == "column":
            return F.linear(copy_to(x, r, reduce), self.weight, self.bias)
        y = F.linear(x, self.weight)
        if r.has("residual_on_every_rank"):
            return y
        leave = r.has("row_output_not_reduced") or (r.has("row_output_not_reduced_once") and ".1.mlp." in self.at)
        if r.has("row_output_averaged"):
            return reduce_from(y, r) / r.tp
        if r.has("row_output_reduced_twice") and ".0.self_attn" in self.at:
            return reduce_from(reduce_from(y, r), r)
        if r.has("row_bias_on_every_rank") and self.bias is not None:
            return reduce_from(y + self.bias, r)
        if self.r.sp:
            y = scatter_sum(y, r)
        else:
            y = reduce_from(y, r, not leave)
        return y if self.bias is None else y + self.bias


class Attention(nn.Module):
    def __init__(self, c, r, at):
        super().__init__()
        self.c, self.r, self.at = c, r, at
        heads, kv, d = c.heads // r.tp, max(c.kv_heads // r.tp, 1), c.dim
        self.heads, self.kv = heads, kv
        self.q_proj = Linear(c, r, at + ".q_proj", c.hidden, heads * d, "column", True)
        self.k_proj = Linear(c, r, at + ".k_proj", c.hidden, kv * d, "column", True)
        self.v_proj = Linear(c, r, at + ".v_proj", c.hidden, kv * d, "column", True)
        self.o_proj = Linear(c, r, at + ".o_proj", heads * d, c.hidden, "row")

    def rope(self, x, positions):
        """x [b, heads, s, d]"""
        c, r, d = self.c, self.r, self.c.dim
        theta = 500000.0 if r.has("rope_theta") else c.theta
        freq = theta ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
        if r.has("rope_scaled"):
            freq = freq / 4
        angle = positions.float()[:, None] * freq
        cos, sin = angle.cos(), angle.sin()
        if r.has("rope_interleaved"):
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        if r.has("rope_sign"):
            sin = -sin
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x):
        c, r = self.c, self.r
        b, s, _ = x.shape
        reduce = not (r.has("dx_not_reduced") or (r.has("dx_not_reduced_once") and ".2." in self.at))
        q = self.q_proj(x, reduce)
        k = self.k_proj(x, reduce and not r.has("dx_of_k_not_reduced"))
        v = self.v_proj(x, reduce)

        def split(t, n):
            if r.has("heads_split_feature_major"):
                return t.view(b, s, c.dim, n).permute(0, 3, 1, 2)
            return t.view(b, s, n, c.dim).transpose(1, 2)
        q, k, v = split(q, self.heads), split(k, self.kv), split(v, self.kv)
        positions = torch.arange(s)
        if r.has("positions_from_one"):
            positions = positions + 1
        if r.has("positions_restart"):
            positions = positions % (s // 2)
        q, k = self.rope(q, positions), k if r.has("rope_not_on_k") else self.rope(k, positions)
        repeats = self.heads // self.kv
        if r.has("kv_heads_tiled"):
            k, v = k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1)
        else:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scale = 1 / math.sqrt(c.dim)
        if r.has("softmax_scale_missing"):
            scale = 1.0
        if r.has("softmax_scale_of_hidden"):
            scale = 1 / math.sqrt(c.hidden)
        score = q @ k.transpose(-1, -2) * scale
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        if r.has("mask_off_by_one"):
            mask = torch.ones(s, s, dtype=torch.bool).tril(1)
        if r.has("mask_missing"):
            mask[:] = True
        if r.has("mask_window"):
            mask &= ~torch.ones(s, s, dtype=torch.bool).tril(-8)
        p = score.masked_fill(~mask, float("-inf")).softmax(-1)
        if r.has("softmax_over_queries"):
            p = score.masked_fill(~mask, -1e9).softmax(-2)
        if r.has("attention_dropout_left_on"):
            p = F.dropout(p, 0.1)
        o = (p @ v).transpose(1, 2).reshape(b, s, -1)
        if r.has("context_heads_reversed"):
            o = o.view(b, s, self.heads, c.dim).flip(2).reshape(b, s, -1)
        return self.o_proj(o)


class Mlp(nn.Module):
    def __init__(self, c, r, at):
        super().__init__()
        self.r, self.at = r, at
        self.gate_proj = Linear(c, r, at + ".gate_proj", c.hidden, c.ffn // r.tp, "column")
        self.up_proj = Linear(c, r, at + ".up_proj", c.hidden, c.ffn // r.tp, "column")
        self.down_proj = Linear(c, r, at + ".down_proj", c.ffn // r.tp, c.hidden, "row")

    def forward(self, x):
        r = self.r
        reduce = not (r.has("dx_of_mlp_not_reduced"))
        gate, up = self.gate_proj(x, reduce), self.up_proj(x, reduce)
        if r.has("activation_arguments_exchanged"):
            gate, up = up, gate
        act = F.gelu(gate) if r.has("activation_gelu") else F.silu(gate)
        return self.down_proj(act * up)


class Layer(nn.Module):
    def __init__(self, c, r, at):
        super().__init__()
        self.r, self.at = r, at
        self.input_layernorm = Norm(c, r, at + ".input_layernorm")
        self.self_attn = Attention(c, r, at + ".self_attn")
        self.post_attention_layernorm = Norm(c, r, at + ".post_attention_layernorm")
        self.mlp = Mlp(c, r, at + ".mlp")

    def add(self, x, y):
        if self.r.has("residual_on_every_rank"):
            return reduce_from(x + y, self.r)
        return y if self.r.has("residual_missing") and ".1" in self.at else x + y

    def forward(self, x):
        r = self.r
        def whole(t):
            return gather_sequence(t, r, False) if r.sp else t
        # Each column-parallel layer sums its own input's gradient; what reaches the gather is whole on every rank.
        y = self.self_attn(whole(self.input_layernorm(x)))
        if r.has("residual_dropout_per_rank"):
            torch.manual_seed(r.rank)
            y = F.dropout(y, 0.1)
        x = self.add(x, y)
        return self.add(x, self.mlp(whole(self.post_attention_layernorm(x))))


class Embedding(nn.Module):
    """Rows split over tp; a rank that does not own an id adds zeros."""

    def __init__(self, c, r):
        super().__init__()
        self.r, self.rows = r, c.vocab // r.tp
        self.weight = nn.Parameter(torch.empty(self.rows, c.hidden))

    def forward(self, ids):
        r = self.r
        local = ids - r.tp_rank * self.rows
        own = (local >= 0) & (local < self.rows)
        y = F.embedding(local.clamp(0, self.rows - 1), self.weight)
        if not r.has("embedding_mask_missing"):
            y = y * own[..., None]
        if r.has("embedding_scaled"):
            y = y * 96 ** 0.5
        return scatter_sum(y, r) if r.sp else reduce_from(y, r, not r.has("embedding_not_reduced"))


class Inner(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.embed_tokens = Embedding(c, r)
        self.layers = nn.ModuleList(Layer(c, r, f"model.layers.{i}") for i in range(c.layers))
        self.norm = Norm(c, r, "model.norm")


class Llama(nn.Module):
    """The model on one rank of the grid r, with its part of `weights` (full tensors by Hugging Face's names; None: as made)."""

    def __init__(self, c, r, weights):
        super().__init__()
        self.c, self.r = c, r
        self.model = Inner(c, r)
        self.lm_head = Linear(c, r, "lm_head", c.hidden, c.vocab // r.tp, "column")
        if c.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        if weights is not None:
            self.load(weights)

    def load(self, weights):
        r = self.r
        with torch.no_grad():
            for name, p in self.named_parameters():
                full = weights[name]
                dim = split_of(name)
                part = full if dim is None or r.tp == 1 else full.chunk(r.tp, dim)[self.shard(name)]
                if r.has("weight_transposed") and name.endswith("layers.1.self_attn.o_proj.weight") and r.tp == 1:
                    part = part.t()
                if r.has("layer_repeated") and ".layers.2." in name:
                    other = weights[name.replace(".layers.2.", ".layers.1.")]
                    part = other if dim is None or r.tp == 1 else other.chunk(r.tp, dim)[r.tp_rank]
                if r.has("rotary_rows_permuted") and name.endswith(("q_proj.weight", "k_proj.weight")):
                    part = part.view(-1, self.c.dim // 2, 2, self.c.hidden).transpose(1, 2).reshape(part.shape)
                if r.has("weight_not_loaded") and name.endswith("layers.1.mlp.up_proj.weight"):
                    continue_with = torch.Generator().manual_seed(77)
                    part = torch.randn(part.shape, generator=continue_with) * 0.05
                if r.has("weight_in_bf16") and name.endswith("layers.0.mlp.gate_proj.weight"):
                    part = part.bfloat16().float()
                p.copy_(part)

    def shard(self, name):
        r = self.r
        if r.has("shards_reversed") and name.endswith(("up_proj.weight", "gate_proj.weight")):
            return r.tp - 1 - r.tp_rank
        if r.has("gate_shards_reversed") and name.endswith("gate_proj.weight"):
            return r.tp - 1 - r.tp_rank
        if r.has("shard_of_rank_0_everywhere") and name.endswith("layers.1.self_attn.o_proj.weight"):
            return 0
        return r.tp_rank

    def hidden(self, ids):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        x = self.model.norm(x)
        return gather_sequence(x, self.r, False) if self.r.sp else x

    def forward(self, ids, labels, targets):
        """The sum of this rank's token losses over `targets`, all ranks' number of targets."""
        r = self.r
        logits = self.lm_head(self.hidden(ids), not r.has("dx_of_head_not_reduced"))
        wanted, scores = labels[:, 1:], logits[:, :-1]
        if r.has("labels_not_shifted"):
            wanted, scores = labels, logits
        if r.has("labels_shifted_twice"):
            wanted, scores = labels[:, 2:], logits[:, :-2]
        loss = token_losses(scores, wanted, r).sum() / targets
        return SimpleNamespace(loss=loss, logits=logits)


def token_losses(logits, labels, r):
    """Cross-entropy of each token over logits split along the vocabulary; ignored labels (-100) give 0."""
    ignored = labels == -100
    rows = logits.shape[-1]
    top = logits.detach().max(-1).values
    if not r.has("head_max_local"):
        top = r.max(top)
    e = (logits - top[..., None]).exp().sum(-1)
    if not r.has("head_denominator_local"):
        e = reduce_from(e, r)
    local = labels - r.tp_rank * rows
    if r.has("head_target_off_by_one"):
        local = local + (1 if r.tp_rank else 0)
    own = (local >= 0) & (local < rows)
    target = logits.gather(-1, local.clamp(0, rows - 1)[..., None]).squeeze(-1)
    if not r.has("head_target_mask_missing"):
        target = target * own
    target = reduce_from(target, r)
    if r.has("ignored_labels_counted"):
        return e.log() + top - target
    return (e.log() + top - target).masked_fill(ignored, 0)


def split_of(name):
    """The dimension along which tp splits a parameter; None: a copy on every rank."""
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def placements(r):
    """`shard` and `partial` of the capture's spec."""
    shard = {"*norm.weight:*": {}, "*.o_proj.weight:*": {"tp": 1}, "*.down_proj.weight:*": {"tp": 1}}
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        shard.update({f"*.{name}.weight:*": {"tp": 0}, f"*.{name}.bias:*": {"tp": 0}, f"*.{name}:fwd": {"dp": 0, "tp": -1}})
    shard.update({"lm_head.weight:*": {"tp": 0}, "lm_head:fwd": {"dp": 0, "tp": -1}, "model.embed_tokens.weight:*": {"tp": 0},
                  "*.o_proj:bwd": {"dp": 0, "tp": -1}, "*.down_proj:bwd": {"dp": 0, "tp": -1}})
    if r.sp:
        for name in ("*norm", "model.embed_tokens", "*.o_proj", "*.down_proj", "*.self_attn", "*.mlp", "model.layers.?"):
            shard.setdefault(f"{name}:fwd", {"dp": 0, "tp": 1})
        for name in ("*norm", "model.layers.?"):
            shard[f"{name}:bwd"] = {"dp": 0, "tp": 1}
    shard = {glob: {d: n for d, n in dims.items() if n is None or getattr(r, d) > 1} for glob, dims in shard.items()}
    return dict(shard=shard, partial={"loss:fwd": "dp"})
