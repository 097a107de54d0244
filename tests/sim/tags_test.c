/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/comm.h"
#include "anyrank/sim.h"
#include "tests/support/test.h"

/* Two collectives that are alike but for what they are about, called in another order on one rank: only their tags
 * tell, and the results would be mixed up. */
enum { RANKS = 3 };

typedef struct tag_run {
    const char *tag[RANKS][2]; /* of each rank's first and second call */
    ar_status (*call)(ar_comm *c, ar_queue *q, const char *tag);
} tag_run;

static ar_status rank_main(ar_comm *c, void *arg)
{
    tag_run *run = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    const ar_status st = run->call(c, q, run->tag[r][0]);
    return st == AR_OK ? run->call(c, q, run->tag[r][1]) : st;
}

static ar_status all_reduce(ar_comm *c, ar_queue *q, const char *tag)
{
    int64_t x[4] = {ar_comm_rank(c)};
    return ar_comm_all_reduce(c, q, (ar_buf){x}, (ar_cbuf){x}, 4, AR_I64, AR_SUM, tag);
}

static ar_status exchange(ar_comm *c, ar_queue *q, const char *tag)
{
    return ar_comm_exchange(c, q, NULL, 0, AR_F32, tag);
}

static ar_status run_tags(tag_run *run)
{
    const ar_sim_options o = {.timeout_ns = 10000000000u};
    return ar_sim_run(RANKS, &o, rank_main, run, NULL);
}

Test(tags, ranks_without_one_agree_with_any_and_hide_nothing)
{
    tag_run silent = {.tag = {{NULL, "a"}, {"x", ""}, {"", NULL}}, .call = all_reduce};
    cr_expect_ok(run_tags(&silent));
    tag_run behind = {.tag = {{NULL, NULL}, {"a", "b"}, {"b", "a"}}, .call = all_reduce};
    cr_expect_refused(run_tags(&behind), AR_ERR_MISMATCH, "ranks 1 and 2 disagree");
}

Test(tags, long_ones_make_the_table_of_ranks_wider)
{
    static const char long_tag[] = "model.layers.31.self_attn.rotary_emb.q_proj.weight";
    tag_run run = {.tag = {{long_tag, "a"}, {long_tag, "b"}, {long_tag, "a"}}, .call = all_reduce};
    cr_assert_eq(run_tags(&run), AR_ERR_MISMATCH);
    const char *title = strstr(ar_error_message(), "\n     rank");
    cr_assert(title, "%s", ar_error_message());
    const char *row = strchr(title + 1, '\n');
    cr_assert(row && strstr(row, long_tag), "%s", ar_error_message());
    cr_expect_eq(strstr(row, "0-2") - row, strstr(title, "with ranks") - title, "%s", ar_error_message());
}

Test(tags, equal_texts_at_other_places_are_equal)
{
    char one[] = "layers.0.mlp", two[] = "layers.0.mlp";
    tag_run run = {.tag = {{one, one}, {two, two}, {one, two}}, .call = all_reduce};
    cr_expect_ok(run_tags(&run));
}

Test(tags, each_rank_may_name_an_exchange_as_it_sees_it)
{
    tag_run run = {.tag = {{"send", "s"}, {"receive", "r"}, {"nothing", ""}}, .call = exchange};
    cr_expect_ok(run_tags(&run));
}
