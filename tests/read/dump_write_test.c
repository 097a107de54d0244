/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/dump.h"
#include "read/folder.h"
#include "ref/core/scheduler.h"
#include "ref/core/tensor_private.h"
#include "ref/io/safetensors_private.h"
#include "support/small.h"

TestSuite(dump_write, .init = folder_begin, .fini = folder_end);

#define MAX_COUNT 512

/* Fills a rank's local tensor from the full one, whose element i is `i + 1`; strides of the local one are any. */
static void fill_local(float *data, const ar_tensor *t, const ar_layout *o)
{
    for (size_t k = 0; k < o->nbox; k++) {
        const ar_box *b = &o->box[k];
        for (size_t i = 0; i < ari_volume(b->extent, o->ndim); i++) {
            size_t rest = i, full = 0, stride = 1;
            ptrdiff_t at = 0;
            for (int d = o->ndim - 1; d >= 0; d--) {
                const size_t x = rest % b->extent[d];
                rest /= b->extent[d];
                full += (b->global[d] + x) * stride;
                stride *= o->shape[d];
                at += (ptrdiff_t)(b->local[d] + x) * t->stride[d];
            }
            data[at] = (float)(full + 1);
        }
    }
}

/* A view of the layout's local shape, its dimensions in memory the other way round if `reversed`. */
static ar_tensor local_view(float *data, const ar_layout *o, bool reversed)
{
    size_t shape[AR_MAX_DIMS] = {0};
    ar_tensor t;
    for (int d = 0; d < o->ndim; d++)
        shape[d] = ari_layout_local(o, d);
    cr_assert_ok(ar_tensor_view(&t, AR_F32, o->ndim, shape, (ar_buf){data}));
    ptrdiff_t step = 1;
    for (int d = 0; reversed && d < o->ndim; d++) {
        t.stride[d] = step;
        step *= (ptrdiff_t)shape[d];
    }
    return t;
}

typedef struct draw {
    int ndim, dim, tp, dp, kind, blocks;
    size_t shape[AR_MAX_DIMS], block[4];
} draw;

static size_t below(uint64_t *state, size_t n)
{
    return (size_t)(ari_splitmix(state) % n);
}

static draw draw_layout(uint64_t *state)
{
    draw x = {.ndim = (int)below(state, 4), .kind = (int)below(state, 4)};
    x.tp = 1 + (int)below(state, 4);
    x.dp = 1 + (int)below(state, 2);
    x.kind = x.ndim == 0 ? 0 : x.kind;
    x.dim = x.ndim == 0 ? 0 : (int)below(state, (size_t)x.ndim);
    for (int d = 0; d < x.ndim; d++)
        x.shape[d] = 1 + below(state, 6);
    if (x.kind == 1) /* evenly */
        x.shape[x.dim] *= (size_t)x.tp;
    x.blocks = 1 + (int)below(state, 3);
    for (int i = 0; x.kind == 3 && i < x.blocks; i++) { /* packed */
        x.block[i] = (1 + below(state, 2)) * (size_t)x.tp;
        x.shape[x.dim] = (i == 0 ? 0 : x.shape[x.dim]) + x.block[i];
    }
    return x;
}

static ar_layout layout_of(const draw *x, int tp_rank, int dp_rank)
{
    ar_layout o = {0};
    ar_status st = AR_OK;
    if (x->kind == 0)
        st = ari_layout_replicate(&o, x->ndim, x->shape, dp_rank * x->tp + tp_rank, x->dp * x->tp);
    else if (x->kind == 1)
        st = ar_layout_shard(&o, x->ndim, x->shape, x->dim, tp_rank, x->tp);
    else if (x->kind == 2)
        st = ari_layout_shard_uneven(&o, x->ndim, x->shape, x->dim, tp_rank, x->tp);
    else
        st = ari_layout_packed(&o, x->ndim, x->shape, x->dim, x->block, x->blocks, tp_rank, x->tp);
    cr_assert_ok(st);
    if (x->kind != 0) {
        o.replica = dp_rank;
        o.replicas = x->dp;
    }
    return o;
}

static void write_rank(const draw *x, int tp_rank, int dp_rank, bool reversed)
{
    static float data[MAX_COUNT * 4];
    const ar_layout o = layout_of(x, tp_rank, dp_rank);
    const ar_tensor t = local_view(data, &o, reversed);
    const ar_dump_value v = {"x", AR_F32, &t, &o, NULL};
    const ar_dump_place place = {.rank = dp_rank * x->tp + tp_rank,
                                 .world = x->dp * x->tp,
                                 .mesh = {2, {{"dp", x->dp}, {"tp", x->tp}}},
                                 .coords = {dp_rank, tp_rank}};
    const char *const metadata[] = {"model", "drawn"};
    fill_local(data, &t, &o);
    cr_assert_ok(ar_dump_write(folder, &place, &v, 1, metadata, 1));
}

static void expect_whole(const draw *x, int trial)
{
    static float full[MAX_COUNT];
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    const ar_dump_tensor *t = ar_dump_at(d, 0);
    const size_t count = ari_volume(x->shape, x->ndim);
    bool found = true;
    ar_dump_disagreement unused;
    cr_assert(count <= MAX_COUNT);
    cr_assert_eq(ar_dump_count(d), 1);
    cr_assert_eq(t->count, count, "trial %d", trial);
    cr_assert_eq(t->order, 0);
    cr_expect_eq(ar_dump_ranks(d), x->dp * x->tp);
    cr_expect(ar_dump_mesh(d)->ndim == 2 && strcmp(ar_dump_mesh(d)->dim[1].name, "tp") == 0 &&
              ar_dump_mesh(d)->dim[1].size == x->tp);
    cr_expect_str_eq(ar_dump_metadata(d, "model"), "drawn");
    cr_assert_ok(ar_dump_read_f32(t, 0, count, full));
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(full[i], (float)(i + 1), "trial %d, element %zu", trial, i);
    cr_assert_ok(ar_dump_replicas(t, &found, &unused));
    cr_expect_not(found);
}

Test(dump_write, ranks_of_any_layout_are_put_together_again)
{
    uint64_t state = 7;
    for (int trial = 0; trial < (small_only() ? 10 : 24); trial++) {
        const draw x = draw_layout(&state);
        folder_end();
        cr_assert_eq(mkdir(folder, 0700), 0);
        for (int r = 0; r < x.dp * x.tp; r++)
            write_rank(&x, r % x.tp, r / x.tp, trial % 2 == 1);
        expect_whole(&x, trial);
    }
}

Test(dump_write, a_later_dump_leaves_nothing_of_an_earlier_one)
{
    const draw packed = {.ndim = 1, .kind = 3, .tp = 2, .dp = 1, .blocks = 3, .shape = {12}, .block = {4, 4, 4}};
    const draw rows = {.ndim = 1, .kind = 1, .tp = 2, .dp = 1, .shape = {12}};
    for (int r = 0; r < 2; r++)
        write_rank(&packed, r, 0, false);
    expect_whole(&packed, 0);
    for (int r = 0; r < 2; r++)
        write_rank(&rows, r, 0, false);
    expect_whole(&rows, 1);
}

/* PyTorch knows one box of a tensor in a file. */
Test(dump_write, each_file_holds_one_box_of_a_packed_tensor)
{
    const draw x = {.ndim = 1, .kind = 3, .tp = 2, .dp = 1, .blocks = 2, .shape = {8}, .block = {4, 4}};
    OWNED(ari_st_close) ar_st_file *f = NULL;
    write_rank(&x, 1, 0, false);
    const char *path = in_folder("rank-00001-2.safetensors");
    cr_assert_ok(ari_st_open(&f, path));
    cr_expect_eq(ari_st_at(f, 0)->shape[0], 2);
    cr_expect_str_eq(ari_st_metadata(f, "DCP_SHARDING_INFO"), "{\"x\":{\"saved_offsets\":[6]}}");
    cr_expect_str_eq(ari_st_metadata(f, "DCP_VERSION"), "1.0");
}

Test(dump_write, blocks_that_lie_one_after_the_other_are_one_box)
{
    const draw x = {.ndim = 1, .kind = 3, .tp = 1, .dp = 1, .blocks = 2, .shape = {8}, .block = {4, 4}};
    write_rank(&x, 0, 0, false);
    const char *path = in_folder("rank-00000-2.safetensors");
    cr_expect_neq(access(path, F_OK), 0);
    expect_whole(&x, 0);
}

Test(dump_write, a_rank_that_holds_nothing_still_has_a_file)
{
    const draw x = {.ndim = 1, .kind = 2, .tp = 3, .dp = 1, .shape = {2}};
    for (int r = 0; r < 3; r++)
        write_rank(&x, r, 0, false);
    expect_whole(&x, 0);
}

Test(dump_write, summands_are_written_as_such)
{
    for (int r = 0; r < 2; r++) {
        float x[2] = {(float)r + 1, 4};
        ar_layout o;
        ar_tensor t;
        const size_t shape[] = {2};
        cr_assert_ok(ari_layout_replicate(&o, 1, shape, 0, 1));
        cr_assert_ok(ar_tensor_view(&t, AR_F32, 1, shape, (ar_buf){x}));
        const ar_dump_value v = {"x", AR_F32, &t, &o, "tp"};
        const ar_dump_place place = {.rank = r, .world = 2, .mesh = {1, {{"tp", 2}}}, .coords = {r}};
        cr_assert_ok(ar_dump_write(folder, &place, &v, 1, NULL, 0));
    }
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    float sum[2];
    cr_expect(ar_dump_at(d, 0)->part[1].partial);
    cr_assert_ok(ar_dump_read_f32(ar_dump_at(d, 0), 0, 2, sum));
    cr_expect(sum[0] == 3 && sum[1] == 8);
}

Test(dump_write, what_does_not_fit_is_refused)
{
    float x[4] = {0};
    const size_t shape[] = {4}, larger[] = {5};
    ar_layout o;
    ar_tensor t;
    cr_assert_ok(ari_layout_replicate(&o, 1, larger, 0, 1));
    cr_assert_ok(ar_tensor_view(&t, AR_F32, 1, shape, (ar_buf){x}));
    ar_dump_value v = {"x", AR_F32, &t, &o, NULL};
    ar_dump_place place = {.rank = 0, .world = 2, .mesh = {1, {{"tp", 2}}}};
    cr_expect_eq(ar_dump_write(folder, &place, &v, 1, NULL, 0), AR_ERR_ARG);
    cr_assert_ok(ari_layout_replicate(&o, 1, shape, 0, 1));
    v.partial = "cp";
    cr_expect_eq(ar_dump_write(folder, &place, &v, 1, NULL, 0), AR_ERR_ARG);
    v.partial = NULL;
    place.coords[0] = 2;
    cr_expect_eq(ar_dump_write(folder, &place, &v, 1, NULL, 0), AR_ERR_ARG);
    place.coords[0] = 0;
    place.world = 3;
    cr_expect_eq(ar_dump_write(folder, &place, &v, 1, NULL, 0), AR_ERR_INDIVISIBLE);
    place.world = 2;
    cr_expect_eq(ar_dump_write("/nonexistent", &place, &v, 1, NULL, 0), AR_ERR_IO);
    expect_error(AR_ERR_IO, folder, "without");
    cr_expect_ok(ar_dump_write(folder, &place, &v, 1, NULL, 0));
}
