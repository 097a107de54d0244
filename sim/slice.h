/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_SLICE_H
#define ARI_SIM_SLICE_H

#include "sim/wire.h"

/** Slice c of the all_reduce that is agreed upon, from all inputs to all outputs, by the wire's mover, whichever member
 *  that is: N-1 reads and N-1 writes of the slice, so the N slices come to the ring's 2(N-1) D. False: broken off. */
bool ari_slice_move(ari_wire *w, int c);

#endif
