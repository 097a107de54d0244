# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a model of strangers_run.py, by name; strangers_cases.py says what is true of each."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from strangers import C, Rms
from strangers_run import moment


def each(r, kind):
    return [m for m in r.model.modules() if isinstance(m, kind)]


# --- models by hand --------------------------------------------------------------------------------------------------------

@moment("model")
def window_one_wider(r):
    r.blocks()[1].attn.window += 1


@moment("model")
def slopes_of_eight_heads(r):
    for block in r.blocks():
        block.attn.slopes = lambda heads: 2.0 ** -torch.arange(1.0, heads + 1)


@moment("model")
def bias_grows_with_distance(r):
    for block in r.blocks():
        block.attn.slopes = lambda heads, right=block.attn.slopes: -right(heads)


@moment("model")
def mask_after_softmax(r):
    for layer in r.blocks():
        layer.attn.probabilities = lambda score, allowed: score.softmax(-1) * allowed


@moment("model")
def kept_values_not_scaled(r):
    for layer in r.blocks():
        layer.drop.forward = lambda x, p=layer.drop.p: F.dropout(x, p) * (1 - p)


@moment("model")
def recomputed_with_other_dropout(r):
    r.checkpoint = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


@moment("model")
def reentrant_without_input_gradient(r):
    r.checkpoint = functools.partial(checkpoint, use_reentrant=True)


@moment("model")
def norm_on_the_branch(r):
    for layer in r.blocks():
        layer.join = lambda norm, x, y, alpha=layer.alpha: alpha * x + norm(y)


@moment("model")
def alpha_on_the_branch(r):
    for layer in r.blocks():
        layer.join = lambda norm, x, y, alpha=layer.alpha: norm(x + alpha * y)


@moment("model")
def norms_after_turning(r):
    for block in r.blocks():
        def query_and_key(q, k, positions, a=block.attn):
            return a.q_norm(a.turn(q, positions)), a.k_norm(a.turn(k, positions))
        block.attn.query_and_key = query_and_key


@moment("model")
def deviation_of_samples(r):
    for m in each(r, nn.LayerNorm):
        m.forward = lambda x, m=m: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + m.eps) * m.weight + m.bias


@moment("model")
def norms_in_bf16(r):
    for m in each(r, Rms):
        m.forward = lambda x, m=m: x * m.root(x) * m.gain


@moment("model")
def statistic_detached(r):
    for m in each(r, Rms):
        m.root = lambda x, right=m.root: right(x.detach())


@moment("model")
def stream_in_bf16(r):
    for block in r.blocks():
        block.register_forward_hook(lambda m, a, y: y.bfloat16().float())


@moment("model")
def branch_scale_left_out(r):
    r.blocks()[1].scale = 1.0


@moment("model")
def table_in_bf16(r):
    for block in r.blocks():
        block.attn.table = lambda positions, right=block.attn.table: tuple(t.bfloat16().float() for t in right(positions))


@moment("model")
def softmax_in_bf16(r):
    def softmax(score):
        with torch.autocast("cpu", enabled=False):
            return score.bfloat16().softmax(-1)
    for block in r.blocks():
        block.attn.softmax = softmax


@moment("model")
def cap_of_thirty(r):
    r.model.cap = 30.0


# --- Hugging Face's models --------------------------------------------------------------------------------------------

@moment("model")
def plain_slopes_for_all(r):
    import transformers.models.bloom.modeling_bloom as module
    module._get_alibi_slopes = lambda heads, device: 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


@moment("model")
def embedding_norm_skipped(r):
    r.model.transformer.word_embeddings_layernorm.forward = lambda x: x


@moment("model")
def stream_taken_after_norm(r):
    for block in r.blocks():
        block.apply_residual_connection_post_layernorm = True


@moment("model")
def fewer_features_turned(r):
    import transformers.models.gptj.modeling_gptj as module
    for block in r.blocks():
        block.attn.rotary_dim = 4
        block.attn.embed_positions = module.create_sinusoidal_positions(32, 4)


@moment("model")
def mlp_reads_detached(r):
    for block in r.blocks():
        block.mlp.forward = lambda x, right=block.mlp.forward: right(x.detach())


@moment("model")
def scale_by_root_of_heads(r):
    for block in r.blocks():
        block.self_attn.scaling = 8 ** -0.5


@moment("model")
def logits_multiplied(r):
    r.model.config.logits_scaling = 1 / r.model.config.logits_scaling


@moment("model")
def embedding_multiplier_left_out(r):
    r.model.model.embedding_multiplier = 1.0


@moment("model")
def mean_not_taken_off(r):
    for m in r.model.modules():
        if type(m).__name__ == "CohereLayerNorm":
            m.forward = lambda x, m=m: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
                                        * m.weight).to(x.dtype)


@moment("model")
def halves_turned(r):
    import transformers.models.cohere.modeling_cohere as module
    def turn(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    def apply(q, k, cos, sin, *_args, **_options):
        cos, sin = cos[:, None, :, ::2], sin[:, None, :, ::2]
        return turn(q, cos, sin), turn(k, cos, sin)
    module.apply_rotary_pos_emb = apply


@moment("model")
def logit_scale_left_out(r):
    r.model.logit_scale = 1.0
