/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/options/run.h"

#include <string.h>

#include "anyrank/device.h"
#include "gpu/device_private.h"
#include "ref/comm/comm_private.h"
#include "ref/core/axis.h"
#include "ref/core/context_private.h"
#include "ref/core/device_private.h"
#include "ref/core/schedule_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan.h"
#include "ref/models/plan_private.h"
#include "ref/pipeline/schedule_private.h"

const char *const ari_mlp_order_names[] = {"column-row", "row-column", NULL};
/* Members of ar_sim_algorithm for which the layout determines the bytes of each rank. With the other algorithms the
 * last rank that arrives moves all bytes. */
static const char *const collectives_names[] = {"direct", "ring", NULL};

#define ARI_VALUES ari_run_values
const ari_option ari_plan_options[] = {
    ARI_OPTION_SECTION("layout"),
    ARI_OPTION_PART("scale", run.shrink, 1, 65536, "1/N",
                    "shrink the model: about 1/N of each size, split by the same rules, with fresh weights",
                    .details =
                        "Layers, hidden size, features of a head, MLP and vocabulary become smaller, and a tp is "
                        "legal if and only if it was. Numbers of heads, biases, gate and all else stay; a note "
                        "says what became of each size."),
    ARI_OPTION_SIZE("mtp", run.mtp, 1, AR_MAX_MTP, "D",
                    "train blocks for D further tokens (multi-token prediction) in place of the model's own",
                    .details = "As num_nextn_predict_layers in config.json; a folder's weights must have them."),
    ARI_OPTION_DOUBLE("mtp-weight", run.mtp_weight, 1e-30, 1e6, "W",
                      "of --mtp: of the mean of their losses (default 0.1)"),
    ARI_OPTION_FILE("plan", plan, "FILE",
                    "which module is split how: rules as JSON, or a tp_plan of Hugging Face (default: as Megatron-LM)",
                    .details = "Norms in sequence style turn --sp on."),
    {0},
};
const ari_option ari_movement_options[] = {
    ARI_OPTION_SECTION("layout"),
    ARI_OPTION_ENUM("mlp-order", run.plan.mlp_order, ari_mlp_order_names,
                    "how the MLP's two layers are split (default column-row)"),
    ARI_OPTION_SECTION("cluster"),
    ARI_OPTION_ENUM("collectives", collectives, collectives_names,
                    "how the simulated cluster moves data; the bits are the same (default direct)"),
    ARI_OPTION_DOUBLE("timeout", timeout, 0.01, 86400, "S",
                      "longest wait of a rank for another, in seconds (default 60)",
                      .details = "A rank that waits longer ends the run with a table of who was where."),
    {0},
};
const ari_option ari_device_options[] = {
    ARI_OPTION_SECTION("numerics"),
    ARI_OPTION_STRING("device", device, "DEVICE",
                      "what the ranks compute on: cpu, cuda (a GPU for each rank, if there are as many; cuda:N: "
                      "GPU N, which they share) or emulated, the CUDA device's kernels on the host (default cpu)",
                      .choices = ari_device_kind_names),
    {0},
};
const ari_option ari_step_layout_options[] = {
    ARI_OPTION_SECTION("layout"),
    ARI_OPTION_FLAG("sp", run.parallel.sp,
                    "sequence parallel beside --tp: each rank holds a part of every sequence between the regions"),
    ARI_OPTION_FLAG("keep-gathered", run.parallel.keep_gathered,
                    "with --sp: keep gathered inputs for the backward pass, in place of gathering them again"),
    ARI_OPTION_INT("overlap", run.parallel.overlap, 1, 4096, "K",
                   "with --sp: gathers and reduce-scatters in K chunks of tokens, each beside the product of another "
                   "(default 1: one after the other)",
                   .details = "4 is a usual number."),
    ARI_OPTION_SECTION("memory"),
    ARI_OPTION_ENUM("recompute", run.parallel.recompute.part, ari_recompute_names,
                    "what of a block's forward pass the backward pass computes again in place of keeping it: none, "
                    "selective (the attention) or full (default none)"),
    ARI_OPTION_INT("recompute-every", run.parallel.recompute.every, 1, 4096, "N",
                   "with --recompute: of every N blocks the first is computed again (default 1: each)"),
    ARI_OPTION_SECTION("layout"),
    ARI_OPTION_INT("dp", run.parallel.dp, 1, 4096, "N",
                   "data-parallel ranks, or groups of --tp ranks: each holds some of the sequences",
                   .details = "Ranks need not hold equally many."),
    ARI_OPTION_INT("cp", run.parallel.cp, 1, 4096, "N",
                   "context-parallel ranks, or groups of --tp ranks: each holds some positions of every sequence",
                   .details = "In attention keys and values go round a ring of them; N has to divide --seq."),
    ARI_OPTION_INT("cp-inner", run.parallel.cp_inner, 1, 4096, "U",
                   "so many neighbours of --cp exchange heads for positions instead, so that the ring has N/U places "
                   "(default 1: the ring alone; N: the all-to-all alone)",
                   .details = "U has to divide N and the query heads of a tensor-parallel rank."),
    ARI_OPTION_FLAG("zigzag", run.parallel.zigzag,
                    "each of the R places of the ring of --cp takes the chunks r and 2R-1-r of 2R of a sequence, so "
                    "that causal attention gives all as much to do"),
    ARI_OPTION_INT("ep", run.parallel.ep, 1, 4096, "N",
                   "expert-parallel ranks: of the ranks of --dp and --cp so many neighbours share out the experts of a "
                   "layer between them, and send each other tokens (default 1: every rank has all experts)",
                   .details = "N has to divide the experts, and the ranks of --dp times --cp."),
    ARI_OPTION_INT("etp", run.parallel.etp, 1, 4096, "N",
                   "ranks that each expert's width is cut over: those of --tp (default), or 1, with --sp: each of them "
                   "has experts for its own positions, and --ep counts the ranks of --tp too"),
    ARI_OPTION_SECTION("memory"),
    ARI_OPTION_ENUM("dispatch", run.parallel.dispatch, ari_dispatch_names,
                    "with --ep: how tokens reach experts of other ranks, all-to-all (each row to its expert's rank) or "
                    "all-gather (each token to all ranks; default all-to-all)"),
    ARI_OPTION_SECTION("pipeline"),
    ARI_OPTION_INT("micro-batches", run.parallel.micro_batches, 1, 1e9, "M",
                   "pieces in which a rank goes through its sequences; gradients are accumulated (default 1)"),
    ARI_OPTION_FLAG("forward-first", run.parallel.forward_first,
                    "all micro-batches go forward before the first goes backward"),
    {0},
};
const ari_option ari_zero_options[] = {
    ARI_OPTION_SECTION("memory"),
    ARI_OPTION_INT("zero", run.parallel.zero, 0, 3, "STAGE",
                   "1: each rank of --dp and --cp keeps its share of the optimizer's state and updates its share of "
                   "the weights (ZeRO-1); 2: it also keeps its share alone of the gradients; 3: and of the weights, "
                   "gathered block by block (FSDP); 0: each does all (default 0)"),
    ARI_OPTION_INT("dp-replicate", run.parallel.dp_replicate, 1, 4096, "R",
                   "with --zero: the ranks of --dp are R groups, each of which shares out what --zero does not keep "
                   "whole (hybrid sharding; default 1)"),
    {0},
};
const ari_option ari_bucket_options[] = {
    ARI_OPTION_SECTION("buckets"),
    ARI_OPTION_ENUM("bucket-mode", run.ddp.mode, ari_bucket_mode_names,
                    "overlap: each bucket is reduced while the backward pass goes on; eager: all after it (default "
                    "overlap)"),
    ARI_OPTION_ENUM("bucket-order", run.ddp.order, ari_bucket_order_names,
                    "in which order parameters are put into buckets: reverse (the last one registered first, whose "
                    "gradient is ready first) or largest-first (default reverse)"),
    ARI_OPTION_FLAG("find-unused", run.ddp.find_unused,
                    "the ranks of --dp agree which parameters got a gradient; the others are left alone",
                    .details = "They keep no gradient, and their optimizer state stays as it is. Without this option a "
                               "parameter without gradient is an error that names it."),
    {0},
};
#undef ARI_VALUES

bool ari_split_given(const ari_run_values *v)
{
    const ar_parallel *p = &v->run.parallel;
    bool is_split = p->micro_batches > 0 || p->sp || p->zero > 0;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        is_split = is_split || ari_layout_as_given(p, i) > 0;
    return is_split;
}

bool ari_layout_given(const ari_run_values *v)
{
    const ar_recompute recompute = v->run.parallel.recompute.part;
    return ari_split_given(v) || (recompute != AR_RECOMPUTE_NONE && (unsigned)recompute < AR_RECOMPUTES);
}

/* Returns the device of an accepted name; the CPU if none was given. */
static ar_device_choice device_of(const ari_run_values *v)
{
    ar_device_choice c = {0};
    return v->device && ari_device_choice_parse(&c, v->device) == AR_OK ? c : (ar_device_choice){0};
}

ar_run ari_run_of(const ari_run_values *v, const ari_common *common)
{
    ar_run run = v->run;
    ar_parallel *p = &run.parallel;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        ari_layout_set(p, i, ari_layout_extent(p, i));
    p->cp_inner = ari_at_least_one(p->cp_inner);
    p->dp_replicate = ari_at_least_one(p->dp_replicate);
    p->ep = ari_at_least_one(p->ep);
    ari_pipeline_complete(p, v);
    p->micro_batches = ari_at_least_one(p->micro_batches);
    p->overlap = ari_at_least_one(p->overlap);
    p->recompute.every = ari_at_least_one(p->recompute.every);
    if ((unsigned)p->schedule >= AR_PP_SCHEDULES) /* not given, like the value for recomputation */
        p->schedule = AR_PP_1F1B;
    if ((unsigned)p->recompute.part >= AR_RECOMPUTES)
        p->recompute.part = AR_RECOMPUTE_NONE;
    run.ddp.zero = p->zero;
    run.ddp.bucket_bytes = run.ddp.bucket_bytes == ARI_NOT_GIVEN ? AR_BUCKET_BYTES : run.ddp.bucket_bytes;
    run.device = device_of(v);
    if (common->nccl_threads)
        run.device.index = AR_GPU_EACH;
    run.process = common->process;
    run.threads = common->threads;
    run.sim.algorithm = v->collectives == 0 ? AR_SIM_DIRECT : AR_SIM_RING;
    run.sim.timeout_ns = (uint64_t)(v->timeout * 1e9);
    return run;
}

ar_status ari_precision_check(ar_precision precision, ar_numerics numerics)
{
    if (precision != AR_PRECISION_TF32 || numerics != AR_NUMERICS_EXACT) /* native numerics, or not chosen yet */
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "--precision tf32: exact numerics multiply fp32 or bf16 numbers, give --numerics native too, "
                        "or --precision f32 or bf16");
}

static ar_status check_context(const ar_parallel *p)
{
    const int cp = ari_at_least_one(p->cp), inner = ari_at_least_one(p->cp_inner);
    if (p->cp_inner > 0 && p->cp == 0)
        return ar_error_set(AR_ERR_ARG, "--cp-inner %d is about the ranks of --cp: give --cp N too", p->cp_inner);
    if (cp % inner != 0)
        return ar_error_set(AR_ERR_ARG, "--cp %d is not a number of groups of --cp-inner %d: give one that divides %d",
                            cp, inner, cp);
    if (p->ep > 1 && p->dp == 0 && p->cp == 0 && p->etp != 1)
        return ar_error_set(
            AR_ERR_ARG, "--ep %d shares experts out to the ranks of --dp and --cp: give --dp N or --cp N too", p->ep);
    if (p->dispatch != AR_DISPATCH_ALL_TO_ALL && p->ep <= 1)
        return ar_error_set(AR_ERR_ARG, "--dispatch %s is about the ranks of --ep: give --ep N too",
                            ari_dispatch_names[p->dispatch]);
    if (p->zigzag && cp / inner == 1)
        return ar_error_set(AR_ERR_ARG,
                            "--zigzag orders the ring of --cp / --cp-inner ranks, which has %d / %d = 1 here: "
                            "give a larger --cp N",
                            cp, inner);
    return AR_OK;
}

ar_status ari_layout_check(const ari_run_values *v)
{
    const ar_parallel *p = &v->run.parallel;
    if (v->run.dropout >= 1.0)
        return ar_error_set(AR_ERR_ARG, "--dropout %g drops everything: give a probability from 0 to below 1",
                            v->run.dropout);
    if (v->run.loss.label_smoothing >= 1.0)
        return ar_error_set(AR_ERR_ARG,
                            "--label-smoothing %g leaves nothing of a label: give a share from 0 to below 1",
                            v->run.loss.label_smoothing);
    AR_TRY(ari_precision_check(v->run.precision, v->run.numerics));
    if (p->sp && p->tp == 0)
        return ar_error_set(AR_ERR_ARG, "--sp splits sequences over the ranks of --tp: give --tp N too");
    if (p->keep_gathered && !p->sp)
        return ar_error_set(AR_ERR_ARG, "--keep-gathered is about the gathers of --sp: give --tp N --sp too");
    if (p->overlap > 1 && !p->sp)
        return ar_error_set(AR_ERR_ARG, "--overlap %d is about the collectives of --sp: give --tp N --sp too",
                            p->overlap);
    if (p->recompute.every > 0 && p->recompute.part == AR_RECOMPUTE_NONE)
        return ar_error_set(AR_ERR_ARG,
                            "--recompute-every %d is about the blocks of --recompute: give --recompute "
                            "selective or full too",
                            p->recompute.every);
    if (p->forward_first && p->micro_batches < 2)
        return ar_error_set(AR_ERR_ARG,
                            "--forward-first is an order of micro-batches: give --micro-batches M of at least 2 too");
    if (p->zero > 0 && p->dp == 0 && p->cp == 0)
        return ar_error_set(AR_ERR_ARG,
                            "--zero %d shares state out to the ranks of --dp and --cp: give --dp N or "
                            "--cp N too",
                            p->zero);
    if (p->dp_replicate > 1 && (p->zero <= 0 || p->dp % p->dp_replicate != 0))
        return ar_error_set(AR_ERR_ARG,
                            "--dp-replicate %d makes so many groups of the --dp %d ranks of --zero %d: give a --zero "
                            "of at least 1, and a --dp that it divides",
                            p->dp_replicate, ari_at_least_one(p->dp), p->zero);
    AR_TRY(check_context(p));
    AR_TRY(ari_pipeline_check(v));
    ar_device_choice unused;
    return v->device ? ari_device_choice_parse(&unused, v->device) : AR_OK;
}

void ari_device_json(json_t *o, const ar_device_choice *c)
{
    ar_gpu_info gpu = {0};
    json_object_set_new(o, "device", json_string(ari_device_kind_name(c->kind)));
    if (c->kind == AR_DEVICE_CUDA && ari_gpu_info_get(&gpu, ari_gpu_index(c)) == AR_OK)
        json_object_set_new(o, "gpu", json_pack("{s:i, s:s}", "index", ari_gpu_index(c), "name", gpu.name));
}

static ar_status load_plan(const ari_run_values *v, ar_run *run)
{
    if (!v->plan)
        return AR_OK;
    if (run->plan.mlp_order != AR_MLP_COLUMN_ROW)
        return ar_error_set(AR_ERR_ARG, "--mlp-order is of the default plan: say it in the file of --plan");
    AR_TRY(ar_plan_load(&run->plan, v->plan));
    run->parallel.sp = run->parallel.sp || (run->parallel.tp > 1 && ari_plan_sequence(&run->plan));
    return AR_OK;
}

static ar_status settle_balance(ar_router_losses *r)
{
    if (r->balance == AR_BALANCE_NONE && r->balance_weight > 0.0)
        return ar_error_set(AR_ERR_ARG, "--balance-weight %g is that of --balance: give sequence, batch or layers too",
                            r->balance_weight);
    if (r->balance != AR_BALANCE_NONE && !(r->balance_weight > 0.0))
        r->balance_weight = 0.01;
    return AR_OK;
}

ar_status ari_layout_load(const ari_run_values *v, ar_run *run)
{
    AR_TRY(settle_balance(&run->loss.router));
    AR_TRY(load_plan(v, run));
    return ari_pipeline_load(&run->parallel, v);
}

void ari_layout_unload(ar_run *run)
{
    ar_plan_fini(&run->plan);
    ari_pipeline_schedule_destroy((ar_pipeline_schedule *)(uintptr_t)run->parallel.own_schedule);
    run->parallel.own_schedule = NULL;
}

void ari_plan_print(FILE *out, const ar_plan *p)
{
    char hash[65] = "?";
    if (p->rules > 0 && ari_plan_hash(hash, p) == AR_OK)
        fprintf(out, "plan %s: %zu rule%s, sha256 %.12s\n", ARI_SHOW(ari_plan_file(p)), p->rules, ARI_PLURAL(p->rules),
                hash);
    else if (p->mlp_order != AR_MLP_COLUMN_ROW)
        fprintf(out, "plan of the architecture, with MLPs %s\n", ari_mlp_order_names[p->mlp_order]);
}

json_t *ari_plan_json(const ar_plan *p)
{
    json_t *rules = NULL;
    char hash[65];
    if (p->rules == 0)
        return json_pack("{s:n, s:s, s:n, s:n}", "file", "mlp_order", ari_mlp_order_names[p->mlp_order], "sha256",
                         "rules");
    if (ari_plan_hash(hash, p) != AR_OK || ari_plan_rules_json(&rules, p) != AR_OK)
        return NULL;
    return json_pack("{s:o, s:n, s:s, s:o}", "file", ari_json_text_or_null(p->file), "mlp_order", "sha256", hash,
                     "rules", rules);
}

/* Samples of a data-parallel rank. */
static size_t samples_of(const ar_parallel *p, size_t batch, int dp_rank)
{
    size_t start = 0, count = 0;
    ari_comm_slice(batch, ari_at_least_one(p->dp), dp_rank, &start, &count);
    return count;
}

const char *ari_layout_text(char *text, const ar_parallel *p, size_t batch)
{
    enum { MOST_SHOWN = 12 };
    const size_t dp = (size_t)ari_at_least_one(p->dp);
    ari_parallel_text(text, ARI_LAYOUT_TEXT, p);
    if (batch % dp == 0 || dp > MOST_SHOWN)
        return text;
    for (size_t r = 0; r < dp; r++) {
        const size_t used = strlen(text);
        snprintf(text + used, ARI_LAYOUT_TEXT - used, "%s%zu%s", r == 0 ? " (" : "+", samples_of(p, batch, (int)r),
                 r + 1 == dp ? ")" : "");
    }
    return text;
}

const char ari_layout_of_run[] =
    "world tp dp cp cp_inner zigzag ep etp dispatch pp virtual_stages stages schedule_pp sp zero dp_replicate micro_batches "
    "samples_per_rank keep_gathered forward_first overlap recompute recompute_every";
const char ari_layout_of_plan[] =
    "tp cp cp_inner zigzag ep etp dispatch pp dp sp overlap zero dp_replicate micro_batches schedule "
    "virtual_stages recompute recompute_every";
const char ari_layout_of_row[] =
    "tp cp cp_inner zigzag ep etp dispatch pp dp sp zero dp_replicate micro_batches schedule "
    "virtual_stages recompute";
const char ari_layout_of_fault[] =
    "world tp dp cp cp_inner zigzag ep etp dispatch pp virtual_stages schedule_pp sp overlap zero dp_replicate micro_batches "
    "forward_first recompute";

static json_t *samples_json(const ar_parallel *p, size_t batch)
{
    json_t *samples = json_array();
    for (int d = 0; d < ari_at_least_one(p->dp); d++)
        json_array_append_new(samples, json_integer((json_int_t)samples_of(p, batch, d)));
    return samples;
}

/* Kinds of layout fields besides its axes; an EXTENT of 0 counts as 1. */
enum field_kind { FLAG, INT, EXTENT };
static const struct field {
    const char *name;
    enum field_kind kind;
    size_t offset;
} fields[] = {
    {"cp_inner", EXTENT, offsetof(ar_parallel, cp_inner)},
    {"zigzag", FLAG, offsetof(ar_parallel, zigzag)},
    {"ep", EXTENT, offsetof(ar_parallel, ep)},
    {"virtual_stages", EXTENT, offsetof(ar_parallel, virtual_stages)},
    {"sp", FLAG, offsetof(ar_parallel, sp)},
    {"zero", INT, offsetof(ar_parallel, zero)},
    {"dp_replicate", EXTENT, offsetof(ar_parallel, dp_replicate)},
    {"micro_batches", EXTENT, offsetof(ar_parallel, micro_batches)},
    {"keep_gathered", FLAG, offsetof(ar_parallel, keep_gathered)},
    {"forward_first", FLAG, offsetof(ar_parallel, forward_first)},
    {"overlap", EXTENT, offsetof(ar_parallel, overlap)},
    {"recompute_every", EXTENT, offsetof(ar_parallel, recompute.every)},
};

static json_t *field_json(const struct field *f, const ar_parallel *p)
{
    const void *value = (const char *)p + f->offset;
    if (f->kind == FLAG)
        return json_boolean(*(const bool *)value);
    const int n = *(const int *)value;
    return json_integer(f->kind == EXTENT ? ari_at_least_one(n) : n);
}

static json_t *member(const char *name, const ar_parallel *p, size_t batch)
{
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        if (strcmp(name, ari_layout_axes[i].name) == 0)
            return json_integer(ari_layout_extent(p, i));
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (strcmp(name, fields[i].name) == 0)
            return field_json(&fields[i], p);
    if (strcmp(name, "world") == 0)
        return json_integer(ar_parallel_world(p));
    if (strcmp(name, "etp") == 0)
        return json_integer(ari_at_least_one(p->etp > 0 ? p->etp : p->tp));
    if (strcmp(name, "dispatch") == 0)
        return ari_experts_routed(p) ? json_string(ari_dispatch_name(p->dispatch)) : json_null();
    if (strcmp(name, "stages") == 0)
        return ari_stages_json(&p->stages);
    if (strcmp(name, "samples_per_rank") == 0)
        return samples_json(p, batch);
    if (strcmp(name, "recompute") == 0)
        return json_string(ari_recompute_names[p->recompute.part]);
    if (strncmp(name, "schedule", sizeof "schedule" - 1) != 0) /* "schedule_pp" too */
        return NULL;
    const char *schedule = p->own_schedule ? "own" : ari_pp_schedule_name(p->schedule);
    return p->pp > 1 ? json_string(schedule) : json_null();
}

json_t *ari_layout_json(const ar_parallel *p, size_t batch, const char *members)
{
    json_t *o = json_object();
    while (o && *members) {
        char name[32];
        const size_t length = strcspn(members, " ");
        snprintf(name, sizeof name, "%.*s", (int)length, members);
        if (json_object_set_new(o, name, member(name, p, batch)) != 0) {
            json_decref(o);
            o = NULL;
        }
        members += length + strspn(members + length, " ");
    }
    return o;
}
