/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Shared libraries loaded at first use, so that a command without need for them neither waits for nor requires them.
 * They stay loaded. */

typedef struct ari_library {
    const char *name;       /* name for messages: "NCCL" */
    const char *variable;   /* environment variable that names the file: "ANYRANK_NCCL" */
    const char *package;    /* package to install, for messages */
    const char *built_with; /* the file that the build found, or NULL */
    const char *files[2];   /* names of the file, the preferred one first, terminated by NULL */
} ari_library;

/** Loads the library that `variable` names. If it is not set, loads the first available of: the file found by the
 *  build, the loader's default, files of CUDA toolkits (CUDA_HOME, CUDA_PATH and NCCL_HOME, then the usual places), and
 *  files of Python packages (of the python3 on the PATH, in environments, then the usual places). Errors:
 *  AR_ERR_UNSUPPORTED with the reason and the places searched. */
AR_NODISCARD ar_status ari_library_open(void **out, const ari_library *which);
/** Sets *slot, a pointer to a function pointer, to the function of that name. Returns false and sets *slot to NULL if
 *  there is none. */
bool ari_library_find(void *library, const char *name, void *slot);

AR_END_DECLS
