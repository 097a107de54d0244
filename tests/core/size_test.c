/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "support/together.h"

CLAIM(products_and_sums_that_do_not_fit_are_errors_and_change_nothing)
{
    size_t out = 7;
    cr_assert_eq(ari_mul_size(&out, SIZE_MAX / 2 + 1, 2), AR_ERR_OVERFLOW);
    cr_assert_eq(ari_add_size(&out, SIZE_MAX, 1), AR_ERR_OVERFLOW);
    cr_assert_eq(out, (size_t)7);
    cr_assert_ok(ari_mul_size(&out, SIZE_MAX, 1));
    cr_assert_eq(out, SIZE_MAX);
}

CLAIM(a_list_grows_and_keeps_what_it_holds)
{
    OWNED(free) uint32_t *list = NULL;
    size_t capacity = 0;
    for (size_t i = 0; i < 1000; i++) {
        cr_assert_ok(ari_grow(&list, &capacity, i, sizeof *list, "numbers"));
        cr_assert_gt(capacity, i);
        list[i] = (uint32_t)(i * 3);
    }
    for (size_t i = 0; i < 1000; i++)
        cr_assert_eq(list[i], (uint32_t)(i * 3));
    cr_assert_leq(capacity, (size_t)1024, "capacity doubles, it does not run away");
}

CLAIM(a_list_too_long_for_memory_stays_as_it_was)
{
    int *list = NULL;
    size_t capacity = SIZE_MAX / 4;
    cr_assert_eq(ari_grow(&list, &capacity, capacity, sizeof *list, "numbers"), AR_ERR_OVERFLOW);
    cr_assert_null(list);
    cr_assert_eq(capacity, SIZE_MAX / 4);
}

static ar_status take_twice(ari_arena *a, size_t second)
{
    int *of = NULL;
    ARI_ARENA_SCOPE(a);
    AR_TRY(ARI_TAKE(&of, a, 1, "a number"));
    AR_TRY(ARI_TAKE(&of, a, second, "numbers"));
    return AR_OK;
}

CLAIM(what_a_block_took_ends_with_it_also_where_it_returns_early)
{
    SCOPED(ari_arena_free) ari_arena a = {NULL};
    int *kept = NULL;
    cr_assert_ok(ARI_TAKE(&kept, &a, 1, "a number"));
    void *const last = a.last;
    cr_expect_ok(take_twice(&a, 1));
    cr_expect_eq(a.last, last);
    cr_expect_eq(take_twice(&a, SIZE_MAX), AR_ERR_OVERFLOW);
    cr_expect_eq(a.last, last);
}

CLAIM(no_control_character_of_a_name_reaches_a_terminal)
{
    char out[12];
    cr_expect_str_eq(ARI_SHOW("a\x1b[31m\x7f\n"), "a?[31m??");
    cr_expect_str_eq(ARI_SHOW("\xc2\x9b"
                              "31m \xc2\xa0\xc3\xa9"),
                     "?31m \xc2\xa0\xc3\xa9", "U+009B begins a sequence too");
    cr_expect_str_eq(ARI_SHOW("\u202ea\u2069\u200f\u061c\u2028.\u200c\u2010\u206a"), "?a????.\u200c\u2010\u206a",
                     "nor do those that turn what follows");
    cr_expect_str_eq(ARI_SHOW("a\xff\xc3"), "a??", "what is not UTF-8");
    cr_expect_str_eq(ari_printable(out, sizeof out, "0123456789a"), "0123456789a");
    cr_expect_str_eq(ari_printable(out, sizeof out, "0123456789ab"), "01234567...");
    cr_expect_str_eq(ari_printable(out, sizeof out,
                                   "0123456\xc3\xa9"
                                   "abc"),
                     "0123456...", "no character is cut in two");
    cr_expect_eq(ar_error_set(AR_ERR_ARG, "all_reduce '%s':\n\tof 2 ranks", "\x1b]0;t\x07\xc2\x9b\xfe"), AR_ERR_ARG);
    cr_expect_str_eq(ar_error_message(), "all_reduce '?]0;t???\?':\n\tof 2 ranks");
}

EVERY_CLAIM(size)
