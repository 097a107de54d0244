/* SPDX-License-Identifier: Apache-2.0 */
/* Parses and prints the simulated cluster as text, and checks it. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/text.h"
#include "sim/sim_impl.h"
#include "sim/sim_private.h"

/* Latencies: what NCCL's model assumes for one step of a ring with the Simple protocol, which reaches full bandwidth
 * (src/graph/tuning.cc, hwLat). Rates: the vendor's peak in one direction. */
static const struct {
    const char *name;
    ar_sim_link link;
} links[] = {
    {"nvlink3", {3.4e-6, 300e9}}, {"nvlink4", {3.4e-6, 450e9}},  {"nvlink5", {3.4e-6, 900e9}},
    {"pcie4", {5.7e-6, 32e9}},    {"pcie5", {5.7e-6, 64e9}},     {"hdr", {9.6e-6, 25e9}},
    {"ndr", {9.6e-6, 50e9}},      {"roce100", {9.6e-6, 12.5e9}},
};

/* The vendor's machines; flops: dense 16-bit peak of one GPU (simulated-cluster.md has the sources). */
enum { MACHINES = 5 };
const char *const ar_sim_cluster_names[] = {"a100", "h100", "h200", "b200", "gb200-nvl72", NULL};
static const char *const machines[MACHINES] = {
    "8x inside=nvlink3 between=hdr flops=312T peak=312T memory=80GB",
    "8x inside=nvlink4 between=ndr flops=989T peak=989T memory=80GB",
    "8x inside=nvlink4 between=ndr flops=989T peak=989T memory=141GB",
    "8x inside=nvlink5 between=ndr flops=2250T peak=2250T memory=180GB",
    "72x inside=nvlink5 between=ndr flops=2500T peak=2500T memory=186GB",
};

typedef struct unit {
    const char *name;
    double factor;
} unit;
static const unit times[] = {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {0}};
static const unit rates[] = {{"B/s", 1},          {"kB/s", 1e3},        {"MB/s", 1e6},
                             {"GB/s", 1e9},       {"TB/s", 1e12},       {"Mbit/s", 1e6 / 8},
                             {"Gbit/s", 1e9 / 8}, {"Tbit/s", 1e12 / 8}, {0}};
static const unit flops_units[] = {{"", 1},         {"G", 1e9},       {"T", 1e12},      {"P", 1e15},
                                   {"GFLOPS", 1e9}, {"TFLOPS", 1e12}, {"PFLOPS", 1e15}, {0}};
static const unit sizes[] = {{"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {0}};

#define EXAMPLE "8x inside=2us:300GB/s between=5us:25GB/s flops=400T"
enum { MOST_PER_NODE = 4096, WORD_BYTES = 96 };
enum { HAS_NODE = 1, HAS_INSIDE = 2, HAS_BETWEEN = 4, HAS_FLOPS = 8, HAS_PEAK = 16, HAS_MEMORY = 32 };

/* Reads a decimal number at *cursor, independent of the locale, and moves the cursor past it. Returns false if there is
 * no number. */
static bool read_number(const char **cursor, double *value)
{
    static const char digits[] = "0123456789";
    const char *s = *cursor;
    const size_t int_digits = strspn(s, digits), part = s[int_digits] == '.' ? strspn(s + int_digits + 1, digits) : 0;
    double v = 0;
    if (strncmp(s, "inf", 3) == 0) {
        *value = HUGE_VAL;
        *cursor = s + 3;
        return true;
    }
    if (int_digits + part == 0)
        return false;
    for (size_t i = 0; i < int_digits; i++)
        v = v * 10 + (s[i] - '0');
    double scale = 1;
    for (size_t i = 0; i < part; i++) {
        v = v * 10 + (s[int_digits + 1 + i] - '0');
        scale *= 10;
    }
    s += int_digits + (s[int_digits] == '.' ? part + 1 : 0);
    int exponent = 0;
    if (*s == 'e') {
        const char *e = s + 1 + (s[1] == '-' || s[1] == '+');
        const size_t n = strspn(e, digits);
        if (n < 1 || n > 2)
            return false;
        exponent = n == 2 ? (e[0] - '0') * 10 + (e[1] - '0') : e[0] - '0';
        exponent = s[1] == '-' ? -exponent : exponent;
        s = e + n;
    }
    *value = v / scale * pow(10, exponent);
    *cursor = s;
    return true;
}

/* Reads `text`, which must be exactly a number with one of the units. */
static ar_status read_quantity(double *value, const char *word, const char *text, const unit *units,
                               const char *quantity)
{
    const char *cursor = text;
    if (read_number(&cursor, value)) {
        for (const unit *u = units; u->name; u++) {
            if (strcmp(cursor, u->name) == 0 || (isinf(*value) && !cursor[0])) {
                *value *= u->factor;
                return AR_OK;
            }
        }
    }
    char unit_names[128];
    ari_text list = ari_plain_text_in(unit_names, sizeof unit_names);
    for (const unit *u = units; u->name; u++)
        ari_say(&list, "%s%s", u == units ? "" : ", ", u->name[0] ? u->name : "nothing");
    return ar_error_set(AR_ERR_ARG, "cluster: '%s': '%s' is no %s; expected a number and behind it one of: %s", word,
                        text, quantity, unit_names);
}

static ar_status read_link(ar_sim_link *link, const char *word, const char *text)
{
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        if (strcmp(text, links[i].name) == 0) {
            *link = links[i].link;
            return AR_OK;
        }
    }
    const char *colon = strchr(text, ':');
    if (colon) {
        char latency[WORD_BYTES];
        snprintf(latency, sizeof latency, "%.*s", (int)(colon - text), text);
        AR_TRY(read_quantity(&link->latency_s, word, latency, times, "latency"));
        return read_quantity(&link->bytes_per_s, word, colon + 1, rates, "rate");
    }
    char link_names[WORD_BYTES];
    ari_text list = ari_plain_text_in(link_names, sizeof link_names);
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        ari_say(&list, "%s%s", i ? ", " : "", links[i].name);
    return ar_error_set(AR_ERR_ARG, "cluster: '%s': a link is LATENCY:RATE, as 2us:300GB/s, or one of %s", word,
                        link_names);
}

/* Reads a word such as "8x". *had: bit set of the words read so far. */
static ar_status read_node(ar_sim_cluster *c, const char *word)
{
    int n = 0;
    char machine_names[WORD_BYTES];
    const char *s = word;
    while (*s >= '0' && *s <= '9' && n <= MOST_PER_NODE)
        n = n * 10 + (*s++ - '0');
    ari_text list = ari_plain_text_in(machine_names, sizeof machine_names);
    for (size_t i = 0; i < MACHINES; i++)
        ari_say(&list, "%s%s", i ? ", " : "", ar_sim_cluster_names[i]);
    if (s == word || strcmp(s, "x") != 0 || n < 1 || n > MOST_PER_NODE)
        return ar_error_set(
            AR_ERR_ARG,
            "cluster: '%s' is none of RANKSx (1 to %d ranks of a node), inside=LINK, between=LINK, "
            "flops=RATE, peak=RATE, memory=SIZE, and in front a machine's name, %s; for example '" EXAMPLE "'",
            word, MOST_PER_NODE, machine_names);
    c->ranks_per_node = n;
    return AR_OK;
}

static const char *after(const char *word, const char *key)
{
    const size_t n = strlen(key);
    return strncmp(word, key, n) == 0 ? word + n : NULL;
}

static ar_status read_word(ar_sim_cluster *c, const char *word, unsigned *had)
{
    const char *value = NULL;
    unsigned flag = 0;
    if ((value = after(word, "inside=")) || (value = after(word, "nvlink="))) {
        flag = HAS_INSIDE;
        AR_TRY(read_link(&c->inside, word, value));
    } else if ((value = after(word, "between=")) || (value = after(word, "net="))) {
        flag = HAS_BETWEEN;
        AR_TRY(read_link(&c->between, word, value));
    } else if ((value = after(word, "flops="))) {
        flag = HAS_FLOPS;
        AR_TRY(read_quantity(&c->flops, word, value, flops_units, "rate of computation"));
        c->gpu = 0; /* a rate of the caller's, whatever the shape */
        if (c->flops <= 0.0)
            return ar_error_set(AR_ERR_ARG, "cluster: '%s': a rank computes more than 0 flops", word);
    } else if ((value = after(word, "peak="))) {
        flag = HAS_PEAK;
        AR_TRY(read_quantity(&c->peak_flops, word, value, flops_units, "rate of computation"));
    } else if ((value = after(word, "memory="))) {
        flag = HAS_MEMORY;
        AR_TRY(read_quantity(&c->memory_bytes, word, value, sizes, "size of memory"));
        if (c->memory_bytes <= 0.0)
            return ar_error_set(AR_ERR_ARG, "cluster: '%s': a rank has more than 0 bytes", word);
    } else {
        flag = HAS_NODE;
        AR_TRY(read_node(c, word));
    }
    if (*had & flag)
        return ar_error_set(AR_ERR_ARG, "cluster: '%s' says a second time what a word before it said", word);
    *had |= flag;
    return AR_OK;
}

size_t ari_next_word(char *word, size_t capacity, const char **text)
{
    static const char separators[] = " ,\t";
    *text += strspn(*text, separators);
    const size_t n = strcspn(*text, separators);
    if (n < capacity) {
        memcpy(word, *text, n);
        word[n] = '\0';
        *text += n;
    }
    return n;
}

static ar_status next_word(char word[WORD_BYTES], const char **text)
{
    const size_t n = ari_next_word(word, WORD_BYTES, text);
    if (n >= WORD_BYTES)
        return ar_error_set(AR_ERR_ARG, "cluster: a word of %zu characters; at most %d are expected", n,
                            WORD_BYTES - 1);
    return AR_OK;
}

static ar_status read_words(ar_sim_cluster *c, const char *text, unsigned *had)
{
    char word[WORD_BYTES] = "";
    for (;;) {
        AR_TRY(next_word(word, &text));
        if (!word[0])
            return AR_OK;
        AR_TRY(read_word(c, word, had));
    }
}

/* Reads a machine's name at the start, whose values later words may change. Moves *text past it. */
static ar_status read_machine(ar_sim_cluster *c, const char **text, bool *found)
{
    char word[WORD_BYTES] = "";
    const char *rest = *text;
    unsigned had = 0;
    *found = false;
    AR_TRY(next_word(word, &rest));
    const size_t i = ari_word_of(word, ar_sim_cluster_names, MACHINES);
    *found = i < MACHINES;
    if (!*found)
        return AR_OK;
    *text = rest;
    AR_TRY(read_words(c, machines[i], &had));
    c->gpu = (int)i + 1;
    return AR_OK;
}

static ar_status missing(const char *requirement)
{
    return ar_error_set(AR_ERR_ARG, "cluster: %s is missing; for example '" EXAMPLE "'", requirement);
}

ar_status ar_sim_cluster_parse(ar_sim_cluster *c, const char *text)
{
    if (!c || !text)
        return ar_error_set(AR_ERR_ARG, "ar_sim_cluster_parse: %s is missing", c ? "the text" : "the cluster's place");
    ar_sim_cluster cluster = {0};
    unsigned had = 0;
    bool machine = false;
    AR_TRY(read_machine(&cluster, &text, &machine));
    AR_TRY(read_words(&cluster, text, &had));
    if (!machine && !(had & HAS_INSIDE))
        return missing("inside=LINK, what joins the ranks of a node,");
    if (!machine && !(had & HAS_FLOPS))
        return missing("flops=RATE, what a rank computes in a second,");
    if (!machine && (had & HAS_NODE) && !(had & HAS_BETWEEN))
        return missing("between=LINK, what joins the nodes,");
    if (!machine && !(had & HAS_NODE) && (had & HAS_BETWEEN))
        return missing("RANKSx, how many ranks a node has,");
    if (machine && !(had & HAS_PEAK) && cluster.flops > cluster.peak_flops)
        cluster.peak_flops = cluster.flops; /* a number type narrower than the 16 bits of the peak */
    AR_TRY(ari_virtual_check(&cluster));
    *c = cluster;
    return AR_OK;
}

static void say_link(ari_text *t, const char *key, const ar_sim_link *link)
{
    ari_say(t, "%s=%gus:%gGB/s ", key, link->latency_s * 1e6, link->bytes_per_s * 1e-9);
}

void ari_sim_cluster_describe(const ar_sim_cluster *c, char *text, size_t size)
{
    ari_text t = ari_plain_text_in(text, size);
    if (c->ranks_per_node > 0)
        ari_say(&t, "%dx ", c->ranks_per_node);
    say_link(&t, "inside", &c->inside);
    if (c->ranks_per_node > 0)
        say_link(&t, "between", &c->between);
    ari_say(&t, "flops=%gT", c->flops * 1e-12);
    if (c->peak_flops > 0)
        ari_say(&t, " peak=%gT", c->peak_flops * 1e-12);
    if (c->memory_bytes > 0)
        ari_say(&t, " memory=%gGB", c->memory_bytes * 1e-9);
}

static ar_status check_link(const char *which, const ar_sim_link *l)
{
    if (!(isfinite(l->latency_s) && l->latency_s >= 0))
        return ar_error_set(AR_ERR_ARG, "cluster: the link %s has a latency of %g s; 0 or more is expected", which,
                            l->latency_s);
    if (!(l->bytes_per_s > 0))
        return ar_error_set(AR_ERR_ARG, "cluster: the link %s moves %g bytes/s; more than 0 is expected", which,
                            l->bytes_per_s);
    return AR_OK;
}

ar_status ari_virtual_check(const ar_sim_cluster *c)
{
    if (c->ranks_per_node < 0)
        return ar_error_set(AR_ERR_ARG, "cluster: %d ranks in a node; 1 or more are expected, or 0: all of them",
                            c->ranks_per_node);
    AR_TRY(ari_check_choice("cluster: the GPU", c->gpu, MACHINES + 1));
    AR_TRY(check_link("inside a node", &c->inside));
    if (c->ranks_per_node > 0)
        AR_TRY(check_link("between nodes", &c->between));
    if (!(c->flops > 0))
        return ar_error_set(AR_ERR_ARG, "cluster: a rank computes %g flops; more than 0 is expected", c->flops);
    if (c->peak_flops > 0 && c->peak_flops < c->flops)
        return ar_error_set(AR_ERR_ARG, "cluster: flops=%gT is more than the peak of %gT", c->flops * 1e-12,
                            c->peak_flops * 1e-12);
    if (!(c->peak_flops >= 0) || !(c->memory_bytes >= 0))
        return ar_error_set(AR_ERR_ARG, "cluster: a peak of %g flops and a memory of %g bytes; 0 (not given) or more",
                            c->peak_flops, c->memory_bytes);
    return AR_OK;
}
