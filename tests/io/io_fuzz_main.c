/* SPDX-License-Identifier: Apache-2.0 */
/* Mutates small valid files, the same ones in every run, and feeds them to the readers: each input is either read, and
 * then all of what was read is touched, or refused with one of the documented errors. Meant for the sanitizers, which
 * is why it has a plain main: a leak reported inside a Criterion test would not fail it.
 * Arguments: [inputs for each base file] [seed]. */
#include <inttypes.h>

#include "anyrank/config.h"
#include "io/st_bytes.h"
#include "ref/io/file.h"
#include "support/fuzz.h"
#include "tests/support/scoped.h"

#define MAX_INPUT 16384

static const char *const rules[] = {
    "HeaderTooSmall", "HeaderTooLarge",    "InvalidHeaderLength", "InvalidHeader",   "InvalidHeaderDeserialization",
    "InvalidOffset",  "TensorInvalidInfo", "ValidationOverflow",  "MisalignedSlice", "MetadataIncompleteBuffer"};
#define RULES (sizeof rules / sizeof rules[0])

typedef struct tally {
    size_t read, refused, unsupported, by_rule[RULES], failures;
} tally;

/* One of the texts between bars, of *n bytes. */
static const char *one_of(const char *texts, uint64_t *state, size_t *n)
{
    size_t bars = 0;
    for (const char *at = texts; *at; at++)
        bars += *at == '|';
    for (size_t skip = fuzz_below(state, bars + 1); skip > 0; texts++)
        skip -= *texts == '|';
    *n = strcspn(texts, "|");
    return texts;
}

/* A number of the text becomes one of those that readers get wrong. */
static void mutate_number(fuzz_input *x, uint64_t *state)
{
    static const char numbers[] = "0|1|-1|-0|2|7|8|255|4294967295|4294967296|2147483648|9223372036854775807|"
                                  "9223372036854775808|18446744073709551615|18446744073709551616|1.0|1e3|1e999|[]|"
                                  "null|\"1\"|4194305,4194305,211106198978564|0,18014398509481984";
    size_t n, at = fuzz_below(state, x->n), end;
    while (at < x->n && (x->bytes[at] < '0' || x->bytes[at] > '9'))
        at++;
    for (end = at; end < x->n && x->bytes[end] >= '0' && x->bytes[end] <= '9';)
        end++;
    const char *number = one_of(numbers, state, &n);
    fuzz_splice(x, at, end - at, number, n);
}

static void mutate_token(fuzz_input *x, uint64_t *state)
{
    static const char tokens[] =
        "{|}|[|]|,|:|\"|\\|\\u0000|\\ud800|\xe2\x80\x94|\xff|null|true|\"F4\"|\"F64\"|\"BOOL\"|\"__metadata__\":|"
        "\"shape\":| |\n|\"model_type\":\"gpt2\",|\"head_dim\":|\"rope_scaling\":{\"type\":\"linear\"},|"
        "\"model_type\":\"qwen2\",|\"use_sliding_window\":true,|\"layer_types\":[\"sliding_attention\"],|"
        "\"max_window_layers\":1023,|\"rope_parameters\":{\"rope_type\":\"llama3\",\"factor\":8,"
        "\"low_freq_factor\":1,\"high_freq_factor\":4},";
    size_t n;
    const char *token = one_of(tokens, state, &n);
    fuzz_splice(x, fuzz_below(state, x->n), fuzz_below(state, 3) == 0 ? fuzz_below(state, 4) : 0, token, n);
}

static void mutate(fuzz_input *x, uint64_t *state)
{
    unsigned char chunk[64];
    const size_t at = fuzz_below(state, x->n), n = fuzz_below(state, sizeof chunk);
    if (x->n == 0)
        return;
    switch (fuzz_below(state, 8)) {
    case 0:
        x->bytes[at] ^= (unsigned char)(1u << fuzz_below(state, 7)); /* stays ASCII: else most inputs end at UTF-8 */
        break;
    case 1:
        x->bytes[at] = (unsigned char)fuzz_below(state, fuzz_below(state, 8) == 0 ? 256 : 128);
        break;
    case 2:
        fuzz_splice(x, at, n, "", 0);
        break;
    case 3:
        if (at + n <= x->n) {
            memcpy(chunk, x->bytes + at, n);
            fuzz_splice(x, fuzz_below(state, x->n), 0, chunk, n);
        }
        break;
    case 4:
        x->n = fuzz_below(state, 4) == 0 ? at : x->n;
        break;
    case 5:
        mutate_token(x, state);
        break;
    default:
        mutate_number(x, state);
        break;
    }
}

static void complain(tally *t, const char *what)
{
    fprintf(stderr, "%s: %s\n", what, ar_error_message());
    t->failures++;
}

/* Touches all that was read, so that a wrong pointer or length meets the sanitizer or the page's end. */
static void use_file(const ar_st_file *f, tally *t)
{
    volatile unsigned char sink = 0; /* keeps the reads alive */
    for (size_t i = 0; i < ar_st_count(f); i++) {
        const ar_st_entry *e = ar_st_at(f, i);
        for (size_t k = 0; k < e->bytes; k++)
            sink = ((const unsigned char *)e->data)[k];
        OWNED(free) float *x = malloc(e->count * sizeof *x + 1);
        OWNED(free) int64_t *y = malloc(e->count * sizeof *y + 1);
        /* A shape like [0, 2^40] has a count of 0; any other count is bounded by the bytes that are there. */
        if (x == NULL || y == NULL || e->count > 2 * MAX_INPUT) {
            complain(t, "a count larger than the file");
        } else {
            const ar_status a = ar_st_to_f32(e, x), b = ar_st_to_i64(e, y);
            if ((a != AR_OK && a != AR_ERR_DTYPE) || (b != AR_OK && b != AR_ERR_DTYPE && b != AR_ERR_DATA))
                complain(t, "conversion");
        }
        if (ar_st_find(f, e->name) != e)
            complain(t, "an entry is not found by its name");
    }
    (void)ar_st_metadata(f, "format");
    (void)sink;
}

static void try_safetensors(const fuzz_input *x, tally *t)
{
    const mem_file m = mem_file_of(x->bytes, x->n);
    ar_st_file *f = NULL;
    ar_error_clear();
    const ar_status st = ar_st_open(&f, m.path);
    if (st == AR_OK) {
        use_file(f, t);
        ar_st_close(f);
        t->read++;
    } else if (st == AR_ERR_UNSUPPORTED) {
        t->unsupported++;
    } else {
        size_t rule = 0;
        while (rule < RULES && !names_rule(rules[rule]))
            rule++;
        if (st != AR_ERR_FORMAT || rule == RULES)
            complain(t, "undocumented error");
        else
            t->by_rule[rule]++;
        t->refused++;
    }
    close(m.fd);
}

static void try_config(const fuzz_input *x, tally *t)
{
    ar_config c;
    ar_error_clear();
    const ar_status st = ar_config_parse(&c, (const char *)x->bytes, x->n, "fuzz");
    if (st == AR_OK) {
        t->read++;
        if (c.kv_heads == 0 || c.heads % c.kv_heads != 0 || c.head_dim == 0 || c.layers == 0 || c.vocab == 0 ||
            c.ffn == 0 || c.hidden == 0 || c.max_positions == 0 ||
            (c.rope.kind && ar_rope_dim(&c.rope, c.head_dim) % 2 != 0) || memchr(c.name, 0, sizeof c.name) == NULL)
            complain(t, "an inconsistent config was accepted");
        for (size_t i = 0; i < c.unknown_keys && i < AR_CONFIG_NOTES; i++) {
            if (memchr(c.unknown[i], 0, sizeof c.unknown[i]) == NULL)
                complain(t, "the name of an unknown key has no end");
        }
    } else {
        t->refused++;
        if ((st != AR_ERR_CONFIG && st != AR_ERR_FORMAT) || ar_error_message()[0] == '\0')
            complain(t, "undocumented error");
    }
}

static fuzz_input safetensors_base(void)
{
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\",\"by\":\"us\"},"
                                 "\"model.wte.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
                                 "\"ids\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[24,40]},"
                                 "\"half\":{\"dtype\":\"BF16\",\"shape\":[1,3],\"data_offsets\":[40,46]},"
                                 "\"four\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[46,48]},"
                                 "\"scalar\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[48,56]},"
                                 "\"none\":{\"dtype\":\"U8\",\"shape\":[0,5],\"data_offsets\":[56,56]}}";
    const uint64_t n = sizeof header - 1;
    fuzz_input x = fuzz_input_of(MAX_INPUT);
    x.n = 8 + n + 56;
    memcpy(x.bytes, &n, 8);
    memcpy(x.bytes + 8, header, n);
    for (size_t i = 0; i < 56; i++)
        x.bytes[8 + n + i] = (unsigned char)(17 * i);
    return x;
}

static void fuzz_safetensors(size_t inputs, uint64_t seed, tally *t)
{
    fuzz_input base = safetensors_base(), x = fuzz_input_of(MAX_INPUT);
    const size_t data = 56;
    try_safetensors(&base, t);
    if (t->read != 1)
        complain(t, "the base file is not read");
    for (size_t i = 0; i < inputs; i++) {
        fuzz_copy(&x, &base);
        for (size_t k = 1 + fuzz_below(&seed, 4); k > 0; k--)
            mutate(&x, &seed);
        /* Most inputs get the right header length back, or none would pass the first check. */
        const uint64_t n = x.n - 8 - data;
        if (x.n >= 8 + data && fuzz_below(&seed, 8) != 0)
            memcpy(x.bytes, &n, 8);
        try_safetensors(&x, t);
    }
    free(x.bytes);
    free(base.bytes);
}

static void fuzz_config(const char *path, size_t inputs, uint64_t seed, tally *t)
{
    fuzz_input base = {.bytes = NULL}, x = fuzz_input_of(MAX_INPUT);
    if (ari_file_read(&base.bytes, &base.n, path, MAX_INPUT / 2) != AR_OK) {
        complain(t, "base config");
        free(x.bytes);
        return;
    }
    for (size_t i = 0; i < inputs; i++) {
        fuzz_copy(&x, &base);
        for (size_t k = 1 + fuzz_below(&seed, 3); k > 0; k--)
            mutate(&x, &seed);
        try_config(&x, t);
    }
    free(x.bytes);
    free(base.bytes);
}

int main(int argc, char **argv)
{
    static const char *const configs[] = {
        TEST_GOLDEN_DIR "/llama-gqa-tiny/config.json", TEST_GOLDEN_DIR "/gpt2-tiny/config.json",
        TEST_DATA_DIR "/stack-demo/config.json", TEST_DATA_DIR "/llama-demo/config.json"};
    const size_t inputs = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) : 5000;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    tally t = {.read = 0}, u = {.read = 0};
    fuzz_safetensors(4 * inputs, seed, &t);
    printf("safetensors, seed %" PRIu64 ": %zu inputs, %zu read, %zu refused, %zu unsupported\n", seed, 4 * inputs,
           t.read, t.refused, t.unsupported);
    for (size_t i = 0; i < RULES; i++) {
        printf("  %-30s %zu\n", rules[i], t.by_rule[i]);
        if (t.by_rule[i] == 0 && inputs >= 5000)
            complain(&t, "a rule was never reached, so the mutations are too tame");
    }
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++)
        fuzz_config(configs[i], inputs, seed + i, &u);
    printf("configs, seed %" PRIu64 ": %zu inputs, %zu read, %zu refused\n", seed, 4 * inputs, u.read, u.refused);
    return t.failures + u.failures == 0 && u.read > 0 && u.refused > 0 ? 0 : 1;
}
