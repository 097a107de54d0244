/* SPDX-License-Identifier: Apache-2.0 */
#include <sys/stat.h>
#include <unistd.h>

#include "gpu/cluster/process/handshake.h"
#include "tests/support/test.h"

static const ari_key none = {.is_set = false}, key = {true, "key"}, other_key = {true, "keY"};
static const ari_hello hello = {.rank = 1, .size = 2, .job = 7, .name = "a process"};

/* Both sides of a connection, and what the client says. */
typedef struct talk {
    ari_handshake server;
    struct {
        ari_opening opening;
        ari_answer answer;
    } said;
} talk;

static talk talk_of(const ari_key *server, const ari_key *client)
{
    talk t = {.said.answer.hello = hello};
    cr_assert(ari_opening_make(&t.server.own, server) == AR_OK && ari_opening_make(&t.said.opening, client) == AR_OK);
    ari_proof_make(t.said.answer.proof, client, ARI_PROVER_CLIENT, &t.said.opening, &t.server.own, &hello);
    return t;
}

/* The client's words, so many bytes at a time, until the server has heard enough. */
static ari_heard hear(talk *t, const ari_key *k, size_t at_once)
{
    ari_heard heard = ARI_HEARD_PART;
    while (heard == ARI_HEARD_PART || heard == ARI_HEARD_OPENING) {
        const size_t have = t->server.have, wants = ari_handshake_wants(&t->server);
        const size_t n = wants < at_once ? wants : at_once;
        cr_assert(n > 0 && have + n <= sizeof t->said);
        memcpy((char *)&t->server.heard + have, (const char *)&t->said + have, n);
        heard = ari_handshake_hear(&t->server, k, n);
    }
    return heard;
}

static ari_heard heard_of(const ari_key *server, const ari_key *client)
{
    talk t = talk_of(server, client);
    return hear(&t, server, sizeof t.said);
}

static void the_same_key_or_none_is_heard_in_pieces_of_any_size(void)
{
    const size_t whole = sizeof(ari_opening) + sizeof(ari_answer);
    for (size_t at_once = 1; at_once <= whole; at_once++)
        for (int i = 0; i < 2; i++) {
            talk t = talk_of(i ? &key : &none, i ? &key : &none);
            cr_expect(hear(&t, i ? &key : &none, at_once) == ARI_HEARD_PROCESS, "%zu at once", at_once);
            cr_expect(memcmp(&t.server.heard.answer.hello, &hello, sizeof hello) == 0);
        }
}

static void another_key_or_none_is_told_apart(void)
{
    cr_expect(heard_of(&key, &other_key) == ARI_HEARD_OTHER_KEY);
    cr_expect(heard_of(&key, &none) == ARI_HEARD_NO_KEY);
    cr_expect(heard_of(&none, &key) == ARI_HEARD_NO_KEY);
}

static void with_a_key_every_changed_bit_is_seen(void)
{
    const talk right = talk_of(&key, &key);
    for (size_t bit = 0; bit < 8 * sizeof right.said; bit++) {
        talk t = right;
        ((unsigned char *)&t.said)[bit / 8] ^= (unsigned char)(1u << bit % 8);
        cr_expect(hear(&t, &key, sizeof t.said) != ARI_HEARD_PROCESS, "bit %zu", bit);
    }
}

/* What one has said is worth nothing over another connection, nor said to it by the other side. */
static void a_proof_holds_once_and_one_way(void)
{
    talk first = talk_of(&key, &key), second = talk_of(&key, &key);
    unsigned char client[ARI_SHA256_BYTES], server[ARI_SHA256_BYTES];
    cr_expect(memcmp(first.server.own.nonce, second.server.own.nonce, ARI_NONCE_BYTES) != 0);
    second.said = first.said;
    cr_expect(hear(&second, &key, sizeof second.said) == ARI_HEARD_OTHER_KEY);
    ari_proof_make(client, &key, ARI_PROVER_CLIENT, &first.said.opening, &first.server.own, &hello);
    ari_proof_make(server, &key, ARI_PROVER_SERVER, &first.said.opening, &first.server.own, &hello);
    cr_expect(memcmp(client, server, sizeof client) != 0);
}

static void a_stranger_is_known_by_its_first_wrong_byte(void)
{
    for (size_t wrong = 0; wrong < sizeof(((ari_opening *)NULL)->magic); wrong++) {
        talk t = talk_of(&none, &none);
        t.said.opening.magic[wrong] ^= 1;
        cr_expect(hear(&t, &none, 1) == ARI_HEARD_STRANGER && t.server.have == wrong + 1);
    }
    talk t = talk_of(&none, &none);
    t.said.opening.version++;
    cr_expect(hear(&t, &none, 1) == ARI_HEARD_OTHER_VERSION);
}

Test(handshake, tells_processes_of_the_job_from_all_others)
{
    the_same_key_or_none_is_heard_in_pieces_of_any_size();
    another_key_or_none_is_told_apart();
    with_a_key_every_changed_bit_is_seen();
    a_proof_holds_once_and_one_way();
    a_stranger_is_known_by_its_first_wrong_byte();
}

#define TEXT "0123456789abcdef"

static void set(const char *text, const char *path)
{
    setenv("ANYRANK_JOB_KEY", text, 1);
    setenv("ANYRANK_JOB_KEY_FILE", path, 1);
}

static void refused(const char *text, const char *path, ar_status st, const char *words)
{
    ari_key k;
    set(text, path);
    cr_expect(ari_key_read(&k) == st, "%s %s", text, path);
    cr_expect_says(words);
    cr_expect(!k.is_set);
}

Test(handshake, takes_a_key_that_no_one_else_can_know)
{
    char path[] = "/tmp/anyrank-key-XXXXXX";
    ari_key k, of_file;
    const int fd = mkstemp(path);
    cr_assert(fd >= 0 && write(fd, TEXT " \r\n", 19) == 19);
    set("", "");
    cr_expect(ari_key_read(&k) == AR_OK && !k.is_set);
    set(TEXT, "");
    cr_expect(ari_key_read(&k) == AR_OK && k.is_set);
    set("", path);
    cr_expect(ari_key_read(&of_file) == AR_OK && of_file.is_set, "%s", ar_error_message());
    cr_expect(memcmp(k.at, of_file.at, sizeof k.at) == 0);

    refused(TEXT, path, AR_ERR_ARG, "one of them expected");
    refused("0123456789abcde", "", AR_ERR_ARG, "ANYRANK_JOB_KEY has 15 characters: 16 to 4096 expected");
    static const mode_t open_to_others[] = {0640, 0620, 0610, 0604, 0602, 0601};
    for (size_t i = 0; i < sizeof open_to_others / sizeof *open_to_others; i++) {
        cr_assert(fchmod(fd, open_to_others[i]) == 0);
        refused("", path, AR_ERR_ARG, "chmod 600 /tmp/anyrank-key-");
    }
    cr_assert(fchmod(fd, 0400) == 0 && ftruncate(fd, 15) == 0);
    refused("", path, AR_ERR_ARG, "has 15 characters");
    cr_assert(ftruncate(fd, 5000) == 0);
    unlink(path);
    close(fd);
    refused("", path, AR_ERR_IO, path);
    refused("", "/tmp", AR_ERR_ARG, "/tmp is no file");
    cr_assert(mkfifo(path, 0600) == 0);
    refused("", path, AR_ERR_ARG, "is no file");
    unlink(path);
}
