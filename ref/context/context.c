/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/context/context.h"
#include "anyrank/queue.h"
#include "ref/core/fault_private.h"

#include <stdlib.h>

#include "anyrank/arith.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context_private.h"
#include "ref/core/context_private.h"
#include "ref/core/queue_impl.h"
#include "ref/core/text.h"

static ar_status check_storage(const ar_ctx_options *o)
{
    if (o->storage != 0 && o->storage != AR_F32 && o->storage != AR_BF16)
        return ar_error_set(AR_ERR_ARG, "parameters stored as %s, expected F32 or BF16", ar_dtype_name(o->storage));
    if (o->storage == AR_BF16 && o->numerics == AR_NUMERICS_EXACT && o->precision != AR_PRECISION_BF16)
        return ar_error_set(AR_ERR_ARG, "parameters alone stored as BF16 in exact numerics, whose weights and baseline "
                                        "are fp32: give F32, precision bf16, or native numerics");
    if (o->storage == AR_F32 && o->precision == AR_PRECISION_BF16)
        return ar_error_set(AR_ERR_ARG,
                            "parameters stored as F32 in precision bf16, which stores them in 16 bits: give "
                            "BF16, or precision f32 or tf32");
    return AR_OK;
}

static ar_status check_precision(const ar_ctx_options *o)
{
    AR_TRY(ari_check_choice("precision", (int)o->precision, AR_PRECISION_COUNT));
    AR_TRY(ari_check_choice("numerics", (int)o->numerics, AR_NUMERICS_NATIVE + 1));
    if (o->precision == AR_PRECISION_TF32 && o->numerics == AR_NUMERICS_EXACT)
        return ar_error_set(AR_ERR_ARG,
                            "precision tf32 in exact numerics, whose products are of fp32 or bf16 numbers: give f32 or "
                            "bf16, or native numerics");
    return AR_OK;
}

/* Sets groups that were not given to this rank alone, except the sharding group, which becomes all ranks that sum
 * gradients. */
static void use_groups(ar_ctx *c, const ar_ctx_options *o)
{
    c->tp = o->tp;
    c->dp = o->dp;
    c->replicate = o->replicate;
    c->sequence = o->cp.group;
    c->ring = o->cp.ring;
    c->inner = o->cp.inner;
    c->pipeline = o->pp.group;
    c->ends = o->pp.ends;
    c->shard = o->shard ? o->shard : o->dp;
    c->ep = o->ep.group;
    c->edp = o->ep.group ? o->ep.copies : o->dp;
    c->expert_shard = !o->ep.group ? c->shard : o->ep.shard ? o->ep.shard : o->ep.copies;
    c->expert_replicate = o->ep.group ? o->ep.replicate : o->replicate;
    c->expert_sequence = o->ep.group ? o->ep.sequence : o->cp.group;
    for (int i = 0; i < ARI_OVER_GROUPS; i++)
        c->groups[i] = c->groups[i] ? c->groups[i] : c->self;
    c->layout = (ar_parallel){.tp = ar_comm_size(c->tp),
                              .dp = ar_comm_size(c->dp) / ar_comm_size(c->sequence),
                              .cp = ar_comm_size(c->sequence),
                              .cp_inner = ar_comm_size(c->inner),
                              .zigzag = o->cp.zigzag,
                              .ep = ar_comm_size(c->ep),
                              .etp = o->ep.whole ? 1 : 0,
                              .dispatch = o->ep.dispatch,
                              .pp = ar_comm_size(c->pipeline),
                              .virtual_stages = ari_at_least_one(o->pp.virtual_stages),
                              .stages = o->pp.stages,
                              .dp_replicate = ar_comm_size(c->replicate)};
}

/* Joins the ranks of this one's stage, which attention splits into groups. Ranks of other stages, whose layers a plan
 * may shard differently, form other groups or none. */
static ar_status join_stage(ar_ctx *c)
{
    const ari_axes stage_axes = ARI_ALL_AXES & ~ARI_CUTS_LAYERS;
    if (ar_comm_size(c->pipeline) == 1 || ar_comm_size(c->inner) == 1)
        return AR_OK;
    return ari_comm_join(&c->replicas.stage, c->world, ari_ctx_place(c, ARI_CUTS_LAYERS), ari_ctx_place(c, stage_axes),
                         ari_extent(&c->layout, stage_axes));
}

ar_status ari_ctx_create(ar_ctx **out, const ar_ctx_options *o, const ar_arith_ops *arith)
{
    if (!o->device)
        return ar_error_set(AR_ERR_ARG, "a context needs a device");
    if (!(o->dropout >= 0.0 && o->dropout < 1.0))
        return ar_error_set(AR_ERR_ARG, "dropout %g, expected a probability from 0 to less than 1", o->dropout);
    AR_TRY(ari_loss_options_check(&o->loss, "a context"));
    AR_TRY(ari_fault_known(o->fault));
    if (o->cp.inner && ar_comm_size(o->cp.inner) > 1 && !o->world)
        return ar_error_set(AR_ERR_ARG, "a context with inner context-parallel neighbours needs the world, of which "
                                        "groups of ranks with copies of a KV head are made");
    if (o->pp.group && ar_comm_size(o->pp.group) > 1 && !o->world)
        return ar_error_set(AR_ERR_ARG, "a context of a pipeline of %d ranks needs the world",
                            ar_comm_size(o->pp.group));
    AR_TRY(check_storage(o));
    AR_TRY(check_precision(o));
    ARI_OWNED_BY(ar_ctx_destroy) ar_ctx *c = calloc(1, sizeof *c);
    if (!c)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a context");
    c->device = o->device;
    c->arith = arith;
    c->fault = o->fault;
    c->attempt = o->attempt;
    c->tap = o->tap;
    c->tap_user = o->tap_user;
    c->sp = o->sp;
    c->keep_gathered = o->keep_gathered;
    c->overlap = o->overlap > 1 ? o->overlap : 1;
    c->recompute = o->recompute;
    c->dropout = o->dropout;
    c->loss = o->loss;
    c->loss_scale = 1.0;
    c->activations = ari_activations_of(o->precision);
    c->matrices = ari_matrix_dtype(o->precision, o->storage);
    c->seed = o->seed;
    c->step = 1;
    c->owned.next = c->owned.prev = &c->owned;
    AR_TRY(o->device->ops->queue_create(o->device, &c->queue, AR_QUEUE_INLINE, "main"));
    AR_TRY(ari_comm_self(&c->self));
    use_groups(c, o);
    c->world = o->world ? o->world : c->tp;
    AR_TRY(join_stage(c));
    ARI_GIVE(out, c);
    return AR_OK;
}

void ar_ctx_destroy(ar_ctx *c)
{
    if (!c)
        return;
    ar_ctx_end_step(c);
    for (int i = 0; i < ARI_TRANSFERS; i++) {
        ar_queue_destroy(c->transfer[i].queue);
        ar_comm_destroy(c->transfer[i].comm);
    }
    ari_communication *const communications[] = {&c->communication, &c->gathers, &c->overlapped};
    for (size_t i = 0; i < sizeof communications / sizeof *communications; i++) {
        ar_queue_destroy(communications[i]->queue); /* first, because its tasks use the groups */
        for (int k = 0; k < ARI_OVER_GROUPS; k++)
            ar_comm_destroy(communications[i]->groups[k]);
    }
    for (int i = 0; i < 2; i++)
        ar_comm_destroy(c->replicas.groups[i].comm);
    ar_comm_destroy(c->replicas.stage);
    ar_comm_destroy(c->self);
    ar_queue_destroy(c->queue);
    if (c->end_ledger)
        c->end_ledger(c->ledger);
    free(c);
}

ar_status ari_queue_follow(ar_queue *q, ar_queue *leader, ar_event *e)
{
    if (q == leader)
        return AR_OK;
    AR_TRY(ar_event_record(e, leader));
    return ar_queue_wait(q, e);
}

ar_comm *ar_ctx_tp(const ar_ctx *c)
{
    return c->tp;
}

ar_comm *ar_ctx_dp(const ar_ctx *c)
{
    return c->dp;
}

int ari_ctx_place(const ar_ctx *c, ari_axes axes)
{
    const int coords[ARI_PLACED_AXES] = {[ARI_AXIS_PP] = ar_comm_rank(c->pipeline),
                                         [ARI_AXIS_DP] = ar_comm_rank(c->dp) / ar_comm_size(c->sequence),
                                         [ARI_AXIS_RING] = ar_comm_rank(c->ring),
                                         [ARI_AXIS_INNER] = ar_comm_rank(c->inner),
                                         [ARI_AXIS_TP] = ar_comm_rank(c->tp)};
    const ari_ranks ranks = ari_ranks_of(&c->layout);
    int place = 0;
    for (int i = 0; i < ARI_PLACED_AXES; i++)
        place = axes >> i & 1 ? place * ranks.along[i] + coords[i] : place;
    return place;
}

int ari_ctx_data_rank(const ar_ctx *c)
{
    return ari_ctx_place(c, ARI_CUTS_SAMPLES);
}

ar_status ari_ctx_replicas(ar_ctx *c, ar_comm **group, int kv_heads, bool over_tp)
{
    ari_replica_group *replica_group = &c->replicas.groups[over_tp];
    const ari_axes sharers = 1u << ARI_AXIS_INNER | (over_tp ? ARI_CUTS_FEATURES : 0u);
    const int inner = ar_comm_size(c->inner), n = ari_extent(&c->layout, sharers);
    const int place = (over_tp ? ar_comm_rank(c->tp) * inner : 0) + ar_comm_rank(c->inner), group_size = n / kv_heads;
    const int team = ari_ctx_place(c, ARI_ALL_AXES & ~ARI_CUTS_LAYERS & ~sharers); /* the ranks that share the heads */
    if (replica_group->heads == 0) {
        ar_comm *parent = inner == 1 ? c->tp : c->replicas.stage ? c->replicas.stage : c->world;
        AR_TRY(ari_comm_join(&replica_group->comm, parent, (inner > 1 ? team * kv_heads : 0) + place / group_size,
                             place % group_size, group_size));
        ari_comm_name_group(replica_group->comm, ARI_OVER_COPIES);
        replica_group->heads = kv_heads;
    }
    if (replica_group->heads != kv_heads)
        return ar_error_set(AR_ERR_UNSUPPORTED, "replicas of %d KV heads and of %d in one context",
                            replica_group->heads, kv_heads);
    *group = replica_group->comm;
    return AR_OK;
}

/* Copies a group, so that its calls may use another queue than the group's own. */
static ar_status copy_group(ar_comm **copy, ar_comm *source)
{
    return *copy ? AR_OK : ari_comm_join(copy, source, 0, ar_comm_rank(source), ar_comm_size(source));
}

/* A queue, and copies of the groups of a set: a bit for each ari_over. */
static ar_status communicate(ar_ctx *c, ari_communication *m, unsigned set, const char *name)
{
    for (int i = 0; i < ARI_OVER_GROUPS; i++) {
        if (set >> i & 1)
            AR_TRY(copy_group(&m->groups[i], c->groups[i]));
    }
    return m->queue ? AR_OK : c->device->ops->queue_create(c->device, &m->queue, AR_QUEUE_THREAD, name);
}

ar_status ari_ctx_communication(ar_ctx *c, const ari_communication **borrows, bool tp, bool has_ends)
{
    const unsigned summed = ar_comm_size(c->dp) > 1 ? 1u << ARI_OVER_DP : 0u;
    const unsigned shared = ar_comm_size(c->replicate) > 1 ? 1u << ARI_OVER_SHARD | 1u << ARI_OVER_REPLICATE : 0u;
    const unsigned requested = (tp ? 1u << ARI_OVER_TP : 0u) | (has_ends ? 1u << ARI_OVER_ENDS : 0u);
    const unsigned copies = 1u << ARI_OVER_EXPERT_SHARD | 1u << ARI_OVER_EXPERT_REPLICATE;
    const unsigned experts = c->edp == c->dp ? 0u : 1u << ARI_OVER_EDP | (shared ? copies : 0u);
    *borrows = &c->communication;
    return communicate(c, &c->communication, summed | shared | requested | experts, "communication");
}

ar_status ari_ctx_gathers(ar_ctx *c, const ari_communication **borrows)
{
    *borrows = &c->gathers;
    return communicate(c, &c->gathers, 1u << ARI_OVER_SHARD | (c->edp != c->dp ? 1u << ARI_OVER_EXPERT_SHARD : 0u),
                       "weights");
}

ar_status ari_ctx_overlapped(ar_ctx *c, const ari_communication **borrows)
{
    *borrows = &c->overlapped;
    return communicate(c, &c->overlapped, 1u << ARI_OVER_TP, "tp");
}

/* Edge e of a pipeline's ring of ranks goes from rank e to the next rank. The edges have three colours, so that no rank
 * has two edges of one colour, and one split for each colour creates all pairs. */
enum { COLOURS = 3 };
static int colour_of(int edge, int ranks)
{
    return ranks % 2 == 1 && edge == ranks - 1 ? 2 : edge % 2;
}

/* Creates the pair of ranks on this rank's edge of a colour, for transfers along the edge or back. */
static ar_status pair_up(ar_ctx *c, int colour, bool back)
{
    static const char *const names[ARI_TRANSFERS] = {[ARI_SEND_ACTIVATION] = "send activations",
                                                     [ARI_RECV_ACTIVATION] = "recv activations",
                                                     [ARI_SEND_GRADIENT] = "send gradients",
                                                     [ARI_RECV_GRADIENT] = "recv gradients"};
    const int n = ar_comm_size(c->pipeline), r = ar_comm_rank(c->pipeline), before = (r + n - 1) % n;
    const int edges = c->layout.virtual_stages > 1 ? n : n - 1;
    const bool is_source = r < edges && colour_of(r, n) == colour,
               is_target = before < edges && colour_of(before, n) == colour;
    const bool sends = is_source != back;
    ar_comm *comm = NULL;
    AR_TRY(ari_comm_join(&comm, c->pipeline, is_source ? r : is_target ? before : -1, sends ? 0 : 1, 2));
    if (!comm)
        return AR_OK;
    const int transfer =
        back ? (sends ? ARI_SEND_GRADIENT : ARI_RECV_GRADIENT) : (sends ? ARI_SEND_ACTIVATION : ARI_RECV_ACTIVATION);
    c->transfer[transfer].comm = comm;
    return c->device->ops->queue_create(c->device, &c->transfer[transfer].queue, AR_QUEUE_THREAD, names[transfer]);
}

ar_status ari_ctx_transfers(ar_ctx *c, const ari_neighbour **borrows)
{
    for (int i = 0; i < 2 * COLOURS && !c->has_transfers; i++)
        AR_TRY(pair_up(c, i / 2, i % 2 == 1));
    c->has_transfers = true;
    *borrows = c->transfer;
    return AR_OK;
}

void ar_ctx_begin_step(ar_ctx *c, uint32_t step)
{
    c->step = step;
}

/* The groups that the context's collectives go through, each once. */
#define GROUPS (4 * ARI_OVER_GROUPS + 2 + ARI_TRANSFERS)
static int groups_of(const ar_ctx *c, const ar_comm *group[GROUPS])
{
    const ar_comm *candidates[GROUPS];
    int n = 0, k = 0;
    for (int i = 0; i < ARI_OVER_GROUPS; i++) {
        candidates[k++] = c->groups[i];
        candidates[k++] = c->communication.groups[i];
        candidates[k++] = c->gathers.groups[i];
        candidates[k++] = c->overlapped.groups[i];
    }
    for (int i = 0; i < 2; i++)
        candidates[k++] = c->replicas.groups[i].comm;
    for (int i = 0; i < ARI_TRANSFERS; i++)
        candidates[k++] = c->transfer[i].comm;
    for (int i = 0; i < GROUPS; i++) {
        int match = 0;
        while (match < n && group[match] != candidates[i])
            match++;
        if (candidates[i] && match == n)
            group[n++] = candidates[i];
    }
    return n;
}

void ari_ctx_counted(const ar_ctx *c, uint64_t *bytes_read, uint64_t *bytes_written)
{
    const ar_comm *group[GROUPS];
    const int n = groups_of(c, group);
    *bytes_read = *bytes_written = 0;
    for (int i = 0; i < n; i++) {
        uint64_t read = 0, written = 0;
        ar_comm_counted(group[i], &read, &written);
        *bytes_read += read;
        *bytes_written += written;
    }
}

uint64_t ari_ctx_calls(const ar_ctx *c, const char *kind)
{
    const ar_comm *group[GROUPS];
    const int n = groups_of(c, group);
    uint64_t calls = 0;
    for (int i = 0; i < n; i++)
        calls += ar_comm_size(group[i]) > 1 ? ari_comm_calls(group[i], kind) : 0;
    return calls;
}

void ari_ctx_place_batch(ar_ctx *c, const ar_batch *batch)
{
    c->first_sample = batch && batch->global_batch > 0 ? batch->first_sample : 0;
    c->samples = batch ? batch->global_batch : 0;
    c->distinct = batch ? batch->distinct : 0;
}

ar_device *ar_ctx_device(const ar_ctx *c)
{
    return c->device;
}

ar_dtype ari_ctx_activations(const ar_ctx *c)
{
    return c->activations;
}

ar_queue *ar_ctx_queue(const ar_ctx *c)
{
    return c->queue;
}

const ar_arith_ops *ar_ctx_arith(const ar_ctx *c)
{
    return c->arith;
}

ar_status ari_tap(ar_ctx *c, const char *name, char pass, const ar_tensor *local, const ar_layout *layout)
{
    if (!c->tap)
        return AR_OK;
    ar_tensor view;
    AR_TRY(ari_host_view(c, &view, local));
    const ar_tap_event event = {.name = name, .pass = pass, .step = c->step, .local = &view, .layout = layout};
    const ar_status st = c->tap(c->tap_user, &event);
    ari_host_view_end(&view, local);
    return st;
}

bool ari_tapped(const ar_ctx *c)
{
    return c->tap != NULL;
}

bool ari_faulty(const ar_ctx *c, const char *fault)
{
    return ari_fault_is(c->fault, fault);
}
