/* SPDX-License-Identifier: Apache-2.0 */
/* Findings: equal ones of several layers are one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/placement/placement_private.h"
#include "verify/lint/lint_impl.h"

enum { ACTIVATION_DIMS = 3 }; /* [b, s, features] */

/* The first number between dots of a module's name: its layer. SIZE_MAX: there is none. *at, *digits: where. */
static size_t layer_of(const char *name, size_t *at, size_t *digits)
{
    for (const char *p = strchr(name, '.'); p; p = strchr(p + 1, '.')) {
        char *end = NULL;
        const unsigned long n = strtoul(p + 1, &end, 10);
        if (p[1] < '0' || p[1] > '9' || (*end != '.' && *end != '\0'))
            continue;
        *at = (size_t)(p + 1 - name);
        *digits = (size_t)(end - p) - 1;
        return (size_t)n;
    }
    return SIZE_MAX;
}

/* True if both are one but for their layer. */
static bool same_but_layer(const ar_lint_finding *a, const ar_lint_finding *b, size_t at, size_t digits)
{
    size_t b_at = 0, b_digits = 0;
    char other[AR_LINT_MODULE];
    snprintf(other, sizeof other, "%s", b->module);
    if (layer_of(other, &b_at, &b_digits) == SIZE_MAX || b_at != at)
        return strcmp(a->module, b->module) == 0;
    const bool all = a->module[at] == '*';
    const size_t a_digits = all ? 1 : digits;
    return strncmp(a->module, other, at) == 0 && strcmp(a->module + at + a_digits, other + b_at + b_digits) == 0;
}

size_t ari_lint_layer(const char *name)
{
    size_t at, digits;
    return layer_of(name, &at, &digits);
}

/* Adds a finding; the same in another layer, micro-batch or stage is one with it. */
static ar_status add_finding(ari_lint_walk *w, const ar_lint_finding *f)
{
    ar_lint_report *r = w->report;
    size_t at = 0, digits = 0;
    const size_t layer = layer_of(f->module, &at, &digits);
    for (size_t i = 0; i < r->count; i++) {
        ar_lint_finding *k = &r->finding[i];
        if (k->rule != f->rule || strcmp(k->pass, f->pass) != 0 || strcmp(k->operation, f->operation) != 0 ||
            strcmp(k->axis, f->axis) != 0 || strcmp(k->has, f->has) != 0 || strcmp(k->needs, f->needs) != 0)
            continue;
        if (strcmp(k->module, f->module) == 0)
            return AR_OK;
        if (layer == SIZE_MAX || k->layers == 0 || !same_but_layer(k, f, at, digits))
            continue;
        const size_t first = k->first_layer < layer ? k->first_layer : layer;
        const size_t last = k->first_layer + k->layers - 1 > layer ? k->first_layer + k->layers - 1 : layer;
        k->first_layer = first;
        k->layers = last - first + 1;
        snprintf(k->module, sizeof k->module, "%.*s*%s", (int)at, f->module, f->module + at + digits);
        return AR_OK;
    }
    AR_TRY(ARI_GROW(&r->finding, &w->room, r->count, "the findings of lint"));
    r->finding[r->count] = *f;
    r->finding[r->count].first_layer = layer == SIZE_MAX ? 0 : layer;
    r->finding[r->count++].layers = layer != SIZE_MAX;
    return AR_OK;
}

static const char *pass_name(const ari_ledger_operation *op)
{
    return op->pass == 'b' || op->again ? "backward" : op->pass == 'f' ? "forward" : "step";
}

/* "S(-1)": dimensions of an activation are counted from its end; "R", whatever its gradient is. Returns out. */
static char *placed_text(char out[AR_PLACEMENT_TEXT], ar_placement p, bool of_param)
{
    if (p.kind == AR_SHARD && p.dim == ARI_LINT_BY_EXPERT) {
        snprintf(out, AR_PLACEMENT_TEXT, "V");
        return out;
    }
    if (p.kind == AR_SHARD && !of_param)
        p.dim -= ACTIVATION_DIMS;
    p.kind = p.kind == AR_INVARIANT ? AR_REPLICATE : p.kind;
    (void)ari_placement_name(out, p);
    return out;
}

ar_status ari_lint_find(ari_lint_walk *w, const ari_ledger_operation *op, int axis, const ari_lint_verdict *v)
{
    ar_lint_finding f = {
        .rule = v->rule, .operation = op->operation, .pass = pass_name(op), .axis = ari_lint_axis_name(axis)};
    ari_ledger_module(f.module, sizeof f.module, op);
    const bool of_param = op->kind == ARI_LEDGER_WEIGHT_GRADIENT && !op->needs_so;
    placed_text(f.has, v->has, of_param);
    placed_text(f.needs, v->needs, of_param);
    ari_lint_repair_text(f.repair, sizeof f.repair, v, axis);
    return add_finding(w, &f);
}

ar_status ari_lint_find_in_words(ari_lint_walk *w, const ari_ledger_operation *op, int axis, ar_lint_rule rule,
                                 const char *has, const char *needs, const char *repair)
{
    ar_lint_finding f = {
        .rule = rule, .operation = op->operation, .pass = pass_name(op), .axis = ari_lint_axis_name(axis)};
    ari_ledger_module(f.module, sizeof f.module, op);
    snprintf(f.has, sizeof f.has, "%s", has);
    snprintf(f.needs, sizeof f.needs, "%s", needs);
    snprintf(f.repair, sizeof f.repair, "%s", repair);
    return add_finding(w, &f);
}
