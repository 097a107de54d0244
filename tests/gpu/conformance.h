/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The conformance suite of the device table: for every slot, cases that two devices are to answer with the same bits.
 * The function NAME_cases runs those of the slot NAME. Native products, whose order of additions is the device's own, are
 * compared within a bound instead. */
#include "support/device_pair.h"

#define CONFORMANCE_CASES(slot) void slot##_cases(device_pair *p);
AR_DEVICE_SLOTS(CONFORMANCE_CASES)
#undef CONFORMANCE_CASES
/* The cases of a slot: slot_case with all that `every` goes over. */
#define PAIR_CASES(slot, every)       \
    void slot##_cases(device_pair *p) \
    {                                 \
        every(p, slot##_case);        \
    }

/* A sum over rows of n elements, with what earlier kernels left in it; or none that is wanted. */
typedef struct pair_sum {
    ar_row_sum at[2];
} pair_sum;
pair_sum pair_new_sum(device_pair *p, const char *name, size_t n, bool exact);
pair_sum pair_no_sum(void);

/** main of a program that runs the suite: [cpu|emulated|cuda[:N]] [--slot NAME] [--break NAME] [--seed S] [--rounds R]
 *  [--passes all|first] [--small]; `device` where none is named. Exit status 0; 1 where something differs, 2 for what
 * is no argument, 77 where the device is not there. */
int conformance_run(int argc, char **argv, const char *device);
