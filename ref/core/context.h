/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_CONTEXT_H
#define ARI_CORE_CONTEXT_H

#include "anyrank/context.h"

/* One thing the step owns: a buffer of the device, or an object with its own destructor. */
typedef struct ari_owned {
    struct ari_owned *next, *prev;
    ar_buf buf;                               /* what it is found by */
    size_t bytes;                             /* 0 for objects */
    void (*destroy)(ar_ctx *c, void *object); /* NULL: buf is device memory */
} ari_owned;

struct ar_ctx {
    ar_device *device;
    ar_queue *queue; /* the main queue */
    ar_comm *tp;     /* never NULL */
    ar_comm *self;   /* owned; what tp is where none was given */
    const ar_arith_ops *arith;
    ar_fault fault;
    ar_tap_fn tap;
    void *tap_user;
    ari_owned owned; /* head of a ring of everything that ends with the step */
    size_t bytes_now, bytes_peak;
};

/** Device memory that ends with the step. */
AR_NODISCARD ar_status ari_step_alloc(ar_ctx *c, ar_buf *gives, size_t bytes);
void ari_step_free(ar_ctx *c, ar_buf b);
/** Makes the step own an object: destroy(c, object) runs at its end. On failure the object is destroyed at once. */
AR_NODISCARD ar_status ari_step_own(ar_ctx *c, void *object, void (*destroy)(ar_ctx *c, void *object));
/** Ends an owned object early. */
void ari_step_disown(ar_ctx *c, void *object);

#endif
