/* SPDX-License-Identifier: Apache-2.0 */
/* Collects findings. Equal findings in several layers are merged. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/placement/placement_private.h"
#include "verify/lint/lint_impl.h"

enum { ACTIVATION_DIMS = 3 }; /* activations are [b, s, features] */

/* Finds the layer in a module's name: the first number between dots. SIZE_MAX: none. *offset, *digits: position and
 * length of the number. */
static size_t layer_of(const char *name, size_t *offset, size_t *digits)
{
    for (const char *p = strchr(name, '.'); p; p = strchr(p + 1, '.')) {
        char *end = NULL;
        const unsigned long n = strtoul(p + 1, &end, 10);
        if (p[1] < '0' || p[1] > '9' || (*end != '.' && *end != '\0'))
            continue;
        *offset = (size_t)(p + 1 - name);
        *digits = (size_t)(end - p) - 1;
        return (size_t)n;
    }
    return SIZE_MAX;
}

/* Returns true if two findings differ only in their layers. */
static bool same_but_layer(const ar_lint_finding *a, const ar_lint_finding *b, size_t offset, size_t digits)
{
    size_t b_at = 0, b_digits = 0;
    char b_module[AR_LINT_MODULE];
    snprintf(b_module, sizeof b_module, "%s", b->module);
    if (layer_of(b_module, &b_at, &b_digits) == SIZE_MAX || b_at != offset)
        return strcmp(a->module, b->module) == 0;
    const bool is_wildcard = a->module[offset] == '*';
    const size_t a_digits = is_wildcard ? 1 : digits;
    return strncmp(a->module, b_module, offset) == 0 &&
           strcmp(a->module + offset + a_digits, b_module + b_at + b_digits) == 0;
}

size_t ari_lint_layer(const char *name)
{
    size_t offset, digits;
    return layer_of(name, &offset, &digits);
}

/* Adds a finding, or merges it with the same finding in another layer, micro-batch or stage. */
static ar_status add_finding(ari_lint_walk *w, const ar_lint_finding *f)
{
    ar_lint_report *r = w->report;
    size_t offset = 0, digits = 0;
    const size_t layer = layer_of(f->module, &offset, &digits);
    for (size_t i = 0; i < r->count; i++) {
        ar_lint_finding *k = &r->finding[i];
        if (k->rule != f->rule || strcmp(k->pass, f->pass) != 0 || strcmp(k->operation, f->operation) != 0 ||
            strcmp(k->axis, f->axis) != 0 || strcmp(k->has, f->has) != 0 || strcmp(k->needs, f->needs) != 0)
            continue;
        if (strcmp(k->module, f->module) == 0)
            return AR_OK;
        if (layer == SIZE_MAX || k->layers == 0 || !same_but_layer(k, f, offset, digits))
            continue;
        const size_t first_layer = k->first_layer < layer ? k->first_layer : layer;
        const size_t last_layer = k->first_layer + k->layers - 1 > layer ? k->first_layer + k->layers - 1 : layer;
        k->first_layer = first_layer;
        k->layers = last_layer - first_layer + 1;
        snprintf(k->module, sizeof k->module, "%.*s*%s", (int)offset, f->module, f->module + offset + digits);
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
    return op->pass == 'b' || op->is_recomputed ? "backward" : op->pass == 'f' ? "forward" : "step";
}

/* Writes a placement such as "S(-1)", which counts an activation's dimensions from the end; for "R" the gradient's
 * placement is not shown. Returns out. */
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
    placed_text(f.has, v->actual, of_param);
    placed_text(f.needs, v->required, of_param);
    ari_lint_repair_text(f.repair, sizeof f.repair, v, axis);
    return add_finding(w, &f);
}

ar_status ari_lint_find_in_words(ari_lint_walk *w, const ari_ledger_operation *op, int axis, ar_lint_rule rule,
                                 const char *actual, const char *required, const char *repair)
{
    ar_lint_finding f = {
        .rule = rule, .operation = op->operation, .pass = pass_name(op), .axis = ari_lint_axis_name(axis)};
    ari_ledger_module(f.module, sizeof f.module, op);
    snprintf(f.has, sizeof f.has, "%s", actual);
    snprintf(f.needs, sizeof f.needs, "%s", required);
    snprintf(f.repair, sizeof f.repair, "%s", repair);
    return add_finding(w, &f);
}
