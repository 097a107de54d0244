# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a step of strangers_run.py, by name; strangers_cases.py says what is true of each."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranks import Through
from strangers import BATCH, C, SEQ
from strangers_run import moment


def named(r, *parts):
    return [p for n, p in r.model.named_parameters() if any(part in n for part in parts)]


# --- ranks that share a sequence --------------------------------------------------------------------------------------

@moment("grid")
def kv_gathered_without_gradient(r):
    g = r.grid
    g.all_tokens = lambda x: Through.apply(x, lambda t: g.gather(t, 1, "cp"), lambda grad: g.own(grad, 1, "cp"))


@moment("tokens")
def positions_of_own_part(r, ids, labels, positions, documents):
    n = SEQ // r.cp
    return (*(r.grid.tokens(t).contiguous() for t in (ids, labels)), torch.arange(n).expand(len(ids), -1), r.grid.tokens(documents))


@moment("model")
def mask_of_contiguous_parts(r):
    n = SEQ // r.cp
    for block in r.blocks():
        block.attn.allowed = lambda here, there: (torch.arange(SEQ) <= r.grid.at["cp"] * n + torch.arange(n)[:, None]).expand(
            len(here[0]), -1, -1)


@moment("reduce")
def reduced_over_dp_alone(r):
    for p in r.model.parameters():
        p.grad = r.grid.sum(p.grad, "dp")
    return True


@moment("gradients")
def averaged_over_context(r):
    for p in r.model.parameters():
        p.grad /= r.cp


@moment("criterion")
def mean_of_own_tokens(r):
    def losses(logits, labels):
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / r.cp
    r.criterion = losses


@moment("tokens")
def shifted_after_the_cut(r, *data):
    ids, labels, positions, documents = (r.grid.tokens(t).contiguous() for t in data)
    labels = torch.cat([labels[:, :-1], torch.full_like(labels[:, :1], -100)], 1)
    r.targets = int(r.grid.sum(r.grid.sum((labels != -100).sum(), "cp"), "dp"))
    return ids, labels, positions, documents


@moment("model")
def ring_outputs_averaged(r):
    def join(outputs, sums):
        seen = (torch.stack(sums) > -1e8).float()
        return (torch.stack(outputs) * (seen / seen.sum(0))[..., None]).sum(0)
    for block in r.blocks():
        block.attn.join = join


@moment("model")
def ring_sees_the_future(r):
    for block in r.blocks():
        attn = block.attn
        def allowed(here, there, right=attn.allowed):
            return right(here, there) if here is there else torch.ones_like(right(here, there))
        attn.allowed = allowed


# --- ranks that share layers ------------------------------------------------------------------------------------------

@moment("grid")
def logits_gathered_with_sum(r):
    g = r.grid
    g.gather_logits = lambda x: Through.apply(x, lambda t: g.gather(t, -1, "tp"), lambda d: g.own(g.sum(d, "tp"), -1, "tp"))


@moment("grid")
def all_reduce_that_sums_backward(r):
    g = r.grid
    g.leave = lambda y: Through.apply(y, lambda t: g.sum(t, "tp"), lambda d: g.sum(d, "tp"))


@moment("wrapped")
def slopes_of_first_heads(r):
    for block in r.blocks():
        block.attn.slopes = lambda heads: 2.0 ** (-8.0 * torch.arange(1, heads + 1) / C.heads)


@moment("wrapped")
def kv_gradient_of_own_heads(r):
    for block in r.blocks():
        block.attn.for_own_heads = lambda kv: kv


@moment("part")
def first_kv_head_on_all(r, name, full, dim):
    return full.chunk(r.tp, 0)[0] if ".wk." in name or ".wv." in name else None


@moment("grid")
def cut_in_turn(r):
    g, n = r.grid, r.tp
    def back(grad):
        return torch.stack(g.gather(grad, 1, "tp").chunk(n, 1), 2).flatten(1, 2)
    g.scatter_tokens = lambda x: Through.apply(x, lambda t: t[:, g.at["tp"]::n].contiguous(), back)


@moment("gradients")
def embedding_gradient_summed(r):
    r.model.tok_emb.weight.grad = r.grid.sum(r.model.tok_emb.weight.grad, "tp")


@moment("gradients")
def averaged_over_world(r):
    for p in r.model.parameters():
        p.grad = r.grid.sum(p.grad, "tp") / r.tp


@moment("gradients")
def gain_gradients_averaged(r):
    for p in named(r, "q_norm", "k_norm"):
        p.grad /= r.tp


@moment("reduce")
def ff_norm_of_own_tokens(r):
    for name, p in r.model.named_parameters():
        if "ff_norm" not in name:
            r.reduce_one(name, p)
    return True


# --- ranks that share samples -----------------------------------------------------------------------------------------

@moment("ddp")
def ddp_in_pairs(r):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    r.bucket = dict(process_group=pairs[r.rank // 2])


@moment("spec")
def ddp_in_pairs(r):  # noqa: F811
    r.spec.update(mesh={"dp_replicate": 2, "dp_shard": 2}, mean_over=["dp_replicate", "dp_shard"])


@moment("samples")
def data_by_global_rank(r, *data):
    return tuple(t.chunk(r.dp)[r.rank % r.dp] for t in data)


@moment("root")
def root_not_wrapped(r):
    return True


@moment("share")
def broadcast_from_first(r):
    for p in r.model.parameters():
        dist.broadcast(p.data, 0)
    return True


@moment("share")
def sent_in_bf16(r):
    for p in r.model.parameters():
        t = p.data.bfloat16()
        dist.broadcast(t, r.owner[p])
        p.data.copy_(t)
    return True


@moment("clip")
def norms_of_ranks_added(r, c):
    own = torch.stack([p.grad.norm() for p in r.model.parameters() if r.owner[p] == r.rank]).norm()
    norm = r.grid.sum(own, "dp")
    if c is not None:
        c.gradients()
        c.gradient_norm(norm)
    for p in r.model.parameters():
        p.grad.mul_(min(1.0, r.limit / (float(norm) + 1e-6)))
    return True


@moment("gradients")
def averaged_by_hand_too(r):
    for p in r.model.parameters():
        p.grad /= r.dp


@moment("loss")
def only_last_divided(r):
    if r.m + 1 < r.micro:
        r.loss = r.loss * r.micro


# --- the loss and what it is of ---------------------------------------------------------------------------------------

@moment("data")
def padding_counts(r, ids, labels, positions, documents):
    return ids, labels.where(labels != -100, 0), positions, documents


@moment("data")
def labels_of_next_sample(r, ids, labels, positions, documents):
    return ids, labels.roll(-1, 0), positions, documents


@moment("data")
def answers_ignored(r, ids, labels, positions, documents):
    every = torch.cat([ids[:, 1:], torch.full((BATCH, 1), -100)], 1)
    return ids, every.where(labels == -100, -100), positions, documents


@moment("criterion")
def z_loss_left_out(r):
    r.z_loss = 0.0


@moment("criterion")
def smoothing_left_on(r):
    r.smoothing = 0.1


@moment("criterion")
def loss_of_bf16_logits(r):
    def losses(logits, labels):
        with torch.autocast("cpu", enabled=False):
            each_one = F.nll_loss(logits.bfloat16().log_softmax(-1).flatten(0, 1), labels.flatten(), reduction="none")
        return each_one.sum() / r.targets
    r.criterion = losses


@moment("criterion")
def sample_means(r):
    def losses(logits, labels):
        each_one = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").sum(1)
        return (each_one / (labels != -100).sum(1)).sum() / BATCH
    r.criterion = losses


@moment("batch")
def documents_not_kept_apart(r, ids, labels, positions, documents):
    return ids, labels, positions, torch.zeros_like(documents)


@moment("batch")
def positions_run_on(r, ids, labels, positions, documents):
    return ids, labels, torch.arange(SEQ).expand_as(positions), documents


@moment("batch")
def places_clamped(r, ids, labels, positions, documents):
    return ids, labels, positions.clamp(max=11), documents


# --- what is loaded ---------------------------------------------------------------------------------------------------

@moment("weights")
def norm_biases_at_init(r, weights):
    for name in weights:
        if "norm" in name and name.endswith("bias"):
            weights[name] = torch.zeros_like(weights[name])


@moment("weights")
def head_from_embedding(r, weights):
    weights["unembed.weight"] = weights["tok_emb.weight"].clone()


@moment("weights")
def positions_at_init(r, weights):
    weights["pos_emb.weight"] = torch.randn(C.positions, C.hidden, generator=torch.Generator().manual_seed(99)) * 0.02


@moment("loaded")
def untied_after_loading(r):
    m = r.model
    m.lm_head = nn.Parameter(m.tok_emb.weight.detach().clone())
    m.head = lambda: m.lm_head
    r.optimizer.add_param_group({"params": [m.lm_head]})
    r.schedule.step = lambda: None


@moment("loaded")
def random_state_not_loaded(r):
    torch.manual_seed(1)


@moment("saved")
def moments_lost(r, state):
    state["optimizer"]["state"] = {}


@moment("saved")
def steps_forgotten(r, state):
    for one in state["optimizer"]["state"].values():
        one["step"].zero_()


@moment("saved")
def moments_of_other_parameters(r, state):
    """As if the list of parameters had another order when they were saved."""
    order = [p for group in r.optimizer.param_groups for p in group["params"]]
    at = {name: i for name, p in r.model.named_parameters() for i, q in enumerate(order) if q is p}
    moments = state["optimizer"]["state"]
    for i in range(C.layers):
        a, b = at[f"blocks.{i}.attn.wq.weight"], at[f"blocks.{i}.attn.wo.weight"]
        moments[a], moments[b] = moments[b], moments[a]


@moment("loaded")
def schedule_not_loaded(r):
    for group in r.optimizer.param_groups:
        group["lr"] = r.lr / r.warmup


# --- the optimizer ----------------------------------------------------------------------------------------------------

class Own(torch.optim.AdamW):
    """AdamW as someone writes it down again; `wrong` says what is wrong with it."""

    wrong = ""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), lr, eps = group["betas"], group["lr"], group["eps"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                s["step"] += 1
                s["exp_avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
                s["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                c1, c2 = (1 - b ** float(s["step"]) if self.wrong != "correction" else 1.0 for b in (b1, b2))
                v = s["exp_avg_sq"] / c2
                p.mul_(1 - group["weight_decay"] * (1.0 if self.wrong == "decay" else lr))
                p.sub_(lr * (s["exp_avg"] / c1) / ((v + 1e-4).sqrt() if self.wrong == "eps" else v.sqrt() + eps))


def own(wrong):
    return type("Own", (Own,), {"wrong": wrong})


@moment("optimizer")
def decay_not_times_rate(r):
    r.own_optimizer = own("decay")


@moment("optimizer")
def epsilon_inside_root(r):
    r.own_optimizer = own("eps")


@moment("optimizer")
def bias_not_corrected(r):
    r.own_optimizer = own("correction")


@moment("optimizer")
def nesterov(r):
    r.hyper = {"nesterov": True}


@moment("early")
def head_made_anew(r):
    r.old = list(r.model.parameters())
    r.model.unembed.weight = nn.Parameter(r.model.unembed.weight.detach().clone())


@moment("optimizer")
def head_made_anew(r):  # noqa: F811
    r.groups = [{"params": [p for p in r.old if (p.dim() > 1) == decayed], "weight_decay": r.decay * decayed}
                for decayed in (True, False)]


@moment("made")
def schedule_a_step_ahead(r):
    r.schedule.step()


@moment("updated")
def moments_in_bf16(r):
    for state in r.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())


@moment("unscale")
def unscaled_twice(r):
    for p in r.model.parameters():
        p.grad.div_(r.scale)


@moment("unscale")
def clipped_before_unscaled(r):
    torch.nn.utils.clip_grad_norm_(r.model.parameters(), r.limit)


@moment("clip")
def clipped_before_unscaled(r, c):  # noqa: F811
    return True


@moment("clip")
def each_parameter_clipped(r, c):
    for p in r.model.parameters():
        torch.nn.utils.clip_grad_norm_(p, r.limit / 4)
    return True


@moment("zero_grad")
def one_group_zeroed(r):
    for p in r.model.parameters():
        if p.dim() > 1:
            p.grad = None
    return True
