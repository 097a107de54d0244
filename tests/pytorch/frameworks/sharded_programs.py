# SPDX-License-Identifier: Apache-2.0
"""Programs with FSDP2, HSDP, tensor and sequence parallelism."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)

from programs import BF16, capture, full_weights, gpt, join_group, llama, lm_loss, program, samples, share, tokens


def shard(model, layers, world, **options):
    """fully_shard of each layer, then of the rest; nothing on one rank."""
    if world > 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        for layer in layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return model


def train(model, rank, world, folder, optimizer=None):
    opt = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(model(ids).float(), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("fsdp2_layers", about="fully_shard per layer and root, clip_grad_norm_",
         bugs={"clip_local": "clips by the norm of the local shard",
               "same_batch": "both ranks take the first half of the batch"})
def fsdp2_layers(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    shard(model, model.layers, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), 0 if bug == "same_batch" else rank, world)
            lm_loss(model(ids), ids).backward()
            if bug == "clip_local":
                local = [p.grad.to_local() for p in model.parameters()]
                norm = torch.sqrt(sum((g * g).sum() for g in local))
                for g in local:
                    g.mul_(torch.clamp(0.3 / (norm + 1e-6), max=1.0))
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("fsdp2_no_reshard", about="reshard_after_forward=False")
def fsdp2_no_reshard(rank, world, folder):
    join_group(world)
    model = gpt()
    return train(shard(model, model.layers, world, reshard_after_forward=False), rank, world, folder)


@program("fsdp2_root_only_4", ranks=4, about="only the root wrapped, 4 ranks, SGD momentum")
def fsdp2_root_only_4(rank, world, folder):
    join_group(world)
    model = shard(gpt(), [], world)
    return train(model, rank, world, folder, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


@program("fsdp2_uneven_4", ranks=4, about="a model whose dimensions do not divide by 4")
def fsdp2_uneven_4(rank, world, folder):
    join_group(world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 30), nn.LayerNorm(30), nn.GELU(), nn.Linear(30, 7))
    shard(model, [model[0], model[3]], world)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step, 8, 16, 7))
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("fsdp2_bf16", tolerance=BF16, weights_tolerance=2e-2,
         about="MixedPrecisionPolicy(param bf16, reduce fp32); one rank: the same policy on a mesh of 1")
def fsdp2_bf16(rank, world, folder):
    join_group(world)
    if world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = gpt()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return train(model, rank, world, folder, torch.optim.SGD(model.parameters(), lr=0.1))


@program("fsdp2_checkpointing", about="activation checkpointing (checkpoint_wrapper) under fully_shard")
def fsdp2_checkpointing(rank, world, folder):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
    join_group(world)
    model = gpt()
    for k, layer in enumerate(model.layers):
        model.layers[k] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    return train(shard(model, model.layers, world), rank, world, folder)


@program("fsdp2_accumulate", about="2 micro-batches with set_requires_gradient_sync",
         bugs={"last_dropped": "the last micro-batch is dropped on the ranks",
               "divisor": "loss not divided by the number of micro-batches"})
def fsdp2_accumulate(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    shard(model, model.layers, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, folder):
        for step in range(2):
            for m in range(1 if bug == "last_dropped" else 2):
                if world > 1 and bug != "last_dropped":
                    model.set_requires_gradient_sync(m == 1)
                ids = share(tokens(step, 4, micro=m), rank, world)
                (lm_loss(model(ids), ids) / (1 if bug == "divisor" else 2)).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("hsdp_2x2", ranks=4, about="HSDP: replicate 2 x shard 2",
         bugs={"replicas_apart": "the mesh lacks the replicas, which are never reduced over"})
def hsdp_2x2(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    if world > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        if bug:
            mesh = mesh["dp_shard"]
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return train(model, rank, world, folder, torch.optim.SGD(model.parameters(), lr=0.1))


@program("fsdp2_llama_4", needs=("transformers",), ranks=4, about="HF Llama under fully_shard, 4 ranks, warm-up")
def fsdp2_llama_4(rank, world, folder):
    join_group(world)
    model = llama()
    shard(model, model.model.layers, world)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 3))
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()
    return full_weights(model)


@program("fsdp2_frozen_lr0", about="fully_shard with frozen embedding and warm-up from lr 0",
         bugs={"lr": "the head's group has half the lr"})
def fsdp2_frozen_lr0(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    model.embed.requires_grad_(False)
    shard(model, model.layers, world)
    head = list(model.head.parameters())
    rest = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("head")]
    opt = torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 5e-4 if bug else 1e-3}], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: s / 4)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(model(ids), ids).backward()
            opt.step()
            schedule.step()
            opt.zero_grad()
    return full_weights(model)


# -- tensor parallelism: all ranks see the same batch

LAYER = {"attn.q": ColwiseParallel(), "attn.k": ColwiseParallel(), "attn.v": ColwiseParallel(),
         "attn.o": RowwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}


def tp_gpt(mesh):
    model = gpt()
    if mesh is not None:
        for layer in model.layers:
            parallelize_module(layer, mesh, dict(LAYER))
    return model


@program("tp_gpt", about="parallelize_module: attention and MLP over 2",
         bugs={"different_batches": "each tensor-parallel rank loads its own half of the batch",
               "rowwise_partial": "the output of down is left partial: no all-reduce"})
def tp_gpt_case(rank, world, folder, bug=None):
    join_group(world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)) if world > 1 else None
    model = tp_gpt(mesh if bug != "rowwise_partial" else None)
    if bug == "rowwise_partial":
        for layer in model.layers:
            parallelize_module(layer, mesh, LAYER | {"mlp.down": RowwiseParallel(output_layouts=Partial())})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = tokens(step, 4)
            if bug == "different_batches":
                ids = share(tokens(step, 8), rank, world)
            lm_loss(model(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("tp_gpt_4", ranks=4, about="parallelize_module: attention and MLP over 4")
def tp_gpt_4(rank, world, folder):
    join_group(world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)) if world > 1 else None
    model = tp_gpt(mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, folder):
        for step in range(3):
            ids = tokens(step, 4)
            lm_loss(model(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


def sp_plan(model, mesh, loss=False):
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "pos": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1) if loss else Replicate(),
                                use_local_output=not loss)})
    for layer in model.layers:
        parallelize_module(layer, mesh, {
            "ln1": SequenceParallel(), "ln2": SequenceParallel(),
            "attn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attn.q": ColwiseParallel(), "attn.k": ColwiseParallel(), "attn.v": ColwiseParallel(),
            "attn.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1))})
    return model


SP = {"shard": {"layers.?:*": {"tp": 1}}}


@program("sp_gpt", spec=SP, about="sequence parallelism by parallelize_module; blocks' outputs are plain tensors")
def sp_gpt(rank, world, folder):
    join_group(world)
    model = gpt()
    if world > 1:
        sp_plan(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = tokens(step, 4)
            lm_loss(model(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("loss_parallel", spec=SP, about="sequence parallelism with loss_parallel()")
def loss_parallel_case(rank, world, folder):
    join_group(world)
    model = gpt()
    if world > 1:
        sp_plan(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), loss=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with capture(model, folder):
        for step in range(3):
            ids = tokens(step, 4, length=13)
            with loss_parallel() if world > 1 else contextlib.nullcontext():
                logits = model(ids[:, :-1])
                F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("tp2_fsdp2", ranks=4, about="FSDP2 over 2 x TP over 2",
         bugs={"all_ranks_split": "the batch is split by global rank instead of data-parallel rank"})
def tp2_fsdp2(rank, world, folder, bug=None):
    join_group(world)
    dp, dp_rank = (2, rank // 2) if world > 1 else (1, 0)
    model = gpt()
    if world > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], dict(LAYER))
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, 4) if bug else share(tokens(step), dp_rank, dp)
            lm_loss(model(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("tp2_sp_fsdp2", ranks=4, spec=SP, about="sequence parallelism over 2 x FSDP2 over 2")
def tp2_sp_fsdp2(rank, world, folder):
    join_group(world)
    dp, dp_rank = (2, rank // 2) if world > 1 else (1, 0)
    model = gpt()
    if world > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sp_plan(model, mesh["tp"])
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, folder):
        for step in range(2):
            ids = share(tokens(step), dp_rank, dp)
            lm_loss(model(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


# -- hand-written Megatron-like layers: plain tensors, a spec for each

class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.contiguous().clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g


class ParallelFeed(nn.Module):
    def __init__(self, feed, rank, world, bug=None):
        super().__init__()
        self.bug, self.world = bug, world
        self.up = nn.Linear(32, 128 // world)
        self.down = nn.Linear(128 // world, 32)
        with torch.no_grad():
            self.up.weight.copy_(feed.up.weight.chunk(world, 0)[rank])
            self.up.bias.copy_(feed.up.bias.chunk(world, 0)[rank])
            self.down.weight.copy_(feed.down.weight.chunk(world, 1)[rank])
            self.down.bias.copy_(feed.down.bias)

    def forward(self, x):
        parallel = self.world > 1
        if parallel and self.bug != "dx_not_reduced":
            x = CopyToRanks.apply(x)
        h = F.gelu(self.up(x))
        y = F.linear(h, self.down.weight, self.down.bias if self.bug == "bias_twice" else None)
        if parallel:
            y = SumOverRanks.apply(y)
        return y if self.bug == "bias_twice" else y + self.down.bias


HAND = {"mesh": {"tp": 2}, "shard": {"*.up.weight:*": {"tp": 0}, "*.up.bias:*": {"tp": 0}, "*.up:fwd": {"tp": -1},
                                     "*.down.weight:*": {"tp": 1}},
        "partial": {"*.up:bwd": "tp"}}


@program("hand_tp", spec=HAND, about="hand-written column/row parallel MLP (plain tensors)",
         bugs={"bias_twice": "the row-parallel bias is added on every rank before the all-reduce",
               "dx_not_reduced": "the gradient of the column-parallel input is not all-reduced"})
def hand_tp(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    for layer in model.layers:
        layer.mlp = ParallelFeed(layer.mlp, rank, world, bug)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, folder):
        for step in range(3):
            ids = tokens(step, 4)
            lm_loss(model(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    out = full_weights(model)
    if world > 1:
        for n in list(out):
            dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(n.split("mlp.")[-1])
            if dim is not None:
                parts = [torch.empty_like(out[n]) for _ in range(world)]
                dist.all_gather(parts, out[n].contiguous())
                out[n] = torch.cat(parts, dim)
    return out


TP_PLAN = {"shard": {"*.self_attn.1:*": {"tp": 1}, "*_norm:*": {"tp": 2}}}


@program("tp_plan_auto", needs=("transformers",), spec=TP_PLAN, about='HF Llama from_pretrained(tp_plan="auto")')
def tp_plan_auto(rank, world, folder):
    import transformers
    join_group(world)
    path = f"auto_model_{world}"
    if rank == 0:
        llama().save_pretrained(path)
    if world > 1:
        dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32,
                                                              **({"tp_plan": "auto"} if world > 1 else {}))
    model.train()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = tokens(step, 4)
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)
