/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_MODELS_PARAM_LIST_H
#define ARI_MODELS_PARAM_LIST_H

#include "anyrank/config.h"
#include "anyrank/tensor.h"

/** Calls visit(user, name, ndim, shape) for every parameter of a config, Hugging Face names and shapes, in the order of
 *  first use. A status other than AR_OK ends the walk with it. */
AR_NODISCARD ar_status ari_param_list(const ar_config *c,
                                      ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape),
                                      void *user);

#endif
