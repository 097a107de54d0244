/* SPDX-License-Identifier: Apache-2.0 */
/* Which layouts a check takes where nobody names one. */
#include "anyrank/check.h"
#include "anyrank/model.h"

/* A layout, and what stands in for it where it is not legal (tp 0: nothing). */
typedef struct choice {
    ar_parallel first, otherwise;
} choice;

/* Each kind of parallelism alone, tensor parallelism beyond the KV heads, and both kinds together. Heads that divide by
 * 3 take the second list: ranks that are no power of two. A sequence that does not divide by 3 cannot be spread over 3
 * ranks; then over 4 or 2. */
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
};

size_t ar_check_default_seq(const ar_config *c, const ar_parallel *p)
{
    const size_t usual = 64, of_threes = 24; /* the first multiple of 2, 3, 4, 6 and 8 */
    size_t unit = 1;
    if (p)
        unit = p->sp && p->tp > 1 ? (size_t)p->tp : 1;
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

size_t ar_check_default_layouts(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, ar_parallel *p,
                                size_t cap)
{
    const bool threes = c->heads % 3 == 0;
    const choice *list = threes ? multiples_of_three : powers_of_two;
    const size_t count =
        threes ? sizeof multiples_of_three / sizeof *multiples_of_three : sizeof powers_of_two / sizeof *powers_of_two;
    size_t n = 0;
    for (size_t i = 0; i < count && n < cap; i++) {
        if (ar_parallel_check(&list[i].first, c, plan, batch, seq) == AR_OK)
            p[n++] = list[i].first;
        else if (list[i].otherwise.tp > 0 && ar_parallel_check(&list[i].otherwise, c, plan, batch, seq) == AR_OK)
            p[n++] = list[i].otherwise;
    }
    ar_error_clear();
    if (n == 0 && cap > 0)
        p[n++] = (ar_parallel){.tp = 1};
    return n;
}

size_t ar_check_sweep(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, int world, ar_parallel *p,
                      size_t cap)
{
    size_t n = 0;
    for (int ranks = 1; ranks <= world; ranks++) {
        for (int tp = 1; tp <= ranks; tp++) {
            if (ranks % tp != 0)
                continue;
            for (int kind = 0; kind < 8; kind++) {
                const ar_parallel one = {.tp = tp,
                                         .dp = ranks / tp,
                                         .sp = (kind & 1) != 0,
                                         .micro_batches = (kind & 2) != 0 ? 2 : 1,
                                         .zero = (kind & 4) != 0 ? 1 : 0};
                if ((one.sp && tp == 1) || (one.zero > 0 && one.dp == 1) || (batch > 0 && (size_t)one.dp > batch) ||
                    ar_parallel_check(&one, c, plan, batch, seq) != AR_OK)
                    continue;
                if (n < cap)
                    p[n] = one;
                n++;
            }
        }
    }
    ar_error_clear();
    return n;
}
