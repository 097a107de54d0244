/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/names.h"

#include <stdio.h>

#include "ref/models/family.h"

void ari_operation_path(char *out, size_t cap, const ar_config *c, const ari_operation *op, ari_role role)
{
    char layer[24];
    snprintf(layer, sizeof layer, "%zu", op->layer);
    ari_role_path(out, cap, c->arch, layer, role);
}

void ari_operation_tag(char *out, size_t cap, const ar_config *c, const ari_operation *op, const ari_op_call *call)
{
    char bucket[40] = "", path[160] = "";
    if (op->kind == ARI_OPERATION_GRADIENT_SUM)
        snprintf(bucket, sizeof bucket, "bucket %zu: ", op->bucket);
    if (call->role != ARI_NO_ROLE)
        ari_operation_path(path, sizeof path, c, op, call->role);
    snprintf(out, cap, "%s%s%s", bucket, path, call->tag);
}
