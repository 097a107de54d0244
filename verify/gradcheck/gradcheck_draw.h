/* SPDX-License-Identifier: Apache-2.0 */
/* Which elements of a gradient are compared with differences of the loss. */
#ifndef ARI_VERIFY_GRADCHECK_GRADCHECK_DRAW_H
#define ARI_VERIFY_GRADCHECK_GRADCHECK_DRAW_H

#include <stddef.h>
#include <stdint.h>

enum { ARI_DRAWN = 2, ARI_DRAWN_MOST = ARI_DRAWN + 1 };
/* Of the largest: the smallest gradient that is drawn, and the scale of zeros. */
#define ARI_DRAWN_SMALL 1e-3

typedef struct ari_drawn {
    size_t n;
    size_t at[ARI_DRAWN_MOST];
} ari_drawn;

/** Adds elements of gradient [count] until there are `wanted`: those with |g| > low, or with g = 0 where low is 0, by
 *  drawing from the stream `key`; where that finds too few, the first ones from the last place drawn. */
void ari_draw_elements(ari_drawn *d, uint64_t key, size_t wanted, double low, const double *gradient, size_t count);

#endif
