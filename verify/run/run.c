/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/run/run.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "gpu/cluster/process/transport/process_private.h"
#include "gpu/device_private.h"
#include "ref/core/context_private.h"
#include "ref/core/fault_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/config_private.h"
#include "ref/models/family.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "ref/numerics/rope_check.h"
#include "ref/numerics/scalar.h"
#include "ref/train/optimizer_private.h"
#include "sim/sim_private.h"
#include "verify/run/cluster_run.h"

#define ANGLE_LIMIT 1048576.0f /* 2^20 */

static ar_status add_further(ar_config *c, const ar_run *r)
{
    const double weight = r->mtp_weight > 0.0 ? r->mtp_weight : 0.1; /* Megatron's */
    const size_t used = strlen(c->changed);
    if (r->mtp == 0)
        return r->mtp_weight > 0.0 ? ar_error_set(AR_ERR_ARG, "mtp_weight is that of mtp: give mtp too") : AR_OK;
    if (!ari_part_path(ari_family_of(c->arch), ARI_JOINED) || r->mtp > AR_MAX_MTP || !(weight <= 1e6))
        return ar_error_set(AR_ERR_ARG,
                            "%s: %zu blocks for further tokens of weight %g: expected at most %d, a weight up to 1e6, "
                            "and not of GPT-2, GPT-NeoX or the stack, which have no names for them",
                            c->name, r->mtp, weight, AR_MAX_MTP);
    c->mtp = r->mtp;
    c->mtp_weight = weight;
    snprintf(c->changed + used, sizeof c->changed - used, "%smtp: %zu further tokens, their losses times %g",
             used > 0 ? "; " : "", c->mtp, weight);
    return AR_OK;
}

ar_status ari_run_config(ar_config *c, char *folder, size_t cap, const ar_run *r)
{
    struct stat info;
    AR_TRY(ar_model_path(folder, cap, r->model));
    AR_TRY(ar_config_load(c, folder));
    if (r->shrink <= 1)
        return add_further(c, r);
    const size_t used = strlen(folder);
    if (stat(folder, &info) == 0 && S_ISDIR(info.st_mode) &&
        (size_t)snprintf(folder + used, cap - used, "/config.json") >= cap - used)
        return ar_error_set(AR_ERR_ARG, "%s: its path does not fit in %zu bytes", c->name, cap);
    AR_TRY(ari_config_shrink(c, r->shrink));
    return add_further(c, r);
}

ar_status ari_run_check_training(const ar_run *r, const char *name)
{
    if (r->steps > UINT32_MAX)
        return ar_error_set(AR_ERR_ARG, "%s: %" PRIu64 " steps: at most %" PRIu32, name, r->steps, UINT32_MAX);
    if (r->steps > 0)
        AR_TRY(ari_optimizer_check(&r->optimizer));
    if (!(r->clip >= 0.0) || isinf(r->clip))
        return ar_error_set(AR_ERR_ARG, "%s: a largest gradient norm of %g: a finite number from 0 (no clipping)", name,
                            r->clip);
    if (!(r->dropout >= 0.0 && r->dropout < 1.0))
        return ar_error_set(AR_ERR_ARG, "%s: a dropout of %g: a probability from 0 to below 1", name, r->dropout);
    return ari_loss_options_check(&r->loss, name);
}

bool ari_run_by_nccl(const ar_run *r, int ranks)
{
    char nccl[256];
    const ar_sim_options *s = &r->sim;
    if (r->process || ranks <= 1 || r->device.index != AR_GPU_EACH || s->fault_count > 0 || s->verify_transfers ||
        s->explore || s->trace || s->cluster)
        return false;
    return r->device.kind == AR_DEVICE_EMULATED || (r->device.kind == AR_DEVICE_CUDA && ari_gpu_count() >= ranks &&
                                                    ari_transport_describe(AR_TRANSPORT_NCCL, nccl, sizeof nccl));
}

/* Checks the device before minutes of work. A GPU that is present is not opened, because each of several processes uses
 * a different GPU. */
static ar_status check_device(const ar_device_choice *c)
{
    ARI_OWNED_BY(ar_device_destroy) ar_device *device = NULL;
    const int gpu = ari_gpu_index(c);
    const bool present = c->kind == AR_DEVICE_CUDA && gpu >= 0 && gpu < ari_gpu_count();
    return present ? AR_OK : ar_device_create(&device, c, 1);
}

ar_status ari_run_check_numerics(const ar_run *r)
{
    AR_TRY(ari_check_choice("numerics", (int)r->numerics, AR_NUMERICS_NATIVE + 1));
    AR_TRY(ari_check_choice("precision", (int)r->precision, AR_PRECISION_COUNT));
    AR_TRY(ari_check_choice("placements", (int)r->placements, AR_DECLARED_TRUSTED + 1));
    AR_TRY(ari_check_choice("device", (int)r->device.kind, AR_DEVICE_KINDS));
    AR_TRY(ari_check_choice("order of the MLP", (int)r->plan.mlp_order, AR_MLP_ROW_COLUMN + 1));
    AR_TRY(ari_fault_known(r->fault));
    AR_TRY(ari_sim_options_check(&r->sim));
    AR_TRY(check_device(&r->device));
    if (r->storage != 0 && r->storage != AR_F32 && r->storage != AR_BF16)
        return ar_error_set(AR_ERR_ARG, "storage %d, expected 0, AR_F32 or AR_BF16", (int)r->storage);
    if (r->precision == AR_PRECISION_BF16 && r->storage == AR_F32)
        return ar_error_set(AR_ERR_ARG, "storage in f32 with precision bf16, which stores matrices in 16 bits: take "
                                        "storage bf16, or precision f32 or tf32");
    if (r->numerics != AR_NUMERICS_EXACT)
        return AR_OK;
    if (r->precision == AR_PRECISION_TF32)
        return ar_error_set(AR_ERR_ARG,
                            "products in tf32: exact numerics multiply fp32 or bf16 numbers, take native ones");
    if (r->storage == AR_BF16 && r->precision != AR_PRECISION_BF16)
        return ar_error_set(AR_ERR_ARG, "storage in bf16 alone is of native numerics: take them, or precision bf16");
    return AR_OK;
}

static ar_status check_angles(const ar_config *c, const ar_rope *r, size_t seq)
{
    const size_t turning = ar_rope_dim(r, c->head_dim);
    for (size_t i = 0; i < turning / 2; i++) {
        const float angle = ari_rope_angle(seq - 1, ari_rope_frequency(r, i, turning));
        if (!(angle < ANGLE_LIMIT))
            return ar_error_set(AR_ERR_CONFIG,
                                "%s: rope_theta %g gives position %zu the angle %g, expected below 2^20; take a larger "
                                "rope_theta or a shorter sequence",
                                c->name, r->theta, seq - 1, (double)angle);
    }
    return AR_OK;
}

/* Checks RoPE for a full row and for documents so short that another list of factors applies. */
static ar_status check_rope(const ar_config *c, const ar_rope *r, size_t seq)
{
    if (!r->kind || seq == 0)
        return AR_OK;
    const ar_rope scaled_rope = ari_rope_at(r, seq, c->head_dim);
    AR_TRY(check_angles(c, r, seq));
    return check_angles(c, &scaled_rope, seq);
}

ar_status ari_run_check_positions(const ar_config *c, size_t seq)
{
    if ((c->learned_positions || c->rope.kind) && seq > c->max_positions)
        return ar_error_set(AR_ERR_SHAPE, "a sequence of %zu is longer than the %zu positions of %s", seq,
                            c->max_positions, c->name);
    AR_TRY(check_rope(c, &c->rope, seq));
    return check_rope(c, &c->local_rope, seq);
}

ar_status ari_run_check_loss(const ar_run *r, const ar_config *c)
{
    if ((r->loss.label_smoothing > 0.0 || r->loss.z_loss > 0.0) && !ari_part_path(ari_family_of(c->arch), ARI_HEAD))
        return ar_error_set(AR_ERR_ARG,
                            "%s: has no logits, which label smoothing and z-loss are about: its loss is the sum of its "
                            "output",
                            c->name);
    if ((r->loss.router.balance != AR_BALANCE_NONE || r->loss.router.z_loss > 0.0) && c->experts.n == 0)
        return ar_error_set(AR_ERR_ARG, "%s: has no experts, which a balance and a router's z-loss are about", c->name);
    if ((r->loss.router.balance != AR_BALANCE_NONE || r->loss.router.z_loss > 0.0) && c->experts.scores.groups > 0)
        return ar_error_set(AR_ERR_ARG,
                            "%s: has routers of DeepSeek's form (sigmoids, groups, scaled weights); a balance and a "
                            "router's z-loss are computed of a plain softmax alone: expected neither",
                            c->name);
    if (r->optimizer.qk_clip > 0.0 && c->qk_norm != AR_QK_NORM_NONE)
        return ar_error_set(AR_ERR_ARG,
                            "%s: normalises q and k, which undoes what QK-Clip scales their weights by: expected none",
                            c->name);
    if (r->loss.router.bias_update > 0.0 && !ar_config_router_bias(c))
        return ar_error_set(AR_ERR_ARG,
                            "%s: its routers have no bias by which they choose, which a router bias update "
                            "is about",
                            c->name);
    return AR_OK;
}

ar_status ari_run_check_targets(const ar_run *r, const ar_config *c)
{
    if (r->seq != 1 || !ari_part_path(ari_family_of(c->arch), ARI_HEAD))
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "%s: a sequence of 1 token has no target, as a token's is the next one: give seq of "
                        "at least 2",
                        c->name);
}

/* Checks that a group's glob matches at least one parameter. */
typedef struct group_match {
    const char *glob;
    bool any;
} group_match;

static ar_status match_group(void *user, const char *name, int ndim, const size_t *shape)
{
    group_match *m = user;
    (void)ndim;
    (void)shape;
    m->any = m->any || fnmatch(m->glob, name, 0) == 0;
    return AR_OK;
}

/* A misspelt group would train on as if it were not there. */
static ar_status check_groups(const ar_optimizer_options *o, const ar_config *c)
{
    for (size_t i = 0; i < o->groups; i++) {
        group_match m = {.glob = o->group[i].glob};
        AR_TRY(ari_param_list(c, match_group, &m));
        if (!m.any)
            return ar_error_set(AR_ERR_ARG, "parameter group '%s' matches no parameter of %s", ARI_SHOW(m.glob),
                                c->name);
    }
    return AR_OK;
}

ar_status ar_run_check(const ar_run *r, const ar_config *c)
{
    if (r->batch == 0 || r->seq == 0)
        return ar_error_set(AR_ERR_ARG, "batch and seq are at least 1");
    AR_TRY(ari_config_expect(c));
    AR_TRY(ari_run_check_training(r, c->name));
    AR_TRY(ari_run_check_loss(r, c));
    AR_TRY(check_groups(&r->optimizer, c));
    AR_TRY(ari_run_check_numerics(r));
    AR_TRY(ari_run_check_positions(c, r->seq));
    return ari_parallel_check(&r->parallel, c, &r->plan, r->batch, r->seq);
}

ar_status ari_run_check_declared(const ar_run *r, const ar_config *c)
{
    const int tp = ari_at_least_one(r->parallel.tp);
    return tp > 1 ? ari_plan_check_declared(&r->plan, c, ari_plan_by_tokens(&r->plan, tp, r->parallel.sp)) : AR_OK;
}

const char *ari_scores_note(size_t seq, ar_numerics numerics)
{
    _Static_assert(AR_SCORES_WHOLE == 2048, "the number in the text");
    if (seq <= AR_SCORES_WHOLE)
        return NULL;
    return numerics == AR_NUMERICS_EXACT
               ? "attention's probabilities of more than 2,048 tokens are told by two numbers of each row"
               : "attention's probabilities of more than 2,048 tokens are left out";
}
