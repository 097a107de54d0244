/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/sketches/proof.h"

#include <math.h>
#include <string.h>

#include "verify/compare/verify_proof.h"

static bool is_compared(const ari_sketch_row *row)
{
    return row->side[0] != NULL && row->side[1] != NULL && !row->left_out && row->unjudged[0] == '\0';
}

/* Returns the counts of a sketch. Zeros are not counted in a sum over ranks, but its largest magnitude is bounded. */
static ari_value_counts counts_of(const ar_sketch *s)
{
    const bool zero = s->max_abs == 0.0 && s->nan + s->inf == 0;
    const uint64_t zeros = zero ? s->elements : s->summed ? 0 : s->zeros;
    return (ari_value_counts){s->elements, zeros, s->nan, s->inf};
}

/* Returns the value of a tensor with one element. */
static double value_of(const ar_sketch *s)
{
    return s->nan > 0 ? (double)NAN : s->inf > 0 ? (double)INFINITY : s->sum;
}

static bool is_loss(const ari_sketch_row *row)
{
    return row->key.pass == 'f' && row->side[0]->sketch->elements == 1 && strncmp(row->name, "loss:", 5) == 0;
}

static bool is_dimension(const ari_sketch_report *r, size_t n)
{
    for (size_t i = 0; i < r->rows; i++) {
        const ar_sketch *s = is_compared(&r->row[i]) ? r->row[i].side[0]->sketch : NULL;
        for (int d = 0; s != NULL && d < s->ndim; d++) {
            if (s->shape[d] == n)
                return true;
        }
    }
    return false;
}

/* The row of the same activation in the first step; NULL. Rows are sorted by step. */
static const ari_sketch_row *first_of(const ari_sketch_report *r, const ari_sketch_row *row)
{
    for (size_t i = 0; i < r->rows && r->row[i].step == r->row[0].step; i++) {
        const ari_order_key *key = &r->row[i].key;
        if (is_compared(&r->row[i]) && key->pass == 'f' && key->stem == row->key.stem &&
            memcmp(key->name, row->key.name, key->stem) == 0)
            return &r->row[i];
    }
    return NULL;
}

/* If the model learns, activations change from step to step. The first difference ends the search. */
static ar_status refuse_repeated_steps(const ari_sketch_report *r)
{
    size_t repeated = 0;
    bool learned = false;
    for (size_t i = 0; i < r->rows; i++) {
        const ari_sketch_row *row = &r->row[i];
        learned = learned || row->key.pass == 'g';
        if (!is_compared(row) || row->key.pass != 'f' || row->step == r->row[0].step)
            continue;
        const ari_sketch_row *first_row = first_of(r, row);
        const ar_sketch *a = row->side[0]->sketch, *b = first_row != NULL ? first_row->side[0]->sketch : NULL;
        if (b == NULL)
            continue;
        if (a->summed || b->summed || a->elements != b->elements || a->digest != b->digest)
            return AR_OK;
        repeated++;
    }
    return learned && repeated >= 2 ? ari_proof_refuse_repeated(repeated) : AR_OK;
}

ar_status ari_sketches_refuse_dead(const ari_sketch_report *r, const ar_verify_options *o)
{
    ari_proof gradients = {0};
    ari_loss_proof losses = {0};
    for (size_t i = 0; i < r->rows; i++) {
        const ari_sketch_row *row = &r->row[i];
        if (!is_compared(row))
            continue;
        const ar_sketch *a = row->side[0]->sketch, *b = row->side[1]->sketch;
        const ari_value_counts counts[2] = {counts_of(a), counts_of(b)};
        ari_proof_add(&gradients, row->key.pass, &counts[0], &counts[1]);
        if (is_loss(row))
            ari_loss_proof_add(&losses, value_of(a), value_of(b));
    }
    AR_TRY(ari_loss_proof_refuse_numbers(&losses));
    AR_TRY(ari_proof_refuse(&gradients, o->only_count > 0));
    const size_t logits = ari_loss_proof_logits(&losses);
    if (logits > 0 && is_dimension(r, logits))
        return ari_loss_proof_refuse_constant(&losses);
    return refuse_repeated_steps(r);
}
