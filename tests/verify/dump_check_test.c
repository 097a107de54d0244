/* SPDX-License-Identifier: Apache-2.0 */
/* The dump of a check: what the ranks' files hold, put together, is the reference in every bit; a fault is found
 * through the files as the check found it. */
#include <sys/statvfs.h>

#include "anyrank/dump.h"
#include "tests/support/folder.h"
#include "tests/verify/support.h"

TestSuite(dump_check, .init = folder_begin, .fini = folder_end);

static unsigned long bytes_left = 1ul << 40; /* on every disk, for this program */

int statvfs(const char *path, struct statvfs *s)
{
    struct stat there;
    *s = (struct statvfs){.f_frsize = 1, .f_blocks = bytes_left, .f_bavail = bytes_left};
    return stat(path, &there);
}

static ar_dump *open_dump(const char *path)
{
    ar_dump *d = NULL;
    cr_assert_eq(ar_dump_open(&d, path, NULL), AR_OK, "%s: %s", path, ar_error_message());
    return d;
}

static float *read_all(const ar_dump_tensor *t)
{
    float *values = malloc((t->count + 1) * sizeof *values);
    cr_assert_not_null(values);
    cr_assert_eq(ar_dump_read_f32(t, 0, t->count, values), AR_OK, "%s: %s", t->name, ar_error_message());
    return values;
}

/* Whether a tensor has the reference's shape and bits, in all its copies. */
static bool same_tensor(const ar_dump_tensor *a, const ar_dump_tensor *b)
{
    ar_dump_disagreement d;
    bool differ = false;
    if (a->ndim != b->ndim || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return false;
    cr_assert_eq(ar_dump_replicas(b, &differ, &d), AR_OK, "%s: %s", b->name, ar_error_message());
    OWNED(free) float *x = read_all(a), *y = read_all(b);
    const bool same = !differ && memcmp(x, y, a->count * sizeof *x) == 0;
    return same;
}

/* The first tensor in the reference's order that the ranks' folder does not have as it is; "" if there is none. */
static void first_difference(char name[200], const char *reference, const char *ranks)
{
    OWNED(ar_dump_close) ar_dump *a = open_dump(reference), *b = open_dump(ranks);
    size_t order = SIZE_MAX;
    name[0] = '\0';
    cr_expect_eq(ar_dump_count(a), ar_dump_count(b), "%s", ranks);
    for (size_t i = 0; i < ar_dump_count(a); i++) {
        const ar_dump_tensor *t = ar_dump_at(a, i), *other = ar_dump_find(b, t->name);
        cr_assert_lt(t->order, ar_dump_count(a), "%s has no place in the execution order", t->name);
        if ((other && same_tensor(t, other)) || t->order >= order)
            continue;
        order = t->order;
        snprintf(name, 200, "%s", t->name);
    }
}

/* A check of a model, to be dumped in the folder. */
static ar_check_options dumped(const char *json, const ar_parallel *p, size_t layouts, size_t batch, size_t seq)
{
    static char dump[192];
    write_file(folder, "config.json", json);
    snprintf(dump, sizeof dump, "%s", in_folder("dump"));
    ar_check_options o = check_layouts(folder, p, layouts, batch, seq);
    o.dump = dump;
    return o;
}

static ar_check_report *dump_of(const char *json, const ar_parallel *p, size_t layouts, size_t batch, int steps,
                                const char *fault)
{
    ar_check_options o = dumped(json, p, layouts, batch, 12);
    o.run.steps = (uint64_t)steps;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.clip = steps > 0 ? 1.0 : 0.0;
    o.run.fault = fault;
    return check_or_fail(&o);
}

static void expect_merged(const char *json, const ar_parallel *p, size_t layouts, size_t batch, int steps)
{
    char name[200];
    OWNED(ar_check_report_destroy) ar_check_report *r = dump_of(json, p, layouts, batch, steps, NULL);
    expect_same(r, "dumped");
    for (size_t i = 0; i < r->runs; i++) {
        first_difference(name, r->dump, r->run[i].dump);
        cr_expect_str_eq(name, "", "%s: %s", r->run[i].dump, name);
    }
    OWNED(ar_dump_close) ar_dump *d = open_dump(r->dump);
    cr_expect_eq(ar_dump_count(d), r->tensors);
}

Test(dump_check, ranks_without_samples_hold_weights_and_gradients_alone)
{
    static const ar_parallel p[] = {{.dp = 4, .tp = 2}, {.dp = 3, .zero = 1}};
    expect_merged(tiny_models[TINY_TIED], p, 2, 2, 1);
}

Test(dump_check, a_model_without_a_head_is_dumped_too)
{
    static const ar_parallel p[] = {{.tp = 3}, {.dp = 2}};
    expect_merged(tiny_models[TINY_STACK], p, 2, 2, 0);
}

static bool exists(const char *name)
{
    return access(in_folder(name), F_OK) == 0;
}

static void count_calls(void *user, double fraction, const char *what)
{
    (void)fraction, (void)what;
    ++*(int *)user;
}

Test(dump_check, a_full_disk_is_told_before_the_baseline)
{
    const ar_parallel p = {.tp = 2};
    int calls = 0;
    OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
    ar_check_options o = dumped(tiny_models[TINY_TIED], &p, 1, 1, 4);
    o.progress = count_calls;
    o.progress_user = &calls;
    bytes_left = 1000;
    cr_expect_refused(ar_check(&r, &o), AR_ERR_IO, "the dump takes about");
    cr_expect(calls == 0 && !exists("dump"), "%d", calls);
    bytes_left = 1ul << 30;
    cr_assert_ok(ar_check(&r, &o));
    ar_check_report_destroy(r);
    bytes_left = 1000; /* an earlier dump makes room for the next */
    cr_expect_ok(ar_check(&r, &o));
}

Test(dump_check, of_several_schedules_the_last_ones_ranks_are_there)
{
    static const ar_parallel p = {.tp = 2};
    char name[200];
    ar_check_options o = dumped(tiny_models[TINY_TIED], &p, 1, 1, 4);
    o.schedules = 2;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    cr_expect_eq(r->run[0].schedules, 2);
    first_difference(name, r->dump, r->run[0].dump);
    cr_expect_str_eq(name, "");
}

Test(dump_check, a_run_that_fails_leaves_no_ranks)
{
    static const ar_parallel p = {.tp = 2};
    OWNED(ar_check_report_destroy)
    ar_check_report *r = dump_of(tiny_models[TINY_TIED], &p, 1, 2, 0, "collective_size_mismatch");
    cr_expect_eq(r->result, AR_CHECK_ERROR);
    cr_expect_str_eq(r->run[0].dump, "");
    cr_expect(exists("dump/reference.safetensors") && !exists("dump/tp2"));
}
