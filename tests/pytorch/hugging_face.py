# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models as people run them: DDP, FSDP2, parallelize_module and both; right or with one bug."""

import contextlib
import functools
import os

import anyrank
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BATCH, SEQ = 4, 18


def make(name, folder):
    """A small model with random weights, saved for from_pretrained and for anyrank."""
    import transformers
    torch.manual_seed(2)
    shape = dict(vocab_size=144, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64)
    if name == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, tie_word_embeddings=False))
    elif name == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**shape, sliding_window=None))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=144, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.06 + (1 if "norm" in n or ".ln_" in n and n.endswith("weight") else 0))
    model.save_pretrained(folder)


def batch(uneven):
    draw = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 144, (BATCH, SEQ), generator=draw)
    labels = ids.clone()
    if uneven:
        labels[0, 4:], labels[1, 10:] = -100, -100
    return ids, labels


def load(folder, dtype=torch.float32):
    import transformers
    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).train()


# --- what can be wrong with a model, on any number of ranks -----------------------------------------------------------

def _layers(model):
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def _scale_frequencies(model):
    model.model.rotary_emb.inv_freq /= 4


def _other_theta(model):
    n = model.model.rotary_emb.inv_freq.numel()
    model.model.rotary_emb.inv_freq.copy_(500000.0 ** (-torch.arange(n) / n))


def _eps(model):
    for m in model.modules():
        for name in ("variance_epsilon", "eps"):
            if hasattr(m, name) and isinstance(getattr(m, name), float):
                setattr(m, name, 1e-2)


def _scaling(model):
    for layer in _layers(model):
        layer.self_attn.scaling = 1.0


def _gelu(model):
    for layer in _layers(model):
        layer.mlp.act_fn = nn.GELU()


def _layers_swapped(model):
    layers = _layers(model)
    a, b = layers[0].state_dict(), layers[1].state_dict()
    a, b = ({k: v.clone() for k, v in d.items()} for d in (a, b))
    layers[0].load_state_dict(b)
    layers[1].load_state_dict(a)


def _weight_fresh(model):
    with torch.no_grad():
        _layers(model)[1].mlp.up_proj.weight.copy_(torch.randn(128, 64, generator=torch.Generator().manual_seed(4)) * 0.02)


def _rows_permuted(model):
    with torch.no_grad():
        for layer in _layers(model):
            for p in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
                p.copy_(p.view(-1, 2, 8, 64).transpose(1, 2).reshape(p.shape).clone())


def _untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _kv_exchanged(model):
    with torch.no_grad():
        for layer in _layers(model):
            k, v = layer.self_attn.k_proj, layer.self_attn.v_proj
            for n, p in k.named_parameters():
                q = dict(v.named_parameters())[n]
                old = p.clone()
                p.copy_(q)
                q.copy_(old)


def _gate_up_exchanged(model):
    with torch.no_grad():
        for layer in _layers(model):
            old = layer.mlp.gate_proj.weight.clone()
            layer.mlp.gate_proj.weight.copy_(layer.mlp.up_proj.weight)
            layer.mlp.up_proj.weight.copy_(old)


def _weight_transposed(model):
    with torch.no_grad():
        p = _layers(model)[0].self_attn.q_proj.weight
        p.copy_(p.t().clone())


def _embedding_shifted(model):
    with torch.no_grad():
        w = model.get_input_embeddings().weight
        w.copy_(w.roll(1, 0).clone())


def _head_bf16(model):
    model.lm_head.register_forward_hook(lambda m, a, out: out.bfloat16().float())


def _dropout(model):
    for layer in _layers(model):
        layer.self_attn.attention_dropout = 0.1


def _bias_dropped(model):
    with torch.no_grad():
        for layer in _layers(model):
            layer.self_attn.v_proj.bias.zero_()


def _norm_frozen(model):
    for layer in _layers(model):
        layer.input_layernorm.weight.requires_grad_(False)


def _detached_residual(model):
    mlp = _layers(model)[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x.detach())


MODEL_BUGS = {
    "rope_scaled": _scale_frequencies, "rope_theta": _other_theta, "norm_eps": _eps, "softmax_scale_missing": _scaling,
    "activation_gelu": _gelu, "layers_exchanged": _layers_swapped, "weight_not_loaded": _weight_fresh,
    "rotary_rows_permuted": _rows_permuted, "untied": _untied, "kv_exchanged": _kv_exchanged,
    "gate_up_exchanged": _gate_up_exchanged, "weight_transposed": _weight_transposed, "embedding_shifted": _embedding_shifted,
    "head_bf16": _head_bf16, "attention_dropout_left_on": _dropout, "bias_dropped": _bias_dropped,
    "parameter_frozen": _norm_frozen, "branch_detached": _detached_residual,
}


# --- the ways to run it -----------------------------------------------------------------------------------------------

def tensor_parallel(model, mesh, bug):
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate()),
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    for i in range(len(_layers(model))):
        at = f"model.layers.{i}"
        for n in ("q_proj", "k_proj", "v_proj"):
            plan[f"{at}.self_attn.{n}"] = ColwiseParallel()
        for n in ("gate_proj", "up_proj"):
            plan[f"{at}.mlp.{n}"] = ColwiseParallel()
        plan[f"{at}.self_attn.o_proj"] = RowwiseParallel()
        plan[f"{at}.mlp.down_proj"] = RowwiseParallel()
    if bug == "row_output_not_reduced":
        plan["model.layers.0.mlp.down_proj"] = RowwiseParallel(output_layouts=Partial())
    if bug == "row_attention_output_not_reduced":
        plan["model.layers.1.self_attn.o_proj"] = RowwiseParallel(output_layouts=Partial())
    model = parallelize_module(model, mesh, plan)
    if bug == "dx_not_reduced":
        for layer in _layers(model):
            for n in ("gate_proj", "up_proj"):
                local = getattr(layer.mlp, n)
                local.forward = functools.partial(_local_linear, local)
                local._forward_pre_hooks.clear()
                local._forward_hooks.clear()
    if bug == "norm_gradient_local":
        for m in (model.model.norm,):
            m.weight.register_post_accumulate_grad_hook(_keep_own_part)
    if bug == "shard_differs":
        with torch.no_grad():
            p = _layers(model)[1].mlp.up_proj.weight
            if dist.get_rank() == 1:
                p.to_local().copy_(p.to_local().flip(0).clone())
    return model


def _local_linear(m, x):
    return F.linear(x, m.weight.to_local())


def _keep_own_part(p):
    """As if the all-reduce over tp were missing: a different part on each rank."""
    local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
    local.mul_(0.3 + 0.4 * dist.get_rank())


def run(name, source, folder, rank=0, dp=1, tp=1, way=None, bug=None, dtype="fp32", uneven=False, micro=1,
        update=False, steps=1):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel as DDP
    torch.manual_seed(0)
    model = load(source, torch.bfloat16 if dtype == "bf16-pure" else torch.float32)
    if bug in MODEL_BUGS:
        MODEL_BUGS[bug](model)
    if bug == "weights_differ" and rank == 1:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.01)
    if bug == "norm_eps_one_rank" and rank == 1:
        _eps(model)
    world = dp * tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp")) if world > 1 else None
    if tp > 1:
        model = tensor_parallel(model, mesh["tp"], bug)
    whole = model
    if way == "ddp":
        if bug == "parameter_ignored":
            ignored = [n for n, _ in model.named_parameters() if "1.mlp." in n and n.endswith("weight")][1:]
            DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
        model = DDP(model, init_sync=bug != "weights_differ") if bug != "not_wrapped" else model
    elif way == "fsdp2":
        model = fully_shard(model, mesh["dp"], bug, dtype)
    # Attention's second output, its probabilities, is a plain tensor of a rank's own heads.
    spec = {"mesh": {"dp": dp, "tp": tp}, "mean_over": "dp", "samples": "by_rank",
            "shard": {"*.self_attn.1:fwd": {"dp": 0, "tp": 1}} if tp > 1 else {}}
    ids, labels = batch(uneven)
    targets = int((labels[:, 1:] != -100).sum())
    at = rank // tp
    if bug == "samples_of_rank_0":
        at = 0
    ids, labels = ids.chunk(dp)[at], labels.chunk(dp)[at]
    forward = whole if bug == "inner_called" else model
    optimizer = make_optimizer(model, bug, rank)
    with anyrank.capture(model, folder, optimizer, spec=spec):
        train(model, forward, optimizer, ids, labels, targets, way, bug, dtype, dp, micro, rank, update, steps)


def train(model, forward, optimizer, ids, labels, targets, way, bug, dtype, dp, micro, rank, update, steps):
    for step in range(steps):
        for m, (i, l) in enumerate(zip(ids.chunk(micro), labels.chunk(micro))):
            silent = contextlib.nullcontext()
            if way == "ddp" and bug not in ("not_wrapped",) and (bug == "never_synchronised" or m + 1 < micro):
                silent = model.no_sync()
            if way == "fsdp2":
                model.set_requires_gradient_sync(m + 1 == micro and bug != "never_synchronised")
            with silent:
                loss = loss_of(forward, i, l, bug, dtype, targets, dp, micro, rank)
                loss.backward()
            if bug == "micro_last_alone" and m + 1 < micro:
                model.zero_grad()
        if bug == "reduced_twice":
            for p in model.parameters():
                dist.all_reduce(p.grad)
        if update or steps > 1:
            clip(model, bug)
            if not (bug == "update_lost_one_rank" and rank == 1):
                optimizer.step()
            if bug != "zero_grad_forgotten":
                optimizer.zero_grad()
        if bug == "moments_of_one_rank" and rank == 1:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()


def fully_shard(model, mesh, bug, dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard
    policy = MixedPrecisionPolicy()
    if bug == "reduced_in_bf16":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if dtype == "bf16-fsdp" or bug == "parameters_in_bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in _layers(model):
        shard(layer, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)
    if bug == "summed_instead_of_averaged":
        for m in [model, *_layers(model)]:
            m.set_force_sum_reduction_for_comms(True)  # gloo has no other
            m.set_gradient_divide_factor(1.0)
    return model


def make_optimizer(model, bug, rank):
    o = dict(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.5)
    if bug == "lr_doubled":
        o["lr"] *= 2
    if bug == "weight_decay_missing":
        o["weight_decay"] = 0
    if bug == "betas_exchanged":
        o["betas"] = (0.95, 0.9)
    if bug == "lr_one_rank" and rank == 1:
        o["lr"] *= 2
    return (torch.optim.Adam if bug == "adam_for_adamw" else torch.optim.AdamW)(model.parameters(), **o)


def clip(model, bug):
    limit = 0.5
    if bug == "clip_left_out":
        limit = 1e9
    if bug == "clipped_by_value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def loss_of(model, ids, labels, bug, dtype, targets, dp, micro, rank):
    o = {}
    if bug == "labels_shifted_twice":
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    if bug == "positions_restart":
        o["position_ids"] = (torch.arange(SEQ) % (SEQ // 2))[None].expand(len(ids), -1)
    if bug == "positions_from_one":
        o["position_ids"] = (torch.arange(SEQ) + 1)[None].expand(len(ids), -1)
    if bug == "mask_missing":
        o["attention_mask"] = torch.zeros(len(ids), 1, SEQ, SEQ)
    if bug == "mask_off_by_one":
        o["attention_mask"] = torch.full((SEQ, SEQ), float("-inf")).triu(2).expand(len(ids), 1, -1, -1)
    if bug == "last_tokens_masked":
        mask = torch.ones(len(ids), SEQ, dtype=torch.long)
        mask[:, :3] = 0
        o["attention_mask"] = mask
    if bug == "residual_dropout_per_rank":
        torch.manual_seed(rank)
    # The number of targets of all ranks and micro-batches; a mean over dp of sums over local tokens times dp / T.
    if bug not in ("mean_of_means",):
        o["num_items_in_batch"] = torch.tensor(targets / dp)
    if bug == "targets_local":
        o["num_items_in_batch"] = torch.tensor(float((labels[:, 1:] != -100).sum()))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        loss = model(input_ids=ids, labels=labels, use_cache=False, **o).loss
    if bug == "loss_summed_over_ranks":
        loss = loss * dp
    if bug == "mean_of_means":
        loss = loss / micro
    if bug == "micro_not_divided":
        loss = loss * micro
    return loss
