/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/moves.h"
#include "ref/core/queue_impl.h"
#include "ref/core/scheduler.h"
#include "ref/core/text.h"
#include "sim/sim_private.h"
#include "sim/wire.h"

/* --- as data ------------------------------------------------------------------------------------------------------ */

const char *ari_sim_fault_name(ar_sim_fault_kind k)
{
    static const char *const names[AR_SIM_FAULT_KINDS] = {
        [AR_SIM_DELAY] = "delay",     [AR_SIM_STALL] = "stall",         [AR_SIM_KILL] = "kill",
        [AR_SIM_CORRUPT] = "corrupt", [AR_SIM_DUPLICATE] = "duplicate", [AR_SIM_DROP] = "drop",
        [AR_SIM_SLOW] = "slow"};
    return (unsigned)k < AR_SIM_FAULT_KINDS ? names[k] : "?";
}

void ari_sim_fault_describe(const ar_sim_fault *f, char *text, size_t size)
{
    const bool waits = f->kind == AR_SIM_DELAY || f->kind == AR_SIM_SLOW;
    const bool before = (f->kind == AR_SIM_STALL || f->kind == AR_SIM_KILL) && f->transfer == 0;
    ari_text t = ari_plain_text_in(text, size);
    ari_say(&t, "%s rank %d collective %llu", ari_sim_fault_name(f->kind), f->rank, (unsigned long long)f->collective);
    if (waits)
        ari_say(&t, " ns %llu", (unsigned long long)f->ns);
    else if (!before)
        ari_say(&t, " transfer %llu", (unsigned long long)f->transfer);
    if (f->kind == AR_SIM_CORRUPT)
        ari_say(&t, " bit %llu", (unsigned long long)f->bit);
}

ar_sim_fault ari_sim_fault_draw(uint64_t seed, int ranks, uint64_t collectives, uint64_t longest_ns)
{
    uint64_t state = seed;
    ar_sim_fault f = {.kind = (ar_sim_fault_kind)(ari_splitmix(&state) % AR_SIM_FAULT_KINDS)};
    f.rank = (int)(ari_splitmix(&state) % (uint64_t)(ranks > 0 ? ranks : 1));
    f.collective = 1 + ari_splitmix(&state) % (collectives > 0 ? collectives : 1);
    /* Most collectives have only a few transfers, so a small number is drawn, which is likely to occur. */
    const uint64_t among = (uint64_t)1 << ari_splitmix(&state) % 6;
    f.transfer = ari_splitmix(&state) % among;
    f.bit = ari_splitmix(&state);
    f.ns = longest_ns > 0 ? ari_splitmix(&state) % longest_ns + 1 : 0;
    if (f.kind == AR_SIM_DELAY || f.kind == AR_SIM_SLOW)
        f.transfer = 0;
    else
        f.ns = 0;
    if (f.kind != AR_SIM_CORRUPT)
        f.bit = 0;
    return f;
}

ar_status ari_fault_check(const ar_sim_fault *faults, size_t count, int ranks)
{
    if (count > 0 && !faults)
        return ar_error_set(AR_ERR_ARG, "ar_sim_run: %zu faults, but no list of them", count);
    for (size_t i = 0; i < count; i++) {
        const ar_sim_fault *f = &faults[i];
        if ((unsigned)f->kind >= AR_SIM_FAULT_KINDS)
            return ar_error_set(AR_ERR_ARG, "ar_sim_run: fault %zu: unknown kind %d", i, (int)f->kind);
        if (f->rank < 0 || f->rank >= ranks)
            return ar_error_set(AR_ERR_ARG, "ar_sim_run: fault %zu (%s): rank %d; 0 to %d expected", i,
                                ari_sim_fault_name(f->kind), f->rank, ranks - 1);
        if (f->collective == 0)
            return ar_error_set(AR_ERR_ARG, "ar_sim_run: fault %zu (%s): collective 0; they count from 1", i,
                                ari_sim_fault_name(f->kind));
    }
    return AR_OK;
}

/* --- from the words that describe it ------------------------------------------------------------------------------ */

#define EXAMPLES "'corrupt rank 2 collective 14 transfer 0 bit 77' or 'kill rank 2 collective 14'"
enum { WORD_BYTES = 32 };

/* Fields of each fault kind, besides rank and collective. */
enum { HAS_TRANSFER = 1, HAS_BIT = 2, HAS_NS = 4, HAS_RANK = 8, HAS_COLLECTIVE = 16 };
static const unsigned kind_fields[AR_SIM_FAULT_KINDS] = {[AR_SIM_DELAY] = HAS_NS,
                                                         [AR_SIM_STALL] = HAS_TRANSFER,
                                                         [AR_SIM_KILL] = HAS_TRANSFER,
                                                         [AR_SIM_CORRUPT] = HAS_TRANSFER | HAS_BIT,
                                                         [AR_SIM_DUPLICATE] = HAS_TRANSFER,
                                                         [AR_SIM_DROP] = HAS_TRANSFER,
                                                         [AR_SIM_SLOW] = HAS_NS};

/* Reads the next word. Returns false for a word that is longer than any known one. */
static bool next_word(char word[WORD_BYTES], const char **text)
{
    return ari_next_word(word, WORD_BYTES, text) < WORD_BYTES;
}

static ar_status read_kind(ar_sim_fault_kind *kind, const char *word, const char *text)
{
    for (int k = 0; k < AR_SIM_FAULT_KINDS; k++) {
        if (strcmp(word, ari_sim_fault_name((ar_sim_fault_kind)k)) == 0) {
            *kind = (ar_sim_fault_kind)k;
            return AR_OK;
        }
    }
    return ar_error_set(
        AR_ERR_ARG,
        "fault '%.80s': '%s' is none of delay, stall, kill, corrupt, duplicate, drop, slow; for example " EXAMPLES,
        text, word);
}

static bool read_u64(uint64_t *value, const char *word)
{
    const char *end = NULL;
    return ari_natural(value, word, &end) && *end == '\0';
}

/* Reads one pair of a fault's key and value. */
static ar_status read_pair(ar_sim_fault *f, unsigned *had, const char *key, const char *value, const char *text)
{
    uint64_t number = 0, rank = 0, *target = NULL;
    const struct {
        const char *name;
        unsigned flag;
        uint64_t *target;
    } keys[] = {{"rank", HAS_RANK, &rank},
                {"collective", HAS_COLLECTIVE, &f->collective},
                {"transfer", HAS_TRANSFER, &f->transfer},
                {"bit", HAS_BIT, &f->bit},
                {"ns", HAS_NS, &f->ns}};
    const unsigned allowed = kind_fields[f->kind] | HAS_RANK | HAS_COLLECTIVE;
    unsigned flag = 0;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !flag; i++) {
        flag = strcmp(key, keys[i].name) == 0 ? keys[i].flag : 0;
        target = keys[i].target;
    }
    if (!flag || !(flag & allowed))
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': '%s' says nothing about a %s; for example " EXAMPLES, text, key,
                            ari_sim_fault_name(f->kind));
    if (*had & flag)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': '%s' stands there twice", text, key);
    if (!read_u64(&number, value))
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': '%s' is no number for '%s'", text, value, key);
    *had |= flag;
    if (flag == HAS_RANK && number > INT32_MAX)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': there is no rank %s", text, value);
    if (flag == HAS_COLLECTIVE && number == 0)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': collectives are numbered from 1", text);
    *target = number;
    if (flag == HAS_RANK)
        f->rank = (int)rank;
    return AR_OK;
}

ar_status ari_sim_fault_parse(ar_sim_fault *f, const char *text)
{
    char word[WORD_BYTES] = "", value[WORD_BYTES] = "";
    const char *cursor = text;
    ar_sim_fault read = {0};
    unsigned had = 0;
    bool is_valid = next_word(word, &cursor);
    if (is_valid)
        AR_TRY(read_kind(&read.kind, word, text));
    while (is_valid && (is_valid = next_word(word, &cursor)) && word[0]) {
        is_valid = next_word(value, &cursor);
        if (is_valid)
            AR_TRY(read_pair(&read, &had, word, value, text));
    }
    if (!is_valid)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': a word is too long; for example " EXAMPLES, text);
    const unsigned required_fields = HAS_RANK | HAS_COLLECTIVE | (kind_fields[read.kind] & HAS_NS);
    if ((had & required_fields) != required_fields)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': %s is missing; for example " EXAMPLES, text,
                            !(had & HAS_RANK)         ? "the rank"
                            : !(had & HAS_COLLECTIVE) ? "the collective"
                                                      : "how long, in ns,");
    *f = read;
    return AR_OK;
}

/* --- before a collective ------------------------------------------------------------------------------------------ */

bool ari_wire_is_plain(const ari_sim_comm *mover)
{
    return mover->options->fault_count == 0 && !mover->options->verify_transfers;
}

/* Creates the communicator's fault state if the options ask for faults or verification. The communicator must know its
 * options. Errors: AR_ERR_MEMORY. */
static ar_status fault_watch_create(ari_sim_comm *c)
{
    if (ari_wire_is_plain(c))
        return AR_OK;
    c->watch = aligned_alloc(_Alignof(ari_fault_watch), sizeof *c->watch);
    if (!c->watch)
        return ar_error_set(AR_ERR_MEMORY, "no memory to watch the transfers of a communicator");
    memset(c->watch, 0, sizeof *c->watch);
    return AR_OK;
}

/* Accepts NULL. */
static void fault_watch_free(ari_fault_watch *w)
{
    if (!w)
        return;
    free(w->saved_transfer.bytes);
    free(w);
}

const ar_sim_fault *ari_fault_next(const ari_sim_comm *c, ar_sim_fault_kind kind, uint64_t transfer,
                                   const ar_sim_fault *after)
{
    const ar_sim_fault *f = after ? after + 1 : c->options->faults;
    for (; f < c->options->faults + c->options->fault_count; f++) {
        const bool is_due = f->collective == c->watch->number && f->transfer == transfer;
        if (f->kind == kind && f->rank == c->member.rank && is_due)
            return f;
    }
    return NULL;
}

void ari_fault_kill(ari_sim_comm *c, const ari_call *call, const char *location)
{
    char description[384], why[512];
    ari_member_describe(&c->member, call, description, sizeof description);
    snprintf(why, sizeof why, "rank %d was killed %s %s", c->member.rank, location, description);
    ari_world_fail(ari_group_world(c->member.group), c->member.rank, NULL, AR_ERR_ABORTED, why);
}

void ari_fault_stall(ari_sim_comm *c, const ari_call *call, const char *location)
{
    char description[384], why[512];
    ari_member_describe(&c->member, call, description, sizeof description);
    snprintf(why, sizeof why, "rank %d stands still %s %s, and no rank is left to wait for it", c->member.rank,
             location, description);
    ari_member_hold(&c->member, why);
}

/* Returns the delay with which the rank enters the next collective. */
static uint64_t late_ns(const ari_sim_comm *c)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < c->options->fault_count; i++) {
        const ar_sim_fault *f = &c->options->faults[i];
        const bool is_due = f->kind == AR_SIM_DELAY ? f->collective == c->watch->number
                                                    : f->kind == AR_SIM_SLOW && f->collective <= c->watch->number;
        if (is_due && f->rank == c->member.rank)
            sum += f->ns > UINT64_MAX - sum ? UINT64_MAX - sum : f->ns;
    }
    return sum;
}

void ari_fault_before(ari_sim_comm *c, const ari_call *call)
{
    if (!c->watch)
        return;
    c->watch->number = ari_world_number(ari_group_world(c->member.group), c->member.rank);
    c->watch->saved_transfer.is_pending = false;
    const uint64_t late = late_ns(c);
    if (late > 0)
        ari_member_sleep(&c->member, late);
    ari_lane *lane = ari_lane_self();
    if (late > 0 && ari_lane_is_virtual(lane))
        lane->virtual_ns += late;
    if (ari_fault_next(c, AR_SIM_STALL, 0, NULL))
        ari_fault_stall(c, call, "before");
    else if (ari_fault_next(c, AR_SIM_KILL, 0, NULL))
        ari_fault_kill(c, call, "before");
}

/* --- members ------------------------------------------------------------------------------------------------------ */

/* Removes a member from a group. A communicator is a member of one group, and each end of its channels of another. */

void ari_sim_member_drop(ari_group *g, int index)
{
    ari_member dropped;
    ari_member_init(&dropped, g, index);
    ari_member_fini(&dropped);
}

ar_status ari_sim_comm_init(ari_sim_comm *c, const ari_comm_ops *ops, ari_group *g, int index,
                            const ar_sim_options *options)
{
    c->options = options;
    AR_TRY(fault_watch_create(c));
    ari_member_init(&c->member, g, index);
    ari_comm_init(&c->base, ops, index, ari_group_size(g));
    return AR_OK;
}

void ari_sim_comm_fini(ari_sim_comm *c)
{
    ari_member_fini(&c->member);
    fault_watch_free(c->watch);
    free(c->scratch);
}

ar_status ari_sim_reserve(ari_sim_comm *c, size_t bytes)
{
    return ari_scratch_reserve(&c->scratch, &c->scratch_bytes, bytes, "of partial sums");
}
