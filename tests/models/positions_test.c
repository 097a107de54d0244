/* SPDX-License-Identifier: Apache-2.0 */
/* Which positions of a sequence a context-parallel rank holds. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "anyrank/config.h"
#include "anyrank/parallel.h"
#include "support/match.h"

TestSuite(positions, .timeout = 300);

/* The i-th position of `cp_rank`, by counting chunks and rows one by one. */
static size_t counted(const ar_parallel *p, size_t seq, int cp_rank, size_t i)
{
    const size_t ring = (size_t)(p->cp / p->cp_inner), rows = seq / ring, place = (size_t)(cp_rank / p->cp_inner);
    const size_t row = (size_t)(cp_rank % p->cp_inner) * (seq / (size_t)p->cp) + i, half = rows / 2;
    if (!p->zigzag)
        return place * rows + row;
    return row < half ? place * half + row : (2 * ring - 1 - place) * half + (row - half);
}

Test(positions, every_one_is_held_once)
{
    static const int layout[][2] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}, {6, 3}, {6, 2}, {12, 3}};
    for (size_t l = 0; l < sizeof layout / sizeof *layout; l++) {
        for (int zigzag = 0; zigzag < 2; zigzag++) {
            const ar_parallel p = {.cp = layout[l][0], .cp_inner = layout[l][1], .zigzag = zigzag};
            const size_t seq = 48;
            bool held[48] = {false};
            for (int r = 0; r < p.cp; r++) {
                const ar_positions own = ar_parallel_positions(&p, seq, r);
                cr_assert_eq(ar_positions_count(&own), seq / (size_t)p.cp);
                for (size_t i = 0; i < ar_positions_count(&own); i++) {
                    const size_t at = ar_positions_at(&own, i);
                    cr_assert_eq(at, counted(&p, seq, r, i), "cp %d inner %d zigzag %d: rank %d row %zu at %zu", p.cp,
                                 p.cp_inner, zigzag, r, i, at);
                    cr_assert(!held[at]);
                    held[at] = true;
                }
            }
        }
    }
}

Test(positions, parts_of_parts_keep_the_order)
{
    const ar_positions two = {.first = {8, 40}, .count = {4, 8}};
    for (size_t parts = 1; parts <= 12; parts++) {
        if (12 % parts != 0)
            continue;
        for (size_t i = 0; i < 12; i++) {
            const ar_positions own = ar_positions_part(&two, i / (12 / parts), parts);
            cr_assert_eq(ar_positions_count(&own), 12 / parts);
            cr_assert_eq(ar_positions_at(&own, i % (12 / parts)), ar_positions_at(&two, i));
        }
    }
}

Test(positions, layouts_that_do_not_divide_are_refused)
{
    const ar_config c = match_config(AR_ARCH_LLAMA, 100);
    const ar_plan plan = {0};
    static const struct {
        ar_parallel p;
        size_t seq;
        ar_status status;
    } row[] = {
        {{.cp = 3}, 16, AR_ERR_INDIVISIBLE},         {{.cp = 4, .zigzag = true}, 12, AR_ERR_INDIVISIBLE},
        {{.cp = 4, .cp_inner = 3}, 24, AR_ERR_ARG},  {{.cp = -1}, 16, AR_ERR_ARG},
        {{.cp = 2, .cp_inner = -1}, 16, AR_ERR_ARG}, {{.cp = 2, .tp = 2, .sp = true}, 6, AR_ERR_INDIVISIBLE},
        {{.cp = 2, .tp = 2, .sp = true}, 8, AR_OK},  {{.cp = 4, .zigzag = true}, 16, AR_OK},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        cr_assert_eq(ar_parallel_check(&row[i].p, &c, &plan, 4, row[i].seq), row[i].status, "row %zu: %s", i,
                     ar_error_message());
}
