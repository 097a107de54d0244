/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/replay/replay.h"

#include <stdio.h>
#include <stdlib.h>

#include "verify/diagnose/hypothesis.h"

/* --- inputs and weights ------------------------------------------------------------------------------------------- */

/* Small enough, and more than rounding. */
static bool is_worth_it(const ari_case *c)
{
    return c->grid.count > 0 && c->count / c->grid.shape[0] <= ARI_PROBE_ELEMENTS &&
           c->survey.total.dd > 1e-10 * c->survey.total.rr;
}

bool ari_may_replay(const ari_case *c)
{
    return c->grid.nd == 3 && is_worth_it(c);
}

bool ari_are_scores(const ari_case *c)
{
    return c->grid.nd == 4 && c->grid.shape[2] == c->grid.shape[3] && is_worth_it(c);
}

/* True if a module without a weight makes an output of as many features as a matrix outside of the layers has rows, of
 * an input of as many as that has columns: a head with a tied table. */
static bool is_tied(const ar_dump *dump, const ar_dump_tensor *y, const ar_dump_tensor *dx)
{
    bool is = false;
    for (ari_walk w = ari_walk_of(dump, NULL, "i", 0); !is && dx && dx->ndim == y->ndim && ari_walk_next(&w);) {
        const size_t *shape = w.t->shape;
        is = w.t->ndim == 2 && labs(w.key.section) != ARI_AT_LAYERS && shape[0] != shape[1] &&
             shape[0] == y->shape[y->ndim - 1] && shape[1] == dx->shape[dx->ndim - 1];
    }
    return is;
}

/* A module outside of the layers that is not in the vocabulary: one whose output is as wide as its weight's rows looks
 * them up, one whose output is as wide as they are many is the head. */
static ari_role role_of_shape(const ar_dump *dump, const char *name, size_t stem)
{
    char found[320];
    const int n = (int)(stem - ari_ending(name, stem, ".weight"));
    snprintf(found, sizeof found, "%.*s:fwd", n, name);
    const ar_dump_tensor *y = ar_dump_find(dump, found);
    snprintf(found, sizeof found, "%.*s.weight:init", n, name);
    const ar_dump_tensor *w = ar_dump_find(dump, found);
    snprintf(found, sizeof found, "%.*s:bwd", n, name);
    if (y && !w && y->ndim == 3 && is_tied(dump, y, ar_dump_find(dump, found)))
        return ARI_HEAD;
    if (!y || !w || y->ndim < 2 || w->ndim != 2 || w->shape[0] == w->shape[1])
        return ARI_NO_ROLE;
    const size_t width = y->shape[y->ndim - 1];
    return width == w->shape[1] ? ARI_TOKENS : width == w->shape[0] ? ARI_HEAD : ARI_NO_ROLE;
}

const ar_dump_tensor *ari_find_role(ari_walk w, ari_role role, long layer)
{
    while (ari_walk_next(&w)) {
        if (labs(w.key.layer) == labs(layer) && ari_module_of(w.t->name, w.key.stem).role == role)
            return w.t;
    }
    return NULL;
}

ari_walk ari_replay_weights(const ari_case *c, const ar_dump *dump)
{
    const int before = c->own.step - 1;
    const ari_walk moved = ari_walk_of(dump, NULL, "n", before);
    ari_walk any = moved;
    return before > 0 && ari_walk_next(&any) ? moved : ari_walk_of(dump, NULL, "iw", 0);
}

/* The tensor of this role among those of the walk, in the case's layer, whose name ends in `kind`: where a layer has
 * several, as attention to itself and to another sequence, the one next to the case's tensor. */
static const ar_dump_tensor *find_role(const ari_case *c, const ar_dump *dump, ari_role role, ari_walk w,
                                       const char *kind)
{
    const ar_dump_tensor *first = NULL;
    size_t n = c->own.stem; /* of the name of the module that has both */
    while (n > 0 && c->own.name[n - 1] != '.')
        n--;
    while (ari_walk_next(&w)) {
        if (labs(w.key.layer) != labs(c->own.layer) || ari_ending(w.t->name, w.key.stem, kind) < strlen(kind))
            continue;
        const ari_role named = ari_module_of(w.t->name, w.key.stem).role;
        const bool by_shape =
            named == ARI_NO_ROLE && labs(w.key.section) != ARI_AT_LAYERS && (role == ARI_TOKENS || role == ARI_HEAD);
        const bool own = w.key.stem == c->own.stem + strlen(kind) && memcmp(w.t->name, c->own.name, c->own.stem) == 0;
        if (role == ARI_NO_ROLE ? own
                                : named == role || (by_shape && role_of_shape(dump, w.t->name, w.key.stem) == role)) {
            if (role == ARI_NO_ROLE || n == 0 || (w.key.stem > n && memcmp(w.t->name, c->own.name, n) == 0))
                return w.t;
            first = first ? first : w.t;
        }
    }
    return first;
}

const ar_dump_tensor *ari_replay_input(const ari_case *c, ari_role role)
{
    return ari_replay_value(c, c->known->reference, role, 'f');
}

const ar_dump_tensor *ari_replay_value(const ari_case *c, const ar_dump *dump, ari_role role, char pass)
{
    const char passes[] = {pass, '\0'};
    return find_role(c, dump, role, ari_walk_of(dump, NULL, passes, c->own.step), "");
}

ar_status ari_right_rows(float **gives, bool *held, const ari_case *c, size_t count, const ar_dump_tensor *t)
{
    const ar_dump_tensor *other = t ? ari_find_readable(c->known->other, t->name) : NULL;
    ari_fit f = {0};
    float *x = NULL;
    double p;
    *held = *held && t && t->count == count && (!other || other->count == count);
    if (!*held)
        return AR_OK;
    AR_TRY(ari_read_values(gives, t, c->arena));
    if (!other)
        return AR_OK;
    AR_TRY(ari_read_values(&x, other, c->arena));
    for (size_t i = 0; i < count; i++)
        ari_fit_add(&f, (double)x[i], (double)(*gives)[i], 0.0);
    const double left = ari_fit_one(&p, &f);
    *held = (left <= ARI_FIT && ari_is_near(p, 1.0, ARI_KNOWN)) || f.yy + f.aa == 0.0;
    return AR_OK;
}

ar_status ari_replay_rows(float **gives, bool *held, const ari_case *c, size_t count, ari_role role, char pass)
{
    return ari_right_rows(gives, held, c, count, ari_replay_value(c, c->known->reference, role, pass));
}

const ar_dump_tensor *ari_replay_parameter(const ari_case *c, ari_role role, const char *kind)
{
    const ar_dump *ref = c->known->reference, *other = c->known->other;
    const ar_dump_tensor *t = find_role(c, ref, role, ari_replay_weights(c, ref), kind);
    return t ? t : find_role(c, other, role, ari_replay_weights(c, other), kind);
}

size_t ari_replay_near(const ar_dump_tensor *near[ARI_MOST_NEAR], const ari_case *c, size_t width)
{
    const ar_dump *dump = c->known->reference;
    long last = c->own.layer; /* of what comes after the layers the last one's */
    size_t found = 0;
    for (size_t i = 0; i < 3 * ar_dump_count(dump); i++) {
        const size_t round = i / ar_dump_count(dump);
        const ar_dump_tensor *t = ar_dump_at(dump, i % ar_dump_count(dump));
        const ari_order_key key = ari_order_of(t->name, c->path);
        const bool outside = key.section != c->own.section && key.layer == 0;
        if (t == c->reference || key.pass != 'f' || key.step != c->own.step || t->ndim < 2 || !ari_is_readable(t) ||
            t->shape[t->ndim - 1] % width || t->count != c->grid.rows * width)
            continue;
        if (round == 0)
            last = key.section != c->own.section && key.layer > last ? key.layer : last;
        else if (found < ARI_MOST_NEAR && (round == 1) == (key.layer == last || key.layer + 1 == last) &&
                 (round == 1 || outside))
            near[found++] = t;
    }
    return found;
}

/* The bytes of the name of the module that this one is a part of; of attention, its own. */
static size_t whole_of(const ari_case *c)
{
    size_t n = c->own.stem;
    while (c->role != ARI_ATTENTION && n > 0 && c->own.name[n - 1] != '.')
        n--;
    return n;
}

const ar_dump_tensor *ari_replay_sinks(const ari_case *c)
{
    const size_t n = whole_of(c);
    for (ari_walk w = ari_replay_weights(c, c->known->reference); ari_walk_next(&w);) {
        if (w.t->ndim == 1 && w.key.stem > n && memcmp(w.t->name, c->own.name, n) == 0 &&
            !memchr(w.t->name + n + 1, '.', w.key.stem - n - 1))
            return w.t;
    }
    return NULL;
}

size_t ari_replay_parts(const ar_dump_tensor **part, size_t most, const ari_case *c)
{
    const ar_dump *dump = c->known->reference;
    const size_t n = whole_of(c);
    size_t found = 0;
    for (ari_walk w = ari_walk_of(dump, NULL, "f", c->own.step); found < most && ari_walk_next(&w);) {
        const ari_role role = ari_module_of(w.t->name, w.key.stem).role;
        if (w.t != c->reference && w.t->ndim >= 3 && w.key.stem > n && memcmp(w.t->name, c->own.name, n) == 0 &&
            ari_role_place_of(role)->forward < ari_role_place_of(ARI_PROBS)->forward)
            part[found++] = w.t;
    }
    return found;
}

/* --- ids ---------------------------------------------------------------------------------------------------------- */

enum { MOST_TABLE = 1 << 24, MOST_LOOKED_UP = 1 << 28 };

size_t ari_lookup_table_row(const ari_lookup_table *table, const float *row)
{
    size_t id = 0;
    while (id < table->rows && memcmp(table->at + id * table->cols, row, table->cols * sizeof *row) != 0)
        id++;
    return id;
}

ar_status ari_lookup_table_read(ari_lookup_table *table, const ari_case *c, ari_role role, size_t lookups)
{
    const ar_dump_tensor *w = ari_replay_parameter(c, role, ".weight");
    *table = (ari_lookup_table){.at = NULL};
    if (!w || w->ndim != 2 || w->count == 0 || w->count > MOST_TABLE || w->shape[0] > MOST_LOOKED_UP / (lookups + 1))
        return AR_OK;
    table->rows = w->shape[0];
    table->cols = w->shape[1];
    return ari_read_values(&table->at, w, c->arena);
}

ar_status ari_replay_ids(size_t **gives, const ari_case *c, size_t n)
{
    const ar_dump_tensor *embedded = ari_replay_input(c, ARI_TOKENS);
    ari_lookup_table table;
    float *row = NULL;
    size_t *id = NULL, i = 0;
    *gives = NULL;
    AR_TRY(ari_lookup_table_read(&table, c, ARI_TOKENS, n));
    if (!table.at || !embedded || embedded->count != n * table.cols)
        return AR_OK;
    AR_TRY(ARI_TAKE(&id, c->arena, n, embedded->name));
    AR_TRY(ARI_TAKE(&row, c->arena, table.cols, embedded->name));
    for (; i < n && (i == 0 || id[i - 1] < table.rows); i++) {
        AR_TRY(ar_dump_read_f32(embedded, i * table.cols, table.cols, row));
        id[i] = ari_lookup_table_row(&table, row);
    }
    *gives = i == 0 || id[i - 1] < table.rows ? id : NULL;
    return AR_OK;
}

/* --- the probe ---------------------------------------------------------------------------------------------------- */

static void add_token(ari_probe *p, size_t token)
{
    size_t i = 0;
    while (i < p->tokens && p->token[i] != token)
        i++;
    if (i == p->tokens && p->tokens < ARI_PROBE_TOKENS && token < p->seq)
        p->token[p->tokens++] = token;
}

static void add_outs(ari_probe *p, size_t outs)
{
    p->outs = outs < ARI_PROBE_FEATURES ? outs : ARI_PROBE_FEATURES;
    for (size_t i = 0; i < p->outs; i++)
        p->out[i] = (outs * i / p->outs + (p->heads ? i : 0)) % outs; /* not one key of all heads */
}

void ari_probe_choose(ari_probe *p, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    size_t row = 0;
    *p = (ari_probe){.c = c, .seq = g->shape[g->nd - 2], .heads = g->nd == 4 ? g->shape[1] : 0};
    const size_t rows = p->heads ? p->heads * p->seq : p->seq, outs = p->heads ? p->heads * g->cols : g->cols;
    while (row + 1 < g->rows && !ari_row_differs(c, row))
        row++;
    p->sample = row / rows;
    size_t first = row % p->seq;
    for (; row < (p->sample + 1) * rows; row++) /* of scores the heads' rows follow each other */
        first = row % p->seq < first && ari_row_differs(c, row) ? row % p->seq : first;
    for (size_t i = 0; i < 2; i++)
        add_token(p, first + i);
    for (size_t i = 0; i < 3; i++)
        add_token(p, i);
    for (size_t i = 1; i < 6; i++)
        add_token(p, (p->seq - 1) * i / 5);
    add_outs(p, outs);
    for (size_t k = 0; k < p->tokens; k++) {
        p->ref[k] = c->ref + (p->sample * rows + p->token[k]) * g->cols;
        p->val[k] = c->val + (p->sample * rows + p->token[k]) * g->cols;
    }
}

void ari_probe_choose_rows(ari_probe *p, const ari_case *c)
{
    *p = (ari_probe){.c = c, .seq = c->grid.rows};
    for (ari_run run = ari_runs_of(&c->grid); p->tokens < ARI_PROBE_TOKENS && ari_runs_next(&run);) {
        if (run.count != c->grid.cols || !ari_run_is_wrong(&c->grid, &run))
            continue;
        p->token[p->tokens] = run.row;
        p->ref[p->tokens] = run.ref;
        p->val[p->tokens++] = run.value;
    }
    add_outs(p, c->grid.cols);
}

ar_status ari_probe_read_layer(ari_probe *p, bool *held, ari_role role)
{
    const size_t cols = p->c->grid.cols;
    const ar_dump_tensor *w = ari_replay_parameter(p->c, role, ".weight"),
                         *b = ari_replay_parameter(p->c, role, ".bias");
    const size_t in = w ? w->count / cols : 0;
    *held = w && w->ndim == 2 && w->count == in * cols && in > 0 && in <= ARI_PROBE_WIDTH;
    if (!*held)
        return AR_OK;
    const ar_dump_tensor *qkv = ari_replay_parameter(p->c, ARI_QKV, ".weight"); /* more outputs than inputs */
    const bool named = ari_module_of(w->name, strcspn(w->name, ":")).in_out;
    const bool in_out =
        w->shape[0] != w->shape[1] ? w->shape[0] == in : named && !(qkv && qkv->shape[0] > qkv->shape[1]);
    p->in = in;
    AR_TRY(ARI_TAKE(&p->w, p->c->arena, p->outs * in, w->name));
    AR_TRY(ARI_TAKE(&p->bias, p->c->arena, p->outs, w->name));
    for (size_t i = 0; i < p->outs; i++) {
        for (size_t k = 0; in_out && k < in; k++)
            AR_TRY(ar_dump_read_f32(w, k * cols + p->out[i], 1, &p->w[i * in + k]));
        if (!in_out)
            AR_TRY(ar_dump_read_f32(w, p->out[i] * in, in, &p->w[i * in]));
        if (b && b->count == cols)
            AR_TRY(ar_dump_read_f32(b, p->out[i], 1, &p->bias[i]));
    }
    return AR_OK;
}

/* True if the other dump's input is right or missing. An input whose error exceeds what a fault may leave of the
 * output's difference would leave more than that itself: then the fault is further up. */
static ar_status is_right(bool *right, const ari_probe *p, const ar_dump_tensor *t, const float *reference, size_t n)
{
    const ar_dump_tensor *other = ari_find_readable(p->c->known->other, t->name);
    const ari_tally *output = &p->c->survey.total;
    float *x = NULL;
    double dd = 0.0, rr = 0.0;
    if (!other || other->count != t->count)
        return AR_OK;
    AR_TRY(ARI_TAKE(&x, p->c->arena, n, t->name));
    AR_TRY(ar_dump_read_f32(other, p->sample * n, n, x));
    for (size_t i = 0; i < n; i++) {
        dd += pow((double)x[i] - (double)reference[i], 2.0);
        rr += pow((double)reference[i], 2.0);
    }
    *right = dd * output->rr <= ARI_REPLAY_MISTAKE * output->dd * rr;
    return AR_OK;
}

ar_status ari_probe_read_input(float **gives, size_t *width, bool *held, const ari_probe *p, const ar_dump_tensor *t)
{
    const size_t samples = p->c->grid.shape[0];
    *held = t && t->ndim >= 3 && t->shape[0] == samples && t->shape[1] == p->seq && t->count > 0 &&
            t->count / samples <= 3 * (size_t)ARI_PROBE_ELEMENTS;
    if (!*held)
        return AR_OK;
    const size_t n = t->count / samples;
    *width = n / p->seq;
    AR_TRY(ARI_TAKE(gives, p->c->arena, n, t->name));
    AR_TRY(ar_dump_read_f32(t, p->sample * n, n, *gives));
    return is_right(held, p, t, *gives, n);
}

void ari_probe_put(ari_probe *p, size_t k, const double *x)
{
    for (size_t i = 0; i < p->outs; i++) {
        double sum = p->w ? (double)p->bias[i] : x[p->out[i]];
        for (size_t j = 0; p->w && j < p->in; j++)
            sum += (double)p->w[i * p->in + j] * x[j];
        p->is[k * p->outs + i] = sum;
    }
}

double ari_probe_left(const ari_probe *p, bool of_base)
{
    const double *base = of_base ? NULL : p->base;
    const size_t cols = p->c->grid.cols;
    double left = 0.0, all = 0.0;
    for (size_t k = 0; k < p->tokens; k++) {
        for (size_t i = 0; i < p->outs; i++) {
            const size_t at = p->out[i] / cols * p->seq * cols + p->out[i] % cols, n = k * p->outs + i;
            const double r = (double)p->ref[k][at], target = base ? (double)p->val[k][at] - r : r;
            const double off = target - (base ? p->is[n] - base[n] : p->is[n]);
            if (isnan(p->is[n]))
                continue;
            left += off * off;
            all += target * target;
        }
    }
    return all > 0.0 ? left / all : HUGE_VAL;
}

bool ari_probe_try_base(ari_probe *p, double *least)
{
    const double left = ari_probe_left(p, true);
    if (!(left <= ARI_REPLAY_BASE && left < *least))
        return false;
    *least = left;
    memcpy(p->base, p->is, sizeof p->base);
    return true;
}
