/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/agree.h"
#include "tests/support/test.h"

enum { RANKS = 3 };
static const size_t send[RANKS] = {1, 0, 7}, receive[RANKS] = {4, 1, (size_t)1 << 40};
static const ar_p2p batch[] = {{.peer = 2, .send = true, .count = 5}, {.peer = 0, .count = 9}};

static const ari_call calls[] = {
    {.kind = ARI_ALL_REDUCE, .dtype = AR_BF16, .op = AR_MIN, .count = 12, .tag = "layers.0.up"},
    {.kind = ARI_BROADCAST, .dtype = AR_F32, .root = 2, .count = 8, .tag = ""},
    {.kind = ARI_ALL_GATHER, .dtype = AR_I64, .counts = send, .tag = "seven's"},
    {.kind = ARI_ALL_TO_ALL, .dtype = AR_U8, .counts = send, .recv_counts = receive, .tag = "eight is"},
    {.kind = ARI_EXCHANGE, .dtype = AR_F64, .p2p = batch, .count = 2, .tag = "edge"},
    {.kind = ARI_EXCHANGE, .dtype = AR_F64, .tag = "nothing"},
    {.kind = ARI_SEND, .dtype = AR_F16, .peer = 1, .count = 3, .tag = "act"},
    {.kind = ARI_SPLIT, .dtype = AR_U8, .color = -1, .key = -7, .tag = ""},
};
enum { CALLS = sizeof calls / sizeof *calls };

static void *encoded(const ari_call *call, size_t *size)
{
    cr_assert(ari_call_encoded_bytes(size, call, RANKS) == AR_OK);
    void *bytes = malloc(*size);
    cr_assert(bytes);
    ari_call_encode(bytes, call, RANKS);
    return bytes;
}

static void expect_counts(const size_t *got, const size_t *wanted)
{
    cr_expect((got != NULL) == (wanted != NULL));
    cr_expect(!wanted || memcmp(got, wanted, RANKS * sizeof *got) == 0);
}

Test(agree, a_call_arrives_as_it_was_sent)
{
    for (int i = 0; i < CALLS; i++) {
        const ari_call *want = &calls[i];
        ari_call got;
        OWNED(free) ar_p2p *p2p = NULL;
        size_t size = 0;
        OWNED(free) void *bytes = encoded(want, &size);
        cr_assert(ari_call_decode(&got, &p2p, bytes, size, RANKS) == AR_OK, "call %d: %s", i, ar_error_message());
        cr_expect(size % 8 == 0);
        cr_expect(got.kind == want->kind && got.dtype == want->dtype && got.op == want->op && got.root == want->root);
        cr_expect(got.peer == want->peer && got.color == want->color && got.key == want->key);
        cr_expect(got.count == want->count && strcmp(got.tag, want->tag) == 0, "call %d: %s", i, got.tag);
        expect_counts(got.counts, want->counts);
        expect_counts(got.recv_counts, want->recv_counts);
        for (size_t k = 0; want->p2p && k < want->count; k++)
            cr_expect(got.p2p[k].peer == batch[k].peer && got.p2p[k].send == batch[k].send &&
                      got.p2p[k].count == batch[k].count);
    }
}

Test(agree, a_part_of_a_call_is_none)
{
    for (int i = 0; i < CALLS; i++) {
        size_t size = 0;
        OWNED(free) void *bytes = encoded(&calls[i], &size);
        for (size_t part = 0; part < size; part++) {
            ari_call got;
            ar_p2p *p2p = NULL;
            cr_expect(ari_call_decode(&got, &p2p, bytes, part, RANKS) == AR_ERR_INTERNAL, "call %d: %zu", i, part);
        }
    }
}

Test(agree, a_call_of_another_group_or_without_the_end_of_its_tag_is_none)
{
    ari_call got;
    ar_p2p *p2p = NULL;
    size_t size = 0;
    OWNED(free) char *bytes = encoded(&calls[2], &size);
    cr_expect(ari_call_decode(&got, &p2p, bytes, size, RANKS + 1) == AR_ERR_INTERNAL);
    bytes[size - 1] = 'x';
    cr_expect(ari_call_decode(&got, &p2p, bytes, size, RANKS) == AR_ERR_INTERNAL);
}
