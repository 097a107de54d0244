/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of layouts for programs: JSON and CSV (planner.md lists the fields). */
#include <math.h>

#include <string.h>

#include "anyrank/config.h"
#include "cli/plan/plan.h"
#include "cli/shared/command.h"
#include "ref/core/atomic_file.h"
#include "ref/core/size.h"
#include "ref/io/json.h"
#include "ref/models/parallel_private.h"

static json_t *cluster_json(const ari_plan_request *a)
{
    const ar_sim_cluster *c = &a->search.time.cluster;
    return json_pack("{s:s, s:s?, s:i, s:f, s:f, s:f, s:b, s:b}", "words", a->cluster, "gpu", a->machine,
                     "ranks_per_node", c->ranks_per_node, "flops", c->flops, "peak_flops",
                     c->peak_flops > 0.0 ? c->peak_flops : c->flops, "memory_bytes", c->memory_bytes, "hierarchical",
                     a->search.time.hierarchical, "shared_links", a->search.time.shared_links);
}

json_t *ari_plan_request_json(const ari_plan_request *a)
{
    const ar_run *run = &a->search.base.step.run;
    json_t *o = ari_json_begin("plan");
    if (!o)
        return NULL;
    json_object_set_new(o, "model", ari_json_text(a->config.name));
    json_object_set_new(o, "parameters", json_integer((json_int_t)a->parameters));
    json_object_set_new(o, "gpus", json_integer(a->search.ranks));
    json_object_set_new(o, "cluster", cluster_json(a));
    json_object_set_new(o, "batch", json_integer((json_int_t)run->batch));
    json_object_set_new(o, "seq", json_integer((json_int_t)run->seq));
    json_object_set_new(o, "flash", json_boolean(a->search.base.flash));
    json_object_set_new(o, "numerics", json_string(ari_numerics_names[run->numerics]));
    json_object_set_new(o, "notes", ari_config_notes(NULL, &a->config));
    return o;
}

/* --- a layout ----------------------------------------------------------------------------------------------------- */

/* Returns the layout as the user asked for it, legal or not, with ep and etp if the model has experts. */
static json_t *choice_json(const ari_choice *c, const ari_planned *p, const char *members)
{
    ar_parallel layout = p->step.run.parallel;
    layout.sp = c->sp;
    layout.zigzag = c->zigzag;
    layout.overlap = ari_planned_overlap(p);
    json_t *o = ari_layout_json(&layout, 0, members);
    if (p->step.config->experts.n == 0) {
        (void)json_object_del(o, "ep");
        (void)json_object_del(o, "etp");
        (void)json_object_del(o, "dispatch");
    }
    return o;
}

static json_t *name_of(const ar_parallel *p)
{
    char text[ARI_LAYOUT_TEXT];
    ari_parallel_text(text, sizeof text, p);
    return json_string(text);
}

/* Counts are integers added in binary64; counts beyond 2^63 remain floats. */
static json_t *count_json(double n)
{
    return fabs(n) < 0x1p63 ? json_integer((json_int_t)n) : json_real(n);
}

json_t *ari_candidate_json(const ari_candidate *f, const ari_planned *p)
{
    const bool legal = f->legal == AR_OK;
    return json_pack("{s:o, s:o, s:b, s:o, s:o, s:o, s:o}", "name", name_of(&p->step.run.parallel), "layout",
                     choice_json(&f->choice, p, ari_layout_of_plan), "legal", legal, "reason",
                     legal ? json_null() : ari_json_text(f->reason), "fits",
                     legal ? json_boolean(f->fits) : json_null(), "seconds",
                     legal ? json_real(f->seconds) : json_null(), "bytes", legal ? count_json(f->bytes) : json_null());
}

static json_t *memory_json(const ari_memory *m)
{
    json_t *o = json_pack("{s:o}", "sum", count_json(ari_memory_sum(m)));
    for (int k = 0; k < ARI_MEMORY_KINDS && o; k++)
        json_object_set_new(o, ari_memory_name((ari_memory_kind)k), count_json(m->bytes[k]));
    return o;
}

static json_t *moved_json(const ari_traffic *traffic)
{
    json_t *rows = json_array();
    for (int i = 0; i < traffic->n; i++) {
        const ari_traffic_row *m = &traffic->row[i];
        json_array_append_new(
            rows, json_pack("{s:s, s:s, s:o, s:s, s:o, s:o, s:f}", "over", ari_time_name(m->time_kind), "call", m->call,
                            "ranks", count_json(m->ranks), "link", m->inter_node ? "between" : "inside", "calls",
                            count_json(m->calls), "bytes", count_json(m->bytes), "seconds", m->seconds));
    }
    return rows;
}

/* Returns the seconds of each kind, including ep if the model has experts. */
static json_t *time_json(const ari_time *t, const ar_config *config)
{
    json_t *o =
        json_pack("{s:f, s:f, s:o}", "sum", ari_time_step(t), "hidden", t->hidden, "moved", moved_json(&t->traffic));
    for (int k = 0; k < ARI_TIME_KINDS && o; k++) {
        if (k != ARI_TIME_EP || config->experts.n > 0)
            json_object_set_new(o, ari_time_name((ari_time_kind)k), json_real(t->seconds[k]));
    }
    return o;
}

json_t *ari_depth_json(const ari_depth *d)
{
    json_t *o = ari_candidate_json(&d->found, &d->planned);
    if (!o)
        return NULL;
    const ar_config *config = d->planned.step.config;
    const bool has_own_memory = d->has_own;
    json_object_set_new(o, "time", json_pack("{s:o}", "production", time_json(&d->time, config)));
    json_object_set_new(o, "memory",
                        json_pack("{s:o, s:o}", "production", memory_json(&d->memory), "own",
                                  has_own_memory ? memory_json(&d->own_memory) : json_null()));
    json_object_set_new(o, "tokens_per_second", json_real(d->throughput.tokens));
    json_object_set_new(o, "mfu", json_real(d->throughput.mfu));
    json_object_set_new(o, "hfu", json_real(d->throughput.hfu));
    json_object_set_new(o, "flops_convention", json_string(ari_flops_formula(d->throughput.convention)));
    json_object_set_new(o, "bound", json_string(d->found.bound));
    json_object_set_new(o, "advice", ari_json_text(d->advice));
    return o;
}

/* --- CSV ---------------------------------------------------------------------------------------------------------- */

/* Quotes a field and doubles quotes within it (RFC 4180, section 2). */
static void quote(char text[2 * ARI_REASON + 1], const char *field)
{
    size_t n = 0;
    for (text[n++] = '"'; *field; field++) {
        if (*field == '"')
            text[n++] = '"';
        text[n++] = *field;
    }
    text[n++] = '"';
    text[n] = '\0';
}

/* Values with a comma behind each. */
static void put_members(ari_text *line, const json_t *object)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        if (json_is_string(value))
            ari_say(line, "%s,", json_string_value(value));
        else if (json_is_null(value))
            ari_say(line, ",");
        else
            ari_say(line, "%lld,", json_is_boolean(value) ? json_is_true(value) : json_integer_value(value));
    }
}

static ar_status write_row(ari_atomic_file *out, const ari_candidate *f, const ari_planned *p)
{
    char text[400 + 2 * ARI_REASON] = "", reason[2 * ARI_REASON + 1];
    ari_text line = ari_text_in(text, sizeof text);
    json_t *layout = choice_json(&f->choice, p, ari_layout_of_row);
    if (!layout)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a row of layouts");
    put_members(&line, layout);
    json_decref(layout);
    quote(reason, f->reason);
    if (f->legal == AR_OK)
        ari_say(&line, "1,%.9g,%.0f,%d,%s\n", f->seconds, f->bytes, f->fits, reason);
    else
        ari_say(&line, "0,,,,%s\n", reason);
    return ari_atomic_file_write(out, text, strlen(text));
}

static ar_status write_titles(ari_atomic_file *out, const ari_planned *base)
{
    char text[400] = "";
    ari_text line = ari_text_in(text, sizeof text);
    const ari_choice any = ari_choice_of(&base->step.run.parallel);
    json_t *layout = choice_json(&any, base, ari_layout_of_row), *value;
    const char *key;
    json_object_foreach(layout, key, value) ari_say(&line, "%s,", key);
    json_decref(layout);
    ari_say(&line, "legal,seconds,bytes,fits,reason\n");
    return ari_atomic_file_write(out, text, strlen(text));
}

ar_status ari_ranking_csv(const char *path, const ari_planned *base, const ari_ranking *r)
{
    ARI_OWNED_BY(ari_atomic_file_discard) ari_atomic_file *out = NULL;
    AR_TRY(ari_atomic_file_create(&out, path));
    AR_TRY(write_titles(out, base));
    for (size_t i = 0; i < r->n; i++) {
        const ari_planned p = ari_choice_planned(base, &r->layout[i].choice);
        AR_TRY(write_row(out, &r->layout[i], &p));
    }
    return ari_atomic_file_commit(out);
}
