# SPDX-License-Identifier: Apache-2.0
"""One or more training steps of the models of experts_models.py, right or with one mistake."""

import functools

import anyrank
import torch
import torch.nn.functional as F

from deep_models import Deep
from experts_models import MODELS, C, Grid, cuts_of, part_of, places

MODELS["deep"] = Deep


def batch(step):
    draw = torch.Generator().manual_seed(70 + step)
    ids = torch.randint(1, C.vocab, (C.batch, C.seq), generator=draw)
    labels = torch.cat([ids[:, 1:], torch.full((C.batch, 1), -100)], 1)
    for i in range(C.batch):
        labels[i, 9 + i % 4:] = -100  # padding
    return ids, labels


class Run:
    """mean: losses and gradients are averaged over the ranks and not summed, as DDP and FSDP do it."""

    def __init__(self, model, folder, rank=0, fault=None, dtype="fp32", update=False, steps=1, mean=False, checkpointing=False,
                 **ranks):
        self.name, self.folder, self.fault, self.dtype, self.update, self.steps = model, folder, fault, dtype, update, steps
        self.grid = Grid(rank, fault=fault, **ranks)
        self.data = ("dp",) if model == "mix" else ("dp", "ep")  # what samples are dealt over
        self.samples = self.grid.sizes["dp"] * (self.grid.sizes["ep"] if "ep" in self.data else 1)
        self.mean, self.checkpointing = mean, checkpointing

    def own(self, t):
        for over in self.data:
            t = self.grid.own(t, 0, over)
        return t

    def build(self):
        self.model = MODELS[self.name](self.grid)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(part_of(self.grid, name, self.name))
        if self.checkpointing:
            from torch.utils.checkpoint import checkpoint
            for block in (getattr(self.model, "model", None) or getattr(self.model, "decoder", None) or self.model).layers:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def reduce(self):
        """Gradients over ranks with other samples; of experts only over those that have the same ones."""
        for name, p in self.model.named_parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            expert = ".experts." in name
            over, divisor = ("dp",) if expert else self.data, self.samples if self.mean else 1
            if expert and self.fault == "experts_summed_over_ep":
                over = ("ep",)
            if expert and self.fault == "experts_averaged_over_copies":
                divisor = self.grid.sizes["dp"]
            if "router" in name and self.fault == "router_of_own_tokens":
                over = ("dp",)
            p.grad = self.grid.sum(p.grad, *over) / divisor

    def norm(self):
        squares = torch.zeros(())
        for name, p in self.model.named_parameters():
            over = [dim for dim, cut in cuts_of(name, self.name).items() if cut is not None]
            if self.fault == "norm_of_own_experts":
                over = []
            squares = squares + self.grid.sum(p.grad.square().sum(), *over)
        return squares.sqrt()

    def train(self, c, step):
        ids, labels = batch(step)
        targets = int((labels != -100).sum())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16"):
            logits = self.model(self.own(ids))
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.own(labels).flatten(), reduction="sum") / targets
        (loss * self.samples if self.mean else loss).backward()
        self.reduce()
        c.gradients()
        if self.update:
            norm = self.norm()
            c.gradient_norm(norm)
            for p in self.model.parameters():
                p.grad.mul_(min(1.0, 0.3 / (float(norm) + 1e-6)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if hasattr(self.model, "after_step"):
                self.model.after_step()

    def go(self):
        self.build()
        spec = places(self.grid, self.name)
        if self.mean:
            spec["mean_over"] = [*self.data]
            del spec["partial"]["loss:fwd"]
        with anyrank.capture(self.model, self.folder, self.optimizer if self.update else None, spec=spec) as c:
            for step in range(self.steps):
                self.train(c, step)


def run(*args, **options):
    Run(*args, **options).go()
