/* SPDX-License-Identifier: Apache-2.0 */
/* What a listener keeps of a rank's reports: names, parts, rows of micro-batches, shares of a gradient. */
#include "anyrank/dump_listener.h"
#include "ref/core/tensor_private.h"
#include "tests/support/test.h"
#include "verify/writer/dump_listener_private.h"

OWNER(ar_dump_listener, ar_dump_listener_destroy)

static ar_dump_listener *listener(const ar_dump_listener_options *o)
{
    ar_dump_listener *l = NULL;
    cr_assert_ok(ar_dump_listener_create(&l, o));
    return l;
}

static ar_tensor view(float *values, int ndim, const size_t *shape)
{
    ar_tensor t;
    cr_assert_ok(ar_tensor_view(&t, AR_F32, ndim, shape, (ar_buf){values}));
    return t;
}

static ar_status report(ar_dump_listener *l, const char *name, char pass, uint32_t step, const ar_tensor *t,
                        const ar_layout *o)
{
    const ar_tap_event e = {.name = name, .pass = pass, .step = step, .local = t, .layout = o};
    return ar_dump_listener_tap(l, &e);
}

static ar_dump_value value(const ar_dump_listener *l, size_t i)
{
    ar_dump_value v;
    cr_assert(ari_dump_listener_at(l, i, &v));
    return v;
}

static void expect_values(const ar_dump_value *v, const float *expected, size_t n)
{
    cr_assert_eq(ar_tensor_count(v->local), n, "%s", v->name);
    cr_expect_arr_eq((const float *)v->local->data.ptr, expected, n * sizeof *expected, "%s", v->name);
}

/* Rows [first, first + rows) of [4, 2], all columns: samples of a batch of 4. */
static ar_layout rows_of(size_t first, size_t rows)
{
    ar_layout o;
    cr_assert_ok(ari_layout_replicate(&o, 2, (const size_t[]){4, 2}, 0, 1));
    o.box[0].global[0] = first;
    o.box[0].extent[0] = rows;
    return o;
}

Test(dump_listener, names_have_the_pass_and_from_step_2_on_the_step)
{
    static const char passes[] = "ifbgcn";
    static const char *const expected[] = {"x:init", "x:fwd", "x:bwd",   "x:grad",
                                           "x:clip", "x:new", "x:fwd@2", "x:fwd@4294967295"};
    OWNED(ar_dump_listener_destroy) ar_dump_listener *l = listener(NULL);
    float one = 1.0f;
    ar_layout o;
    cr_assert_ok(ari_layout_replicate(&o, 0, NULL, 0, 1));
    const ar_tensor t = view(&one, 0, NULL);
    for (size_t i = 0; i < 6; i++)
        cr_assert_ok(report(l, "x", passes[i], 1, &t, &o));
    cr_assert_ok(report(l, "x", 'f', 2, &t, &o));
    cr_assert_ok(report(l, "x", 'f', UINT32_MAX, &t, &o));
    cr_assert_eq(ari_dump_listener_count(l), 8);
    for (size_t i = 0; i < 8; i++)
        cr_expect_str_eq(value(l, i).name, expected[i]);
}

Test(dump_listener, rows_of_micro_batches_become_one_box_in_either_order)
{
    float first[] = {1, 2}, second[] = {3, 4, 5, 6}, expected[] = {1, 2, 3, 4, 5, 6};
    const ar_tensor a = view(first, 2, (const size_t[]){1, 2}), b = view(second, 2, (const size_t[]){2, 2});
    const ar_layout at_a = rows_of(1, 1), at_b = rows_of(2, 2);
    for (int order = 0; order < 2; order++) {
        OWNED(ar_dump_listener_destroy) ar_dump_listener *l = listener(NULL);
        cr_assert_ok(report(l, "x", 'f', 1, order ? &b : &a, order ? &at_b : &at_a));
        cr_assert_ok(report(l, "x", 'f', 1, order ? &a : &b, order ? &at_a : &at_b));
        cr_assert_eq(ari_dump_listener_count(l), 1);
        const ar_dump_value v = value(l, 0);
        expect_values(&v, expected, 6);
        cr_expect(v.layout->nbox == 1 && v.layout->box[0].global[0] == 1 && v.layout->box[0].extent[0] == 3);
        cr_expect(v.local->shape[0] == 3 && v.local->shape[1] == 2);
    }
}

Test(dump_listener, rows_that_are_no_neighbours_are_boxes_of_their_own)
{
    float first[] = {1, 2}, second[] = {3, 4}, expected[] = {1, 2, 3, 4};
    const ar_tensor a = view(first, 2, (const size_t[]){1, 2}), b = view(second, 2, (const size_t[]){1, 2});
    const ar_layout at_a = rows_of(0, 1), at_b = rows_of(3, 1);
    OWNED(ar_dump_listener_destroy) ar_dump_listener *l = listener(NULL);
    cr_assert_ok(report(l, "x", 'f', 1, &a, &at_a));
    cr_assert_ok(report(l, "x", 'f', 1, &b, &at_b));
    const ar_dump_value v = value(l, 0);
    expect_values(&v, expected, 4);
    cr_assert_eq(v.layout->nbox, 2);
    cr_expect(v.layout->box[1].global[0] == 3 && v.layout->box[1].local[0] == 1 && v.layout->box[1].extent[0] == 1);
}

Test(dump_listener, a_report_without_room_for_its_boxes_or_of_another_shape_is_refused)
{
    float two[] = {1, 2};
    const ar_tensor t = view(two, 2, (const size_t[]){1, 2}), other = view(two, 2, (const size_t[]){2, 1});
    const ar_layout o = rows_of(0, 1);
    OWNED(ar_dump_listener_destroy) ar_dump_listener *l = listener(NULL);
    for (size_t i = 0; i < AR_MAX_BOXES; i++)
        cr_assert_ok(report(l, "x", 'f', 1, &t, &o));
    cr_expect_refused(report(l, "x", 'f', 1, &t, &o), AR_ERR_UNSUPPORTED, "x:fwd");
    ar_layout tall = o;
    tall.shape[1] = 1;
    tall.box[0].extent[0] = 2;
    tall.box[0].extent[1] = 1;
    cr_expect_eq(report(l, "x", 'f', 1, &other, &tall), AR_ERR_UNSUPPORTED);
    cr_expect_eq(ar_tensor_count(value(l, 0).local), 2 * AR_MAX_BOXES);
}

Test(dump_listener, of_a_share_only_what_its_boxes_have_is_kept)
{
    /* Elements 5 to 10 of [4, 3]: the end of row 1, row 2, the beginning of row 3. 99 is nobody's. */
    float local[] = {99, 99, 99, 99, 99, 5, 6, 7, 8, 9, 10, 99}, expected[] = {0, 0, 5, 6, 7, 8, 9, 10, 0};
    const ar_tensor t = view(local, 2, (const size_t[]){4, 3});
    const ar_layout o = {.ndim = 2,
                         .shape = {8, 3},
                         .nbox = 3,
                         .box = {{.global = {5, 2}, .local = {1, 2}, .extent = {1, 1}},
                                 {.global = {6, 0}, .local = {2, 0}, .extent = {1, 3}},
                                 {.global = {7, 0}, .local = {3, 0}, .extent = {1, 2}}},
                         .replicas = 1};
    OWNED(ar_dump_listener_destroy) ar_dump_listener *l = listener(NULL);
    cr_assert_ok(report(l, "w", 'g', 1, &t, &o));
    const ar_dump_value v = value(l, 0);
    expect_values(&v, expected, 9);
    cr_expect(v.layout->box[0].local[0] == 0 && v.layout->box[1].local[0] == 1 && v.layout->box[2].local[0] == 2);
    cr_expect_eq(v.layout->box[2].global[0], 7);
}

Test(dump_listener, transposed_views_are_kept_row_major)
{
    float stored[] = {1, 2, 3, 4, 5, 6}, expected[] = {1, 4, 2, 5, 3, 6};
    const ar_tensor t = view(stored, 2, (const size_t[]){2, 3}), turned = ari_tensor_transposed(&t);
    ar_layout o;
    cr_assert_ok(ari_layout_replicate(&o, 2, (const size_t[]){3, 2}, 0, 1));
    OWNED(ar_dump_listener_destroy) ar_dump_listener *l = listener(NULL);
    cr_assert_ok(report(l, "w", 'i', 1, &turned, &o));
    const ar_dump_value v = value(l, 0);
    expect_values(&v, expected, 6);
}

static bool is_x(void *user, const ar_tap_event *e)
{
    return strcmp(e->name, user) == 0;
}

Test(dump_listener, passes_copies_names_and_empty_parts_are_left_out_as_asked)
{
    char x[] = "x";
    const ar_dump_listener_options o = {.passes = "fg", .first_copies = true, .wants = is_x, .wants_user = x};
    float one = 1.0f;
    const ar_tensor t = view(&one, 1, (const size_t[]){1}), none = view(&one, 1, (const size_t[]){0});
    ar_layout first, second, empty;
    cr_assert_ok(ari_layout_replicate(&first, 1, (const size_t[]){1}, 0, 2));
    cr_assert_ok(ari_layout_replicate(&second, 1, (const size_t[]){1}, 1, 2));
    cr_assert_ok(ari_layout_shard_uneven(&empty, 1, (const size_t[]){1}, 0, 1, 2));
    ar_dump_listener *l = listener(&o);
    cr_assert_ok(report(l, "x", 'b', 1, &t, &first));
    cr_assert_ok(report(l, "y", 'f', 1, &t, &first));
    cr_assert_ok(report(l, "x", 'f', 1, &t, &second));
    cr_assert_ok(report(l, "x", 'f', 1, &none, &empty));
    cr_expect_eq(ari_dump_listener_count(l), 0);
    cr_assert_ok(report(l, "x", 'g', 1, &t, &first));
    cr_expect_eq(ari_dump_listener_count(l), 1);
    ari_dump_listener_clear(l);
    cr_expect_eq(ari_dump_listener_count(l), 0);
    cr_assert_ok(report(l, "x", 'g', 1, &t, &first));
    cr_expect_eq(ari_dump_listener_count(l), 1);
    ar_dump_listener_destroy(l);
    ar_dump_listener_destroy(NULL);
}

Test(dump_listener, what_it_cannot_keep_is_an_error_that_names_it)
{
    char longer[200];
    uint16_t half = 0;
    float one = 1.0f;
    ar_tensor t;
    ar_layout o;
    memset(longer, 'n', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    cr_assert_ok(ar_tensor_view(&t, AR_BF16, 1, (const size_t[]){1}, (ar_buf){&half}));
    cr_assert_ok(ari_layout_replicate(&o, 1, (const size_t[]){1}, 0, 1));
    OWNED(ar_dump_listener_destroy) ar_dump_listener *l = listener(NULL);
    cr_expect_eq(report(l, "x", 'f', 1, &t, &o), AR_ERR_DTYPE);
    cr_expect(strstr(ar_error_message(), "x:fwd") && strstr(ar_error_message(), "BF16"));
    const ar_tensor f = view(&one, 1, (const size_t[]){1});
    cr_expect_eq(report(l, longer, 'f', 1, &f, &o), AR_ERR_ARG);
    ar_dump_listener *none = NULL;
    cr_expect_eq(ar_dump_listener_create(&none, &(ar_dump_listener_options){.passes = "ifbgcnifbgcnifbgcn"}),
                 AR_ERR_ARG);
}

Test(dump_listener, tensor_parallel_ranks_are_neighbours_in_the_mesh)
{
    const ar_dump_place p = ar_dump_place_of(&(ar_parallel){.dp = 3, .tp = 2}, 5);
    cr_expect(p.rank == 5 && p.world == 6 && p.mesh.ndim == 2);
    cr_expect(strcmp(p.mesh.dim[0].name, "dp") == 0 && p.mesh.dim[0].size == 3 && p.coords[0] == 2);
    cr_expect(strcmp(p.mesh.dim[1].name, "tp") == 0 && p.mesh.dim[1].size == 2 && p.coords[1] == 1);
    cr_expect_eq(ar_dump_place_of(&(ar_parallel){.tp = 0}, 0).world, 1);
    const ar_dump_place c = ar_dump_place_of(&(ar_parallel){.dp = 2, .cp = 4, .tp = 2}, 13);
    cr_expect(c.world == 16 && c.mesh.ndim == 3 && strcmp(c.mesh.dim[1].name, "cp") == 0 && c.mesh.dim[1].size == 4);
    cr_expect(c.coords[0] == 1 && c.coords[1] == 2 && c.coords[2] == 1);
}
