/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/names.h"

#include "anyrank/context.h"
#include "anyrank/data.h"
#include "anyrank/device.h"
#include "anyrank/optimizer.h"
#include "anyrank/process.h"
#include "anyrank/schedule.h"
#include "anyrank/sensitivity.h"
#include "ref/core/batch_private.h"
#include "ref/core/context_private.h"
#include "ref/core/data_private.h"
#include "ref/core/device_private.h"
#include "ref/core/optimizer_private.h"
#include "ref/core/process_private.h"
#include "ref/core/schedule_private.h"
#include "ref/core/sensitivity_private.h"

const char *const ari_numerics_names[] = {"exact", "native", NULL};
const char *const ari_precision_names[] = {"f32", "tf32", "bf16", NULL};
const char *const ari_recompute_names[] = {"none", "selective", "full", NULL};
const char *const ari_balance_names[] = {"none", "sequence", "batch", "layers", NULL};
const char *const ari_dispatch_names[] = {"all-to-all", "all-gather", NULL};
const char *const ari_bucket_mode_names[] = {"overlap", "eager", NULL};
const char *const ari_bucket_order_names[] = {"reverse", "largest-first", NULL};
const char *const ari_optimizer_names[] = {"sgd", "adam", "adamw", "muon", NULL};
const char *const ari_lr_schedule_names[] = {"constant", "cosine", NULL};
const char *const ari_decay_names[] = {"all", "matrices", NULL};
const char *const ari_data_format_names[] = {"auto", "bytes", "u16", "u32", "safetensors", "jsonl", NULL};
const char *const ari_pp_schedule_names[] = {
#define AR_PP_SCHEDULE_TEXT(name, text) text,
    AR_PP_SCHEDULE_TABLE(AR_PP_SCHEDULE_TEXT)
#undef AR_PP_SCHEDULE_TEXT
        NULL};
const char *const ari_sensitivity_names[] = {"f32", "tf32", "bf16", "bf16-pure", "f16", "f16-pure", NULL};
const char *const ari_transport_names[] = {"sim", "mpi", "nccl", NULL};
const char *const ari_device_kind_names[] = {"cpu", "cuda", "emulated", NULL};

static const char *name_at(const char *const *names, int value)
{
    for (int i = 0; names[i]; i++) {
        if (i == value)
            return names[i];
    }
    return "?";
}

#define NAMED(function, type, names)             \
    const char *function(type value)             \
    {                                            \
        return name_at(ari_##names, (int)value); \
    }
NAMED(ari_precision_name, ar_precision, precision_names)
NAMED(ari_recompute_name, ar_recompute, recompute_names)
NAMED(ari_balance_name, ar_balance, balance_names)
NAMED(ari_dispatch_name, ar_dispatch, dispatch_names)
NAMED(ari_optimizer_name, ar_optimizer_kind, optimizer_names)
NAMED(ari_schedule_name, ar_schedule, lr_schedule_names)
NAMED(ari_data_format_name, ar_data_format, data_format_names)
NAMED(ari_pp_schedule_name, ar_pp_schedule, pp_schedule_names)
NAMED(ari_sensitivity_name, ar_sensitivity, sensitivity_names)
NAMED(ari_transport_name, ar_transport, transport_names)
NAMED(ari_device_kind_name, ar_device_kind, device_kind_names)
