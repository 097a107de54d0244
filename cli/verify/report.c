/* SPDX-License-Identifier: Apache-2.0 */
/* A comparison of two dumps for people: the verdict, what differs in execution order, the first and the worst in
 * detail, what one of them lacks. */
#include "cli/verify/report.h"

#include <math.h>
#include <string.h>

#include "cli/shared/table.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "verify/compare/report.h"

/* --- how figures are spelled -------------------------------------------------------------------------------------- */

/* Each writes into out[0 .. TEXT) and gives it back. */
enum { TEXT = 21 * AR_ST_MAX_DIMS + 3 };

/* The place of an element, row-major, in the row's tensor. */
static const char *index_text(char *out, const ar_verify_row *r, size_t element)
{
    size_t at[AR_ST_MAX_DIMS] = {0};
    ari_coordinates(at, element, r->ndim, r->shape);
    return ari_shape_text(out, TEXT, r->ndim, at, ",");
}

/* As many digits as tell two values of the dtype apart. */
static const char *value_text(char *out, ar_dtype t, double x)
{
    const bool wide = t == AR_F64 || t == AR_I64 || t == AR_U64 || t == AR_I32 || t == AR_U32;
    snprintf(out, TEXT, "%.*g", wide ? 17 : 9, x);
    return out;
}

/* The largest difference: of numbers, unless only one of the two is one. */
static const char *size_text(char *out, const ar_verify_row *r)
{
    const double a = r->worst.value[0], b = r->worst.value[1];
    if (isnan(a) != isnan(b))
        snprintf(out, TEXT, "NaN");
    else if (!isnan(a) && isinf(a - b))
        snprintf(out, TEXT, "inf");
    else
        snprintf(out, TEXT, "%.2e", r->max_abs);
    return out;
}

/* "-" where one of the two is all zero. */
static const char *cosine_text(char *out, const ar_verify_row *r, int digits)
{
    if (isnan(r->cosine))
        snprintf(out, TEXT, "-");
    else
        snprintf(out, TEXT, "%.*f", digits, r->cosine);
    return out;
}

/* "within 3 ulp". */
static const char *rule_text(char *out, const ar_verify_report *r)
{
    switch (r->rule) {
    case AR_VERIFY_ULP:
        snprintf(out, TEXT, "within %llu ulp", (unsigned long long)r->ulp);
        break;
    case AR_VERIFY_TOLERANCE:
        snprintf(out, TEXT, "within rtol %g and atol %g", r->rtol, r->atol);
        break;
    case AR_VERIFY_SENSITIVITY:
        snprintf(out, TEXT, "within what rounding%s%s explains", r->allows[0] ? " of " : "", r->allows);
        break;
    case AR_VERIFY_BITS:
        snprintf(out, TEXT, "the same bits");
        break;
    }
    return out;
}

/* The same as expressions, in storage that lives to the end of the enclosing block. */
#define INDEX(r, element) index_text((char[TEXT]){0}, (r), (element))
#define VALUE(t, x) value_text((char[TEXT]){0}, (t), (x))
#define SIZE(r) size_text((char[TEXT]){0}, (r))
#define COSINE(r, digits) cosine_text((char[TEXT]){0}, (r), (digits))
#define RULE(r) rule_text((char[TEXT]){0}, (r))

/* The number of tensors whose copies differ. */
static size_t count_copies(const ar_verify_report *r)
{
    size_t n = 0;
    for (size_t i = 0; i < r->rows; i++)
        n += r->row[i].copies_differ;
    return n;
}

/* True if differences are shown relative to the allowance. */
static bool has_ratio(const ar_verify_report *r)
{
    return r->rule != AR_VERIFY_BITS;
}

/* --- tables ------------------------------------------------------------------------------------------------------- */

/* What is printed of. */
typedef struct printed {
    const ar_verify_report *r;
    const ari_verify_cause *cause;
} printed;

/* Rows of one kind, under a title. */
typedef struct section {
    const char *title;
    unsigned states; /* a bit each; 0: rows whose copies differ */
    bool or_none;    /* without --max-report's rows it is not there at all */
    void (*add)(ari_table *t, const printed *p, const ar_verify_row *row);
} section;

static bool is_in(const section *s, const ar_verify_row *row)
{
    return s->states ? (s->states >> row->state & 1u) != 0 : row->copies_differ;
}

static ar_status print_section(FILE *to, const printed *p, size_t most, const section *s, ari_table *t)
{
    const ar_verify_report *r = p->r;
    size_t n = 0;
    for (size_t i = 0; i < r->rows; i++) {
        if (is_in(s, &r->row[i]) && n++ < most)
            s->add(t, p, &r->row[i]);
    }
    if (n == 0 || (most == 0 && s->or_none))
        return ari_table_end(t, NULL, 2);
    fprintf(to, "\n%s:\n", s->title);
    const ar_status st = ari_table_end(t, to, 2);
    if (n > most)
        fprintf(to, "  .. and %zu more (--max-report %zu prints all)\n", n - most, n);
    return st;
}

static void add_difference(ari_table *t, const printed *p, const ar_verify_row *row)
{
    const bool same_dtype = row->dtype == row->other_dtype;
    ari_table_row(t, "%s\t%s%s%s %s\t%s of %s\t%s\t%.2e\t%s", ARI_SHOW(row->name), ar_dtype_name(row->dtype),
                  same_dtype ? "" : "/", same_dtype ? "" : ar_dtype_name(row->other_dtype),
                  ARI_SHOW_SHAPE(row->ndim, row->shape), ARI_COUNT(row->elements_different), ARI_COUNT(row->elements),
                  SIZE(row), row->max_rel, ARI_COUNT(row->max_ulp));
    if (has_ratio(p->r))
        ari_table_cell(t, "%.3g", row->ratio);
    ari_table_row(t, "%s\t%s\t%s\t%s", COSINE(row, 6), INDEX(row, row->worst.index),
                  VALUE(row->dtype, row->worst.value[0]), VALUE(row->other_dtype, row->worst.value[1]));
}

static ar_status print_differences(FILE *to, const printed *p, size_t most)
{
    static const section differences = {"values that differ, in execution order", 1u << AR_VERIFY_DIFFERENT, true,
                                        add_difference};
    ari_column columns[11] = {{"tensor", ARI_LEFT},   {"dtype, shape", ARI_LEFT}, {"different", ARI_RIGHT},
                              {"max abs", ARI_RIGHT}, {"max rel", ARI_RIGHT},     {"max ulp", ARI_RIGHT}};
    const ari_column ratio = {"of allowed", ARI_RIGHT};
    const ari_column rest[] = {
        {"cosine", ARI_RIGHT}, {"worst at", ARI_LEFT}, {"reference", ARI_RIGHT}, {"other", ARI_RIGHT}};
    size_t width = 6;
    if (has_ratio(p->r))
        columns[width++] = ratio;
    memcpy(&columns[width], rest, sizeof rest);
    ari_table t = {.columns = columns, .n = width + sizeof rest / sizeof *rest};
    return print_section(to, p, most, &differences, &t);
}

static void add_other_kind(ari_table *t, const printed *p, const ar_verify_row *row)
{
    const char *told = json_string_value(json_object_get(json_object_get(p->cause->answer, "shapes"), row->name));
    ari_table_row(t, "%s\t%s\t%s %s in the reference, %s %s in the other%s%s",
                  row->state == AR_VERIFY_SHAPE ? "SHAPE" : "DTYPE", ARI_SHOW(row->name), ar_dtype_name(row->dtype),
                  ARI_SHOW_SHAPE(row->ndim, row->shape), ar_dtype_name(row->other_dtype),
                  ARI_SHOW_SHAPE(row->other_ndim, row->other_shape), told ? ": " : "", told ? told : "");
}

static ar_status print_other_kind(FILE *to, const printed *p, size_t most)
{
    static const section kinds = {"another shape or dtype, values not compared",
                                  1u << AR_VERIFY_SHAPE | 1u << AR_VERIFY_DTYPE, true, add_other_kind};
    static const ari_column columns[] = {{NULL, ARI_LEFT}, {NULL, ARI_LEFT}, {NULL, ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    bool dtypes = false;
    for (size_t i = 0; i < p->r->rows; i++)
        dtypes = dtypes || p->r->row[i].state == AR_VERIFY_DTYPE;
    const ar_status st = print_section(to, p, most, &kinds, &t);
    if (dtypes && most > 0)
        fprintf(to, "  (--rtol with --atol, and --sensitivity, compare values of different dtypes)\n");
    return st;
}

static void add_copies(ari_table *t, const printed *p, const ar_verify_row *row)
{
    (void)p;
    ari_table_cell(t, "COPIES %s (%s): rank %d and rank %d in %s element%s, first at %s: %s and %s",
                   ARI_SHOW(row->name), row->in_reference ? "reference" : "other", row->ranks[0], row->ranks[1],
                   ARI_COUNT(row->elements_different), ARI_PLURAL(row->elements_different),
                   INDEX(row, row->first.index), VALUE(row->dtype, row->first.value[0]),
                   VALUE(row->dtype, row->first.value[1]));
}

static void add_name(ari_table *t, const printed *p, const ar_verify_row *row)
{
    (void)p;
    ari_table_cell(t, "%s %s %s %s", row->state == AR_VERIFY_MISSING ? "MISSING" : "UNEXPECTED", ARI_SHOW(row->name),
                   ar_dtype_name(row->dtype), ARI_SHOW_SHAPE(row->ndim, row->shape));
}

static ar_status print_lines(FILE *to, const printed *p, size_t most, const section *s)
{
    static const ari_column columns[] = {{NULL, ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    return print_section(to, p, most, s, &t);
}

/* --- one tensor in detail ----------------------------------------------------------------------------------------- */

static const char *pass_text(char pass)
{
    static const char *const texts[] = {['i'] = "initial values",
                                        ['f'] = "forward pass",
                                        ['b'] = "backward pass",
                                        ['g'] = "gradient of a parameter",
                                        ['c'] = "clipping",
                                        ['n'] = "update of the weights",
                                        ['m'] = "first moment of the gradient",
                                        ['v'] = "second moment of the gradient",
                                        ['s'] = "state of the optimizer",
                                        ['u'] = "buffer",
                                        ['k'] = "number of steps",
                                        ['w'] = "weights"};
    const size_t at = (unsigned char)pass;
    return at < sizeof texts / sizeof *texts && texts[at] ? texts[at] : "";
}

static void print_where(FILE *to, const ar_verify_report *r, const ar_verify_row *row)
{
    fprintf(to, "    where     ");
    if (row->step > 0 && row->pass != 'w' && row->pass != '?')
        fprintf(to, "step %d, ", row->step);
    fprintf(to, "%s%selement %s", pass_text(row->pass), pass_text(row->pass)[0] ? "; first " : "first ",
            INDEX(row, row->first.index));
    if (row->state == AR_VERIFY_DIFFERENT && row->ranks[0] >= 0 && r->ranks > 1)
        fprintf(to, ", of rank %d of %d", row->ranks[0], r->ranks);
    fprintf(to, "\n");
}

static void print_values(FILE *to, const ar_verify_report *r, const ar_verify_row *row)
{
    fprintf(to, "    first     %s in the reference, %s in the other\n", VALUE(row->dtype, row->first.value[0]),
            VALUE(row->other_dtype, row->first.value[1]));
    fprintf(to, "    worst     %s in the reference, %s in the other, at %s", VALUE(row->dtype, row->worst.value[0]),
            VALUE(row->other_dtype, row->worst.value[1]), INDEX(row, row->worst.index));
    if (has_ratio(r))
        fprintf(to, "; %.2e is allowed, the %s is %.3g times that",
                row->off_by_factor ? row->factor_allowed : row->allowed,
                row->off_by_factor ? "factor's distance from 1" : "difference", row->ratio);
    fprintf(to, "\n    how many  %s of %s elements (%.3g %%)", ARI_COUNT(row->elements_different),
            ARI_COUNT(row->elements), 100.0 * (double)row->elements_different / (double)row->elements);
    if (row->bits_different != row->elements_different)
        fprintf(to, "; in bits %s", ARI_COUNT(row->bits_different));
    fprintf(to, "\n    how much  rms %.2e of difference against %.2e of the reference; cosine %s, scale %.9g\n",
            row->rms, row->rms_reference, COSINE(row, 9), row->scale);
    if (row->nan[0] + row->nan[1] > 0)
        fprintf(to, "    NaN       %s in the reference, %s in the other\n", ARI_COUNT(row->nan[0]),
                ARI_COUNT(row->nan[1]));
    if (row->inf[0] + row->inf[1] > 0)
        fprintf(to, "    infinite  %s in the reference, %s in the other\n", ARI_COUNT(row->inf[0]),
                ARI_COUNT(row->inf[1]));
}

static void print_detail(FILE *to, const ar_verify_report *r, const ar_verify_row *row, const char *title)
{
    fprintf(to, "\n%s: %s\n", title, ARI_SHOW(row->name));
    if (row->state == AR_VERIFY_DIFFERENT || row->copies_differ)
        print_where(to, r, row);
    if (row->state == AR_VERIFY_DIFFERENT)
        print_values(to, r, row);
    if (row->copies_differ)
        fprintf(to, "    copies    %s on rank %d, %s on rank %d (%s); %s of its elements differ between the two\n",
                VALUE(row->dtype, row->first.value[0]), row->ranks[0], VALUE(row->dtype, row->first.value[1]),
                row->ranks[1], row->in_reference ? "of the reference" : "of the other",
                ARI_COUNT(row->elements_different));
}

/* --- around it ---------------------------------------------------------------------------------------------------- */

static void print_lost_gradients(FILE *to, const ar_verify_report *r)
{
    const ar_verify_row *row = r->row;
    while (r->lost_gradients > 0 && !row->lost_gradient)
        row++;
    if (r->lost_gradients > 0)
        fprintf(to, "; %zu gradient%s in one dump only, of parameters that both have, such as %s", r->lost_gradients,
                ARI_PLURAL(r->lost_gradients), ARI_SHOW(row->name));
}

/* The row that is explained: the first that differs, or the first of those that are more than rounding. NULL: none. */
static const ar_verify_row *explained_row(const ar_verify_report *r, const ari_verify_cause *cause)
{
    const char *name = json_string_value(json_object_get(cause->answer, "tensor"));
    for (size_t i = 0; name && i < r->rows; i++) {
        if (strcmp(r->row[i].name, name) == 0)
            return &r->row[i];
    }
    return r->different > 0 ? &r->row[r->first] : NULL;
}

/* "lm_head:bwd, from rank 1 on: off by 12.5 % of its size, all of it by the factor 0.5". */
static void print_first(FILE *to, const ar_verify_report *r, const ar_verify_row *row)
{
    const double whole = row->rms_reference;
    fprintf(to, "%s", ARI_SHOW(row->name));
    if (row->state == AR_VERIFY_DIFFERENT && row->ranks[0] >= 0 && r->ranks > 1)
        fprintf(to, ", first on rank %d of %d", row->ranks[0], r->ranks);
    if (row->state != AR_VERIFY_DIFFERENT)
        fprintf(to, ": not the same");
    else if (row->nan[1] + row->inf[1] > row->nan[0] + row->inf[0])
        fprintf(to, ": %s element%s not finite", ARI_COUNT(row->nan[1] + row->inf[1]),
                row->nan[1] + row->inf[1] == 1 ? " is" : "s are");
    else if (whole > 0.0)
        fprintf(to, ": off by %.3g %% of its size", 100.0 * row->rms / whole);
    else
        fprintf(to, ": not zero, as it is in the reference");
    if (row->state == AR_VERIFY_DIFFERENT && row->cosine >= 1.0 - 1e-9)
        fprintf(to, ", all of it by the factor %.6g", row->scale);
    fprintf(to, "\n");
}

void ari_verify_print_cause(FILE *to, const ari_verify_cause *cause)
{
    size_t i;
    const json_t *line;
    json_array_foreach(json_object_get(cause->answer, "lines"), i, line)
        fprintf(to, "%s\n", ARI_SHOW(json_string_value(line)));
    if (!cause->answer && cause->failure[0])
        fprintf(to, "note: no cause: %s\n", cause->failure);
}

/* The first tensor that differs and its cause; then the verdict and the two dumps. Nothing where nothing differs. */
static void print_head(FILE *to, const ar_verify_report *r, const ari_verify_cause *cause)
{
    const char *space = "";
    if (r->same)
        return;
    if (!cause->answer && r->different > 0)
        print_first(to, r, &r->row[r->first]);
    ari_verify_print_cause(to, cause);
    fprintf(to, "different: %zu of %zu tensor%s", r->different, r->compared, ARI_PLURAL(r->compared));
    if (r->missing > 0)
        fprintf(to, ", %zu missing", r->missing);
    if (r->unexpected > 0)
        fprintf(to, ", %zu unexpected", r->unexpected);
    print_lost_gradients(to, r);
    fprintf(to, "\n  reference  %s\n  other      %s", ARI_SHOW(r->reference), ARI_SHOW(r->other));
    if (r->ranks > 0)
        fprintf(to, ", %d rank%s", r->ranks, ARI_PLURAL(r->ranks));
    for (int d = 0; d < r->mesh.ndim; d++, space = " ")
        fprintf(to, "%s%s=%d", d ? space : ": ", r->mesh.dim[d].name, r->mesh.dim[d].size);
    fprintf(to, "\n");
}

/* NaN that both dumps have: the comparison says little about it. */
static void print_nan(FILE *to, const ar_verify_report *r)
{
    size_t tensors = 0, elements = 0;
    const char *first = NULL;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        if (row->state != AR_VERIFY_SAME || row->nan[0] == 0)
            continue;
        first = first ? first : row->name;
        tensors++;
        elements += row->nan[0];
    }
    if (first)
        fprintf(to, "note: NaN in both, %s element%s of %zu tensor%s that %s the same, the first %s\n",
                ARI_COUNT(elements), ARI_PLURAL(elements), tensors, ARI_PLURAL(tensors), tensors == 1 ? "is" : "are",
                ARI_SHOW(first));
}

static void print_left_out(FILE *to, const ar_verify_report *r)
{
    if (r->left_out[0] + r->left_out[1] > 0)
        fprintf(to, "note: left out, as only one dump has them: %zu tensor%s of the reference, %zu of the other\n",
                r->left_out[0], ARI_PLURAL(r->left_out[0]), r->left_out[1]);
    if (r->ragged > 0)
        fprintf(to, "note: not compared: %zu output%s and gradient%s that have no place in a full tensor, such as %s\n",
                r->ragged, ARI_PLURAL(r->ragged), ARI_PLURAL(r->ragged), ARI_SHOW(r->ragged_first));
    for (int k = 0; k < 2; k++) {
        if (r->unwritten[k][0])
            fprintf(to, "note: not in the dump of %s: %s\n", k == 0 ? "the reference" : "the other",
                    ARI_SHOW(r->unwritten[k]));
    }
    if (r->reordered > 0)
        fprintf(to, "note: compared sample by sample: %zu tensor%s whose samples ranks have in another order\n",
                r->reordered, ARI_PLURAL(r->reordered));
    if (r->reshaped > 0)
        fprintf(
            to,
            "note: compared element by element: %zu tensor%s of which one run has dimensions in one that the other has "
            "apart, such as %s\n",
            r->reshaped, ARI_PLURAL(r->reshaped), ARI_SHOW(r->reshaped_first));
    if (r->routed > 0)
        fprintf(
            to,
            "note: not compared: %zu tensor%s within experts, whose rows are the tokens that the router sends there; "
            "each rank and micro-batch has those of its own samples, and what the experts give back is compared\n",
            r->routed, ARI_PLURAL(r->routed));
}

static void print_doubted(FILE *to, const ar_verify_report *r)
{
    if (r->elements_doubted > 0)
        fprintf(
            to,
            "note: %zu element%s of new weights or moments, or of outputs that these made, differ%s by no more than "
            "the optimizer's step makes of the gradients' differences, or the format in which these are reduced\n",
            r->elements_doubted, ARI_PLURAL(r->elements_doubted), r->elements_doubted == 1 ? "s" : "");
}

/* What was compared by more than the rule allows says less, and is named: all of it, up to `most`. */
static void print_excused(FILE *to, const ar_verify_report *r, size_t most)
{
    size_t names = 0;
    if (r->excused_by_reduction == 0)
        return;
    fprintf(to, "note: %zu tensor%s %s the same only because of a recorded format: gradients are reduced in %s, whose ",
            r->excused_by_reduction, ARI_PLURAL(r->excused_by_reduction), r->excused_by_reduction == 1 ? "is" : "are",
            ARI_SHOW(r->reduced));
    fprintf(to, "rounding is allowed besides:");
    for (size_t i = 0; i < r->rows && names < most; i++) {
        if (r->row[i].excused_by_reduction)
            fprintf(to, "%s %s", names++ ? "," : "", ARI_SHOW(r->row[i].name));
    }
    if (names < r->excused_by_reduction)
        fprintf(to, ", and %zu more (--json has all)", r->excused_by_reduction - names);
    fprintf(to, "\n");
}

/* By bits, of other programs, whose sums are in no order that a layout keeps. */
static void print_rule_note(FILE *to, const ar_verify_report *r)
{
    if (r->rule == AR_VERIFY_BITS && r->different > 0 && !r->exact_numerics)
        fprintf(to,
                "note: bits were compared, which rounding alone changes in other programs' sums; --rtol 1e-4 --atol "
                "1e-5 lets it pass, --normal judges it\n");
}

/* By a tolerance, of a first step that is right. What second moments divide is a part of the learning rate, however
 * small it is itself, and so is what rounding leaves of it in all that is computed from the weights. */
static void print_later_steps(FILE *to, const ar_verify_report *r)
{
    bool divides = false;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        divides = divides || row->pass == 'v';
        if (row->state != AR_VERIFY_SAME && (row->state != AR_VERIFY_DIFFERENT || row->step < 2))
            return;
    }
    if (divides && r->different > 0 && r->rule == AR_VERIFY_TOLERANCE)
        fprintf(to, "note: the first step is right, and later ones begin with weights that Adam moved: what rounding "
                    "changes there grows with the learning rate (docs/guide/pytorch.md, \"Later steps\")\n");
}

static void print_drift(FILE *to, const ar_verify_report *r)
{
    if (r->drift > 0)
        fprintf(to, "note: copies of %zu tensor%s differ in bits, %s: drift\n", r->drift, ARI_PLURAL(r->drift),
                RULE(r));
}

static void print_renamed(FILE *to, const ar_verify_report *r)
{
    if (r->renamed > 0)
        fprintf(to, "note: %zu name%s but for what wraps the model: ", r->renamed,
                r->renamed == 1 ? " is the same" : "s are the same");
    for (int k = 0; k < 2 && r->renamed > 0; k++)
        if (r->wrappers[k][0])
            fprintf(to, "%s'%s' in the %s", k == 1 && r->wrappers[0][0] ? ", " : "", ARI_SHOW(r->wrappers[k]),
                    k == 0 ? "reference" : "other");
    if (r->renamed > 0)
        fprintf(to, "\n");
    if (r->missing > 0 && r->unexpected > 0 && r->compared == 0)
        fprintf(to,
                "note: no name stands in both; a file for --map says which tensor is which (docs/guide/pytorch.md)\n");
}

static void print_unjudged(FILE *to, const ar_verify_report *r)
{
    const ar_verify_row *row = r->row;
    while (!row->unjudged)
        row++;
    fprintf(
        to,
        "verify: cannot judge: %zu of %zu tensors, the first %s, may differ by as much as they are: a quantiser or a "
        "choice by values amplifies rounding; fix its scale or choice in both runs, or give --rtol and --atol\n",
        r->unjudged, r->compared, ARI_SHOW(row->name));
}

enum { FEW_NAMES = 5 }; /* of each dump, where no tensor stands in both */

/* What follows, up to the last line: nothing where nothing differs and nothing is odd. */
static ar_status print_tables(FILE *to, const ar_verify_report *r, const ari_verify_cause *cause, size_t most)
{
    static const section copies = {"copies of one tensor that differ from each other", 0, false, add_copies},
                         missing = {"only in the reference", 1u << AR_VERIFY_MISSING, false, add_name},
                         unexpected = {"only in the other", 1u << AR_VERIFY_UNEXPECTED, false, add_name};
    const printed p = {r, cause};
    const ar_verify_row *explained = explained_row(r, cause);
    if (r->same && r->unjudged > 0)
        print_unjudged(to, r);
    print_renamed(to, r);
    if (r->compared == 0 && most > FEW_NAMES && r->missing + r->unexpected > 2 * most)
        most = FEW_NAMES; /* two dumps of different things */
    AR_TRY(print_lines(to, &p, most, &copies));
    AR_TRY(print_differences(to, &p, most));
    AR_TRY(print_other_kind(to, &p, most));
    if (explained)
        print_detail(to, r, explained, "first in execution order");
    AR_TRY(print_lines(to, &p, most, &missing));
    AR_TRY(print_lines(to, &p, most, &unexpected));
    print_nan(to, r);
    print_drift(to, r);
    print_doubted(to, r);
    print_excused(to, r, most);
    print_rule_note(to, r);
    print_later_steps(to, r);
    print_left_out(to, r);
    if (!r->same)
        fprintf(to, "\n");
    return AR_OK;
}

/* --- the verdict -------------------------------------------------------------------------------------------------- */

/* The smallest number of one digit that is not below x. */
static double one_digit_up(double x)
{
    const double unit = pow(10.0, floor(log10(x)));
    return ceil(x / unit * (1.0 - 1e-12)) * unit * (1.0 + 1e-9);
}

static void print_rounding(FILE *to, const ar_verify_report *r)
{
    enum { MOST_ULP = 1000 };
    if (r->exact_numerics)
        return;
    uint64_t ulp = 0;
    double most = 0.0;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        if (row->state == AR_VERIFY_SAME)
            continue;
        if (row->state != AR_VERIFY_DIFFERENT || !ari_is_by_rounding(row))
            return;
        ulp = row->max_ulp > ulp ? row->max_ulp : ulp;
        most = fmax(most, row->max_abs);
    }
    fprintf(to, "; no more than rounding in another order leaves: ");
    if (ulp <= MOST_ULP)
        fprintf(to, "--ulp %llu allows it", (unsigned long long)ulp);
    else
        fprintf(to, "--atol %.2g allows it", one_digit_up(most));
}

static void print_same(FILE *to, const ar_verify_report *r, const char *label)
{
    const ar_verify_row *worst = NULL;
    size_t exact = 0;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        exact += row->bits_different == 0;
        if (row->ratio > (worst ? worst->ratio : 0.0))
            worst = row;
    }
    fprintf(to, "%s: %s%s%s: %zu tensor%s, %s element%s", label, r->unjudged > 0 ? "CANNOT JUDGE all; " : "",
            has_ratio(r) ? "the same " : "", RULE(r), r->compared, ARI_PLURAL(r->compared), ARI_COUNT(r->elements),
            ARI_PLURAL(r->elements));
    if (has_ratio(r))
        fprintf(to, ", %zu tensor%s bit for bit", exact, ARI_PLURAL(exact));
    if (worst)
        fprintf(to, "; the worst difference is %.3g of what is allowed, in %s", worst->ratio, ARI_SHOW(worst->name));
    fprintf(to, "\n");
}

static void print_verdict(FILE *to, const ar_verify_report *r, const char *label)
{
    if (r->same) {
        print_same(to, r, label);
        return;
    }
    if (r->compared > 0)
        fprintf(to, "%s: DIFFERENT: %zu of %zu tensor%s not %s", label, r->different, r->compared,
                ARI_PLURAL(r->compared), has_ratio(r) ? RULE(r) : "the same in every bit");
    else
        fprintf(to, "%s: DIFFERENT: no tensor stands in both", label);
    if (r->missing + r->unexpected > 0)
        fprintf(to, ", %zu missing, %zu unexpected", r->missing, r->unexpected);
    if (count_copies(r) > 0)
        fprintf(to, "; ranks hold different copies of %zu tensor%s", count_copies(r), ARI_PLURAL(count_copies(r)));
    if (r->different > 0 && r->row[r->first].state == AR_VERIFY_DIFFERENT) {
        const ar_verify_row *first = &r->row[r->first];
        fprintf(to, "; first %s: ", ARI_SHOW(first->name));
        if (has_ratio(r))
            fprintf(to, "%.3g times what is allowed", first->ratio);
        else
            fprintf(to, "max|d| %s at %s", SIZE(first), INDEX(first, first->worst.index));
    }
    print_lost_gradients(to, r);
    if (r->compared > 0 && r->different == 0 && r->lost_gradients == 0)
        fprintf(to, "; what both have is the same: --common leaves the others out");
    if (r->rule == AR_VERIFY_BITS && r->different > 0)
        print_rounding(to, r);
    fprintf(to, "\n");
}

ar_status ari_verify_print(FILE *to, const ar_verify_report *r, const ari_verify_cause *cause, size_t most,
                           const char *page, const char *label)
{
    print_head(to, r, cause);
    AR_TRY(print_tables(to, r, cause, most));
    if (page)
        fprintf(to, "%s: the report as a page\n", ARI_SHOW(page));
    print_verdict(to, r, label);
    return AR_OK;
}
