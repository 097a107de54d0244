# SPDX-License-Identifier: Apache-2.0
"""More that is wrong with a step of strangers_run.py, by name; blind_cases.py says what is true of each."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from ranks import Through
from strangers import BATCH, C, SEQ
from strangers_run import (HUGGING_FACE, SMALL, Run, at, attentions, changes, grid, itself, model, moment, of_blocks,
                           parameters, whole_weights)

HUGGING_FACE.update({
    "yarn": ("Llama", dict(SMALL, num_key_value_heads=2, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=8))),
    "gemma2": ("Gemma2", dict(SMALL, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=2.0,
                              final_logit_softcapping=6.0, sliding_window=6)),
    "neox": ("GPTNeoX", dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                             max_position_embeddings=32, hidden_dropout=0, attention_dropout=0, bos_token_id=0,
                             eos_token_id=0)),
})


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


def in_plain_order(r, t):
    return t.chunk(r.cp, 1)[r.grid.at["cp"]].contiguous()


at("tokens",
   labels_in_plain_order=lambda r, ids, labels, *places: (
       r.grid.tokens(ids).contiguous(), in_plain_order(r, labels), *(r.grid.tokens(t).contiguous() for t in places)),
   positions_in_plain_order=lambda r, ids, labels, positions, documents: (
       *(r.grid.tokens(t).contiguous() for t in (ids, labels)), in_plain_order(r, positions),
       r.grid.tokens(documents).contiguous()))


@moment("tokens")
def documents_counted_in_part(r, *data):
    ids, labels, positions, documents = (r.grid.tokens(t).contiguous() for t in data)
    return ids, labels, positions, documents - documents[:, :1]


# --- ranks that share layers ------------------------------------------------------------------------------------------

changes("model", of_blocks("ff"), "grid", mlp_entered_without_sum=lambda r, _: with_grid(r.grid, enter=lambda x: x))
changes("grid", grid, "leave",
    outputs_averaged=lambda r, g: lambda y: Through.apply(y, lambda t: g.sum(t, "tp") / r.tp, lambda d: d))
changes("grid", grid, "enter",
    gathered_rank_by_rank=lambda r, g: lambda x:
        Through.apply(x, lambda t: g.gather(t, 0, "tp").view(t.shape[0], -1, t.shape[2]),
                      lambda d: g.own(g.sum(d, "tp"), 1, "tp")))
changes("model", model, "grid",
    head_gathers_without_sum=lambda r, _: with_grid(r.grid, enter=lambda x: Through.apply(
        x, lambda t: r.grid.gather(t, 1, "tp"), lambda d: r.grid.own(d, 1, "tp"))))


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


at("model", ids_by_rank_in_the_world=lambda r: vocabulary_in_shards(r, r.rank))
at("gradients", ids_by_rank_in_the_world=lambda r: sum_of_table(r))
at("model", rows_of_others_not_zeroed=lambda r: vocabulary_in_shards(r, r.grid.at["tp"], zeroed=False))
at("gradients", rows_of_others_not_zeroed=lambda r: sum_of_table(r))


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


at("part",
   columns_dealt_in_turn=lambda r, name, full, dim:
       full[:, r.grid.at["tp"]::r.tp].contiguous() if name.endswith("wo.weight") else None)


@moment("part")
def gate_and_up_cut_as_one(r, name, full, dim):
    if not name.endswith(("w1.weight", "w3.weight")):
        return None
    stem, weights = name[:-len("w1.weight")], whole_weights(r.name)
    both = torch.cat([weights[stem + "w1.weight"], weights[stem + "w3.weight"]]).chunk(r.tp)[r.grid.at["tp"]]
    return both.chunk(2)["w3" in name].contiguous()


# The clip of this program is the right one where each rank has all gradients.
at("grid", clipped_by_own_shards=lambda r: None)


@moment("backward")
def reduced_after_each_micro_batch(r):
    for name, p in r.model.named_parameters():
        r.reduce_one(name, p)


at("reduce", reduced_after_each_micro_batch=lambda r: True)

# --- ranks that share samples -----------------------------------------------------------------------------------------

changes("wrapped", itself, "wrapped", inner_module_called=lambda r, _: r.model)
at("ddp", thawed_after_wrapping=lambda r: r.model.unembed.weight.requires_grad_(False))
at("wrapped", thawed_after_wrapping=lambda r: r.model.unembed.weight.requires_grad_(True))


@moment("weights")
def seeded_by_rank(r, weights):
    draw = torch.Generator().manual_seed(300 + r.rank)
    for name, w in weights.items():
        if r.rank and w.dim() > 1:
            weights[name] = torch.randn(w.shape, generator=draw) * 0.18


at("samples",
   no_sampler=lambda r, *data: tuple(t.chunk(r.dp)[0] for t in data),
   last_batch_filled_up=lambda r, *data: tuple(torch.cat([t[:-1], t[:1]]).chunk(r.dp)[r.grid.at["dp"]] for t in data))


@moment("wrapped")
def buckets_in_bf16(r):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    r.wrapped.register_comm_hook(None, bf16_compress_hook)


# --- the loss and what it is of ---------------------------------------------------------------------------------------

changes("criterion", itself, "divisor", divided_by_all_tokens=lambda r, _: BATCH * SEQ)
changes("criterion", itself, "criterion",
    mean_of_each_micro_batch=lambda r, _: lambda logits, labels:
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / (r.micro * r.dp))
at("batch", zeroed_in_the_loop=lambda r, *data: r.model.zero_grad())
changes("backward", parameters, "grad", divided_in_the_loop=lambda r, p: p.grad / r.micro)
at("data",
   next_document_predicted=lambda r, ids, labels, positions, documents:
       (ids, torch.cat([ids[:, 1:], labels[:, -1:]], 1), positions, documents))

# --- the model --------------------------------------------------------------------------------------------------------

changes("model", attentions, "attend",
    heads_repeated_in_turn=lambda r, attn: lambda q, k, v, here, right=attn.attend, n=C.heads // C.kv_heads:
        right(q, k[:, :, ::n].repeat(1, 1, n, 1), v[:, :, ::n].repeat(1, 1, n, 1), here))
at("batch", places_from_two=lambda r, ids, labels, positions, documents: (ids, labels, positions + 2, documents))
changes("model", of_blocks("self_attn"), "attn_logit_softcapping", scores_not_capped=lambda r, _: None)
changes("model", lambda r: [m for m in r.model.modules() if type(m).__name__ == "Gemma2RMSNorm"], "forward",
    gain_without_one=lambda r, m: lambda x: (m._norm(x.float()) * m.weight.float()).type_as(x))
changes("model", of_blocks("ff"), "forward",
    gelu_by_tanh=lambda r, ff: lambda x: ff.down(F.gelu(ff.up(x), approximate="tanh")),
    up_is_activated=lambda r, ff: lambda x: ff.grid.leave(ff.w2(ff.w1(ff.grid.enter(x)) * F.gelu(ff.w3(ff.grid.enter(x))))))
changes("model", lambda r: r.model.gpt_neox.layers, "use_parallel_residual", one_after_the_other=lambda r, _: False)
changes("model", Run.blocks, "forward", mlp_reads_the_stream=lambda r, b: lambda x: x + b.attn(b.ln(x)) + b.ff(x))


@moment("model")
def stream_added_twice(r):
    for block in r.blocks():
        def forward(x, b=block):
            y = b.ln(x)
            return x + (x + b.attn(y)) + b.ff(y)
        block.forward = forward


@moment("model")
def next_token_seen(r):
    for attn in attentions(r):
        def bias(heads, s, a=attn):
            distance = torch.arange(s)[:, None] - torch.arange(s)[None]
            return (-a.slopes(heads)[:, None, None] * distance).masked_fill(distance < -1, float("-inf"))
        attn.bias = bias


changes("model", attentions, "score",
    masked_with_zero=lambda r, _: lambda q, k, good:
        (torch.einsum("bqhd,bkhd->bhqk", q, k).float() / C.dim ** 0.5).masked_fill(~good[:, None], 0.0))
at("inputs", padding_is_a_word=lambda r, ids: {"attention_mask": (ids != 56).long()})
changes("model", lambda r: [r.model.model.rotary_emb], "attention_scaling", yarn_factor_left_out=lambda r, _: 1.0)
changes("model", of_blocks("drop"), "p", dropout_by_default=lambda r, _: 0.1)
changes("model", lambda r: [r.model.tok_emb], "padding_idx", padding_id_of_a_word=lambda r, _: 56)


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


changes("model", lambda r: [norm for attn in attentions(r) for norm in (attn.q_norm, attn.k_norm)], "root",
    norm_over_all_heads=lambda r, m: lambda x: torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + m.eps))


@moment("model")
def frequencies_of_half(r):
    for attn in attentions(r):
        def table(positions, a=attn):
            angle = positions[..., None].float() * a.theta ** (-torch.arange(C.dim // 2) / C.dim)
            return angle.cos(), angle.sin()
        attn.table = table


changes("model", lambda r: [m for m in r.model.modules() if isinstance(m, nn.LayerNorm)], "eps",
    epsilon_of_keras=lambda r, _: 1e-3)
changes("model", lambda r: attentions(r)[1:2], "turn", second_block_not_turned=lambda r, _: lambda x, positions: x)


# --- what is loaded ---------------------------------------------------------------------------------------------------

@moment("weights")
def layers_sorted_by_name(r, weights):
    for name in [n for n in weights if n.startswith("blocks.0.")]:
        other = name.replace("blocks.0.", "blocks.1.")
        weights[name], weights[other] = weights[other], weights[name]


at("weights", special_token_in_front=lambda r, weights: weights.update({"tok_emb.weight": weights["tok_emb.weight"].roll(1, 0)}))


@moment("weights")
def permuted_for_halves(r, weights):
    for i in range(C.layers):
        for w in ("wq", "wk"):
            full = weights[f"blocks.{i}.attn.{w}.weight"]
            weights[f"blocks.{i}.attn.{w}.weight"] = full.view(-1, C.dim // 2, 2, C.hidden).transpose(1, 2).reshape(full.shape)


changes("early", itself, "first_weights", weights_of_before_the_step=lambda r, _: copy.deepcopy(r.model.state_dict()))
at("saved", weights_of_before_the_step=lambda r, state: state.update(model=r.first_weights))


# --- the optimizer ----------------------------------------------------------------------------------------------------

changes("optimizer", itself, "own_optimizer", adam_with_l2=lambda r, _: torch.optim.Adam)
at("optimizer", betas_exchanged=lambda r: r.hyper.update(betas=r.hyper["betas"][::-1]))


@moment("clip")
def largest_element_for_norm(r, c):
    torch.nn.utils.clip_grad_norm_(r.model.parameters(), r.limit / 30, norm_type=float("inf"))
    return True


at("clip", clipped_after_the_step=lambda r, c: True)
at("updated", clipped_after_the_step=lambda r: torch.nn.utils.clip_grad_norm_(r.model.parameters(), r.limit))


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


changes("optimizer", itself, "hyper", dampened=lambda r, _: {"dampening": 0.9})
