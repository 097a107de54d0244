/* SPDX-License-Identifier: Apache-2.0 */
/* A model with experts under transformers' names in memory (from version 5 on) beside one under Hugging Face's: there
 * the experts of a layer are two parameters, mlp.experts.gate_up_proj [E, 2F, h] and down_proj [E, h, F], Mixtral's
 * block_sparse_moe is mlp too, and what the router and the experts are given has one row a token, [b*s, ..]. Experts
 * with biases are GPT-OSS's, [E, h, 2F] with gate and up in turn. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "verify/dump/dump.h"
#include "verify/dumps/verify_impl.h"

#define MIXTRAL ".block_sparse_moe"
#define EXPERTS ".experts."
enum { GATE, UP, DOWN, PARTS, ALONE = PARTS, NAME = 160 };

/* A name of one dump, without pass and step, by that which the other may have for it. */
typedef struct other_name {
    char name[NAME], own[NAME];
    const ar_dump_tensor *t; /* the first of its passes */
    int part;                /* of an expert; ALONE: the tensor itself */
    size_t expert;
    bool within; /* a value of the router or of the experts */
} other_name;

typedef struct other_names {
    other_name *list; /* by name */
    size_t n, capacity;
    const ar_dump *dump, *other; /* whose names they are of; whose tensors may have them */
    bool biased;                 /* experts have biases */
} other_names;

/* --- names -------------------------------------------------------------------------------------------------------- */

/* "5.w3.weight": expert 5's UP. What follows, as ".exp_avg", goes to *rest. */
static bool read_expert(const char *text, size_t *expert, int *part, const char **rest)
{
    static const char *const leaves[3][PARTS] = {{"gate_proj.weight", "up_proj.weight", "down_proj.weight"},
                                                 {"w1.weight", "w3.weight", "w2.weight"},
                                                 {"gate_proj.bias", "up_proj.bias", "down_proj.bias"}};
    char *end;
    if (!isdigit((unsigned char)*text))
        return false;
    *expert = strtoul(text, &end, 10);
    for (int i = 0; i < 3 * PARTS && *end == '.'; i++) {
        const char *leaf = leaves[i / PARTS][i % PARTS];
        *part = i % PARTS;
        *rest = end + 1 + strlen(leaf);
        if (strncmp(end + 1, leaf, strlen(leaf)) == 0 && (**rest == '\0' || **rest == '.'))
            return true;
    }
    return false;
}

/* True for the path of a router, of experts, or of a shared expert and its gate, below an MLP's. */
static bool is_within(const char *name)
{
    const char *at = strstr(name, ".mlp.");
    const char *module = at ? at + strlen(".mlp.") : "";
    return strcmp(module, "gate") == 0 || strcmp(module, "experts") == 0 ||
           strncmp(module, "shared_expert", strlen("shared_expert")) == 0;
}

/* The name with "mlp" for Mixtral's module. False: it is too long. */
static bool plain_name(char *out, size_t cap, const char *name)
{
    const char *at = strstr(name, MIXTRAL);
    const int n = at ? snprintf(out, cap, "%.*s.mlp%s", (int)(at - name), name, at + strlen(MIXTRAL))
                     : snprintf(out, cap, "%s", name);
    return n >= 0 && (size_t)n < cap;
}

/* Names a tensor as its experts are together, or by itself. False: it has no other name, or one that is too long. */
static bool name_other(other_name *o, const ar_dump_tensor *t, const char *path)
{
    char name[NAME];
    const char *rest = "";
    const size_t stem = ari_order_of(t->name, path).stem;
    *o = (other_name){.t = t, .part = ALONE};
    if (stem >= sizeof o->own)
        return false;
    memcpy(o->own, t->name, stem);
    if (!plain_name(name, sizeof name, o->own))
        return false;
    const char *at = strstr(name, EXPERTS);
    if (at && read_expert(at + strlen(EXPERTS), &o->expert, &o->part, &rest)) {
        const int n = snprintf(o->name, sizeof o->name, "%.*s%s%s%s", (int)(at + strlen(EXPERTS) - name), name,
                               o->part == DOWN ? "down_proj" : "gate_up_proj", t->ndim == 1 ? "_bias" : "", rest);
        return n >= 0 && (size_t)n < sizeof o->name;
    }
    o->part = ALONE;
    o->within = is_within(name);
    memcpy(o->name, name, sizeof name);
    return o->within || strcmp(name, o->own) != 0;
}

static int by_other_name(const void *a, const void *b)
{
    const other_name *x = a, *y = b;
    const int order = strcmp(x->name, y->name);
    return order ? order : strcmp(x->own, y->own);
}

/* Each once, whatever passes and steps there are of it. */
static ar_status list_others(other_names *o)
{
    const char *path = ar_dump_path(o->dump);
    size_t kept = 0;
    for (size_t i = 0; i < ar_dump_count(o->dump); i++) {
        AR_TRY(ARI_GROW(&o->list, &o->capacity, o->n, "names of tensors"));
        o->n += name_other(&o->list[o->n], ar_dump_at(o->dump, i), path);
    }
    ARI_SORT(o->list, o->n, by_other_name);
    for (size_t i = 0; i < o->n; i++) {
        if (kept == 0 || by_other_name(&o->list[kept - 1], &o->list[i]) != 0)
            o->list[kept++] = o->list[i];
        o->biased = o->biased || (o->list[i].part != ALONE && o->list[i].t->ndim == 1);
    }
    o->n = kept;
    return AR_OK;
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

/* True if t, of all experts of a layer, has this one where it belongs. */
static bool fits_expert(const ar_dump_tensor *t, const other_name *o, bool turned)
{
    const size_t rows = o->t->shape[0] * (o->part == DOWN ? 1 : 2);
    return o->part != ALONE && o->expert < t->shape[0] && t->ndim == o->t->ndim + 1 &&
           t->shape[turned ? 2 : 1] == rows && (t->ndim == 2 || t->shape[turned ? 1 : 2] == o->t->shape[1]);
}

/* Under the name that the other dump has, of t's own pass and step; nothing where there is such a tensor already. */
static ar_status add_cut(ari_tensor_cuts *cuts, bool *added, const other_names *all, const ar_dump_tensor *t,
                         const other_name *o)
{
    const size_t stem = ari_order_of(t->name, ar_dump_path(all->other)).stem;
    const char *suffix = t->name + stem;
    AR_TRY(ari_tensor_cuts_add(cuts, t, o->own, suffix));
    const char *name = cuts->cut[cuts->n - 1].name;
    *added = strcmp(name, t->name) == 0 || !ar_dump_find(all->other, name);
    cuts->n -= !*added;
    return AR_OK;
}

/* Expert after expert, all of them and none twice: there are as many as t has. */
static ar_status cut_experts(ari_tensor_cuts *cuts, const other_names *all, const ar_dump_tensor *t,
                             const other_name *first, size_t n)
{
    const size_t each = first->part == DOWN ? 1 : 2;
    bool whole = t->ndim > 1 && n == each * t->shape[0];
    for (size_t i = 0; i < n && whole; i++)
        whole = fits_expert(t, &first[i], all->biased && t->ndim == 3);
    for (size_t i = 0; i < n && whole; i++) {
        AR_TRY(add_cut(cuts, &whole, all, t, &first[i]));
        const size_t rows = first[i].t->shape[0], row = first[i].part == UP ? (all->biased ? 1 : rows) : 0;
        if (whole)
            ari_tensor_cut_expert(&cuts->cut[cuts->n - 1], t->ndim, first[i].expert, row, rows, all->biased ? each : 0);
    }
    cuts->n = whole ? cuts->n : 0;
    return AR_OK;
}

/* Samples and their tokens in one dimension, which the other dump has apart; the features are another pass's. */
static bool is_folded(const ar_dump_tensor *t, const ar_dump_tensor *apart)
{
    return t->ndim > 0 && apart->ndim == t->ndim + 1 && t->count > 0 &&
           t->shape[0] == apart->shape[0] * apart->shape[1];
}

static ar_status cut_alone(ari_tensor_cuts *cuts, const other_names *all, const ar_dump_tensor *t, const other_name *o)
{
    const bool folded = o->within && is_folded(t, o->t);
    bool added = false;
    if (!folded && strcmp(o->name, o->own) == 0)
        return AR_OK;
    AR_TRY(add_cut(cuts, &added, all, t, o));
    if (added)
        cuts->cut[0].fold = folded ? o->t->shape[1] : 0;
    return AR_OK;
}

static ar_status cuts_of(void *user, const ar_dump_tensor *t, ari_tensor_cuts *cuts)
{
    const other_names *all = user;
    const size_t stem = ari_order_of(t->name, ar_dump_path(all->other)).stem;
    size_t first = 0, n = 0; /* the first whose name is not before the stem */
    ARI_BISECT(first, all->n, i, strncmp(all->list[i].name, t->name, stem) < 0)
    while (first + n < all->n && strlen(all->list[first + n].name) == stem &&
           memcmp(all->list[first + n].name, t->name, stem) == 0)
        n++;
    if (n == 0)
        return AR_OK;
    if (all->list[first].part != ALONE)
        return cut_experts(cuts, all, t, &all->list[first], n);
    return n == 1 ? cut_alone(cuts, all, t, &all->list[first]) : AR_OK;
}

ar_status ari_verify_unstack(ari_verifying *v)
{
    for (int k = 0; k < 2; k++) {
        other_names o = {.dump = v->dump[k], .other = v->dump[1 - k]};
        ar_status st = list_others(&o);
        if (st == AR_OK && o.n > 0)
            st = ari_dump_take_apart(v->dump[1 - k], cuts_of, &o);
        free(o.list);
        AR_TRY(st);
    }
    return AR_OK;
}
