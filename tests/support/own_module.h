/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of a user's, y = x + s * (x W^T) with a scale for each feature, that makes one mistake on request. */
#pragma once

#include "anyrank/layers.h"

typedef enum own_mistake {
    OWN_RIGHT,
    OWN_FORGETS_FACTOR,   /* dW without s */
    OWN_FORGETS_GRADIENT, /* nothing is added to s's gradient */
    OWN_HALF_GRADIENT,    /* s's gradient times fl32(1/2) */
    OWN_ONE_ELEMENT,      /* half of the first element of s's gradient is missing */
    OWN_WRONG_DX,         /* dx without the residual's part */
    OWN_SEES_THE_BATCH,   /* y divided by the rows that this rank happens to hold */
    OWN_KEEPS_IN_ITSELF,  /* the saved input is in the layer, not in ar_saved */
    OWN_PARTIAL_SUM       /* W's input features split over tp, and the sum over ranks forgotten */
} own_mistake;

/** "name.weight" [width, width] and "name.scale" [width]. Gives; ar_module_destroy. */
AR_NODISCARD ar_status own_layer_create(ar_module **gives, ar_ctx *ctx, const char *name, size_t width,
                                        own_mistake mistake);
