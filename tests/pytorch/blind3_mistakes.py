# SPDX-License-Identifier: Apache-2.0
"""Mistakes from threads of training libraries, by name, and other ways to be right; blind3_cases.py says what is true of each."""

import math

import torch
import torch.nn.functional as F

from blind2_models import D, HUGGING_FACE2, SHAPE, cut_of
from blind2_mistakes import bf16
from blind_mistakes import with_grid
from ranks import Through
from strangers_mistakes import Own, own
from strangers_run import (HUGGING_FACE, Run, at, attentions, changes, clip_by, itself, model, moment, of_blocks,
                           parameters, reduced_only)

HUGGING_FACE3 = {"qwen3moe": ("Qwen3Moe", dict(SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=12, num_experts=4,
                                               num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True))}
HUGGING_FACE2.update(HUGGING_FACE3)
HUGGING_FACE.update(HUGGING_FACE3)
BETWEEN = ("attn_norm", "mlp_norm", "out_norm")  # norms of whole rows, outside of the layers that are cut
KV = (".k_norm.", ".k_proj.", ".v_proj.")


def next_tokens(ids):
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)


# --- ranks that share layers ------------------------------------------------------------------------------------------

reduced_only(final_norm_of_own_tokens=lambda name: name != "out_norm.gain")
changes("gradients", lambda r: parameters(r, *BETWEEN), "grad", norms_averaged_over_tokens=lambda r, p: p.grad / r.tp)
at("reduce", head_norms_without_sum=lambda r: True)
changes("gradients", lambda r: parameters(r, *KV), "grad", shared_heads_summed_again=lambda r, p: r.grid.sum(p.grad, "tp"))


@moment("reduce")
def turned_part_not_added(r):
    for name, p in r.model.named_parameters():
        own_rows = p.grad[:D.turned].clone()
        r.reduce_one(name, p)
        if ".k_proj." in name:
            p.grad[:D.turned] = own_rows
    return True


changes("gradients", lambda r: [p for p in r.model.parameters() if p.dim() == 1], "grad",
    vectors_taken_for_copies=lambda r, p: r.grid.sum(p.grad, "tp"))


def loss_of_shards(r, smoothing=0.0, whole=False, owner=False):
    """Cross entropy of logits that are cut over tp. whole: gathered logits are taken for a shard; owner: the rank that has
    the target is the only one with a gradient; smoothing: by the mean of a rank's own shard."""
    def losses(logits, labels):
        g, n = r.grid, D.vocab // (1 if whole else r.tp)
        at, counts = labels - g.at["tp"] * n, labels != -100
        inside, at = (at >= 0) & (at < n), at.clamp(0, n - 1)
        top = logits.detach().float().amax(-1)
        shard = logits.detach().float() if whole else g.own(logits.detach().float(), -1, "tp")
        total = g.sum((shard - top[..., None]).exp().sum(-1), "tp")

        def forward(_):
            target = g.sum(shard.gather(-1, at[..., None])[..., 0] * inside, "tp")
            log_total = total.log() + top
            each = (1 - smoothing) * (log_total - target) + smoothing * (log_total - shard.mean(-1))
            return (each * counts).sum()

        def backward(d):
            p = (shard - top[..., None]).exp() / total[..., None]
            p = p - (1 - smoothing) * F.one_hot(at, n) * inside[..., None] - smoothing / n
            p = p * (inside if owner else counts)[..., None] * counts[..., None] * d
            return p if whole else g.gather(p, -1, "tp")
        return Through.apply(logits.float(), forward, backward) / r.targets
    return losses


changes("criterion", itself, "criterion",
    smoothing_of_own_vocabulary=lambda r, _: loss_of_shards(r, smoothing=r.smoothing),
    gathered_logits_as_a_shard=lambda r, _: loss_of_shards(r, whole=True),
    gradient_of_owner_alone=lambda r, _: loss_of_shards(r, owner=True))
at("part",
   fan_of_own_shard=lambda r, name, full, dim:
       r.grid.own(full, dim, "tp") * math.sqrt(r.tp) if name.endswith(("o_proj.weight", "down_proj.weight")) else None)


@moment("wrapped")
def local_tensors_used(r):
    from torch.distributed.tensor import DTensor, Shard
    for block in r.blocks():
        up = block.ff.up
        up.forward = lambda x, m=up: DTensor.from_local(F.linear(x.to_local(), m.weight.to_local(), m.bias.to_local()),
                                                        x.device_mesh, [Shard(-1)], run_check=False)


changes("model", Run.blocks, "residual_multiplier", residual_multiplier_left_out=lambda r, _: 1.0)
changes("gradients", parameters, "grad", scaled_by_world=lambda r, p: p.grad / r.tp)


@moment("clip")
def shared_heads_counted_by_each(r, c):
    of_shards, of_all = torch.zeros(()), torch.zeros(())
    for name, p in r.model.named_parameters():
        cut = cut_of(name, r.name) is not None or any(part in name for part in KV)
        (of_shards if cut else of_all).add_(p.grad.square().sum())
    return clip_by(r, c, (r.grid.sum(of_shards, "tp") + of_all).sqrt())


changes("batch", lambda r: parameters(r, "down_proj.weight") if r.m else [], "grad", overwritten_in_one_layer=lambda r, _: None)
changes("model", model, "grid", head_gradient_not_summed=lambda r, _: with_grid(r.grid, enter=lambda x: x))

# --- ranks that share a sequence --------------------------------------------------------------------------------------

changes("model", attentions, "join",
    shares_without_gradient=lambda r, attn: lambda outputs, sums, right=attn.join:
        right(outputs, tuple(t.detach() for t in sums)))
changes("gradients", parameters, "grad", averaged_over_all_ranks=lambda r, p: p.grad / r.cp)
at("tokens", tokens_dealt_round_robin=lambda r, *data: tuple(t[:, r.grid.at["cp"]::r.cp].contiguous() for t in data))
changes("model", attentions, "window", window_lost_in_parts=lambda r, _: None)


@moment("tokens")
def loss_mask_not_cut(r, ids, labels, positions, documents):
    first = (labels != -100).chunk(r.cp, 1)[0]
    ids, every, positions, documents = (r.grid.tokens(t).contiguous() for t in (ids, next_tokens(ids), positions, documents))
    return ids, every.where(first, -100), positions, documents


@moment("reduce")
def norms_left_out_of_sum(r):
    for name, p in r.model.named_parameters():
        if "norm" in name:
            p.grad = r.grid.sum(p.grad, "dp")
        else:
            r.reduce_one(name, p)
    return True


@moment("model")
def backward_with_own_keys(r):
    for attn in attentions(r):
        def block(q, k, v, here, there, a):
            score = a.score(q, a.for_heads(q, k), a.allowed(here, there)).clamp(min=-1e9)
            return torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), a.for_heads(q, v).float()), score.logsumexp(-1).transpose(1, 2)

        def around(q, k, v, here, a=attn):
            found, remote_k, remote_v, there = [block(q, k, v, here, here, a)], k, v, here
            for _ in range(1, r.cp):
                remote_k, remote_v = a.grid.swap(remote_k, 1), a.grid.swap(remote_v, 1)
                there = tuple(a.grid.swap(t, 1) for t in there)
                seen, saved = block(q, remote_k, remote_v, here, there, a), block(q, k, v, here, there, a)
                found.append(tuple(s + (x - s).detach() for x, s in zip(seen, saved)))
            return a.join(*zip(*found)).to(q.dtype)
        attn.around = around


# --- stages of a pipeline ---------------------------------------------------------------------------------------------

def divide_what_is_there(r, _):
    for p in r.model.parameters():
        if r.m and p.grad is not None:
            p.grad /= r.micro


at("received", divided_after_each_pass=divide_what_is_there)
at("returned", divided_after_each_pass=divide_what_is_there)
changes("criterion", itself, "divisor", divided_for_the_log_alone=lambda r, _: 1)
changes("criterion", itself, "criterion",
    schedule_divides_again=lambda r, _: lambda logits, labels: r.losses(logits, labels) / r.micro)


@moment("weights")
def tables_not_synchronised(r, weights):
    if r.grid.stage == 1:
        draw = torch.Generator().manual_seed(77)
        weights["embed.weight"] = torch.randn(D.vocab, D.hidden, generator=draw) * 0.18


changes("stages", model, "stages", last_block_left_out=lambda r, _: lambda: range(r.grid.stage, r.grid.stage + 1))


@moment("places")
def places_of_first_micro_batch(r, *places):
    r.places = places if r.m == 0 else r.places
    return r.places


# --- ranks that share samples -----------------------------------------------------------------------------------------

changes("batch", lambda r: parameters(r) if r.m + 1 == r.micro else [], "grad",
    last_micro_batch_after_reduce=lambda r, p: r.grid.sum(p.grad, "dp") / r.dp)
at("reduce", last_micro_batch_after_reduce=lambda r: True)


@moment("updated")
def schedule_steps_for_each_process(r):
    for _ in range(1, r.dp):
        r.schedule.step()


@moment("wrapped")
def factor_of_root_alone(r):
    r.wrapped.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply as it adds
    r.wrapped.set_gradient_divide_factor(1.0)


at("backward", clipped_before_reduce=lambda r: torch.nn.utils.clip_grad_norm_(r.model.parameters(), r.limit))
at("clip",
   clipped_before_reduce=lambda r, c: True,
   clipped_by_local_shards=lambda r, c:
       clip_by(r, c, sum(p.grad.to_local().square().sum() for p in r.model.parameters()).sqrt()))
changes("loss", itself, "loss", not_times_processes=lambda r, _: r.loss / r.dp)


@moment("samples")
def targets_of_own_rank(r, *data):
    data = tuple(t.chunk(r.dp)[r.grid.at["dp"]] for t in data)
    r.divisor = r.dp * int((data[1] != -100).sum())
    return data


@moment("updated")
def no_master_weights(r):
    with torch.no_grad():
        for p in r.model.parameters():
            p.to_local().copy_(bf16(p.to_local()))


@moment("optimizer")
def one_norm_decays(r):
    norm = parameters(r, "emb_ln")
    r.groups[0]["params"] += norm
    r.groups[1]["params"] = [p for p in r.groups[1]["params"] if all(p is not q for q in norm)]


changes("gradients", lambda r: parameters(r, ".experts."), "grad", experts_summed_over_ranks=lambda r, p: p.grad * r.dp)

# --- the loss, the batch and the mask ---------------------------------------------------------------------------------

changes("loss", itself, "loss", divided_by_configured_steps=lambda r, _: r.loss * r.micro / (r.micro + 1))


@moment("criterion")
def chunk_means_added(r):
    def losses(logits, labels):
        pairs = zip(logits.float().flatten(0, 1).split(16), labels.flatten().split(16))
        return sum(F.cross_entropy(a, b) for a, b in pairs if (b != -100).any())
    r.criterion = losses


@moment("data")
def end_taken_for_padding(r, ids, labels, positions, documents):
    counts = labels != -100
    last = counts & (counts.flip(1).cumsum(1).flip(1) == 1)
    return ids, labels.where(~last, -100), positions, documents


@moment("criterion")
def z_loss_of_ignored(r):
    factor, r.z_loss = r.z_loss, 0.0
    r.criterion = lambda logits, labels: (
        r.losses(logits, labels) + factor * logits.float().logsumexp(-1).square().sum() / r.targets)


changes("criterion", itself, "criterion",
    temperature_left_on=lambda r, _: lambda logits, labels: r.losses(logits / 0.7, labels))
at("data",
   prompt_is_learnt=lambda r, ids, labels, positions, documents: (
       ids, next_tokens(ids).where((labels != -100).cumsum(1) == 0, labels), positions, documents))
at("data", padding_attended=lambda r, ids, labels, positions, documents: (ids, labels, positions, torch.zeros_like(documents)))
changes("model", model, "allowed",
    mask_read_the_other_way=lambda r, _: lambda documents, right=r.model.allowed: ~right(documents))

# --- the model --------------------------------------------------------------------------------------------------------

def gemma_gain(r, of_weight):
    for m in r.model.modules():
        if type(m).__name__ == "Gemma2RMSNorm":
            m.forward = lambda x, m=m: (m._norm(x.float()) * of_weight(m.weight.float())).type_as(x)


at("model",
   one_added_in_bf16=lambda r: gemma_gain(r, lambda w: bf16(1.0 + w)),
   one_added_twice=lambda r: gemma_gain(r, lambda w: 2.0 + w))


@moment("model")
def yarn_set_after_building(r):
    rope = r.model.model.rotary_emb
    rope.inv_freq, rope.attention_scaling = 10000.0 ** (-torch.arange(0, 8, 2) / 8), 1.0


changes("model", of_blocks("self_attn"), "use_rope", rope_flags_inverted=lambda r, layer: not layer.use_rope)
changes("model", attentions, "angles",
    frequencies_in_bf16=lambda r, a: lambda positions:
        positions[..., None].float() * bf16(a.theta ** (-torch.arange(0, D.turned, 2) / D.turned)))
changes("model", of_blocks("mlp.gate"), "norm_topk_prob", top_shares_not_normalised=lambda r, _: False)


@moment("model")
def router_detached(r):
    for layer in r.blocks():
        def forward(x, right=layer.mlp.gate.forward):
            logits, scores, indices = right(x)
            return logits, scores.detach(), indices
        layer.mlp.gate.forward = forward


# --- checkpoints and the optimizer ------------------------------------------------------------------------------------

at("weights",
   bias_in_other_order=lambda r, weights: weights.update(
       {name: w.view(-1, D.dim)[:, [0, 2, 1, 3, 4, 5]].flatten() for name, w in weights.items()
        if name.endswith(("q_proj.bias", "k_proj.bias"))}))


@moment("weights")
def rows_repeat_the_last(r, weights):
    weights["wte.weight"] = weights["wte.weight"].clone()
    weights["wte.weight"][-8:] = weights["wte.weight"][-9]


at("saved", saved_in_bf16=lambda r, state: state.update(model={name: bf16(t) for name, t in state["model"].items()}))
at("loaded", schedule_steps_on_load=lambda r: r.schedule.step())
changes("made", itself, "schedule",
    warmup_from_zero=lambda r, _: torch.optim.lr_scheduler.LambdaLR(r.optimizer, lambda i: min(1.0, i / r.warmup)))


class CountsParameters(Own):
    """AdamW whose one counter is increased for each parameter."""

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        for i, p in enumerate(every):
            s = self.state[p]
            if not s:
                s.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p), steps=0)
            s["step"].fill_(s["steps"] * len(every) + i)
            s["steps"] += 1
        super().step(closure)


changes("optimizer", itself, "own_optimizer", counter_of_parameters=lambda r, _: CountsParameters)

# --- other ways to be right -------------------------------------------------------------------------------------------

# places_run_on_under_rope: Turning depends on distances alone, and no token sees another document.
at("data",
   places_run_on_under_rope=lambda r, ids, labels, positions, documents:
       (ids, labels, torch.arange(ids.shape[1]).expand_as(positions), documents))
changes("model", lambda r: [m for m in r.model.modules() if type(m).__name__ == "Norm"], "forward",
    gain_before_rounding=lambda r, m: lambda x: F.rms_norm(x.float(), x.shape[-1:], m.gain.float(), m.eps).to(x.dtype))
changes("criterion", itself, "criterion",
    loss_of_cut_vocabulary=lambda r, _: loss_of_shards(r),
    means_weighted_by_targets=lambda r, _: lambda logits, labels:
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) * ((labels != -100).sum() / r.targets))
at("optimizer", fused_update=lambda r: r.hyper.update(fused=True))
changes("optimizer", itself, "own_optimizer", update_written_down_again=lambda r, _: own(""))


@moment("grid")
def partials_added_in_pairs(r):
    g, right = r.grid, r.grid.sum
    def add(t, over):
        if over != "tp":
            return right(t, over)
        a, b, c, d = g.gather(t[None], 0, "tp").unbind(0)
        return ((a + c) + (b + d)).contiguous()
    g.sum = add


changes("model", attentions, "masked",
    masked_with_lowest=lambda r, a: lambda score, allowed:
        a.cap * torch.tanh(score / a.cap) + torch.zeros(()).where(allowed, torch.finfo(torch.float32).min)[:, None])
changes("criterion", itself, "criterion",
    targets_picked_first=lambda r, _: lambda logits, labels: F.cross_entropy(
        logits[labels != -100].float(), labels[labels != -100], reduction="sum") / r.targets)


@moment("backward")
def gradients_kept_apart(r):
    r.kept = getattr(r, "kept", {})
    for p in r.model.parameters():
        r.kept[p] = r.kept[p] + p.grad if p in r.kept else p.grad
        p.grad = r.kept[p] if r.m + 1 == r.micro else None
