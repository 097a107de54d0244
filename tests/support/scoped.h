/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdlib.h>
#include <string.h>

/* What ends with the scope of the variable that has it, in the reverse order of the declarations: OWNED(end) a pointer,
 * which `end` gets; SCOPED(end) an object, of which `end` gets the address. As always, a test that fails leaves them. */
#define OWNED(end) __attribute__((cleanup(owned_##end)))
#define SCOPED(end) __attribute__((cleanup(end)))

/* Lets OWNED have a function for pointers to this type. OWNED_BY also declares the function, so that a test includes the
 * headers of what it uses alone. */
#define OWNER(type, end)                     \
    static inline void owned_##end(type **p) \
    {                                        \
        end(*p);                             \
    }

#define OWNED_BY(type, end)   \
    struct type;              \
    void end(struct type *p); \
    OWNER(struct type, end)

static inline void owned_free(void *p)
{
    void *was;
    memcpy(&was, p, sizeof was); /* a pointer of any type */
    free(was);
}

OWNED_BY(ar_check_report, ar_check_report_destroy)
OWNED_BY(ar_checkpoint, ar_checkpoint_close)
OWNED_BY(ar_comm, ar_comm_destroy)
OWNED_BY(ar_ctx, ar_ctx_destroy)
OWNED_BY(ar_data, ari_data_close)
OWNED_BY(ar_ddp, ar_ddp_destroy)
OWNED_BY(ar_device, ar_device_destroy)
OWNED_BY(ar_dump, ar_dump_close)
OWNED_BY(ar_event, ar_event_destroy)
OWNED_BY(ar_gradients, ar_gradients_destroy)
OWNED_BY(ar_lint_report, ari_lint_report_destroy)
OWNED_BY(ar_loader, ari_loader_destroy)
OWNED_BY(ar_loss, ar_loss_destroy)
OWNED_BY(ar_model, ar_model_destroy)
OWNED_BY(ar_module, ar_module_destroy)
OWNED_BY(ar_optimizer, ar_optimizer_destroy)
OWNED_BY(ar_pipeline_schedule, ari_pipeline_schedule_destroy)
OWNED_BY(ar_process, ar_process_destroy)
OWNED_BY(ar_queue, ar_queue_destroy)
OWNED_BY(ar_saved, ar_saved_destroy)
OWNED_BY(ar_st_file, ari_st_close)
OWNED_BY(ar_st_model, ari_st_model_close)
OWNED_BY(ar_trace, ar_trace_destroy)
OWNED_BY(ar_training_report, ar_training_report_destroy)
OWNED_BY(ar_verify_report, ar_verify_report_destroy)
