# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a step of blind2_run.py, by name, and other ways to be right; blind2_cases.py says what is true of each."""

import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from blind2_models import D, SEQ, Lora
from blind2_run import batch
from ranks import Through
from strangers_run import (at, attentions, changes, clip_by, grid, itself, model, moment, of_blocks, parameters,
                           reduced_only)


def bf16(t):
    return t.bfloat16().to(t.dtype)


# --- ranks that share a sequence --------------------------------------------------------------------------------------

def around(attn, hops):
    """HarborAttention.around with other hops."""
    def go(q, k, v, here):
        there, found = here, []
        for turn in range(hops):
            if turn:
                k, v, there = attn.grid.pass_on(k), attn.grid.pass_on(v), tuple(attn.grid.swap(t, 1) for t in there)
            score = attn.score(q, attn.for_heads(q, k), attn.allowed(here, there)).clamp(min=-1e9)
            found.append((torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), attn.for_heads(q, v).float()),
                          score.logsumexp(-1).transpose(1, 2)))
        return attn.join(*zip(*found)).to(q.dtype)
    return go


changes("model", attentions, "around", ring_stops_early=lambda r, attn: around(attn, r.cp - 1))
changes("grid", grid, "pass_on",
    gradient_goes_on=lambda r, g: lambda x: Through.apply(x, lambda t: g.swap(t, 1), lambda d: g.swap(d, 1)))
changes("model", attentions, "join",
    sums_of_ring_in_bf16=lambda r, attn: lambda outputs, sums, right=attn.join: right(outputs, tuple(bf16(t) for t in sums)))


@moment("model")
def blocks_judged_by_rank(r):
    """Own block: causal by places in it; blocks of lower ranks: all; of higher ranks: nothing."""
    for attn in attentions(r):
        def allowed(here, there, window=attn.window):
            (i, d), (j, e) = here, there
            n = i.shape[1]
            mine, theirs = int(i[0].min()), int(j[0].min())  # the first piece is the rank's number
            at = torch.arange(n)
            good = (at[None] <= at[:, None]) if mine == theirs else torch.full((n, n), mine > theirs)
            if window:
                good = good & (j[0][None] > i[0][:, None] - window)
            return good.expand(len(i), -1, -1)
        attn.allowed = allowed


changes("loss", itself, "loss", loss_times_context=lambda r, _: r.loss * r.cp)


@moment("tokens")
def boundaries_divided(r, ids, labels, positions, documents):
    own = [r.grid.tokens(t).contiguous() for t in (ids, labels, positions)]
    wrong = torch.zeros_like(documents)
    for row in range(len(documents)):
        for cut in (documents[row, 1:] != documents[row, :-1]).nonzero()[:, 0] + 1:
            n = SEQ // r.cp
            at = int(cut) // r.cp
            for part in range(r.cp):  # each rank has its tokens' boundaries at a share of the true ones
                wrong[row, part * n + at:(part + 1) * n] += 1
    return *own, r.grid.tokens(wrong).contiguous()


@moment("grid")
def heads_back_in_turn(r):
    """Each token's heads come back dealt out: one of each rank in turn."""
    g = r.grid
    def there(t):
        return torch.stack(g.gather(t, 2, "cp").chunk(r.cp, 2), 3).flatten(2, 3)
    def back(d):
        dealt = d.unflatten(2, (-1, r.cp)).transpose(2, 3).flatten(2, 3)
        return g.own(g.gather(dealt, 1, "cp"), 2, "cp")
    g.to_tokens = lambda x: Through.apply(x, lambda t: g.own(there(t), 1, "cp"), back)


@moment("model")
def documents_of_own_part(r):
    g = r.grid
    for attn in attentions(r):
        def ulysses(q, k, v, here, a=attn):
            places, documents = here
            everywhere = (g.gather(places, 1, "cp"), documents.repeat(1, r.cp))
            return g.to_tokens(a.attend(*(g.to_heads(t) for t in (q, k, v)), everywhere, everywhere))
        attn.ulysses = ulysses


# --- ranks that share layers ------------------------------------------------------------------------------------------

reduced_only(kv_biases_not_added=lambda name: not name.endswith(("k_proj.bias", "v_proj.bias")))
changes("model", lambda r: [row for layer in r.blocks() for row in (layer.attn.o_proj, layer.mlp.down_proj)], "forward",
    bias_shared_out=lambda r, m: lambda x: m.grid.leave(F.linear(x, m.weight) + m.bias / r.tp))


def vocabulary_loss(r, minus):
    """Cross entropy of logits that are cut over tp; minus: whether this rank takes the target off in the backward pass."""
    g, n = r.grid, D.vocab // r.tp
    def losses(logits, labels):
        at = labels - g.at["tp"] * n
        inside, counts = (at >= 0) & (at < n), labels != -100
        def forward(t):
            own = g.own(t, -1, "tp")
            target = g.sum(own.gather(-1, at.clamp(0, n - 1)[..., None])[..., 0] * inside, "tp")
            return ((t.logsumexp(-1) - target) * counts).sum()
        def backward(d):
            own = g.own(logits.detach().float(), -1, "tp")
            p = (own - logits.detach().float().logsumexp(-1, keepdim=True)).exp()
            one = F.one_hot(at.clamp(0, n - 1), n) * minus(at, inside)[..., None]
            return g.gather((p - one) * counts[..., None] * d, -1, "tp")
        return Through.apply(logits.float(), forward, backward) / r.targets
    return losses


changes("criterion", itself, "criterion",
    targets_of_first_rank=lambda r, _: vocabulary_loss(r, lambda at, inside: inside & (r.grid.at["tp"] == 0)))


@moment("grid")
def tokens_cut_without_gather(r):
    g = r.grid
    def back(d):
        whole = torch.zeros(d.shape[0], d.shape[1] * r.tp, d.shape[2])
        whole.chunk(r.tp, 1)[g.at["tp"]].copy_(d)
        return whole
    g.scatter_tokens = lambda x: Through.apply(x, lambda t: g.own(t, 1, "tp"), back)


changes("grid", grid, "leave",
    sums_in_other_group=lambda r, g: lambda y: Through.apply(y, lambda t: g.sum(t, "dp"), lambda d: d))
changes("criterion", itself, "criterion",
    padded_ids_count=lambda r, _: lambda logits, labels, right=r.criterion: right(F.pad(logits, (0, 8)), labels))


class OwnTokensForWeights(torch.autograd.Function):
    """A column layer whose weight's gradient reads a buffer of gathered tokens that holds this rank's part everywhere."""

    @staticmethod
    def forward(ctx, x, weight, bias, tp, at):
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.at = tp, at
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        x = torch.cat([x.chunk(ctx.tp, 1)[ctx.at]] * ctx.tp, 1)
        return d @ weight, d.flatten(0, 1).t() @ x.flatten(0, 1), d.sum((0, 1)), None, None


changes("model", of_blocks("mlp.gate_up_proj"), "forward",
    buffer_of_own_tokens=lambda r, m: lambda x: OwnTokensForWeights.apply(x, m.weight, m.bias, r.tp, r.grid.at["tp"]))


@moment("model")
def rows_looked_up_in_turn(r):
    m, g = r.model.embed, r.grid
    def forward(ids):
        rows = F.embedding(ids // r.tp, m.weight) * (ids % r.tp == g.at["tp"])[..., None]
        return Through.apply(rows, lambda t: g.sum(t, "tp"), lambda d: d)
    m.forward = forward


@moment("model")
def norm_of_own_heads(r):
    for attn in attentions(r):
        for m in (attn.q_norm, attn.k_norm):
            m.add, m.width = (lambda t: t), len(m.gain)


changes("model", lambda r: [norm for attn in attentions(r) for norm in (attn.q_norm, attn.k_norm)], "add",
    squares_without_gradient=lambda r, _: lambda x: Through.apply(x, lambda t: r.grid.sum(t, "tp"), lambda d: d))


# --- stages of a pipeline ---------------------------------------------------------------------------------------------

at("reduce", table_of_each_stage=lambda r: True)
at("squares", norm_of_own_stage=lambda r: sum(p.grad.square().sum() for n, p in r.model.named_parameters()))


@moment("stages")
def blocks_counted_in_stage(r):
    for at, i in enumerate(r.model.stages()):
        r.model.layers[i].attn.window = r.model.window_of(at)


at("places", documents_not_sent=lambda r, positions, documents: (positions, torch.zeros_like(documents)))


@moment("received")
def micro_batch_before(r, hidden):
    before, r.before = getattr(r, "before", hidden), hidden
    return before.detach().clone()


at("returned", divided_on_each_stage=lambda r, gradient: gradient / r.micro)


@moment("model")
def last_norm_twice(r):
    if r.grid.stage == 1:
        norm = r.model.out_norm
        r.model.head.forward = lambda x, weight: F.linear(type(norm).forward(norm, x), weight)


# --- ranks that share samples -----------------------------------------------------------------------------------------

at("batch", first_micro_batch_synchronised=lambda r, *data: r.wrapped.set_requires_gradient_sync(r.m == 0))
at("share", sent_before_the_step=lambda r: True)


@moment("renew")
def sent_before_the_step(r):  # noqa: F811
    for p in r.model.parameters():
        dist.broadcast(p.data, r.owner[p], group=r.grid.group("dp"))


@moment("samples")
def shuffled_by_each_rank(r, *data):
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(5 + r.rank))
    return tuple(t[order].chunk(r.dp)[r.grid.at["dp"]] for t in data)


changes("backward", parameters, "grad", accumulated_in_bf16=lambda r, p: bf16(p.grad))
changes("loss", itself, "loss",
    squares_of_weights_in_loss=lambda r, _: r.loss + 0.01 * sum(p.square().sum() for p in r.model.parameters()) / 2)


@moment("backward")
def clipped_at_each_micro_batch(r):
    norm = sum(p.grad.square().sum() for p in r.model.parameters()).sqrt()
    for p in r.model.parameters():
        p.grad.mul_(min(1.0, r.limit / float(norm)))


at("clip", clipped_at_each_micro_batch=lambda r, c: True)

# --- the loss, the batch and the mask ---------------------------------------------------------------------------------

at("data",
   mask_not_shifted=lambda r, ids, labels, positions, documents: (
       ids, torch.cat([ids[:, 1:], ids[:, :1]], 1).where((labels != -100).roll(1, 1), -100), positions, documents),
   collated_tokens_first=lambda r, ids, labels, positions, documents: (
       *(t.t().reshape(t.shape) for t in (ids, labels)), positions, documents))


@moment("criterion")
def last_chunk_left_out(r):
    def losses(logits, labels):
        n = labels.numel() // 32 * 32
        return F.cross_entropy(logits.float().flatten(0, 1)[:n], labels.flatten()[:n], reduction="sum") / r.targets
    r.criterion = losses


at("data",
   begun_twice=lambda r, ids, labels, positions, documents:
       (torch.cat([torch.ones_like(ids[:, :1]), ids[:, :-1]], 1), torch.cat([labels[:, :1] * 0 - 100, labels[:, :-1]], 1), positions, documents),
   places_count_padding=lambda r, ids, labels, positions, documents:
       (ids, labels, torch.arange(SEQ).expand_as(positions), documents))
changes("model", model, "allowed",
    documents_of_first_row=lambda r, _: lambda documents, right=r.model.allowed: right(documents[:1].expand_as(documents)))
at("data", data_from_the_start=lambda r, *data: batch(r.packed, r.left, 0))

# --- the model --------------------------------------------------------------------------------------------------------

changes("model", attentions, "turn",
    last_features_turned=lambda r, attn: lambda x, positions, right=attn.turn, rest=D.dim - D.turned:
        right(x.roll(-rest, -1), positions).roll(rest, -1))


@moment("model")
def key_bias_after_turning(r):
    for attn in attentions(r):
        def heads(x, positions, a=attn):
            b, s, _ = x.shape
            q, v = a.q_norm(a.q_proj(x)), a.v_proj(x)
            k = a.k_norm(a.k_proj(x) - a.k_proj.bias)
            q, k, v = (t.view(b, s, -1, D.dim) for t in (q, k, v))
            return a.turn(q, positions), a.turn(k, positions) + a.k_proj.bias.view(-1, D.dim), v
        attn.heads = heads


changes("model", of_blocks("mlp"), "halves", gate_and_up_in_turn=lambda r, _: lambda y: (y[..., ::2], y[..., 1::2]))


@moment("model")
def added_in_place(r):
    for layer in r.blocks():
        def forward(x, positions, here, m=layer):
            x = x * 1
            y = x + m.attn(m.attn_norm(x), positions, here)
            z = y + m.mlp(m.mlp_norm(y))
            y.data.copy_(z.data)  # the sum is written where its first term is, which the norm's backward pass reads
            return z
        layer.forward = forward


@moment("early")
def one_block_thrice(r):
    for i in range(1, D.layers):
        r.model.layers[i].load_state_dict(r.model.layers[0].state_dict())


changes("model", attentions, "probabilities", sinks_left_out=lambda r, _: lambda score: score.softmax(-1))
changes("model", attentions, "masked",
    capped_after_the_mask=lambda r, attn: lambda score, allowed, cap=attn.cap:
        cap * torch.tanh(score.masked_fill(~allowed[:, None], float("-inf")) / cap))
changes("model", model, "logit_scale", logits_not_scaled=lambda r, _: 1.0)
changes("model", model, "scale", embedding_scale_in_bf16=lambda r, _: float(torch.tensor(r.model.scale).bfloat16()))


@moment("model")
def gain_of_keys_for_queries(r):
    for layer in r.blocks():
        a = layer.self_attn
        a.q_norm.forward = lambda x, a=a: type(a.q_norm).forward(a.k_norm, x)


changes("model", of_blocks("self_attn"), "sliding_window", all_blocks_turned=lambda r, _: 6)


@moment("model")
def norms_come_first(r):
    for layer in r.blocks():
        def forward(x, *args, m=layer, **options):
            h = m.post_attention_layernorm(x)
            x = x + m.self_attn(hidden_states=h, **{k: v for k, v in options.items()})[0]
            return x + m.mlp(m.post_feedforward_layernorm(x))
        layer.forward = forward


changes("model", lambda r: [r.model.wte], "scale_grad_by_freq", scaled_by_frequency=lambda r, _: True)
changes("model", lambda r: [r.model.wte], "max_norm", rows_renormed=lambda r, _: 1.0)

# --- adapters ---------------------------------------------------------------------------------------------------------

def adapters(r):
    return [m for m in r.model.modules() if isinstance(m, Lora)]


changes("model", adapters, "scale", alpha_not_divided=lambda r, m: m.scale * D.rank)
changes("model", lambda r: [p for m in adapters(r) for p in m.base.parameters()], "requires_grad",
    base_trained=lambda r, _: True)


@moment("weights")
def merged_and_still_there(r, weights):
    for name in [n for n in weights if n.endswith("base.weight")]:
        a, b = (weights[name.replace("base", part)] for part in ("lora_A", "lora_B"))
        weights[name] = weights[name] + 8 / D.rank * b @ a


@moment("weights")
def base_in_eight_bits(r, weights):
    for name in [n for n in weights if n.endswith("base.weight")]:
        step = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / step).round() * step


# --- the optimizer ----------------------------------------------------------------------------------------------------

at("optimizer", everything_decays=lambda r: [group.update(weight_decay=r.decay) for group in r.groups])
at("optimizer", amsgrad=lambda r: r.hyper.update(amsgrad=True))


@moment("optimizer")
def table_at_a_tenth(r):
    table = r.model.wte.weight
    r.groups[0]["params"] = [p for p in r.groups[0]["params"] if p is not table]
    r.groups.append({"params": [table], "weight_decay": r.decay, "lr": r.lr / 10})


@moment("clip")
def norm_added_in_bf16(r, c):
    total = torch.zeros((), dtype=torch.bfloat16)
    for p in r.model.parameters():
        total = total + p.grad.bfloat16().square().sum()
    return clip_by(r, c, total.sqrt().float())


# --- other ways to be right -------------------------------------------------------------------------------------------

@moment("model")
def fused_attention(r):
    """torch's own, with a mask."""
    for attn in attentions(r):
        def attend(q, k, v, here, there, a=attn):
            q, k, v = (t.transpose(1, 2) for t in (q, a.for_heads(q, k), a.for_heads(q, v)))
            return F.scaled_dot_product_attention(q, k, v, a.allowed(here, there)[:, None]).transpose(1, 2)
        attn.attend = attend


@moment("grid")
def added_backwards(r):
    """Partial outputs are added from the last rank to the first, in bf16 as they are."""
    g = r.grid
    right = g.sum
    def add(t, over):
        if over != "tp":
            return right(t, over)
        total = None
        for part in reversed(g.gather(t[None], 0, "tp").unbind(0)):
            total = part if total is None else total + part
        return total.contiguous()
    g.sum = add


@moment("model")
def keys_in_blocks(r):
    """Quarry's softmax block after block of keys, with a running maximum and sum, as flash attention does."""
    for attn in attentions(r):
        def forward(x, allowed, a=attn):
            b, s, _ = x.shape
            q, k, v = (t.view(b, s, 5, -1).transpose(1, 2) for t in a.c_attn(x).chunk(3, -1))
            score = a.masked((q @ k.transpose(-1, -2)).float() / math.sqrt(8), allowed)
            top = a.sinks[None, :, None].float().expand(b, 5, s)
            total, out = torch.ones(b, 5, s), torch.zeros(b, 5, s, 8)
            for part, value in zip(score.split(6, -1), v.split(6, -2)):
                new = torch.maximum(top, part.amax(-1)).detach()
                p, keep = (part - new[..., None]).exp(), (top - new).exp()
                total, out, top = total * keep + p.sum(-1), out * keep[..., None] + p @ value.float(), new
            return a.c_proj((out / total[..., None]).to(v.dtype).transpose(1, 2).reshape(b, s, -1))
        attn.forward = forward


@moment("model")
def adapter_in_fp32(r):
    for m in adapters(r):
        def forward(x, m=m):
            with torch.autocast("cpu", enabled=False):
                adapted = m.lora_B(m.lora_A(x.float()))
            return m.scale * adapted + m.base(x)
        m.forward = forward


changes("model", lambda r: [m for m in r.model.modules() if isinstance(m, nn.LayerNorm)], "forward",
    statistics_in_double=lambda r, m: lambda x:
        F.layer_norm(x.double(), x.shape[-1:], m.weight.double(), m.bias.double(), m.eps).to(x.dtype))
changes("wrapped", itself, "wrapped", compiled=lambda r, _: torch.compile(r.wrapped, backend="aot_eager"))
# silent_backward_alone: no_sync() around the forward pass alone, or not at all: DDP averages after each micro-batch, which is right too.
changes("wrapped", lambda r: [r.wrapped], "no_sync", silent_backward_alone=lambda r, _: contextlib.nullcontext)


@moment("criterion")
def loss_in_chunks(r):
    def losses(logits, labels):
        pairs = zip(logits.float().flatten(0, 1).split(7), labels.flatten().split(7))
        return sum(F.cross_entropy(a, b, reduction="sum") for a, b in pairs) / r.targets
    r.criterion = losses
