/* SPDX-License-Identifier: Apache-2.0 */
/* Every seed of tests/fuzz/corpus through its target: whole, cut off at every length, with every byte changed, and with
 * changes that a seed draws, the same in every run; what tests/fuzz/run.sh drives for minutes is held here to the inputs
 * that it begins with. A plain main, for the sanitizers: a leak reported inside a Criterion test would not fail it.
 * Arguments: [drawn inputs of a seed] [seed]. */
#include <dirent.h>

#include "support/fuzz.h"
#include "support/small.h"
#include "tests/fuzz/targets.h"

enum { MOST_BYTES = 16384, DRAWN = 3000 };

typedef struct tally {
    size_t inputs, read, by_rule[FUZZ_RULES + 1]; /* the last: none of them */
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

static void run(const fuzz_target *t, const fuzz_input *x, tally *of)
{
    ar_error_clear();
    t->run(x->bytes, x->n);
    of->inputs++;
    of->read += ar_error_message()[0] == '\0';
    of->by_rule[fuzz_rule()]++;
}

/* The bytes behind the header of a safetensors file that is right. */
static size_t data_of(const fuzz_input *x)
{
    uint64_t header = 0;
    memcpy(&header, x->bytes, 8);
    return x->n - 8 - (size_t)header;
}

static void replay(const fuzz_target *t, const fuzz_input *seed, size_t drawn, uint64_t state, tally *of)
{
    fuzz_input x = fuzz_input_of(MOST_BYTES);
    const size_t step = small_only() ? 23 : 3;
    const bool files = strcmp(t->name, "safetensors") == 0;
    fuzz_copy(&x, seed);
    run(t, &x, of);
    for (size_t at = 0; at < seed->n; at += step) {
        x.n = at;
        run(t, &x, of);
        fuzz_copy(&x, seed);
        x.bytes[at] ^= (unsigned char)(1u << (at / step % 7));
        run(t, &x, of);
        x.bytes[at] = seed->bytes[at];
    }
    for (size_t i = 0; i < drawn; i++) {
        fuzz_copy(&x, seed);
        for (size_t k = 1 + fuzz_below(&state, 4); k > 0; k--)
            mutate(&x, &state);
        const uint64_t header = x.n - 8 - (files ? data_of(seed) : 0);
        if (files && header < x.n && fuzz_below(&state, 8) != 0) /* or none would pass the first check */
            memcpy(x.bytes, &header, 8);
        run(t, &x, of);
    }
    free(x.bytes);
}

/* The seeds of a target; 0: there are none, or one cannot be read. */
static size_t replay_seeds(const fuzz_target *t, size_t drawn, uint64_t state, tally *of)
{
    char folder[512], path[1024];
    size_t seeds = 0;
    snprintf(folder, sizeof folder, "%s/tests/fuzz/corpus/%s", TEST_SOURCE_DIR, t->name);
    DIR *d = opendir(folder);
    for (const struct dirent *e = d ? readdir(d) : NULL; e != NULL; e = readdir(d)) {
        if (e->d_name[0] == '.')
            continue;
        fuzz_input seed = {.bytes = NULL};
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        fuzz_expect(ari_file_read(&seed.bytes, &seed.n, path, MOST_BYTES / 2) == AR_OK, path);
        replay(t, &seed, drawn, state + seeds++, of);
        free(seed.bytes);
    }
    if (d)
        closedir(d);
    return seeds;
}

int main(int argc, char **argv)
{
    const size_t drawn = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) : DRAWN;
    const uint64_t state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    int failed = 0;
    for (size_t i = 0; i < FUZZ_TARGETS; i++) {
        const bool files = strcmp(fuzz_targets[i].name, "safetensors") == 0;
        tally of = {.inputs = 0};
        const size_t seeds = replay_seeds(&fuzz_targets[i], files ? 4 * drawn : drawn, state, &of);
        printf("%-12s %zu seeds, %zu inputs, %zu read\n", fuzz_targets[i].name, seeds, of.inputs, of.read);
        failed |= seeds == 0 || of.read == 0;
        for (size_t k = 0; k < FUZZ_RULES && files; k++) {
            printf("  %-30s %zu\n", fuzz_rules[k], of.by_rule[k]);
            failed |= drawn >= DRAWN && of.by_rule[k] == 0; /* the changes are too tame */
        }
    }
    return failed;
}
