/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "cli/args.h"
#include "cli/command.h"

/* What was asked for, as text that can be compared. */

static bool has_value(const ari_option *o, double value)
{
    return !(o->min < o->max || o->min > 0 || o->max < 0) || (value >= o->min && value <= o->max);
}

/* As few digits as tell the number from all others. */
static void tell_double(FILE *to, const char *name, double value)
{
    char text[32];
    snprintf(text, sizeof text, "%.15g", value);
    if (strtod(text, NULL) < value || strtod(text, NULL) > value)
        snprintf(text, sizeof text, "%.17g", value);
    fprintf(to, "--%s %s\n", name, text);
}

static void tell_strings(FILE *to, const char *name, const ari_strings *all)
{
    for (size_t i = 0; i < all->n; i++)
        fprintf(to, "--%s %s\n", name, all->text[i]);
}

/* False where it was not given, and has no default that could be told. */
static bool tell_value(FILE *to, const ari_option *o, const void *field)
{
    const char *text = NULL;
    switch (o->kind) {
    case ARI_OPT_FLAG:
        if (*(const bool *)field)
            fprintf(to, "--%s\n", o->name);
        return *(const bool *)field;
    case ARI_OPT_INT:
        if (has_value(o, (double)*(const int *)field))
            fprintf(to, "--%s %d\n", o->name, *(const int *)field);
        return has_value(o, (double)*(const int *)field);
    case ARI_OPT_SIZE:
    case ARI_OPT_BYTES:
        if (has_value(o, (double)*(const size_t *)field))
            fprintf(to, "--%s %zu\n", o->name, *(const size_t *)field);
        return has_value(o, (double)*(const size_t *)field);
    case ARI_OPT_U64:
        fprintf(to, "--%s %llu\n", o->name, (unsigned long long)*(const uint64_t *)field);
        return true;
    case ARI_OPT_DOUBLE:
        if (!isnan(*(const double *)field))
            tell_double(to, o->name, *(const double *)field);
        return !isnan(*(const double *)field);
    case ARI_OPT_STRING:
        text = *(const char *const *)field;
        break;
    case ARI_OPT_STRINGS:
        tell_strings(to, o->name, field);
        return ((const ari_strings *)field)->n > 0;
    case ARI_OPT_ENUM:
        text = *(const int *)field >= 0 ? o->choices[*(const int *)field] : NULL;
        break;
    case ARI_OPT_LATER:
        return true;
    }
    if (text)
        fprintf(to, "--%s %s\n", o->name, text);
    return text != NULL;
}

static void tell_options(FILE *to, const ari_option *options, const char *base)
{
    for (const ari_option *o = options; o && o->name; o++) {
        if (!o->own && o->at != ARI_OPT_NO_FIELD && !tell_value(to, o, base + o->at))
            fprintf(to, "no --%s\n", o->name);
    }
}

ar_status ari_args_tell(char **gives, const ari_args_spec *spec, const void *values)
{
    char *text = NULL;
    size_t size = 0;
    *gives = NULL;
    FILE *to = open_memstream(&text, &size);
    if (!to)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a text of the options");
    fprintf(to, "anyrank %s, version %s\n", spec->command, ari_version());
    for (const ari_positional *p = spec->positionals; p && p->name; p++) {
        const char *text_of = *(const char *const *)((const char *)values + p->at);
        fprintf(to, "%s%s%s\n", text_of ? p->name : "no ", text_of ? " " : p->name, text_of ? text_of : "");
    }
    tell_options(to, spec->options, values);
    tell_options(to, ari_common_options, (const char *)values + spec->common_at);
    const bool failed = ferror(to) != 0;
    if (fclose(to) != 0 || failed) {
        free(text);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a text of the options");
    }
    *gives = text;
    return AR_OK;
}
