/* SPDX-License-Identifier: Apache-2.0 */
/* Reports a step's throughput, what bounds it, and which changes would help. */
#include <stdio.h>

#include "anyrank/config.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "verify/plan/search.h"

ar_status ari_throughput_of(ari_throughput *w, const ari_planned *p, const ari_time_options *o, double seconds)
{
    const double peak = o->cluster.peak_flops > 0.0 ? o->cluster.peak_flops : o->cluster.flops;
    const double tokens = (double)p->step.run.batch * (double)p->step.run.seq;
    const bool half = p->flash && p->step.config->causal;
    double model = 0.0, hardware = 0.0;
    int ranks = 0;
    *w = (ari_throughput){.convention = half ? ARI_FLOPS_CAUSAL : ARI_FLOPS_PARAMETERS};
    AR_TRY(ari_planned_world(&ranks, p));
    AR_TRY(ari_flops_token(&model, p->step.config, p->step.run.seq, w->convention, AR_RECOMPUTE_NONE));
    const ar_recompute recompute = p->step.run.parallel.recompute.part;
    AR_TRY(ari_flops_token(&hardware, p->step.config, p->step.run.seq, w->convention,
                           recompute == AR_RECOMPUTE_FULL || !p->flash ? recompute : AR_RECOMPUTE_NONE));
    hardware = model + ari_recomputed_share(&p->step) * (hardware - model);
    if (!(seconds > 0.0))
        return AR_OK;
    w->tokens = tokens / seconds;
    w->mfu = model * w->tokens / (ranks * peak);
    w->hfu = hardware * w->tokens / (ranks * peak);
    return AR_OK;
}

/* Returns the largest kind of time apart from products, or products if they are most of the step. */
static ari_time_kind bound_kind(const ari_time *t)
{
    ari_time_kind largest_kind = ARI_TIME_RECOMPUTE;
    for (int k = ARI_TIME_RECOMPUTE; k < ARI_TIME_KINDS; k++)
        largest_kind = t->seconds[k] > t->seconds[largest_kind] ? (ari_time_kind)k : largest_kind;
    return t->seconds[largest_kind] < 0.1 * ari_time_step(t) ? ARI_TIME_PRODUCTS : largest_kind;
}

const char *ari_bound_of(const ari_time *t)
{
    const ari_time_kind k = bound_kind(t);
    return k == ARI_TIME_PRODUCTS ? "computation" : ari_time_name(k);
}

static const char *link_of(const ari_time *t, ari_time_kind time_kind)
{
    for (int i = 0; i < t->traffic.n; i++) {
        if (t->traffic.row[i].time_kind == time_kind && t->traffic.row[i].inter_node)
            return "between nodes";
    }
    return "inside a node";
}

/* Advice against each kind of time: the text before and after the layout's own figures, and the text after the link's
 * name. */
static const struct {
    const char *before, *after, *behind;
} remedies[ARI_TIME_KINDS] = {
    [ARI_TIME_PRODUCTS] = {"faster GEMMs or more GPUs would shorten it, a faster network would not"},
    [ARI_TIME_RECOMPUTE] = {"more memory, a smaller micro-batch or a longer pipeline would do without computing again"},
    [ARI_TIME_MEMORY] = {"faster memory, or more tp with sp, would shorten it"},
    [ARI_TIME_TP] = {"a smaller tp,", " or faster links ", ", would shorten it"},
    [ARI_TIME_CP] = {"a smaller cp", ", or faster links ", ", would shorten it"},
    [ARI_TIME_EP] = {"a smaller ep", ", or faster links ", ", would shorten it"},
    [ARI_TIME_DP] = {"a larger batch", ", or faster links ", ", would shorten it"},
    [ARI_TIME_PP] = {"", "faster links ", " would shorten it"},
    [ARI_TIME_BUBBLE] = {"more micro-batches (a larger batch), more virtual stages or a smaller pp would shorten it"}};

static void remedy(char *text, size_t size, const ari_planned *p, const ari_time *t, ari_time_kind k)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const bool is_serial = layout->sp && ari_planned_overlap(p) == 1, interleaved = layout->virtual_stages > 1;
    const char *extra_advice = k == ARI_TIME_TP && is_serial ? " overlap of collectives with GEMMs,"
                               : k == ARI_TIME_CP && ari_extent(layout, 1u << ARI_AXIS_RING) > 1
                                   ? ", more of it within cp-inner"
                               : k == ARI_TIME_DP && layout->zero >= 3 ? ", a lower stage of ZeRO"
                               : k == ARI_TIME_PP && interleaved       ? "fewer virtual stages or "
                                                                       : "";
    ari_text writer = ari_text_in(text, size);
    ari_say(&writer, "%s%s", remedies[k].before, extra_advice);
    if (remedies[k].after)
        ari_say(&writer, "%s%s%s", remedies[k].after, link_of(t, k), remedies[k].behind);
}

/* Converts bytes to the unit used in tables. */
static double in_unit(double bytes)
{
    return bytes * (bytes < 1e12 ? 1e-9 : 1e-12);
}

static const char *unit_of(double bytes)
{
    return bytes < 1e12 ? "GB" : "TB";
}

static void too_large(char *text, size_t size, const ari_planned *p, const ari_memory *m, double memory_bytes)
{
    const double bytes = ari_memory_sum(m), share = ari_memory_activations(m) / bytes;
    const size_t local_positions = p->step.run.seq / (size_t)ari_extent(&p->step.run.parallel, ARI_CUTS_POSITIONS);
    const ar_parallel *layout = &p->step.run.parallel;
    const bool is_single_rank = ar_parallel_world(layout) == 1;
    char context[160] = "";
    if (share > 0.5 && !is_single_rank)
        snprintf(context, sizeof context,
                 " %.0f %% of that are what %zu positions of a sequence keep, which context parallelism divides: a "
                 "larger cp,",
                 100.0 * share, local_positions);
    const double excess_bytes = bytes - memory_bytes;
    const bool full = layout->recompute.part == AR_RECOMPUTE_FULL;
    ari_text t = ari_text_in(text, size);
    ari_say(&t, "it does not fit: a rank needs %.1f %s, %.1f %s more than it has;%s", in_unit(bytes), unit_of(bytes),
            in_unit(excess_bytes), unit_of(excess_bytes), context);
    if (!is_single_rank)
        ari_say(&t, " a larger tp%s or pp,", p->step.config->experts.n > 0 ? ", ep" : "");
    if (!is_single_rank && layout->zero < 3)
        ari_say(&t, " a higher stage of ZeRO,");
    ari_say(&t, "%s%s more GPUs would make it fit", full ? "" : " recomputation", full && is_single_rank ? "" : " or");
}

void ari_advice(char *text, size_t size, const ari_planned *p, const ari_time *t, const ari_memory *m,
                const ari_candidate *faster, double memory_bytes)
{
    const ari_time_kind k = bound_kind(t);
    const double step = ari_time_step(t), share = step > 0.0 ? 100.0 * t->seconds[k] / step : 0.0;
    char remedy_text[160], experts[24] = "";
    remedy(remedy_text, sizeof remedy_text, p, t, k);
    if (faster && faster->choice.ep > 1)
        snprintf(experts, sizeof experts, " ep=%d%s", faster->choice.ep, faster->choice.etp == 1 ? " etp=1" : "");
    if (memory_bytes > 0.0 && ari_memory_sum(m) > memory_bytes) {
        too_large(text, size, p, m, memory_bytes);
        return;
    }
    ari_text writer = ari_plain_text_in(text, size);
    ari_say(&writer, "the step is bound by %s, %.0f %% of it: %s",
            k == ARI_TIME_PRODUCTS ? "computation" : ari_time_name(k), share, remedy_text);
    /* GPUs with twice the memory exist; a layout that needs ten times the memory helps nobody */
    if (faster && faster->bytes <= 2.0 * memory_bytes)
        ari_say(&writer, "; with %.1f GB more a rank, a step of %s%s would take %.0f %% of that",
                (faster->bytes - memory_bytes) * 1e-9,
                ari_choice_text((char[ARI_CHOICE_TEXT]){0}, &faster->choice, ARI_LAYOUT_AXES, " "), experts,
                100.0 * faster->seconds / step);
}
