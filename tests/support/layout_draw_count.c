/* SPDX-License-Identifier: Apache-2.0 */
/* Runs numbers of draws and counts what they cover. */
#include <stdlib.h>

#include "support/layout_draw.h"

/* Whether the last chunk of the own positions is shorter than the others. */
static bool cut_unevenly(const layout_draw *d)
{
    const ar_parallel *p = &d->parallel;
    const size_t own = d->seq / (size_t)(p->cp * p->tp), k = (size_t)p->overlap;
    return k > 1 && own % ((own + k - 1) / k) != 0;
}

void layout_histogram_add(layout_histogram *h, const layout_draw *d)
{
    const ar_parallel *p = &d->parallel;
    h->draws++;
    h->ranks[ar_parallel_world(p)]++;
    h->tp += p->tp > 1;
    h->sp += p->tp > 1 && p->sp;
    h->overlap += p->overlap > 1;
    h->cut += cut_unevenly(d);
    h->replicas += (size_t)(p->tp * p->cp_inner) > d->config.kv_heads;
    h->ring += p->cp > p->cp_inner;
    h->inner += p->cp_inner > 1;
    h->both += p->cp > p->cp_inner && p->cp_inner > 1;
    h->zigzag += p->zigzag;
    h->packed += d->packed;
    h->dp += p->dp > 1;
    h->zero += p->dp > 1 && p->zero > 0;
    h->eager += p->dp > 1 && d->ddp.mode == AR_BUCKETS_EAGER;
    h->uneven += d->batch % (size_t)p->dp != 0;
    h->empty += d->batch < (size_t)p->dp;
    h->micro += p->micro_batches > 1;
    h->selective += p->recompute.what == AR_RECOMPUTE_SELECTIVE;
    h->stages += p->pp > 1;
    h->given += p->stages.n > 0;
    h->of_rank += p->virtual_stages > 1;
    h->fewer += p->micro_batches < p->pp;
    h->schedule[p->schedule] += p->pp > 1;
    h->sharing[p->dp * p->cp > 1 ? p->zero : 0]++;
    h->copies += p->dp_replicate > 1;
    h->full += p->recompute.what == AR_RECOMPUTE_FULL;
    h->by_check += d->by_check;
    h->dropout += d->dropout > 0.0;
    h->clip += d->clip > 0.0;
    h->smoothed += d->loss.label_smoothing > 0.0;
    h->z_loss += d->loss.z_loss > 0.0;
    h->row_column += d->order == AR_MLP_ROW_COLUMN;
    h->tied += d->config.tied;
    h->window += d->config.window > 0 && d->config.window < d->seq;
    h->phi3 += d->config.arch == AR_ARCH_PHI3;
    h->scaled += d->config.rope.kind > AR_ROPE_LINEAR;
    h->steps[d->steps]++;
    h->one += d->config.experts.per_token == 1;
    h->all += d->config.experts.n > 0 && d->config.experts.per_token == d->config.experts.n;
    h->shared += d->config.experts.shared > 0;
    h->normalised += d->config.experts.normalised;
    h->spread += p->ep > 1;
    h->uncut += p->etp == 1;
    h->few[p->tp == 1 && p->zero > 0 ? p->dp : 0]++;
}

void layout_histogram_print(const layout_histogram *h, FILE *to)
{
    fprintf(
        to,
        "%d draws: tp > 1: %d, sp: %d, in chunks: %d (the last shorter: %d), replicas of KV heads: %d, rings: %d (zigzag: %d), inner neighbours: %d (of a ring: "
        "%d), packed documents: %d, dp > 1: %d (zero: %d, eager: %d), uneven: %d (ranks "
        "without samples: "
        "%d), micro-batches: %d, recomputed: %d and %d, row-column: %d, tied: %d, windows: %d, scaled frequencies: %d, phi3: %d, dropout: %d, clipping: %d, label smoothing: "
        "%d, z-loss: %d, steps "
        "0, 1, 2: %d, %d, %d, whole checks: %d; ranks",
        h->draws, h->tp, h->sp, h->overlap, h->cut, h->replicas, h->ring, h->zigzag, h->inner, h->both, h->packed,
        h->dp, h->zero, h->eager, h->uneven, h->empty, h->micro, h->selective, h->full, h->row_column, h->tied,
        h->window, h->scaled, h->phi3, h->dropout, h->clip, h->smoothed, h->z_loss, h->steps[0], h->steps[1],
        h->steps[2], h->by_check);
    for (int i = 1; i <= LAYOUT_DRAW_RANKS; i++) {
        if (h->ranks[i] > 0)
            fprintf(to, " %d: %d", i, h->ranks[i]);
    }
    fprintf(to, "\n");
    if (h->one + h->all > 0)
        fprintf(
            to,
            "one expert a token: %d, all: %d, a shared expert: %d, normalised weights: %d, ep > 1: %d, etp = 1: %d\n",
            h->one, h->all, h->shared, h->normalised, h->spread, h->uncut);
    if (h->stages == 0)
        return;
    fprintf(
        to,
        "pipelines: %d, of given layers: %d, several stages a rank: %d, fewer micro-batches than ranks: %d; ZeRO-1, 2, 3: "
        "%d, %d, %d, of copies: %d; schedules",
        h->stages, h->given, h->of_rank, h->fewer, h->sharing[1], h->sharing[2], h->sharing[3], h->copies);
    for (int i = 0; i < AR_PP_SCHEDULES; i++)
        fprintf(to, " %s: %d", ar_pp_schedule_name((ar_pp_schedule)i), h->schedule[i]);
    fprintf(to, "\n");
}

bool layout_histogram_has_contexts(const layout_histogram *h)
{
    return 10 * h->ring >= 6 * h->draws && 10 * h->zigzag >= 3 * h->draws && 10 * h->inner >= 4 * h->draws &&
           10 * h->both >= 2 * h->draws && 10 * h->tp >= 4 * h->draws && 10 * h->sp >= 2 * h->draws &&
           10 * h->replicas >= 2 * h->draws && 10 * h->dp >= 3 * h->draws && 10 * h->zero >= h->draws &&
           20 * h->selective >= 3 * h->draws && 20 * h->full >= 3 * h->draws && 10 * h->window >= 2 * h->draws &&
           10 * h->packed >= 3 * h->draws;
}

bool layout_histogram_has_stages(const layout_histogram *h)
{
    bool all = 10 * h->stages >= 7 * h->draws;
    for (int i = 0; i < AR_PP_SCHEDULES; i++)
        all = all && 10 * h->schedule[i] >= h->draws;
    return all && 10 * h->given >= h->draws && 10 * h->fewer >= 2 * h->draws && 20 * h->tied >= 3 * h->draws &&
           10 * h->tp >= 2 * h->draws && 10 * h->dp >= 3 * h->draws && 10 * h->sharing[1] >= h->draws &&
           10 * h->sharing[2] >= h->draws && 10 * h->sharing[3] >= h->draws && 40 * h->copies >= h->draws &&
           20 * (h->ring + h->inner) >= 3 * h->draws && 20 * (h->selective + h->full) >= 3 * h->draws;
}

bool layout_histogram_has_families(const layout_histogram *h)
{
    bool all = 10 * h->tp >= 2 * h->draws && 20 * (h->ring + h->inner) >= 3 * h->draws;
    for (int i = 1; i <= 3; i++)
        all = all && 10 * h->sharing[i] >= 2 * h->draws && 10 * h->few[2 * i + 1] >= h->draws;
    return all;
}

bool layout_histogram_has_experts(const layout_histogram *h)
{
    return 10 * h->tp >= 2 * h->draws && 10 * h->zero >= 2 * h->draws && 10 * h->stages >= 2 * h->draws &&
           10 * h->sp >= h->draws && 10 * (h->ring + h->inner) >= h->draws &&
           20 * (h->selective + h->full) >= 3 * h->draws && 10 * h->one >= h->draws && 10 * h->all >= h->draws &&
           10 * h->shared >= h->draws && 10 * h->normalised >= h->draws && 10 * h->normalised <= 9 * h->draws &&
           10 * h->spread >= h->draws && 20 * h->uncut >= h->draws;
}

bool layout_histogram_is_wide(const layout_histogram *h)
{
    return 10 * h->tp >= 6 * h->draws && 10 * h->sp >= 3 * h->draws && 20 * h->overlap >= 3 * h->draws && h->cut > 0 &&
           10 * h->replicas >= 2 * h->draws && 10 * h->uneven >= 2 * h->draws && 10 * h->zero >= 2 * h->draws &&
           20 * h->window >= 3 * h->draws && 20 * h->selective >= 3 * h->draws && 20 * h->full >= 3 * h->draws &&
           20 * h->smoothed >= 3 * h->draws && 20 * h->z_loss >= 3 * h->draws && 20 * h->scaled >= h->draws &&
           20 * h->empty >= h->draws;
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static bool covers_enough(const layout_histogram *h, layout_draw_kind kind)
{
    return kind == DRAW_STAGES     ? layout_histogram_has_stages(h)
           : kind == DRAW_CONTEXTS ? layout_histogram_has_contexts(h)
           : kind == DRAW_FAMILIES ? layout_histogram_has_families(h)
           : kind == DRAW_EXPERTS  ? layout_histogram_has_experts(h)
                                   : layout_histogram_is_wide(h);
}

int layout_draws_run(layout_draw_kind kind, uint64_t first, int draws, FILE *to)
{
    const bool asked = getenv("ANYRANK_TEST_DRAWS") != NULL;
    const uint64_t start = from_environment("ANYRANK_TEST_SEED", first);
    const int n = (int)from_environment("ANYRANK_TEST_DRAWS", (uint64_t)draws);
    layout_histogram h = {0};
    int failures = 0;
    for (int i = 0; i < n; i++) {
        char text[LAYOUT_DRAW_TEXT];
        layout_draw d;
        layout_draw_make(&d, kind, start + (uint64_t)i);
        layout_histogram_add(&h, &d);
        if (layout_draw_run(&d) == AR_OK)
            continue;
        failures++;
        layout_draw_text(text, sizeof text, &d);
        fprintf(to, "ANYRANK_TEST_SEED=%llu ANYRANK_TEST_DRAWS=1 repeats: %s\n%s\n\n", (unsigned long long)d.seed, text,
                ar_error_message());
    }
    layout_histogram_print(&h, to);
    if (!asked && !covers_enough(&h, kind)) {
        fprintf(
            to,
            "too few of the draws have tp, sp, replicas, uneven dp, ranks without samples, ZeRO, windows or scaled frequencies, or a "
            "ring, neighbours, zigzag, or a pipeline, a schedule, given layers, or experts of each kind\n");
        failures++;
    }
    return failures;
}
