/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "gpu/cluster/nccl/nccl.h"
#include "gpu/cluster/nccl/process.h"
#include "gpu/device_private.h"
#include "gpu/library.h"
#include "gpu/native.h"
#include "ref/core/os/os.h"

enum { FIRST_SPLIT = 21800 };

/* Sets variables that NCCL reads at its first use: all connections of a communicator are made when it is created, and
 * kernels of several communicators start in the order in which the host launched them. Variables that are already set
 * are kept. */
static void set_variables(void)
{
    (void)setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    (void)setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    ari_nccl_choose_direct(ari_gpu_count(), ari_gpu_reaches);
}

void ari_nccl_choose_direct(int gpus, bool (*reaches)(int gpu, int peer))
{
    for (int gpu = 0; gpu < gpus; gpu++) {
        for (int peer = 0; peer < gpus; peer++) {
            if (gpu != peer && !reaches(gpu, peer))
                (void)setenv("NCCL_P2P_DIRECT_DISABLE", "1", 0);
        }
    }
}

ar_status ari_nccl_load(ari_nccl *out)
{
    static const ari_library nccl = {
        "NCCL", "ANYRANK_NCCL", "libnccl2 or Python's nvidia-nccl", NULL, {"libnccl.so.2", "libnccl.so"}};
    const char *missing = NULL;
    void *library = NULL;
    *out = (ari_nccl){.version = 0};
    set_variables();
    AR_TRY(ari_library_open(&library, &nccl));
    const char *name = ari_library_place(library);
#define FIND(slot, arguments)                                 \
    if (!ari_library_find(library, "nccl" #slot, &out->slot)) \
        missing = "nccl" #slot;
    ARI_NCCL_TABLE(FIND)
#undef FIND
    if (!ari_library_find(library, "ncclGetErrorString", &out->GetErrorString))
        missing = "ncclGetErrorString";
    if (!ari_library_find(library, "ncclGetLastError", &out->GetLastError))
        missing = "ncclGetLastError";
    (void)ari_library_find(library, "ncclCommSplit", &out->CommSplit);
    (void)ari_library_find(library, "ari_nccl_emulated_gpu", &out->emulated_gpu);
    if (missing)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%.300s is no NCCL that can be used: it has no %s", name, missing);
    AR_TRY(ari_nccl_check(out, out->GetVersion(&out->version), NULL, "ncclGetVersion"));
    if (out->version < ARI_NCCL_OLDEST)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%.300s is NCCL %d; %d or newer expected", name, out->version,
                            ARI_NCCL_OLDEST);
    if (out->version < FIRST_SPLIT)
        out->CommSplit = NULL;
    return AR_OK;
}

ar_status ari_nccl_check(const ari_nccl *n, int result, void *comm, const char *label)
{
    if (result == ARI_NCCL_SUCCESS || result == ARI_NCCL_IN_PROGRESS)
        return AR_OK;
    const char *last_error = n->GetLastError(comm);
    return ar_error_set(AR_ERR_DEVICE, "%s: %s%s%.600s", label, n->GetErrorString(result),
                        last_error && last_error[0] ? ": " : "", last_error ? last_error : "");
}

bool ari_nccl_describe(char *text, size_t size)
{
    ari_nccl n;
    if (ari_nccl_load(&n) != AR_OK) {
        snprintf(text, size, "%s", ar_error_message());
        return false;
    }
    snprintf(text, size, "%d.%d.%d", n.version / 10000, n.version / 100 % 100, n.version % 100);
    return true;
}
