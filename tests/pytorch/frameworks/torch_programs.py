# SPDX-License-Identifier: Apache-2.0
"""Programs of plain PyTorch: DDP, accumulation, hooks, optimizers, models, averaged weights, schedules."""

import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from programs import (ALLOWED, BF16, GPT, LLAMA, capture, full_copy, full_weights, generator, gpt, join_group, llama,
                      lm_loss, mlp, program, samples, share, tokens, with_ddp)


@program("ddp_adamw", about="MLP under DDP, AdamW",
         bugs={"bypassed": "trains through ddp.module: gradients are never reduced",
               "grad_lost": "one layer's gradient is zeroed after the backward pass"})
def ddp_adamw(rank, world, folder, bug=None):
    join_group(world)
    model = mlp()
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            opt.zero_grad()
            out = (model if bug == "bypassed" else net)(x)
            F.mse_loss(out, y).backward()
            if bug == "grad_lost":
                model[3].weight.grad.zero_()
            opt.step()
    return full_weights(model)


@program("ddp_sgd_4", ranks=4, about="4 ranks, SGD with momentum, weight decay",
         bugs={"sum_hook": "a comm hook that sums and does not divide by the world"})
def ddp_sgd_4(rank, world, folder, bug=None):
    join_group(world)
    net = with_ddp(mlp(), world)
    if bug:
        net.register_comm_hook(None, lambda _, bucket: dist.all_reduce(
            bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0]))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    with capture(net, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            F.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(net)


@program("ddp_no_sync", about="3 micro-batches with no_sync",
         bugs={"divisor": "loss not divided by the number of micro-batches",
               "last_dropped": "the last micro-batch is dropped",
               "all_no_sync": "the last micro-batch too is under no_sync: never reduced"})
def ddp_no_sync(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    n = 3
    with capture(model, folder):
        for step in range(2):
            for m in range(n):
                if bug == "last_dropped" and m == n - 1:
                    continue
                ids = share(tokens(step, 4, micro=m), rank, world)
                last = m == n - (2 if bug == "last_dropped" else 1) and bug != "all_no_sync"
                with contextlib.nullcontext() if last or world == 1 else net.no_sync():
                    (lm_loss(net(ids), ids) / (1 if bug == "divisor" else n)).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("ddp_no_sync_by_rank", spec={"samples": "by_rank"},
         about="each rank takes its half, then splits it into micro-batches")
def ddp_no_sync_by_rank(rank, world, folder):
    join_group(world)
    model = gpt()
    net = with_ddp(model, world)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with capture(model, folder):
        for step in range(2):
            parts = share(tokens(step, 8), rank, world).chunk(2)
            for m, ids in enumerate(parts):
                with contextlib.nullcontext() if m == 1 or world == 1 else net.no_sync():
                    (lm_loss(net(ids), ids) / 2).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


def train_with_hook(rank, world, folder, hook):
    join_group(world)
    net = with_ddp(mlp(), world)
    if world > 1:
        hook(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with capture(net, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            opt.zero_grad()
            F.mse_loss(net(x), y).backward()
            opt.step()
    return full_weights(net)


@program("ddp_hook_bf16", rounding=False, tolerance=BF16, weights_tolerance=1e-2, about="bf16_compress_hook")
def ddp_hook_bf16(rank, world, folder):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    return train_with_hook(rank, world, folder, lambda net: net.register_comm_hook(None, bf16_compress_hook))


@program("ddp_hook_fp16", rounding=False, tolerance=["--rtol", "5e-3", "--atol", "5e-4"], weights_tolerance=2e-3,
         about="fp16_compress_hook")
def ddp_hook_fp16(rank, world, folder):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    return train_with_hook(rank, world, folder, lambda net: net.register_comm_hook(None, fp16_compress_hook))


@program("ddp_hook_allreduce", about="allreduce_hook",
         bugs={"noop": "noop_hook left on after a benchmark: no reduction"})
def ddp_hook_allreduce(rank, world, folder, bug=None):
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    hook = noop_hook if bug else allreduce_hook
    return train_with_hook(rank, world, folder, lambda net: net.register_comm_hook(None, hook))


@program("ddp_hook_powersgd", about="PowerSGD hook in its warm-up phase (vanilla all-reduce for the first 10 steps)")
def ddp_hook_powersgd(rank, world, folder):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    state = powerSGD_hook.PowerSGDState
    return train_with_hook(rank, world, folder, lambda net: net.register_comm_hook(
        state(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=10), powerSGD_hook.powerSGD_hook))


@program("ddp_static_graph", about="static_graph with activation checkpointing")
def ddp_static_graph(rank, world, folder):
    from torch.utils.checkpoint import checkpoint
    join_group(world)

    class Checkpointed(GPT):
        def forward(self, ids):
            x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(self.norm(x))
    torch.manual_seed(0)
    net = with_ddp(Checkpointed(), world, static_graph=True)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(net, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(net(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(net)


class Routes(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x, which):
        x = torch.tanh(self.stem(x))
        return self.head(torch.tanh((self.a if which == 0 else self.b)(x)))


@program("ddp_unused", about="find_unused_parameters: two branches, used alternately")
def ddp_unused(rank, world, folder):
    join_group(world)
    torch.manual_seed(0)
    net = with_ddp(Routes(), world, find_unused_parameters=True)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(net, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            opt.zero_grad()
            F.mse_loss(net(x, step % 2), y).backward()
            opt.step()
    return full_weights(net)


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.rnn = kind(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 64)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


@program("ddp_lstm", about="LSTM language model, gradient_as_bucket_view, clip_grad_norm_",
         bugs={"clip_per_rank": "gradients are clipped on each rank, then averaged"})
def ddp_lstm(rank, world, folder, bug=None):
    join_group(world)
    torch.manual_seed(0)
    model = Tagger(nn.LSTM)
    net = model if bug else with_ddp(model, world, gradient_as_bucket_view=True)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            opt.zero_grad()
            lm_loss(net(ids), ids).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            if bug:
                for p in net.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
            opt.step()
    return full_weights(model)


@program("ddp_gru_packed", about="bidirectional GRU on packed sequences, last state classified")
def ddp_gru_packed(rank, world, folder):
    from torch.nn.utils.rnn import pack_padded_sequence

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)
            self.head = nn.Linear(32, 4)

        def forward(self, ids, lengths):
            _, h = self.rnn(pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False))
            return self.head(torch.cat([h[0], h[1]], 1))
    join_group(world)
    torch.manual_seed(0)
    net = with_ddp(Classifier(), world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(net, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lengths = share(torch.randint(3, 13, (8,), generator=generator(step)), rank, world)
            y = share(torch.randint(0, 4, (8,), generator=generator(50 + step)), rank, world)
            F.cross_entropy(net(ids, lengths), y).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(net)


class SyncBN(nn.BatchNorm2d):
    """PyTorch's SyncBatchNorm refuses the CPU; this is the usual replacement."""

    def forward(self, x):
        if not self.training or not dist.is_initialized():
            return super().forward(x)
        from torch.distributed.nn.functional import all_reduce
        n = x.numel() / x.shape[1] * dist.get_world_size()
        s = all_reduce(torch.stack([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))]))
        mean, sq = s[0] / n, s[1] / n
        var = sq - mean * mean
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
            self.num_batches_tracked += 1
        x = (x - mean[None, :, None, None]) * torch.rsqrt(var + self.eps)[None, :, None, None]
        return x * self.weight[None, :, None, None] + self.bias[None, :, None, None]


def convnet(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(8, 16, 3, padding=1, bias=False), norm(16), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


def images(step, rank, world, n=8):
    g = generator(3000 + step)
    pictures, classes = torch.randn(n, 3, 8, 8, generator=g), torch.randint(0, 5, (n,), generator=g)
    return share(pictures, rank, world), share(classes, rank, world)


@program("conv_syncbn", zero_gradients=["0.bias"], weights_tolerance=5e-5,
         about="convolutions, batch norm over all ranks",
         bugs={"local_bn": "BatchNorm2d instead of a synchronized one"})
def conv_syncbn(rank, world, folder, bug=None):
    join_group(world)
    model = convnet(SyncBN if world > 1 and not bug else nn.BatchNorm2d)
    net = with_ddp(model, world)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with capture(model, folder):
        for step in range(3):
            x, y = images(step, rank, world)
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
    return full_weights(model)


@program("conv_frozen_bn", ranks=4, about="fine-tuning with batch norm in eval mode; 4 ranks",
         bugs={"train_mode": "model.train() in the loop undoes bn.eval()"})
def conv_frozen_bn(rank, world, folder, bug=None):
    join_group(world)
    model = convnet(nn.BatchNorm2d)
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            net.train()
            if not bug:
                for m in model.modules():
                    if isinstance(m, nn.BatchNorm2d):
                        m.eval()
            x, y = images(step, rank, world)
            F.cross_entropy(net(x), y).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("ddp_frozen", about="frozen embedding and first layer",
         bugs={"updated": "hand-written weight decay is applied to frozen parameters too",
               "not_frozen": "the first layer is not frozen"})
def ddp_frozen(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    model.embed.requires_grad_(False)
    if bug != "not_frozen":
        model.layers[0].requires_grad_(False)
    net = with_ddp(model, world)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(net(ids), ids).backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                for p in model.parameters():
                    if p.requires_grad or bug == "updated":
                        p.mul_(1 - 1e-3 * 0.1)
    return full_weights(model)


@program("ddp_groups", about="two parameter groups with their own lr and weight decay",
         bugs={"lr": "the head's group has the wrong lr",
               "decay": "weight decay also on biases and norms",
               "betas": "a different beta2"})
def ddp_groups(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    net = with_ddp(model, world)
    head = [p for n, p in model.named_parameters() if n.startswith("head")]
    rest = [p for n, p in model.named_parameters() if not n.startswith("head") and p.ndim > 1]
    flat = [p for n, p in model.named_parameters() if p.ndim == 1]
    groups = [{"params": head, "lr": 1e-3 if bug == "lr" else 5e-4}, {"params": rest},
              {"params": flat, "weight_decay": 0.1 if bug == "decay" else 0.0}]
    opt = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.999 if bug == "betas" else 0.95))
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(net(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("manual_allreduce", spec={"mesh": {"dp": 2}, "mean_over": "dp"},
         about="no DDP: the program all-reduces, divides and clips each gradient",
         bugs={"one_left_out": "one-dimensional parameters are not all-reduced",
               "clip_first": "clipped before the all-reduce"})
def manual_allreduce(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(model(ids), ids).backward()
            if bug == "clip_first":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if world > 1:
                for p in model.parameters():
                    if bug == "one_left_out" and p.ndim == 1:
                        continue
                    dist.all_reduce(p.grad)
                    p.grad /= world
            if bug != "clip_first":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("manual_allreduce_4", ranks=4, spec={"mesh": {"dp": 4}, "mean_over": "dp"},
         about="no DDP: the program all-reduces each gradient, 4 ranks, SGD with momentum",
         bugs={"no_average": "the all-reduced gradients are not divided"})
def manual_allreduce_4(rank, world, folder, bug=None):
    join_group(world)
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            if world > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    if not bug:
                        p.grad.div_(world)
            opt.step()
    return full_weights(model)


@program("ddp_sampler", spec={"samples": "dealt"},
         about="DataLoader with DistributedSampler, shuffled with set_epoch",
         bugs={"same": "the sampler has rank=0 on both ranks"})
def ddp_sampler(rank, world, folder, bug=None):
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    join_group(world)
    data = TensorDataset(*samples(0, n=32))
    sampler = DistributedSampler(data, num_replicas=world, rank=0 if bug else rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
    net = with_ddp(mlp(), world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(net, folder):
        sampler.set_epoch(1)
        for x, y in loader:
            opt.zero_grad()
            F.mse_loss(net(x), y).backward()
            opt.step()
    return full_weights(net)


@program("ddp_warmup", about="linear warm-up from lr 0 with LambdaLR",
         bugs={"scheduler_twice": "the scheduler is stepped once per rank, so twice a step"})
def ddp_warmup(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, s / 4))
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            opt.zero_grad()
            lm_loss(net(ids), ids).backward()
            opt.step()
            schedule.step()
            if bug:
                schedule.step()
    return full_weights(model)


@program("ddp_ema", about="swa_utils.AveragedModel (EMA) next to the model, evaluated at the end",
         bugs={"never_updated": "the EMA is never updated on the ranks"})
def ddp_ema(rank, world, folder, bug=None):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    join_group(world)
    model = gpt()
    net = with_ddp(model, world)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(model, folder, ema=ema):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            opt.zero_grad()
            lm_loss(net(ids), ids).backward()
            opt.step()
            if not bug:
                ema.update_parameters(model)
        with torch.no_grad():
            ids = share(tokens(9), rank, world)
            lm_loss(ema(ids), ids)
    return full_weights(model) | {f"ema.{n}": full_copy(p) for n, p in ema.module.named_parameters()}


class MeanTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = GPT()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, ids):
        s = self.student(ids)
        with torch.no_grad():
            t = self.teacher(ids)
        return lm_loss(s, ids) + F.mse_loss(s.softmax(-1), t.softmax(-1)) * 20

    @torch.no_grad()
    def update_teacher(self):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.lerp_(s, 0.1)


@program("ddp_mean_teacher", about="an EMA teacher inside the model, updated after each step",
         bugs={"never": "the teacher is never updated",
               "rate": "the EMA update is called twice a step"})
def ddp_mean_teacher(rank, world, folder, bug=None):
    join_group(world)
    torch.manual_seed(0)
    model = MeanTeacher()
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(model.student.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            net(ids).backward()
            opt.step()
            opt.zero_grad()
            for _ in range({None: 1, "never": 0, "rate": 2}[bug]):
                model.update_teacher()
    return full_weights(model)


@program("ddp_closure", about="optimizer.step(closure), as Lightning does")
def ddp_closure(rank, world, folder):
    join_group(world)
    net = with_ddp(mlp(), world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(net, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))

            def closure():
                opt.zero_grad()
                loss = F.mse_loss(net(x), y)
                loss.backward()
                return loss
            opt.step(closure)
    return full_weights(net)


@program("ddp_eval_between", about="evaluation under no_grad before the first step and after each")
def ddp_eval_between(rank, world, folder):
    join_group(world)
    model = gpt()
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def evaluate():
        model.eval()
        with torch.no_grad():
            ids = share(tokens(77, 4), rank, world)
            loss = lm_loss(model(ids), ids)
            if world > 1:
                dist.all_reduce(loss)
        model.train()
    with capture(model, folder):
        evaluate()
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(net(ids), ids).backward()
            opt.step()
            opt.zero_grad()
            evaluate()
    return full_weights(model)


def ragged(step, micro, rank, world, n=4):
    """Rows of different lengths, padded to the longest row of the rank's own micro-batch, with labels of -100."""
    g = generator(4000 + 10 * step + micro)
    rows = [torch.randint(2, 61, (int(torch.randint(4, 14, (1,), generator=g)),), generator=g) for _ in range(n)]
    targets = sum(len(r) - 1 for r in rows)
    rows = rows[rank * n // world:(rank + 1) * n // world]
    width = max(map(len, rows))
    ids = torch.stack([F.pad(r, (0, width - len(r))) for r in rows])
    labels = torch.stack([F.pad(r, (0, width - len(r)), value=-100) for r in rows])
    return ids, labels, targets


@program("ddp_ragged",
         about="variable-length micro-batches padded to their own longest row; sum / targets of the step, times "
               "world",
         bugs={"mean_of_means": "mean loss per micro-batch and rank"})
def ddp_ragged(rank, world, folder, bug=None):
    join_group(world)
    model = gpt()
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            micros = [ragged(step, m, rank, world) for m in range(2)]
            total = sum(m[2] for m in micros)
            for m, (ids, labels, _) in enumerate(micros):
                with contextlib.nullcontext() if m == 1 or world == 1 else net.no_sync():
                    logits = net(ids)
                    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100,
                                           reduction="mean" if bug else "sum")
                    (loss / 2 if bug else loss * world / total).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


def autocast_train(rank, world, folder):
    join_group(world)
    model = gpt()
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = lm_loss(net(ids), ids)
            loss.backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("ddp_autocast_bf16", tolerance=BF16, weights_tolerance=2e-2, about="bf16 autocast under DDP")
def ddp_autocast_bf16(rank, world, folder):
    return autocast_train(rank, world, folder)


@program("ddp_autocast_measured", rounding=False, tolerance=["--sensitivity", ALLOWED], weights_tolerance=2e-2,
         about="bf16 autocast with the file of anyrank.rounding.measure")
def ddp_autocast_measured(rank, world, folder):
    if world == 1 and folder:
        import anyrank.rounding

        def run(path, rounding):
            torch.manual_seed(0)
            with rounding:
                autocast_train(0, 1, path)
        anyrank.rounding.measure(run, os.path.join(os.path.dirname(folder), ALLOWED))
    return autocast_train(rank, world, folder)


@program("ddp_fp16_scaler", tolerance=["--rtol", "2e-2", "--atol", "1e-3"], weights_tolerance=5e-3,
         about="fp16 autocast with GradScaler, unscale_, clip",
         bugs={"not_unscaled": "clipped without unscale_: the scaled norm is clipped"})
def ddp_fp16_scaler(rank, world, folder, bug=None):
    join_group(world)
    model = mlp()
    net = with_ddp(model, world)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(net(x).float(), y)
            scaler.scale(loss).backward()
            if not bug:
                scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return full_weights(model)


def with_optimizer(rank, world, folder, make):
    join_group(world)
    model = mlp()
    wrapped = with_ddp(model, world)
    opt = make(model)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            opt.zero_grad()
            F.mse_loss(wrapped(x), y).backward()
            opt.step()
    return full_weights(model)


def hf_adafactor(m):
    from transformers.optimization import Adafactor
    return Adafactor(m.parameters(), lr=1e-3, relative_step=False, scale_parameter=True)


class MuonWithAdamW:
    """Muon for matrices, AdamW for the rest: two optimizers."""

    def __init__(self, m):
        self.optimizers = [torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=1e-3),
                           torch.optim.AdamW([p for p in m.parameters() if p.ndim != 2], lr=1e-3)]

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


OPTIMIZERS = {
    "adam_amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=1e-3),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-3),
    "sgd_nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adafactor_torch": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-3),
    "adafactor_hf": hf_adafactor,
    "muon": MuonWithAdamW,
}


def add_optimizers():
    for name, make in OPTIMIZERS.items():
        bugs = {}
        if name == "rmsprop":
            bugs = {"alpha": "RMSprop with a different alpha and without momentum on the ranks"}
        if name == "muon":
            bugs = {"half_lost": "only AdamW is stepped: the matrices are not updated"}

        @program(f"opt_{name}", about=f"{name} under DDP", bugs=bugs,
                 weights_tolerance=1e-4 if name == "muon" else 2e-5,
                 needs=("transformers",) if make is hf_adafactor else ())
        def run(rank, world, folder, bug=None, make=make):
            if bug == "alpha":
                def make(m):
                    return torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.0, centered=True, alpha=0.9)
            if bug == "half_lost":
                def make(m):
                    optimizer = MuonWithAdamW(m)
                    optimizer.step = optimizer.optimizers[1].step
                    return optimizer
            return with_optimizer(rank, world, folder, make)


add_optimizers()


@program("ddp_zero_redundancy", about="ZeroRedundancyOptimizer with AdamW")
def ddp_zero_redundancy(rank, world, folder):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    if world == 1:
        return with_optimizer(rank, world, folder, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    return with_optimizer(rank, world, folder,
                          lambda m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW, lr=1e-3))


@program("ddp_compile", about="torch.compile (inductor) of the model, in DDP")
def ddp_compile(rank, world, folder):
    join_group(world)
    model = mlp()
    net = with_ddp(torch.compile(model), world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            opt.zero_grad()
            F.mse_loss(net(x), y).backward()
            opt.step()
    return full_weights(model)


def hf_train(rank, world, folder, model):
    join_group(world)
    net = with_ddp(model, world)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            net(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("hf_llama_ddp_4", needs=("transformers",), ranks=4, about="tiny LlamaForCausalLM under DDP, 4 ranks")
def hf_llama_ddp_4(rank, world, folder):
    return hf_train(rank, world, folder, llama())


@program("hf_gpt2_tied", needs=("transformers",), zero_gradients=["*c_attn.bias"], weights_tolerance=1e-4,
         about="tiny GPT-2, tied embeddings",
         bugs={"untied": "the head is a copy instead of the embedding"})
def hf_gpt2_tied(rank, world, folder, bug=None):
    import transformers
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, attn_implementation="eager"))
    if bug:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    out = hf_train(rank, world, folder, model)
    out.pop("lm_head.weight", None)
    return out


@program("hf_t5", needs=("transformers",), about="tiny T5: encoder-decoder with relative position bias")
def hf_t5(rank, world, folder):
    import transformers
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=0, attn_implementation="eager"))
    return hf_train(rank, world, folder, model)


@program("hf_mixtral", needs=("transformers",), about="tiny MixtralForCausalLM under DDP")
def hf_mixtral(rank, world, folder):
    import transformers
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        **LLAMA | {"intermediate_size": 32}, num_local_experts=4, num_experts_per_tok=2))
    return hf_train(rank, world, folder, model)


class MoE(nn.Module):
    def __init__(self, d=32, experts=4):
        super().__init__()
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
                                     for _ in range(experts))
        self.detach = False

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        p = self.gate(flat.detach() if self.detach else flat).softmax(-1)
        w, e = p.topk(2, -1)
        if self.detach:
            w = w.detach() + 0 * w
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            row, col = (e == k).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(flat[row]) * w[row, col, None])
        return out.view_as(x)


@program("ddp_experts", about="hand-written mixture of experts under DDP (find_unused_parameters)",
         bugs={"router_grad_lost": "the router's weights are detached"})
def ddp_experts(rank, world, folder, bug=None):
    join_group(world)
    model = gpt(feed=MoE)
    for layer in model.layers:
        layer.mlp.detach = bool(bug)
    net = with_ddp(model, world, find_unused_parameters=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with capture(model, folder):
        for step in range(3):
            ids = share(tokens(step), rank, world)
            lm_loss(net(ids), ids).backward()
            opt.step()
            opt.zero_grad()
    return full_weights(model)


@program("ddp_dict_output", about="the model returns a dictionary of the loss and two heads, with an auxiliary loss")
def ddp_dict_output(rank, world, folder):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = mlp(16, 32, 16), nn.Linear(16, 8), nn.Linear(16, 3)

        def forward(self, x, y=None, z=None):
            h = torch.relu(self.body(x))
            a, b = self.a(h), self.b(h)
            return {"loss": F.mse_loss(a, y) + 0.3 * F.cross_entropy(b, z), "a": a, "b": b}
    join_group(world)
    model = TwoHeads()
    torch.manual_seed(1)
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step))
            z = share(torch.randint(0, 3, (8,), generator=generator(step)), rank, world)
            opt.zero_grad()
            net(x, y=y, z=z)["loss"].backward()
            opt.step()
    return full_weights(model)


@program("ddp_contrastive",
         about="CLIP-like loss over embeddings gathered with gradient from all ranks (two towers, logit scale)",
         bugs={"local_negatives": "negatives of its own rank only"})
def ddp_contrastive(rank, world, folder, bug=None):
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = mlp(16, 32, 16), mlp(16, 32, 16)
            self.b[0].weight.data.mul_(0.7)
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x, y):
            return F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1), self.scale.exp()
    join_group(world)
    model = Towers()
    net = with_ddp(model, world)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with capture(model, folder):
        for step in range(3):
            x, y = (share(t, rank, world) for t in samples(step, 8, 16, 16))
            a, b, s = net(x, y)
            first = 0
            all_a, all_b = a, b
            if world > 1 and not bug:
                from torch.distributed.nn.functional import all_gather
                all_a, all_b, first = torch.cat(all_gather(a)), torch.cat(all_gather(b)), rank * len(a)
            t = torch.arange(first, first + len(a))
            loss = (F.cross_entropy(s * a @ all_b.T, t) + F.cross_entropy(s * b @ all_a.T, t)) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
    return full_weights(model)
