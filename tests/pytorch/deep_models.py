# SPDX-License-Identifier: Apache-2.0
"""Deep, after DeepSeek-V3: scores by sigmoid, chosen with a bias from the best groups, shares of the scores times a factor,
rows by all-to-all, a shared expert, and a bias that moves after each step by the counts of the whole batch.

`grid.has(NAME)` is where the run with that mistake leaves the right way.
"""

import torch
import torch.nn.functional as F
from torch import nn

from experts_models import C, Mix, SwiGLU, TernExperts, by_all_to_all
from ranks import Through, same

GROUPS, KEPT, FACTOR, MOVE = 4, 2, 2.5, 0.05


class DeepRouter(nn.Module):
    def __init__(self, grid, layer):
        super().__init__()
        self.grid, self.weight = grid, nn.Parameter(torch.empty(C.experts, C.hidden))
        draw = torch.Generator().manual_seed(90 + layer)
        self.register_buffer("e_score_correction_bias", 0.2 * torch.randn(C.experts, generator=draw) - 0.6)
        self.counts = torch.zeros(C.experts)

    def choose(self, choice):
        grid = self.grid
        groups = choice.view(-1, GROUPS, C.experts // GROUPS)
        if grid.has("groups_dealt_round"):  # group i has the experts i, i + 4, ..
            groups = choice.view(-1, C.experts // GROUPS, GROUPS).transpose(1, 2)
        ranks = groups.amax(-1) if grid.has("groups_by_best") else groups.topk(2, -1).values.sum(-1)
        keep = torch.zeros_like(ranks).scatter(1, ranks.topk(KEPT, sorted=False).indices, 1.0).bool()
        keep = keep[..., None].expand_as(groups)
        if grid.has("groups_dealt_round"):
            keep = keep.transpose(1, 2)
        if grid.has("groups_not_masked"):
            keep = torch.ones_like(keep)
        masked = 0.0 if grid.has("masked_by_zero") else float("-inf")
        return choice.masked_fill(~keep.reshape(choice.shape), masked).topk(C.k, sorted=False).indices

    def forward(self, x):
        grid, bias = self.grid, self.e_score_correction_bias
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(x.float(), self.weight)
            scores = logits.softmax(-1) if grid.has("softmax_scores") else logits.sigmoid()
        choice = torch.sigmoid(logits + bias) if grid.has("bias_before_sigmoid") else scores + bias
        with torch.no_grad():
            ids = self.choose(choice.detach())
            self.counts += torch.bincount(ids.flatten(), minlength=C.experts)
        w = (scores + bias if grid.has("bias_in_weights") else scores).gather(1, ids)
        w = w / ((scores.sum(-1, keepdim=True) if grid.has("shares_of_all") else w.sum(-1, keepdim=True)) + 1e-20)
        if grid.has("factor_left_out"):
            return w, ids
        if grid.has("factor_not_in_gradient"):
            return Through.apply(w, lambda t: t * FACTOR, same), ids
        return w * FACTOR, ids

    def update(self):
        """After the optimizer's step."""
        over = {"counts_of_own_rank": (), "counts_over_ep_alone": ("ep",)}.get(self.grid.fault, ("dp", "ep"))
        counts = self.grid.sum(self.counts, *over)
        move = MOVE * torch.sign(counts.mean() - counts)
        self.e_score_correction_bias += -move if self.grid.has("bias_moves_to_the_full") else move
        self.counts.zero_()


class DeepMoE(nn.Module):
    def __init__(self, grid, layer):
        super().__init__()
        self.grid, self.gate, self.experts = grid, DeepRouter(grid, layer), TernExperts(grid)
        self.shared_experts = SwiGLU(grid, ("gate_proj", "up_proj", "down_proj"))

    def forward(self, x):
        flat = x.flatten(0, 1)
        w, ids = self.gate(flat)
        y = (by_all_to_all(self.grid, flat, ids, [], self.experts) * w[..., None]).sum(1)
        if self.grid.has("factor_twice"):
            y = y * FACTOR
        shared = self.shared_experts(flat)
        return (y + (shared * FACTOR if self.grid.has("factor_on_shared") else shared)).view_as(x)


class Deep(Mix):
    def __init__(self, grid):
        super().__init__(grid, DeepMoE)

    def after_step(self):
        for layer in self.model.layers:
            layer.mlp.gate.update()
