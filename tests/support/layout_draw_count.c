/* SPDX-License-Identifier: Apache-2.0 */
/* Runs numbers of draws and counts what they cover. */
#include <stdlib.h>

#include "gpu/device_private.h"
#include "support/layout_draw.h"
#include "support/row.h"

/* Whether the last chunk of the own positions is shorter than the others. */
static bool cut_unevenly(const layout_draw *d)
{
    const ar_parallel *p = &d->run.parallel;
    const size_t own = d->run.seq / (size_t)(p->cp * p->tp), k = (size_t)p->overlap;
    return k > 1 && own % ((own + k - 1) / k) != 0;
}

/* Each thing that draws may have: its name, and whether a draw d of the layout p has it. */
/* clang-format off */
#define FEATURES(X)                                                            \
    X(tp, p->tp > 1)                                                           \
    X(sp, p->tp > 1 && p->sp)                                                  \
    X(chunks, p->overlap > 1)                                                  \
    X(shorter_chunk, cut_unevenly(d))                                          \
    X(kv_replicas, (size_t)(p->tp * p->cp_inner) > d->config.kv_heads)         \
    X(cp, p->cp > 1)                                                           \
    X(ring, p->cp > p->cp_inner)                                               \
    X(inner, p->cp_inner > 1)                                                  \
    X(ring_of_inner, p->cp > p->cp_inner && p->cp_inner > 1)                   \
    X(zigzag, p->zigzag)                                                       \
    X(packed, d->packed)                                                       \
    X(dp, p->dp > 1)                                                           \
    X(zero, p->dp > 1 && p->zero > 0)                                          \
    X(zero1, p->dp * p->cp > 1 && p->zero == 1)                                \
    X(zero2, p->dp * p->cp > 1 && p->zero == 2)                                \
    X(zero3, p->dp * p->cp > 1 && p->zero == 3)                                \
    X(zero_of_3, p->tp == 1 && p->zero > 0 && p->dp == 3)                      \
    X(zero_of_5, p->tp == 1 && p->zero > 0 && p->dp == 5)                      \
    X(zero_of_7, p->tp == 1 && p->zero > 0 && p->dp == 7)                      \
    X(copies_of_shares, p->dp_replicate > 1)                                   \
    X(eager, p->dp > 1 && d->run.ddp.mode == AR_BUCKETS_EAGER)                     \
    X(uneven_samples, d->run.batch % (size_t)p->dp != 0)                           \
    X(ranks_without_samples, d->run.batch < (size_t)p->dp)                         \
    X(micro_batches, p->micro_batches > 1)                                     \
    X(recompute, p->recompute.part != AR_RECOMPUTE_NONE)                       \
    X(selective, p->recompute.part == AR_RECOMPUTE_SELECTIVE)                  \
    X(full, p->recompute.part == AR_RECOMPUTE_FULL)                            \
    X(pp, p->pp > 1)                                                           \
    X(given_layers, p->stages.n > 0)                                           \
    X(stages_of_rank, p->virtual_stages > 1)                                   \
    X(fewer_micro_batches, p->micro_batches < p->pp)                           \
    X(one_f_one_b, p->pp > 1 && p->schedule == AR_PP_1F1B)                     \
    X(gpipe, p->pp > 1 && p->schedule == AR_PP_GPIPE)                          \
    X(interleaved, p->pp > 1 && p->schedule == AR_PP_INTERLEAVED)              \
    X(zero_bubble, p->pp > 1 && p->schedule == AR_PP_ZERO_BUBBLE)              \
    X(bf16, d->run.precision == AR_PRECISION_BF16)                                                           \
    X(whole_check, d->by_check)                                                \
    X(dropout, d->run.dropout > 0.0)                                               \
    X(clip, d->run.clip > 0.0)                                                     \
    X(qk_clip, d->run.steps > 0 && d->run.optimizer.qk_clip > 0.0)                     \
    X(muon_shards, d->run.steps > 0 && d->run.optimizer.shards && p->tp > 1)           \
    X(label_smoothing, d->run.loss.label_smoothing > 0.0)                          \
    X(z_loss, d->run.loss.z_loss > 0.0)                                            \
    X(row_column, d->run.plan.mlp_order == AR_MLP_ROW_COLUMN)                               \
    X(tied, d->config.tied)                                                    \
    X(window, d->config.window > 0 && d->config.window < d->run.seq)               \
    X(unturned_layers, d->config.rope.kind && !ar_config_turns(&d->config, d->config.layers - 1)) \
    X(parallel_residual, d->config.residual != AR_RESIDUAL_IN_TURN)                               \
    X(phi3, d->config.arch == AR_ARCH_PHI3)                                    \
    X(scaled_frequencies, d->config.rope.kind > AR_ROPE_LINEAR)                \
    X(two_steps, d->run.steps == 2)                                                \
    X(one_expert, d->config.experts.per_token == 1)                            \
    X(all_experts, d->config.experts.n > 0 && d->config.experts.per_token == d->config.experts.n) \
    X(shared_expert, d->config.experts.shared > 0)                             \
    X(normalised, d->config.experts.normalised)                                \
    X(not_normalised, d->config.experts.n > 0 && !d->config.experts.normalised) \
    X(ep, p->ep > 1)                                                           \
    X(all_gather, p->dispatch == AR_DISPATCH_ALL_GATHER)                       \
    X(etp1, p->etp == 1)                                                       \
    X(balance_each, d->run.loss.router.balance == AR_BALANCE_SEQUENCE)             \
    X(balance_all, d->run.loss.router.balance > AR_BALANCE_SEQUENCE)               \
    X(router_z_loss, d->run.loss.router.z_loss > 0.0)                              \
    X(bias_update, d->run.loss.router.bias_update > 0.0)                           \
    X(documents, d->documents > 1)                                             \
    X(padding_rows, d->more_rows > 0)
/* clang-format on */
#define ENUMERATE(name, has) HAS_##name,
#define NAME(name, has) #name,
#define VALUE(name, has) has,
typedef enum feature { FEATURES(ENUMERATE) MOST_FEATURES } feature;
_Static_assert((int)MOST_FEATURES <= (int)LAYOUT_DRAW_FEATURES, "a histogram has room for all");

void layout_histogram_add(layout_histogram *h, const layout_draw *d)
{
    const ar_parallel *p = &d->run.parallel;
    const bool has[] = {FEATURES(VALUE)};
    h->draws++;
    h->ranks[ar_parallel_world(p)]++;
    for (int i = 0; i < MOST_FEATURES; i++)
        h->has[i] += has[i];
}

static void print(const layout_histogram *h, FILE *to)
{
    static const char *const names[] = {FEATURES(NAME)};
    fprintf(to, "%d draws:", h->draws);
    for (int i = 0; i < MOST_FEATURES; i++)
        fprintf(to, " %s %d", names[i], h->has[i]);
    fprintf(to, "; ranks");
    for (int i = 1; i <= LAYOUT_DRAW_RANKS; i++) {
        if (h->ranks[i] > 0)
            fprintf(to, " %d: %d", i, h->ranks[i]);
    }
    fprintf(to, "\n");
}

/* What draws of each kind have at least, in thousandths of them. */
static const int wanted[][MOST_FEATURES] = {
    [DRAW_TENSORS] = ROW([HAS_tp] = 600, [HAS_sp] = 300, [HAS_chunks] = 150, [HAS_shorter_chunk] = 1,
                         [HAS_kv_replicas] = 200, [HAS_uneven_samples] = 200, [HAS_zero] = 200, [HAS_window] = 150,
                         [HAS_selective] = 150, [HAS_full] = 150, [HAS_qk_clip] = 30, [HAS_label_smoothing] = 150,
                         [HAS_z_loss] = 150, [HAS_scaled_frequencies] = 50, [HAS_ranks_without_samples] = 50),
    [DRAW_CONTEXTS] = ROW([HAS_ring] = 600, [HAS_zigzag] = 300, [HAS_inner] = 400, [HAS_ring_of_inner] = 200,
                          [HAS_tp] = 400, [HAS_sp] = 200, [HAS_kv_replicas] = 200, [HAS_dp] = 300, [HAS_zero] = 100,
                          [HAS_selective] = 150, [HAS_full] = 150, [HAS_window] = 200, [HAS_packed] = 300),
    [DRAW_STAGES] = ROW([HAS_pp] = 700, [HAS_one_f_one_b] = 100, [HAS_gpipe] = 100, [HAS_interleaved] = 100,
                        [HAS_zero_bubble] = 100, [HAS_given_layers] = 100, [HAS_fewer_micro_batches] = 200,
                        [HAS_tied] = 150, [HAS_tp] = 200, [HAS_dp] = 300, [HAS_zero1] = 100, [HAS_zero2] = 100,
                        [HAS_zero3] = 100, [HAS_copies_of_shares] = 25, [HAS_cp] = 150, [HAS_recompute] = 150),
    [DRAW_FAMILIES] = ROW([HAS_tp] = 200, [HAS_parallel_residual] = 50, [HAS_cp] = 150, [HAS_zero1] = 200,
                          [HAS_zero2] = 200, [HAS_zero3] = 200, [HAS_documents] = 50, [HAS_padding_rows] = 100,
                          [HAS_given_layers] = 25, [HAS_zero_of_3] = 100, [HAS_zero_of_5] = 100, [HAS_zero_of_7] = 100),
    [DRAW_EXPERTS] =
        ROW([HAS_tp] = 200, [HAS_zero] = 200, [HAS_pp] = 200, [HAS_sp] = 100, [HAS_cp] = 100, [HAS_recompute] = 150,
            [HAS_one_expert] = 100, [HAS_all_experts] = 100, [HAS_shared_expert] = 100, [HAS_normalised] = 100,
            [HAS_not_normalised] = 100, [HAS_ep] = 100, [HAS_all_gather] = 50, [HAS_etp1] = 50,
            [HAS_copies_of_shares] = 50, [HAS_documents] = 50, [HAS_padding_rows] = 50, [HAS_given_layers] = 25,
            [HAS_balance_each] = 50, [HAS_balance_all] = 100, [HAS_router_z_loss] = 100, [HAS_bias_update] = 50),
};

bool layout_histogram_covers(const layout_histogram *h, layout_draw_kind kind)
{
    bool all = true;
    for (int i = 0; i < MOST_FEATURES; i++)
        all = all && 1000 * h->has[i] >= wanted[kind][i] * h->draws;
    return all;
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

int layout_draws_run(layout_draw_kind kind, uint64_t first, int draws, FILE *to)
{
    const bool asked = getenv("ANYRANK_TEST_DRAWS") != NULL;
    const uint64_t start = from_environment("ANYRANK_TEST_SEED", first);
    const int n = (int)from_environment("ANYRANK_TEST_DRAWS", (uint64_t)draws);
    layout_histogram h = {0};
    ar_device_choice device;
    int failures = 0;
    if (ari_device_choice_parse(&device, getenv("ANYRANK_TEST_DEVICE") ? getenv("ANYRANK_TEST_DEVICE") : "cpu") !=
        AR_OK) {
        fprintf(to, "%s\n", ar_error_message());
        return 1;
    }
    for (int i = 0; i < n; i++) {
        char text[LAYOUT_DRAW_TEXT];
        layout_draw d;
        layout_draw_make(&d, kind, start + (uint64_t)i);
        layout_draw_add_more(&d);
        d.run.device = device;
        if (getenv("ANYRANK_TEST_BF16"))
            d.run.precision = AR_PRECISION_BF16;
        layout_histogram_add(&h, &d);
        if (layout_draw_run(&d) == AR_OK)
            continue;
        failures++;
        layout_draw_text(text, sizeof text, &d);
        fprintf(to, "ANYRANK_TEST_SEED=%llu ANYRANK_TEST_DRAWS=1 repeats: %s\n%s\n\n", (unsigned long long)d.seed, text,
                ar_error_message());
    }
    print(&h, to);
    if (!asked && !layout_histogram_covers(&h, kind)) {
        fprintf(to, "too few of the draws have one of what layout_draw_count.c wants of their kind\n");
        failures++;
    }
    return failures;
}
