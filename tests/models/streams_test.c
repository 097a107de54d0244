/* SPDX-License-Identifier: Apache-2.0 */
/* Every parameter and every place that drops elements has random numbers of its own. */
#include "ref/models/model.h"
#include "support/match.h"
#include "tests/support/test.h"

Test(streams, the_models_have_distinct_ones_with_any_small_seed)
{
    static const ar_arch archs[3] = {AR_ARCH_LLAMA, AR_ARCH_GPT2, AR_ARCH_STACK};
    for (int i = 0; i < 3; i++) {
        const ar_config c = match_config(archs[i], 100);
        for (uint64_t seed = 0; seed < 10; seed++)
            cr_assert_ok(ari_streams_check(&c, seed));
    }
}

Test(streams, two_with_one_key_are_refused_by_name)
{
    ari_random_stream s[4] = {{7, "a.weight"}, {3, "b.weight"}, {9, "c.weight"}, {3, "d.dropout"}};
    cr_assert_eq(ari_streams_distinct(s, 4), AR_ERR_UNSUPPORTED);
    cr_assert(strstr(ar_error_message(), "b.weight") && strstr(ar_error_message(), "d.dropout"), "%s",
              ar_error_message());
    ari_random_stream fine[3] = {{UINT64_MAX, "a"}, {0, "b"}, {1, "c"}};
    cr_assert_ok(ari_streams_distinct(fine, 3));
    cr_assert_ok(ari_streams_distinct(fine, 0));
}
