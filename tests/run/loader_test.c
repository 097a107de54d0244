/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/batch_private.h"
#include "run/token_files.h"
#include "verify/run/data_private.h"
#include "verify/run/run.h"

enum { TOKENS = 103, SEQ = 10, WINDOWS = 10 }; /* three tokens are left over */

/* Token i is i. */
static ar_data *counting(void)
{
    unsigned char bytes[TOKENS];
    for (size_t i = 0; i < TOKENS; i++)
        bytes[i] = (unsigned char)i;
    ar_data *d = NULL;
    cr_assert_ok(open_bytes(&d, bytes, TOKENS, AR_DATA_BYTES));
    return d;
}

static ar_loader *loader_of(const ar_data *d, size_t batch, uint64_t seed, bool in_order)
{
    const ar_loader_options o = {.batch = batch, .seq = SEQ, .vocab = 256, .seed = seed, .in_order = in_order};
    ar_loader *l = NULL;
    cr_assert_ok(ari_loader_create(&l, d, &o));
    return l;
}

/* Known answers, computed by a program of the definition alone in numerics.md, section 5. */
Test(loader, the_shuffle_of_a_seed_and_an_epoch_is_the_documented_one)
{
    static const struct {
        uint64_t seed;
        uint32_t epoch;
        size_t order[10];
    } known[] = {{0, 0, {8, 1, 7, 6, 4, 0, 3, 2, 9, 5}},
                 {0, 1, {0, 9, 1, 4, 2, 6, 7, 8, 3, 5}},
                 {7, 0, {2, 6, 7, 9, 5, 8, 4, 3, 1, 0}},
                 {UINT64_MAX, UINT32_MAX, {1, 2, 0, 6, 8, 7, 3, 4, 5, 9}}};
    size_t order[1000];
    cr_assert_eq(ari_shuffle_key(0), UINT64_C(0x2ce0b1dfa0ef1ace));
    for (size_t k = 0; k < sizeof known / sizeof known[0]; k++) {
        ari_shuffle(order, 10, ari_shuffle_key(known[k].seed), known[k].epoch);
        cr_assert_eq(memcmp(order, known[k].order, sizeof known[k].order), 0, "seed %zu", (size_t)known[k].seed);
    }
    ari_shuffle(order, 1000, ari_shuffle_key(3), 2);
    cr_assert_eq(memcmp(order, (const size_t[]){516, 691, 829, 351, 41, 466, 384, 848}, 8 * sizeof *order), 0);
    cr_assert_eq(memcmp(order + 996, (const size_t[]){300, 498, 150, 109}, 4 * sizeof *order), 0);
}

/* The words of place 2^31 are at or above its limit, 2^31 + 1, twice. */
Test(loader, a_word_beyond_the_last_multiple_of_the_places_is_drawn_again)
{
    const uint64_t key = ari_shuffle_key(0);
    cr_assert_eq(ari_shuffle_draw(key, 0, 2147483648u), 1794519599);
    cr_assert_eq(ari_shuffle_draw(key, 0, 2999999999u), 1649816208);
    cr_assert_eq(ari_shuffle_draw(key, 0, 4294967295u), 2178515202);
    cr_assert_eq(ari_shuffle_draw(key, 0, 0), 0);
}

/* Three windows have six orders: of 6000 epochs each gets 1000 +- 6 standard deviations of 28.9. */
Test(loader, every_order_is_equally_likely)
{
    int seen[27] = {0};
    for (uint32_t epoch = 0; epoch < 6000; epoch++) {
        size_t order[3];
        ari_shuffle(order, 3, ari_shuffle_key(1), epoch);
        seen[order[0] * 9 + order[1] * 3 + order[2]]++;
    }
    int orders = 0;
    for (size_t i = 0; i < 27; i++) {
        orders += seen[i] > 0;
        cr_assert(seen[i] == 0 || abs(seen[i] - 1000) < 174, "%zu: %d", i, seen[i]);
    }
    cr_assert_eq(orders, 6);
}

Test(loader, an_epoch_has_each_window_once_whatever_the_batch)
{
    OWNED(ari_data_close) ar_data *d = counting();
    for (size_t batch = 1; batch <= 23; batch++) {
        OWNED(ari_loader_destroy) ar_loader *l = loader_of(d, batch, 5, false);
        size_t seen[WINDOWS] = {0}, samples[23], taken = 0;
        cr_assert_eq(ari_loader_windows(l), WINDOWS);
        for (uint64_t step = 1; taken < 3 * WINDOWS; step++) {
            cr_assert_ok(ari_loader_samples(l, samples, step));
            for (size_t i = 0; i < batch && taken < 3 * WINDOWS; i++, taken++) {
                cr_assert_eq(seen[samples[i]]++, taken / WINDOWS, "batch %zu, sample %zu", batch, taken);
            }
        }
    }
}

/* Sample k of the run is the same in every batch size: place k mod 10 of epoch k / 10. */
Test(loader, samples_depend_on_their_number_alone_and_any_step_is_read_at_once)
{
    OWNED(ari_data_close) ar_data *d = counting();
    OWNED(ari_loader_destroy)
    ar_loader *one = loader_of(d, 1, 9, false), *four = loader_of(d, 4, 9, false), *fresh = loader_of(d, 4, 9, false);
    size_t a[4], b[4], order[WINDOWS];
    for (uint64_t step = 57; step > 7; step -= 7) { /* backwards, so nothing can depend on what was read before */
        cr_assert_ok(ari_loader_samples(four, a, step));
        for (size_t i = 0; i < 4; i++) {
            const uint64_t k = (step - 1) * 4 + i;
            cr_assert_ok(ari_loader_samples(one, b, k + 1));
            ari_shuffle(order, WINDOWS, ari_shuffle_key(9), (uint32_t)(k / WINDOWS));
            cr_assert_eq(a[i], b[0]);
            cr_assert_eq(a[i], order[k % WINDOWS]);
        }
    }
    cr_assert_ok(ari_loader_samples(four, a, 57));
    cr_assert_ok(ari_loader_samples(fresh, b, 57));
    cr_assert_eq(memcmp(a, b, sizeof a), 0);
}

Test(loader, a_batch_holds_the_tokens_of_its_windows)
{
    OWNED(ari_data_close) ar_data *d = counting();
    OWNED(ari_loader_destroy) ar_loader *l = loader_of(d, 3, 2, false);
    ar_batch b;
    size_t sample[3];
    cr_assert_ok(ari_loader_batch(l, &b, 4));
    cr_assert_ok(ari_loader_samples(l, sample, 4));
    cr_assert_eq(b.batch, 3);
    cr_assert_eq(b.seq, SEQ);
    cr_assert_null(b.labels);
    for (size_t i = 0; i < 3 * SEQ; i++)
        cr_assert_eq(b.input_ids[i], (int64_t)(sample[i / SEQ] * SEQ + i % SEQ));
}

Test(loader, in_order_the_windows_come_as_the_data_has_them)
{
    OWNED(ari_data_close) ar_data *d = counting();
    OWNED(ari_loader_destroy) ar_loader *l = loader_of(d, 4, 2, true);
    size_t sample[4];
    cr_assert_ok(ari_loader_samples(l, sample, 3));
    cr_assert_eq(memcmp(sample, (const size_t[]){8, 9, 0, 1}, sizeof sample), 0);
}

/* Two rows of five tokens. */
static ar_data *two_rows(void)
{
    static const int64_t tokens[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    ar_data *d = NULL;
    cr_assert_ok(open_tensor(&d, "tokens", AR_I64, 2, (const size_t[]){2, 5}, tokens));
    return d;
}

/* They have two windows of two each: none goes over a row's end. */
Test(loader, a_window_never_crosses_from_one_document_to_the_next)
{
    OWNED(ari_data_close) ar_data *d = two_rows();
    const ar_loader_options o = {.batch = 4, .seq = 2, .in_order = true}, long_one = {.batch = 1, .seq = 6};
    ar_loader *l = NULL;
    cr_assert_ok(ari_loader_create(&l, d, &o));
    ar_batch b;
    cr_assert_ok(ari_loader_batch(l, &b, 1));
    cr_assert_eq(memcmp(b.input_ids, (const int64_t[]){0, 1, 2, 3, 5, 6, 7, 8}, 8 * sizeof(int64_t)), 0);
    ari_loader_destroy(l);
    cr_assert_refused(ari_loader_create(&l, d, &long_one), AR_ERR_DATA,
                      "has 5 tokens in each row, expected at least the 6");
}

/* Tokens 0, 1, 2, ..: the separator is there once, in window 0 or 1, at its end or before it. */
Test(loader, packed_windows_say_where_documents_end)
{
    OWNED(ari_data_close) ar_data *d = counting();
    ar_batch b;
    for (size_t separator = 3; separator < 20; separator += 6) { /* 3, 9, 15 */
        const ar_loader_options o = {
            .batch = 2, .seq = SEQ, .in_order = true, .packing = {.enabled = true, .separator = separator}};
        OWNED(ari_loader_destroy) ar_loader *l = NULL;
        cr_assert_ok(ari_loader_create(&l, d, &o));
        cr_assert_eq(ari_loader_windows(l), WINDOWS);
        cr_assert_ok(ari_loader_batch(l, &b, 1));
        cr_assert_ok(ari_batch_check(&b, 1));
        for (size_t i = 0; i < (size_t)2 * SEQ; i++) {
            const bool behind = i % SEQ > separator % SEQ && i / SEQ == separator / SEQ;
            cr_expect_eq(b.documents[i], behind, "separator %zu, token %zu", separator, i);
        }
    }
}

static void expect_packed(const ar_data *d, size_t batch, size_t separator, const int64_t *ids,
                          const int32_t *documents)
{
    const ar_loader_options o = {
        .batch = batch, .seq = 3, .in_order = true, .packing = {.enabled = true, .separator = separator}};
    OWNED(ari_loader_destroy) ar_loader *l = NULL;
    ar_batch b;
    cr_assert_ok(ari_loader_create(&l, d, &o));
    cr_assert_ok(ari_loader_batch(l, &b, 1));
    cr_expect_eq(memcmp(b.input_ids, ids, batch * 3 * sizeof *ids), 0, "separator %zu", separator);
    cr_expect_eq(memcmp(b.documents, documents, batch * 3 * sizeof *documents), 0, "separator %zu", separator);
}

/* The two rows are two documents, and three windows of three tokens: 0 1 2, 3 4 | 5, 6 7 8; a separator ends one besides.
 * Lines of 4, 1 and 3 tokens: a a a, a | b | c, of which two tokens are left. */
Test(loader, packed_rows_and_lines_of_json_are_documents)
{
    static const int64_t ids[] = {0, 1, 2, 3, 4, 5, 6, 7, 8}, letters[] = {'a', 'a', 'a', 'a', 'b', 'c'};
    OWNED(ari_data_close) ar_data *rows = two_rows(), *lines = NULL;
    cr_assert_ok(open_lines(&lines, "{\"text\": \"aaaa\"}\n{\"text\": \"b\"}\n{\"text\": \"ccc\"}\n"));
    expect_packed(rows, 3, AR_NO_SEPARATOR, ids, (const int32_t[]){0, 0, 0, 0, 0, 1, 0, 0, 0});
    expect_packed(rows, 3, 7, ids, (const int32_t[]){0, 0, 0, 0, 0, 1, 0, 0, 1});
    expect_packed(lines, 2, AR_NO_SEPARATOR, letters, (const int32_t[]){0, 0, 0, 0, 1, 2});
}

Test(loader, packing_that_finds_no_documents_is_refused)
{
    OWNED(ari_data_close) ar_data *d = counting();
    ar_loader *l = NULL;
    const ar_loader_options none = {.batch = 1, .seq = 1, .packing = {.enabled = true, .separator = AR_NO_SEPARATOR}};
    const ar_loader_options beyond = {
        .batch = 1, .seq = 1, .vocab = 256, .packing = {.enabled = true, .separator = 256}};
    cr_assert_refused(ari_loader_create(&l, d, &none), AR_ERR_DATA, "which token ends a document");
    cr_assert_refused(ari_loader_create(&l, d, &beyond), AR_ERR_ARG, "token 256 is to end a document");
    cr_assert_null(l);
}

Test(loader, what_cannot_be_loaded_is_refused)
{
    OWNED(ari_data_close) ar_data *d = counting();
    OWNED(ari_loader_destroy) ar_loader *l = NULL;
    static const struct {
        ar_loader_options o;
        ar_status st;
    } wrong[] = {{{.batch = 0, .seq = 1}, AR_ERR_ARG},
                 {{.batch = 1, .seq = 0}, AR_ERR_ARG},
                 {{.batch = 1, .seq = TOKENS + 1}, AR_ERR_DATA},
                 {{.batch = 1, .seq = 1, .vocab = 100}, AR_ERR_DATA},
                 {{.batch = SIZE_MAX / 4, .seq = 8}, AR_ERR_OVERFLOW}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cr_assert_eq(ari_loader_create(&l, d, &wrong[i].o), wrong[i].st, "case %zu", i);
    cr_assert_null(l);
    l = loader_of(d, 4, 0, false);
    ar_batch b;
    cr_assert_eq(ari_loader_batch(l, &b, 0), AR_ERR_ARG);
    cr_assert_eq(ari_loader_batch(l, &b, UINT64_MAX), AR_ERR_OVERFLOW);
    cr_assert_eq(ari_loader_batch(l, &b, UINT64_C(1) << 34), AR_ERR_OVERFLOW, "epoch 2^32 and more");
    cr_assert_eq(ari_loader_batch(l, &b, UINT64_C(10737418240)), AR_OK, "the last epoch");
}
