/* SPDX-License-Identifier: Apache-2.0 */
/* Reads facts about a run's arithmetic that no tensor shows and its capture recorded: the format in which gradients are
 * reduced (a communication hook, FSDP2's reduce_dtype), and parameters whose update is orthogonalised in 16 bits. */
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "verify/compare/verify_impl.h"

/* A rank's gradient is a few times as large as the ranks' mean, and is rounded once before it is added, once after. */
static const double REDUCED_ROUNDINGS = 4.0;

static double roundoff_of_name(const json_t *name)
{
    const char *text = json_string_value(name);
    return !text ? 0.0 : strcmp(text, "bf16") == 0 ? 0x1p-9 : strcmp(text, "f16") == 0 ? 0x1p-12 : 0.0;
}

static ar_status take_names(ari_verifying *v, const json_t *names)
{
    const size_t n = json_array_size(names);
    AR_TRY(ARI_TAKE(&v->orthogonal, &v->arena, v->orthogonals + n, "names of parameters"));
    for (size_t i = 0; i < n; i++) {
        char *name = NULL;
        const char *text = json_string_value(json_array_get(names, i));
        AR_TRY(ari_arena_text(&v->arena, &name, text ? text : "", "names of parameters"));
        v->orthogonal[v->orthogonals++] = name;
    }
    return AR_OK;
}

ar_status ari_verify_formats(ari_verifying *v)
{
    for (int k = 0; k < 2; k++) {
        const char *text = ar_dump_metadata(v->dump[k], "anyrank.formats");
        json_t *formats = NULL;
        if (!text)
            continue;
        AR_TRY(ari_json_parse(&formats, text, strlen(text), ar_dump_path(v->dump[k])));
        const json_t *reduced = json_object_get(formats, "reduced");
        if (roundoff_of_name(reduced) > v->reduced) {
            v->reduced = roundoff_of_name(reduced);
            ari_printable(v->report->reduced, sizeof v->report->reduced, json_string_value(reduced));
        }
        const ar_status st = v->orthogonals ? AR_OK : take_names(v, json_object_get(formats, "orthogonal"));
        json_decref(formats);
        AR_TRY(st);
    }
    return AR_OK;
}

ar_status ari_excuse_reduced(ari_pair *pair, ari_verifying *v)
{
    const char pass = pair->row->pass;
    if (v->reduced == 0.0 || !pass || !strchr("gmvc", pass) || pair->tally.different == 0 || !pair->format[0].is_float)
        return AR_OK;
    const double parts = pass == 'v' ? 2.0 * REDUCED_ROUNDINGS : REDUCED_ROUNDINGS; /* a second moment contains
                                                                                       squares, whose relative error
                                                                                       is twice as large */
    AR_TRY(ARI_TAKE(&pair->doubt, &v->arena, 1, pair->row->name));
    *pair->doubt = (ari_uncertainty){.uniform = parts * v->reduced * pair->tally.max_reference};
    return AR_OK;
}

void ari_find_excused_by_reduction(const ari_verifying *v)
{
    for (const ari_pair *p = v->pair; v->reduced > 0.0 && p < v->pair + v->pairs; p++) {
        ar_verify_row *r = p->row;
        const bool of_gradient = r->pass && strchr("gmvc", r->pass), of_update = r->pass == 'n' && v->many_excused;
        r->excused_by_reduction = r->state == AR_VERIFY_SAME &&
                                  (r->excused_by_reduction || (r->elements_doubted > 0 && (of_gradient || of_update)));
        v->report->excused_by_reduction += r->excused_by_reduction;
    }
}

/* --- updates that are orthogonalised ------------------------------------------------------------------------------ */

/* A Newton-Schulz iteration multiplies small singular values by 3.4445, and five iterations by 485. In 16 bits,
 * rounding of the input decides the update in directions in which the input is smaller than that, and an element there
 * may be off by its whole size. The input has almost no component in those directions. The product of update and input,
 * a sum of singular values, is therefore almost that of the other directions, which are correct up to a few roundings.
 * A wrong rate, scale, momentum, or part of a matrix changes that product. The bounds are 16 bf16 roundings for the
 * whole product, and 64 for the product of a row or a column, which has few dominant terms. For matrices of any rank
 * with at least 16 rows and columns, whose inputs differed by up to 1e-4 relative, the products were off by 9 and 25
 * roundings. */
static const double WHOLE_PRODUCT = 0x1p-5, LINE_PRODUCT = 0x1p-3;
/* A row or column whose product is less than this fraction of the mean is judged with this fraction. */
static const double LEAST_LINE = 0.25;

bool ari_is_orthogonalised(const ari_verifying *v, const char *stem, size_t n)
{
    for (size_t i = 0; i < v->orthogonals; i++) {
        if (strlen(v->orthogonal[i]) == n && memcmp(v->orthogonal[i], stem, n) == 0)
            return true;
    }
    return false;
}

/* Products of the reference's update, and of the difference of both, with a matrix. */
typedef struct products {
    double total, all_apart, size; /* size: norm of the matrix */
    double *line, *line_apart;     /* [rows + cols] */
    size_t rows, cols;
} products;

static ar_status products_of(products *p, const ari_update *u, const ar_dump_tensor *matrix, ari_arena *arena)
{
    const ar_dump_tensor *const tensors[] = {u->before[0], u->after[0], u->before[1], u->after[1], matrix};
    double squares = 0.0;
    p->rows = matrix->ndim > 0 && matrix->shape[0] > 0 ? matrix->shape[0] : 1;
    p->cols = matrix->count / p->rows;
    AR_TRY(ARI_TAKE(&p->line, arena, p->rows + p->cols, matrix->name));
    AR_TRY(ARI_TAKE(&p->line_apart, arena, p->rows + p->cols, matrix->name));
    ari_lockstep b = ari_lockstep_begin(tensors, 5, 0, matrix->count);
    while (ari_lockstep_next(&b)) {
        const double step = b.x[1] - b.x[0], product = step * b.x[4];
        const double delta = (b.x[3] - b.x[2] - step) * b.x[4];
        const size_t lines[] = {b.index / p->cols, p->rows + b.index % p->cols};
        for (int k = 0; k < 2; k++) {
            p->line[lines[k]] += product;
            p->line_apart[lines[k]] += delta;
        }
        p->total += product;
        p->all_apart += delta;
        squares += b.x[4] * b.x[4];
    }
    p->size = sqrt(squares);
    return b.status;
}

/* Returns true if no row or column of the product of update and input ("line") differs by more than LINE_PRODUCT of
 * itself. A small one is compared with LEAST_LINE of the mean row or column instead. */
static bool are_same_lines(const products *p)
{
    for (size_t i = 0; i < p->rows + p->cols; i++) {
        const double mean = fabs(p->total) / (double)(i < p->rows ? p->rows : p->cols);
        if (!(fabs(p->line_apart[i]) <= LINE_PRODUCT * fmax(fabs(p->line[i]), LEAST_LINE * mean)))
            return false;
    }
    return true;
}

static bool have_size(const ari_update *u)
{
    const ar_dump_tensor *const tensors[] = {u->before[0], u->before[1], u->after[0], u->after[1], u->gradient};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        if (!tensors[i] || tensors[i]->count != u->gradient->count)
            return false;
    }
    return !u->moment || u->moment->count == u->gradient->count;
}

/* The update is computed from the moment and never orthogonal to it, while it may be orthogonal to a gradient that
 * changes direction. The last gradient distinguishes a moment that lacks it, or contains it too often, from the right
 * moment. */
ar_status ari_is_same_orthogonal(bool *equal, const ari_update *u)
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    products gradient = {.total = 0.0}, moment = {.total = 0.0};
    *equal = u->gradient && have_size(u);
    if (!*equal)
        return AR_OK;
    AR_TRY(products_of(&gradient, u, u->gradient, &arena));
    if (u->moment)
        AR_TRY(products_of(&moment, u, u->moment, &arena));
    const double usual = moment.size > 0.0 ? fabs(moment.total) / moment.size * gradient.size : 0.0;
    *equal = fabs(gradient.all_apart) <= WHOLE_PRODUCT * fmax(fabs(gradient.total), usual) &&
             fabs(moment.all_apart) <= WHOLE_PRODUCT * fabs(moment.total) &&
             are_same_lines(u->moment ? &moment : &gradient);
    return AR_OK;
}
