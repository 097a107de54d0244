/* SPDX-License-Identifier: Apache-2.0 */

#include "anyrank/config.h"
#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "verify/plan/planner.h"

static const char *const names[] = {
#define ARI_MEMORY_NAME(name, text) [ARI_MEMORY_##name] = text,
    ARI_MEMORY_TABLE(ARI_MEMORY_NAME)
#undef ARI_MEMORY_NAME
};

const char *ari_memory_name(ari_memory_kind k)
{
    return names[k];
}

double ari_memory_sum(const ari_memory *m)
{
    double sum = 0.0;
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        sum += m->bytes[k];
    return sum;
}

double ari_memory_activations(const ari_memory *m)
{
    double sum = 0.0;
    for (int k = ARI_MEMORY_ATTENTION; k <= ARI_MEMORY_LOGITS; k++)
        sum += m->bytes[k];
    return sum;
}

double ari_optimizer_states(const ar_optimizer_options *o)
{
    if (o->kind != AR_OPTIMIZER_SGD)
        return 2.0;
    return o->momentum != 0.0 ? 1.0 : 0.0;
}

int ari_planned_overlap(const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    return layout->sp && layout->tp > 1 ? ari_at_least_one(layout->overlap) : 1;
}

bool ari_planned_quick(const ari_planned *p)
{
    enum { MOST_TOKENS = 1 << 24, MOST_LAYERS = 1 << 11 };
    const ar_run *r = &p->step.run;
    size_t start = 0, samples = 0;
    ari_parallel_rows(&r->parallel, r->batch, 0, 0, &start, &samples);
    return (double)samples * (double)r->seq <= MOST_TOKENS && p->step.config->layers <= MOST_LAYERS;
}

double ari_planned_shares(const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    return (double)ari_at_least_one(layout->cp) * ari_at_least_one(layout->dp) / ari_at_least_one(layout->dp_replicate);
}

double ari_planned_expert_shares(const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const double copies = (double)ari_extent(layout, ari_expert_axes(layout)) / ari_at_least_one(layout->ep);
    return ari_experts_separate(layout) ? copies / ari_at_least_one(layout->dp_replicate) : ari_planned_shares(p);
}

double ari_experts_share(const ar_config *c)
{
    size_t n = 0;
    for (size_t i = 0; i < c->layers && c->experts.n > 0; i++)
        n += ar_config_has_experts(c, i);
    return n > 0 ? (double)n / (double)c->layers : 0.0;
}

double ari_attention_matrices(const ar_config *c)
{
    const ar_latent *l = &c->latent;
    const double h = (double)c->hidden, heads = (double)c->heads, kv_heads = (double)c->kv_heads;
    const double key = (double)c->head_dim, value = (double)ar_config_value_dim(c), rank = (double)l->q_rank;
    if (l->kv_rank == 0)
        return h * (heads * (key + value) + kv_heads * (key + value));
    const double queries = rank > 0.0 ? rank * (h + heads * key) : h * heads * key;
    const double low = (double)l->kv_rank, shared = (double)l->rope_dim;
    return queries + h * (low + shared) + low * heads * (key - shared + value) + h * heads * value;
}

double ari_mlp_matrices(const ar_config *c, bool active)
{
    const ar_experts *e = &c->experts;
    const double n = (double)(active ? e->per_token : e->n), matrices_per_mlp = c->gated ? 3.0 : 2.0;
    const double share = ari_experts_share(c), mtp_expert_layers = (double)c->mtp * ar_config_has_experts(c, c->layers);
    const double expert_layers = (double)c->layers * share + mtp_expert_layers,
                 without = (double)ar_config_blocks(c) - expert_layers;
    const double widths =
        matrices_per_mlp * (n * (double)e->ffn + (double)e->shared) + (double)e->n + (e->shared > 0 && !e->ungated);
    return (double)c->hidden * (expert_layers * widths + without * matrices_per_mlp * (double)c->ffn);
}

double ari_recomputed_share(const ari_step_case *c)
{
    const size_t every = (size_t)ari_at_least_one(c->run.parallel.recompute.every), layers = c->config->layers;
    if (c->run.parallel.recompute.part == AR_RECOMPUTE_NONE || layers == 0)
        return 0.0;
    return (double)(layers / every + (layers % every != 0)) / (double)layers;
}
