/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ref/io/hash.h"

/* The secret by which the processes of a job know each other. */
typedef struct ari_key {
    bool is_set;
    unsigned char at[ARI_SHA256_BYTES];
} ari_key;

/** The hash of ANYRANK_JOB_KEY, or of what the file that ANYRANK_JOB_KEY_FILE names holds; spaces and line ends behind
 *  it do not count. Not set where neither is. Errors: AR_ERR_ARG, saying what would be right: both, a key that can be
 *  guessed by trying, a file that others can read; AR_ERR_IO. */
AR_NODISCARD ar_status ari_key_read(ari_key *k);
/** A new one. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_key_make(ari_key *k);

/* A client and the server, process 0, prove that they belong together before either reads anything else of the other.
 * All messages have a fixed size:
 *
 *   client                         server
 *   opening, with a nonce   -->
 *                           <--    opening, with a nonce
 *   proof, hello            -->
 *                           <--    proof
 *
 * A proof is the HMAC-SHA256 by the job's key of who makes it, both openings and the hello: that of one direction or
 * one connection is worth nothing in another. The client, which any process can pretend to be, proves first. Without a
 * key all proofs are zero. Nothing is encrypted. */
enum { ARI_NONCE_BYTES = 32, ARI_NAME_BYTES = 96 };

typedef struct ari_opening {
    char magic[8]; /* tells it from what other programs send */
    uint32_t version, has_key;
    unsigned char nonce[ARI_NONCE_BYTES];
} ari_opening;

typedef struct ari_hello {
    uint32_t rank, size;
    uint64_t job;
    char name[ARI_NAME_BYTES]; /* of the process, for reports */
} ari_hello;

typedef struct ari_answer {
    unsigned char proof[ARI_SHA256_BYTES];
    ari_hello hello;
} ari_answer;

/* One side's knowledge of the other. */
typedef enum ari_heard {
    ARI_HEARD_PART,    /* too little to say */
    ARI_HEARD_OPENING, /* the opening of this program, and one that fits */
    ARI_HEARD_PROCESS, /* all: a process that has the key, if there is one */
    ARI_HEARD_STRANGER,
    ARI_HEARD_OTHER_VERSION,
    ARI_HEARD_NO_KEY, /* one side has a key, the other none */
    ARI_HEARD_OTHER_KEY,
    ARI_HEARD_NOTHING /* in time */
} ari_heard;

/** That of this process, with a new nonce. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_opening_make(ari_opening *o, const ari_key *k);
typedef enum ari_prover { ARI_PROVER_CLIENT = 1, ARI_PROVER_SERVER } ari_prover;
/** Zero without a key. */
void ari_proof_make(unsigned char proof[ARI_SHA256_BYTES], const ari_key *k, ari_prover who, const ari_opening *client,
                    const ari_opening *server, const ari_hello *hello);

/* The server's side of a connection: what has come of what a client says. */
typedef struct ari_handshake {
    ari_opening own;
    struct {
        ari_opening opening;
        ari_answer answer;
    } heard;
    size_t have; /* of `heard` */
} ari_handshake;
/** The number of bytes that may come now, at (char *)&h->heard + h->have: never more than one message. */
size_t ari_handshake_wants(const ari_handshake *h);
/** So many have come there. Afterwards, ARI_HEARD_OPENING: h->own is to be sent; ARI_HEARD_PROCESS: the server's proof,
 *  and hello.name ends with 0; ARI_HEARD_PART: wait for more; else nothing more is to be read. */
ari_heard ari_handshake_hear(ari_handshake *h, const ari_key *k, size_t n);

/** The client's side, over a new connection. ARI_HEARD_PART: it has ended too early; ARI_HEARD_NOTHING: it has not said
 *  enough before the deadline. */
ari_heard ari_handshake_ask(int fd, const ari_key *k, const ari_opening *own, const ari_hello *hello,
                            uint64_t deadline_ns);

/** Why the two do not belong together, of process 0 and the other process as `other` names it. */
void ari_heard_explain(char *text, size_t size, ari_heard heard, bool process_0_has_key, const char *other);
