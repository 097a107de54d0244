# SPDX-License-Identifier: Apache-2.0
"""One training step of the hand-written models on one rank of the grid: batch, backward, reductions, clip, update."""

import anyrank
import torch
import torch.nn.functional as F

import gpt
import llama
import megatron

BATCH, SEQ, LR, CLIP = 4, 20, 1e-3, 0.5
MODELS = {"llama": llama, "gpt": gpt, "megatron": megatron}


def batch(vocab):
    """Ids, and labels of which every sample ignores another number."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, vocab, (BATCH, SEQ), generator=draw)
    labels = ids.clone()
    for i in range(BATCH):
        labels[i, :1 + 3 * i] = -100
    return ids, labels


def reduce_gradients(model, r, sharded):
    """Sums the gradients: over dp, and over tp of what sequence parallelism gave each rank a part of."""
    for i, (name, p) in enumerate(model.named_parameters()):
        if p.grad is None:
            continue
        over_tp = r.sp and not sharded(name) and not (r.has("row_bias_gradient_local") and name.endswith("bias"))
        if over_tp and not (r.has("norm_gradient_local") or (r.has("norm_gradient_local_once") and ".1." in name)):
            p.grad = r.sum(p.grad)
        if not r.sp and r.has("norm_gradient_summed_again") and name.endswith("norm.weight"):
            p.grad = r.sum(p.grad)
        if r.has("dp_not_reduced") or (r.has("dp_one_parameter_skipped") and "layers.1.mlp.up" in name) \
                or (r.has("dp_one_rank_keeps_its_own") and r.dp_rank == 1):
            r.sum(p.grad, "dp")
            continue
        if r.has("dp_reduced_twice") and i % 5 == 0:
            p.grad = r.sum(p.grad, "dp")
        if r.has("dp_over_wrong_group"):
            p.grad = r.sum(p.grad, "tp")
            continue
        if r.has("dp_over_world"):
            p.grad = r.sum(p.grad, "tp")
        p.grad = r.sum(p.grad, "dp")
        if r.has("dp_averaged"):
            p.grad /= r.dp
        if r.has("gradients_in_bf16"):
            p.grad = p.grad.bfloat16().float()
        if r.has("gradient_zeroed") and name.endswith("layers.0.mlp.down_proj.weight"):
            p.grad.zero_()


def clip(model, r, sharded):
    """Scales the gradients to the norm CLIP and returns the norm of the whole model."""
    squares = torch.zeros(())
    for name, p in model.named_parameters():
        own = p.grad.pow(2).sum()
        if sharded(name) and not r.has("norm_of_own_shards") or r.has("norm_counts_replicas"):
            own = r.sum(own)
        if r.has("norm_leaves_out_norms") and "norm" in name:
            continue
        squares = squares + own
    norm = squares.sqrt()
    if r.has("norm_mean_of_ranks"):
        norm = r.sum(torch.stack([p.grad.pow(2).sum() for p in model.parameters()]).sum().sqrt()) / r.tp
    for p in model.parameters():
        p.grad *= min(1.0, CLIP / (norm.item() + 1e-6)) if not r.has("clip_left_out") else 1
        if r.has("clip_factor_squared"):
            p.grad *= min(1.0, CLIP / (norm.item() + 1e-6))
    return norm


def optimizer_of(model, r):
    o = dict(lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    if r.has("lr_doubled"):
        o["lr"] *= 2
    if r.has("betas_exchanged"):
        o["betas"] = (0.95, 0.9)
    if r.has("weight_decay_missing"):
        o["weight_decay"] = 0
    if r.has("weight_decay_one_rank") and r.rank == 1:
        o["weight_decay"] = 0
    if r.has("adam_for_adamw"):
        return torch.optim.Adam(model.parameters(), **o)
    return torch.optim.AdamW(model.parameters(), **o)


def update(model, r, optimizer, before):
    optimizer.step()
    if r.has("update_lost_one_rank") and r.rank == 1:
        model.load_state_dict(before)
    if r.has("update_twice"):
        optimizer.step()
    if r.has("zero_gather_missing"):
        # Each data-parallel rank updates every other parameter and keeps its own result.
        for i, (name, p) in enumerate(model.named_parameters()):
            if i % r.dp != r.dp_rank:
                p.data.copy_(before[name])


def run(r, model_name, weights, folder, micro=1, autocast=False, tied=False, steps=1, with_update=False):
    module = MODELS[model_name]
    c = module.config(tied=tied)
    ids, labels = batch(c.vocab)
    torch.manual_seed(0)
    model = getattr(module, module.MODEL)(c, r, weights)
    def sharded(name):
        return module.split_of(name) is not None
    spec = {"mesh": {"dp": r.dp, "tp": r.tp}, "samples": "by_rank", **module.placements(r)}
    targets = int((labels[:, 1:] != -100).sum())
    ids, labels = r.part(ids, 0, "dp"), r.part(labels, 0, "dp")
    if r.has("samples_of_rank_0") and r.dp_rank:
        ids, labels = (t[:BATCH // r.dp] for t in batch(c.vocab))
    if r.has("targets_local", "dp_mean_of_means"):
        targets = int((labels[:, 1:] != -100).sum()) * (r.dp if r.has("dp_mean_of_means") else 1)
    if r.has("targets_with_ignored"):
        targets = BATCH * (SEQ - 1)
    if r.has("targets_one_more"):
        targets += 1
    optimizer = optimizer_of(model, r) if with_update else None
    with anyrank.capture(model, folder, optimizer, spec=spec) as c:
        train(c, r, model, optimizer, sharded, ids, labels, targets, micro, autocast, steps)


def train(c, r, model, optimizer, sharded, ids, labels, targets, micro, autocast, steps):
    for step in range(steps):
        parts = list(zip(ids.chunk(micro), labels.chunk(micro)))
        for m, (i, l) in enumerate(parts):
            own = targets
            if r.has("micro_sum_of_means", "micro_mean_of_means"):
                own = int((l[:, 1:] != -100).sum()) * (micro if r.has("micro_mean_of_means") else 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(i, l, own)
            if r.has("micro_last_alone") or (r.has("zero_grad_in_loop") and m == 1):
                model.zero_grad()
            out.loss.backward()
            if r.has("micro_first_twice") and m == 0:
                for p in model.parameters():
                    p.grad *= 2
        reduce_gradients(model, r, sharded)
        c.gradients()
        if optimizer is not None:
            before = {n: p.detach().clone() for n, p in model.state_dict().items()}
            if r.has("step_counter_ahead") and step == 0:
                for p in model.parameters():
                    optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(p),
                                          "exp_avg_sq": torch.zeros_like(p)}
            norm = clip(model, r, sharded)
            update(model, r, optimizer, before)
            c.gradient_norm(norm)
            if not r.has("zero_grad_forgotten"):
                model.zero_grad()
