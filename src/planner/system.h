/* SPDX-License-Identifier: Apache-2.0 */
/* Production systems: what of a layout each can do, and how it is asked for. */
#ifndef ARI_PLANNER_SYSTEM_H
#define ARI_PLANNER_SYSTEM_H

#include "planner/search.h"

extern const char *const ari_system_names[]; /* "megatron", ..; ends with NULL */

/** What a search is told by its system and its cluster: -1 or a place in ari_system_names; gradients in fp32 where the
 *  system sums them so, a reserve of a named GPU's memory, and tp's collectives in chunks beside products. */
void ari_search_account(ari_search *s, int system);
/** What of a layout a search's system lacks, as "that stage of ZeRO", or NULL. Static storage. */
const char *ari_system_lacks(const ari_search *s, const ari_choice *c);
/** What to paste into its command, its name in front; "" without a system. Truncates to size. */
void ari_system_flags(char *text, size_t size, const ari_search *s, const ari_planned *p);

#endif
