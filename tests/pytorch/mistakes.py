# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a model of families.py, with a training step of it, and with how it is split."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from families import SEQ, Run, bug, changed, exchanged, itself, of_layers, rewritten

# --- what is wrong with a model ---------------------------------------------------------------------------------------

bug("model", ("qwen3 ddp 2", "norm_missing | other_module other_tensor norm_statistic row_statistic norm_gain"),
    head_norm_skipped=changed(of_layers("self_attn.q_norm"), "forward", lambda r, _: lambda x: x))
bug("model", ("qwen3 fsdp2 2", "norm_statistic row_statistic"),
    head_norm_over_all_heads=changed(of_layers("self_attn.k_norm"), "forward", lambda r, m: lambda x:
                                     x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + m.variance_epsilon) * m.weight))
bug("model", ("qwen3 alone 1", "norm_epsilon | row_statistic norm_statistic"),
    head_norm_eps=changed(of_layers("self_attn.q_norm"), "variance_epsilon", lambda r, _: 1e-2))


bug("model", ("qwen3 fsdp2 2", "other_module slices_reordered | other_tensor"),
    head_norms_exchanged=exchanged(lambda r: [(m.q_norm.weight, m.k_norm.weight) for m in of_layers("self_attn")(r)]))
bug("model", ("gemma2 ddp 2", "wrong_scalar"),
    embedding_not_scaled=lambda r: r.model.model.embed_tokens.embed_scale.fill_(1.0))
# embedding_scale_in_bf16: sqrt(48) is 6.928; in bf16 it is 6.9375, for every token.
bug("model", ("gemma2 fsdp2 2", "wrong_scalar"),
    embedding_scale_in_bf16=lambda r: r.model.model.embed_tokens.embed_scale.fill_(float(torch.tensor(48 ** 0.5).bfloat16())))
bug("model", ("gemma2 ddp 2", "norm_gain | norm_statistic"),
    gain_without_one=changed(lambda r: [m for m in r.model.modules() if type(m).__name__ == "Gemma2RMSNorm"], "forward",
                             lambda r, m: lambda x: m._norm(x.float()) * m.weight))
bug("model", ("gemma2 alone 1", "softcap* | later_tokens"),
    scores_not_capped=changed(of_layers("self_attn"), "attn_logit_softcapping", lambda r, _: None))
bug("model", ("gemma2 ddp 2", "softcap*"),
    logits_not_capped=changed(lambda r: [r.model.config], "final_logit_softcapping", lambda r, _: None))
bug("model", ("gemma2 ddp 2", "attention_window | later_tokens causal_mask"),
    window_on_other_layers=changed(lambda r: [r.model.config], "layer_types", lambda r, c: c.layer_types[1:] + c.layer_types[:1]))
bug("model", ("gemma2 fsdp2 2", "softmax_scale | later_tokens"), ("llama-hf ddp 2 bf16", "softmax_scale | later_tokens"),
    scale_of_hidden_over_heads=changed(of_layers("self_attn"), "scaling", lambda r, layer: 0.4 * layer.scaling))


@bug("model", ("gemma2 alone 1", "activation_function"), ("starcoder2 ddp 2", "activation_function"),
     ("neox fsdp2 2", "activation_function"), ("llama-hf ddp 2 bf16", "activation_function"))
def relu_instead(r):
    for layer in r.layers():
        name = next(n for n in ("act_fn", "act") if hasattr(layer.mlp, n))
        setattr(layer.mlp, name, nn.ReLU())


bug("model", ("opt ddp 2", "activation_function"), gelu_for_relu=changed(Run.layers, "activation_fn", lambda r, _: nn.GELU()))
bug("model", ("neox ddp 2", "other_input residual tensor_added"),
    residual_in_sequence=changed(Run.layers, "use_parallel_residual", lambda r, _: False))


@bug("model", ("neox alone 1", "rope_settings positions | later_tokens"))
def frequencies_of_whole_head(r):
    n = r.model.gpt_neox.rotary_emb.inv_freq.numel()
    r.model.gpt_neox.rotary_emb.inv_freq.copy_(10000.0 ** (-torch.arange(n) / (2 * n)))


bug("model", ("neox fsdp2 2", "dimension_flattened packed_cut_as_one | slices_reordered"),
    qkv_one_after_the_other=rewritten("query_key_value", lambda p: p.unflatten(0, (6, 3, 8)).transpose(0, 1).reshape(p.shape)))


@bug("model", ("neox ddp 2", "other_module slices_reordered | other_tensor"))
def norms_exchanged(r):
    for layer in r.layers():
        layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm


bug("model", ("opt alone 1", "positions"),
    position_table_without_offset=changed(lambda r: [m for m in r.model.modules() if hasattr(m, "offset")], "offset",
                                          lambda r, _: 0))
bug("model", ("opt fsdp2 2", "norm_missing other_input"),
    norm_after_attention=changed(Run.layers, "do_layer_norm_before", lambda r, _: False))


@bug("model", ("phi alone 1", "rope_pairing | later_tokens"), ("phi ddp 2", "rope_pairing | later_tokens"))
def pairs_of_neighbours(r):
    import transformers.models.phi.modeling_phi as module
    def rotate(x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    def apply(q, k, cos, sin, *_):
        cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1)[:, None] for t in (cos, sin))
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
    module.apply_rotary_pos_emb = apply


bug("model", ("phi ddp 2", "bias_counted_again constant_added"),
    head_bias_left_out=changed(lambda r: [r.model.lm_head], "forward", lambda r, m: lambda x: F.linear(x, m.weight)))
bug("model", ("starcoder2 ddp 2", "bias_counted_again constant_added"),
    bias_once_more=changed(of_layers("mlp.c_proj"), "forward", lambda r, m: lambda x, right=m.forward: right(x) + m.bias))
bug("model", ("falcon fsdp2 2", "slices_reordered other_module exchanged"),
    key_and_value_rows_exchanged=rewritten("query_key_value", lambda p: torch.cat([p[:48], p[56:], p[48:56]])))
bug("model", ("falcon ddp 2", "slices_reordered shifted shards_misplaced"),
    key_and_value_rows_first=rewritten("query_key_value", lambda p: p.roll(16, 0)))


@bug("model", ("falcon alone 1", "norm_missing other_input"))
def mlp_without_norm(r):
    for layer in r.layers():
        layer.input_layernorm.register_forward_pre_hook(lambda m, args, at=layer: setattr(at.mlp, "raw", args[0]))
        layer.mlp.forward = lambda x, m=layer.mlp, right=layer.mlp.forward: right(m.raw)


@bug("model", ("starcoder2 alone 1", "attention_window | later_tokens causal_mask"))
def window_of_eight(r):
    r.model.config.sliding_window = 8
    for layer in r.layers():
        layer.self_attn.sliding_window = 8


bug("model", ("phi3 ddp 2", "activation_arguments slices_reordered exchanged"),
    ("phi3 alone 1", "activation_arguments slices_reordered exchanged"),
    up_rows_first=rewritten("gate_up_proj", lambda p: p.roll(len(p) // 2, 0)))
bug("model", ("phi3 fsdp2 2", "dimension_flattened packed_cut_as_one | slices_reordered"),
    gate_up_interleaved=rewritten("gate_up_proj", lambda p: p.unflatten(0, (2, -1)).transpose(0, 1).reshape(p.shape)))
bug("model", ("olmo2 fsdp2 2", "norm_epsilon | row_statistic norm_statistic"),
    last_norm_eps=changed(lambda r: [r.model.model.norm], "variance_epsilon", lambda r, _: 3e-2))
bug("model", ("olmo2 ddp 2", "norm_missing | other_module other_tensor norm_statistic row_statistic norm_gain"),
    norm_after_mlp_skipped=changed(of_layers("post_feedforward_layernorm"), "forward", lambda r, _: lambda x: x))


@bug("model", ("llama-hf alone 1", "rope_settings positions | later_tokens"),
     ("llama-hf ddp 2 bf16", "rope_settings positions | later_tokens"))
def slow_frequencies_divided(r):
    """As if rope_scaling of Llama 3.1 were in one configuration alone."""
    r.model.model.rotary_emb.inv_freq[2:] /= 8


bug("model", ("llama-hf ddp 2", "other_tensor"),
    last_layer_for_all=lambda r: r.layers()[0].load_state_dict(r.layers()[2].state_dict()))


# DDP waits for the gradient of k_proj, and reduces nothing.
@bug("model", ("llama-hf ddp 2", "no_gradient partial_sum no_backward | missing_average"), ("falcon ddp 2", "no_gradient partial_sum no_backward"))
def keys_without_gradient(r):
    """Half of attention's gradient is lost: what flows back to the norm is v's and q's part alone."""
    import transformers.models.falcon.modeling_falcon as falcon
    import transformers.models.llama.modeling_llama as llama
    for module in (falcon, llama):
        apply = module.apply_rotary_pos_emb
        module.apply_rotary_pos_emb = lambda q, k, *rest, apply=apply: apply(q, k.detach(), *rest)


bug("model", ("opt ddp 2", "dropout"), dropout_left_on=changed(Run.layers, "dropout", lambda r, _: 0.1))


@bug("wrapped", ("starcoder2 fsdp2 2", "part_of_one_rank other_initial_values"))
def shard_not_loaded(r):
    if r.rank == 1:
        with torch.no_grad():
            r.layers()[1].mlp.c_fc.weight.to_local().copy_(torch.randn(56, 48) * 0.02)


# --- what is wrong with a step ----------------------------------------------------------------------------------------

@bug("wrapped", ("opt ddp 2", "fewer_bits"), ("phi ddp 4", "fewer_bits"))
def compressed_gradients(r):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    r.wrapped.register_comm_hook(None, bf16_compress_hook)


bug("batch", ("qwen3 ddp 2", "missing_average", {"micro": 2}), ("neox ddp 2", "missing_average", {"micro": 2}),
    first_micro_batch_synchronised=changed(itself, "silent", lambda r, _: r.m > 0))
bug("loss", ("phi alone 1", "averaged_again wrong_scalar target_count", {"micro": 4}),
    divided_by_micro_batches_again=changed(itself, "loss", lambda r, _: r.loss / r.micro))
bug("samples", ("qwen3 ddp 2", "samples_dealt_out batch_order"), ("starcoder2 fsdp2 2", "samples_dealt_out batch_order"),
    ("llama-hf ddp 2 bf16", "samples_dealt_out batch_order"),
    samples_in_turn=lambda r, ids, labels: (ids[r.dp_rank::r.dp], labels[r.dp_rank::r.dp]))


@bug("samples", ("falcon ddp 4", "batch_order slices_repeated slices_reordered same_samples"))
def sampler_repeats_one(r, ids, labels):
    at = (0, 1, 1, 3)[r.dp_rank]
    return ids[at:at + 1], labels[at:at + 1]


@bug("wrapped", ("gemma2 fsdp2 2", "averaged_again counted_twice wrong_scalar"))
def divided_by_twice_the_ranks(r):
    for m in [r.model, *r.layers()]:
        m.set_force_sum_reduction_for_comms(True)
        m.set_gradient_divide_factor(4.0)


bug("ignored", ("phi fsdp2 2", "missing_average | replicas_apart"),
    norms_left_out_of_sharding=lambda r: set(r.parameters("layernorm")))
bug("backward", ("neox alone 1", "clip_factor one_micro_batch | partial_sum", {"micro": 2}),
    every_micro_batch_clipped=lambda r: torch.nn.utils.clip_grad_norm_(r.model.parameters(), 0.4))
bug("norm", ("opt fsdp2 2", "norm_of_own_shards | clip_factor", {"update": True}),
    norm_of_local_shards=changed(itself, "norm", lambda r, _: torch.nn.utils.get_total_norm(
        [p.grad.to_local() for p in r.model.parameters()])))
bug("norm", ("llama-hf ddp 2", "norm_other_order", {"update": True}),
    norm_of_largest=changed(itself, "norm", lambda r, _: torch.nn.utils.get_total_norm(
        [p.grad for p in r.model.parameters()], math.inf)))
bug("loss", ("gemma2 ddp 2", "loss_scale"), ("llama-hf ddp 2 bf16", "loss_scale"),
    not_unscaled=changed(itself, "loss", lambda r, _: r.loss * 65536))
bug("optimizer", ("phi ddp 2", "adam_eps", {"update": True}), adam_epsilon=lambda r: r.adam.update(eps=1e-3))
bug("optimizer", ("qwen3 fsdp2 2", "no_update", {"update": True}), schedule_starts_at_zero=lambda r: r.adam.update(lr=0.0))
bug("optimizer", ("starcoder2 ddp 2", "weight_decay", {"update": True}),
    decay_of_norms_and_biases=lambda r: r.adam.update(decay_of_rest=0.3))
bug("optimizer", ("falcon ddp 2", "update_sign | weight_decay", {"update": True}),
    maximised=lambda r: r.adam.update(maximize=True))
bug("optimizer", ("olmo2 fsdp2 2", "other_betas moments | update_scaled wrong_scalar", {"update": True}),
    second_beta_of_pytorch=lambda r: r.adam.update(betas=(0.9, 0.999)))
bug("updated", ("neox ddp 2", "fewer_bits", {"update": True}), weights_kept_in_bf16=rewritten("", lambda p: p.bfloat16()))
bug("update", ("opt ddp 2", "no_update", {"update": True}),
    head_not_in_groups=changed(lambda r: r.parameters("fc2"), "grad", lambda r, _: None))


@bug("gradients", ("llama-hf ddp 2", "stale_value", {"update": True, "steps": 2}))
def buffer_of_last_step(r):
    if r.step == 0:
        r.old = [p.grad.clone() for p in r.model.parameters()]
    else:
        for p, g in zip(r.model.parameters(), r.old):
            p.grad.copy_(g)


@bug("update", ("phi3 ddp 2", "adam_step_counter | update_scaled replicas_apart", {"update": True, "steps": 2}))
def step_counted_on_one_rank(r):
    if r.rank == 1 and r.step == 1:
        for state in r.optimizer.state.values():
            state["step"] += 3


bug("batch", ("qwen3 ddp 2", "target_count labels_*"),
    ("llama-hf ddp 2 bf16", "target_count labels_*"),
    prompts_counted=changed(itself, "labels", lambda r, _: r.ids.clone()))


def taken_for_padding(tokens):
    def change(r):
        mask = r.inputs["attention_mask"] = torch.ones_like(r.ids)
        mask[:, tokens] = 0
    return change


bug("batch", ("neox ddp 2", "keys_masked | causal_mask later_tokens"),
    ("llama-hf ddp 2 bf16", "keys_masked | causal_mask later_tokens"), tail_taken_for_padding=taken_for_padding(slice(9, 12)))
bug("batch", ("opt ddp 2", "positions"), first_tokens_taken_for_padding=taken_for_padding(slice(3)))
bug("batch", ("phi3 ddp 2", "ids_off_by_one | other_input tokens_shifted", {}),
    ids_one_too_large=changed(itself, "ids", lambda r, _: r.ids + 1))
bug("batch", ("falcon fsdp2 2", "tokens_shifted | labels_shifted other_input"),
    input_shifted=changed(itself, "ids", lambda r, _: r.ids.roll(1, 1)))
bug("batch", ("gemma2 ddp 2", "positions | later_tokens"),
    positions_from_five=lambda r: r.inputs.update(position_ids=(
        torch.arange(SEQ) + 5 * (torch.arange(SEQ) >= 4))[None].expand(len(r.ids), -1)))


@bug("gradients", ("starcoder2 ddp 2", "missing_average | replicas_apart"))
def last_bucket_not_copied(r):
    if r.rank == 1:
        for p in r.parameters("embed_tokens"):
            p.grad.mul_(0.25 + torch.rand(p.shape))


# --- tensor parallelism -----------------------------------------------------------------------------------------------

bug("none", ("qwen3 tp 2", "missing_all_reduce"), head_norms_not_reduced=None)


@bug("wrapped", ("phi tp 2", "bias_counted_again constant_added"))
def bias_in_every_part(r):
    for layer in r.layers():
        m = layer.mlp.fc2
        bias = m.bias.full_tensor() if hasattr(m.bias, "full_tensor") else m.bias
        m.register_forward_hook(lambda _m, _a, out, b=bias.detach(): out + b)


@bug("wrapped", ("starcoder2 tp 2", "reduced_again counted_twice"))
def output_summed_again(r):
    def again(_m, _args, out):
        out = out.detach().clone() + (out - out.detach())
        dist.all_reduce(out.detach())
        return out
    r.layers()[1].self_attn.o_proj.register_forward_hook(again)


@bug("plan", ("phi tp 2", "missing_all_reduce | partial_sum counted_twice"))
def row_layer_with_partial_output(r):
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import RowwiseParallel
    r.plan["model.layers.1.self_attn.dense"] = RowwiseParallel(output_layouts=Partial())


bug("plan", ("phi3 tp 2", "packed_cut_as_one | other_input"),
    gate_up_as_one_column_layer=changed(itself, "plan", lambda r, _: {
        name: style for name, style in r.plan.items() if "mlp" in name}))
