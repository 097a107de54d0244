/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_LAYERS_MODULE_LOSS_H
#define ARI_LAYERS_MODULE_LOSS_H

#include "anyrank/loss.h"

/** Terms are subtracted from now on, or added again: the sum of one batch's minus another's is then rounded once. */
void ari_loss_subtract(ar_loss *loss, bool subtract);

#endif
