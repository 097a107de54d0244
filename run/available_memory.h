/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_AVAILABLE_MEMORY_H
#define ARI_RUN_AVAILABLE_MEMORY_H

#include <stddef.h>

/** Bytes of memory that this process can still take: the least of what the system has free (MemAvailable of
 *  /proc/meminfo), of what its control group and every group above it leave (version 2: memory.max - memory.current;
 *  version 1: memory.limit_in_bytes - memory.usage_in_bytes) and of its limit on address space less what it has mapped.
 *  Of a group's usage, file pages that were not touched lately (inactive_file of memory.stat) count as free, since the
 *  kernel drops them before it refuses memory. What cannot be read, or is "max" or "unlimited", limits nothing;
 *  SIZE_MAX if nothing does. */
size_t ari_available_memory(void);
/** The same with root before every path: "" in earnest, a folder with proc/ and sys/ in tests. */
size_t ari_available_memory_at(const char *root);

#endif
