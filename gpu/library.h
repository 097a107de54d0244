/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Shared libraries that are loaded when they are first needed, so that a command that needs none of them neither waits
 * for them nor asks that they are there. They stay loaded. */

typedef struct ari_library {
    const char *name;       /* for messages: "NCCL" */
    const char *variable;   /* of the environment, which names the file: "ANYRANK_NCCL" */
    const char *package;    /* what to install, for messages */
    const char *built_with; /* the file that the build found, or NULL */
    const char *files[2];   /* what the file is called, the best first; NULL ends them */
} ari_library;

/** Loads what `variable` names and nothing else or, where that is not set, the first that can be loaded of: the file
 *  that the build found, what the loader finds, files of CUDA toolkits (of CUDA_HOME, CUDA_PATH and NCCL_HOME, then at
 *  the usual places), and those that Python packages bring (for the python3 on the PATH, in environments, then at
 *  the usual places). Errors: AR_ERR_UNSUPPORTED: none can; the message says why, and where it looked. */
AR_NODISCARD ar_status ari_library_open(void **out, const ari_library *which);
/** *slot, a pointer to a function = the function of that name. False: there is none, and *slot is NULL. */
bool ari_library_find(void *library, const char *name, void *slot);

AR_END_DECLS
