/* SPDX-License-Identifier: Apache-2.0 */
/* Mutates the files of a checkpoint, the same way in every run: each is either read, as what was written, or refused
 * with one of the documented errors. training.json also gets the hash of its mutated self, so that what comes after the
 * hash meets strange values too. Meant for the sanitizers, which is why it has a plain main.
 * Arguments: [inputs for each file] [seed]. */
#include <inttypes.h>
#include <jansson.h>

#include "ref/train/optimizer_private.h"
#include "run/small_run.h"
#include "support/fuzz.h"
#include "support/small.h"
#include "verify/run/checkpoint.h"
#include "verify/run/checkpoint_private.h"

#define MOST_BYTES ((size_t)1 << 20)

typedef struct tally {
    size_t read, refused, by_status[17], failures;
} tally;

/* Bytes and JSON values that readers get wrong, in the first part of the file: the rest of a tensor file is data, of
 * which one byte is like another. */
static void mutate(fuzz_input *x, uint64_t *state)
{
    static const char *const values[] =
        ROW("0", "-1", "1e999", "18446744073709551616", "9223372036854775807", "null", "true", "[]", "{}", "\"NaN\"",
            "\"x\"", "\"\"", "-0.0", "\"\\ud800\"", "1e-400", "[[[[", ":", ",", "\"format\":1,", "\xff");
    const char *value = values[fuzz_below(state, sizeof values / sizeof *values)];
    const size_t head = x->n < 6000 ? x->n : 6000, at = fuzz_below(state, head);
    size_t end = at;
    switch (fuzz_below(state, 6)) {
    case 0:
        x->bytes[at] ^= (unsigned char)(1u << fuzz_below(state, 8));
        break;
    case 1:
        x->n = fuzz_below(state, 8) == 0 ? at : x->n;
        break;
    case 2:
        fuzz_splice(x, at, fuzz_below(state, 40), "", 0);
        break;
    default: /* the value after a colon, up to the next comma */
        while (end < head && x->bytes[end] != ':')
            end++;
        const size_t from = end < head ? end + 1 : at;
        for (end = from; end < head && x->bytes[end] != ',' && x->bytes[end] != '\n';)
            end++;
        fuzz_splice(x, from, end - from, value, strlen(value));
        break;
    }
}

static fuzz_input load(const char *path)
{
    fuzz_input x = fuzz_input_of(MOST_BYTES);
    FILE *f = fopen(path, "r");
    if (f == NULL)
        abort();
    x.n = fread(x.bytes, 1, MOST_BYTES, f);
    fclose(f);
    return x;
}

static void store(const char *path, const fuzz_input *x)
{
    FILE *f = fopen(path, "w");
    if (f == NULL || fwrite(x->bytes, 1, x->n, f) != x->n || fclose(f) != 0)
        abort();
}

/* Gives the text the hash of what it says now, if it is JSON at all. */
static void hash_again(fuzz_input *x)
{
    char hash[65];
    json_t *o = json_loadb((const char *)x->bytes, x->n, JSON_REJECT_DUPLICATES, NULL);
    if (!json_is_object(o)) {
        json_decref(o);
        return;
    }
    json_object_del(o, ARI_CHECKPOINT_OWN_HASH);
    if (ari_checkpoint_text_hash(hash, o) != AR_OK)
        abort();
    json_object_set_new(o, ARI_CHECKPOINT_OWN_HASH, json_string(hash));
    OWNED(free) char *text = json_dumps(o, JSON_INDENT(2));
    if (text != NULL && strlen(text) < MOST_BYTES) {
        x->n = strlen(text);
        memcpy(x->bytes, text, x->n);
    }
    json_decref(o);
}

/* What was read is used: every loss, every string, every tensor. */
static void use(const ar_checkpoint *c, tally *t)
{
    const ar_checkpoint_state *s = ar_checkpoint_state_of(c);
    volatile float sink = 0; /* keeps the reads alive */
    for (size_t i = 0; i < s->losses; i++)
        sink = s->loss[i];
    const float *w = ari_checkpoint_find((void *)(uintptr_t)c, "model.norm.weight", 36);
    for (size_t i = 0; w != NULL && i < 36; i++)
        sink = w[i];
    (void)sink;
    if (s->numerics > AR_NUMERICS_NATIVE || ari_optimizer_check(&s->optimizer) != AR_OK || s->step > INT64_MAX ||
        (s->data_hash != NULL && strlen(s->data_hash) != 64) || s->losses > s->step)
        t->failures++;
    t->read++;
}

static void try_open(const char *folder, tally *t)
{
    static const ar_status documented[] = {AR_ERR_FORMAT, AR_ERR_DATA,     AR_ERR_DTYPE,      AR_ERR_SHAPE,
                                           AR_ERR_IO,     AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED};
    ar_checkpoint *c = NULL;
    bool known = false;
    ar_error_clear();
    const ar_status st = ar_checkpoint_open(&c, folder);
    if (st == AR_OK) {
        use(c, t);
        ar_checkpoint_close(c);
        return;
    }
    for (size_t i = 0; i < sizeof documented / sizeof *documented; i++)
        known = known || st == documented[i];
    if (!known || ar_error_message()[0] == '\0') {
        fprintf(stderr, "%s: %s\n", ar_status_name(st), ar_error_message());
        t->failures++;
    }
    t->refused++;
    t->by_status[-st]++;
}

static void fuzz(const char *folder, const char *name, bool own_hash, size_t inputs, uint64_t seed, tally *t)
{
    char path[300];
    snprintf(path, sizeof path, "%s/latest/%s", folder, name);
    fuzz_input good = load(path), x = fuzz_input_of(MOST_BYTES);
    for (size_t i = 0; i < inputs; i++) {
        uint64_t state = seed + i;
        fuzz_copy(&x, &good);
        for (size_t k = 1 + fuzz_below(&state, 3); k > 0 && x.n > 0; k--)
            mutate(&x, &state);
        if (own_hash)
            hash_again(&x);
        store(path, &x);
        const size_t failures = t->failures;
        try_open(folder, t);
        if (t->failures > failures)
            fprintf(stderr, "^ %s, seed %" PRIu64 ", input %zu\n", name, seed, i);
    }
    store(path, &good);
    free(x.bytes);
    free(good.bytes);
}

int main(int argc, char **argv)
{
    char folder[64];
    const size_t inputs = argc > 1 ? strtoul(argv[1], NULL, 10) : (size_t)by_scale(300, 500, 1500);
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    tally t = {0};
    if (!make_folder_in_memory(folder))
        return 1;
    const ar_checkpoint_options o = {.folder = folder};
    small_run r = small_run_of(TINY_TIED);
    r.run.optimizer.groups = 2;
    for (size_t i = 0; i < 2; i++)
        r.run.optimizer.group[i] = (ar_param_group){.glob = "*.bias", .lr_scale = 1, .weight_decay = 0.5};
    if (ar_checkpoint_writer_create(&r.writer, &o) != AR_OK || small_run_do(&r) != AR_OK)
        return 1;
    ar_checkpoint_writer_destroy(r.writer);
    fuzz(folder, "training.json", true, 3 * inputs, seed, &t);
    fuzz(folder, "training.json", false, inputs / 3, seed, &t);
    fuzz(folder, "model.safetensors", false, inputs / 3, seed, &t);
    fuzz(folder, "optimizer.safetensors", false, inputs / 3, seed, &t);
    printf("%zu read, %zu refused", t.read, t.refused);
    for (int i = 0; i < 17; i++) {
        if (t.by_status[i] > 0)
            printf(", %zu %s", t.by_status[i], ar_status_name((ar_status)-i));
    }
    printf("\n");
    try_open(folder, &t); /* as it was */
    if (t.read == 0 || t.by_status[-AR_ERR_FORMAT] == 0 || t.by_status[-AR_ERR_DATA] == 0)
        t.failures++;
    remove_all(folder);
    return t.failures > 0;
}
