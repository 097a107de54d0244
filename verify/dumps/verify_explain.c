/* SPDX-License-Identifier: Apache-2.0 */
/* Explains the rows of a comparison that differ: shapes, the first in execution order, then the worst; and asks the
 * tensors around the first where its own trace does not say enough. */
#include <stdio.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "verify/dumps/report.h"
#include "verify/dumps/verify_impl.h"

/* The number of tensors explained, and the number of elements after which only the first and the worst are still
 * chosen: an explanation reads its tensor many times. More threads would take more memory. */
enum { EXPLAINED = 8, EXPLAINED_ELEMENTS = 1 << 22, EXPLAINING_THREADS = 2 };

/* Context that is the same for every tensor. */
static ari_explain_case known_of(const ari_verifying *v)
{
    const ar_verify_options *o = v->o;
    const int given[ARI_LAYOUT_AXES] = {[ARI_LAYOUT_DP] = o->dp, [ARI_LAYOUT_CP] = o->cp, [ARI_LAYOUT_TP] = o->tp};
    ari_ranks mesh = {{0}};
    ari_mesh_of(&mesh, v->dump[1]);
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        if (given[i] > 0)
            ari_ranks_set(&mesh, ari_layout_axes[i].axes, given[i]);
    }
    return (ari_explain_case){
        .reference = v->dump[0], .other = v->dump[1], .mesh = mesh, .heads = o->heads, .kv_heads = o->kv_heads};
}

static ar_status explain_row(ari_verifying *v, size_t i, const ari_explain_case *known)
{
    const ar_verify_options *o = v->o;
    const ari_sides *s = &v->sides[i];
    ar_verify_row *row = &v->report->row[i];
    if (row->pattern[0] || row->hint[0] || ari_is_one_sided(row) || row->state == AR_VERIFY_DTYPE)
        return AR_OK;
    if (row->state == AR_VERIFY_SHAPE || s->of[0]->count != s->of[1]->count) /* also where copies differ besides */
        return ari_verify_shape(row, v->dump[1], s->of[0], s->of[1]);
    if (row->state == AR_VERIFY_REPLICAS && row->in_reference) {
        snprintf(row->hint, sizeof row->hint,
                 "the reference's own copies differ from each other: which of them is right, it does not say");
        return AR_OK;
    }
    ari_explain_case c = *known;
    c.doubt = s->pair ? s->pair->doubt : NULL;
    if (s->pair && s->pair->rule.rule == AR_VERIFY_BITS) {
        c.atol = c.rtol = 0.0;
    } else if (o->rule == AR_VERIFY_TOLERANCE) {
        c.atol = o->atol;
        c.rtol = o->rtol;
    } else if (o->rule == AR_VERIFY_SENSITIVITY && s->pair) {
        c.atol = s->pair->rule.atol;
    } else if (o->rule != AR_VERIFY_BITS) {
        c.atol = row->allowed;
    }
    const ar_status st = ari_explain(row, s->of[0], s->of[1], &c);
    return st == AR_ERR_DTYPE ? AR_OK : st; /* values that are no fp32 have no pattern; they differ all the same */
}

typedef struct explaining {
    ari_verifying *v;
    const ari_explain_case *known;
    size_t *row; /* [n] that are explained */
    size_t n, most, elements;
} explaining;

static void choose_row(explaining *e, size_t i)
{
    const size_t n = e->v->report->row[i].elements;
    for (size_t k = 0; k < e->n; k++) {
        if (e->row[k] == i)
            return;
    }
    e->row[e->n++] = i;
    e->elements += n <= ARI_EXPLAIN_ELEMENTS ? n : 2 * ARI_EXPLAIN_SAMPLED;
}

static ar_status explain_task(void *user, size_t task, int worker)
{
    const explaining *e = user;
    (void)worker;
    return explain_row(e->v, e->row[task], e->known);
}

static void tell_explained(void *user, size_t done)
{
    const explaining *e = user;
    ari_verify_progress(e->v, 0.95 + 0.05 * (double)done / (double)e->n, "explaining");
}

/* A tensor of the same dump and pass that both dumps have, with the same values. */
static ar_status find_twin(const ar_dump_tensor **found, const ari_verifying *v, const ar_verify_row *row)
{
    const int side = row->state == AR_VERIFY_UNEXPECTED;
    const ar_dump_tensor *own = v->sides[row - v->report->row].of[side];
    *found = NULL;
    for (size_t i = 0; i < v->pairs && !*found; i++) {
        const ar_dump_tensor *t = v->pair[i].side[side];
        bool same = v->pair[i].row->pass == row->pass && t->count >= 8 && ari_is_readable(own) && ari_is_readable(t);
        bool varies = false;
        if (same)
            AR_TRY(ari_are_equal(&same, &varies, own, t));
        *found = same && varies ? t : NULL;
    }
    return AR_OK;
}

/* A tensor that one dump lacks: a weight that is tied on one side, a parameter without gradient. */
static ar_status explain_one_sided(ari_verifying *v, size_t i)
{
    ar_verify_report *r = v->report;
    ar_verify_row *row = &r->row[i];
    bool others = false, backward = false;
    const ar_dump_tensor *twin = NULL;
    if (!ari_is_one_sided(row))
        return AR_OK;
    if (row->pass == 'i' || row->pass == 'w')
        AR_TRY(find_twin(&twin, v, row));
    for (size_t k = 0; k < r->rows; k++) {
        others = others || (r->row[k].pass == 'g' && !ari_is_one_sided(&r->row[k]));
        backward = backward || (r->row[k].pass == 'b' && !ari_is_one_sided(&r->row[k]));
    }
    if (twin) {
        row->evidence = (ar_evidence){.cause = "tied_weight"};
        snprintf(row->hint, sizeof row->hint,
                 "a tied weight: only %s has this tensor, with the values of %s: not tied there; both "
                 "uses belong to one parameter and one gradient",
                 row->state == AR_VERIFY_UNEXPECTED ? "the other" : "the reference", twin->name);
    } else if (row->pass == 'g' && row->state == AR_VERIFY_MISSING && (others || backward)) {
        row->evidence = (ar_evidence){.cause = "no_gradient"};
        snprintf(
            row->hint, sizeof row->hint, "the other run has no gradient of %s",
            others
                ? "this parameter, and has others: frozen (requires_grad), not used, or detached"
                : "any parameter, and went backward: not reduced yet (FSDP2's set_requires_gradient_sync(False) keeps "
                  "them elsewhere), set to None before the dump was written, or frozen");
    } else if (row->lost_gradient) {
        snprintf(row->hint, sizeof row->hint,
                 "only the other run has a gradient of this parameter, which both have: in the reference it is frozen, "
                 "not used, or detached");
    }
    return AR_OK;
}

/* FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel) without use_orig_params has one vector for all parameters of
 * a wrapped module, padded and cut over the ranks: no tensor of a model. */
static bool is_flat_parameter(const char *name)
{
    const size_t n = ari_order_of(name, NULL).stem;
    size_t start = n;
    while (start > 0 && name[start - 1] != '.')
        start--;
    const char *last = name + start;
    const size_t length = n - start;
    return (length == 11 && memcmp(last, "_flat_param", 11) == 0) ||
           (length == 10 && memcmp(last, "flat_param", 10) == 0);
}

static void explain_flat_parameters(ar_verify_report *r)
{
    for (size_t i = 0; i < r->rows; i++)
        if (ari_is_one_sided(&r->row[i]) && is_flat_parameter(r->row[i].name))
            snprintf(
                r->row[i].hint, sizeof r->row[i].hint,
                "FSDP1's flat parameter: all parameters of a wrapped module in one vector, padded and cut over the "
                "ranks, instead of tensors that have names; wrap with fully_shard (FSDP2), or dump what "
                "FullyShardedDataParallel.summon_full_params gives");
}

static bool is_unknown(const ar_verify_row *row)
{
    return row->evidence.cause && strcmp(row->evidence.cause, "unknown") == 0;
}

/* A module whose gradient is the reference's, and is not zero. */
static ar_status find_right_gradient(const ar_verify_row **found, const ari_verifying *v, int step)
{
    *found = NULL;
    for (const ari_pair *p = v->pair; p < v->pair + v->pairs && !*found; p++) {
        bool same, varies = false;
        if (p->row->pass == 'b' && p->row->step == step && p->row->state == AR_VERIFY_SAME)
            AR_TRY(ari_are_equal(&same, &varies, p->side[0], p->side[0]));
        *found = varies ? p->row : NULL;
    }
    return AR_OK;
}

/* The loss's own gradient may tell what the loss alone does not: another divisor is a factor of it, one for all or one
 * for each rank's samples. And the gradient of a module's input may tell what a parameter's does not: both are made
 * from the output's gradient, where a part of a sum is harder to see in a sum over tokens. */
static ar_status ask_gradient(ari_verifying *v, const ari_explain_case *known)
{
    static const char *const divisors[] = {"mean_of_means",    "sum_of_local_means", "sum_for_mean",
                                           "reduced_again",    "averaged_again",     "divisor_of_other_count",
                                           "wrong_scalar",     "counted_twice",      "sum_over_tokens",
                                           "mean_over_tokens", "samples_weighted"};
    static const char *const vague[] = {"unknown", "low_precision", "rounding", "part_of_one_rank", "later_tokens"};
    ar_verify_report *r = v->report;
    ar_verify_row *first = &r->row[r->first], back = {.name = NULL};
    const bool loss = first->pass == 'f' && first->elements == 1;
    const char *dot = strrchr(first->name, '.');
    const size_t n = !loss && dot ? (size_t)(dot - first->name) : 0;
    if (!is_unknown(first) || (!loss && (first->pass != 'g' || n == 0)))
        return AR_OK;
    for (size_t i = r->first; i < r->rows && !back.name; i++) {
        const ar_verify_row *row = &r->row[i];
        if (row->state == AR_VERIFY_SAME || row->pass != 'b' || strncmp(row->name, first->name, n) != 0 ||
            (n > 0 && (row->name[n] != ':' || row->step != first->step)))
            continue;
        AR_TRY(explain_row(v, i, known));
        back = *row;
    }
    const char *cause = back.evidence.cause;
    if (!cause || !(loss ? ARI_IS_AMONG(cause, divisors) : !ARI_IS_AMONG(cause, vague)))
        return AR_OK;
    const ar_verify_row *right = NULL;
    if (loss)
        AR_TRY(find_right_gradient(&right, v, first->step));
    first->evidence = back.evidence;
    snprintf(first->hint, sizeof first->hint, "%s %.100s says: %.270s%s%.60s",
             right ? "one term of the loss alone, as its gradient" : "its gradient", back.name, back.hint,
             right ? "; right is another term's, " : "", right ? right->name : "");
    return AR_OK;
}

/* True if a row is right, and off by about as much as the first that is not: a value of its step, or a weight that it
 * was made with, of no small gradient. */
static bool is_off_as_much(const ar_verify_row *row, const ar_verify_row *first)
{
    const bool update = row->pass == 'n' && row->step + 1 == first->step && row->elements_doubted == 0;
    return (update || (row->pass == 'f' && row->step == first->step)) && row->bits_different > 0 &&
           row->rms * first->rms_reference > 0.3 * first->rms * row->rms_reference;
}

/* If a rule allows much, as for a 16-bit run, a fault may exceed the allowance only further down: the first tensor that
 * is off by about as much, in proportion, is examined for a fault of its own module, or of the optimizer. */
static ar_status ask_what_is_before(ari_verifying *v, const ari_explain_case *known)
{
    static const char *const of_modules[] = {"residual",     "residual_scale", "embedding_scale",    "other_input",
                                             "norm_missing", "norm_mean",      "norm_statistic",     "norm_epsilon",
                                             "gain_offset",  "softmax_scale",  "activation_function"};
    static const char *const of_updates[] = {"weight_decay", "decay_in_gradient", "other_learning_rate",
                                             "other_betas",  "adam_eps",          "clip_factor"};
    ar_verify_report *r = v->report;
    ar_verify_row *first = &r->row[r->first];
    size_t i = 0;
    static const char *const unsure[] = {"unknown", "low_precision"};
    const bool asked = ARI_IS_AMONG(first->evidence.cause, unsure);
    if (first->pass != 'f' || first->elements < 2 || (!asked && first->step < 2))
        return AR_OK;
    while (i < r->first && !((asked || r->row[i].pass == 'n') && is_off_as_much(&r->row[i], first)))
        i++;
    if (i == r->first)
        return AR_OK;
    ar_verify_row own = r->row[i]; /* the row itself stays one that is the same */
    const bool update = own.pass == 'n';
    for (size_t k = 0; k < v->pairs && update; k++)
        v->pair[k].rule.rule = v->pair[k].row == &r->row[i] ? AR_VERIFY_BITS : v->pair[k].rule.rule;
    AR_TRY(explain_row(v, i, known));
    const ar_evidence evidence = r->row[i].evidence;
    if (update ? ARI_IS_AMONG(evidence.cause, of_updates) : ARI_IS_AMONG(evidence.cause, of_modules)) {
        first->evidence = evidence;
        snprintf(first->hint, sizeof first->hint, "%.100s before it is off as much, within what is allowed: %.350s",
                 own.name, r->row[i].hint);
    }
    r->row[i] = own;
    return AR_OK;
}

/* Of copies that differ from each other the one furthest off decides, and by a tolerance they differ by more than it. */
static bool is_explained_by_rounding(const ar_verify_report *r, const ar_verify_row *row)
{
    return row->evidence.cause && strcmp(row->evidence.cause, "rounding") == 0 &&
           (!row->copies_differ || (r->rule == AR_VERIFY_BITS && ari_is_by_rounding(row)));
}

/* Rounding that leaves the rule a little is no mistake: the first in execution order that is more than that, where any
 * is found soon. */
static ar_status pass_rounding(ari_verifying *v, const ari_explain_case *known)
{
    enum { MOST_ASKED = 32 };
    ar_verify_report *r = v->report;
    size_t asked = 0, passed = 0;
    for (size_t i = r->first; i < r->rows && asked < MOST_ASKED; i++) {
        const ar_verify_row *row = &r->row[i];
        if (row->state == AR_VERIFY_SAME || ari_is_one_sided(row))
            continue;
        const bool small = i > r->first && row->state == AR_VERIFY_DIFFERENT && ari_is_by_rounding(row);
        if (!small) {
            asked += i > r->first;
            AR_TRY(explain_row(v, i, known));
        }
        if (!small && !is_explained_by_rounding(r, row)) {
            r->rounded = passed;
            r->first = i;
            return AR_OK;
        }
        passed++;
    }
    return AR_OK;
}

/* True if a row belongs to a step's backward pass. */
static bool is_backward(const ar_verify_row *row, int step)
{
    return (row->pass == 'b' || row->pass == 'g') && row->step == step;
}

/* Values that follow from gradients, such as a norm or an update, are not first if gradients of the reference are
 * missing. */
static void begin_with_missing(ar_verify_report *r)
{
    const ar_verify_row *first = &r->row[r->first];
    size_t lost = SIZE_MAX;
    bool others = false;
    if (!first->pass || !strchr("cnmv", first->pass))
        return;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        if (!is_backward(row, first->step))
            continue;
        if (row->state == AR_VERIFY_UNEXPECTED) /* other names */
            return;
        others = others || row->state != AR_VERIFY_MISSING;
        lost = row->state == AR_VERIFY_MISSING && row->pass == 'g' && i < lost ? i : lost;
    }
    if (others && lost < r->first)
        r->first = lost;
}

/* A branch that is detached has no backward pass, and that the other dump lacks its tensors says so; a partial sum
 * before it, or gradients that DDP then waits for and does not reduce, follow from that. */
static void ask_missing_backward(ar_verify_report *r)
{
    static const char *const follows[] = {"missing_average", "missing_all_reduce", "partial_sum", "half_is_missing",
                                          "other_input",     "residual",           "unknown"};
    ar_verify_row *first = &r->row[r->first];
    const ar_verify_row *lost = NULL;
    size_t n = 0, there = 0;
    char own[sizeof first->hint];
    if (!is_backward(first, first->step) || ari_is_one_sided(first) || !first->evidence.cause)
        return;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        if (!is_backward(row, first->step))
            continue;
        if (row->state == AR_VERIFY_UNEXPECTED) /* other names */
            return;
        there += row->pass == 'b' && row->state != AR_VERIFY_MISSING;
        n += row->state == AR_VERIFY_MISSING;
        lost = !lost && row->state == AR_VERIFY_MISSING ? row : lost;
    }
    if (!lost || there == 0 || !ARI_IS_AMONG(first->evidence.cause, follows))
        return;
    memcpy(own, first->hint, sizeof own);
    first->evidence = (ar_evidence){.cause = "no_backward", .numbers = 1, .number = {{"missing", (double)n}}};
    snprintf(
        first->hint, sizeof first->hint,
        "no backward pass through a branch: %zu gradient%s that the reference has %s missing here, first %.120s, and "
        "others are there: detached, under no_grad, frozen or not used (DDP then waits and reduces nothing); here: "
        "%.160s",
        n, ARI_PLURAL(n), n == 1 ? "is" : "are", lost->name, own);
}

ar_status ari_verify_explain_rows(ari_verifying *v)
{
    ar_verify_report *r = v->report;
    ari_explain_case known = known_of(v);
    if (r->first == SIZE_MAX)
        return AR_OK;
    ari_verify_progress(v, 0.95, "explaining");
    r->facts = ari_facts_of(&known);
    known.facts = &r->facts;
    ari_verify_learn(r);
    explaining e = {.v = v, .known = &known, .most = v->o->explain ? v->o->explain : EXPLAINED};
    for (size_t i = 0; i < r->rows; i++) {
        if (r->row[i].state == AR_VERIFY_SHAPE)
            AR_TRY(explain_row(v, i, &known));
    }
    AR_TRY(ARI_TAKE(&e.row, &v->arena, r->different + 1, "rows to explain"));
    choose_row(&e, r->first);
    for (size_t i = 0; i < r->different && e.n < e.most && (i == 0 || e.elements < EXPLAINED_ELEMENTS); i++)
        choose_row(&e, r->worst_order[i]);
    const int threads = v->threads < EXPLAINING_THREADS ? v->threads : EXPLAINING_THREADS;
    const ari_tasks t = {e.n, threads, explain_task, &e, tell_explained};
    const ar_status st = ari_tasks_run(&t);
    explain_flat_parameters(r);
    AR_TRY(st);
    AR_TRY(pass_rounding(v, &known));
    begin_with_missing(r);
    ari_verify_begin_with_lost(r);
    AR_TRY(explain_one_sided(v, r->first));
    ask_missing_backward(r);
    AR_TRY(ask_what_is_before(v, &known));
    return ask_gradient(v, &known);
}
