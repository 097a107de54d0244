# SPDX-License-Identifier: Apache-2.0
"""Three small decoders with mixtures of experts as other people write them, and the grid of ranks that share the experts out.

Tern, after torchtitan: scores by sigmoid, chosen with a bias, stacked experts, rows by all-to-all, weights at home.
Mega, after Megatron: softmax before top-k, an auxiliary loss that rides on the weights, weights sent along and applied
before the second matrix, experts and heads cut over tp, a shared expert.
Mix, after transformers: each rank has all tokens of its expert group and a list with its own experts, masks instead of
rows, and a sum at the end; normalised weights, a shared expert with a gate.

`grid.has(NAME)` is where the run with that mistake leaves the right way.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranks import Through, same
from strangers_run import fill

C = SimpleNamespace(batch=8, seq=12, vocab=64, hidden=32, heads=4, ffn=24, layers=2, experts=8, k=2, alpha=0.4)
IDLE = 5  # the expert of Tern's first layer that no token goes to


# --- the grid ---------------------------------------------------------------------------------------------------------

class Grid:
    """dp times ep times tp ranks, tp innermost."""

    def __init__(self, rank=0, dp=1, ep=1, tp=1, fault=None):
        self.sizes, self.fault = dict(dp=dp, ep=ep, tp=tp), fault
        self.at = dict(dp=rank // (ep * tp), ep=rank // tp % ep, tp=rank % tp)
        self.mesh = None
        if dp * ep * tp > 1:
            from torch.distributed.device_mesh import init_device_mesh
            self.mesh = init_device_mesh("cpu", (dp, ep, tp), mesh_dim_names=("dp", "ep", "tp"))

    def has(self, fault):
        return self.fault == fault

    def sum(self, t, *over):
        t = t.detach().clone().contiguous()
        for dim in over:
            if self.sizes[dim] > 1:
                dist.all_reduce(t, group=self.mesh[dim].get_group())
        return t

    def own(self, t, dim, over):
        return t.chunk(self.sizes[over], dim)[self.at[over]].contiguous()

    def own_experts(self):
        n = C.experts // self.sizes["ep"]
        return range(n * self.at["ep"], n * self.at["ep"] + n)

    def enter(self, x, over):
        """A copy for ranks of which each computes a part: their gradients are summed."""
        return Through.apply(x, same, lambda g: self.sum(g, over))

    def leave(self, y, over):
        return Through.apply(y, lambda t: self.sum(t, over), same)

    def swap(self, x, there, here):
        """An all-to-all over ep: `there` rows to each rank, `here` from each."""
        if self.sizes["ep"] == 1:
            return x
        group = self.mesh["ep"].get_group()

        def go(t, to, of):
            out = t.new_empty(sum(of), *t.shape[1:])
            dist.all_to_all_single(out, t.detach().contiguous(), list(of), list(to), group=group)
            return out
        return Through.apply(x, lambda t: go(t, there, here), lambda g: go(g, here, there))


# --- what all have ----------------------------------------------------------------------------------------------------

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def turn(x):
    """RoPE of [b, heads, s, d]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    cos, sin, (a, b) = angles.cos(), angles.sin(), x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Heads cut over tp."""

    def __init__(self, grid, names):
        super().__init__()
        self.grid, self.names = grid, names
        for name, (a, b) in zip(names, [(1, grid.sizes["tp"])] * 3 + [(grid.sizes["tp"], 1)]):
            setattr(self, name, nn.Linear(C.hidden // a, C.hidden // b, bias=False))

    def forward(self, x):
        b, s, _ = x.shape
        x = self.grid.enter(x, "tp")
        q, k, v, o = (getattr(self, name) for name in self.names)
        q, k, v = (layer(x).view(b, s, -1, C.hidden // C.heads).transpose(1, 2) for layer in (q, k, v))
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.grid.leave(o(y.transpose(1, 2).reshape(b, s, -1)), "tp")


class SwiGLU(nn.Module):
    """A shared expert, or one of a list, cut over tp."""

    def __init__(self, grid, names):
        super().__init__()
        self.grid, self.names, width = grid, names, C.ffn // grid.sizes["tp"]
        for name, sizes in zip(names, [(C.hidden, width), (C.hidden, width), (width, C.hidden)]):
            setattr(self, name, nn.Linear(*sizes, bias=False))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        x = self.grid.enter(x, "tp")
        return self.grid.leave(down(F.silu(gate(x)) * up(x)), "tp")


class Block(nn.Module):
    def __init__(self, attention, moe, names):
        super().__init__()
        self.names = names
        for name, module in zip(names, (Norm(C.hidden), attention, Norm(C.hidden), moe)):
            setattr(self, name, module)

    def forward(self, x):
        norm1, attention, norm2, moe = (getattr(self, name) for name in self.names)
        x = x + attention(norm1(x))
        return x + moe(norm2(x))


# --- rows by all-to-all -----------------------------------------------------------------------------------------------

def by_all_to_all(grid, x, ids, sent, experts):
    """experts(rows, *what was sent along, rows of each of its own experts) of x [tokens, hidden]; ids [tokens, k].

    sent: tensors [tokens, k] that travel with the rows. [tokens, k, hidden]."""
    k, ep = ids.shape[1], grid.sizes["ep"]
    own = C.experts // ep
    home = ids
    if grid.has("experts_dealt_round"):
        home = ids % ep * own + ids // ep  # as if rank i had experts i, i + ep, ..
    order = home.flatten().argsort(stable=True)
    counts = torch.bincount(home.flatten(), minlength=C.experts).view(ep, own)
    arrive = grid.swap(counts.flatten(), [own] * ep, [own] * ep).view(ep, own)
    there, here = counts.sum(1).tolist(), arrive.sum(1).tolist()
    rows = grid.swap(x[order // k], there, here)
    along = [grid.swap(t.flatten() if grid.has("weights_sent_unsorted") else t.flatten()[order], there, here) for t in sent]
    # They come by sender, and are wanted by expert.
    by_expert = torch.arange(own).repeat(ep).repeat_interleave(arrive.flatten()).argsort(stable=True)
    sizes = arrive.sum(0)
    if grid.has("offsets_off_by_one"):
        ends = sizes.cumsum(0) + 1  # the row after an expert's last is given to it as well
        ends[-1] -= 1
        sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.long))
    y = experts(rows[by_expert], *(t[by_expert] for t in along), sizes.tolist())
    if not grid.has("sent_back_by_expert"):
        y = y[by_expert.argsort()]
    y = grid.swap(y, here, there)
    return y[order.argsort()].view(*ids.shape, -1)


def by_masks(_grid, x, ids, _sent, experts):
    """The same on ranks that have all experts: every expert gets every token, and a mask keeps what was chosen."""
    y = experts(x.repeat(C.experts, 1), [len(x)] * C.experts).view(C.experts, *x.shape)
    return torch.einsum("tke,eth->tkh", F.one_hot(ids, C.experts).to(y.dtype), y)


# --- Tern -------------------------------------------------------------------------------------------------------------

class TernRouter(nn.Module):
    def __init__(self, grid, layer):
        super().__init__()
        self.gate = nn.Linear(C.hidden, C.experts, bias=False)
        bias = torch.zeros(C.experts)
        bias[IDLE] = -10.0 if layer == 0 else 0.0
        self.register_buffer("expert_bias", bias)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(self.gate(x.float()))
        ids = torch.topk(scores + self.expert_bias, C.k, sorted=False).indices
        w = scores.gather(1, ids)
        return w / (w.sum(-1, keepdim=True) + 1e-20), ids


class TernExperts(nn.Module):
    workspace = {}

    def __init__(self, grid):
        super().__init__()
        self.grid, n = grid, C.experts // grid.sizes["ep"]
        self.w1, self.w3 = (nn.Parameter(torch.empty(n, C.ffn, C.hidden)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(n, C.hidden, C.ffn))

    def forward(self, x, sizes):
        out, weights = [], (self.w1, self.w2, self.w3)
        if self.grid.has("idle_expert_keeps_workspace"):
            weights = [Through.apply(w, same, functools.partial(self.into_workspace, i, sizes)) for i, w in enumerate(weights)]
        for rows, w1, w2, w3 in zip(x.split(sizes), *weights):
            out.append((F.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T)
        return torch.cat(out)

    def into_workspace(self, which, sizes, grad):
        """The kernel writes the gradients of experts that have rows, into memory that all layers share."""
        memory = self.workspace.setdefault(which, torch.zeros_like(grad))
        for i, n in enumerate(sizes):
            if n:
                memory[i] = grad[i]
        return memory.clone()


class TernMoE(nn.Module):
    def __init__(self, grid, layer):
        super().__init__()
        self.grid, self.router, self.experts = grid, TernRouter(grid, layer), TernExperts(grid)
        self.shared_experts = SwiGLU(grid, ("w1", "w3", "w2"))

    def forward(self, x):
        flat = x.flatten(0, 1)
        w, ids = self.router(flat)
        routed = by_masks if self.grid.has("masks") else by_all_to_all
        if self.grid.has("weights_before_experts"):
            y = by_all_to_all(self.grid, flat, ids, [w], lambda rows, w, sizes: self.experts(rows * w[:, None], sizes)).sum(1)
        else:
            y = (routed(self.grid, flat, ids, [], self.experts) * w[..., None]).sum(1)
        return (self.shared_experts(flat) + y).view_as(x)


class Tern(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.tok_embeddings = nn.Embedding(C.vocab, C.hidden)
        self.layers = nn.ModuleList(Block(Attention(grid, ("wq", "wk", "wv", "wo")), TernMoE(grid, i), (
            "attention_norm", "attention", "ffn_norm", "moe")) for i in range(C.layers))
        self.norm, self.output = Norm(C.hidden), nn.Linear(C.hidden, C.vocab, bias=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


# --- Mega -------------------------------------------------------------------------------------------------------------

class RidingLoss(torch.autograd.Function):
    """Gives x back, and the loss that rides on it a gradient of 1."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(())


class MegaRouter(nn.Module):
    """Softmax, top-k, and Switch's auxiliary loss over the tokens of all ranks, of which each adds its own tokens' part."""

    def __init__(self, grid):
        super().__init__()
        self.grid, self.weight = grid, nn.Parameter(torch.empty(C.experts, C.hidden))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            probs = F.linear(x.float(), self.weight).softmax(-1)
        w, ids = torch.topk(probs, C.k)
        counts = self.grid.sum(torch.bincount(ids.flatten(), minlength=C.experts), "dp", "ep")
        tokens = float(counts.sum()) / C.k
        per_token = len(x) if self.grid.has("auxiliary_by_own_tokens") else tokens
        loss = C.alpha * C.experts / (C.k * tokens * per_token) * (counts * probs.sum(0)).sum()
        if self.grid.has("auxiliary_result_dropped"):
            RidingLoss.apply(w, loss)
            return w, ids
        return RidingLoss.apply(w, loss), ids


class MegaExperts(nn.Module):
    """weight1: columns of gate and up in turn, as GPT-OSS has them, so that one cut goes through both."""

    def __init__(self, grid):
        super().__init__()
        n, width = C.experts // grid.sizes["ep"], C.ffn // grid.sizes["tp"]
        self.grid = grid
        self.weight1 = nn.Parameter(torch.empty(n, C.hidden, 2 * width))
        self.weight2 = nn.Parameter(torch.empty(n, width, C.hidden))

    def forward(self, x, w, sizes):
        x = self.grid.enter(x, "tp")
        if not self.grid.has("router_not_summed_over_tp"):
            w = self.grid.enter(w, "tp")
        out = []
        for rows, w, w1, w2 in zip(x.split(sizes), w.split(sizes), self.weight1, self.weight2):
            both = rows @ w1
            out.append((F.silu(both[:, ::2]) * both[:, 1::2] * w[:, None]) @ w2)
        return self.grid.leave(torch.cat(out), "tp")


class MegaMoE(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.grid, self.router, self.experts = grid, MegaRouter(grid), MegaExperts(grid)
        self.shared_experts = SwiGLU(grid, ("linear_gate", "linear_up", "linear_fc2"))

    def forward(self, x):
        flat = x.flatten(0, 1)
        w, ids = self.router(flat)
        if self.grid.has("weights_sent_without_gradient"):
            w = w.detach() + 0 * w  # the router keeps its auxiliary loss alone
        if self.grid.has("capacity_of_own_rank"):
            w = w * self.within(ids, round(1.5 * C.k * len(flat) / C.experts))
        y = by_all_to_all(self.grid, flat, ids, [w], self.experts)
        slots = range(C.k)[::-1] if self.grid.has("slots_from_the_last") else range(C.k)
        return (sum(y[:, i] for i in slots) + self.shared_experts(flat)).view_as(x)

    @staticmethod
    def within(ids, capacity):
        """1 for the first rows of each expert, 0 for those past its capacity."""
        chosen = F.one_hot(ids.flatten(), C.experts)
        return ((chosen.cumsum(0) * chosen).sum(-1) <= capacity).view_as(ids).float()


class Mega(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.embedding = nn.Embedding(C.vocab, C.hidden)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Block(Attention(grid, ("linear_q", "linear_k", "linear_v", "linear_proj")), MegaMoE(
            grid), ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp")) for _ in range(C.layers))
        self.decoder.final_layernorm = Norm(C.hidden)
        self.output_layer = nn.Linear(C.hidden, C.vocab, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.decoder.layers:
            x = layer(x)
        return self.output_layer(self.decoder.final_layernorm(x))


# --- Mix --------------------------------------------------------------------------------------------------------------

class MixRouter(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.grid, self.weight = grid, nn.Parameter(torch.empty(C.experts, C.hidden))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(x.float(), self.weight)
            if self.grid.has("router_in_bf16"):
                logits = F.linear(x.bfloat16(), self.weight.bfloat16()).float()
            probs = logits.softmax(-1)
        w, ids = torch.topk(probs, C.k)
        if not self.grid.has("weights_not_normalised"):
            w = w / w.sum(-1, keepdim=True)
        return w, ids


class MixMoE(nn.Module):
    def __init__(self, grid):
        super().__init__()
        names = ("gate_proj", "up_proj", "down_proj")
        self.grid, self.gate = grid, MixRouter(grid)
        own = grid.own_experts()
        self.experts = nn.ModuleList(SwiGLU(grid, names) if j in own else None for j in range(C.experts))
        self.shared_expert, self.shared_expert_gate = SwiGLU(grid, names), nn.Linear(C.hidden, 1, bias=False)

    def forward(self, x):
        flat, grid = x.flatten(0, 1), self.grid
        w, ids = self.gate(flat)
        rows = flat if grid.has("gradient_of_own_experts") else grid.enter(flat, "ep")
        w, y = grid.enter(w, "ep"), torch.zeros_like(flat)
        for j in grid.own_experts():
            tokens, slot = torch.where(ids == j)
            part = self.experts[j](rows[tokens]) * w[tokens, slot][:, None]
            y = y.index_add(0, tokens, part.to(y.dtype))
        shared = torch.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        if grid.has("shared_expert_on_each_rank"):
            return grid.leave(y + shared, "ep").view_as(x)
        return (grid.leave(y, "ep") + shared).view_as(x)


class Mix(nn.Module):
    def __init__(self, grid, moe=lambda grid, _layer: MixMoE(grid)):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(C.vocab, C.hidden)
        self.model.layers = nn.ModuleList(Block(Attention(grid, ("q_proj", "k_proj", "v_proj", "o_proj")), moe(grid, i), (
            "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")) for i in range(C.layers))
        self.model.norm, self.lm_head = Norm(C.hidden), nn.Linear(C.hidden, C.vocab, bias=False)

    def forward(self, ids):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


# --- where things are -------------------------------------------------------------------------------------------------

MODELS = {"tern": Tern, "mega": Mega, "mix": Mix}  # and deep_models.py adds its own
CUT = {"weight1": 2, "weight2": 1, "linear_q": 0, "linear_k": 0, "linear_v": 0, "linear_gate": 0, "linear_up": 0,
       "linear_proj": 1, "linear_fc2": 1}  # over tp


@functools.cache
def weights_of(name):
    return fill(MODELS[name](Grid()))


def cuts_of(name, model):
    """Along which dimension a parameter is cut over each dimension of the grid; None: not. Mix has a list of experts."""
    tp = next((dim for word, dim in CUT.items() if word in name.split(".")), None)
    return {"ep": None if ".experts." not in name else 0 if model != "mix" else "list", "tp": tp}


def part_of(grid, name, model):
    """This rank's part of a parameter."""
    part = weights_of(model)[name]
    for over, dim in cuts_of(name, model).items():
        if dim == 0 and over == "ep" and grid.has("first_experts_on_each_rank"):
            part = part.chunk(grid.sizes["ep"])[0]
        elif dim is not None and dim != "list":
            part = grid.own(part, dim, over)
    return part


def places(grid, model):
    """The capture's spec: what is where, and what is still to be summed."""
    tokens = {"dp": 0} if model == "mix" else {"dp": 0, "ep": 0}
    shard = {"*.experts.w1:*": {"ep": 0}, "*.experts.w2:*": {"ep": 0}, "*.experts.w3:*": {"ep": 0}} if model in ("tern", "deep") else {}
    if model == "mega":
        shard = {"*.experts.weight1:*": {"ep": 0, "tp": 2}, "*.experts.weight2:*": {"ep": 0, "tp": 1}}
    partial = {"loss:fwd": list(tokens)}
    if grid.sizes["tp"] > 1:
        for word, dim in list(CUT.items())[2:]:
            shard[f"*.{word}.weight:*"] = {"tp": dim}
            shard[f"*.{word}:{'bwd' if dim else 'fwd'}"] = {**tokens, "tp": -1}
            partial[f"*.{word}:{'fwd' if dim else 'bwd'}"] = "tp"
    shard.update({"input.*": tokens, "*:fwd": tokens, "*:bwd": tokens})
    return {"mesh": grid.sizes, "shard": shard, "partial": partial}
