# SPDX-License-Identifier: Apache-2.0
"""Qwen2, Mistral and GPT-2 as people run them: DDP, FSDP2, parallelize_module and both; right or with one bug. Where it is
run, and which causes are right, cases.py says.
"""

import functools

import families
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import bug, changed, exchanged, itself, of_layers, rewritten
from torch import nn

BATCH, SEQ = 4, 18


def make(name, folder):
    """A small model with random weights, saved for from_pretrained and for anyrank."""
    import transformers
    torch.manual_seed(2)
    shape = dict(vocab_size=144, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64)
    if name == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, tie_word_embeddings=False))
    elif name == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**shape, sliding_window=None))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=144, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.06 + (1 if "norm" in n or ".ln_" in n and n.endswith("weight") else 0))
    model.save_pretrained(folder)


def batch(uneven):
    draw = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 144, (BATCH, SEQ), generator=draw)
    labels = ids.clone()
    if uneven:
        labels[0, 4:], labels[1, 10:] = -100, -100
    return ids, labels


class Run(families.Run):
    """Steps with one group of parameters and torch's own clipping, which the capture sees for itself."""

    def __init__(self, *args, uneven=False, **options):
        super().__init__(*args, **options)
        self.uneven, self.limit, self.make = uneven, 0.5, torch.optim.AdamW
        self.adam = dict(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.5)
        if self.tp > 1:
            from torch.distributed.tensor import Replicate
            from torch.distributed.tensor.parallel import RowwiseParallel
            self.plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}

    def batch(self):
        return batch(self.uneven)

    def make_optimizer(self):
        self.moment("optimizer")
        self.optimizer = self.make(self.model.parameters(), **self.adam)

    def train(self, c):
        self.gradients()
        if self.update or self.steps > 1:
            self.moment("clip")
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
            if not self.moment("renew"):
                self.optimizer.step()
            if not self.moment("zero_grad"):
                self.optimizer.zero_grad()
        self.moment("ended")


def run(name, source, folder, rank=0, dp=1, tp=1, way=None, fault=None, dtype="fp32", **options):
    Run(name, source, folder, rank, dp, tp, way, fault, dtype, **options).go()


# --- what can be wrong with a model, on any number of ranks -----------------------------------------------------------

def eps(r):
    for m in r.model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(m, name, None), float):
                setattr(m, name, 1e-2)


def rotary(r):
    return [r.model.model.rotary_emb]


bug("model",
    rope_scaled=changed(rotary, "inv_freq", lambda r, m: m.inv_freq / 4),
    rope_theta=changed(rotary, "inv_freq", lambda r, m: 500000.0 ** (-torch.arange(len(m.inv_freq)) / len(m.inv_freq))),
    norm_eps=eps, norm_eps_one_rank=lambda r: eps(r) if r.rank == 1 else None,
    softmax_scale_missing=changed(of_layers("self_attn"), "scaling", lambda r, _: 1.0),
    activation_gelu=changed(of_layers("mlp"), "act_fn", lambda r, _: nn.GELU()),
    layers_exchanged=exchanged(lambda r: zip(*(layer.parameters() for layer in r.layers()))),
    weight_not_loaded=rewritten("layers.1.mlp.up_proj", lambda p: torch.randn(
        128, 64, generator=torch.Generator().manual_seed(4)) * 0.02),
    rotary_rows_permuted=rewritten("q_proj.weight k_proj.weight", lambda p:
                                   p.view(-1, 2, 8, 64).transpose(1, 2).reshape(p.shape)),
    untied=changed(lambda r: [r.model.lm_head], "weight", lambda r, m: nn.Parameter(m.weight.detach().clone())),
    kv_exchanged=exchanged(lambda r: [pair for layer in r.layers() for pair in zip(
        layer.self_attn.k_proj.parameters(), layer.self_attn.v_proj.parameters())]),
    gate_up_exchanged=exchanged(lambda r: [(m.gate_proj.weight, m.up_proj.weight) for m in of_layers("mlp")(r)]),
    weight_transposed=rewritten("layers.0.self_attn.q_proj.weight", lambda p: p.t()),
    embedding_shifted=rewritten("embed_tokens wte", lambda p: p.roll(1, 0)),
    head_bf16=lambda r: r.model.lm_head.register_forward_hook(lambda m, a, out: out.bfloat16().float()),
    attention_dropout_left_on=changed(of_layers("self_attn"), "attention_dropout", lambda r, _: 0.1),
    bias_dropped=rewritten("v_proj.bias", torch.zeros_like),
    parameter_frozen=changed(of_layers("input_layernorm.weight"), "requires_grad", lambda r, _: False),
    branch_detached=changed(lambda r: [r.layers()[1].mlp], "forward", lambda r, m: lambda x, right=m.forward: right(x.detach())))


# --- the ways to run it -----------------------------------------------------------------------------------------------

@bug("model")
def weights_differ(r):
    r.ddp = {"init_sync": False}
    if r.rank == 1:
        rewritten("", lambda p: p + torch.randn_like(p) * 0.01)(r)


@bug("model")
def parameter_ignored(r):
    ignored = [n for n, _ in r.model.named_parameters() if "1.mlp." in n and n.endswith("weight")][1:]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(r.model, ignored)


def policy(**dtypes):
    def change(r):
        from torch.distributed.fsdp import MixedPrecisionPolicy
        r.fsdp = {"mp_policy": MixedPrecisionPolicy(**dtypes)}
    return change


bug("model", not_wrapped=changed(itself, "way", lambda r, _: None),
    reduced_in_bf16=policy(reduce_dtype=torch.bfloat16),
    parameters_in_bf16=policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
bug("wrapped", inner_called=changed(itself, "called", lambda r, _: r.model))


@bug("wrapped")
def summed_instead_of_averaged(r):
    for m in [r.model, *r.layers()]:
        m.set_force_sum_reduction_for_comms(True)  # gloo has no other
        m.set_gradient_divide_factor(1.0)


def partial_output(name):
    def change(r):
        from torch.distributed.tensor import Partial
        from torch.distributed.tensor.parallel import RowwiseParallel
        r.plan[name] = RowwiseParallel(output_layouts=Partial())
    return change


bug("plan", row_output_not_reduced=partial_output("model.layers.0.mlp.down_proj"),
    row_attention_output_not_reduced=partial_output("model.layers.1.self_attn.o_proj"))


@bug("wrapped")
def dx_not_reduced(r):
    for m in [m for mlp in of_layers("mlp")(r) for m in (mlp.gate_proj, mlp.up_proj)]:
        m.forward = functools.partial(lambda m, x: F.linear(x, m.weight.to_local()), m)
        m._forward_pre_hooks.clear()
        m._forward_hooks.clear()


@bug("wrapped")
def norm_gradient_local(r):
    def keep_own_part(p):
        """As if the all-reduce over tp were missing: a different part on each rank."""
        local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        local.mul_(0.3 + 0.4 * dist.get_rank())
    r.model.model.norm.weight.register_post_accumulate_grad_hook(keep_own_part)


@bug("wrapped")
def shard_differs(r):
    if r.rank == 1:
        with torch.no_grad():
            p = r.layers()[1].mlp.up_proj.weight.to_local()
            p.copy_(p.flip(0).clone())


# --- a step -----------------------------------------------------------------------------------------------------------

bug("samples", samples_of_rank_0=lambda r, *data: tuple(t.chunk(r.dp)[0] for t in data))


@bug("batch")
def never_synchronised(r):
    r.silent = r.way == "ddp"
    if r.way == "fsdp2":
        r.wrapped.set_requires_gradient_sync(False)


def inputs(**given):
    return lambda r: r.inputs.update({name: made(len(r.ids)) for name, made in given.items()})


def targets(r):
    return float((r.labels[:, 1:] != -100).sum())


bug("batch",
    labels_shifted_twice=changed(itself, "labels", lambda r, _: torch.cat(
        [r.labels[:, 1:], torch.full_like(r.labels[:, :1], -100)], 1)),
    positions_restart=inputs(position_ids=lambda n: (torch.arange(SEQ) % (SEQ // 2))[None].expand(n, -1)),
    positions_from_one=inputs(position_ids=lambda n: (torch.arange(SEQ) + 1)[None].expand(n, -1)),
    mask_missing=inputs(attention_mask=lambda n: torch.zeros(n, 1, SEQ, SEQ)),
    mask_off_by_one=inputs(attention_mask=lambda n: torch.full((SEQ, SEQ), float("-inf")).triu(2).expand(n, 1, -1, -1)),
    last_tokens_masked=inputs(attention_mask=lambda n: (torch.arange(SEQ) >= 3).long()[None].repeat(n, 1)),
    residual_dropout_per_rank=lambda r: torch.manual_seed(r.rank),
    targets_local=lambda r: r.inputs.update(num_items_in_batch=torch.tensor(targets(r))),
    mean_of_means=lambda r: r.inputs.update(num_items_in_batch=torch.tensor(targets(r) * r.micro)))
bug("loss", loss_summed_over_ranks=changed(itself, "loss", lambda r, _: r.loss * r.dp),
    micro_not_divided=changed(itself, "loss", lambda r, _: r.loss * r.micro))
bug("backward", micro_last_alone=lambda r: r.model.zero_grad() if r.m + 1 < r.micro else None)
bug("gradients", reduced_twice=lambda r: [dist.all_reduce(p.grad) for p in r.model.parameters()])
bug("optimizer", lr_doubled=lambda r: r.adam.update(lr=2e-3), weight_decay_missing=lambda r: r.adam.update(weight_decay=0),
    betas_exchanged=lambda r: r.adam.update(betas=(0.95, 0.9)),
    lr_one_rank=lambda r: r.adam.update(lr=2e-3 if r.rank == 1 else 1e-3),
    adam_for_adamw=changed(itself, "make", lambda r, _: torch.optim.Adam))
bug("clip", clip_left_out=changed(itself, "limit", lambda r, _: 1e9),
    clipped_by_value=lambda r: torch.nn.utils.clip_grad_value_(r.model.parameters(), 0.01))
bug("renew", update_lost_one_rank=lambda r: r.rank == 1)
bug("zero_grad", zero_grad_forgotten=lambda r: True)


@bug("ended")
def moments_of_one_rank(r):
    for state in r.optimizer.state.values() if r.rank == 1 else ():
        state["exp_avg"].zero_()
