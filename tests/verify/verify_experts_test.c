/* SPDX-License-Identifier: Apache-2.0 */
/* Experts one by one in a dump and together in another, as transformers has them from version 5 on: the same tensors. */
#include "anyrank/verify.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/noise.h"
#include "tests/support/test.h"
#include "tests/verify/verify_support.h"

enum { E = 3, F = 4, H = 5, B = 2, S = 3, MOST = 2 * (3 * E + 4) };

/* A layer's experts: those of an expert are 3*e + 0, 1, 2. */
typedef struct layer {
    float value[3 * E][F * H], router[E * H], given[B * S * H];
} layer;

static layer layer_new(void)
{
    layer l;
    for (size_t i = 0; i < 3 * E; i++) {
        for (size_t k = 0; k < F * H; k++)
            l.value[i][k] = noise(i * F * H + k);
    }
    for (size_t k = 0; k < E * H; k++)
        l.router[k] = noise(1000 + k);
    for (size_t k = 0; k < B * S * H; k++)
        l.given[k] = noise(2000 + k);
    return l;
}

static const char *const leaves[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};

/* Of each pass of both: the experts one by one, the router and what it is given. */
static void write_apart(const char *path, const layer *l, bool mixtral, const char *suffix)
{
    static char name[MOST][100];
    const char *mlp = mixtral ? "model.layers.0.block_sparse_moe" : "model.layers.0.mlp";
    ar_st_tensor t[MOST];
    size_t n = 0;
    for (size_t i = 0; i < 3 * E; i++, n++) {
        snprintf(name[n], sizeof name[n], "%s.experts.%zu.%s.weight%s", mlp, i / 3, leaves[mixtral][i % 3], suffix);
        t[n] = (ar_st_tensor){.name = name[n], .dtype = AR_F32, .ndim = 2, .data = l->value[i]};
        t[n].shape[0] = i % 3 == 2 ? H : F;
        t[n].shape[1] = i % 3 == 2 ? F : H;
    }
    snprintf(name[n], sizeof name[n], "%s.gate.weight%s", mlp, suffix);
    t[n] = (ar_st_tensor){.name = name[n], .dtype = AR_F32, .ndim = 2, .shape = {E, H}, .data = l->router};
    snprintf(name[++n], sizeof name[n], "%s.gate:bwd", mlp);
    t[n] = (ar_st_tensor){.name = name[n], .dtype = AR_F32, .ndim = 3, .shape = {B, S, H}, .data = l->given};
    cr_assert_ok(ari_st_write(path, t, n + 1, NULL, 0));
}

static void write_together(const char *path, const layer *l, const char *suffix)
{
    static float both[E * 2 * F * H], down[E * H * F];
    char name[3][100];
    for (size_t e = 0; e < E; e++) {
        memcpy(both + 2 * e * F * H, l->value[3 * e], sizeof l->value[0]);
        memcpy(both + (2 * e + 1) * F * H, l->value[3 * e + 1], sizeof l->value[0]);
        memcpy(down + e * F * H, l->value[3 * e + 2], sizeof l->value[0]);
    }
    snprintf(name[0], sizeof name[0], "model.layers.0.mlp.experts.gate_up_proj%s", suffix);
    snprintf(name[1], sizeof name[1], "model.layers.0.mlp.experts.down_proj%s", suffix);
    snprintf(name[2], sizeof name[2], "model.layers.0.mlp.gate.weight%s", suffix);
    const ar_st_tensor t[] = {
        {.name = name[0], .dtype = AR_F32, .ndim = 3, .shape = {E, 2 * F, H}, .data = both},
        {.name = name[1], .dtype = AR_F32, .ndim = 3, .shape = {E, H, F}, .data = down},
        {.name = name[2], .dtype = AR_F32, .ndim = 2, .shape = {E, H}, .data = l->router},
        {.name = "model.layers.0.mlp.gate:bwd", .dtype = AR_F32, .ndim = 2, .shape = {B * S, H}, .data = l->given}};
    cr_assert_ok(ari_st_write(path, t, sizeof t / sizeof *t, NULL, 0));
}

static ar_verify_report *compare(const char *reference, const char *other)
{
    ar_verify_report *r = NULL;
    cr_assert_ok(ar_verify(&r, &(ar_verify_options){.reference = reference, .other = other}));
    return r;
}

Test(verify_experts, together_or_one_by_one_they_are_the_same)
{
    static const char *const suffixes[] = {"", ":grad", ":new@2"};
    SCOPED(two_files_end) const two_files f = two_files_make();
    const layer l = layer_new();
    for (int i = 0; i < 12; i++) {
        const char *apart = i % 2 ? f.reference : f.other, *together = i % 2 ? f.other : f.reference;
        write_apart(apart, &l, i / 2 % 2, suffixes[i / 4]);
        write_together(together, &l, i >= 8 ? suffixes[2] : i >= 4 ? suffixes[1] : "");
        OWNED(ar_verify_report_destroy) ar_verify_report *r = compare(f.reference, f.other);
        cr_expect(r->same && r->rows == 3 * E + 2, "%d: %zu tensors, the first %s", i, r->rows, r->row[0].name);
    }
}

/* Of a file of gradients, whose names say no pass. */
Test(verify_experts, gradients_of_a_file_and_of_a_dump_are_the_same)
{
    SCOPED(two_files_end) const two_files f = two_files_make();
    const layer l = layer_new();
    write_apart(f.reference, &l, true, "");
    write_together(f.other, &l, "");
    OWNED(ar_verify_report_destroy) ar_verify_report *r = compare(f.reference, f.other);
    cr_expect(r->same);
}

Test(verify_experts, one_wrong_bit_is_found_in_its_place)
{
    SCOPED(two_files_end) const two_files f = two_files_make();
    layer l = layer_new();
    for (size_t i = 0; i < 3 * E; i++) {
        char name[100];
        write_apart(f.reference, &l, false, ":grad");
        const float was = l.value[i][7];
        l.value[i][7] = nextafterf(was, 9.0f);
        write_together(f.other, &l, ":grad");
        l.value[i][7] = was;
        OWNED(ar_verify_report_destroy) ar_verify_report *r = compare(f.reference, f.other);
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.%zu.%s.weight:grad", i / 3, leaves[0][i % 3]);
        cr_assert(!r->same && r->first < r->rows);
        const ar_verify_row *row = &r->row[r->first];
        cr_expect_str_eq(row->name, name);
        cr_expect(row->elements_different == 1 && row->first.index == 7, "%s: %zu, at %zu", name,
                  row->elements_different, row->first.index);
    }
}

/* Fewer experts than the other dump has, or of another width: nothing is taken apart, and names stand alone. */
Test(verify_experts, experts_that_are_others_stay_together)
{
    SCOPED(two_files_end) const two_files f = two_files_make();
    const layer l = layer_new();
    const ar_st_tensor t[] = {{.name = "model.layers.0.mlp.experts.gate_up_proj",
                               .dtype = AR_F32,
                               .ndim = 3,
                               .shape = {E - 1, 2 * F, H},
                               .data = l.value}};
    write_apart(f.reference, &l, false, "");
    cr_assert_ok(ari_st_write(f.other, t, 1, NULL, 0));
    OWNED(ar_verify_report_destroy) ar_verify_report *r = compare(f.reference, f.other);
    cr_expect(!r->same && r->rows == 3 * E + 3);
}
