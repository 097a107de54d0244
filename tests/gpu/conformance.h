/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_CONFORMANCE_H
#define TESTS_GPU_CONFORMANCE_H

/* The conformance suite of the device table: for every slot, cases that two devices are to answer with the same bits.
 * Each function below runs the cases of one slot. Native products, whose order of additions is the device's own, are
 * compared within a bound instead. */
#include "support/device_pair.h"

/* memory_cases.c */
void queue_create_cases(device_pair *p);
void destroy_cases(device_pair *p);
void alloc_cases(device_pair *p);
void free_cases(device_pair *p);
void copy_cases(device_pair *p);
void zero_cases(device_pair *p);
void copy_strided_cases(device_pair *p);

/* combine_cases.c */
void combine_cases(device_pair *p);

/* native_cases.c */
void gemm_f32_cases(device_pair *p);
void sum_rows_f32_cases(device_pair *p);

/* contract_cases.c */
void col_exponents_cases(device_pair *p);
void row_exponents_cases(device_pair *p);
void packed_create_cases(device_pair *p);
void packed_part_cases(device_pair *p);
void packed_destroy_cases(device_pair *p);
void packed_bytes_cases(device_pair *p);
void packed_room_cases(device_pair *p);
void pack_cases(device_pair *p);
void gemm_i64_cases(device_pair *p);
void gemm_round_cases(device_pair *p);
void gemm_acc_cases(device_pair *p);
void round_i64_cases(device_pair *p);

/* accumulator_cases.c */
/* A sum over rows of n elements, with what earlier kernels left in it; or none that is wanted. */
typedef struct pair_sum {
    ar_row_sum at[2];
} pair_sum;
pair_sum pair_new_sum(device_pair *p, const char *name, size_t n, bool exact);
pair_sum pair_no_sum(void);
void acc_add_cases(device_pair *p);
void acc_raise_cases(device_pair *p);
void acc_value_cases(device_pair *p);

/* elementwise_cases.c */
void bias_act_cases(device_pair *p);
void add_cases(device_pair *p);
void mul_cases(device_pair *p);
void fill_cases(device_pair *p);
void act_backward_cases(device_pair *p);
void gated_forward_cases(device_pair *p);
void gated_backward_cases(device_pair *p);
void dropout_cases(device_pair *p);
void sum_squares_cases(device_pair *p);
void scale_cases(device_pair *p);
void softcap_cases(device_pair *p);
void softcap_backward_cases(device_pair *p);
void round_bits_cases(device_pair *p);

/* optimizer_cases.c */
void optimizer_step_cases(device_pair *p);

/* row_cases.c */
void norm_forward_cases(device_pair *p);
void norm_backward_cases(device_pair *p);
void rope_tables_cases(device_pair *p);
void rope_cases(device_pair *p);
void softmax_forward_cases(device_pair *p);
void softmax_backward_cases(device_pair *p);

/* experts_cases.c */
void route_cases(device_pair *p);
void route_backward_cases(device_pair *p);
void route_losses_cases(device_pair *p);
void route_terms_cases(device_pair *p);
void spread_slots_cases(device_pair *p);
void dispatch_rows_cases(device_pair *p);
void combine_rows_cases(device_pair *p);
void dot_rows_cases(device_pair *p);
void add_gated_cases(device_pair *p);
void add_gated_backward_cases(device_pair *p);

/* loss_cases.c */
void rows_in_range_cases(device_pair *p);
void gather_rows_cases(device_pair *p);
void ce_max_cases(device_pair *p);
void ce_sum_cases(device_pair *p);
void ce_logits_cases(device_pair *p);
void ce_target_cases(device_pair *p);
void ce_terms_cases(device_pair *p);
void ce_backward_cases(device_pair *p);

typedef struct conformance_slot {
    const char *name;
    size_t offset; /* in ar_device_ops */
    void (*cases)(device_pair *p);
} conformance_slot;
/** In the order of the table. */
const conformance_slot *conformance_slots(size_t *count);

/** main of a program that runs the suite: [cpu|emulated|cuda[:N]] [--slot NAME] [--break NAME] [--seed S] [--rounds R]
 *  [--passes all|first] [--small]; `device` where none is named. Exit status 0; 1 where something differs, 2 for what
 * is no argument, 77 where the device is not there. */
int conformance_run(int argc, char **argv, const char *device);

#endif
