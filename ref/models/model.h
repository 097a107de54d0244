/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_MODELS_MODEL_H
#define ARI_MODELS_MODEL_H

#include "anyrank/model.h"

/** A model's parameters in an array, in the order of their first use. Gives; free(). Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_model_list(ar_param ***gives, size_t *n, ar_model *m);

#endif
