/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled where there is an nccl.h, and never run: that gpu/cluster/nccl/nccl.h says what NCCL's own header says. */
#include <nccl.h>
#include <stddef.h>

#include "gpu/cluster/nccl/nccl.h"

#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)
SAME(ARI_NCCL_ID_BYTES, NCCL_UNIQUE_ID_BYTES);
SAME(sizeof(ari_nccl_id), sizeof(ncclUniqueId));
SAME(ARI_NCCL_SUCCESS, ncclSuccess);
SAME(ARI_NCCL_IN_PROGRESS, ncclInProgress);
SAME(ARI_NCCL_NO_COLOR, NCCL_SPLIT_NOCOLOR);
SAME(offsetof(ari_nccl_config, magic), offsetof(ncclConfig_t, magic));
SAME(offsetof(ari_nccl_config, version), offsetof(ncclConfig_t, version));
SAME(offsetof(ari_nccl_config, blocking), offsetof(ncclConfig_t, blocking));
SAME(ARI_NCCL_U8, ncclUint8);
SAME(ARI_NCCL_I32, ncclInt32);
SAME(ARI_NCCL_I64, ncclInt64);
SAME(ARI_NCCL_F16, ncclFloat16);
SAME(ARI_NCCL_F32, ncclFloat32);
SAME(ARI_NCCL_F64, ncclFloat64);
SAME(ARI_NCCL_BF16, ncclBfloat16);
SAME(ARI_NCCL_SUM, ncclSum);
SAME(ARI_NCCL_MAX, ncclMax);
SAME(ARI_NCCL_MIN, ncclMin);
SAME(sizeof(int), sizeof(ncclResult_t));
SAME(sizeof(int), sizeof(ncclDataType_t));
SAME(sizeof(int), sizeof(ncclRedOp_t));
SAME(sizeof(void *), sizeof(ncclComm_t));
SAME(sizeof(void *), sizeof(cudaStream_t));

/* Arguments in NCCL's order: each call compiles only if they are. */
ncclResult_t ari_nccl_abi(ncclComm_t *comm, ncclUniqueId *id, void *at, size_t count, ncclDataType_t type,
                          ncclRedOp_t op, int root, cudaStream_t stream, int *number, ncclResult_t *result,
                          ncclConfig_t *config);
ncclResult_t ari_nccl_abi(ncclComm_t *comm, ncclUniqueId *id, void *at, size_t count, ncclDataType_t type,
                          ncclRedOp_t op, int root, cudaStream_t stream, int *number, ncclResult_t *result,
                          ncclConfig_t *config)
{
    const ncclResult_t all[] = {ncclGetVersion(number),
                                ncclGetUniqueId(id),
                                ncclCommInitRankConfig(comm, root, *id, root, config),
                                ncclCommSplit(*comm, root, root, comm, config),
                                ncclCommGetAsyncError(*comm, result),
                                ncclAllReduce(at, at, count, type, op, *comm, stream),
                                ncclReduceScatter(at, at, count, type, op, *comm, stream),
                                ncclAllGather(at, at, count, type, *comm, stream),
                                ncclBroadcast(at, at, count, type, root, *comm, stream),
                                ncclReduce(at, at, count, type, op, root, *comm, stream),
                                ncclSend(at, count, type, root, *comm, stream),
                                ncclRecv(at, count, type, root, *comm, stream),
                                ncclGroupStart(),
                                ncclGroupEnd(),
                                ncclCommFinalize(*comm),
                                ncclCommAbort(*comm),
                                ncclCommDestroy(*comm)};
    return all[(size_t)(ncclGetErrorString(all[0])[0] == ncclGetLastError(*comm)[0]) % (sizeof all / sizeof *all)];
}
