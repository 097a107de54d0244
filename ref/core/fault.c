/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/fault.h"

#include <string.h>

#include "ref/core/nearest.h"

static const char *const names[AR_FAULT_COUNT] = {"none",
#define FAULT_NAME(name, text) #name,
                                                  AR_FAULT_TABLE(FAULT_NAME)
#undef FAULT_NAME
};

static const char *const texts[AR_FAULT_COUNT] = {"no fault",
#define FAULT_TEXT(name, text) text,
                                                  AR_FAULT_TABLE(FAULT_TEXT)
#undef FAULT_TEXT
};

const char *ar_fault_name(ar_fault f)
{
    return (unsigned)f < AR_FAULT_COUNT ? names[f] : "?";
}

const char *ar_fault_text(ar_fault f)
{
    return (unsigned)f < AR_FAULT_COUNT ? texts[f] : "?";
}

ar_status ar_fault_parse(ar_fault *f, const char *name)
{
    for (int i = 1; i < AR_FAULT_COUNT; i++) {
        if (strcmp(name, names[i]) == 0) {
            *f = (ar_fault)i;
            return AR_OK;
        }
    }
    const char *near = ari_nearest(name, names + 1, AR_FAULT_COUNT - 1);
    return ar_error_set(AR_ERR_NOT_FOUND, "there is no fault '%s'%s%s%s; 'anyrank bugs' lists them", name,
                        near ? "; did you mean '" : "", near ? near : "", near ? "'" : "");
}
