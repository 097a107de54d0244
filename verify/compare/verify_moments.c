/* SPDX-License-Identifier: Apache-2.0 */
/* Finds moments that the other run's optimizer keeps in bf16 although the file has fp32: within a tolerance, this is
 * evidence of another optimizer. */
#include "ref/core/float_bits.h"
#include "verify/compare/verify_impl.h"

/* One fp32 number in 2^16 is a bf16 number, and tiny numbers and zeros are frequent in many tensors of correct runs,
 * so one tensor proves nothing. This many nonzero second moments in all tensors, each a bf16 number, are no
 * coincidence. */
enum { ENOUGH = 1024 };
/* The reference's moments count as fp32 if at most one in this many is a bf16 number. */
enum { FEW = 16 };

static bool is_of_fp32(const ari_pair *p)
{
    return p->format[0].dtype == AR_F32 && p->format[1].dtype == AR_F32;
}

typedef struct moment_count {
    size_t values, bf16; /* number of nonzero values; how many of them are bf16 numbers */
} moment_count;

/* Stops at the other run's first value that is not a bf16 number. */
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

/* SGD's momentum starts as the gradient, which has 16 bits if the model has. The decision therefore uses Adam's second
 * moments, which are squares; the first moments have to agree. */
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
