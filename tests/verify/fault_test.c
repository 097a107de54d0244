/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of every fault against the table of what it must look like. */
#include "ref/core/fault_private.h"
#include "ref/models/parallel_private.h"
#include "tests/verify/fault_expected_experts.h"
#include "tests/verify/support.h"
#include "verify/check/check_run.h"
#include "verify/faults/fault_case.h"

/* What runs of one model, batch, steps, dropout and clipping are compared with: once, however many they are. */
typedef struct shared {
    char model[64];
    size_t batch, documents;
    uint64_t steps;
    ar_optimizer_kind optimizer;
    double dropout, clip;
    ar_router_losses router;
    ari_check_base base;
    char weights_hash[65], gradients_hash[65];
} shared;
enum { MOST_SHARED = 64 };

/* The text of all cases, and the small models, each in a folder of its own. */
typedef struct place {
    char folder[64], model[SMALL_MODELS][64], text[80];
    shared base[MOST_SHARED];
    int bases;
} place;

static void place_init(place *p)
{
    static const char edges[] = "\x80V@\xac\xc0";
    char text[2 * BATCH * SEQ + 1];
    p->bases = 0;
    for (size_t i = 0; i < sizeof text - 1; i++)
        text[i] = i % 5 == 2 ? edges[i / 5 % 5] : (char)(1 + i * i * 7 % 97);
    text[sizeof text - 1] = '\0';
    make_folder(p->folder);
    write_file(p->folder, "text", text);
    snprintf(p->text, sizeof p->text, "%s/text", p->folder);
    for (int m = 0; m < SMALL_MODELS; m++) {
        make_folder(p->model[m]);
        write_file(p->model[m], "config.json", small_models[m]);
    }
}

static void place_fini(place *p)
{
    for (int i = 0; i < p->bases; i++)
        ari_check_base_fini(&p->base[i].base);
    remove_folder(p->folder);
    for (int m = 0; m < SMALL_MODELS; m++)
        remove_folder(p->model[m]);
}

static ar_arch arch_of(const char *model)
{
    static const ar_arch of[] = {['l'] = AR_ARCH_LLAMA,    ['g'] = AR_ARCH_GPT2,      ['s'] = AR_ARCH_STACK,
                                 ['m'] = AR_ARCH_MIXTRAL,  ['q'] = AR_ARCH_QWEN2_MOE, ['r'] = AR_ARCH_GLM4_MOE,
                                 ['d'] = AR_ARCH_DEEPSEEK, ['f'] = AR_ARCH_LLAMA,     ['o'] = AR_ARCH_GPT_OSS};
    return of[(size_t)model[0]];
}

static ar_check_options options_of(const expected *e, const char *fault, const place *p)
{
    const char *model = e->model;
    for (int m = 0; m < SMALL_MODELS; m++)
        model = strcmp(model, small_names[m]) == 0 ? p->model[m] : model;
    ar_check_options o = check_layouts(model, &e->at.parallel, 1, e->at.batch ? e->at.batch : BATCH, SEQ);
    o.run.fault = fault;
    o.run.steps = (uint64_t)(e->at.steps ? e->at.steps : 1);
    o.run.optimizer = ar_optimizer_defaults(e->at.muon ? AR_OPTIMIZER_MUON : AR_OPTIMIZER_ADAMW);
    o.run.clip = ari_fault_is(e->fault, F(silent_truncation))
                     ? 0.0
                     : 1.0; /* of gradients that are no numbers there is no norm */
    o.run.dropout = e->at.dropout;
    o.run.loss.router = e->at.router;
    o.documents = e->at.documents;
    o.run.ddp = e->at.ddp;
    o.run.plan = plan_of(arch_of(e->model), e->at.order);
    o.run.sim.algorithm = e->algorithm;
    o.text = p->text;
    return o;
}

static bool same_losses(const ar_router_losses *a, const ar_router_losses *b)
{
    return a->balance == b->balance && a->balance_weight == b->balance_weight && a->z_loss == b->z_loss &&
           a->bias_update == b->bias_update;
}

static const shared *base_of(place *p, const ar_check_options *o)
{
    for (int i = 0; i < p->bases; i++) {
        const shared *b = &p->base[i];
        if (strcmp(b->model, o->run.model) == 0 && b->batch == o->run.batch && b->steps == o->run.steps &&
            b->dropout == o->run.dropout && b->clip == o->run.clip && b->optimizer == o->run.optimizer.kind &&
            b->documents == o->documents && same_losses(&b->router, &o->run.loss.router))
            return b;
    }
    char folder[512];
    ar_config c;
    cr_assert_lt(p->bases, MOST_SHARED);
    shared *b = &p->base[p->bases++];
    *b = (shared){.batch = o->run.batch,
                  .documents = o->documents,
                  .steps = o->run.steps,
                  .dropout = o->run.dropout,
                  .router = o->run.loss.router,
                  .clip = o->run.clip,
                  .optimizer = o->run.optimizer.kind};
    snprintf(b->model, sizeof b->model, "%s", o->run.model);
    cr_assert_ok(ar_model_path(folder, sizeof folder, o->run.model));
    cr_assert_ok(ar_config_load(&c, folder));
    cr_assert_ok(ari_check_base_init(&b->base, o, &c, folder));
    cr_assert_ok(ari_reference_hashes(b->weights_hash, b->gradients_hash, &b->base.ref, NULL));
    return b;
}

static ar_check_run run_case(const expected *e, const char *fault, place *p, const shared **base)
{
    const ar_check_options o = options_of(e, fault, p);
    ar_check_run run;
    *base = base_of(p, &o);
    cr_assert_ok(ari_check_base_run(&run, &(*base)->base, &o, &e->at.parallel));
    return run;
}

/* Of a tensor's name: "transformer.h.3.ln_2:bwd", "layers.0.attn.v:bwd", "grad_norm:clip". */
static const char *pass_of(const char *tensor)
{
    static const char *const passes[][2] = {{":fwd", "forward"}, {":bwd", "backward"}, {":grad", "backward"},
                                            {":new", "update"},  {":init", "init"},    {":clip", "clip"}};
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        if (strcmp(strchr(tensor, ':'), passes[i][0]) == 0)
            return passes[i][1];
    }
    return "?";
}

static int layer_of(const char *tensor)
{
    const size_t first = strcspn(tensor, "0123456789");
    return tensor[first] ? (int)strtol(tensor + first, NULL, 10) : -1;
}

static void expect_caught(const expected *e, place *p)
{
    const shared *base = NULL;
    SCOPED(ari_check_run_fini) ar_check_run made = run_case(e, e->fault, p, &base);
    const ar_check_run *run = &made;
    const ar_first_difference *f = &run->first;
    char what[240], layout[160];
    ari_parallel_text(layout, sizeof layout, &e->at.parallel);
    snprintf(what, sizeof what, "%s, %s %s", e->fault, e->model, layout);
    cr_expect(run->result == AR_CHECK_DIFFERENT && run->has_difference && run->tensors_different > 0 && !run->error,
              "%s: %s", what, run->error ? run->error : "");
    cr_expect_str_eq(f->tensor, e->tensor, "%s: %s, expected %s", what, f->tensor, e->tensor);
    cr_expect_str_eq(f->pass, pass_of(e->tensor), "%s: %s", what, f->pass);
    cr_expect(f->layer == layer_of(e->tensor) && f->step == (e->at.steps ? e->at.steps : 1), "%s: layer %d, not %d",
              what, f->layer, layer_of(e->tensor));
    cr_expect_eq(f->rank, e->rank, "%s: rank %d, expected %d", what, f->rank, e->rank);
    const bool loss_alone = run->tensors_different == 1 && strcmp(f->tensor, "loss:fwd") == 0;
    /* Gradients that are twice as large have the same bits when they are clipped; those of a wrong norm were right. And
     * of copies the first one's are hashed. */
    cr_expect(strcmp(run->weights_hash, base->weights_hash) != 0 ||
                  strcmp(run->gradients_hash, base->gradients_hash) != 0 || f->rank > 0 || loss_alone,
              "%s: the same hashes", what);
}

/* All values are right. */
static void expect_bytes(const expected_bytes *e, place *p)
{
    const expected as = {.fault = e->fault, .model = e->model, .at = e->at};
    const char *name = e->fault;
    const shared *base = NULL;
    SCOPED(ari_check_run_fini) ar_check_run run = run_case(&as, e->fault, p, &base);
    cr_expect_eq(run.result, AR_CHECK_MISPREDICTED, "%s: result %d", name, (int)run.result);
    cr_expect(run.tensors_different == 0 && !run.has_difference, "%s: %s", name, first_of(&run));
    cr_expect_str_eq(run.weights_hash, base->weights_hash);
    cr_expect_gt(run.bytes_counted, run.bytes_predicted, "%s", name);
    cr_expect(run.call_cause && strcmp(run.call_cause, e->cause) == 0, "%s: %s", name, run.call_cause);
    cr_expect(strstr(run.call_difference, e->says), "%s: no \"%s\" in \"%s\"", name, e->says, run.call_difference);
    ari_check_run_fini(&run);
    run = run_case(&as, NULL, p, &base);
    cr_expect(run.result == AR_CHECK_SAME && !run.call_cause && !run.call_difference[0], "%s: %s", name,
              run.call_difference);
}

/* The run ends in the mismatch, on all ranks, with a table of all of them. */
static void expect_ended(const expected_end *e, place *p)
{
    const expected as = {.fault = e->fault, .model = e->model, .at = e->at, .algorithm = e->algorithm};
    const int world = ar_parallel_world(&e->at.parallel);
    const char *name = e->fault;
    const shared *base = NULL;
    SCOPED(ari_check_run_fini) ar_check_run made = run_case(&as, e->fault, p, &base);
    const ar_check_run *run = &made;
    cr_expect_eq(run->result, AR_CHECK_ERROR, "%s: result %d", name, (int)run->result);
    cr_assert(run->error && run->reports, "%s: no error, or no reports", name);
    for (size_t i = 0; i < sizeof e->says / sizeof *e->says; i++)
        cr_expect(strstr(run->error, e->says[i]), "%s: no \"%s\" in:\n%s", name, e->says[i], run->error);
    cr_expect(strstr(run->error, "last finished"), "%s: no table in:\n%s", name, run->error);
    for (int k = 0; k < world; k++) {
        const ar_sim_rank_report *rank = &run->reports[k];
        const bool meets = (e->meet >> k & 1) != 0;
        cr_expect_eq(rank->rank, k);
        const char *status = meets ? "AR_ERR_MISMATCH" : (e->left >> k & 1) != 0 ? "AR_OK" : "AR_ERR_ABORTED";
        cr_expect_str_eq(rank->status, status, "%s: rank %d", name, k);
        cr_expect(rank->current[0] && rank->last[0], "%s: rank %d: where was it?", name, k);
    }
}

static bool same_run(const expected *a, const expected *b)
{
    char layout[2][160];
    ari_parallel_text(layout[0], sizeof layout[0], &a->at.parallel);
    ari_parallel_text(layout[1], sizeof layout[1], &b->at.parallel);
    return strcmp(a->model, b->model) == 0 && strcmp(layout[0], layout[1]) == 0 && a->at.order == b->at.order &&
           a->algorithm == b->algorithm && a->at.batch == b->at.batch && a->at.documents == b->at.documents &&
           a->at.dropout == b->at.dropout && same_losses(&a->at.router, &b->at.router) && a->at.steps == b->at.steps &&
           a->at.ddp.bucket_bytes == b->at.ddp.bucket_bytes && a->at.ddp.mode == b->at.ddp.mode &&
           a->at.ddp.find_unused == b->at.ddp.find_unused;
}

/* Other layouts and models show a fault that has been shown: every second of them in turn is enough. */
static bool left_out(const expected *table, size_t i)
{
    return small_only() ? i % 6 != 1
                        : (table == elsewhere || table == staged_elsewhere || table == experts_elsewhere) &&
                              i % (size_t)by_scale(1, 6, 1) != 0;
}

static void expect_clean(const expected *e, place *p)
{
    const shared *base = NULL;
    SCOPED(ari_check_run_fini) ar_check_run run = run_case(e, NULL, p, &base);
    char layout[160];
    ari_parallel_text(layout, sizeof layout, &e->at.parallel);
    cr_expect_eq(run.result, AR_CHECK_SAME, "%s, %s: %s", e->model, layout, first_of(&run));
    cr_expect_str_eq(run.weights_hash, base->weights_hash);
    cr_expect_str_eq(run.gradients_hash, base->gradients_hash);
}

/* Every fault of the table, and each distinct layout once without one. */
static void expect_all(const expected *table, size_t n, place *p)
{
    for (size_t i = 0; i < n; i++) {
        size_t before = 0;
        while (before < i && !same_run(&table[before], &table[i]))
            before++;
        if (left_out(table, i))
            continue;
        expect_caught(&table[i], p);
        if (before == i)
            expect_clean(&table[i], p);
    }
}

Test(fault, tables_have_every_fault)
{
#define COUNT_ROWS(n, table, count)      \
    for (size_t i = 0; i < (count); i++) \
        (n) += ari_fault_is((table)[i].fault, *fault);
    for (const char *const *fault = ari_fault_names; *fault; fault++) {
        int rows = 0, others = 0;
        COUNT_ROWS(rows, once, ONCE)
        COUNT_ROWS(rows, staged_once, STAGED_ONCE)
        COUNT_ROWS(rows, experts_once, EXPERTS_ONCE)
        COUNT_ROWS(others, ends, ENDS)
        COUNT_ROWS(others, modules, MODULES)
        COUNT_ROWS(others, bytes_alone, BYTES_ALONE)
        cr_expect(rows == 1 ? others == 0 : rows == 0 && others > 0, "%s", *fault);
    }
}

Test(fault, collectives_that_do_not_match_end_the_run_on_all_ranks)
{
    SCOPED(place_fini) place p;
    place_init(&p);
    for (size_t i = 0; i < ENDS; i += small_only() ? 3 : 1) {
        const expected as = {.model = ends[i].model, .at = ends[i].at, .algorithm = ends[i].algorithm};
        expect_ended(&ends[i], &p);
        expect_clean(&as, &p);
    }
}

#define CAUGHT(name, table, count)    \
    Test(fault, name)                 \
    {                                 \
        SCOPED(place_fini) place p;   \
        place_init(&p);               \
        expect_all(table, count, &p); \
    }
CAUGHT(each_is_caught_where_it_arises_and_without_it_the_bits_are_the_same, once, ONCE)
CAUGHT(each_is_caught_in_other_layouts_and_models, elsewhere, ELSEWHERE)
CAUGHT(those_of_stages_are_caught_where_they_arise, staged_once, STAGED_ONCE)
CAUGHT(those_of_stages_are_caught_in_other_layouts_and_models, staged_elsewhere, STAGED_ELSEWHERE)
CAUGHT(those_of_experts_are_caught_where_they_arise, experts_once, EXPERTS_ONCE)
CAUGHT(those_of_experts_are_caught_in_other_layouts, experts_elsewhere, EXPERTS_ELSEWHERE)

Test(fault, those_that_change_no_value_are_named_by_their_collective)
{
    SCOPED(place_fini) place p;
    place_init(&p);
    for (size_t i = 0; i < BYTES_ALONE; i++)
        expect_bytes(&bytes_alone[i], &p);
}

Test(fault, those_that_no_transformer_shows_are_caught_in_a_module)
{
    for (size_t i = 0; i < MODULES; i++) {
        const ari_fault_case c = ari_fault_case_of(modules[i].fault);
        const char *name = modules[i].fault;
        for (int with = 0; with < 2; with++) {
            OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
            const char *fault = with ? c.fault : NULL;
            cr_assert(c.module && ari_fault_is(c.fault, modules[i].fault), "%s has another case", name);
            cr_assert_ok(ari_fault_module_check(&r, &c, fault, &(ari_fault_bases){.threads = 1}));
            const ar_check_run *run = &r->run[0];
            cr_expect_eq(r->result, with ? AR_CHECK_DIFFERENT : AR_CHECK_SAME, "%s: %s", name, first_of(run));
            cr_expect(!with || strcmp(run->first.tensor, modules[i].tensor) == 0, "%s: %s", name, run->first.tensor);
        }
    }
}

/* A mistake in what ranks do together cannot matter to a rank alone; those of one rank's arithmetic do. */
Test(fault, those_of_communication_change_nothing_on_one_rank)
{
    static const char *const of_one_rank[] = {
        F(weight_grad_leading_dims), F(bias_grad_wrong_axis), F(norm_backward_missing),
        F(embedding_tied_once),      F(tied_weight_untied),   F(norm_padded_lanes),
        F(bias_added_twice),         F(norm_fp16_store),      F(unordered_param_grad)};
    enum { LOCAL = sizeof of_one_rank / sizeof *of_one_rank };
    const int one = 1;
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_GPT2]);
    for (size_t f = 0; f < ari_fault_count; f += (size_t)by_scale(5, 3, 1)) {
        const char *fault = ari_fault_names[f];
        const bool local = ari_word_of(fault, of_one_rank, LOCAL) < LOCAL;
        ar_check_options o = check_of(folder, &one, 1, 2, 12);
        o.run.fault = fault;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        cr_expect_eq(r->result, local ? AR_CHECK_DIFFERENT : AR_CHECK_SAME, "%s: first %s", fault,
                     first_of(&r->run[0]));
    }
}
