/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/grads/grads.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/hash.h"
#include "ref/io/safetensors.h"
#include "ref/models/family.h"
#include "ref/models/placement.h"
#include "verify/read/placement.h"
#include "verify/read/roles.h"
#include "verify/writer/dump_listener_private.h"

ar_status ari_gather_want(ari_gatherer *g, const char *tap, char pass, const char *name, int ndim, const size_t *shape,
                          int file)
{
    AR_TRY(ARI_GROW(&g->list, &g->capacity, g->count, "the list of outputs"));
    ari_gathered *t = &g->list[g->count];
    *t = (ari_gathered){.pass = pass, .file = file};
    snprintf(t->tap, sizeof t->tap, "%s", tap);
    AR_TRY(ari_full_tensor_init(&t->full, name, ndim, shape));
    g->count++;
    return AR_OK;
}

void ari_logits_name(char *name, size_t cap, const ar_config *c)
{
    snprintf(name, cap, "%s%s", ari_part_path(ari_family_of(c->arch), ARI_HEAD),
             c->logit_cap > 0.0     ? ".capped"
             : c->logit_scale > 0.0 ? ".scaled"
                                    : "");
}

ar_status ari_gather_want_logits(ari_gatherer *g, const ar_config *c, const ar_batch *b, int file)
{
    const size_t shape[3] = {b->batch, b->seq, c->vocab};
    char name[96];
    ari_logits_name(name, sizeof name, c);
    return ari_gather_want(g, name, 'f', "logits", 3, shape, file);
}

ar_status ari_gather_tap(void *user, const ar_tap_event *e)
{
    const ari_gatherer *g = user;
    if (e->layout->replica != 0)
        return AR_OK;
    for (size_t i = 0; i < g->count; i++) {
        ari_gathered *t = &g->list[i];
        if (t->pass != e->pass || strcmp(t->tap, e->name) != 0)
            continue;
        AR_TRY(ari_full_tensor_write(&t->full, 0, e->local, e->layout)); /* a tap does not know its rank */
    }
    return AR_OK;
}

ar_status ari_gather_check(const ari_gatherer *g)
{
    for (size_t i = 0; i < g->count; i++)
        AR_TRY(ari_full_tensor_check(&g->list[i].full));
    return AR_OK;
}

void ari_gatherer_fini(ari_gatherer *g)
{
    for (size_t i = 0; i < g->count; i++)
        ari_full_tensor_fini(&g->list[i].full);
    free(g->list);
    *g = (ari_gatherer){0};
}

/* --- who listens -------------------------------------------------------------------------------------------------- */

/* Returns true for weights, gradients and outputs: the tensors of a dump without activations. */
static bool is_result(void *user, const ar_tap_event *e)
{
    const ari_gatherer *g = user;
    if (e->pass == 'i' || e->pass == 'g')
        return true;
    for (size_t i = 0; i < g->count; i++) {
        if (g->list[i].pass == e->pass && strcmp(g->list[i].tap, e->name) == 0)
            return true;
    }
    return false;
}

ar_status ari_grads_taps_create(ari_grads_taps *t, ari_gatherer *outputs, const ar_grads_options *o)
{
    const size_t world = (size_t)ar_parallel_world(&o->run.parallel);
    *t = (ari_grads_taps){.outputs = outputs};
    if (o->per_rank || o->activations) {
        const ar_dump_listener_options options = {
            .first_copies = !o->per_rank, .wants = o->activations ? NULL : is_result, .wants_user = outputs};
        AR_TRY(ari_dump_ranks_create(&t->ranks, &o->run.parallel, &options));
    }
    AR_TRY(ARI_ALLOC_ZERO(&t->tap, world, "listeners of the ranks"));
    AR_TRY(ARI_ALLOC_ZERO(&t->user, world, "listeners of the ranks"));
    for (size_t r = 0; r < world; r++) {
        const bool has_listeners = t->ranks.ranks > 0;
        t->tap[r] = (ari_tap_pair){.tap = {ari_gather_tap, has_listeners ? ar_dump_listener_tap : NULL},
                                   .user = {outputs, has_listeners ? t->ranks.rank[r] : NULL}};
        t->user[r] = &t->tap[r];
    }
    return AR_OK;
}

void ari_grads_taps_fini(ari_grads_taps *t)
{
    ari_dump_ranks_fini(&t->ranks);
    free(t->tap);
    free(t->user);
    *t = (ari_grads_taps){.outputs = NULL};
}

/* --- putting together --------------------------------------------------------------------------------------------- */

/* Returns the index of the tensor with this name, searched from `begin` on; g->count: none. Since most ranks report in
 * the same order, the search starts at *hint. */
static size_t find_tensor(const ari_gatherer *g, size_t begin, size_t *hint, const char *name)
{
    const size_t n = g->count - begin;
    for (size_t k = 0; k < n; k++) {
        const size_t i = begin + (*hint + k) % n;
        if (strcmp(g->list[i].full.name, name) == 0) {
            *hint = i - begin + 1;
            return i;
        }
    }
    return g->count;
}

static ar_status merge_rank(ari_gatherer *g, size_t begin, int file, int rank, const ar_dump_listener *l)
{
    size_t hint = 0;
    ar_dump_value v;
    for (size_t i = 0; ari_dump_listener_at(l, i, &v); i++) {
        if (v.layout->replica != 0)
            continue;
        const size_t index = find_tensor(g, begin, &hint, v.name);
        if (index == g->count)
            AR_TRY(ari_gather_want(g, "", 0, v.name, v.layout->ndim, v.layout->shape, file));
        AR_TRY(ari_full_tensor_write(&g->list[index].full, rank, v.local, v.layout));
    }
    return AR_OK;
}

ar_status ari_grads_merge(ari_grads_taps *t, int file, bool is_retained)
{
    const size_t begin = t->outputs->count;
    for (int r = 0; r < t->ranks.ranks; r++) {
        AR_TRY(merge_rank(t->outputs, begin, file, r, t->ranks.rank[r]));
        if (!is_retained)
            ari_dump_listener_clear(t->ranks.rank[r]);
    }
    return AR_OK;
}

static int compare_keys(const void *a, const void *b)
{
    return ari_order_compare(a, b);
}

ar_status ari_grads_order(char **out, const ari_gatherer *g, int file)
{
    ari_order_key *key = NULL;
    const char **name = NULL;
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    size_t n = 0;
    long layers = LONG_MAX;
    AR_TRY(ARI_TAKE(&key, &arena, g->count, "an execution order"));
    AR_TRY(ARI_TAKE(&name, &arena, g->count, "an execution order"));
    for (size_t i = 0; i < g->count; i++) {
        if (g->list[i].file == file)
            key[n++] = ari_order_of(g->list[i].full.name, NULL);
    }
    for (size_t i = 0; i < n; i++)
        layers = ari_order_layers(&key[i], layers);
    for (size_t i = 0; i < n; i++)
        ari_order_further(&key[i], layers);
    qsort(key, n, sizeof *key, compare_keys);
    for (size_t i = 0; i < n; i++)
        name[i] = key[i].name;
    return ari_dump_order_text(out, name, n);
}

/* --- files -------------------------------------------------------------------------------------------------------- */

/* The tensors of files first .. end - 1. */
static ar_status as_tensors(const ari_gatherer *g, int first_file, int end, ari_arena *arena, ar_st_tensor **out,
                            size_t *n)
{
    AR_TRY(ARI_TAKE(out, arena, g->count, "a list of outputs"));
    *n = 0;
    for (size_t i = 0; i < g->count; i++) {
        const ari_gathered *t = &g->list[i];
        if (t->file >= first_file && t->file < end)
            (*out)[(*n)++] = ari_full_tensor_entry(&t->full);
    }
    return AR_OK;
}

/* Copies an fp32 parameter into the stacked tensor that contains it, which its first part creates. */
static ar_status put_stacked(ar_st_tensor *list, size_t *n, const ar_st_tensor *t, const ari_stacked *place,
                             ari_arena *arena)
{
    ar_st_tensor *stacked = list;
    const size_t size = place->shape[1] * (place->ndim > 2 ? place->shape[2] : 1);
    const size_t columns = t->ndim > 1 ? t->shape[1] : 1, elements = t->shape[0] * columns;
    const float *src = t->data;
    float *dst = NULL;
    char *name = NULL;
    while (stacked < list + *n && strcmp(stacked->name, place->name) != 0)
        stacked++;
    if (stacked == list + *n) {
        ar_st_tensor created = {.dtype = t->dtype, .ndim = place->ndim};
        memcpy(created.shape, place->shape, (size_t)place->ndim * sizeof *place->shape);
        AR_TRY(ARI_TAKE(&dst, arena, place->shape[0] * size, "stacked gradients"));
        AR_TRY(ari_arena_text(arena, &name, place->name, "a gradient's name"));
        created.name = name;
        created.data = dst;
        *stacked = created;
        ++*n;
    }
    dst = (float *)(uintptr_t)stacked->data + place->expert * size;
    if (!place->step[0]) {
        memcpy(dst + place->row * columns, src, elements * sizeof *src);
        return AR_OK;
    }
    for (size_t i = 0; i < elements; i++)
        dst[place->row + i / columns * place->step[0] + i % columns * place->step[1]] = src[i];
    return AR_OK;
}

static ar_status stack_parameters(ar_st_tensor *list, size_t *n, const ar_config *c, ari_arena *arena)
{
    size_t output_count = 0;
    for (size_t i = 0; i < *n; i++) {
        const ar_st_tensor t = list[i];
        ari_stacked place;
        if (ari_stacked_of(&place, c, t.name, t.ndim, t.shape) && place.ndim > t.ndim) {
            AR_TRY(put_stacked(list, &output_count, &t, &place, arena));
            continue;
        }
        list[output_count] = t;
        if (place.name[0]) {
            char *name = NULL;
            AR_TRY(ari_arena_text(arena, &name, place.name, "a gradient's name"));
            list[output_count].name = name;
        }
        output_count++;
    }
    *n = output_count;
    return AR_OK;
}

ar_status ari_gather_write(const ari_gatherer *g, size_t targets, int files, const char *const *path,
                           const char *const *placement)
{
    char count[24];
    ari_atomic_file *out[ARI_GATHER_FILES] = {NULL};
    ari_arena arena = {NULL};
    ar_status st = AR_OK;
    snprintf(count, sizeof count, "%zu", targets);
    for (int i = 0; i < files; i++) {
        const char *const metadata[] = {"format", "pt", "targets", count, ARI_DUMP_PLACEMENT, placement[i]};
        ar_st_tensor *list = NULL;
        size_t n = 0;
        AR_TRY_TO(done, st, as_tensors(g, i, i + 1, &arena, &list, &n));
        if (g->stacked && i == ARI_GRADS_FILE)
            AR_TRY_TO(done, st, stack_parameters(list, &n, g->stacked, &arena));
        AR_TRY_TO(done, st, ari_entries_as_stored(&arena, list, n));
        AR_TRY_TO(done, st, ari_st_write_uncommitted(&out[i], path[i], list, n, metadata, placement[i] ? 3 : 2));
    }
done:
    ari_arena_end(&arena, NULL);
    if (st == AR_OK)
        return ari_atomic_file_commit_all(out, ARI_GATHER_FILES);
    for (int i = 0; i < ARI_GATHER_FILES; i++)
        ari_atomic_file_discard(out[i]);
    return st;
}

ar_status ari_gather_hash(const ari_gatherer *g, int files, char hex[65])
{
    ar_st_tensor *list = NULL;
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    size_t n = 0;
    AR_TRY(as_tensors(g, 0, files, &arena, &list, &n));
    return ari_tensors_hash(hex, list, n);
}

ar_status ari_gather_write_allowed(const ari_gatherer *g, const ari_reference *ref, const char *path,
                                   ar_sensitivity sensitivity, const char *hash)
{
    ARI_OWNED ari_allowance *allowances = NULL;
    size_t n = 0;
    AR_TRY(ARI_ALLOC(&allowances, g->count, "allowances"));
    for (size_t i = 0; i < g->count; i++) {
        const ari_gathered *w = &g->list[i];
        if (!w->tap[0]) /* written under its name in the reference */
            continue;
        const size_t index = ari_reference_find(ref, w->tap, w->pass);
        if (index == ref->count)
            return ar_error_set(AR_ERR_INTERNAL, "the baseline did not emit %s%s", w->tap, ari_pass_suffix(w->pass));
        snprintf(allowances[n].name, sizeof allowances[n].name, "%s", w->full.name);
        allowances[n++].value = ref->tensor[index].allowed;
    }
    return ari_allowances_write(ref, allowances, n, path, sensitivity, hash);
}
