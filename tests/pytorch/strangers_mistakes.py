# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a step of strangers_run.py, by name; strangers_cases.py says what is true of each."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranks import Through
from strangers import BATCH, C, SEQ
from strangers_run import at, attentions, changes, clip_by, grid, itself, moment, of_blocks, parameters, reduced_only


# --- ranks that share a sequence --------------------------------------------------------------------------------------

changes("grid", grid, "all_tokens",
    kv_gathered_without_gradient=lambda r, g: lambda x:
        Through.apply(x, lambda t: g.gather(t, 1, "cp"), lambda grad: g.own(grad, 1, "cp")))
at("tokens",
   positions_of_own_part=lambda r, ids, labels, positions, documents: (
       r.grid.tokens(ids).contiguous(), r.grid.tokens(labels).contiguous(), torch.arange(SEQ // r.cp).expand(len(ids), -1),
       r.grid.tokens(documents)))
changes("model", attentions, "allowed",
    mask_of_contiguous_parts=lambda r, _: lambda here, there: (
        torch.arange(SEQ) <= r.grid.at["cp"] * (SEQ // r.cp) + torch.arange(SEQ // r.cp)[:, None]).expand(len(here[0]), -1, -1),
    ring_sees_the_future=lambda r, attn: lambda here, there, right=attn.allowed:
        right(here, there) if here is there else torch.ones_like(right(here, there)))


@moment("reduce")
def reduced_over_dp_alone(r):
    for p in r.model.parameters():
        p.grad = r.grid.sum(p.grad, "dp")
    return True


changes("gradients", parameters, "grad", averaged_over_context=lambda r, p: p.grad / r.cp)
changes("criterion", itself, "criterion",
    mean_of_own_tokens=lambda r, _: lambda logits, labels:
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / r.cp)


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


# --- ranks that share layers ------------------------------------------------------------------------------------------

changes("grid", grid, "gather_logits",
    logits_gathered_with_sum=lambda r, g: lambda x:
        Through.apply(x, lambda t: g.gather(t, -1, "tp"), lambda d: g.own(g.sum(d, "tp"), -1, "tp")))
changes("grid", grid, "leave",
    all_reduce_that_sums_backward=lambda r, g: lambda y: Through.apply(y, lambda t: g.sum(t, "tp"), lambda d: g.sum(d, "tp")))
changes("wrapped", of_blocks("attn"), "slopes",
    slopes_of_first_heads=lambda r, _: lambda heads: 2.0 ** (-8.0 * torch.arange(1, heads + 1) / C.heads))
changes("wrapped", of_blocks("attn"), "for_own_heads", kv_gradient_of_own_heads=lambda r, _: lambda kv: kv)
at("part",
   first_kv_head_on_all=lambda r, name, full, dim: full.chunk(r.tp, 0)[0] if ".wk." in name or ".wv." in name else None)
changes("grid", grid, "scatter_tokens",
    cut_in_turn=lambda r, g: lambda x:
        Through.apply(x, lambda t: t[:, g.at["tp"]::r.tp].contiguous(),
                      lambda d: torch.stack(g.gather(d, 1, "tp").chunk(r.tp, 1), 2).flatten(1, 2)))
changes("gradients", lambda r: [r.model.tok_emb.weight], "grad",
    embedding_gradient_summed=lambda r, _: r.grid.sum(r.model.tok_emb.weight.grad, "tp"))
changes("gradients", parameters, "grad", averaged_over_world=lambda r, p: r.grid.sum(p.grad, "tp") / r.tp)
changes("gradients", lambda r: parameters(r, "q_norm", "k_norm"), "grad", gain_gradients_averaged=lambda r, p: p.grad / r.tp)
reduced_only(ff_norm_of_own_tokens=lambda name: "ff_norm" not in name)

# --- ranks that share samples -----------------------------------------------------------------------------------------

@moment("ddp")
def ddp_in_pairs(r):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    r.bucket = dict(process_group=pairs[r.rank // 2])


at("spec",
   ddp_in_pairs=lambda r: r.spec.update(mesh={"dp_replicate": 2, "dp_shard": 2}, mean_over=["dp_replicate", "dp_shard"]))
at("samples", data_by_global_rank=lambda r, *data: tuple(t.chunk(r.dp)[r.rank % r.dp] for t in data))
at("root", root_not_wrapped=lambda r: True)


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
    return clip_by(r, c, r.grid.sum(own, "dp"))


changes("gradients", parameters, "grad", averaged_by_hand_too=lambda r, p: p.grad / r.dp)
changes("loss", itself, "loss", only_last_divided=lambda r, _: r.loss * (r.micro if r.m + 1 < r.micro else 1))


# --- the loss and what it is of ---------------------------------------------------------------------------------------

at("data",
   padding_counts=lambda r, ids, labels, positions, documents: (ids, labels.where(labels != -100, 0), positions, documents),
   labels_of_next_sample=lambda r, ids, labels, positions, documents: (ids, labels.roll(-1, 0), positions, documents))
at("data",
   answers_ignored=lambda r, ids, labels, positions, documents: (
       ids, torch.cat([ids[:, 1:], torch.full((BATCH, 1), -100)], 1).where(labels == -100, -100), positions, documents))
changes("criterion", itself, "z_loss", z_loss_left_out=lambda r, _: 0.0)
changes("criterion", itself, "smoothing", smoothing_left_on=lambda r, _: 0.1)


@moment("criterion")
def loss_of_bf16_logits(r):
    def losses(logits, labels):
        with torch.autocast("cpu", enabled=False):
            each_one = F.nll_loss(logits.bfloat16().log_softmax(-1).flatten(0, 1), labels.flatten(), reduction="none")
        return each_one.sum() / r.targets
    r.criterion = losses


changes("criterion", itself, "criterion",
    sample_means=lambda r, _: lambda logits, labels: (
        F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").sum(1) / (labels != -100).sum(1)).sum() / BATCH)
at("batch",
   documents_not_kept_apart=lambda r, ids, labels, positions, documents: (ids, labels, positions, torch.zeros_like(documents)),
   positions_run_on=lambda r, ids, labels, positions, documents:
       (ids, labels, torch.arange(SEQ).expand_as(positions), documents),
   places_clamped=lambda r, ids, labels, positions, documents: (ids, labels, positions.clamp(max=11), documents))

# --- what is loaded ---------------------------------------------------------------------------------------------------

at("weights",
   norm_biases_at_init=lambda r, weights: weights.update(
       {name: torch.zeros_like(w) for name, w in weights.items() if "norm" in name and name.endswith("bias")}),
   head_from_embedding=lambda r, weights: weights.update({"unembed.weight": weights["tok_emb.weight"].clone()}),
   positions_at_init=lambda r, weights: weights.update({"pos_emb.weight": torch.randn(
       C.positions, C.hidden, generator=torch.Generator().manual_seed(99)) * 0.02}))


@moment("loaded")
def untied_after_loading(r):
    m = r.model
    m.lm_head = nn.Parameter(m.tok_emb.weight.detach().clone())
    m.head = lambda: m.lm_head
    r.optimizer.add_param_group({"params": [m.lm_head]})
    r.schedule.step = lambda: None


at("loaded", random_state_not_loaded=lambda r: torch.manual_seed(1))
at("saved", moments_lost=lambda r, state: state["optimizer"].update(state={}))


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


at("loaded", schedule_not_loaded=lambda r: [group.update(lr=r.lr / r.warmup) for group in r.optimizer.param_groups])


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


changes("optimizer", itself, "own_optimizer",
    decay_not_times_rate=lambda r, _: own("decay"),
    epsilon_inside_root=lambda r, _: own("eps"),
    bias_not_corrected=lambda r, _: own("correction"))
changes("optimizer", itself, "hyper", nesterov=lambda r, _: {"nesterov": True})


@moment("early")
def head_made_anew(r):
    r.old = list(r.model.parameters())
    r.model.unembed.weight = nn.Parameter(r.model.unembed.weight.detach().clone())


changes("optimizer", itself, "groups",
    head_made_anew=lambda r, _: [{"params": [p for p in r.old if (p.dim() > 1) == decayed], "weight_decay": r.decay * decayed}
                                 for decayed in (True, False)])
at("made", schedule_a_step_ahead=lambda r: r.schedule.step())


@moment("updated")
def moments_in_bf16(r):
    for state in r.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())


changes("unscale", parameters, "grad", unscaled_twice=lambda r, p: p.grad / r.scale)
at("unscale",
   clipped_before_unscaled=lambda r: torch.nn.utils.clip_grad_norm_(r.model.parameters(), r.limit) is None)
at("clip", clipped_before_unscaled=lambda r, c: True)


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
