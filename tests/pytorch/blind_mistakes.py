# SPDX-License-Identifier: Apache-2.0
"""More that is wrong with a step of strangers_run.py, by name; blind_cases.py says what is true of each."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from ranks import Through
from strangers import BATCH, C, SEQ
from strangers_run import HUGGING_FACE, SMALL, moment, whole_weights

HUGGING_FACE.update({
    "yarn": ("Llama", dict(SMALL, num_key_value_heads=2, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=8))),
    "gemma2": ("Gemma2", dict(SMALL, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=2.0,
                              final_logit_softcapping=6.0, sliding_window=6)),
    "neox": ("GPTNeoX", dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                             max_position_embeddings=32, hidden_dropout=0, attention_dropout=0, bos_token_id=0,
                             eos_token_id=0)),
})


def attentions(r):
    return [block.attn for block in r.blocks()]


def with_grid(grid, **changes):
    other = copy.copy(grid)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


# --- ranks that share a sequence --------------------------------------------------------------------------------------

@moment("model")
def values_stay_at_home(r):
    for attn in attentions(r):
        def attend_around(q, k, v, here, a=attn):
            there, found = here, []
            for turn in range(r.cp):
                if turn:
                    k, there = r.grid.pass_on(k), tuple(r.grid.swap(t, 1) for t in there)
                score = a.score(q, k, a.allowed(here, there)).clamp(min=-1e9)
                found.append((torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), v), score.logsumexp(-1).transpose(1, 2)))
            return a.join(*zip(*found))
        attn.attend_around = attend_around


@moment("model")
def sums_in_base_two(r):
    def join(outputs, sums):
        sums = torch.stack(sums)
        share = 2.0 ** (sums - sums.amax(0))
        return (torch.stack(outputs) * (share / share.sum(0))[..., None]).sum(0)
    for attn in attentions(r):
        attn.join = join


@moment("model")
def window_of_own_block_alone(r):
    attn = attentions(r)[1]
    def allowed(here, there, right=attn.allowed, window=attn.window):
        attn.window = window if here is there else None
        good = right(here, there)
        attn.window = window
        return good
    attn.allowed = allowed


@moment("tokens")
def labels_in_plain_order(r, ids, labels, positions, documents):
    own = labels.chunk(r.cp, 1)[r.grid.at["cp"]].contiguous()
    ids, positions, documents = (r.grid.tokens(t).contiguous() for t in (ids, positions, documents))
    return ids, own, positions, documents


@moment("tokens")
def positions_in_plain_order(r, ids, labels, positions, documents):
    own = positions.chunk(r.cp, 1)[r.grid.at["cp"]].contiguous()
    ids, labels, documents = (r.grid.tokens(t).contiguous() for t in (ids, labels, documents))
    return ids, labels, own, documents


@moment("tokens")
def documents_counted_in_part(r, *data):
    ids, labels, positions, documents = (r.grid.tokens(t).contiguous() for t in data)
    return ids, labels, positions, documents - documents[:, :1]


# --- ranks that share layers ------------------------------------------------------------------------------------------

@moment("model")
def mlp_entered_without_sum(r):
    for block in r.blocks():
        block.ff.grid = with_grid(r.grid, enter=lambda x: x)


@moment("grid")
def outputs_averaged(r):
    g = r.grid
    g.leave = lambda y: Through.apply(y, lambda t: g.sum(t, "tp") / r.tp, lambda d: d)


@moment("grid")
def gathered_rank_by_rank(r):
    g = r.grid
    def gather(t):
        return g.gather(t, 0, "tp").view(t.shape[0], -1, t.shape[2])
    g.enter = lambda x: Through.apply(x, gather, lambda d: g.own(g.sum(d, "tp"), 1, "tp"))


@moment("model")
def head_gathers_without_sum(r):
    g = r.grid
    r.model.grid = with_grid(g, enter=lambda x: Through.apply(x, lambda t: g.gather(t, 1, "tp"), lambda d: g.own(d, 1, "tp")))


def vocabulary_in_shards(r, rank, zeroed=True):
    """The rows of this rank's part of the ids, added over tp; `rank` says which part that is."""
    n = C.vocab // r.tp
    own = r.grid.at["tp"] * n
    def look_up(ids):
        local = ids - rank * n
        rows = F.embedding(local.clamp(0, n - 1), r.model.tok_emb.weight[own:own + n])
        rows = rows * ((local >= 0) & (local < n))[..., None] if zeroed else rows
        return Through.apply(rows, lambda t: r.grid.sum(t, "tp"), lambda d: d)
    r.model.tok_emb.forward = look_up


def sum_of_table(r):
    r.model.tok_emb.weight.grad = r.grid.sum(r.model.tok_emb.weight.grad, "tp")


@moment("model")
def ids_by_rank_in_the_world(r):
    vocabulary_in_shards(r, r.rank)


@moment("gradients")
def ids_by_rank_in_the_world(r):  # noqa: F811
    sum_of_table(r)


@moment("model")
def rows_of_others_not_zeroed(r):
    vocabulary_in_shards(r, r.grid.at["tp"], zeroed=False)


@moment("gradients")
def rows_of_others_not_zeroed(r):  # noqa: F811
    sum_of_table(r)


@moment("criterion")
def maximum_of_own_logits(r):
    g, n = r.grid, C.vocab // r.tp
    def added(t):
        return Through.apply(t, lambda u: g.sum(u, "tp"), lambda d: d)
    def losses(logits, labels):
        own, local = g.own(logits.float(), -1, "tp"), labels - g.at["tp"] * n
        inside = (local >= 0) & (local < n)
        target = added(own.gather(-1, local.clamp(0, n - 1)[..., None])[..., 0] * inside)
        top = own.detach().amax(-1)
        total = added((own - top[..., None]).exp().sum(-1)).log() + top - target
        return (total * (labels != -100)).sum() / r.targets
    r.criterion = losses


@moment("part")
def columns_dealt_in_turn(r, name, full, dim):
    return full[:, r.grid.at["tp"]::r.tp].contiguous() if name.endswith("wo.weight") else None


@moment("part")
def gate_and_up_cut_as_one(r, name, full, dim):
    if not name.endswith(("w1.weight", "w3.weight")):
        return None
    stem, weights = name[:-len("w1.weight")], whole_weights(r.name)
    both = torch.cat([weights[stem + "w1.weight"], weights[stem + "w3.weight"]]).chunk(r.tp)[r.grid.at["tp"]]
    return both.chunk(2)["w3" in name].contiguous()


@moment("grid")
def clipped_by_own_shards(r):
    """Nothing: the clip of this program is the right one where each rank has all gradients."""


@moment("backward")
def reduced_after_each_micro_batch(r):
    for name, p in r.model.named_parameters():
        r.reduce_one(name, p)


@moment("reduce")
def reduced_after_each_micro_batch(r):  # noqa: F811
    return True


# --- ranks that share samples -----------------------------------------------------------------------------------------

@moment("wrapped")
def inner_module_called(r):
    r.wrapped = r.model


@moment("ddp")
def thawed_after_wrapping(r):
    r.model.unembed.weight.requires_grad_(False)


@moment("wrapped")
def thawed_after_wrapping(r):  # noqa: F811
    r.model.unembed.weight.requires_grad_(True)


@moment("weights")
def seeded_by_rank(r, weights):
    draw = torch.Generator().manual_seed(300 + r.rank)
    for name, w in weights.items():
        if r.rank and w.dim() > 1:
            weights[name] = torch.randn(w.shape, generator=draw) * 0.18


@moment("samples")
def no_sampler(r, *data):
    return tuple(t.chunk(r.dp)[0] for t in data)


@moment("samples")
def last_batch_filled_up(r, *data):
    return tuple(torch.cat([t[:-1], t[:1]]).chunk(r.dp)[r.grid.at["dp"]] for t in data)


@moment("wrapped")
def buckets_in_bf16(r):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    r.wrapped.register_comm_hook(None, bf16_compress_hook)


# --- the loss and what it is of ---------------------------------------------------------------------------------------

@moment("criterion")
def divided_by_all_tokens(r):
    r.divisor = BATCH * SEQ


@moment("criterion")
def mean_of_each_micro_batch(r):
    def losses(logits, labels):
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / (r.micro * r.dp)
    r.criterion = losses


@moment("batch")
def zeroed_in_the_loop(r, *data):
    r.model.zero_grad()


@moment("backward")
def divided_in_the_loop(r):
    for p in r.model.parameters():
        p.grad /= r.micro


@moment("data")
def next_document_predicted(r, ids, labels, positions, documents):
    return ids, torch.cat([ids[:, 1:], labels[:, -1:]], 1), positions, documents


# --- the model --------------------------------------------------------------------------------------------------------

@moment("model")
def heads_repeated_in_turn(r):
    for attn in attentions(r):
        def attend(q, k, v, here, right=attn.attend):
            n = C.heads // C.kv_heads
            return right(q, k[:, :, ::n].repeat(1, 1, n, 1), v[:, :, ::n].repeat(1, 1, n, 1), here)
        attn.attend = attend


@moment("batch")
def places_from_two(r, ids, labels, positions, documents):
    return ids, labels, positions + 2, documents


@moment("model")
def scores_not_capped(r):
    for layer in r.blocks():
        layer.self_attn.attn_logit_softcapping = None


@moment("model")
def gain_without_one(r):
    for m in r.model.modules():
        if type(m).__name__ == "Gemma2RMSNorm":
            m.forward = lambda x, m=m: (m._norm(x.float()) * m.weight.float()).type_as(x)


@moment("model")
def gelu_by_tanh(r):
    for block in r.blocks():
        block.ff.forward = lambda x, ff=block.ff: ff.down(F.gelu(ff.up(x), approximate="tanh"))


@moment("model")
def up_is_activated(r):
    for block in r.blocks():
        block.ff.forward = lambda x, ff=block.ff: ff.grid.leave(ff.w2(ff.w1(ff.grid.enter(x)) * F.gelu(ff.w3(ff.grid.enter(x)))))


@moment("model")
def one_after_the_other(r):
    for layer in r.model.gpt_neox.layers:
        layer.use_parallel_residual = False


@moment("model")
def mlp_reads_the_stream(r):
    for block in r.blocks():
        block.forward = lambda x, b=block: x + b.attn(b.ln(x)) + b.ff(x)


@moment("model")
def stream_added_twice(r):
    for block in r.blocks():
        def forward(x, b=block):
            y = b.ln(x)
            h = x + b.attn(y)
            return x + h + b.ff(y)
        block.forward = forward


@moment("model")
def next_token_seen(r):
    for attn in attentions(r):
        def bias(heads, s, a=attn):
            distance = torch.arange(s)[:, None] - torch.arange(s)[None]
            return (-a.slopes(heads)[:, None, None] * distance).masked_fill(distance < -1, float("-inf"))
        attn.bias = bias


@moment("model")
def masked_with_zero(r):
    for attn in attentions(r):
        attn.score = lambda q, k, good: (torch.einsum("bqhd,bkhd->bhqk", q, k).float() / C.dim ** 0.5).masked_fill(~good[:, None], 0.0)


@moment("inputs")
def padding_is_a_word(r, ids):
    return {"attention_mask": (ids != 56).long()}


@moment("model")
def yarn_factor_left_out(r):
    r.model.model.rotary_emb.attention_scaling = 1.0


@moment("model")
def dropout_by_default(r):
    for layer in r.blocks():
        layer.drop.p = 0.1


@moment("model")
def padding_id_of_a_word(r):
    r.model.tok_emb.padding_idx = 56


@moment("model")
def heads_not_put_back(r):
    for attn in attentions(r):
        def forward(x, a=attn):
            b, s, _ = x.shape
            q = a.wq(x).view(b, s, -1, C.dim).transpose(1, 2)
            k, v = a.for_own_heads(a.wkv(x)).chunk(2, -1)
            p = (q @ k[:, None].transpose(-1, -2) / C.dim ** 0.5 + a.bias(q.shape[1], s)).softmax(-1)
            return a.wo((p.to(v.dtype) @ v[:, None]).reshape(b, s, -1))
        attn.forward = forward


@moment("model")
def packed_by_head(r):
    for attn in attentions(r):
        def forward(x, allowed, a=attn):
            b, s, _ = x.shape
            q, k, v = a.in_proj(x).view(b, s, C.heads, 3, C.dim).permute(3, 0, 2, 1, 4)
            p = a.probabilities(q @ k.transpose(-1, -2) / C.dim ** 0.5, allowed)
            return a.out_proj((p.to(v.dtype) @ v).transpose(1, 2).reshape(b, s, -1))
        attn.forward = forward


@moment("model")
def norm_over_all_heads(r):
    for attn in attentions(r):
        for norm in (attn.q_norm, attn.k_norm):
            norm.root = lambda x, m=norm: torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + m.eps)


@moment("model")
def frequencies_of_half(r):
    for attn in attentions(r):
        def table(positions, a=attn):
            angle = positions[..., None].float() * a.theta ** (-torch.arange(C.dim // 2) / C.dim)
            return angle.cos(), angle.sin()
        attn.table = table


@moment("model")
def epsilon_of_keras(r):
    for m in r.model.modules():
        if isinstance(m, nn.LayerNorm):
            m.eps = 1e-3


@moment("model")
def second_block_not_turned(r):
    attn = attentions(r)[1]
    attn.turn = lambda x, positions: x


# --- what is loaded ---------------------------------------------------------------------------------------------------

@moment("weights")
def layers_sorted_by_name(r, weights):
    for name in [n for n in weights if n.startswith("blocks.0.")]:
        other = name.replace("blocks.0.", "blocks.1.")
        weights[name], weights[other] = weights[other], weights[name]


@moment("weights")
def special_token_in_front(r, weights):
    weights["tok_emb.weight"] = weights["tok_emb.weight"].roll(1, 0)


@moment("weights")
def permuted_for_halves(r, weights):
    for i in range(C.layers):
        for w in ("wq", "wk"):
            full = weights[f"blocks.{i}.attn.{w}.weight"]
            weights[f"blocks.{i}.attn.{w}.weight"] = full.view(-1, C.dim // 2, 2, C.hidden).transpose(1, 2).reshape(full.shape)


@moment("early")
def weights_of_before_the_step(r):
    r.first_weights = copy.deepcopy(r.model.state_dict())


@moment("saved")
def weights_of_before_the_step(r, state):  # noqa: F811
    state["model"] = r.first_weights


# --- the optimizer ----------------------------------------------------------------------------------------------------

@moment("optimizer")
def adam_with_l2(r):
    r.own_optimizer = torch.optim.Adam


@moment("optimizer")
def betas_exchanged(r):
    r.hyper["betas"] = r.hyper["betas"][::-1]


@moment("clip")
def largest_element_for_norm(r, c):
    torch.nn.utils.clip_grad_norm_(r.model.parameters(), r.limit / 30, norm_type=float("inf"))
    return True


@moment("clip")
def clipped_after_the_step(r, c):
    return True


@moment("updated")
def clipped_after_the_step(r):  # noqa: F811
    torch.nn.utils.clip_grad_norm_(r.model.parameters(), r.limit)


@moment("clip")
def first_group_clipped(r, c):
    torch.nn.utils.clip_grad_norm_(r.optimizer.param_groups[0]["params"], r.limit)
    return True


@moment("gradients")
def frozen_has_zeros(r):
    for p in r.model.parameters():
        if p.grad is None:
            p.requires_grad_(True)
            p.grad = torch.zeros_like(p)
            p.requires_grad_(False)


@moment("optimizer")
def dampened(r):
    r.hyper = {"dampening": 0.9}
