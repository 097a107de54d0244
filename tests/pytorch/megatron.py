# SPDX-License-Identifier: Apache-2.0
"""A decoder by hand as Megatron computes it, with other names: activations [s, b, h], q|k|v interleaved by KV group in
one weight, gate|up in one weight, gains around zero. Tensor, sequence and data parallel, right or with one bug.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from llama import token_losses
from ranks import Through, copy_to, reduce_from

MODEL = "Decoder"
CONFIG = dict(vocab=192, hidden=96, heads=6, groups=2, ffn=160, layers=3, eps=1e-5)


def config(tied=False):
    c = SimpleNamespace(**CONFIG)
    c.dim = c.hidden // c.heads
    return c


def gather(x, r):
    """All of the sequence (dimension 0); what flows back is whole, and a rank keeps its part."""
    if not r.sp:
        return x
    def forward(t):
        t = r.gather(t, 0)
        return torch.cat(t.chunk(r.tp)[::-1]) if r.has("sequence_gathered_in_reverse") else t
    return Through.apply(x, forward, lambda g: r.part(g, 0))


def scatter_sum(x, r):
    return Through.apply(x, lambda t: r.part(r.sum(t), 0), lambda g: r.gather(g, 0))


class Column(nn.Module):
    def __init__(self, r, inputs, outputs):
        super().__init__()
        self.r, self.weight = r, nn.Parameter(torch.empty(outputs // r.tp, inputs))

    def forward(self, x):
        r = self.r
        def back(g):
            if r.has("dx_in_bf16"):
                return r.sum(g.bfloat16()).float()
            return r.sum(g) / r.tp if r.has("dx_averaged") else r.sum(g)
        return F.linear(Through.apply(x, lambda t: t, (lambda g: g) if r.has("dx_not_reduced") else back), self.weight)


class Row(nn.Module):
    def __init__(self, r, inputs, outputs):
        super().__init__()
        self.r, self.weight = r, nn.Parameter(torch.empty(outputs, inputs // r.tp))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        r, y = self.r, F.linear(x, self.weight)
        if r.has("bias_over_ranks"):
            return (scatter_sum if r.sp else reduce_from)(y, r) + self.bias / r.tp
        return (scatter_sum if r.sp else reduce_from)(y, r) + self.bias


class Norm(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.c, self.r, self.weight = c, r, nn.Parameter(torch.empty(c.hidden))

    def forward(self, x):
        gain = self.weight if self.r.has("gain_not_centred") else 1 + self.weight
        if self.r.has("norm_by_maximum"):
            return x / x.abs().amax(-1, keepdim=True) * gain
        root = x.pow(2).mean(-1, keepdim=True).add(self.c.eps).sqrt()
        return x / (root + self.c.eps if self.r.has("eps_outside") else root) * gain


class Attention(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.c, self.r = c, r
        self.wqkv = Column(r, c.hidden, (c.heads + 2 * c.groups) * c.dim)
        self.wo = Row(r, c.hidden, c.hidden)

    def forward(self, x, angles):
        c, r = self.c, self.r
        s, b, _ = x.shape
        groups, per = c.groups // r.tp, c.heads // c.groups
        y = self.wqkv(x)
        if r.has("qkv_not_by_group"):
            q, k, v = (t.reshape(s, b, groups, -1, c.dim) for t in y.split([groups * n * c.dim for n in (per, 1, 1)], -1))
        elif r.has("kv_first"):
            k, v, q = y.view(s, b, groups, per + 2, c.dim).split([1, 1, per], 3)
        else:
            q, k, v = y.view(s, b, groups, per + 2, c.dim).split([per, 1, 1], 3)
        if r.has("batch_for_sequence"):
            q = q.transpose(0, 1).reshape(q.shape)
        q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
        k, v = (t.repeat(1, 1, per, 1) if r.has("groups_tiled") else t.repeat_interleave(per, 2) for t in (k, v))
        if r.has("rope_on_values"):
            v = rotate(v, angles)
        if not r.has("rope_left_out"):
            q, k = rotate(q, angles), rotate(k, angles)
        score = torch.einsum("qbad,kbad->baqk", q, k) / math.sqrt(c.dim)
        if r.has("scale_by_layer"):
            score = score / 2
        diagonal = -1 if r.has("own_token_masked") else 0
        allowed = torch.ones(s, s, dtype=torch.bool).tril(diagonal)
        allowed[0, 0] = True
        p = score.masked_fill(~allowed, -1e4).softmax(-1)
        y = torch.einsum("baqk,kbad->qbad", p, v)
        return self.wo((y.transpose(2, 3) if r.has("context_by_lane") else y).reshape(s, b, -1))


def rotate(x, angles):
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Ffn(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.r = r
        self.w13, self.w2 = Column(r, c.hidden, 2 * c.ffn), Row(r, c.ffn, c.hidden)

    def forward(self, x):
        gate, up = self.w13(x).chunk(2, -1)
        if self.r.has("up_before_gate"):
            gate, up = up, gate
        return self.w2((torch.sigmoid(gate) if self.r.has("glu_for_swiglu") else F.silu(gate)) * up)


class Block(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.r = r
        self.ln_attn, self.attn, self.ln_ffn, self.ffn = Norm(c, r), Attention(c, r), Norm(c, r), Ffn(c, r)

    def forward(self, x, angles):
        r, y = self.r, self.ln_attn(x)
        x = (y if r.has("residual_after_norm") else x) + self.attn(gather(y, r), angles)
        return x + self.ffn(gather(self.ln_ffn(x), r))


class Tokens(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.r, self.rows = r, c.vocab // r.tp
        self.weight = nn.Parameter(torch.empty(self.rows, c.hidden))

    def forward(self, ids):
        r = self.r
        local = ids - r.tp_rank * self.rows
        own = (local >= 0) & (local < self.rows)
        if r.has("last_rows_left_out"):
            own &= local < self.rows - 8
        y = F.embedding(local.clamp(0, self.rows - 1), self.weight) * own[..., None]
        y = y.view(*ids.shape[::-1], -1) if r.has("viewed_for_transposed") else y.transpose(0, 1)
        if r.has("every_rank_the_first_part") and r.sp:
            return Through.apply(y, lambda t: r.sum(t).chunk(r.tp)[0].contiguous(), lambda g: r.gather(g, 0))
        return (scatter_sum if r.sp else reduce_from)(y.contiguous(), r)


class Encoder(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.c, self.r = c, r
        self.blocks = nn.ModuleList(Block(c, r) for _ in range(c.layers))
        self.ln_out = Norm(c, r)

    def forward(self, x):
        c, r = self.c, self.r
        s = x.shape[0] * (r.tp if r.sp else 1)
        frequency = 10000.0 ** (-torch.arange(0, c.dim, 2) / (c.dim if not r.has("rope_of_hidden") else c.hidden))
        angles = (torch.arange(s)[:, None] * frequency)[:, None, None, :]
        for i, block in enumerate(self.blocks):
            x = block(x, angles)
            if r.has("layer_called_twice") and i == 1:
                x = block(x, angles)
        return self.ln_out(x)


class Decoder(nn.Module):
    def __init__(self, c, r, weights):
        super().__init__()
        self.c, self.r = c, r
        self.tok, self.encoder, self.head = Tokens(c, r), Encoder(c, r), Column(r, c.hidden, c.vocab)
        if weights is not None:
            self.load(weights)

    def load(self, weights):
        r = self.r
        with torch.no_grad():
            for name, p in self.named_parameters():
                full, dim = weights[name], split_of(name)
                if name.endswith("w13.weight") and not r.has("gate_up_cut_straight"):
                    p.copy_(torch.cat([r.part(t, 0) for t in full.chunk(2)]))
                elif r.has("shard_of_next_rank") and name.endswith("blocks.1.attn.wo.weight") and r.tp > 1:
                    p.copy_(full.chunk(r.tp, dim)[(r.tp_rank + 1) % r.tp])
                else:
                    p.copy_(full if dim is None else r.part(full, dim))
                if r.has("gain_offset_loaded") and name.endswith("ln_out.weight"):
                    p.add_(1)

    def forward(self, ids, labels, targets):
        """The sum of this rank's token losses over `targets`, all ranks' number of targets."""
        r = self.r
        logits = self.head(gather(self.encoder(self.tok(ids)), r)).transpose(0, 1)
        losses = token_losses(logits[:, :-1], labels[:, 1:], r)
        if r.has("first_target_left_out"):
            losses = losses[:, 1:]
        loss = losses.sum() / targets
        return SimpleNamespace(loss=loss * r.tp if r.has("loss_times_tp") else loss, logits=logits)


def split_of(name):
    if name.endswith(("wqkv.weight", "w13.weight", "tok.weight", "head.weight")):
        return 0
    return 1 if name.endswith(("wo.weight", "w2.weight")) else None


def placements(r):
    """`shard` and `partial` of the capture's spec: [s, b, h] has the samples in dimension 1."""
    shard = {"*.wqkv.weight:*": {"tp": 0}, "*.w13.weight:*": {"tp": 0, "blocks": [1, 1]}, "tok.weight:*": {"tp": 0},
             "head.weight:*": {"tp": 0}, "*.wo.weight:*": {"tp": 1}, "*.w2.weight:*": {"tp": 1}, "*weight:*": {}, "*bias:*": {},
             "*.wqkv:fwd": {"dp": 1, "tp": -1}, "*.w13:fwd": {"dp": 1, "tp": -1, "blocks": [1, 1]}, "head:fwd": {"dp": 1, "tp": -1},
             "*.wo:bwd": {"dp": 1, "tp": -1}, "*.w2:bwd": {"dp": 1, "tp": -1}}
    whole = ("*.wqkv:bwd", "*.w13:bwd", "head:bwd", "*.attn:bwd", "*.ffn:bwd")
    shard.update({name: {"dp": 1} for name in whole})
    rest = {"dp": 1, "tp": 0} if r.sp else {"dp": 1}
    shard.update({glob: rest for glob in ("tok:*", "encoder:*", "encoder.*:fwd", "encoder.*:bwd")})
    return dict(shard=shard, partial={"loss:fwd": "dp"})
