/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Names of an enumeration's values in order, terminated by NULL. Options, messages and files use them. */
extern const char *const ari_numerics_names[],
    *const ari_precision_names[], *const ari_recompute_names[],
                                      *const ari_balance_names[],
                                          *const ari_dispatch_names[],
                                              *const ari_bucket_mode_names[],
                                                  *const ari_bucket_order_names[],
                                                      *const ari_optimizer_names[],
                                                          *const ari_lr_schedule_names[],
                                                              *const ari_decay_names[],
                                                                  *const ari_data_format_names[],
                                                                      *const ari_pp_schedule_names[],
                                                                          *const ari_sensitivity_names[],
                                                                              *const ari_transport_names[],
                                                                                  *const ari_device_kind_names[];
