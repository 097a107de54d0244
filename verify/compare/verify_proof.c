/* SPDX-License-Identifier: Apache-2.0 */
/* Refuses equality of two dead models: if everything compared has values that occur without any computation, equality
 * proves nothing. */
#include <math.h>
#include <string.h>

#include "verify/compare/verify_impl.h"
#include "verify/compare/verify_proof.h"

ar_status ari_is_zero(bool *zero, const ar_dump_tensor *t)
{
    float x[256];
    *zero = t->dtype != AR_C64; /* no statement is made about it */
    for (size_t start = 0; *zero && start < t->count; start += sizeof x / sizeof *x) {
        const size_t n = t->count - start < sizeof x / sizeof *x ? t->count - start : sizeof x / sizeof *x;
        AR_TRY(ar_dump_read_f32(t, start, n, x));
        for (size_t i = 0; i < n; i++)
            *zero = *zero && x[i] == 0.0f;
    }
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

void ari_proof_add(ari_proof *proof, char pass, const ari_value_counts *reference, const ari_value_counts *candidate)
{
    const ari_value_counts *const counts[] = {reference, candidate};
    bool zero = true, dead = true;
    if (pass != 'g')
        return;
    for (int k = 0; k < 2; k++) {
        const ari_value_counts *c = counts[k];
        zero = zero && c->zeros == c->elements;
        dead = dead && c->zeros + c->nan + c->inf == c->elements;
    }
    proof->gradients++;
    proof->zero += zero;
    proof->dead += dead;
}

ar_status ari_proof_refuse(const ari_proof *proof, bool chosen)
{
    const size_t n = proof->gradients;
    if (n == 0 || proof->dead < n)
        return AR_OK;
    if (proof->zero < n)
        return ar_error_set(AR_ERR_DATA,
                            "this comparison proves nothing: NaN, infinities and zeros are all that %s in both dumps; "
                            "such gradients are the same whatever was computed before them",
                            n == 1 ? "the gradient has" : "the gradients have");
    if (n < 2 || chosen)
        return AR_OK;
    return ar_error_set(AR_ERR_DATA,
                        "this comparison proves nothing: all %zu gradients are zero in both dumps; was the backward "
                        "pass run, and are gradients written before they are set to zero?",
                        n);
}

/* Counts values until the first finite number other than 0, which is all that the rule needs. */
static ar_status count_dead_values(ari_value_counts *counts, const ar_dump_tensor *t)
{
    float x[256];
    *counts = (ari_value_counts){.elements = t->count};
    if (t->dtype == AR_C64)
        return AR_OK; /* no statement is made about it */
    for (size_t start = 0; start < t->count; start += sizeof x / sizeof *x) {
        const size_t n = t->count - start < sizeof x / sizeof *x ? t->count - start : sizeof x / sizeof *x;
        AR_TRY(ar_dump_read_f32(t, start, n, x));
        for (size_t i = 0; i < n; i++) {
            counts->zeros += x[i] == 0.0f;
            counts->nan += isnan(x[i]) != 0;
            counts->inf += isinf(x[i]) != 0;
        }
        if (counts->zeros + counts->nan + counts->inf < start + n)
            return AR_OK;
    }
    return AR_OK;
}

/* The first gradient with a finite nonzero number ends the search. */
static ar_status refuse_dead_gradients(const ari_verifying *v)
{
    ari_proof proof = {0};
    for (size_t i = 0; proof.dead == proof.gradients && i < v->report->rows; i++) {
        const ar_verify_row *row = &v->report->row[i];
        ari_value_counts counts[2];
        if (row->pass != 'g' || ari_is_one_sided(row))
            continue;
        for (int k = 0; k < 2; k++)
            AR_TRY(count_dead_values(&counts[k], v->sides[i].tensors[k]));
        ari_proof_add(&proof, row->pass, &counts[0], &counts[1]);
    }
    return ari_proof_refuse(&proof, v->o->only_count > 0);
}

/* --- losses and steps --------------------------------------------------------------------------------------------- */

void ari_loss_proof_add(ari_loss_proof *proof, double reference, double candidate)
{
    if (proof->steps == 0)
        proof->first_loss = reference;
    proof->changes = proof->changes || reference != proof->first_loss || candidate != proof->first_loss;
    proof->without_number += isfinite(reference) ? 0 : 1;
    proof->steps++;
}

ar_status ari_loss_proof_refuse_numbers(const ari_loss_proof *proof)
{
    if (proof->steps == 0 || proof->without_number < proof->steps)
        return AR_OK;
    return ar_error_set(AR_ERR_DATA, "this comparison proves nothing: the loss is NaN or infinite in %s of both dumps",
                        proof->steps == 1 ? "the only step" : "every step");
}

size_t ari_loss_proof_logits(const ari_loss_proof *proof)
{
    const double size = round(exp(proof->first_loss));
    const bool equal = proof->steps >= 2 && !proof->changes && isfinite(size) && size >= 2.0;
    return equal && fabs(log(size) - proof->first_loss) <= 0x1p-20 * proof->first_loss ? (size_t)size : 0;
}

ar_status ari_loss_proof_refuse_constant(const ari_loss_proof *proof)
{
    return ar_error_set(AR_ERR_DATA,
                        "this comparison proves nothing: the loss is %.6g = ln %zu in each of %zu steps of both dumps, "
                        "that of logits which are all equal; does the model have its weights, and do they change?",
                        proof->first_loss, ari_loss_proof_logits(proof), proof->steps);
}

ar_status ari_proof_refuse_repeated(size_t activations)
{
    return ar_error_set(AR_ERR_DATA,
                        "this comparison proves nothing: all %zu activations of later steps have the bits of the first "
                        "step, in both dumps; is the batch another one in each step, and do the weights change?",
                        activations);
}

static ar_status read_losses(ari_loss_proof *proof, const ari_verifying *v)
{
    for (size_t i = 0; i < v->report->rows; i++) {
        float x[2];
        if (!ari_is_loss(&v->report->row[i]) || ari_is_one_sided(&v->report->row[i]))
            continue;
        for (int k = 0; k < 2; k++)
            AR_TRY(ar_dump_read_f32(v->sides[i].tensors[k], 0, 1, &x[k]));
        ari_loss_proof_add(proof, (double)x[0], (double)x[1]);
    }
    return AR_OK;
}

/* Returns true if a tensor of the report has a dimension of n. */
static bool is_dimension(const ar_verify_report *r, size_t n)
{
    for (size_t i = 0; i < r->rows; i++) {
        for (int d = 0; d < r->row[i].ndim; d++) {
            if (r->row[i].shape[d] == n)
                return true;
        }
    }
    return false;
}

/* Returns the reference's tensor with this name in its first step, or NULL. */
static const ar_dump_tensor *in_first_step(const ari_verifying *v, const char *name)
{
    char first_name[256];
    const size_t n = strcspn(name, "@");
    if (n >= sizeof first_name)
        return NULL;
    memcpy(first_name, name, n);
    first_name[n] = '\0';
    return ar_dump_find(v->dump[0], first_name);
}

ar_status ari_are_equal(bool *equal, bool *varies, const ar_dump_tensor *a, const ar_dump_tensor *b)
{
    float x[256], y[256];
    *equal = ari_same_shape(a, b);
    *varies = false;
    for (size_t start = 0; *equal && start < a->count; start += sizeof x / sizeof *x) {
        const size_t n = a->count - start < sizeof x / sizeof *x ? a->count - start : sizeof x / sizeof *x;
        AR_TRY(ar_dump_read_f32(a, start, n, x));
        AR_TRY(ar_dump_read_f32(b, start, n, y));
        *equal = memcmp(x, y, n * sizeof *x) == 0;
        *varies = *varies || (n > 1 && x[0] != x[1]);
    }
    return AR_OK;
}

/* Refuses steps with repeated activations. If the model learns, or reads new data, activations change from step to
 * step. Steps of forward passes alone may use one batch on purpose. */
static ar_status refuse_repeated_steps(const ari_verifying *v)
{
    const ar_verify_report *r = v->report;
    size_t repeated = 0;
    bool learned = false, equal = true, unused;
    for (size_t i = 0; equal && i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        const bool later = row->pass == 'f' && row->step > 1 && !ari_is_one_sided(row);
        const ar_dump_tensor *first_tensor = later ? in_first_step(v, row->name) : NULL;
        learned = learned || row->pass == 'g';
        if (first_tensor)
            AR_TRY(ari_are_equal(&equal, &unused, v->sides[i].tensors[0], first_tensor));
        repeated += first_tensor != NULL;
    }
    if (!equal || !learned || repeated < 2)
        return AR_OK;
    return ari_proof_refuse_repeated(repeated);
}

static ar_status refuse_dead(const ari_verifying *v)
{
    ari_loss_proof losses = {0};
    AR_TRY(read_losses(&losses, v));
    AR_TRY(ari_loss_proof_refuse_numbers(&losses));
    AR_TRY(refuse_dead_gradients(v));
    const size_t logits = ari_loss_proof_logits(&losses);
    if (logits > 0 && is_dimension(v->report, logits))
        return ari_loss_proof_refuse_constant(&losses);
    return refuse_repeated_steps(v);
}

ar_status ari_verify_refuse_dead(const ari_verifying *v)
{
    const ar_status st = v->report->same ? refuse_dead(v) : AR_OK;
    return st == AR_ERR_DTYPE ? AR_OK : st; /* for values that are not fp32 only equality is known */
}
