/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of layouts as text: the ranking, and one layout in depth. */
#include <string.h>

#include "anyrank/config.h"
#include "cli/plan/plan.h"
#include "ref/core/schedule_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

enum { NOTE = 80, USUAL_TOP = 10 };

void ari_plan_request_print(FILE *to, const ari_plan_request *a, int ranks, bool up_to)
{
    const ar_run *run = &a->search.base.step.run;
    fprintf(to, "%s, %s parameters, on %s%s GPU%s%s%s: %s\n", a->config.name, ARI_COUNT(a->parameters),
            up_to && ranks > 1 ? "1 to " : "", ARI_COUNT((uint64_t)ranks), ARI_PLURAL(ranks), a->machine ? ", " : "",
            a->machine ? a->machine : "", a->cluster);
    const ar_sim_cluster *c = &a->search.time.cluster;
    fprintf(to, "a step of %s x %s tokens; 16-bit values, %s%s%s\n", ARI_COUNT(run->batch), ARI_COUNT(run->seq),
            a->search.base.flash ? "flash attention" : "attention that stores its scores",
            a->search.time.hierarchical ? ", hierarchical collectives" : "",
            c->gpu > 0                                        ? ""
            : c->peak_flops > 0.0 && c->flops < c->peak_flops ? "; GEMMs at that rate, and no other work"
                                                              : "; GEMMs at the peak rate, and no other work: a lower "
                                                                "bound (a named GPU is timed by shapes)");
}

size_t ari_ranking_shown(const ari_plan_request *a, const ari_ranking *r)
{
    const size_t top = a->v->top < 0 ? USUAL_TOP : (size_t)a->v->top;
    return top == 0 || top > r->n ? r->n : top;
}

enum { EXTENT_WORDS = 64 };
/* "4", "8 (inner 2) zigzag": an extent as the choice has it. Gives text. */
static const char *extent_text(char text[EXTENT_WORDS], const ari_choice *c, int i)
{
    const bool context = ari_planned_axes[i] == ARI_LAYOUT_CP;
    char inner[24] = "";
    if (context && c->extent[i] > 1 && c->cp_inner > 1)
        snprintf(inner, sizeof inner, " (inner %d)", c->cp_inner);
    snprintf(text, EXTENT_WORDS, "%d%s%s", c->extent[i], inner, context && c->zigzag ? " zigzag" : "");
    return text;
}

/* Behind ep, where experts are not cut over tp. */
static const char *whole_text(const ari_choice *c)
{
    return c->etp == 1 && c->tp > 1 ? " (etp 1)" : "";
}

enum { PIPELINE_WORDS = 40 };
/* "1f1b", "interleaved x 2": the schedule of a pipeline; "" without. Gives text. */
static const char *pipeline_text(char text[PIPELINE_WORDS], const ari_choice *c)
{
    char each[24] = "";
    if (c->virtual_stages > 1)
        snprintf(each, sizeof each, " x %d", c->virtual_stages);
    snprintf(text, PIPELINE_WORDS, "%s%s", c->pp > 1 ? ari_pp_schedule_name(c->schedule) : "", each);
    return text;
}
#define PIPELINE_TEXT(c) pipeline_text((char[PIPELINE_WORDS]){0}, (c))

/* --- the ranking -------------------------------------------------------------------------------------------------- */

/* True if it fits without the reserve for what no layout counts. */
static bool is_tight(const ari_plan_request *a, const ari_candidate *f)
{
    return !f->fits && f->bytes - a->search.base.reserve <= a->search.time.cluster.memory_bytes;
}

/* "does not fit, by 3.1 GB", "tight, by 3.1 GB of its reserve", "KV heads x2". */
static void note_of(char note[NOTE], const ari_plan_request *a, const ari_candidate *f)
{
    const size_t kv = a->config.kv_heads, tp = (size_t)f->choice.tp;
    int used = 0;
    note[0] = '\0';
    if (!f->fits)
        used = snprintf(note, NOTE, "%s, by %s", is_tight(a, f) ? "tight" : "does not fit",
                        ARI_BYTES((uint64_t)(f->bytes - a->search.time.cluster.memory_bytes)));
    if (kv > 0 && tp > kv)
        snprintf(note + used, (size_t)(NOTE - used), "%sKV heads x%zu", used > 0 ? "; " : "", tp / kv);
}

size_t ari_layout_columns(ari_column columns[ARI_LAYOUT_COLUMNS], const ar_config *config)
{
    static const ari_column others[] = {{"sp", ARI_LEFT},         {"zero", ARI_RIGHT},     {"micro", ARI_RIGHT},
                                        {"schedule", ARI_LEFT},   {"recompute", ARI_LEFT}, {"step", ARI_RIGHT},
                                        {"tok/s/GPU", ARI_RIGHT}, {"MFU", ARI_RIGHT},      {"memory", ARI_RIGHT},
                                        {"bound by", ARI_LEFT},   {"note", ARI_LEFT}};
    size_t n = 0;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        columns[n++] = (ari_column){ari_layout_axes[ari_planned_axes[i]].name, ARI_RIGHT};
    if (config->experts.n > 0)
        columns[n++] = (ari_column){ari_over_name(ARI_OVER_EP), ARI_RIGHT};
    memcpy(columns + n, others, sizeof others);
    return n + sizeof others / sizeof *others;
}

ar_status ari_layout_cells(ari_table *t, const ari_plan_request *a, const ari_candidate *f)
{
    const ari_choice *c = &f->choice;
    const ari_planned p = ari_choice_planned(&a->search.base, c);
    const size_t dp = (size_t)c->dp, samples = (p.step.run.batch + dp - 1) / dp;
    ari_throughput w;
    char note[NOTE], text[EXTENT_WORDS];
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        ari_table_cell(t, "%s", extent_text(text, c, i));
    if (a->config.experts.n > 0)
        ari_table_cell(t, "%d%s", c->ep, whole_text(c));
    ari_table_row(t, "%s\t%d\t%d x %zu\t%s\t%s", c->sp ? "sp" : "", c->zero, c->micro_batches,
                  samples / (size_t)c->micro_batches, PIPELINE_TEXT(c), ari_recompute_names[c->recompute]);
    if (f->legal != AR_OK) {
        ari_table_row(t, "\t\t\t\t\t%s", ARI_SHOW(f->reason));
        return AR_OK;
    }
    AR_TRY(ari_throughput_of(&w, &p, &a->search.time, f->seconds));
    note_of(note, a, f);
    ari_table_row(t, "%s\t%.0f\t%.1f %%\t%s\t%s\t%s", ARI_SECONDS(f->seconds), w.tokens / a->search.ranks,
                  100.0 * w.mfu, ARI_BYTES((uint64_t)f->bytes), f->bound, note);
    return AR_OK;
}

static ar_status print_advice(FILE *to, const ari_plan_request *a, const ari_ranking *r)
{
    const ari_candidate *best = &r->layout[0];
    const bool matters = !r->fastest.fits && r->fastest.seconds < 0.95 * best->seconds;
    const ari_candidate *faster = matters ? &r->fastest : NULL;
    ari_search s = a->search;
    ari_depth d;
    s.first_only = true; /* its own account is not shown */
    AR_TRY(ari_depth_of(&d, &s, &best->choice, faster));
    AR_TRY(ari_why_print(to, a, r));
    fprintf(to, "%s%sadvice: %s\n", d.flags, d.flags[0] ? "\n" : "", d.advice);
    return AR_OK;
}

ar_status ari_ranking_print(FILE *to, const ari_plan_request *a, const ari_ranking *r)
{
    ari_column columns[ARI_LAYOUT_COLUMNS];
    ari_table t = {.columns = columns, .n = ari_layout_columns(columns, &a->config)};
    const size_t shown = ari_ranking_shown(a, r);
    ar_status st = AR_OK;
    ari_plan_request_print(to, a, a->search.ranks, false);
    for (size_t i = 0; i < shown && st == AR_OK; i++)
        st = ari_layout_cells(&t, a, &r->layout[i]);
    if (st != AR_OK) {
        AR_TRY(ari_table_end(&t, NULL, 2));
        return st;
    }
    AR_TRY(ari_table_end(&t, to, 2));
    const bool all = r->legal == r->layouts;
    fprintf(to, "%s layouts of %s mesh%s, %s%s; %s%zu of %zu listed\n", ARI_COUNT(r->layouts), ARI_COUNT(r->meshes),
            r->meshes == 1 ? "" : "es", all ? "all legal" : ARI_COUNT(r->legal), all ? "" : " of them legal",
            a->v->show_all ? "" : "the best of each mesh is ranked (--all: every layout); ", shown, r->n);
    return r->legal > 0 ? print_advice(to, a, r) : AR_OK;
}

/* --- one layout in depth ------------------------------------------------------------------------------------------ */

static void print_layout(FILE *to, const ari_plan_request *a, const ari_depth *d)
{
    const ari_choice *c = &d->found.choice;
    const size_t dp = (size_t)c->dp, samples = (a->search.base.step.run.batch + dp - 1) / dp, kv = a->config.kv_heads;
    const int overlap = ari_planned_overlap(&d->planned);
    char cut[32] = "";
    if (overlap > 1)
        snprintf(cut, sizeof cut, " overlap=%d", overlap);
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        fprintf(to, "%s%s=%s", i == 0 ? "" : " ", ari_layout_axes[ari_planned_axes[i]].name,
                extent_text((char[EXTENT_WORDS]){0}, c, i));
    if (a->config.experts.n > 0)
        fprintf(to, " ep=%d%s", c->ep, whole_text(c));
    fprintf(to, "%s%s zero=%d, %d micro-batch%s of %zu%s%s, recompute %s\n", c->sp ? " sp" : "", cut, c->zero,
            c->micro_batches, c->micro_batches == 1 ? "" : "es", samples / (size_t)c->micro_batches,
            c->pp > 1 ? ", " : "", PIPELINE_TEXT(c), ari_recompute_names[c->recompute]);
    if (kv > 0 && (size_t)c->tp > kv)
        fprintf(to, "  note: %zu ranks hold a copy of each of the %zu KV heads\n", (size_t)c->tp / kv, kv);
}

static const char *amount(char text[ARI_NUMBER], bool seconds, double x)
{
    return seconds ? ari_seconds_text(text, x) : ari_bytes_text(text, (uint64_t)x);
}
#define AMOUNT(x) amount((char[ARI_NUMBER]){0}, seconds, (x))

/* own: NULL: not known. */
static void add_kind(ari_table *t, bool seconds, const char *name, double of, double sum, const double *own)
{
    if (of > 0.0 || (own && *own > 0.0))
        ari_table_row(t, "%s\t%s\t%.1f %%\t%s", name, AMOUNT(of), sum > 0.0 ? 100.0 * of / sum : 0.0,
                      own ? AMOUNT(*own) : "");
}

/* Seconds of a step, or bytes of a rank, by kind. */
static ar_status print_kinds(FILE *to, const ari_depth *d, bool seconds)
{
    const ari_column columns[] = {{seconds ? "time of a step" : "memory of a rank", ARI_LEFT},
                                  {"production", ARI_RIGHT},
                                  {"share", ARI_RIGHT},
                                  {d->has_own && !seconds ? "anyrank" : "", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    const double *of = seconds ? d->time.seconds : d->memory.bytes,
                 *own = d->has_own && !seconds ? d->own_memory.bytes : NULL;
    const double sum = seconds ? ari_time_step(&d->time) : ari_memory_sum(&d->memory),
                 own_sum = own ? ari_memory_sum(&d->own_memory) : 0.0;
    for (int k = 0; k < (seconds ? (int)ARI_TIME_KINDS : (int)ARI_MEMORY_KINDS); k++)
        add_kind(&t, seconds, seconds ? ari_time_name((ari_time_kind)k) : ari_memory_name((ari_memory_kind)k), of[k],
                 sum, own ? &own[k] : NULL);
    add_kind(&t, seconds, "sum", sum, sum, own ? &own_sum : NULL);
    if (seconds)
        add_kind(&t, true, "hidden communication", d->time.hidden, sum, NULL);
    return ari_table_end(&t, to, 2);
}

static ar_status print_moved(FILE *to, const ari_depth *d)
{
    static const ari_column columns[] = {{"moved over", ARI_LEFT}, {"in", ARI_LEFT},     {"ranks", ARI_RIGHT},
                                         {"link", ARI_LEFT},       {"calls", ARI_RIGHT}, {"a rank sends", ARI_RIGHT},
                                         {"alone", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    for (int i = 0; i < d->time.traffic.n; i++) {
        const ari_traffic_row *m = &d->time.traffic.row[i];
        ari_table_row(&t, "%s\t%s\t%.0f\t%s\t%s\t%s\t%s", ari_time_name(m->time_kind), m->call, m->ranks,
                      m->inter_node ? "between nodes" : "inside", ARI_COUNT((uint64_t)m->calls),
                      ARI_BYTES((uint64_t)m->bytes), ARI_SECONDS(m->seconds));
    }
    return ari_table_end(&t, to, 2);
}

ar_status ari_depth_print(FILE *to, const ari_plan_request *a, const ari_depth *d)
{
    const ari_throughput *w = &d->throughput;
    ari_plan_request_print(to, a, a->search.ranks, false);
    print_layout(to, a, d);
    AR_TRY(print_kinds(to, d, false));
    if (a->search.time.cluster.memory_bytes > 0.0)
        fprintf(to, "  a rank has %s: it %s\n", ARI_BYTES((uint64_t)a->search.time.cluster.memory_bytes),
                d->found.fits            ? "fits"
                : is_tight(a, &d->found) ? "is tight: only without the reserve for contexts, NCCL's buffers and "
                                           "fragmentation does it fit"
                                         : "does not fit");
    AR_TRY(print_kinds(to, d, true));
    if (d->time.traffic.n > 0)
        AR_TRY(print_moved(to, d));
    fprintf(to, "%s tokens/s, %s a GPU; MFU %.1f %%, HFU %.1f %% (%s a token)\n", ARI_COUNT((uint64_t)w->tokens),
            ARI_COUNT((uint64_t)(w->tokens / a->search.ranks)), 100.0 * w->mfu, 100.0 * w->hfu,
            ari_flops_formula(w->convention));
    fprintf(to, "%s%sadvice: %s\n", d->flags, d->flags[0] ? "\n" : "", d->advice);
    return AR_OK;
}
