/* SPDX-License-Identifier: Apache-2.0 */
/* A transport's fault from the words that describe it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/sim.h"

#define EXAMPLES "'corrupt rank 2 collective 14 transfer 0 bit 77' or 'kill rank 2 collective 14'"
enum { WORD_BYTES = 32 };

/* What a kind is told by, beside rank and collective. */
enum { HAS_TRANSFER = 1, HAS_BIT = 2, HAS_NS = 4, HAS_RANK = 8, HAS_COLLECTIVE = 16 };
static const unsigned takes[AR_SIM_FAULT_KINDS] = {[AR_SIM_DELAY] = HAS_NS,
                                                   [AR_SIM_STALL] = HAS_TRANSFER,
                                                   [AR_SIM_KILL] = HAS_TRANSFER,
                                                   [AR_SIM_CORRUPT] = HAS_TRANSFER | HAS_BIT,
                                                   [AR_SIM_DUPLICATE] = HAS_TRANSFER,
                                                   [AR_SIM_DROP] = HAS_TRANSFER,
                                                   [AR_SIM_SLOW] = HAS_NS};

/* The next word of *text, past which it moves; "" at the end. False: longer than any that is known. */
static bool next_word(char word[WORD_BYTES], const char **text)
{
    static const char apart[] = " ,\t";
    *text += strspn(*text, apart);
    const size_t n = strcspn(*text, apart);
    if (n >= WORD_BYTES)
        return false;
    memcpy(word, *text, n);
    word[n] = '\0';
    *text += n;
    return true;
}

static ar_status read_kind(ar_sim_fault_kind *kind, const char *word, const char *whole)
{
    for (int k = 0; k < AR_SIM_FAULT_KINDS; k++) {
        if (strcmp(word, ar_sim_fault_name((ar_sim_fault_kind)k)) == 0) {
            *kind = (ar_sim_fault_kind)k;
            return AR_OK;
        }
    }
    return ar_error_set(
        AR_ERR_ARG,
        "fault '%.80s': '%s' is none of delay, stall, kill, corrupt, duplicate, drop, slow; for example " EXAMPLES,
        whole, word);
}

static bool read_u64(uint64_t *value, const char *word)
{
    char *end = NULL;
    errno = 0;
    *value = strtoull(word, &end, 10);
    return word[0] >= '0' && word[0] <= '9' && *end == '\0' && errno == 0;
}

/* One pair: what of the fault, and its number. */
static ar_status read_pair(ar_sim_fault *f, unsigned *had, const char *key, const char *value, const char *whole)
{
    uint64_t number = 0, rank = 0, *to = NULL;
    const struct {
        const char *name;
        unsigned is;
        uint64_t *to;
    } keys[] = {{"rank", HAS_RANK, &rank},
                {"collective", HAS_COLLECTIVE, &f->collective},
                {"transfer", HAS_TRANSFER, &f->transfer},
                {"bit", HAS_BIT, &f->bit},
                {"ns", HAS_NS, &f->ns}};
    const unsigned allowed = takes[f->kind] | HAS_RANK | HAS_COLLECTIVE;
    unsigned is = 0;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !is; i++) {
        is = strcmp(key, keys[i].name) == 0 ? keys[i].is : 0;
        to = keys[i].to;
    }
    if (!is || !(is & allowed))
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': '%s' says nothing about a %s; for example " EXAMPLES, whole,
                            key, ar_sim_fault_name(f->kind));
    if (*had & is)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': '%s' stands there twice", whole, key);
    if (!read_u64(&number, value))
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': '%s' is no number for '%s'", whole, value, key);
    *had |= is;
    if (is == HAS_RANK && number > INT32_MAX)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': there is no rank %s", whole, value);
    if (is == HAS_COLLECTIVE && number == 0)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': collectives are numbered from 1", whole);
    *to = number;
    if (is == HAS_RANK)
        f->rank = (int)rank;
    return AR_OK;
}

ar_status ar_sim_fault_parse(ar_sim_fault *f, const char *text)
{
    char word[WORD_BYTES] = "", value[WORD_BYTES] = "";
    const char *at = text;
    ar_sim_fault read = {0};
    unsigned had = 0;
    bool known = next_word(word, &at);
    if (known)
        AR_TRY(read_kind(&read.kind, word, text));
    while (known && (known = next_word(word, &at)) && word[0]) {
        known = next_word(value, &at);
        if (known)
            AR_TRY(read_pair(&read, &had, word, value, text));
    }
    if (!known)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': a word is too long; for example " EXAMPLES, text);
    const unsigned needed = HAS_RANK | HAS_COLLECTIVE | (takes[read.kind] & HAS_NS);
    if ((had & needed) != needed)
        return ar_error_set(AR_ERR_ARG, "fault '%.80s': %s is missing; for example " EXAMPLES, text,
                            !(had & HAS_RANK)         ? "the rank"
                            : !(had & HAS_COLLECTIVE) ? "the collective"
                                                      : "how long, in ns,");
    *f = read;
    return AR_OK;
}
