/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/wire.h"

#include "ref/core/text.h"

ari_wire ari_wire_open(ari_sim_comm *mover)
{
    const ari_member *m = &mover->member;
    const ari_call *call = ari_group_call(m->group, m->index);
    return (ari_wire){.mover = mover,
                      .group = m->group,
                      .call = call,
                      .n = ari_group_size(m->group),
                      .self = m->index,
                      .element = ar_dtype_bytes(call->dtype),
                      .plain = ari_wire_is_plain(mover)};
}

void ari_wire_close(const ari_wire *w)
{
    for (ari_sim_comm *c = w->mover; c; c = c->counted_by)
        ari_moved_add(&c->base.moved, w->read, w->written);
}

/* --- faults ------------------------------------------------------------------------------------------------------- */

/* A transfer over an unreliable transport, with the receiver's checks. A transfer has its number within the collective,
 * a length and a checksum, which are computed at the source and compared at the destination. */

typedef struct transfer {
    ari_wire *wire;
    uint64_t number;
    int sender, receiver; /* members */
    const void *src;
    void *dst;
    size_t bytes;
} transfer;

/* Each step is invertible, so that data of equal length that differ in one word have different checksums. */
static uint64_t checksum_of(const void *data, size_t bytes)
{
    const char *src = data;
    uint64_t sum = bytes;
    for (size_t offset = 0; offset < bytes; offset += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, src + offset, bytes - offset < sizeof word ? bytes - offset : sizeof word);
        sum = ((sum ^ word) << 29 | (sum ^ word) >> 35) * 0x9e3779b97f4a7c15u;
    }
    return sum;
}

/* --- what the receiver says --------------------------------------------------------------------------------------- */

/* Aborts the collective because the transfer failed. Always returns false. */
static bool AR_PRINTF(2, 3) refuse(const transfer *t, const char *format, ...)
{
    ari_member *m = &t->wire->mover->member;
    char problem[320], collective[384], why[768];
    ARI_FORMAT(problem, format);
    ari_member_describe(m, t->wire->call, collective, sizeof collective);
    snprintf(why, sizeof why, "rank %d, transfer %llu from rank %d in %s: %s", ari_group_rank(m->group, t->receiver),
             (unsigned long long)t->number, ari_group_rank(m->group, t->sender), collective, problem);
    ari_member_break(m, AR_ERR_DATA, why);
    return false;
}

/* "3f800000": the highest byte first. */
static void write_hex(char *text, const unsigned char *element, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        sprintf(text + 2 * i, "%02x", element[bytes - 1 - i]);
}

static bool refuse_content(const transfer *t)
{
    const size_t element = ar_dtype_bytes(t->wire->call->dtype);
    const unsigned char *sent = t->src, *arrived = t->dst;
    char sent_hex[2 * sizeof(uint64_t) + 1] = "", arrived_hex[2 * sizeof(uint64_t) + 1] = "";
    for (size_t i = 0; i < t->bytes / element; i++, sent += element, arrived += element) {
        if (memcmp(sent, arrived, element) == 0)
            continue;
        write_hex(sent_hex, sent, element);
        write_hex(arrived_hex, arrived, element);
        return refuse(t, "element %zu of %zu is 0x%s, 0x%s was sent", i, t->bytes / element, arrived_hex, sent_hex);
    }
    return refuse(t, "the checksum is wrong");
}

/* --- the way ------------------------------------------------------------------------------------------------------ */

/* Saves a transfer. Returns false if memory is short; the collective is then aborted. */
static bool keep_transfer(const transfer *t, ari_saved_transfer *k)
{
    if (t->bytes > k->capacity) {
        void *larger = realloc(k->bytes, t->bytes);
        if (!larger) {
            ari_member_break(&t->wire->mover->member, AR_ERR_MEMORY, "no memory for a transfer that arrives twice");
            return false;
        }
        k->bytes = larger;
        k->capacity = t->bytes;
    }
    ari_copy_bytes(k->bytes, t->src, t->bytes);
    k->is_pending = true;
    k->number = t->number;
    k->length = t->bytes;
    k->checksum = checksum_of(t->src, t->bytes);
    return true;
}

static bool verify(const transfer *t, uint64_t number, size_t length, uint64_t checksum)
{
    if (number != t->number)
        return refuse(t, "transfer %llu arrived in its place, a second time", (unsigned long long)number);
    if (length != t->bytes)
        return refuse(t, "%zu bytes arrived, %zu were expected", length, t->bytes);
    return checksum == checksum_of(t->dst, t->bytes) || refuse_content(t);
}

/* Delivers the transfer over the transport: correctly, corrupted, or not at all. Returns false if the receiver has
 * detected a fault or memory is short. */
static bool carry(const transfer *t)
{
    ari_sim_comm *c = t->wire->mover;
    ari_saved_transfer *saved = &c->watch->saved_transfer;
    const bool verifies = c->options->verify_transfers, repeats = saved->is_pending;
    uint64_t number = t->number, checksum = verifies ? checksum_of(t->src, t->bytes) : 0;
    size_t length = t->bytes;
    saved->is_pending = false;
    if (ari_fault_next(c, AR_SIM_DROP, t->number, NULL))
        return !verifies || refuse(t, "it never arrived");
    if (repeats) {
        number = saved->number;
        length = saved->length;
        checksum = saved->checksum;
        ari_copy_bytes(t->dst, saved->bytes, length < t->bytes ? length : t->bytes);
    } else {
        ari_copy_bytes(t->dst, t->src, t->bytes);
    }
    const ar_sim_fault *f = NULL;
    while (t->bytes > 0 && (f = ari_fault_next(c, AR_SIM_CORRUPT, t->number, f))) {
        const uint64_t bit = f->bit % ((uint64_t)t->bytes * 8);
        ((unsigned char *)t->dst)[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    if (verifies && !verify(t, number, length, checksum))
        return false;
    return !ari_fault_next(c, AR_SIM_DUPLICATE, t->number, NULL) || keep_transfer(t, saved);
}

/* Counts the transfer. False: this rank is lost. */
static bool begin_transfer(ari_wire *w, uint64_t *number)
{
    ari_sim_comm *c = w->mover;
    *number = w->transfers++;
    ari_member_pulse(&c->member);
    const bool stalls = ari_fault_next(c, AR_SIM_STALL, *number, NULL) != NULL;
    if (stalls)
        ari_fault_stall(c, w->call, "in the middle of");
    else if (ari_fault_next(c, AR_SIM_KILL, *number, NULL))
        ari_fault_kill(c, w->call, "in the middle of");
    else
        return true;
    ari_member_break(&c->member, AR_ERR_ABORTED, ""); /* the world has already failed */
    return false;
}

bool ari_wire_carry(ari_wire *w, int sender, const void *src, int receiver, void *dst, size_t bytes)
{
    transfer t = {.wire = w, .sender = sender, .receiver = receiver, .src = src, .dst = dst, .bytes = bytes};
    return begin_transfer(w, &t.number) && carry(&t);
}
