/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "verify/compare/verify_impl.h"
#include "verify/read/dump.h"

/* Handles names that wrappers add in one of the dumps. "module." of DDP and "model." of a model with a head precede a
 * whole name; "_orig_mod.", "_checkpoint_wrapped_module." and other private attributes appear anywhere. If a tensor's
 * name without wrappers equals a reference's name, the tensor gets the reference's name. */

enum { MOST_WRAPPERS = 8 }; /* limit of components before a name, for hostile names */

/* A tensor's name without ":fwd" and "@2". */
typedef struct stem {
    char *plain;      /* the name without wrappers; the first field, because it is the key */
    const char *text; /* borrowed */
    size_t length;
} stem;

typedef struct side {
    ari_arena *arena;
    stem *stem; /* [n] sorted by `plain`, all different */
    size_t n;
    char removed[ARI_WRAPPERS_TEXT]; /* the wrappers, for the report */
} side;

static void note_wrapper(side *s, const char *text, size_t length)
{
    char name[64];
    const size_t used = strlen(s->removed);
    snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name - 1), text);
    if (!strstr(s->removed, name))
        snprintf(s->removed + used, sizeof s->removed - used, "%s%s", used ? ", " : "", name);
}

/* Returns true if the component that ends before `c` is an attribute in which PEFT stores values by adapter name. */
static bool holds_adapters(const char *start, const char *c)
{
    static const char *const holders[] = {"lora_A.",           "lora_B.",          "lora_embedding_A.",
                                          "lora_embedding_B.", "modules_to_save.", "lora_magnitude_vector."};
    for (size_t i = 0; i < sizeof holders / sizeof *holders; i++) {
        const size_t n = strlen(holders[i]);
        if ((size_t)(c - start) >= n && memcmp(c - n, holders[i], n) == 0)
            return true;
    }
    return false;
}

/* Removes private components except the last, which is the value itself, and the names of adapters, which the program
 * chooses. */
static void drop_private(side *s, stem *entry)
{
    char *cursor = entry->plain;
    for (const char *c = entry->text, *end = c + entry->length; c < end;) {
        const char *dot = memchr(c, '.', (size_t)(end - c));
        const size_t n = dot ? (size_t)(dot - c) + 1 : (size_t)(end - c);
        if ((dot && *c == '_') || holds_adapters(entry->text, c)) {
            note_wrapper(s, c, n);
        } else {
            memcpy(cursor, c, n);
            cursor += n;
        }
        c += n;
    }
    *cursor = '\0';
}

static int by_text(const void *a, const void *b)
{
    const stem *x = a, *y = b;
    const int order = memcmp(x->text, y->text, x->length < y->length ? x->length : y->length);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

static ar_status list_stems(side *s, const ari_names *names)
{
    const size_t n = names->count;
    size_t unique_count = 0;
    AR_TRY(ARI_TAKE(&s->stem, s->arena, n, "names of tensors"));
    for (size_t i = 0; i < n; i++) {
        const char *name = names->name[i];
        s->stem[i] = (stem){.text = name, .length = ari_order_of(name, NULL).stem};
    }
    qsort(s->stem, n, sizeof *s->stem, by_text);
    for (size_t i = 0; i < n; i++)
        if (unique_count == 0 || by_text(&s->stem[unique_count - 1], &s->stem[i]) != 0)
            s->stem[unique_count++] = s->stem[i];
    for (s->n = 0; s->n < unique_count; s->n++) {
        stem *entry = &s->stem[s->n];
        AR_TRY(ARI_TAKE(&entry->plain, s->arena, entry->length + 1, "names of tensors"));
        drop_private(s, entry);
    }
    qsort(s->stem, s->n, sizeof *s->stem, ari_by_name);
    return AR_OK;
}

static const stem *find_stem(const side *s, const char *plain)
{
    return s->n > 0 ? bsearch(&plain, s->stem, s->n, sizeof *s->stem, ari_by_name) : NULL;
}

/* Returns true if two names have become equal, which makes the name ambiguous. */
static bool repeats(const side *s)
{
    for (size_t i = 1; i < s->n; i++)
        if (strcmp(s->stem[i - 1].plain, s->stem[i].plain) == 0)
            return true;
    return false;
}

/* --- the prefix --------------------------------------------------------------------------------------------------- */

typedef struct prefix {
    const char *text; /* borrowed */
    size_t length;    /* length including the dot; 0: no prefix */
} prefix;

static int compare_prefixes(const void *a, const void *b)
{
    const prefix *x = a, *y = b;
    ARI_ASCENDING(x->length, y->length);
    return memcmp(x->text, y->text, x->length);
}

static size_t count_unmatched(const side *subject, const side *counterpart)
{
    size_t n = 0;
    for (size_t i = 0; i < subject->n; i++)
        n += !find_stem(counterpart, subject->stem[i].plain);
    return n;
}

/* Returns true if one of the two prefixes begins with the other. */
static bool are_nested(const prefix *a, const prefix *b)
{
    return memcmp(a->text, b->text, a->length < b->length ? a->length : b->length) == 0;
}

/* Finds the prefix of `subject` whose removal turns the largest number of names that `counterpart` lacks into names of
 * `counterpart`, and that number. The number is 0 if a second prefix would do the same, for example "encoder." and
 * "decoder.". Among nested prefixes with equal numbers the shorter one is chosen. */
static ar_status find_prefix(prefix *best_prefix, size_t *max_count, const side *subject, const side *counterpart)
{
    prefix *found = NULL;
    size_t n = 0, size = 0;
    AR_TRY(ari_mul_size(&size, subject->n, MOST_WRAPPERS));
    AR_TRY(ARI_TAKE(&found, subject->arena, size, "names of tensors"));
    for (size_t i = 0; i < subject->n; i++) {
        const char *name = subject->stem[i].plain, *dot = find_stem(counterpart, name) ? NULL : strchr(name, '.');
        for (int k = 0; dot && k < MOST_WRAPPERS; k++, dot = strchr(dot + 1, '.'))
            if (find_stem(counterpart, dot + 1) && !find_stem(subject, dot + 1))
                found[n++] = (prefix){name, (size_t)(dot - name) + 1};
    }
    ARI_SORT(found, n, compare_prefixes);
    *max_count = 0;
    for (size_t i = 0, equal_count = 0; i < n; i += equal_count) {
        for (equal_count = 1; i + equal_count < n && compare_prefixes(&found[i], &found[i + equal_count]) == 0;)
            equal_count++;
        if (equal_count > *max_count) {
            *max_count = equal_count;
            *best_prefix = found[i];
        }
    }
    for (size_t i = 0; i < n; i++)
        *max_count = are_nested(&found[i], best_prefix) ? *max_count : 0;
    return AR_OK;
}

/* Returns true if both dumps contain a name with the prefix: then the prefix is a module and not a wrapper. */
static bool is_shared(const prefix *p, const side *subject, const side *counterpart)
{
    for (size_t i = 0; i < subject->n; i++)
        if (strncmp(subject->stem[i].plain, p->text, p->length) == 0 && find_stem(counterpart, subject->stem[i].plain))
            return true;
    return false;
}

static ar_status take_off(side *s, const prefix *p)
{
    char *text = NULL;
    AR_TRY(ARI_TAKE(&text, s->arena, p->length + 1, "names of tensors"));
    memcpy(text, p->text, p->length);
    note_wrapper(s, text, p->length);
    for (size_t i = 0; i < s->n; i++) {
        char *plain = s->stem[i].plain;
        if (strncmp(plain, text, p->length) == 0)
            memmove(plain, plain + p->length, strlen(plain + p->length) + 1);
    }
    qsort(s->stem, s->n, sizeof *s->stem, ari_by_name);
    return AR_OK;
}

/* Drops the prefix if at least half of the unmatched names of one dump then match. Fewer matches are a coincidence. */
static ar_status drop_prefix(side *s)
{
    prefix best_prefix[2] = {{NULL, 0}, {NULL, 0}};
    size_t max_count[2] = {0, 0}, alone[2];
    for (int k = 0; k < 2; k++) {
        AR_TRY(find_prefix(&best_prefix[k], &max_count[k], &s[k], &s[1 - k]));
        alone[k] = count_unmatched(&s[k], &s[1 - k]);
    }
    const int k = max_count[1] >= max_count[0];
    const bool enough = max_count[k] > 0 && 2 * max_count[k] >= (alone[0] < alone[1] ? alone[0] : alone[1]);
    return enough && !is_shared(&best_prefix[k], &s[k], &s[1 - k]) ? take_off(&s[k], &best_prefix[k]) : AR_OK;
}

/* --- names -------------------------------------------------------------------------------------------------------- */

/* Returns the reference's name for a tensor of the other dump, or the tensor's name if the reference has no such
 * tensor. */
static ar_status name_as_reference(char **out, bool *renamed, const side *s, const char *name)
{
    const stem key = {.text = name, .length = ari_order_of(name, NULL).stem};
    const stem *listed = bsearch(&key, s[1].stem, s[1].n, sizeof key, by_text);
    const stem *twin = listed ? find_stem(&s[0], listed->plain) : NULL;
    *renamed = twin && by_text(twin, &key) != 0;
    if (!*renamed)
        return ari_arena_text(s->arena, out, name, "names of tensors");
    const size_t rest = strlen(name + key.length) + 1;
    AR_TRY(ARI_TAKE(out, s->arena, twin->length + rest, "names of tensors"));
    memcpy(*out, twin->text, twin->length);
    memcpy(*out + twin->length, name + key.length, rest);
    return AR_OK;
}

static ar_status rename_other(ari_unwrapped *out, const ari_names *names, const side *s)
{
    const size_t n = names->count;
    char **name = NULL;
    const char **sorted = NULL;
    size_t renamed = 0;
    AR_TRY(ARI_TAKE(&name, s->arena, n, "names of tensors"));
    AR_TRY(ARI_TAKE(&sorted, s->arena, n, "names of tensors"));
    qsort(s[1].stem, s[1].n, sizeof *s[1].stem, by_text);
    for (size_t i = 0; i < n; i++) {
        bool is_renamed = false;
        AR_TRY(name_as_reference(&name[i], &is_renamed, s, names->name[i]));
        sorted[i] = name[i];
        renamed += is_renamed;
    }
    if (renamed == 0 || ari_repeated_name(sorted, n))
        return AR_OK;
    *out = (ari_unwrapped){.name = (const char *const *)name, .renamed = renamed};
    for (int k = 0; k < 2; k++)
        memcpy(out->wrappers[k], s[k].removed, sizeof s[k].removed);
    return AR_OK;
}

ar_status ari_names_unwrap(ari_unwrapped *out, const ari_names *names, ari_arena *arena)
{
    side s[2] = {{.arena = arena}, {.arena = arena}};
    *out = (ari_unwrapped){.name = NULL};
    if (names[0].count == 0 || names[1].count == 0)
        return AR_OK;
    for (int k = 0; k < 2; k++)
        AR_TRY(list_stems(&s[k], &names[k]));
    if (repeats(&s[0]) || repeats(&s[1]))
        return AR_OK;
    AR_TRY(drop_prefix(s));
    return repeats(&s[0]) || repeats(&s[1]) ? AR_OK : rename_other(out, &names[1], s);
}

ar_status ari_verify_unwrap(ari_verifying *v)
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    ari_names names[2];
    ari_unwrapped unwrapped;
    for (int k = 0; k < 2; k++) {
        const char **name = NULL;
        names[k] = (ari_names){.count = ar_dump_count(v->dump[k])};
        AR_TRY(ARI_TAKE(&name, &arena, names[k].count, "names of tensors"));
        for (size_t i = 0; i < names[k].count; i++)
            name[i] = ar_dump_at(v->dump[k], i)->name;
        names[k].name = name;
    }
    AR_TRY(ari_names_unwrap(&unwrapped, names, &arena));
    if (unwrapped.name == NULL)
        return AR_OK;
    v->report->renamed = unwrapped.renamed;
    memcpy(v->report->wrappers, unwrapped.wrappers, sizeof unwrapped.wrappers);
    return ari_dump_rename(v->dump[1], unwrapped.name);
}
