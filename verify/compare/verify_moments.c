/* SPDX-License-Identifier: Apache-2.0 */
/* Moments that the other run's optimizer keeps in bf16, in a file of fp32: within a tolerance, of another optimizer. */
#include "ref/core/float_bits.h"
#include "verify/compare/verify_impl.h"

/* One fp32 number in 2^16 has the bits of bf16, but tiny ones, and zeros, come in many tensors of right runs: a tensor
 * alone proves nothing. So many second moments that are not zero, of all tensors and each in bf16, are no chance. */
enum { ENOUGH = 1024 };
/* The reference's are in fp32 if at most one in so many is a number of bf16. */
enum { FEW = 16 };

static bool is_of_fp32(const ari_pair *p)
{
    return p->format[0].dtype == AR_F32 && p->format[1].dtype == AR_F32;
}

typedef struct moment_count {
    size_t values, bf16; /* that are not zero; of these, numbers of bf16 */
} moment_count;

/* Ends at the first value of the other that is NaN of bf16. */
static ar_status count_moments(moment_count *count, const ari_pair *p)
{
    ari_lockstep b = ari_lockstep_begin(p->side, 2, 0, p->side[0]->count);
    while (count[1].bf16 == count[1].values && ari_lockstep_next(&b)) {
        for (int k = 0; k < 2; k++) {
            const uint32_t bits = ari_bits32((float)b.x[k]);
            count[k].values += bits << 1 != 0;
            count[k].bf16 += bits << 1 != 0 && (bits & 0xffff) == 0;
        }
    }
    return b.status;
}

/* SGD's momentum begins as the gradient, which has 16 bits wherever the model does: Adam's second moments decide, which
 * are of squares, and the first have to agree. */
ar_status ari_verify_find_short_moments(bool *found, const ari_verifying *v)
{
    moment_count first_moment[2] = {{0}}, second[2] = {{0}};
    for (const ari_pair *p = v->pair; p < v->pair + v->pairs; p++) {
        const bool moment = (p->row->pass == 'm' || p->row->pass == 'v') && is_of_fp32(p);
        if (moment)
            AR_TRY(count_moments(p->row->pass == 'm' ? first_moment : second, p));
    }
    *found = second[1].values >= ENOUGH && second[1].bf16 == second[1].values &&
             first_moment[1].bf16 == first_moment[1].values && second[0].bf16 * FEW <= second[0].values &&
             first_moment[0].bf16 * FEW <= first_moment[0].values;
    return AR_OK;
}
