/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_LAYERS_MODULE_LIST_H
#define ARI_LAYERS_MODULE_LIST_H

#include "anyrank/module.h"

/** A module's parameters, each once, in the order of ar_module_params. Gives; free(). Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_module_list(ar_param ***gives, size_t *n, ar_module *m);

#endif
