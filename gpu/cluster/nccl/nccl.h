/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/device.h"
#include "anyrank/queue.h"
#include "anyrank/status.h"

/* Functions of NCCL in use, as a table that is filled at run time, so that neither the build nor a command without NCCL
 * needs it. Types and values are those of nccl.h, unchanged since NCCL 2.14; tests/gpu/nccl_abi.c compares them with
 * the header if it is installed. */
enum { ARI_NCCL_ID_BYTES = 128 };
typedef struct ari_nccl_id {
    char internal[ARI_NCCL_ID_BYTES];
} ari_nccl_id;

enum { ARI_NCCL_OLDEST = 21400 }; /* the first version with nonblocking communicators */

/* ncclConfig_t of that version. A later version reads the members indicated by `size` and `version`, and uses defaults
 * for the others. */
typedef struct ari_nccl_config {
    size_t size;
    unsigned magic, version; /* magic: 0xcafebeef */
    int blocking;
} ari_nccl_config;

enum { ARI_NCCL_SUCCESS = 0, ARI_NCCL_IN_PROGRESS = 7, ARI_NCCL_NO_COLOR = -1 };
enum {
    ARI_NCCL_U8 = 1,
    ARI_NCCL_I32 = 2,
    ARI_NCCL_I64 = 4,
    ARI_NCCL_F16 = 6,
    ARI_NCCL_F32 = 7,
    ARI_NCCL_F64 = 8,
    ARI_NCCL_BF16 = 9
};
enum { ARI_NCCL_SUM = 0, ARI_NCCL_MAX = 2, ARI_NCCL_MIN = 3 };

/* X(name without "nccl", arguments). Results are ncclResult_t, communicators and streams are pointers, and types and
 * operations are enumerations passed as int. */
#define ARI_NCCL_TABLE(X)                                                                                         \
    X(GetVersion, (int *version))                                                                                 \
    X(GetUniqueId, (ari_nccl_id * id))                                                                            \
    X(CommInitRankConfig, (void **comm, int n, ari_nccl_id id, int rank, ari_nccl_config *config))                \
    X(CommFinalize, (void *comm))                                                                                 \
    X(CommDestroy, (void *comm))                                                                                  \
    X(CommAbort, (void *comm))                                                                                    \
    X(CommGetAsyncError, (void *comm, int *result))                                                               \
    X(AllReduce, (const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream))        \
    X(ReduceScatter, (const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream))    \
    X(AllGather, (const void *send, void *recv, size_t count, int type, void *comm, void *stream))                \
    X(Broadcast, (const void *send, void *recv, size_t count, int type, int root, void *comm, void *stream))      \
    X(Reduce, (const void *send, void *recv, size_t count, int type, int op, int root, void *comm, void *stream)) \
    X(Send, (const void *send, size_t count, int type, int peer, void *comm, void *stream))                       \
    X(Recv, (void *recv, size_t count, int type, int peer, void *comm, void *stream))                             \
    X(GroupStart, (void))                                                                                         \
    X(GroupEnd, (void))

typedef struct ari_nccl {
#define ARI_NCCL_SLOT(name, arguments) int(*name) arguments;
    ARI_NCCL_TABLE(ARI_NCCL_SLOT)
#undef ARI_NCCL_SLOT
    const char *(*GetErrorString)(int result);
    const char *(*GetLastError)(void *comm);
    /* NULL: NCCL before 2.18. *child is set once nothing of `comm` is in progress. config NULL: that of `comm`. */
    int (*CommSplit)(void *comm, int color, int key, void **child, ari_nccl_config *config);
    /* in a library that stands in for NCCL on the emulated device: names this process's GPU; its streams are
     * ari_nccl_emulated_stream *. NULL: NCCL itself */
    const char *(*emulated_gpu)(void);
    int version; /* as NCCL reports it: 22809 */
} ari_nccl;

struct ar_device;
struct ar_queue;
typedef struct ari_nccl_emulated_stream {
    struct ar_device *device;
    struct ar_queue *queue;
} ari_nccl_emulated_stream;

/** Loads NCCL, which the environment variable ANYRANK_NCCL may name (gpu/library.h). It stays loaded, since it cannot
 *  be unloaded. Errors: AR_ERR_UNSUPPORTED, with the loader's reason and a remedy. */
AR_NODISCARD ar_status ari_nccl_load(ari_nccl *out);
/** Lets NCCL copy through buffers of its own between ranks that are threads of this process (NCCL_P2P_DIRECT_DISABLE,
 *  unless it is set) if one of the process's GPUs cannot reach another. Otherwise NCCL reads and writes the ranks' own
 *  buffers. Call it before other threads exist. */
void ari_nccl_choose_direct(int gpus, bool (*reaches)(int gpu, int peer));
/** Returns AR_OK, also for an operation in progress, or AR_ERR_DEVICE with NCCL's message for `result`. comm may be
 *  NULL. */
ar_status ari_nccl_check(const ari_nccl *n, int result, void *comm, const char *label);
