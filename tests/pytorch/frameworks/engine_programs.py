# SPDX-License-Identifier: Apache-2.0
"""Programs with engines that keep gradients and weights in buffers of their own, with pipelines, with replicate()."""

import contextlib
import os
import unittest.mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from programs import (BF16, capture, full_weights, gpt, join_group, llama, lm_loss, mlp, program, samples,
                      share, tokens)

os.environ.setdefault("DS_ACCELERATOR", "cpu")
ADAM_LR, NO_DECAY_LR = 1e-3, 3e-3


def groups_of(model, one_lr=False):
    """Two groups: matrices decay, the rest learns faster."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "lr": ADAM_LR, "weight_decay": 0.1},
            {"params": rest, "lr": ADAM_LR if one_lr else NO_DECAY_LR, "weight_decay": 0.0}]


def gathered_weights(engine):
    import deepspeed
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p]) if hasattr(p, "ds_id") else contextlib.nullcontext():
            found[name] = p.detach().float().clone()
    return found


def without_sums():
    """DeepSpeed's collectives that reduce do nothing."""
    import deepspeed.comm as comm
    stack = contextlib.ExitStack()
    for name in ("all_reduce", "reduce", "inference_all_reduce", "all_reduce_coalesced"):
        stack.enter_context(unittest.mock.patch.object(comm, name, lambda *_, **__: None))
    return stack


def with_deepspeed(rank, world, folder, model, stage, micro_batches=1, clip=0.0, bf16=False, offload=False, plain=True,
                   bug=None, outputs=lambda out: out):
    """Trains under ZeRO, or, plain, on one rank with torch alone."""
    optimizer = torch.optim.AdamW(groups_of(model, bug == "one_lr"))

    def loss_of(net, ids):
        return lm_loss(outputs(net(ids)).float(), ids)

    if world == 1 and plain:
        with capture(model, folder):
            for step in range(3):
                for ids in tokens(step).chunk(micro_batches):
                    (loss_of(model, ids) / micro_batches).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        return full_weights(model)
    import deepspeed
    join_group(world)
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    config = {"train_micro_batch_size_per_gpu": 8 // world // micro_batches, "zero_optimization": zero,
              "gradient_accumulation_steps": micro_batches, "gradient_clipping": clip, "bf16": {"enabled": bf16},
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if world == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with capture(engine, folder):
        for step in range(3):
            own = share(tokens(step), 0 if bug == "same_batch" else rank, world)
            for number, ids in enumerate(own.chunk(micro_batches)):
                loss = loss_of(engine, ids)
                last = bug == "last_dropped" and number == micro_batches - 1
                with without_sums() if bug == "unreduced" else contextlib.nullcontext():
                    engine.backward(0.0 * loss if last and rank else loss)
                engine.step()
    return gathered_weights(engine)


def frozen_gpt():
    model = gpt()
    model.table = nn.Parameter(torch.ones(32), requires_grad=False)
    forward = model.embed.forward
    model.embed.forward = lambda ids: forward(ids) * model.table
    return model


def deepspeed_program(name, about, stage, bugs=None, ranks=2, make=gpt, **options):
    tolerances = dict(tolerance=BF16, weights_tolerance=1.0) if options.get("bf16") else {}

    @program(name, about=about, bugs=bugs, ranks=ranks, needs=("deepspeed",), rounding=False, **tolerances)
    def run(rank, world, folder, bug=None):
        return with_deepspeed(rank, world, folder, make(), stage, bug=bug, **options)


BUGS = {"unreduced": "gradients are not summed over the ranks", "last_dropped": "a rank's last micro-batch is lost",
        "one_lr": "one learning rate for all groups", "same_batch": "all ranks take the first part of the batch"}
deepspeed_program("ds_zero0", "ZeRO-0, two groups, micro-batches, clipping", 0, micro_batches=2, clip=0.3,
                  bugs={key: BUGS[key] for key in ("last_dropped", "one_lr")})
deepspeed_program("ds_zero1", "ZeRO-1", 1, micro_batches=2, clip=0.3, bugs=BUGS)
deepspeed_program("ds_zero2", "ZeRO-2", 2, micro_batches=2, clip=0.3,
                  bugs={key: BUGS[key] for key in ("unreduced", "one_lr")})
deepspeed_program("ds_zero3", "ZeRO-3", 3, micro_batches=2, clip=0.3,
                  bugs={key: BUGS[key] for key in ("last_dropped", "one_lr")})
deepspeed_program("ds_zero3_frozen", "ZeRO-3, a frozen table that the model itself uses", 3, make=frozen_gpt)
deepspeed_program("ds_zero1_bf16", "ZeRO-1 in bf16", 1, bf16=True, plain=False)
deepspeed_program("ds_zero2_bf16", "ZeRO-2 in bf16, micro-batches", 2, bf16=True, plain=False, micro_batches=2)
deepspeed_program("ds_zero3_bf16", "ZeRO-3 in bf16", 3, bf16=True, plain=False)
deepspeed_program("ds_zero0_bf16", "bf16 without ZeRO", 0, bf16=True, plain=False)
deepspeed_program("ds_zero2_offload", "ZeRO-2, the optimizer on the CPU", 2, offload=True, clip=0.3)
deepspeed_program("ds_zero3_offload", "ZeRO-3, the optimizer on the CPU", 3, offload=True)
deepspeed_program("ds_zero2_4", "ZeRO-2 on 4 ranks", 2, ranks=4)
deepspeed_program("ds_zero3_llama_4", "ZeRO-3 on 4 ranks, a model of transformers", 3, ranks=4, make=llama,
                  outputs=lambda out: out.logits)


def with_trainer(rank, world, folder, stage, bug=None):
    import transformers
    options = {}
    if world > 1:
        options["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    rows = [{"input_ids": row, "labels": row} for row in tokens(0, n=24)]
    arguments = transformers.TrainingArguments(
        "trained", per_device_train_batch_size=8 // world, max_steps=3, use_cpu=True, report_to=[], optim="adamw_torch",
        save_strategy="no", disable_tqdm=True, weight_decay=0.1,
        learning_rate=2e-4 if bug and world > 1 else 1e-4, **options)
    trainer = transformers.Trainer(llama(), arguments, train_dataset=rows)
    with capture(trainer.model, folder):
        trainer.train()
    engine = getattr(trainer, "deepspeed", None)
    return full_weights(trainer.model) if engine is None else gathered_weights(engine)


TRAINER = ("deepspeed", "transformers", "accelerate")


@program("ds_trainer_zero1", about="transformers.Trainer under ZeRO-1", needs=TRAINER, rounding=False,
         bugs={"lr": "another learning rate"})
def ds_trainer_zero1(rank, world, folder, bug=None):
    return with_trainer(rank, world, folder, 1, bug)


@program("ds_trainer_zero3", about="transformers.Trainer under ZeRO-3", needs=TRAINER, rounding=False)
def ds_trainer_zero3(rank, world, folder):
    return with_trainer(rank, world, folder, 3)


@program("ds_accelerate_zero2", about="accelerate's DeepSpeedPlugin, ZeRO-2", needs=("deepspeed", "accelerate"),
         rounding=False)
def ds_accelerate_zero2(rank, world, folder):
    from accelerate import Accelerator, DeepSpeedPlugin
    options = {}
    if world > 1:
        plugin = options["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.3)
        plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    accelerator = Accelerator(cpu=True, **options)
    model = gpt()
    loader = torch.utils.data.DataLoader(tokens(0, n=24), batch_size=8 // world)
    net, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(groups_of(model)), loader)
    with capture(model, folder, optimizer=optimizer):
        for ids in loader:
            accelerator.backward(lm_loss(net(ids), ids))
            accelerator.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return gathered_weights(net) if world > 1 else full_weights(model)


def deepspeed_pipeline(rank, world, folder, clip, bug=None):
    model = mlp()
    batches = [[part for part in zip(*(t.chunk(4) for t in samples(step)))] for step in range(3)]
    if world == 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with capture(model, folder):
            for batch in batches:
                for x, y in batch:
                    (F.mse_loss(model(x), y) / 4).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        return full_weights(model)
    import deepspeed
    from deepspeed.pipe import PipelineModule
    deepspeed.init_distributed("gloo")
    net = PipelineModule(layers=list(model), num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    if bug and rank == 1:
        torch.manual_seed(9)
        next(m for m in net.modules() if isinstance(m, nn.Linear)).reset_parameters()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": clip,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)
    with capture(engine, folder):
        for batch in batches:
            engine.train_batch(data_iter=iter(batch))
    return weights_of_stages([net])


@program("ds_pipeline2", about="DeepSpeed's PipelineModule on 2 stages", needs=("deepspeed",), rounding=False,
         bugs={"other_seed": "the second stage has weights of another seed"})
def ds_pipeline2(rank, world, folder, bug=None):
    return deepspeed_pipeline(rank, world, folder, 0.0, bug)


@program("ds_pipeline2_clipped", about="the same with clipping, which DeepSpeed does by the first stage's norm",
         needs=("deepspeed",), rounding=False, expected="different")
def ds_pipeline2_clipped(rank, world, folder):
    return deepspeed_pipeline(rank, world, folder, 0.2)


# --- pipelines --------------------------------------------------------------------------------------------------------

class Part(nn.Module):
    """Layers [first, end) of a GPT, with what comes before and after them where they are its ends."""

    def __init__(self, model, first, end):
        super().__init__()
        self.embed, self.pos = (model.embed, model.pos) if first == 0 else (None, None)
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(first, end)})
        last = end == len(model.layers)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x) + self.pos(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def weights_of_stages(parts):
    mine = {name: value for part in parts for name, value in full_weights(part).items()}
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return {name: value for other in of_all for name, value in other.items()}


def sum_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def with_pipeline(rank, world, folder, schedule, stages, loss=lm_loss, scaled=True, given="schedule", sharded=False,
                  bug=None, micro_batches=4):
    """stages: those of each rank. sharded: each stage is FSDP2's on two ranks. (DDP's reducer fails under torch 2.15's
    schedules, with or without anyrank.)"""
    model = gpt(layers=4)
    if world == 1:
        optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM_LR)
        with capture(model, folder):
            for step in range(3):
                for ids in tokens(step).chunk(micro_batches):
                    (loss(model(ids), ids) / (micro_batches if scaled else 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return full_weights(model)
    from torch.distributed import device_mesh, pipelining
    join_group(world)
    mesh = device_mesh.init_device_mesh("cpu", (len(stages), world // len(stages)), mesh_dim_names=("pp", "dp"))
    at, of_batch = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    count = sum(map(len, stages))
    per = 4 // count
    parts = [Part(model, s * per, (s + 1) * per) for s in stages[at]]
    if bug == "seed" and at == 1:
        torch.manual_seed(5)
        parts[-1].layers["3"].mlp.up.reset_parameters()
    if sharded:
        from torch.distributed.fsdp import fully_shard
        for part in parts:
            fully_shard(part, mesh=mesh["dp"])
    of_rank = [pipelining.PipelineStage(part, s, count, torch.device("cpu"), group=mesh.get_group("pp"))
               for part, s in zip(parts, stages[at])]
    kind = getattr(pipelining, f"Schedule{schedule}")
    divisor = micro_batches if bug == "divided_twice" else 1
    seen = []

    def loss_fn(logits, ids):
        seen.append(len(ids))
        lost = bug == "micro_batch_lost" and len(seen) % micro_batches == 0
        return loss(logits, ids) / divisor * (0.0 if lost else 1.0)
    whole = kind(of_rank if len(of_rank) > 1 or "V" in schedule else of_rank[0], micro_batches, loss_fn,
                 scale_grads=scaled)
    lr = 10 * ADAM_LR if bug == "stage_lr" and at == 1 else ADAM_LR
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=lr)
    with capture(whole if given == "schedule" else parts, folder, optimizer=optimizer):
        for step in range(3):
            ids = share(tokens(step), of_batch, world // len(stages))
            whole.step(*[ids] * (0 in stages[at]), **({"target": ids} if count - 1 in stages[at] else {}))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of_stages(parts)


TURNS, BACK = [[0, 2], [1, 3]], [[0, 3], [1, 2]]
PIPELINE_BUGS = {"divided_twice": "the loss is divided by the micro-batches, and so are the gradients",
                 "seed": "a stage has weights of another seed", "stage_lr": "a stage has another learning rate",
                 "micro_batch_lost": "the last micro-batch has no gradient"}


def pipeline_program(name, schedule, stages, ranks=2, bugs=None, **options):
    @program(name, about=f"torch.distributed.pipelining: {schedule}", ranks=ranks, bugs=bugs, rounding=False)
    def run(rank, world, folder, bug=None):
        return with_pipeline(rank, world, folder, schedule, stages, bug=bug, **options)


pipeline_program("pp_gpipe", "GPipe", [[0], [1]])
pipeline_program("pp_1f1b", "1F1B", [[0], [1]], bugs=PIPELINE_BUGS, given="modules")
pipeline_program("pp_1f1b_sum", "1F1B", [[0], [1]], loss=sum_loss, scaled=False)
pipeline_program("pp_1f1b_4", "1F1B", [[0], [1], [2], [3]], ranks=4)
pipeline_program("pp_interleaved", "Interleaved1F1B", TURNS, bugs={"stage_lr": PIPELINE_BUGS["stage_lr"]})
pipeline_program("pp_looped_bfs", "LoopedBFS", TURNS, given="modules")
pipeline_program("pp_zero_bubble", "InterleavedZeroBubble", TURNS, bugs={"seed": PIPELINE_BUGS["seed"]})
pipeline_program("pp_zbv", "ZBVZeroBubble", BACK, bugs={"divided_twice": PIPELINE_BUGS["divided_twice"]})
pipeline_program("pp_dual_v", "DualPipeV", BACK)
pipeline_program("pp2_fsdp2", "1F1B", [[0], [1]], ranks=4, sharded=True, micro_batches=2)


@program("pp_traced", about="torch.distributed.pipelining.pipeline(): cut at a named layer", rounding=False)
def pp_traced(rank, world, folder):
    model = mlp()
    if world == 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with capture(model, folder):
            for step in range(3):
                x, y = samples(step)
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return full_weights(model)
    from torch.distributed import pipelining
    join_group(world)
    cut = pipelining.pipeline(model, mb_args=(samples(0)[0][:2],), split_spec={"3": pipelining.SplitPoint.BEGINNING})
    stage = cut.build_stage(rank, torch.device("cpu"))
    whole = pipelining.ScheduleGPipe(stage, 4, F.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1, momentum=0.9)
    with capture(whole, folder, optimizer=optimizer):
        for step in range(3):
            x, y = samples(step)
            whole.step(*[x][rank:], **({"target": y} if rank else {}))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of_stages([stage.submod])


# --- replicate(), fairscale, an engine by hand ------------------------------------------------------------------------

@program("replicate_accum", about="replicate() of torch, two micro-batches",
         bugs={"part": "replicate() is called on a part of the model"})
def replicate_accum(rank, world, folder, bug=None):
    from torch.distributed._composable.replicate import replicate
    join_group(world)
    model = gpt()
    if world > 1:
        replicate(model.layers[0] if bug else model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM_LR)
    with capture(model, folder):
        for step in range(3):
            for ids in share(tokens(step), rank, world).chunk(2):
                (lm_loss(model(ids), ids) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return full_weights(model)


@program("replicate_fsdp_4", about="the replicate() that is made of FSDP2, on 4 ranks", ranks=4)
def replicate_fsdp_4(rank, world, folder):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    join_group(world)
    model = gpt()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicas",))
        for layer in model.layers:
            replicate(layer, mesh=mesh)
        replicate(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM_LR)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    return full_weights(model)


@program("fairscale_sharded", about="fairscale's ShardedDataParallel and OSS", needs=("fairscale",),
         bugs={"unsharded": "a plain optimizer under ShardedDataParallel: each rank moves all by what it has"})
def fairscale_sharded(rank, world, folder, bug=None):
    join_group(world)
    model = net = mlp()
    if world > 1:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS
        optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1, momentum=0.9)
        net = ShardedDataParallel(model, optimizer)
    if world == 1 or bug:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            net.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
    return full_weights(model)


@program("handmade_flat", about="gradients are summed in one buffer, moments are the engine's",
         spec={"mesh": {"dp": 2}, "mean_over": "dp"}, rounding=False,
         bugs={"unreduced": "the buffer is not summed", "not_divided": "it is summed, and not divided"})
def handmade_flat(rank, world, folder, bug=None):
    join_group(world)
    model = mlp()
    parameters = dict(model.named_parameters())
    momenta = {name: torch.zeros_like(p) for name, p in parameters.items()}
    with capture(model, folder) as c:
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            F.mse_loss(model(x), y).backward()
            flat = torch.cat([p.grad.flatten() for p in parameters.values()])
            if world > 1 and bug != "unreduced":
                dist.all_reduce(flat)
                flat /= 1 if bug else world
            sizes = [p.numel() for p in parameters.values()]
            grads = {name: g.view_as(p) for (name, p), g in zip(parameters.items(), flat.split(sizes))}
            if c is not None:
                c.gradients(grads)
            with torch.no_grad():
                for name, p in parameters.items():
                    p.sub_(0.1 * momenta[name].mul_(0.9).add_(grads[name]))
                    p.grad = None
            if c is not None:
                c.state({name: {"m": m} for name, m in momenta.items()})
                c.step()
    return full_weights(model)
