/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/status.h"

/* Explanations by the Python package anyrank.explain. A child process runs it, so that an explanation that crashes,
 * hangs or fails leaves the caller's verdict unchanged. The child is started as `python3 -I` with the package that came
 * with the running program: files in the working folder or in a dump's folder are never imported. */

AR_BEGIN_DECLS

/** Sends a request to python/anyrank/explain/door.py and reads its answer. Python is $ANYRANK_PYTHON, otherwise the
 *  first python3 on the PATH that has numpy. Ctrl-C ends only the child.
 *  request: borrowed. *answer: the child's JSON object, released with json_decref; NULL: no answer, and failure[cap]
 *  says why and what would help.
 *  Errors: AR_ERR_MEMORY, AR_ERR_IO (no temporary file). */
AR_NODISCARD ar_status ari_explain(json_t **answer, char *failure, size_t cap, const json_t *request);

AR_END_DECLS
