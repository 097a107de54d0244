/* SPDX-License-Identifier: Apache-2.0 */
/* Adds facts from the rows to the dumps' facts about the runs (ari_facts_of), before anything is explained. */
#include <math.h>
#include <string.h>

#include "verify/dumps/report.h"
#include "verify/dumps/verify_impl.h"

/* Ratios that mistakes leave are of small numbers: ranks, micro-batches, uses of a weight. A number that is no such
 * ratio comes so near to one of the 159 up to 16 about once in a thousand times. Or a divisor counts others than the
 * reference's targets. */
enum { MOST_TERM = 16 };
static const double near_ratio = 1e-5;

static ar_verify_ratio ratio_of(double x, size_t targets)
{
    const size_t others = ari_counted_of(x, targets);
    for (unsigned q = 1; q <= MOST_TERM; q++) {
        const double p = round(x * q);
        if (p >= 1.0 && p <= MOST_TERM && fabs(x * q - p) <= near_ratio * p)
            return (ar_verify_ratio){.p = (unsigned)p, .q = q, .count = 1, .among = 1};
    }
    return (ar_verify_ratio){(unsigned)(others > 0 ? targets : 0), (unsigned)others, others > 0, 1};
}

/* A tensor's, if it is the reference times one number. */
static ar_verify_ratio ratio_of_row(const ar_verify_row *r, size_t targets)
{
    if (r->bits_different == 0 && r->state == AR_VERIFY_SAME)
        return (ar_verify_ratio){.p = 1, .q = 1, .count = 1, .among = 1};
    const bool along = r->state == AR_VERIFY_SAME || r->state == AR_VERIFY_DIFFERENT;
    return along && r->cosine >= 1.0 - near_ratio ? ratio_of(r->scale, targets) : (ar_verify_ratio){.among = 1};
}

/* That of most gradients of the first step that has any: the only one that more than half can have is found by their
 * votes, and then counted. */
static ar_verify_ratio ratio_of_gradients(const ar_verify_report *r)
{
    ar_verify_ratio most = {0};
    for (int counts = 0; counts < 2; counts++) {
        size_t lead = 0;
        int step = 0;
        most.count = most.among = 0;
        for (size_t i = 0; i < r->rows; i++) {
            const ar_verify_row *row = &r->row[i];
            if (row->pass != 'g' || ari_is_one_sided(row) || (step > 0 && row->step != step))
                continue;
            const ar_verify_ratio own = ratio_of_row(row, r->facts.targets);
            step = row->step;
            most.among++;
            if (!counts && lead == 0)
                most.p = own.p, most.q = own.q;
            const bool same = own.p == most.p && own.q == most.q;
            lead += same || lead == 0 ? 1 : SIZE_MAX;
            most.count += same;
        }
    }
    return most.q > 0 && 2 * most.count > most.among ? most : (ar_verify_ratio){.among = most.among};
}

bool ari_is_loss(const ar_verify_row *r)
{
    const size_t n = ari_order_of(r->name, NULL).stem;
    return r->pass == 'f' && r->elements == 1 && n == 4 && memcmp(r->name, "loss", n) == 0;
}

/* The dimension of the mesh along which two ranks stand apart, if there is one alone; -1. */
static int dimension_between(const ar_mesh *m, const int *ranks)
{
    int found = -1, n = 0, stride = 1;
    for (int d = m->ndim - 1; d >= 0; stride *= m->dim[d].size, d--) {
        if (ranks[0] / stride % m->dim[d].size == ranks[1] / stride % m->dim[d].size)
            continue;
        found = d;
        n++;
    }
    return n == 1 ? found : -1;
}

static void learn_row(ar_verify_facts *f, const ar_verify_report *r, const ar_verify_row *row)
{
    f->steps = row->step > f->steps ? row->step : f->steps;
    f->has_m = f->has_m || row->pass == 'm';
    f->has_v = f->has_v || row->pass == 'v';
    f->has_new = f->has_new || row->pass == 'n';
    if (row->copies_differ && !row->in_reference) {
        const int d = dimension_between(&r->mesh, row->ranks);
        f->copies_apart++;
        if (d >= 0)
            f->apart_along[d] = true;
    }
    if (ari_is_one_sided(row))
        return;
    f->exact += row->state == AR_VERIFY_SAME && row->bits_different == 0;
    if (ari_is_loss(row) && f->loss.among == 0)
        f->loss = ratio_of_row(row, f->targets);
    if (row->pass == 'c' && row->elements == 1 && f->norm.among == 0)
        f->norm = ratio_of_row(row, f->targets);
}

void ari_verify_learn(ar_verify_report *r)
{
    for (size_t i = 0; i < r->rows; i++)
        learn_row(&r->facts, r, &r->row[i]);
    r->facts.gradients = ratio_of_gradients(r);
}

/* --- rounding ----------------------------------------------------------------------------------------------------- */

double ari_roundoff_of(ar_dtype t)
{
    const ari_format f = ari_format_of(t);
    return f.is_float && f.bits >= 16 ? ldexp(0.5, -f.mantissa) : 0.0;
}

bool ari_is_by_rounding(const ar_verify_row *row)
{
    const double u = ari_roundoff_of(row->dtype);
    if (row->off_by_factor)
        return false;
    if (row->evidence.cause && strcmp(row->evidence.cause, "small_change") == 0) /* of two exact runs */
        return false;
    return row->nan[0] == row->nan[1] && row->inf[0] == row->inf[1] && isfinite(row->worst.value[0]) &&
           isfinite(row->worst.value[1]) && row->rms <= fmin(16.0 * u, 0.01) * row->rms_reference &&
           row->max_abs <= fmin(256.0 * u, 0.05) * row->max_reference;
}
