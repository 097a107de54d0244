/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/handshake.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "gpu/cluster/process/net.h"
#include "ref/core/os/os.h"

enum { VERSION = 4 };
static const char magic[8] = "anyrank";

_Static_assert(sizeof(ari_opening) == 48 && sizeof(ari_answer) == 144, "messages have no gaps");

/* --- openings and proofs ------------------------------------------------------------------------------------------ */

ar_status ari_opening_make(ari_opening *o, const ari_key *k)
{
    *o = (ari_opening){.version = VERSION, .has_key = k->is_set};
    memcpy(o->magic, magic, sizeof magic);
    return ari_random(o->nonce, sizeof o->nonce)
               ? AR_OK
               : ar_error_set(AR_ERR_IO, "no random bytes for a connection: %s", strerror(errno));
}

/* Verdict on the first `have` bytes of the other's opening. */
static ari_heard heard_in(const ari_opening *own, const ari_opening *other, size_t have)
{
    if (memcmp(other->magic, own->magic, have < sizeof other->magic ? have : sizeof other->magic) != 0)
        return ARI_HEARD_STRANGER;
    if (have < sizeof *other)
        return ARI_HEARD_PART;
    if (other->version != own->version)
        return ARI_HEARD_OTHER_VERSION;
    return other->has_key == own->has_key ? ARI_HEARD_OPENING : ARI_HEARD_NO_KEY;
}

void ari_proof_make(unsigned char proof[ARI_SHA256_BYTES], const ari_key *k, ari_prover who, const ari_opening *client,
                    const ari_opening *server, const ari_hello *hello)
{
    struct {
        uint64_t who;
        ari_opening client, server;
        ari_hello hello;
    } all = {.who = who, .client = *client, .server = *server, .hello = *hello};
    memset(proof, 0, ARI_SHA256_BYTES);
    if (k->is_set)
        ari_hmac_sha256(proof, k->at, sizeof k->at, &all, sizeof all);
}

static bool proves(const unsigned char proof[ARI_SHA256_BYTES], const ari_key *k, ari_prover who,
                   const ari_opening *client, const ari_opening *server, const ari_hello *hello)
{
    unsigned char right[ARI_SHA256_BYTES];
    ari_proof_make(right, k, who, client, server, hello);
    return ari_mac_equal(proof, right);
}

/* --- the server's side -------------------------------------------------------------------------------------------- */

size_t ari_handshake_wants(const ari_handshake *h)
{
    const size_t opening = sizeof h->heard.opening;
    return (h->have < opening ? opening : sizeof h->heard) - h->have;
}

ari_heard ari_handshake_hear(ari_handshake *h, const ari_key *k, size_t n)
{
    const size_t opening = sizeof h->heard.opening;
    const bool opens = h->have < opening;
    ari_hello *hello = &h->heard.answer.hello;
    h->have += n;
    if (opens)
        return heard_in(&h->own, &h->heard.opening, h->have);
    if (h->have < sizeof h->heard)
        return ARI_HEARD_PART;
    if (!proves(h->heard.answer.proof, k, ARI_PROVER_CLIENT, &h->heard.opening, &h->own, hello))
        return ARI_HEARD_OTHER_KEY;
    hello->name[sizeof hello->name - 1] = '\0';
    return ARI_HEARD_PROCESS;
}

/* --- the client's side -------------------------------------------------------------------------------------------- */

static ari_heard heard_of(ari_net_end end)
{
    return end == ARI_NET_TIMEOUT ? ARI_HEARD_NOTHING : ARI_HEARD_PART;
}

static ari_heard read_opening(int fd, const ari_opening *own, ari_opening *other, const ari_net_limit *l)
{
    const size_t first = sizeof other->magic; /* another program may never send as much as an opening */
    ari_net_end end = ari_net_read(fd, other, first, l);
    if (end == ARI_NET_OK && heard_in(own, other, first) == ARI_HEARD_STRANGER)
        return ARI_HEARD_STRANGER;
    if (end == ARI_NET_OK)
        end = ari_net_read(fd, (char *)other + first, sizeof *other - first, l);
    return end == ARI_NET_OK ? heard_in(own, other, sizeof *other) : heard_of(end);
}

ari_heard ari_handshake_ask(int fd, const ari_key *k, const ari_opening *own, const ari_hello *hello,
                            uint64_t deadline_ns)
{
    const ari_net_limit l = {.idle_ns = UINT64_MAX, .wake_fd = -1, .deadline_ns = deadline_ns};
    unsigned char proof[ARI_SHA256_BYTES];
    ari_opening other;
    ari_answer answer = {.hello = *hello};
    ari_net_end end = ari_net_write(fd, own, sizeof *own, &l);
    if (end != ARI_NET_OK)
        return heard_of(end);
    const ari_heard heard = read_opening(fd, own, &other, &l);
    if (heard != ARI_HEARD_OPENING)
        return heard;
    ari_proof_make(answer.proof, k, ARI_PROVER_CLIENT, own, &other, hello);
    end = ari_net_write(fd, &answer, sizeof answer, &l);
    if (end == ARI_NET_OK)
        end = ari_net_read(fd, proof, sizeof proof, &l);
    if (end != ARI_NET_OK)
        return heard_of(end);
    return proves(proof, k, ARI_PROVER_SERVER, own, &other, hello) ? ARI_HEARD_PROCESS : ARI_HEARD_OTHER_KEY;
}

/* --- words -------------------------------------------------------------------------------------------------------- */

void ari_heard_explain(char *text, size_t size, ari_heard heard, bool process_0_has_key, const char *other)
{
    static const char all[] = "all processes need the same ANYRANK_JOB_KEY or ANYRANK_JOB_KEY_FILE";
    if (heard == ARI_HEARD_NO_KEY)
        snprintf(text, size, "%s has a job key and %s has none: %s", process_0_has_key ? "process 0" : other,
                 process_0_has_key ? other : "process 0", all);
    else if (heard == ARI_HEARD_OTHER_KEY)
        snprintf(text, size, "process 0 and %s have different job keys: %s", other, all);
    else
        snprintf(text, size, "process 0 and %s are of different versions of anyrank", other);
}
