/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/layout.h"

#include "anyrank/device.h"

const char *const ari_mlp_order_names[] = {"column-row", "row-column", NULL};
const char *const ari_algorithm_names[] = {"direct", "ring", NULL};
const char *const ari_numerics_names[] = {"exact", "native", NULL};
const char *const ari_device_names[] = {"cpu", "cuda", NULL};

ar_status ari_layout_check(const ari_layout_values *v)
{
    if (v->numerics != 0)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--numerics native: not in this version");
    if (v->device != 0)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--device cuda: not in this version");
    /* What the device refuses (ANYRANK_EXACT_PATH), it refuses before minutes of work. */
    ar_device *device = NULL;
    AR_TRY(ar_device_cpu_create(&device, 1));
    ar_device_destroy(device);
    return AR_OK;
}

ar_sim_algorithm ari_layout_algorithm(const ari_layout_values *v)
{
    return v->algorithm == 1 ? AR_SIM_RING : AR_SIM_DIRECT;
}

uint64_t ari_layout_timeout_ns(const ari_layout_values *v)
{
    return (uint64_t)(v->timeout * 1e9);
}

ar_status ari_layout_plan(const ari_layout_values *v, ar_arch arch, ar_plan *plan)
{
    *plan = (ar_plan){0};
    return v->mlp_order == 0 ? AR_OK : ar_plan_add_mlp_order(plan, arch, (ar_mlp_order)v->mlp_order);
}
