/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "verify/read/roles.h"

static bool starts(const char *text, size_t length, const char *prefix)
{
    return strlen(prefix) <= length && memcmp(text, prefix, strlen(prefix)) == 0;
}

static bool matches_text(const char *text, size_t length, const char *word)
{
    return strlen(word) == length && memcmp(text, word, length) == 0;
}

/* --- pass and step ------------------------------------------------------------------------------------------------ */

static const struct {
    const char *text;
    char pass;
} suffixes[] = {
    {":init", 'i'}, {":fwd", 'f'}, {":bwd", 'b'},   {":grad", 'g'},   {":clip", 'c'},  {":new", 'n'},
    {":m", 'm'},    {":v", 'v'},   {":state", 's'}, {":buffer", 'u'}, {":count", 'k'},
};

/* Removes "@12" from the end and returns 12; returns 1 without such an end. */
static int take_step(const char *name, size_t *length)
{
    size_t digits_begin = *length;
    while (digits_begin > 0 && isdigit((unsigned char)name[digits_begin - 1]))
        digits_begin--;
    if (digits_begin == *length || *length - digits_begin > 8 || digits_begin < 2 || name[digits_begin - 1] != '@')
        return 1;
    *length = digits_begin - 1;
    return atoi(name + digits_begin);
}

/* A tensor without a suffix. */
static char pass_by_file(const char *name, size_t length, const char *path)
{
    if (matches_text(name, length, "logits") || matches_text(name, length, "loss") ||
        starts(name, length, "hidden_states"))
        return 'f';
    if (matches_text(name, length, "grad_norm"))
        return 'c';
    if (ari_ending(name, length, ".grad"))
        return 'g';
    for (const char *match = path ? strstr(path, "grad") : NULL; match; match = strstr(match + 1, "grad")) {
        const char *end = match + strcspn(match, "/"); /* end of the component, or of the name after its last
                                                          component */
        if (end[strspn(end, "/")] == '\0')
            return 'g';
    }
    return 'w';
}

static void find_pass(ari_order_key *k, const char *path)
{
    k->stem = strlen(k->name);
    k->step = take_step(k->name, &k->stem);
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        const size_t n = ari_ending(k->name, k->stem, suffixes[i].text);
        k->pass = suffixes[i].pass;
        k->stem -= n;
        if (n > 0)
            return;
    }
    k->pass = pass_by_file(k->name, k->stem, path);
}

/* --- places in the model ------------------------------------------------------------------------------------------ */

/* Positions of modules with unknown names. */
enum { UNKNOWN_FORWARD = 37, UNKNOWN_BACKWARD = 54, UNKNOWN_MODULE = 5 };

enum { BEFORE, WITHIN = ARI_AT_LAYERS, ELSEWHERE, AFTER, FURTHER, LAST };

/* Finds the first numeric component in a name of n bytes; *rest: offset of the text after it. */
static bool layer_of(const char *name, size_t n, long *layer, size_t *rest)
{
    for (size_t begin = 0; begin < n;) {
        size_t end = begin;
        bool digits = true;
        for (; end < n && name[end] != '.'; end++)
            digits = digits && isdigit((unsigned char)name[end]);
        if (digits && end > begin && end - begin < 9) {
            *layer = atol(name + begin);
            *rest = end < n ? end + 1 : n;
            return true;
        }
        begin = end + 1;
    }
    return false;
}

static bool runs_backward(const ari_order_key *k)
{
    return k->pass == 'b' || k->pass == 'g';
}

static int by_direction(const ari_order_key *k, ari_role role, int forward, int backward)
{
    const ari_role_place place = role != ARI_NO_ROLE ? *ari_role_place_of(role) : (ari_role_place){forward, backward};
    return runs_backward(k) ? place.backward : place.forward;
}

static void find_place(ari_order_key *k)
{
    const char *name = k->name;
    size_t n = k->stem, rest = 0;
    n -= k->pass == 'g' ? ari_ending(name, n, ".grad") : 0;
    const size_t weight = ari_ending(name, n, ".weight"), dot = ari_ending(name, n, ".bias");
    const size_t bias = dot ? dot : ari_ending(name, n, "_bias");
    k->part = weight ? 1 : bias ? 2 : 0;
    n -= weight + bias;
    ari_role role;
    if (starts(name, n, "hidden_states.")) { /* the embedding's output, then each layer's */
        const long n_th = strtol(name + strlen("hidden_states."), NULL, 10);
        const long i = n_th < 0 || n_th > 999999999 ? 0 : n_th; /* a number too large for a layer */
        k->section = i > 0 ? WITHIN : BEFORE;
        k->layer = i - 1;
        k->module = UNKNOWN_FORWARD + 2;
    } else if (layer_of(name, n, &k->layer, &rest)) {
        role = ari_role_in_layer(name + rest, n - rest);
        k->section = WITHIN;
        k->further = ari_is_mtp_part(role);
        k->module = by_direction(k, role, UNKNOWN_FORWARD, UNKNOWN_BACKWARD);
    } else if ((role = ari_role_outside(name, n, ARI_BEFORE_BLOCKS)) != ARI_NO_ROLE) {
        k->section = BEFORE;
        k->module = by_direction(k, role, 0, 0);
    } else {
        role = ari_role_outside(name, n, ARI_AFTER_BLOCKS);
        k->section = role != ARI_NO_ROLE ? AFTER : ELSEWHERE;
        k->module = by_direction(k, role, UNKNOWN_MODULE, UNKNOWN_MODULE);
    }
    if (runs_backward(k)) {
        k->section = -k->section;
        k->layer = -k->layer;
    }
}

ari_order_key ari_order_of(const char *name, const char *path)
{
    static const char order[] = "kiw?fbgcnmvsu";
    ari_order_key k = {.name = name};
    find_pass(&k, path);
    const char *match = strchr(order, k.pass);
    k.phase = match ? (int)(match - order) : 3;
    k.phase -= k.pass == 'g'; /* gradients are ordered within the backward pass */
    find_place(&k);
    return k;
}

long ari_order_layers(const ari_order_key *key, long layers)
{
    return key->further && labs(key->layer) < layers ? labs(key->layer) : layers;
}

/* Losses of blocks for further tokens are part of the loss. */
void ari_order_further(ari_order_key *key, long layers)
{
    if (labs(key->section) == WITHIN && labs(key->layer) >= layers)
        key->section = runs_backward(key) ? -FURTHER : FURTHER;
    else if (key->section == AFTER && key->module == ari_role_place_of(ARI_LOSS)->forward)
        key->section = LAST;
}

ari_walk ari_walk_of(const ar_dump *dump, const char *path, const char *passes, int step)
{
    return (ari_walk){.dump = dump, .path = dump && !path ? ar_dump_path(dump) : path, .passes = passes, .step = step};
}

bool ari_is_readable(const ar_dump_tensor *t)
{
    return t && t->count > 0 && t->dtype != AR_C64 && ar_dtype_bytes(t->dtype) > 0;
}

const ar_dump_tensor *ari_find_readable(const ar_dump *d, const char *name)
{
    const ar_dump_tensor *t = d ? ar_dump_find(d, name) : NULL;
    return ari_is_readable(t) ? t : NULL;
}

bool ari_walk_next(ari_walk *w)
{
    while (w->dump && w->next_index < ar_dump_count(w->dump)) {
        w->t = ar_dump_at(w->dump, w->next_index++);
        w->key = ari_order_of(w->t->name, w->path);
        if ((!w->passes || strchr(w->passes, w->key.pass)) && (w->step == 0 || w->step == w->key.step) &&
            ari_is_readable(w->t))
            return true;
    }
    return false;
}

/* --- comparing ---------------------------------------------------------------------------------------------------- */

/* Compares names. Digits compare as numbers of any length, ignoring leading zeros; other text compares by bytes. */
static int compare_names(const char *a, const char *b)
{
    static const char digits[] = "0123456789";
    const char *x = a, *y = b;
    while (*x && *y) {
        const bool numbers = isdigit((unsigned char)*x) && isdigit((unsigned char)*y);
        x += numbers ? strspn(x, "0") : 0;
        y += numbers ? strspn(y, "0") : 0;
        const size_t n = numbers ? strspn(x, digits) : 1, m = numbers ? strspn(y, digits) : 1;
        const int order = n != m ? (n < m ? -1 : 1) : memcmp(x, y, n);
        if (order)
            return order;
        x += n;
        y += m;
    }
    return *x ? 1 : *y ? -1 : strcmp(a, b);
}

static int sign(long a, long b)
{
    return (a > b) - (a < b);
}

int ari_order_compare(const ari_order_key *a, const ari_order_key *b)
{
    const int order[] = {sign(a->step, b->step),   sign(a->phase, b->phase),   sign(a->section, b->section),
                         sign(a->layer, b->layer), sign(a->module, b->module), sign(a->part, b->part)};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        if (order[i])
            return order[i];
    }
    return compare_names(a->name, b->name);
}
