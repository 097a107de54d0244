/* SPDX-License-Identifier: Apache-2.0 */
/* Which layouts a check takes where nobody names one. */
#include "anyrank/check.h"
#include "anyrank/model.h"

/* A layout, and what stands in for it where it is not legal (tp 0: nothing). */
typedef struct choice {
    ar_parallel first, otherwise;
} choice;

/* Each kind of parallelism alone, tensor parallelism beyond the KV heads, and several kinds together. Heads that divide
 * by 3 take the second list: ranks that are no power of two. A sequence that does not divide by 3 cannot be spread over
 * 3 ranks; then over 4 or 2. */
static const choice powers_of_two[] = {
    {.first = {.tp = 1}},
    {.first = {.tp = 2}},
    {.first = {.tp = 4}},
    {.first = {.tp = 4, .sp = true}},
    {.first = {.tp = 8, .sp = true}},
    {.first = {.dp = 2}},
    {.first = {.dp = 2, .tp = 2, .sp = true}},
    {.first = {.dp = 2, .tp = 2, .zero = 1}},
    {.first = {.dp = 3}},
    {.first = {.micro_batches = 2}},
    {.first = {.micro_batches = 4}},
    {.first = {.cp = 2, .zigzag = true}},
    {.first = {.cp = 4, .cp_inner = 2, .tp = 2, .sp = true, .zero = 1},
     .otherwise = {.cp = 4, .tp = 2, .sp = true, .zero = 1}},
    {.first = {.pp = 2, .micro_batches = 4}},
    {.first = {.pp = 2,
               .virtual_stages = 2,
               .schedule = AR_PP_INTERLEAVED,
               .dp = 2,
               .tp = 2,
               .sp = true,
               .zero = 1,
               .micro_batches = 2},
     .otherwise = {.pp = 2, .dp = 2, .tp = 2, .sp = true, .zero = 1, .micro_batches = 2}},
};
static const choice multiples_of_three[] = {
    {.first = {.tp = 1}},
    {.first = {.tp = 3, .sp = true}, .otherwise = {.tp = 4, .sp = true}},
    {.first = {.tp = 6}},
    {.first = {.dp = 2}},
    {.first = {.dp = 2, .tp = 3, .sp = true}, .otherwise = {.dp = 2, .tp = 2, .sp = true}},
    {.first = {.dp = 2, .tp = 2, .zero = 1}},
    {.first = {.dp = 3}},
    {.first = {.micro_batches = 2}},
    {.first = {.micro_batches = 4}},
    {.first = {.cp = 3, .zigzag = true}, .otherwise = {.tp = 1, .cp = 2, .zigzag = true}},
    {.first = {.cp = 2, .cp_inner = 2, .tp = 2, .sp = true, .zero = 1},
     .otherwise = {.cp = 2, .tp = 2, .sp = true, .zero = 1}},
    {.first = {.pp = 3, .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = 4}},
    {.first = {.pp = 2, .dp = 2, .tp = 3, .sp = true, .zero = 1, .micro_batches = 2},
     .otherwise = {.pp = 2, .dp = 2, .tp = 2, .sp = true, .zero = 1, .micro_batches = 2}},
};

/* Of models with experts besides: these are refused for others. */
static const choice with_experts[] = {
    {.first = {.dp = 2, .ep = 2}, .otherwise = {.tp = 1, .dp = 3, .ep = 3}},
    {.first = {.dp = 4, .ep = 2, .tp = 2, .sp = true, .zero = 1, .dp_replicate = 2}},
    {.first = {.dp = 2, .cp = 2, .ep = 4, .zero = 3}, .otherwise = {.tp = 1, .dp = 2, .cp = 2, .ep = 2, .zero = 3}},
    {.first = {.pp = 2, .cp = 2, .ep = 2, .dispatch = AR_DISPATCH_ALL_GATHER, .tp = 2, .micro_batches = 2}},
    {.first = {.tp = 2, .sp = true, .cp = 2, .etp = 1, .ep = 4}, .otherwise = {.tp = 2, .sp = true, .etp = 1, .ep = 2}},
};

size_t ar_check_default_seq(const ar_config *c, const ar_parallel *p)
{
    const size_t usual = 64, of_threes = 24; /* the first multiple of 2, 3, 4, 6 and 8 */
    size_t unit = 1;
    if (p)
        unit = ar_parallel_sequence_unit(p);
    else if (c->heads % 3 == 0)
        unit = of_threes;
    const size_t wanted = (usual + unit - 1) / unit * unit;
    if (wanted <= c->max_positions)
        return wanted;
    return c->max_positions >= unit ? c->max_positions / unit * unit : c->max_positions;
}

size_t ar_check_default_bucket_bytes(const ar_config *c)
{
    const size_t several = 8;
    size_t parameters = 0;
    if (ar_config_parameters(c, &parameters) != AR_OK || parameters / several > AR_BUCKET_BYTES / sizeof(float))
        return AR_BUCKET_BYTES;
    return parameters / several * sizeof(float);
}

/* Layouts as they are found. */
typedef struct sweep {
    const ar_config *config;
    const ar_plan *plan;
    size_t batch, seq;
    ar_parallel *at; /* [cap] */
    size_t cap, n;
    int pipelines; /* meshes with one */
} sweep;

static bool is_legal(const sweep *s, const ar_parallel *p)
{
    return ar_parallel_check(p, s->config, s->plan, s->batch, s->seq) == AR_OK;
}

static void add_choices(sweep *s, const choice *list, size_t count)
{
    for (size_t i = 0; i < count && s->n < s->cap; i++) {
        if (is_legal(s, &list[i].first))
            s->at[s->n++] = list[i].first;
        else if (list[i].otherwise.tp > 0 && is_legal(s, &list[i].otherwise))
            s->at[s->n++] = list[i].otherwise;
    }
}

size_t ar_check_default_layouts(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, ar_parallel *p,
                                size_t cap)
{
    const bool threes = c->heads % 3 == 0;
    const choice *list = threes ? multiples_of_three : powers_of_two;
    const size_t count =
        threes ? sizeof multiples_of_three / sizeof *multiples_of_three : sizeof powers_of_two / sizeof *powers_of_two;
    sweep s = {.config = c, .plan = plan, .batch = batch, .seq = seq, .at = p, .cap = cap};
    add_choices(&s, list, count);
    add_choices(&s, with_experts, sizeof with_experts / sizeof *with_experts);
    size_t n = s.n;
    ar_error_clear();
    if (n == 0 && cap > 0)
        p[n++] = (ar_parallel){.tp = 1};
    return n;
}

/* Every legal form of a mesh: with and without sp, two micro-batches, ZeRO and zigzag, as far as they mean
 * something. */
static void add_forms(sweep *s, const ar_parallel *mesh)
{
    const bool ring = mesh->cp > mesh->cp_inner;
    for (int form = 0; form < 16; form++) {
        ar_parallel one = *mesh;
        one.sp = (form & 1) != 0;
        one.micro_batches = (form & 2) != 0 ? 2 : 1;
        one.zero = (form & 4) != 0 ? 1 : 0;
        one.zigzag = (form & 8) != 0;
        if ((one.sp && one.tp == 1) || (one.zero > 0 && one.dp * one.cp == 1) || (one.zigzag && !ring) ||
            !is_legal(s, &one))
            continue;
        if (s->n < s->cap)
            s->at[s->n] = one;
        s->n++;
    }
}

/* The meshes take the schedules in turn. */
static void choose_schedule(sweep *s, ar_parallel *mesh)
{
    if (mesh->pp == 1)
        return;
    mesh->schedule = (ar_pp_schedule)(s->pipelines++ % AR_PP_SCHEDULES);
    if (mesh->schedule == AR_PP_INTERLEAVED && s->config->layers < 2 * (size_t)mesh->pp)
        mesh->schedule = AR_PP_1F1B;
    mesh->virtual_stages = mesh->schedule == AR_PP_INTERLEAVED ? 2 : 1;
}

/* Every mesh of so many ranks, tp * pp of them for each sequence or part of one. */
static void add_meshes(sweep *s, int ranks, int tp, int pp)
{
    const int others = ranks / (tp * pp);
    const bool has_experts = s->config->experts.n > 0;
    for (int cp = 1; cp <= others; cp++) {
        for (int inner = 1; inner <= cp && others % cp == 0; inner++) {
            ar_parallel mesh = {.tp = tp, .pp = pp, .cp = cp, .cp_inner = inner, .dp = others / cp};
            if (cp % inner != 0 || (s->batch > 0 && (size_t)mesh.dp > s->batch))
                continue;
            choose_schedule(s, &mesh);
            for (mesh.etp = 0; mesh.etp <= (has_experts && tp > 1); mesh.etp++) {
                for (mesh.ep = 1; mesh.ep == 1 || (has_experts && mesh.ep <= others * tp); mesh.ep++)
                    add_forms(s, &mesh);
            }
        }
    }
}

size_t ar_check_sweep(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, int world, ar_parallel *p,
                      size_t cap)
{
    sweep s = {.config = c, .plan = plan, .batch = batch, .seq = seq, .at = p, .cap = cap};
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
