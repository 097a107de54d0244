/* SPDX-License-Identifier: Apache-2.0 */
/* The kinds of options: how a value of each is read, described and printed. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/options/args.h"
#include "ref/core/text.h"
#include "ref/models/stages.h"

/* --- what would be right ------------------------------------------------------------------------------------------ */

static bool has_range(const ari_option *o)
{
    return o->min < o->max || o->min > 0 || o->max < 0;
}

static bool in_range(const ari_option *o, double value)
{
    return !has_range(o) || (value >= o->min && value <= o->max);
}

static void describe_number(const ari_option *o, char *text, size_t size)
{
    const char *kind = o->kind == ARI_OPT_DOUBLE ? "a number" : "an integer";
    if (!has_range(o))
        snprintf(text, size, "%s%s", kind, o->kind == ARI_OPT_SIZE ? " from 0 on" : "");
    else if (o->max >= (o->kind == ARI_OPT_INT ? (double)INT_MAX : 1.8e19))
        snprintf(text, size, "%s from %.15g on", kind, o->min);
    else
        snprintf(text, size, "%s from %.15g to %.15g", kind, o->min, o->max);
}

static void describe_u64(const ari_option *o, char *text, size_t size)
{
    (void)o;
    snprintf(text, size, "an integer from 0 to %llu", (unsigned long long)UINT64_MAX);
}

static void describe_bytes(const ari_option *o, char *text, size_t size)
{
    snprintf(text, size, "a number of bytes%s, as 4096, 64KiB, 25MiB or 1GB", o->min > 0 ? " above 0" : "");
}

static void describe_part(const ari_option *o, char *text, size_t size)
{
    snprintf(text, size, "1/N with an integer N from %.15g to %.15g, as 1/16", o->min, o->max);
}

static void describe_string(const ari_option *o, char *text, size_t size)
{
    snprintf(text, size, "%s", o->value != NULL ? o->value : "a text");
}

static void describe_enum(const ari_option *o, char *text, size_t size)
{
    size_t offset = 0;
    for (size_t i = 0; o->choices[i] != NULL && offset < size; i++) {
        const char *before = i == 0 ? "" : o->choices[i + 1] == NULL ? " or " : ", ";
        offset += (size_t)snprintf(text + offset, size - offset, "%s%s", before, o->choices[i]);
    }
}

static void describe_stages(const ari_option *o, char *text, size_t size)
{
    (void)o;
    snprintf(text, size, "numbers of layers, at most %d of them, as 3,5,4", AR_MAX_STAGES);
}

static ar_status bad_value(const ari_option *o, const char *value)
{
    char right[ARI_OPT_TEXT];
    size_t n = 0;
    while (o->kind == ARI_OPT_ENUM && o->choices[n] != NULL)
        n++;
    const char *near = n > 0 && strlen(value) >= 2 ? ari_nearest(value, o->choices, n) : NULL;
    ari_option_kind_of(o)->describe(o, right, sizeof right);
    return ar_error_set(AR_ERR_ARG, "--%s: got '%s', expected %s%s%s%s", o->name, ARI_SHOW(value), right,
                        near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
}

/* --- reading ------------------------------------------------------------------------------------------------------ */

static ar_status set_int(const ari_option *o, void *field, const char *value)
{
    char *end = NULL;
    const char digit = value[strspn(value, "+-")];
    errno = 0;
    const long n = strtol(value, &end, 10);
    if (digit < '0' || digit > '9' || errno != 0 || *end != '\0' || n < INT_MIN || n > INT_MAX ||
        !in_range(o, (double)n))
        return bad_value(o, value);
    *(int *)field = (int)n;
    return AR_OK;
}

_Static_assert(sizeof(size_t) == sizeof(uint64_t), "U64 is read and printed as SIZE is");

static ar_status set_size(const ari_option *o, void *field, const char *value)
{
    uint64_t n = 0;
    const char *end = NULL;
    if (!ari_natural(&n, value, &end) || *end != '\0' || !in_range(o, (double)n))
        return bad_value(o, value);
    memcpy(field, &n, sizeof n);
    return AR_OK;
}

/* An integer, and behind it B, KiB, MiB or GiB (powers of 1024), kB, MB or GB (powers of 1000), or nothing. */
static ar_status set_bytes(const ari_option *o, void *field, const char *value)
{
    static const struct {
        const char *name;
        size_t bytes;
    } units[] = {{"", 1},      {"B", 1},         {"KiB", 1024},      {"MiB", 1048576}, {"GiB", 1073741824},
                 {"kB", 1000}, {"MB", 1000000u}, {"GB", 1000000000u}};
    const char *end = NULL;
    uint64_t n = 0;
    size_t bytes = 0;
    bool well = false;
    const bool number = ari_natural(&n, value, &end) && n <= SIZE_MAX;
    for (size_t i = 0; number && i < sizeof units / sizeof *units; i++) {
        if (strcmp(end, units[i].name) == 0)
            well = !__builtin_mul_overflow((size_t)n, units[i].bytes, &bytes);
    }
    if (!well || !in_range(o, (double)bytes))
        return bad_value(o, value);
    *(size_t *)field = bytes;
    return AR_OK;
}

static ar_status set_part(const ari_option *o, void *field, const char *value)
{
    uint64_t n = 0;
    const char *end = NULL;
    const bool part = strncmp(value, "1/", 2) == 0 && ari_natural(&n, value + 2, &end) && *end == '\0';
    if (!part || !in_range(o, (double)n))
        return bad_value(o, value);
    *(size_t *)field = (size_t)n;
    return AR_OK;
}

static ar_status set_double(const ari_option *o, void *field, const char *value)
{
    char *end = NULL;
    const double x = strtod(value, &end);
    if (strspn(value, "0123456789+-.eE") != strlen(value) || end == value || *end != '\0' || !isfinite(x) ||
        !in_range(o, x))
        return bad_value(o, value);
    *(double *)field = x;
    return AR_OK;
}

static ar_status set_string(const ari_option *o, void *field, const char *value)
{
    if (value[0] == '\0')
        return bad_value(o, value);
    *(const char **)field = value;
    return AR_OK;
}

static ar_status add_string(const ari_option *o, void *field, const char *value)
{
    ari_strings *strings = field;
    if (value[0] == '\0')
        return bad_value(o, value);
    if (strings->n == ARI_OPT_MANY)
        return ar_error_set(AR_ERR_ARG, "--%s: given more than %d times", o->name, ARI_OPT_MANY);
    strings->text[strings->n++] = value;
    return AR_OK;
}

static ar_status set_enum(const ari_option *o, void *field, const char *value)
{
    for (size_t n = 0; o->choices[n] != NULL; n++) {
        if (strcmp(o->choices[n], value) == 0) {
            *(int *)field = (int)n;
            return AR_OK;
        }
    }
    return bad_value(o, value);
}

static ar_status set_stages(const ari_option *o, void *field, const char *value)
{
    ar_stages stages = {.n = 0};
    for (const char *cursor = value;; cursor++) {
        uint64_t layers = 0;
        if (stages.n == AR_MAX_STAGES || !ari_natural(&layers, cursor, &cursor) || layers > UINT16_MAX)
            return bad_value(o, value);
        stages.layers[stages.n++] = (uint16_t)layers;
        if (*cursor == '\0')
            break;
        if (*cursor != ',')
            return bad_value(o, value);
    }
    *(ar_stages *)field = stages;
    return AR_OK;
}

/* --- printing ----------------------------------------------------------------------------------------------------- */

static bool print_flag(FILE *out, const ari_option *o, const void *field)
{
    if (*(const bool *)field)
        fprintf(out, "--%s\n", o->name);
    return *(const bool *)field;
}

static bool print_int(FILE *out, const ari_option *o, const void *field)
{
    const int n = *(const int *)field;
    if (in_range(o, (double)n))
        fprintf(out, "--%s %d\n", o->name, n);
    return in_range(o, (double)n);
}

static bool print_size(FILE *out, const ari_option *o, const void *field)
{
    uint64_t n;
    memcpy(&n, field, sizeof n);
    if (in_range(o, (double)n))
        fprintf(out, "--%s %llu\n", o->name, (unsigned long long)n);
    return in_range(o, (double)n);
}

static bool print_part(FILE *out, const ari_option *o, const void *field)
{
    const size_t n = *(const size_t *)field;
    if (n > 0)
        fprintf(out, "--%s 1/%zu\n", o->name, n);
    return n > 0;
}

/* Prints the fewest digits that distinguish the number from all others. */
static bool print_double(FILE *out, const ari_option *o, const void *field)
{
    const double x = *(const double *)field;
    char text[32];
    snprintf(text, sizeof text, "%.15g", x);
    if (strtod(text, NULL) < x || strtod(text, NULL) > x)
        snprintf(text, sizeof text, "%.17g", x);
    if (!isnan(x))
        fprintf(out, "--%s %s\n", o->name, text);
    return !isnan(x);
}

static bool print_string(FILE *out, const ari_option *o, const void *field)
{
    const char *text = *(const char *const *)field;
    if (text)
        fprintf(out, "--%s %s\n", o->name, text);
    return text != NULL;
}

static bool print_strings(FILE *out, const ari_option *o, const void *field)
{
    const ari_strings *strings = field;
    for (size_t i = 0; i < strings->n; i++)
        fprintf(out, "--%s %s\n", o->name, strings->text[i]);
    return strings->n > 0;
}

static bool print_enum(FILE *out, const ari_option *o, const void *field)
{
    const int chosen = *(const int *)field;
    return chosen >= 0 && print_string(out, o, &o->choices[chosen]);
}

static bool print_stages(FILE *out, const ari_option *o, const void *field)
{
    char text[ARI_STAGES_TEXT];
    const ar_stages *stages = field;
    ari_stages_text(text, stages);
    if (stages->n > 0)
        fprintf(out, "--%s %s\n", o->name, text);
    return stages->n > 0;
}

const ari_kind_ops *ari_option_kind_of(const ari_option *o)
{
    static const ari_kind_ops kinds[] = {
        [ARI_OPT_FLAG] = {NULL, NULL, print_flag},
        [ARI_OPT_INT] = {set_int, describe_number, print_int},
        [ARI_OPT_SIZE] = {set_size, describe_number, print_size},
        [ARI_OPT_BYTES] = {set_bytes, describe_bytes, print_size},
        [ARI_OPT_PART] = {set_part, describe_part, print_part},
        [ARI_OPT_U64] = {set_size, describe_u64, print_size},
        [ARI_OPT_DOUBLE] = {set_double, describe_number, print_double},
        [ARI_OPT_STRING] = {set_string, describe_string, print_string},
        [ARI_OPT_FILE] = {set_string, describe_string, print_string},
        [ARI_OPT_FOLDER] = {set_string, describe_string, print_string},
        [ARI_OPT_STRINGS] = {add_string, describe_string, print_strings},
        [ARI_OPT_ENUM] = {set_enum, describe_enum, print_enum},
        [ARI_OPT_STAGES] = {set_stages, describe_stages, print_stages},
    };
    return &kinds[o->kind];
}
