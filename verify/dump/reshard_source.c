/* SPDX-License-Identifier: Apache-2.0 */
/* The input of resharding, and what the config says of its tensors. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/safetensors.h"
#include "ref/models/family.h"
#include "verify/dump/dump.h"
#include "verify/dump/reshard.h"

/* --- what is told ------------------------------------------------------------------------------------------------- */

ar_status ari_rs_note(const ari_rs *r, bool refused, const char *format, ...)
{
    char text[1024];
    ARI_FORMAT(text, format);
    if (refused)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s", text);
    if (r->o->note)
        r->o->note(r->o->user, text);
    return AR_OK;
}

void ari_rs_progress(ari_rs *r, size_t bytes, const char *what)
{
    r->done += bytes;
    if (r->o->progress)
        r->o->progress(r->o->user, r->bytes > 0 ? (double)r->done / (double)r->bytes : 1.0, what);
}

/* --- files -------------------------------------------------------------------------------------------------------- */

static ar_status find_folder(ari_rs *r, const char *in)
{
    const char *slash = strrchr(in, '/');
    if (ari_is_folder(in))
        return ari_dump_folder(&r->folder, &r->arena, in);
    AR_TRY(ari_arena_text(&r->arena, &r->folder, slash ? in : ".", "a file name"));
    if (slash)
        r->folder[slash - in + 1] = '\0';
    return AR_OK;
}

static ar_status find_config(ari_rs *r)
{
    const char *given = r->o->config;
    bool beside = false;
    if (!given)
        AR_TRY(ari_file_is_in(&beside, r->folder, "config.json"));
    return given || beside ? ari_config_path(&r->config_path, given ? given : r->folder) : AR_OK;
}

/* Merging needs no config: then one that this program does not know is no hindrance. */
static ar_status load_config(ari_rs *r)
{
    const bool needed = ari_extent(&r->layout, ARI_CUTS_MODEL) > 1;
    AR_TRY(find_config(r));
    if (!r->config_path && needed)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: no config.json there, which says how tensors are split",
                            ARI_SHOW(r->folder));
    if (!r->config_path)
        return AR_OK;
    ar_status st = ar_config_load(&r->config, r->config_path);
    r->has_config = st == AR_OK;
    if ((st == AR_ERR_CONFIG || st == AR_ERR_UNSUPPORTED) && !needed && !r->o->config) {
        (void)ari_rs_note(r, false, "the config is not used: %s", ar_error_message());
        return AR_OK;
    }
    return st;
}

/* --- parameters --------------------------------------------------------------------------------------------------- */

typedef struct param {
    char name[160];
    ari_placing placing;
    size_t order;
    bool optional, found;
} param;

typedef struct params {
    ari_rs *r;
    param *list; /* by name, the arena's */
    size_t count, capacity;
    char prefix[32]; /* "model.": names of a model without its head lack it */
} params;

static ar_status add_param(void *user, const char *name, int ndim, const size_t *shape)
{
    params *p = user;
    AR_TRY(ARI_GROW_IN(&p->r->arena, &p->list, &p->capacity, p->count, "the list of parameters"));
    param *one = &p->list[p->count];
    *one = (param){.order = p->count};
    snprintf(one->name, sizeof one->name, "%s", name);
    ari_placing_of(&one->placing, &p->r->config, name, ndim, shape, p->r->o->embedding_hidden);
    p->count++;
    return AR_OK;
}

/* A tied head may be in the file as well. */
static ar_status add_tied_head(params *p)
{
    const ar_config *c = &p->r->config;
    const char *head = ari_part_path(ari_family_of(c->arch), ARI_HEAD);
    const size_t shape[2] = {c->vocab, c->hidden};
    char name[96];
    if (!head || !c->tied)
        return AR_OK;
    snprintf(name, sizeof name, "%s.weight", head);
    AR_TRY(add_param(p, name, 2, shape));
    p->list[p->count - 1].optional = true;
    return AR_OK;
}

static ar_status list_params(params *p)
{
    const char *token = ari_part_path(ari_family_of(p->r->config.arch), ARI_TOKENS), *dot = strchr(token, '.');
    if (dot)
        snprintf(p->prefix, sizeof p->prefix, "%.*s", (int)(dot - token) + 1, token);
    AR_TRY(ari_param_list(&p->r->config, add_param, p));
    AR_TRY(add_tied_head(p));
    qsort(p->list, p->count, sizeof *p->list, ari_by_text);
    return AR_OK;
}

/* The parameter of the first `length` bytes of a name, with or without the prefix. */
static param *find_param(const params *p, const char *name, size_t length)
{
    param wanted;
    if (length + strlen(p->prefix) >= sizeof wanted.name)
        return NULL;
    snprintf(wanted.name, sizeof wanted.name, "%.*s", (int)length, name);
    param *found = bsearch(&wanted, p->list, p->count, sizeof *p->list, ari_by_text);
    if (found || !p->prefix[0])
        return found;
    snprintf(wanted.name, sizeof wanted.name, "%s%.*s", p->prefix, (int)length, name);
    return bsearch(&wanted, p->list, p->count, sizeof *p->list, ari_by_text);
}

/* The parameter that a name begins with; *rest: what follows, "" or ".exp_avg" or ":grad". */
static param *param_of(const params *p, const char *name, const char **rest)
{
    size_t length = strlen(name);
    param *found = find_param(p, name, length);
    while (!found && length > 0) {
        while (length > 0 && name[--length] != '.' && name[length] != ':')
            continue;
        found = length > 0 ? find_param(p, name, length) : NULL;
    }
    *rest = name + length;
    return found;
}

/* True if a tensor has the shape of a parameter, or more rows of a vocabulary. */
static bool has_shape(const ar_dump_tensor *t, const ari_placing *p)
{
    bool same = t->ndim == p->ndim;
    for (int d = 0; same && d < t->ndim; d++)
        same = t->shape[d] == p->shape[d] || (d == 0 && p->vocabulary && t->shape[d] > p->shape[d]);
    return same;
}

ar_status ari_rs_wrong_shape(const ar_dump_tensor *t, int ndim, const size_t *shape)
{
    return ar_error_set(AR_ERR_SHAPE, "%s: tensor '%s' has shape %s, the config makes it %s",
                        ARI_SHOW(t->parts > 0 ? t->part[0].file : "input"), ARI_SHOW(t->name),
                        ARI_SHOW_SHAPE(t->ndim, t->shape), ARI_SHOW_SHAPE(ndim, shape));
}

/* --- what each tensor is ------------------------------------------------------------------------------------------ */

/* Up to three names, and how many there are of them. */
typedef struct names {
    char text[400];
    size_t count;
} names;

static void add_name(names *n, const char *name)
{
    const size_t used = strlen(n->text);
    if (n->count < 3)
        snprintf(n->text + used, sizeof n->text - used, "%s'%.100s'", n->count > 0 ? ", " : "", ARI_SHOW(name));
    else if (n->count == 3)
        snprintf(n->text + used, sizeof n->text - used, ", ..");
    n->count++;
}

typedef struct findings {
    names unknown, cut, padded, partial, missing;
    size_t rows_cut;
} findings;

static size_t padded_rows(const ari_rs *r, size_t vocab)
{
    const size_t to = r->o->pad_vocab > 1 ? r->o->pad_vocab : 1, over = vocab % to;
    return over == 0 ? vocab : vocab + to - over;
}

ar_st_tensor ari_rs_described(const ari_rs_tensor *t, const size_t *shape)
{
    ar_st_tensor o = {.name = t->from->name, .dtype = t->from->dtype, .ndim = t->ndim};
    memcpy(o.shape, shape, sizeof o.shape);
    return o;
}

/* The vocabulary's rows: cut to those of the config, then padded. */
static void fit_vocabulary(ari_rs_tensor *t, const ari_rs *r, findings *f)
{
    const size_t vocab = t->placing.shape[0], padded = padded_rows(r, vocab);
    if (t->from->shape[0] > vocab) {
        add_name(&f->cut, t->from->name);
        f->rows_cut = t->from->shape[0] - vocab;
    }
    if (padded > vocab)
        add_name(&f->padded, t->from->name);
    t->rows = vocab;
    t->shape[0] = t->placing.shape[0] = padded;
}

static ar_status classify(ari_rs_tensor *t, const ari_rs *r, const params *p, const ar_dump_tensor *from, findings *f)
{
    const char *rest = "";
    param *of = r->has_config ? param_of(p, from->name, &rest) : NULL;
    *t = (ari_rs_tensor){.from = from, .ndim = from->ndim, .layer = SIZE_MAX, .order = SIZE_MAX};
    t->rows = from->ndim > 0 ? from->shape[0] : 1;
    memcpy(t->shape, from->shape, sizeof t->shape);
    if (of && rest[0] == '\0' && !has_shape(from, &of->placing))
        return ari_rs_wrong_shape(from, of->placing.ndim, of->placing.shape);
    if (of) {
        of->found = of->found || rest[0] == '\0';
        t->known = has_shape(from, &of->placing);
        t->placing = of->placing;
        t->layer = of->placing.layer;
        t->order = of->order;
    } else if (r->has_config) {
        t->layer = ari_layer_of_name(&r->config, from->name);
    }
    t->state = rest[0] == '.' || ari_ends_in(from->part[0].file, ARI_DUMP_STATE);
    if (t->known && t->placing.vocabulary)
        fit_vocabulary(t, r, f);
    if (r->has_config && !t->known && from->count > 1)
        add_name(&f->unknown, from->name);
    for (size_t i = 0; i < from->parts; i++)
        t->partial = t->partial || from->part[i].partial;
    if (t->partial)
        add_name(&f->partial, from->name);
    const ar_st_tensor described = ari_rs_described(t, t->shape);
    return ari_st_tensor_bytes(&t->bytes, &described);
}

static int compare_tensors(const void *a, const void *b)
{
    const ari_rs_tensor *x = a, *y = b;
    ARI_ASCENDING(x->order, y->order);
    return strcmp(x->from->name, y->from->name);
}

static ar_status refuse_repeated(const ari_rs *r)
{
    for (size_t i = 1; i < r->tensors; i++) {
        const ar_dump_tensor *a = r->tensor[i - 1].from, *b = r->tensor[i].from;
        if (strcmp(a->name, b->name) == 0)
            return ar_error_set(AR_ERR_FORMAT, "tensor '%s' is in %s and in %s", ARI_SHOW(a->name),
                                ARI_SHOW(a->part[0].file), ARI_SHOW(b->part[0].file));
    }
    return AR_OK;
}

static ar_status list_findings(const ari_rs *r, const params *p, findings *f)
{
    size_t found = 0;
    for (size_t i = 0; i < p->count; i++) {
        found += p->list[i].found;
        if (!p->list[i].found && !p->list[i].optional)
            add_name(&f->missing, p->list[i].name);
    }
    if (f->missing.count > 0 && found > 0)
        AR_TRY(ari_rs_note(r, r->o->strict, "%zu of the config's parameters %s not there: %s", f->missing.count,
                           f->missing.count == 1 ? "is" : "are", f->missing.text));
    if (r->stacked > 0)
        (void)ari_rs_note(r, false,
                          "%zu tensor%s of stacked experts become one for each expert, as the config has them",
                          r->stacked, ARI_PLURAL(r->stacked));
    if (f->unknown.count > 0)
        AR_TRY(ari_rs_note(r, r->o->strict, "%zu tensor%s that the config does not have, copied whole: %s",
                           f->unknown.count, ARI_PLURAL(f->unknown.count), f->unknown.text));
    if (f->cut.count > 0)
        AR_TRY(ari_rs_note(r, r->o->strict, "%zu row%s past the vocabulary of %zu cut: %s", f->rows_cut,
                           ARI_PLURAL(f->rows_cut), r->config.vocab, f->cut.text));
    if (f->padded.count > 0)
        (void)ari_rs_note(
            r, false, "the vocabulary of %zu is padded to %zu rows with zeros, of which config.json does not tell: %s",
            r->config.vocab, padded_rows(r, r->config.vocab), f->padded.text);
    if (f->partial.count > 0)
        (void)ari_rs_note(r, false, "%zu tensor%s summed over the ranks' parts: %s", f->partial.count,
                          ARI_PLURAL(f->partial.count), f->partial.text);
    return AR_OK;
}

static ar_status list_tensors(ari_rs *r)
{
    params p = {.r = r};
    findings f = {.rows_cut = 0};
    if (r->has_config)
        AR_TRY(ari_rs_unstack(r));
    const size_t n = ar_dump_count(r->dump);
    AR_TRY(ARI_TAKE(&r->tensor, &r->arena, n, "the list of tensors"));
    if (r->has_config)
        AR_TRY(list_params(&p));
    for (; r->tensors < n; r->tensors++)
        AR_TRY(classify(&r->tensor[r->tensors], r, &p, ar_dump_at(r->dump, r->tensors), &f));
    qsort(r->tensor, r->tensors, sizeof *r->tensor, compare_tensors);
    AR_TRY(refuse_repeated(r));
    return list_findings(r, &p, &f);
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

ar_status ari_rs_open(ari_rs *r)
{
    const ar_dump_options whole = {.map = r->o->map, .whole = true};
    AR_TRY(find_folder(r, r->o->in));
    AR_TRY(ar_dump_open(&r->dump, ari_is_folder(r->o->in) ? r->folder : r->o->in, &whole));
    AR_TRY(load_config(r));
    if (r->has_config)
        AR_TRY(ari_stages_check(&r->layout, &r->config));
    return list_tensors(r);
}

void ari_rs_close(ari_rs *r)
{
    ar_dump_close(r->dump);
    free(r->config_path);
    ari_arena_end(&r->arena, NULL);
}
