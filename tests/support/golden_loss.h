/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/batch.h"
#include "ref/core/batch_private.h"

/** The loss that a golden case was made with, which its provenance.json names where it is not the cross-entropy
 *  alone. */
static inline ar_loss_options golden_loss(const char *name)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s/provenance.json", TEST_GOLDEN_DIR, name);
    json_t *said = json_load_file(path, 0, NULL);
    ar_loss_options loss = {json_number_value(json_object_get(said, "label_smoothing")),
                            json_number_value(json_object_get(said, "z_loss")),
                            {.balance_weight = json_number_value(json_object_get(said, "balance_weight")),
                             .z_loss = json_number_value(json_object_get(said, "router_z_loss"))}};
    const char *balance = json_string_value(json_object_get(said, "balance"));
    while (balance && strcmp(ari_balance_name(loss.router.balance), balance) != 0)
        loss.router.balance++;
    json_decref(said);
    return loss;
}
