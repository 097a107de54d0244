/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/net_fault.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/out.h"

/* A step of the bundled models on two ranks has more collectives than that, and a check waits longer. */
enum { COLLECTIVES = 100 };
#define LONGEST_NS UINT64_C(100000000)

ar_status ari_net_fault_parse(ar_sim_fault *f, const char *text, int ranks)
{
    static const char drawn[] = "seed:";
    if (strncmp(text, drawn, sizeof drawn - 1) != 0) {
        AR_TRY(ar_sim_fault_parse(f, text));
    } else {
        const char *number = text + sizeof drawn - 1;
        char *end = NULL;
        errno = 0;
        const uint64_t seed = strtoull(number, &end, 10);
        if (number[0] < '0' || number[0] > '9' || *end != '\0' || errno != 0)
            return ar_error_set(AR_ERR_ARG, "--net-fault: got '%s', expected a seed, as in seed:7", ARI_SHOW(text));
        *f = ar_sim_fault_draw(seed, ranks, COLLECTIVES, LONGEST_NS);
    }
    if (f->rank >= ranks)
        return ar_error_set(AR_ERR_ARG, "--net-fault '%s': the layout's ranks are 0 to %d", ARI_SHOW(text), ranks - 1);
    return AR_OK;
}
