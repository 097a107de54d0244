/* SPDX-License-Identifier: Apache-2.0 */
/* Schedules as files: PyTorch's are read, what is written is read again, and what is wrong is named. */
#include "ref/core/schedule_private.h"
#include "ref/pipeline/schedule_private.h"
#include "support/together.h"
#include "tests/support/temporary.h"

static ar_pipeline_schedule *read_golden(const char *name)
{
    ar_pipeline_schedule *s = NULL;
    char path[512];
    snprintf(path, sizeof path, TEST_GOLDEN_DIR "/schedules/%s.csv", name);
    cr_assert_ok(ari_pipeline_schedule_read(&s, path));
    return s;
}

static void expect_same(const ar_pipeline_schedule *a, const ar_pipeline_schedule *b, const char *what)
{
    const ar_pipeline_shape x = ari_pipeline_schedule_shape(a), y = ari_pipeline_schedule_shape(b);
    cr_assert(x.ranks == y.ranks && x.stages == y.stages && x.micro_batches == y.micro_batches, "%s", what);
    for (int r = 0; r < x.ranks; r++) {
        size_t n = 0, m = 0;
        const ar_pp_operation *o = ari_pipeline_schedule_rank(a, r, &n), *p = ari_pipeline_schedule_rank(b, r, &m);
        cr_assert_eq(n, m, "%s, rank %d: %zu operations, %zu", what, r, n, m);
        for (size_t i = 0; i < n; i++)
            cr_assert(o[i].kind == p[i].kind && o[i].stage == p[i].stage && o[i].micro == p[i].micro,
                      "%s, rank %d, operation %zu", what, r, i);
    }
}

/* Made by tests/golden/make_schedules.py, which also compares hundreds. */
CLAIM(pytorchs_lists_are_those_generated_here)
{
    static const struct {
        const char *file;
        ar_pp_schedule kind;
        int p, v, m;
    } cases[] = {{"gpipe-4-6", AR_PP_GPIPE, 4, 1, 6},
                 {"interleaved-2-3-4", AR_PP_INTERLEAVED, 2, 3, 4},
                 {"zero-bubble-4-6", AR_PP_ZERO_BUBBLE, 4, 1, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *own = NULL, *theirs = read_golden(cases[i].file);
        cr_assert_ok(ari_pipeline_schedule_create(&own, cases[i].kind, cases[i].p, cases[i].v, cases[i].m));
        expect_same(own, theirs, cases[i].file);
    }
}

/* The same with PyTorch's transfers, which are elsewhere in the lists: the computations are in the same order. */
CLAIM(pytorchs_transfers_are_kept)
{
    OWNED(ari_pipeline_schedule_destroy)
    ar_pipeline_schedule *s = read_golden("interleaved-2-2-4-transfers"), *z = read_golden("zero-bubble-3-4-transfers");
    size_t n = 0;
    const ar_pp_operation *o = ari_pipeline_schedule_rank(s, 1, &n);
    cr_assert(n > 8 && o[0].kind == AR_PP_RECV_ACTIVATION && o[1].kind == AR_PP_FORWARD &&
              o[2].kind == AR_PP_SEND_ACTIVATION && o[7].kind == AR_PP_FORWARD && o[7].stage == 3);
    ari_pipeline_schedule_rank(z, 0, &n);
    cr_expect_eq(n, 4 * 5); /* of each micro-batch F, SEND_F, RECV_B, I, W */
}

static ar_status parse(ar_pipeline_schedule **s, const char *text)
{
    return ari_pipeline_schedule_parse(s, text, strlen(text), "s.csv");
}

CLAIM(what_is_written_is_read)
{
    SCOPED(temp_end) const temp_path file = temp_file(".csv");
    for (int kind = 0; kind < AR_PP_SCHEDULES; kind++)
        for (int transfers = 0; transfers < 2; transfers++) {
            OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL, *again = NULL;
            cr_assert_ok(
                ari_pipeline_schedule_create(&s, (ar_pp_schedule)kind, 3, kind == AR_PP_INTERLEAVED ? 2 : 1, 5));
            cr_assert_ok(ari_pipeline_schedule_write(file.path, s, transfers == 1));
            cr_assert_ok(ari_pipeline_schedule_read(&again, file.path));
            expect_same(s, again, ari_pp_schedule_name((ar_pp_schedule)kind));
        }
}

CLAIM(spaces_and_line_ends_do_not_matter)
{
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *a = NULL, *b = NULL;
    cr_assert_ok(parse(&a, "0F0,0B0\n1F0,1B0"));
    cr_assert_ok(parse(&b, "\xef\xbb\xbf 0F0 ,,\t0B0,\r\n1UNSHARD,1F0,1B0,1REDUCE_GRAD\r\n,,\n\n"));
    expect_same(a, b, "spaces");
}

typedef struct wrong_case {
    const char *text;
    ar_status st;
    const char *says;
} wrong_case;

CLAIM(what_is_wrong_is_named)
{
    static const wrong_case cases[] = {
        /* what is no operation */
        {"", AR_ERR_FORMAT, "s.csv: no operations"},
        {",,\n,\n", AR_ERR_FORMAT, "no operations"},
        {"0F0,0X0", AR_ERR_FORMAT, "s.csv:1: cell 2, '0X0': no operation"},
        {"0F0\n1F0,F0", AR_ERR_FORMAT, "s.csv:2: cell 2, 'F0'"},
        {"0F0,0B", AR_ERR_FORMAT, "cell 2, '0B'"},
        {"0F0,0FULL_BACKWARD0", AR_ERR_FORMAT, "'0FULL_BACKWARD0'"},
        {"0F0 0B0", AR_ERR_FORMAT, "'0F0 0B0'"},
        {"0F-1", AR_ERR_FORMAT, "'0F-1'"},
        {"(0F1;1B0)OVERLAP_F_B", AR_ERR_UNSUPPORTED, "OVERLAP_F_B"},
        {"256F0", AR_ERR_OVERFLOW, "at most 256"},
        {"0F99999999999999999999", AR_ERR_OVERFLOW, "9 digits"},
        {"0F0,0B999999999", AR_ERR_OVERFLOW, "1000000000 micro-batches"},
        {"0F0,0B0\n1F0,1B0,2F0,2B0", AR_ERR_FORMAT, "s.csv: 3 stages on 2 ranks"},
        /* what lists cannot do */
        {"0F0,0F0,0B0\n1F0,1B0", AR_ERR_FORMAT, "rank 0, operation 2: 0F0 (stage 0, micro-batch 0) is there twice"},
        {"0F0,0B0\n1F0", AR_ERR_FORMAT, "rank 1: 1B0 (stage 1, micro-batch 0) is missing"},
        {"0F0,0I0\n1F0,1B0", AR_ERR_FORMAT, "rank 0: 0W0 (stage 0, micro-batch 0) is missing"},
        {"0B0,0F0\n1F0,1B0", AR_ERR_FORMAT, "rank 0, operation 1: 0B0 (stage 0, micro-batch 0) is before 0F0"},
        {"0F0,0W0,0I0\n1F0,1B0", AR_ERR_FORMAT, "operation 2: 0W0 (stage 0, micro-batch 0) is before 0I0"},
        {"0F0,0B0,0W0\n1F0,1B0", AR_ERR_FORMAT, "operation 3: 0W0 (stage 0, micro-batch 0) follows B"},
        {"0F0,0I0,0B0\n1F0,1B0", AR_ERR_FORMAT, "0B0 (stage 0, micro-batch 0) follows I or W"},
        {"0F0,1F0,0B0\n1B0", AR_ERR_FORMAT, "rank 0, operation 2: 1F0 (stage 1, micro-batch 0) is rank 1's"},
        {"0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0", AR_ERR_FORMAT, "rank 1, operation 1: 1F0"},
        {"0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", AR_ERR_FORMAT, "is before 0RECV_B0, which it needs"},
        {"0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", AR_ERR_FORMAT,
         "rank 0: 0SEND_F0 (stage 0, micro-batch 0) is missing: rank 1 waits for it with 1RECV_F0"},
        {"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1SEND_F0", AR_ERR_FORMAT, "moves nothing"},
        /* deadlocks: the three ways in which lists that are right alone are wrong together */
        /* each rank waits for the other's next operation */
        {"0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", AR_ERR_FORMAT,
         "a deadlock: rank 0 with 0B0 (stage 0, micro-batch 0) waits for 1SEND_B0 of rank 1; rank 1 with 1F1 (stage 1, "
         "micro-batch 1) waits for 0SEND_F1 of rank 0"},
        /* over three ranks: the last one goes forward with micro-batch 1 before it goes back with 0 */
        {"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1", AR_ERR_FORMAT, "rank 1 with 1F1"},
        /* a send before the other in one list, a receive after it in the other */
        {"0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
         "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
         AR_ERR_FORMAT, "rank 1, operation 1: 1RECV_F1 (stage 1, micro-batch 1) meets 0SEND_F0 of rank 0"},
        /* stages of one rank in the wrong order */
        {"1F0,0F0,1B0,0B0", AR_ERR_FORMAT, "rank 0 with 1F0 (stage 1, micro-batch 0) waits for 0F0 of rank 0"},
    };
    ar_pipeline_schedule *s = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_eq(parse(&s, cases[i].text), cases[i].st, "%s", cases[i].text);
        cr_expect_says(cases[i].says);
        cr_expect_null(s);
    }
    /* What PyTorch prints of its 1F1B counts the last rank's forward passes from 1. */
    cr_expect_refused(ari_pipeline_schedule_read(&s, TEST_GOLDEN_DIR "/schedules/1f1b-4-6.csv"), AR_ERR_FORMAT,
                      "rank 0: 0F6 (stage 0, micro-batch 6) is missing");
}

/* An order that is no usual one, and legal: the receives follow the sender's. */
CLAIM(any_legal_order_is_taken)
{
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    ar_pp_run run;
    const ar_pp_times times[2] = {{1, 1, 1, 0}, {1, 1, 1, 0}};
    cr_assert_ok(parse(&s, "0F1,0F0,0F2,0B0,0I2,0B1,0W2\n1F0,1F1,1B1,1I0,1F2,1B2,1W0\n"));
    size_t n = 0;
    const ar_pp_operation *o = ari_pipeline_schedule_rank(s, 1, &n);
    cr_expect(o[0].kind == AR_PP_RECV_ACTIVATION && o[0].micro == 1 && o[1].micro == 0, "as they are sent");
    cr_assert_ok(ari_pipeline_schedule_run(&run, s, times, NULL, NULL));
    cr_expect(run.rank[0].in_flight == 3 && run.rank[1].in_flight == 2 && run.rank[0].busy == 9);
}

EVERY_CLAIM(pipeline_csv)
