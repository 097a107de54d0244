/* SPDX-License-Identifier: Apache-2.0 */
/* Linked into the command instead of a part of the diagnosis (--wrap): it ends as BREAKS says. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "verify/diagnose/case.h"

ar_status __real_ari_look_at_whole(ari_trace *best, const ari_case *c);
ar_status __wrap_ari_look_at_whole(ari_trace *best, const ari_case *c);

ar_status __wrap_ari_look_at_whole(ari_trace *best, const ari_case *c)
{
    const char *how = getenv("BREAKS");
    if (!how)
        return __real_ari_look_at_whole(best, c);
    fprintf(stderr, "a measure breaks\n");
    if (strcmp(how, "error") == 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a measure");
    if (strcmp(how, "abort") == 0)
        abort();
    if (strcmp(how, "exit") == 0)
        _exit(23);
    while (strcmp(how, "hang") == 0)
        pause();
    raise(SIGSEGV);
    return AR_OK;
}
