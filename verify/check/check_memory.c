/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the memory of a run's ranks with a dry run of each, and the memory between steps with the list of parameters
 * and buckets. */
#include <stdio.h>

#include "ref/core/axis.h"
#include "verify/check/check_run.h"
#include "verify/plan/planner.h"

void ari_memory_raise(ar_rank_memory *most, const ar_rank_memory *m)
{
#define RAISE(field, json, title) most->field = m->field > most->field ? m->field : most->field;
    AR_RANK_MEMORY_TABLE(RAISE)
#undef RAISE
}

static void compare_rank(ar_check_run *run, int rank, const ar_rank_memory *counted, const ar_rank_memory *predicted)
{
#define COMPARE(field, json, title)                                                                                    \
    if (!run->memory_difference[0] && counted->field != predicted->field)                                              \
        snprintf(run->memory_difference, sizeof run->memory_difference,                                                \
                 "memory of rank %d, %s: %zu bytes are counted, the layout predicts %zu", rank, title, counted->field, \
                 predicted->field);
    AR_RANK_MEMORY_TABLE(COMPARE)
#undef COMPARE
}

/* The same of what the list says. */
static ar_status compare_states(ar_check_run *run, const ari_cluster_options *o, int rank,
                                const ar_rank_memory *counted)
{
    ari_step_case c = {.run = o->run, .config = o->config, .forward_only = o->forward_only};
    ar_rank_memory listed = *counted;
    ari_memory m;
    AR_TRY(ari_memory_states(&m, &c, rank));
    listed.weights = (size_t)m.of[ARI_MEMORY_WEIGHTS];
    listed.gradients = (size_t)m.of[ARI_MEMORY_GRADIENTS];
    listed.optimizer = (size_t)(m.of[ARI_MEMORY_MASTER] + m.of[ARI_MEMORY_OPTIMIZER]);
    listed.buckets = (size_t)m.of[ARI_MEMORY_BUCKETS];
    compare_rank(run, rank, counted, &listed);
    return AR_OK;
}

/* Nobody predicts what is no model, batches of several sizes, masks, positions and documents of a batch's own. */
static bool is_predicted(const ari_cluster_options *o)
{
    bool plain = !o->body;
    if (o->module) /* a dry run has the batches themselves */
        return true;
    for (size_t i = 0; plain && i < ari_run_steps(&o->run); i++) {
        const ar_batch *b = &o->batch[i];
        plain = b->batch == o->batch->batch && b->seq == o->batch->seq && !b->padding_mask && !b->additive_mask &&
                !b->position_ids && !b->documents;
    }
    return plain;
}

/* like: whose operands and blocks the ranks have; NULL: the CPU device's. Activations of experts that ranks share out
 * depend on the routes, and so do a GPU's operands, whose parts are copies where an expert's rows begin inside a tile:
 * they are compared where the routes are the baseline's, and elsewhere not predicted. */
static ar_status check_ranks(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o,
                             const ar_rank_memory *counted, const ar_device *like)
{
    const ari_step_case c = {.run = o->run, .config = o->config};
    ari_routed_rank at = {.ref = ref, .c = &c};
    const ari_known_routes routes = {ari_check_read_routes, &at};
    const bool shared = o->run.numerics == AR_NUMERICS_EXACT && ari_expert_sequence(&o->run.parallel) > 1;
    const bool routed =
        !o->module && o->config && o->config->experts.n > 0 && (ari_experts_routed(&o->run.parallel) || shared || like);
    const bool known = routed && o->run.numerics == AR_NUMERICS_EXACT && run->tensors_different == 0;
    ari_cluster_options own = *o;
    own.routes = known ? &routes : NULL;
    for (int r = 0; r < ar_parallel_world(&o->run.parallel); r++) {
        ari_dry_memory dry;
        ari_memory_raise(&run->memory, &counted[r]);
        if (!run->has_memory_predicted)
            continue;
        at.rank = r;
        AR_TRY(ari_cluster_dry(&dry, &own, r, like));
        ari_memory_raise(&run->memory_predicted, &dry.rank);
        if (!routed || known)
            compare_rank(run, r, &counted[r], &dry.rank);
        if (o->module && dry.routed.rows + dry.routed.gradients > 0)
            run->has_memory_predicted = false;
        else if (o->module)
            run->bytes_predicted += dry.bytes;
        else
            AR_TRY(compare_states(run, o, r, &counted[r]));
    }
    if (routed && !known)
        run->has_memory_predicted = false;
    return AR_OK;
}

ar_status ari_check_memory(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o,
                           const ar_rank_memory *counted)
{
    ARI_OWNED_BY(ar_device_destroy) ar_device *like = NULL;
    run->has_memory_predicted = is_predicted(o);
    if (run->has_memory_predicted && o->run.device.kind != AR_DEVICE_CPU)
        AR_TRY(ar_device_create(&like, &o->run.device, 1));
    return check_ranks(run, ref, o, counted, like);
}
