# SPDX-License-Identifier: Apache-2.0
"""The steps of strangers_run.py with the models of blind2_models.py, other batches in each step, and stages of a pipeline."""

import functools

import torch
import torch.distributed as dist

from blind2_models import BATCH, D, HUGGING_FACE2, MODELS2, SEQ, Grid2, cut_of, of_own_part, places, talk
from strangers import MODELS
from strangers_run import HUGGING_FACE, Run, fill

MODELS.update(MODELS2)
HUGGING_FACE.update(HUGGING_FACE2)


@functools.cache
def weights_of(name):
    return fill(MODELS2[name](Grid2()))


def batch(packed, left, step):
    """As strangers_run.batch, of another shape, and other ids in each step; left: samples are filled up on the left."""
    draw = torch.Generator().manual_seed(40 + step)
    ids = torch.randint(1, D.vocab, (BATCH, SEQ), generator=draw)
    labels = torch.cat([ids[:, 1:], torch.full((BATCH, 1), -100)], 1)
    positions, documents = torch.arange(SEQ).expand(BATCH, -1).clone(), torch.zeros(BATCH, SEQ, dtype=torch.long)
    for i in range(BATCH):
        if packed:
            for cut in (4 + i, 13 + i % 3):
                positions[i, cut:] = torch.arange(SEQ - cut)
                documents[i, cut:] += 1
                labels[i, cut - 1] = -100
        elif left:
            pad = (0, 2, 5, 1, 3, 4)[i]
            ids[i, :pad], labels[i, :pad], documents[i, :pad] = 0, -100, 1
            positions[i] = (positions[i] - pad).clamp(min=0)
        else:
            labels[i, :1 + 2 * (i % 3)] = -100  # a prompt
            labels[i, 14 + i:] = -100  # padding
    return ids, labels, positions, documents


class Run2(Run):
    """pp: blocks are cut in stages. ulysses: tokens and heads are exchanged around attention. left: filled up on the left."""

    def __init__(self, name, folder, rank=0, pp=1, ulysses=False, left=False, **options):
        super().__init__(name, folder, rank if pp == 1 else 0, **options)
        self.pp, self.left, self.rank = pp, left, rank
        self.hand = name in MODELS2
        self.grid = Grid2(rank, pp, ulysses, dp=self.dp, cp=self.cp, tp=self.tp, sp=self.grid.sp, zigzag=self.grid.zigzag,
                          ring=self.grid.ring)
        if pp > 1:
            self.spec["mesh"] = {"pp": pp}

    def build(self):
        if not self.hand:
            return super().build()
        torch.manual_seed(1)
        self.moment("grid")
        self.model = MODELS2[self.name](self.grid, *((self.dropout,) if self.name == "quarry" else ()))
        weights = dict(weights_of(self.name))
        self.moment("weights", weights)
        cut = self.way == "hand" and self.tp > 1
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                dim, full = cut_of(name, self.name) if cut else None, weights[name]
                part = self.moment("part", name, full, dim)
                if part is None and dim == "halves":
                    part = torch.cat([self.grid.own(t, 0, "tp") for t in full.chunk(2)])
                p.copy_(part if part is not None else full if dim is None else self.grid.own(full, dim, "tp"))
        if self.pp > 1:
            self.moment("stages")
            self.model.keep_own_stage()

    def place(self):
        if self.way in ("ddp", "fsdp2", "zero"):
            self.spec["mean_over"] = "dp"
        if self.way == "hand":
            self.spec.update(places(self.grid, self.name))
        self.moment("spec")

    def samples(self):
        data = batch(self.packed, self.left, self.step)
        data = self.moment("data", *data) or data
        self.targets = int((data[1] != -100).sum())
        data = self.moment("samples", *data) or tuple(t.chunk(self.dp)[self.grid.at["dp"]] for t in data)
        if self.cp > 1:
            data = self.moment("tokens", *data) or tuple(self.grid.tokens(t).contiguous() for t in data)
        return data

    def train(self, c):
        if self.pp == 1:
            return super().train(c)
        data = self.samples()
        for self.m, (ids, labels, positions, documents) in enumerate(zip(*(t.chunk(self.micro) for t in data))):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16"):
                if self.grid.stage == 0:
                    hidden = self.wrapped(ids, positions, documents).hidden
                    talk(hidden.detach().contiguous(), 1, True)
                else:
                    hidden = talk(torch.empty(len(ids), SEQ, D.hidden), 0, False)
                    changed = self.moment("received", hidden)
                    hidden = (hidden if changed is None else changed).requires_grad_(True)
                    positions, documents = self.moment("places", positions, documents) or (positions, documents)
                    self.loss = self.criterion(self.wrapped(hidden, positions, documents), labels) * self.scale
            if self.grid.stage == 0:
                gradient = talk(torch.empty_like(hidden), 1, False)
                changed = self.moment("returned", gradient)
                hidden.backward(gradient if changed is None else changed)
            else:
                self.loss.backward()
                talk(hidden.grad, 0, True)
        if not self.moment("reduce"):
            table = self.model.embed.weight
            dist.all_reduce(table.grad)
        self.moment("gradients")
        if self.update:
            self.renew(c)
        elif c is not None:
            c.gradients()

    def reduce_one(self, name, p):
        if self.tp > 1 and of_own_part(name, self.name, self.grid):
            p.grad = self.grid.sum(p.grad, "tp")
        p.grad = self.grid.sum(self.grid.sum(p.grad, "cp"), "dp")

    def renew(self, c):
        if self.pp == 1:
            return super().renew(c)
        squares = self.moment("squares")
        if squares is None:
            own = [p.grad for n, p in self.model.named_parameters() if n != "embed.weight" or self.grid.stage == 0]
            squares = sum(g.square().sum() for g in own)
            dist.all_reduce(squares)
        norm = squares.sqrt()
        if c is not None:
            c.gradients()
            c.gradient_norm(norm)
        for p in self.model.parameters():
            p.grad.mul_(min(1.0, self.limit / (float(norm) + 1e-6)))
        self.optimizer.step()
        self.model.zero_grad()


def run(*args, **options):
    Run2(*args, **options).go()
