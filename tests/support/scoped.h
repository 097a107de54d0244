/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "anyrank/check.h"
#include "anyrank/checkpoint.h"
#include "anyrank/comm.h"
#include "anyrank/context.h"
#include "anyrank/data.h"
#include "anyrank/ddp.h"
#include "anyrank/device.h"
#include "anyrank/dump.h"
#include "anyrank/gradients.h"
#include "anyrank/lint.h"
#include "anyrank/loss.h"
#include "anyrank/model.h"
#include "anyrank/module.h"
#include "anyrank/optimizer.h"
#include "anyrank/process.h"
#include "anyrank/queue.h"
#include "anyrank/safetensors.h"
#include "anyrank/schedule.h"
#include "anyrank/trace.h"
#include "anyrank/training.h"
#include "anyrank/verify.h"
#include "ref/comm/comm_private.h"
#include "ref/io/safetensors_private.h"
#include "ref/pipeline/schedule_private.h"
#include "verify/lint/lint_private.h"
#include "verify/run/checkpoint_private.h"
#include "verify/run/data_private.h"

/* What ends with the scope of the variable that has it, in the reverse order of the declarations: OWNED(end) a pointer,
 * which `end` gets; SCOPED(end) an object, of which `end` gets the address. As always, a test that fails leaves them. */
#define OWNED(end) __attribute__((cleanup(owned_##end)))
#define SCOPED(end) __attribute__((cleanup(end)))

/* Lets OWNED have a function for pointers to this type. */
#define OWNER(type, end)                     \
    static inline void owned_##end(type **p) \
    {                                        \
        end(*p);                             \
    }

static inline void owned_free(void *p)
{
    void *was;
    memcpy(&was, p, sizeof was); /* a pointer of any type */
    free(was);
}

OWNER(ar_check_report, ar_check_report_destroy)
OWNER(ar_checkpoint, ari_checkpoint_close)
OWNER(ar_comm, ari_comm_destroy)
OWNER(ar_ctx, ar_ctx_destroy)
OWNER(ar_data, ari_data_close)
OWNER(ar_ddp, ar_ddp_destroy)
OWNER(ar_device, ar_device_destroy)
OWNER(ar_dump, ar_dump_close)
OWNER(ar_event, ar_event_destroy)
OWNER(ar_gradients, ar_gradients_destroy)
OWNER(ar_lint_report, ari_lint_report_destroy)
OWNER(ar_loader, ari_loader_destroy)
OWNER(ar_loss, ar_loss_destroy)
OWNER(ar_model, ar_model_destroy)
OWNER(ar_module, ar_module_destroy)
OWNER(ar_optimizer, ar_optimizer_destroy)
OWNER(ar_pipeline_schedule, ari_pipeline_schedule_destroy)
OWNER(ar_process, ar_process_destroy)
OWNER(ar_queue, ar_queue_destroy)
OWNER(ar_saved, ar_saved_destroy)
OWNER(ar_st_file, ari_st_close)
OWNER(ar_st_model, ari_st_model_close)
OWNER(ar_trace, ar_trace_destroy)
OWNER(ar_training_report, ar_training_report_destroy)
OWNER(ar_verify_report, ar_verify_report_destroy)
