/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts of a check for which the user named none. */
#include "anyrank/check.h"
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/parallel_private.h"
#include "verify/check/check_private.h"

/* Models whose heads divide by 3 can use numbers of ranks that are no powers of two. */
typedef enum taken_by { EACH, TWOS, THREES } taken_by;

/* A layout, and a replacement if the layout is illegal (tp 0: none). */
typedef struct choice {
    taken_by divisor;
    ar_parallel preferred, otherwise;
} choice;

/* The default layouts: each kind of parallelism alone, tensor parallelism beyond the number of KV heads, and several
 * kinds together. A sequence whose length is not a multiple of 3 is split over 4 or 2 ranks instead of 3. The last
 * layouts are for models with experts; other models refuse them. */
static const choice choices[] = {
    {EACH, {.tp = 1}, {0}},
    {TWOS, {.tp = 2}, {0}},
    {TWOS, {.tp = 4}, {0}},
    {TWOS, {.tp = 4, .sp = true}, {0}},
    {TWOS, {.tp = 8, .sp = true}, {0}},
    {THREES, {.tp = 3, .sp = true}, {.tp = 4, .sp = true}},
    {THREES, {.tp = 6}, {0}},
    {EACH, {.dp = 2}, {0}},
    {TWOS, {.dp = 2, .tp = 2, .sp = true}, {0}},
    {THREES, {.dp = 2, .tp = 3, .sp = true}, {.dp = 2, .tp = 2, .sp = true}},
    {EACH, {.dp = 2, .tp = 2, .zero = 1}, {0}},
    {EACH, {.dp = 3}, {0}},
    {EACH, {.micro_batches = 2}, {0}},
    {EACH, {.micro_batches = 4}, {0}},
    {TWOS, {.cp = 2, .zigzag = true}, {0}},
    {THREES, {.cp = 3, .zigzag = true}, {.tp = 1, .cp = 2, .zigzag = true}},
    {TWOS, {.cp = 4, .cp_inner = 2, .tp = 2, .sp = true, .zero = 1}, {.cp = 4, .tp = 2, .sp = true, .zero = 1}},
    {THREES, {.cp = 2, .cp_inner = 2, .tp = 2, .sp = true, .zero = 1}, {.cp = 2, .tp = 2, .sp = true, .zero = 1}},
    {TWOS, {.pp = 2, .micro_batches = 4}, {0}},
    {THREES, {.pp = 3, .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = 4}, {0}},
    {TWOS,
     {.pp = 2,
      .virtual_stages = 2,
      .schedule = AR_PP_INTERLEAVED,
      .dp = 2,
      .tp = 2,
      .sp = true,
      .zero = 1,
      .micro_batches = 2},
     {.pp = 2, .dp = 2, .tp = 2, .sp = true, .zero = 1, .micro_batches = 2}},
    {THREES,
     {.pp = 2, .dp = 2, .tp = 3, .sp = true, .zero = 1, .micro_batches = 2},
     {.pp = 2, .dp = 2, .tp = 2, .sp = true, .zero = 1, .micro_batches = 2}},
    {EACH, {.dp = 2, .ep = 2}, {.tp = 1, .dp = 3, .ep = 3}},
    {EACH, {.dp = 4, .ep = 2, .tp = 2, .sp = true, .zero = 1, .dp_replicate = 2}, {0}},
    {EACH, {.dp = 2, .cp = 2, .ep = 4, .zero = 3}, {.tp = 1, .dp = 2, .cp = 2, .ep = 2, .zero = 3}},
    {EACH, {.pp = 2, .cp = 2, .ep = 2, .dispatch = AR_DISPATCH_ALL_GATHER, .tp = 2, .micro_batches = 2}, {0}},
    {EACH, {.tp = 2, .sp = true, .cp = 2, .etp = 1, .ep = 4}, {.tp = 2, .sp = true, .etp = 1, .ep = 2}},
};

size_t ari_check_default_seq(const ar_config *c, const ar_parallel *p)
{
    const size_t usual = 64, of_threes = 24; /* the first multiple of 2, 3, 4, 6 and 8 */
    size_t unit = 1;
    if (p)
        unit = ari_parallel_sequence_unit(p);
    else if (c->heads % 3 == 0)
        unit = of_threes;
    const size_t rounded_seq = (usual + unit - 1) / unit * unit;
    if (rounded_seq <= c->max_positions)
        return rounded_seq;
    return c->max_positions >= unit ? c->max_positions / unit * unit : c->max_positions;
}

size_t ari_check_default_bucket_bytes(const ar_config *c)
{
    const size_t several = 8;
    size_t parameters = 0;
    if (ari_config_parameters(c, &parameters) != AR_OK || parameters / several > AR_BUCKET_BYTES / sizeof(float))
        return AR_BUCKET_BYTES;
    return parameters / several * sizeof(float);
}

/* Collects layouts. */
typedef struct sweep {
    const ar_config *config;
    const ar_plan *plan;
    size_t batch, seq;
    ar_parallel *layouts; /* [cap] */
    size_t cap, n;
    int pipelines; /* number of meshes with a pipeline */
} sweep;

static bool is_legal(const sweep *s, const ar_parallel *p)
{
    return ari_parallel_check(p, s->config, s->plan, s->batch, s->seq) == AR_OK;
}

size_t ari_check_default_layouts(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, ar_parallel *p,
                                 size_t cap)
{
    const taken_by divisor = c->heads % 3 == 0 ? THREES : TWOS;
    sweep s = {.config = c, .plan = plan, .batch = batch, .seq = seq, .layouts = p, .cap = cap};
    for (size_t i = 0; i < sizeof choices / sizeof *choices && s.n < cap; i++) {
        const choice *candidate = &choices[i];
        if (candidate->divisor != EACH && candidate->divisor != divisor)
            continue;
        if (is_legal(&s, &candidate->preferred))
            p[s.n++] = candidate->preferred;
        else if (candidate->otherwise.tp > 0 && is_legal(&s, &candidate->otherwise))
            p[s.n++] = candidate->otherwise;
    }
    ar_error_clear();
    if (s.n == 0 && cap > 0)
        p[s.n++] = (ar_parallel){.tp = 1};
    return s.n;
}

/* Adds every meaningful legal form of a mesh: with and without sp, two micro-batches, ZeRO and zigzag. */
static void add_forms(sweep *s, const ar_parallel *mesh)
{
    const bool ring = mesh->cp > mesh->cp_inner;
    for (int form = 0; form < 16; form++) {
        ar_parallel layout = *mesh;
        layout.sp = (form & 1) != 0;
        layout.micro_batches = (form & 2) != 0 ? 2 : 1;
        layout.zero = (form & 4) != 0 ? 1 : 0;
        layout.zigzag = (form & 8) != 0;
        if ((layout.sp && layout.tp == 1) || (layout.zero > 0 && layout.dp * layout.cp == 1) ||
            (layout.zigzag && !ring) || !is_legal(s, &layout))
            continue;
        if (s->n < s->cap)
            s->layouts[s->n] = layout;
        s->n++;
    }
}

/* Assigns the schedules to the meshes in turn. */
static void choose_schedule(sweep *s, ar_parallel *mesh)
{
    if (mesh->pp == 1)
        return;
    mesh->schedule = (ar_pp_schedule)(s->pipelines++ % AR_PP_SCHEDULES);
    if (mesh->schedule == AR_PP_INTERLEAVED && s->config->layers < 2 * (size_t)mesh->pp)
        mesh->schedule = AR_PP_1F1B;
    mesh->virtual_stages = mesh->schedule == AR_PP_INTERLEAVED ? 2 : 1;
}

/* Adds every mesh of this many ranks, with tp * pp ranks for each sequence or part of a sequence. */
static void add_meshes(sweep *s, int ranks, int tp, int pp)
{
    const int data_ranks = ranks / (tp * pp);
    const bool has_experts = s->config->experts.n > 0;
    for (int cp = 1; cp <= data_ranks; cp++) {
        for (int inner = 1; inner <= cp && data_ranks % cp == 0; inner++) {
            ar_parallel mesh = {.tp = tp, .pp = pp, .cp = cp, .cp_inner = inner, .dp = data_ranks / cp};
            if (cp % inner != 0 || (s->batch > 0 && (size_t)mesh.dp > s->batch))
                continue;
            choose_schedule(s, &mesh);
            for (mesh.etp = 0; mesh.etp <= (has_experts && tp > 1); mesh.etp++) {
                for (mesh.ep = 1; mesh.ep == 1 || (has_experts && mesh.ep <= data_ranks * tp); mesh.ep++)
                    add_forms(s, &mesh);
            }
        }
    }
}

size_t ari_check_sweep(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, int world, ar_parallel *p,
                       size_t cap)
{
    sweep s = {.config = c, .plan = plan, .batch = batch, .seq = seq, .layouts = p, .cap = cap};
    for (int ranks = 1; ranks <= world; ranks++) {
        for (int tp = 1; tp <= ranks; tp++) {
            for (int pp = 1; tp * pp <= ranks; pp++) {
                if (ranks % (tp * pp) == 0)
                    add_meshes(&s, ranks, tp, pp);
            }
        }
    }
    ar_error_clear();
    return s.n;
}
