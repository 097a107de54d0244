/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/dump.h"
#include "ref/core/size.h"

/* Classes of modules by their paths, in which {0-31} may stand for 32 numbers. */
typedef struct ari_module_class {
    char *path, *name;
} ari_module_class;
typedef struct ari_module_classes {
    ari_module_class *list; /* [n] */
    size_t n;
} ari_module_classes;
/** Reads the classes recorded next to the dump; none if they are missing or invalid JSON. Memory is from the arena.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_module_classes_read(ari_module_classes *classes, const ar_dump *dump, ari_arena *arena);
/** Returns the class of the module at a path of n bytes; NULL: not recorded. */
const char *ari_module_class_of(const ari_module_classes *classes, const char *path, size_t n);
