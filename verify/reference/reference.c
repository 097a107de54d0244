/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/reference/reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/os/os.h"
#include "ref/io/hash.h"

static size_t bytes_of(const ari_ref_tensor *t)
{
    return t->count * sizeof *t->values;
}

ar_status ari_reference_allocate(ari_ref_tensor *t)
{
    t->values = bytes_of(t) >= ARI_REFERENCE_LARGE ? ari_disk_array_create(bytes_of(t)) : NULL;
    t->on_disk = t->values != NULL;
    return t->on_disk ? AR_OK : ARI_ALLOC(&t->values, t->count, t->name);
}

void ari_reference_rest(const ari_ref_tensor *t)
{
    if (t->on_disk)
        ari_disk_array_rest(t->values, bytes_of(t));
}

ar_status ari_reference_emit(void *user, const char *name, char pass, int ndim, const size_t *shape,
                             const double *values)
{
    ari_reference *r = user;
    AR_TRY(ARI_GROW(&r->tensor, &r->capacity, r->count, "the list of reference tensors"));
    ari_ref_tensor *t = &r->tensor[r->count];
    *t = (ari_ref_tensor){
        .pass = pass, .step = r->step > 0 ? r->step : 1, .ndim = ndim, .count = ari_volume(shape, ndim)};
    const int n = snprintf(t->name, sizeof t->name, "%s", name);
    if (n < 0 || (size_t)n >= sizeof t->name || ndim > AR_MAX_DIMS)
        return ar_error_set(AR_ERR_INTERNAL, "reference tensor '%s' with %d dimensions", name, ndim);
    for (int d = 0; d < ndim; d++)
        t->shape[d] = shape[d];
    AR_TRY(ari_reference_allocate(t));
    r->count++;
    for (size_t i = 0; i < t->count; i++)
        t->values[i] = (float)values[i];
    ari_reference_rest(t);
    return AR_OK;
}

void ari_reference_begin(void *user, int step)
{
    ari_reference *r = user;
    r->step = step;
}

ar_baseline_options ari_reference_options(const ar_run *run, ari_reference *reference)
{
    return (ar_baseline_options){.mode = AR_MODE_EXACT,
                                 .bf16 = run->numerics == AR_NUMERICS_EXACT && run->precision == AR_PRECISION_BF16,
                                 .seed = run->seed,
                                 .emit = reference ? ari_reference_emit : NULL,
                                 .emit_user = reference,
                                 .begin_step = reference ? ari_reference_begin : NULL,
                                 .dropout = run->dropout,
                                 .digests = run->numerics == AR_NUMERICS_EXACT,
                                 .loss = run->loss,
                                 .steps = (int)run->steps,
                                 .optimizer = run->optimizer,
                                 .clip = run->clip};
}

void ari_reference_fini(ari_reference *r)
{
    for (size_t i = 0; i < r->count; i++) {
        if (r->tensor[i].on_disk)
            ari_disk_array_destroy(r->tensor[i].values, bytes_of(&r->tensor[i]));
        else
            free(r->tensor[i].values);
        free(r->tensor[i].allowed_each);
    }
    free(r->tensor);
    free(r->by_name);
    *r = (ari_reference){0};
}

static int compare_keys(const char *name, char pass, int step, const ari_ref_tensor *t)
{
    const int c = strcmp(name, t->name);
    if (c != 0)
        return c;
    return pass != t->pass ? (int)pass - (int)t->pass : step - t->step;
}

static int compare_entries(const void *a, const void *b, void *user)
{
    const ari_ref_tensor *t = user, *x = &t[*(const size_t *)a], *y = &t[*(const size_t *)b];
    return compare_keys(x->name, x->pass, x->step, y);
}

static void describe_vacuous(ar_check_vacuous *v, const ari_ref_tensor *t)
{
    size_t first_index = SIZE_MAX;
    *v = (ar_check_vacuous){.step = t->step, .ndim = t->ndim, .elements = t->count};
    snprintf(v->tensor, sizeof v->tensor, "%s%s", t->name, ari_pass_suffix(t->pass));
    snprintf(v->pass, sizeof v->pass, "%s", ari_pass_name(t->pass));
    for (size_t i = 0; i < t->count; i++) {
        if (isfinite(t->values[i]))
            continue;
        first_index = first_index == SIZE_MAX ? i : first_index;
        v->elements_empty++;
    }
    v->value = t->values[first_index];
    ari_coordinates(v->index, first_index, t->ndim, t->shape);
}

void ari_reference_find_vacuous(ari_reference *r)
{
    size_t tensors = 0;
    for (size_t i = 0; i < r->count; i++) {
        const ari_ref_tensor *t = &r->tensor[i];
        size_t k = 0;
        while (k < t->count && isfinite(t->values[k]))
            k++;
        if (k < t->count && tensors++ == 0)
            describe_vacuous(&r->vacuous, t);
        ari_reference_rest(t);
    }
    r->vacuous.tensors = tensors;
}

ar_status ari_reference_finish(ari_reference *r)
{
    ari_reference_find_vacuous(r);
    AR_TRY(ARI_ALLOC(&r->by_name, r->count, "an index of reference tensors"));
    for (size_t i = 0; i < r->count; i++)
        r->by_name[i] = i;
    ari_sort(r->by_name, r->count, sizeof *r->by_name, compare_entries, r->tensor);
    for (size_t i = 1; i < r->count; i++) {
        const ari_ref_tensor *a = &r->tensor[r->by_name[i - 1]], *b = &r->tensor[r->by_name[i]];
        if (compare_keys(a->name, a->pass, a->step, b) == 0)
            return ar_error_set(AR_ERR_INTERNAL, "the baseline emitted %s%s twice in step %d", a->name,
                                ari_pass_suffix(a->pass), a->step);
    }
    return AR_OK;
}

size_t ari_reference_find_in(const ari_reference *r, const char *name, char pass, int step)
{
    size_t low = 0;
    ARI_BISECT(low, r->count, i, compare_keys(name, pass, step, &r->tensor[r->by_name[i]]) > 0)
    const size_t index = low < r->count ? r->by_name[low] : r->count;
    return index < r->count && compare_keys(name, pass, step, &r->tensor[index]) == 0 ? index : r->count;
}

size_t ari_reference_find(const ari_reference *r, const char *name, char pass)
{
    return ari_reference_find_in(r, name, pass, 1);
}

size_t ari_reference_elements(const ari_reference *r)
{
    size_t n = 0;
    for (size_t i = 0; i < r->count; i++)
        n += r->tensor[i].count;
    return n;
}

static int last_step(const ari_reference *r)
{
    return r->step > 0 ? r->step : 1;
}

bool ari_reference_is_weight(const ari_reference *r, size_t tensor)
{
    const ari_ref_tensor *t = &r->tensor[tensor];
    if (t->pass == 'n')
        return t->step == last_step(r);
    /* Initial values are emitted first, and updates last. */
    return t->pass == 'i' && !strchr("nmv", r->tensor[r->count - 1].pass);
}

bool ari_reference_is_gradient(const ari_reference *r, size_t tensor)
{
    return r->tensor[tensor].pass == 'g' && r->tensor[tensor].step == last_step(r);
}

size_t ari_reference_outputs(const ari_reference *r)
{
    for (size_t i = r->count; i-- > 0;) {
        const ari_ref_tensor *t = &r->tensor[i];
        if (t->pass == 'f' && t->ndim > 0 && t->step == last_step(r))
            return i;
    }
    return r->count;
}

bool ari_is_of_integers(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot && strncmp(dot, ".routes", 7) == 0 && (dot[7] == '\0' || dot[7] == ':');
}

ar_status ari_integers_of(int32_t **out, ari_arena *arena, const float *values, size_t n)
{
    AR_TRY(ARI_TAKE(out, arena, n, "whole numbers"));
    for (size_t i = 0; i < n; i++)
        (*out)[i] = (int32_t)values[i];
    return AR_OK;
}

ar_status ari_entries_as_stored(ari_arena *arena, ar_st_tensor *entry, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int32_t *integers = NULL;
        if (!ari_is_of_integers(entry[i].name))
            continue;
        AR_TRY(ari_integers_of(&integers, arena, entry[i].data, ari_volume(entry[i].shape, entry[i].ndim)));
        entry[i].dtype = AR_I32;
        entry[i].data = integers;
    }
    return AR_OK;
}

ar_st_tensor ari_reference_entry(const ari_ref_tensor *t, const char *name)
{
    ar_st_tensor e = {.name = name, .dtype = AR_F32, .ndim = t->ndim, .data = t->values};
    memcpy(e.shape, t->shape, (size_t)t->ndim * sizeof *t->shape);
    return e;
}

/* Computes hashes over the tensors that `filter` selects. */
static ar_status hash(char hex[65], const ari_reference *r, bool (*filter)(const ari_reference *, size_t),
                      float *const *values)
{
    ARI_OWNED ar_st_tensor *list = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&list, r->count, "a list to hash"));
    size_t n = 0;
    for (size_t i = 0; i < r->count; i++) {
        const ari_ref_tensor *t = &r->tensor[i];
        if (!filter(r, i))
            continue;
        list[n] = ari_reference_entry(t, t->name);
        list[n++].data = values && values[i] ? values[i] : t->values;
    }
    const ar_status st = ari_tensors_hash(hex, list, n);
    for (size_t i = 0; i < r->count; i++)
        ari_reference_rest(&r->tensor[i]);
    return st;
}

ar_status ari_reference_hashes(char weights[65], char gradients[65], const ari_reference *r, float *const *values)
{
    AR_TRY(hash(weights, r, ari_reference_is_weight, values));
    return hash(gradients, r, ari_reference_is_gradient, values);
}

ar_status ari_reference_outputs_hash(char outputs[65], const ari_reference *r)
{
    const size_t i = ari_reference_outputs(r);
    outputs[0] = '\0';
    if (i == r->count)
        return AR_OK;
    const ar_st_tensor entry = ari_reference_entry(&r->tensor[i], r->tensor[i].name);
    return ari_tensors_hash(outputs, &entry, 1);
}

static const struct {
    char pass;
    const char *suffix, *name;
} passes[] = {{'i', ":init", "init"},  {'f', ":fwd", "forward"}, {'b', ":bwd", "backward"}, {'c', ":clip", "clip"},
              {'n', ":new", "update"}, {'m', ":m", "update"},    {'v', ":v", "update"},     {'g', ":grad", "backward"}};

static size_t row_of(char pass)
{
    size_t i = 0;
    while (i + 1 < sizeof passes / sizeof *passes && passes[i].pass != pass)
        i++;
    return i;
}

const char *ari_pass_suffix(char pass)
{
    return passes[row_of(pass)].suffix;
}

const char *ari_pass_name(char pass)
{
    return passes[row_of(pass)].name;
}

bool ari_dump_name(char name[ARI_REFERENCE_NAME], const char *tensor, char pass, uint32_t step)
{
    char step_suffix[16] = "";
    if (step > 1)
        snprintf(step_suffix, sizeof step_suffix, "@%u", (unsigned)step);
    return snprintf(name, ARI_REFERENCE_NAME, "%s%s%s", tensor, ari_pass_suffix(pass), step_suffix) <
           ARI_REFERENCE_NAME;
}
