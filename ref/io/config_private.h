/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/config.h"

/* Private functions of anyrank/config.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Makes a model smaller that is split by the same rules: layers, hidden size, features of a head, MLP, experts
 *  and vocabulary become about 1/n of what they are (at least 2 layers, 2 features and 256 tokens where there are as many). Each keeps
 *  the divisors that it shares with the heads: a tp over which a plan splits the heads is legal if and only if it was.
 *  The numbers of query and KV heads and of experts, biases, gate, positions, window, tied head and all else stay. The name becomes
 *  "NAME at 1/n". Errors: AR_ERR_ARG (n is 0, or more than half of the features of a head; names the largest n). On
 *  error *c is untouched. */
AR_NODISCARD ar_status ari_config_shrink(ar_config *c, size_t n);
/** The data directory: $ANYRANK_DATA; else, for a program of the build tree, that of the sources; else the installed
 *  one, beside the running program's folder (../share/anyrank) or where the library was configured to be installed.
 *  Borrowed: environment, static or thread-local storage, valid until this thread calls it again. */
const char *ari_data_dir(void);
/** Finds a file of the Python package that came with the running program, and writes its absolute path without links to
 *  path. False: there is none, or it does not fit. */
bool ari_package_path(char *path, size_t cap, const char *file);

AR_END_DECLS
