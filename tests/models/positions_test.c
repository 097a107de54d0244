/* SPDX-License-Identifier: Apache-2.0 */
/* Which positions of a sequence a context-parallel rank holds. */
#include <limits.h>

#include "anyrank/config.h"
#include "anyrank/parallel.h"
#include "anyrank/sim.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/parallel_private.h"
#include "support/match.h"
#include "support/together.h"

/* The i-th position of `cp_rank`, by counting chunks and rows one by one. */
static size_t counted(const ar_parallel *p, size_t seq, int cp_rank, size_t i)
{
    const size_t ring = (size_t)(p->cp / p->cp_inner), rows = seq / ring, place = (size_t)(cp_rank / p->cp_inner);
    const size_t row = (size_t)(cp_rank % p->cp_inner) * (seq / (size_t)p->cp) + i, half = rows / 2;
    if (!p->zigzag)
        return place * rows + row;
    return row < half ? place * half + row : (2 * ring - 1 - place) * half + (row - half);
}

CLAIM(every_one_is_held_once)
{
    static const int layout[][2] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}, {6, 3}, {6, 2}, {12, 3}};
    for (size_t l = 0; l < sizeof layout / sizeof *layout; l++) {
        for (int zigzag = 0; zigzag < 2; zigzag++) {
            const ar_parallel p = {.cp = layout[l][0], .cp_inner = layout[l][1], .zigzag = zigzag};
            const size_t seq = 48;
            bool held[48] = {false};
            for (int r = 0; r < p.cp; r++) {
                const ar_positions own = ari_parallel_positions(&p, seq, r);
                cr_assert_eq(ari_positions_count(&own), seq / (size_t)p.cp);
                for (size_t i = 0; i < ari_positions_count(&own); i++) {
                    const size_t at = ari_positions_at(&own, i);
                    cr_assert_eq(at, counted(&p, seq, r, i), "cp %d inner %d zigzag %d: rank %d row %zu at %zu", p.cp,
                                 p.cp_inner, zigzag, r, i, at);
                    cr_assert(!held[at]);
                    held[at] = true;
                }
            }
        }
    }
}

CLAIM(parts_of_parts_keep_the_order)
{
    const ar_positions two = {.first = {8, 40}, .count = {4, 8}};
    for (size_t parts = 1; parts <= 12; parts++) {
        if (12 % parts != 0)
            continue;
        for (size_t i = 0; i < 12; i++) {
            const ar_positions own = ari_positions_part(&two, i / (12 / parts), parts);
            cr_assert_eq(ari_positions_count(&own), 12 / parts);
            cr_assert_eq(ari_positions_at(&own, i % (12 / parts)), ari_positions_at(&two, i));
        }
    }
}

CLAIM(layouts_that_do_not_divide_are_refused)
{
    const ar_config c = match_config(AR_ARCH_LLAMA, 100);
    const ar_plan plan = {0};
    static const struct {
        ar_parallel p;
        size_t seq;
        ar_status status;
    } row[] = {
        {{.cp = 3}, 16, AR_ERR_INDIVISIBLE},
        {{.cp = 4, .zigzag = true}, 12, AR_ERR_INDIVISIBLE},
        {{.cp = 4, .cp_inner = 3}, 24, AR_ERR_ARG},
        {{.dp = 2, .cp = 2, .cp_inner = INT_MAX}, 24, AR_ERR_ARG}, /* twice as many are more than an int counts */
        {{.cp = -1}, 16, AR_ERR_ARG},
        {{.cp = 2, .cp_inner = -1}, 16, AR_ERR_ARG},
        {{.cp = 2, .tp = 2, .sp = true}, 6, AR_ERR_INDIVISIBLE},
        {{.cp = 65536, .dp = 32768}, 65536, AR_ERR_OVERFLOW},
        {{.cp = 65536, .dp = 65536, .tp = 65536}, 65536, AR_ERR_OVERFLOW},
        {{.cp = 2, .tp = 2, .sp = true}, 8, AR_OK},
        {{.cp = 4, .zigzag = true}, 16, AR_OK},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        cr_assert_eq(ari_parallel_check(&row[i].p, &c, &plan, 4, row[i].seq), row[i].status, "row %zu: %s", i,
                     ar_error_message());
    cr_expect_refused(ari_parallel_check_ranks(&row[2].p), AR_ERR_ARG, "cp=4 is not a number of groups of 3");
}

CLAIM(a_layout_shares_out_the_multiples_of_its_unit)
{
    static const struct {
        ar_parallel p;
        size_t unit;
    } row[] = {
        {{.tp = 1}, 1},
        {{.tp = 4}, 1},
        {{.tp = 4, .sp = true}, 4},
        {{.cp = 3}, 3},
        {{.cp = 4, .zigzag = true}, 8},
        {{.cp = 4, .cp_inner = 2, .zigzag = true}, 4},
        {{.cp = 4, .cp_inner = 4, .zigzag = true}, 4},
        {{.cp = 6, .cp_inner = 2, .zigzag = true, .tp = 3, .sp = true}, 18},
        {{.cp = 3, .zigzag = true, .tp = 3, .sp = true}, 18},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        cr_expect_eq(ari_parallel_sequence_unit(&row[i].p), row[i].unit, "row %zu", i);
        for (size_t seq = 1; seq <= 40; seq++)
            cr_expect_eq(ari_parallel_check_sequence(&row[i].p, seq) == AR_OK, seq % row[i].unit == 0, "row %zu of %zu",
                         i, seq);
    }
}

static const ar_parallel mesh = {.dp = 2, .cp = 6, .cp_inner = 3, .tp = 2};
enum { WORLD = 24, GROUPS = 5 };

/* A rank's number and the group's size in each group: tp, dp, all, ring, inner. */
typedef struct seen {
    int rank[GROUPS], size[GROUPS], sum[GROUPS]; /* sum of the members' world ranks */
} seen;

static ar_status look(ar_comm *world, void *user)
{
    seen *own = (seen *)user + ar_comm_rank(world);
    SCOPED(ar_parallel_groups_end) ar_parallel_groups g = {.tp = NULL};
    OWNED(ar_device_destroy) ar_device *device = NULL;
    OWNED(ar_queue_destroy) ar_queue *queue = NULL;
    AR_TRY(ar_parallel_groups_begin(&g, world, &mesh));
    ar_comm *const group[GROUPS] = {g.tp, g.dp, g.cp.group, g.cp.ring, g.cp.inner};
    AR_TRY(ar_device_cpu_create(&device, 1));
    AR_TRY(device->ops->queue_create(device, &queue, AR_QUEUE_INLINE, "main"));
    for (int i = 0; i < GROUPS; i++) {
        int32_t sum = ar_comm_rank(world);
        const ar_buf b = {&sum};
        AR_TRY(ar_comm_all_reduce(group[i], queue, b, ar_const(b), 1, AR_I32, AR_SUM, "members"));
        own->rank[i] = ar_comm_rank(group[i]);
        own->size[i] = ar_comm_size(group[i]);
        own->sum[i] = sum;
    }
    return AR_OK;
}

/* Rank ((dp * 2 + place) * 3 + neighbour) * 2 + tp, with the members of its groups counted by these four. */
CLAIM(the_groups_of_a_rank_are_those_that_share_all_but_one_coordinate)
{
    static seen at[WORLD];
    cr_assert_ok(ar_sim_run(WORLD, NULL, look, at, NULL));
    for (int r = 0; r < WORLD; r++) {
        const int tp = r % 2, neighbour = r / 2 % 3, place = r / 6 % 2, dp = r / 12;
        const ar_parallel_rank of = ari_parallel_rank_of(&mesh, r);
        cr_expect(of.tp == tp && of.cp == place * 3 + neighbour && of.dp == dp, "rank %d", r);
        seen wanted = {.rank = {tp, r / 2, r / 2 % 6, place, neighbour}, .size = {2, 12, 6, 2, 3}};
        for (int k = 0; k < WORLD; k++) {
            const int same_tp = k % 2 == tp, same_dp = k / 12 == dp;
            const int same_neighbour = k / 2 % 3 == neighbour, same_place = k / 6 % 2 == place;
            const int member[GROUPS] = {k / 2 == r / 2, same_tp, same_tp && same_dp,
                                        same_tp && same_dp && same_neighbour, same_tp && same_dp && same_place};
            for (int i = 0; i < GROUPS; i++)
                wanted.sum[i] += member[i] ? k : 0;
        }
        for (int i = 0; i < GROUPS; i++)
            cr_expect(at[r].rank[i] == wanted.rank[i] && at[r].size[i] == wanted.size[i] &&
                          at[r].sum[i] == wanted.sum[i],
                      "rank %d, group %d: %d of %d, sum %d", r, i, at[r].rank[i], at[r].size[i], at[r].sum[i]);
    }
}

static ar_status split_wrong(ar_comm *world, void *user)
{
    SCOPED(ar_parallel_groups_end) ar_parallel_groups g = {.tp = NULL};
    return ar_parallel_groups_begin(&g, world, user);
}

CLAIM(a_world_of_another_size_has_no_groups)
{
    ar_parallel p = {.cp = 2, .dp = 2}, inner = {.cp = 4, .cp_inner = 3};
    cr_expect_refused(ar_sim_run(3, NULL, split_wrong, &p, NULL), AR_ERR_ARG, "in a world of 3 ranks, expected 4");
    cr_expect_eq(ar_sim_run(4, NULL, split_wrong, &inner, NULL), AR_ERR_ARG);
}

EVERY_CLAIM(positions)
