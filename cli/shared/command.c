/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/shared/command.h"

#include <string.h>

#include "anyrank/config.h"
#include "anyrank/device.h"
#include "gpu/device_private.h"
#include "ref/core/status_private.h"
#include "ref/cpu/device_private.h"
#include "ref/io/json.h"

#ifndef ANYRANK_VERSION
#define ANYRANK_VERSION "0.3.0"
#endif
#ifndef ANYRANK_BUILD_TYPE
#define ANYRANK_BUILD_TYPE "unnamed build"
#endif

bool ari_cause_known(const char *cause)
{
    return cause[0] && strcmp(cause, "unknown") != 0;
}

int ari_exit_code(ar_status st)
{
    switch (st) {
    case AR_OK:
        return ARI_EXIT_SAME;
    case AR_ERR_MEMORY:
    case AR_ERR_TIMEOUT:
    case AR_ERR_ABORTED:
    case AR_ERR_DEVICE:
    case AR_ERR_INTERNAL:
        return ARI_EXIT_MACHINE;
    default:
        return ARI_EXIT_USAGE;
    }
}

void ari_print_error(const char *command, ar_status st)
{
    const char *message = ar_error_message();
    fprintf(stderr, "anyrank%s%s: %s\n", command != NULL ? " " : "", command != NULL ? command : "",
            message[0] != '\0' ? message : ari_status_text(st));
}

const char *ari_version(void)
{
    return ANYRANK_VERSION;
}

const char *ari_build_type(void)
{
    return ANYRANK_BUILD_TYPE;
}

void ari_print_version(FILE *out)
{
    ar_cpu_info cpu;
    char cuda[400];
    ari_cpu_info_get(&cpu);
    ari_gpu_describe(cuda, sizeof cuda);
    fprintf(out, "anyrank %s (%s)\n", ari_version(), ari_build_type());
    fprintf(out, "%s %s, kernels: %s\n", cpu.blas, cpu.blas_version, cpu.blas_kernels);
    fprintf(out, "CUDA: %s\n", cuda);
}

bool ari_prints_text(const ari_common *common)
{
    return !common->quiet && (common->json == NULL || strcmp(common->json, "-") != 0);
}

/* Version of the JSON, increased when a member is removed or changes its meaning; new members do not count. */
enum { SCHEMA = 1 };

json_t *ari_json_begin(const char *command)
{
    return json_pack("{s:s, s:s, s:i, s:s}", "tool", "anyrank", "version", ari_version(), "schema", SCHEMA, "command",
                     command);
}

json_t *ari_json_merge(json_t *object, json_t *rest)
{
    if (object && rest && json_object_update_new(object, rest) == 0)
        return object;
    json_decref(object);
    return NULL;
}

ar_status ari_json_end(json_t *result, const ari_common *common)
{
    ar_status st = AR_OK;
    if (result == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the result as JSON");
    if (common->json != NULL)
        st = ari_json_save(result, common->json);
    json_decref(result);
    return st;
}

json_t *ari_json_text_or_null(const char *text)
{
    return text && text[0] ? ari_json_text(text) : json_null();
}

/* Prints a note and appends it to the list. */
static void add_note(json_t *notes, FILE *out, const char *text)
{
    if (out)
        fprintf(out, "note: %s\n", text);
    json_array_append_new(notes, ari_json_text(text));
}

json_t *ari_config_notes(FILE *out, const ar_config *c)
{
    const size_t n = c->unknown_keys <= AR_CONFIG_NOTES ? c->unknown_keys : AR_CONFIG_NOTES + 1;
    size_t expected_count = n;
    json_t *notes = json_array();
    char text[160];
    if (c->changed[0] != '\0' && ++expected_count)
        add_note(notes, out, c->changed);
    if (c->within && ++expected_count)
        add_note(notes, out, "config.json: of key 'text_config' alone: what the file describes beside it is left out");
    if (c->quantized[0] != '\0' && ++expected_count) {
        snprintf(text, sizeof text,
                 "config.json: weights are stored in few bits (%s); here they count, and are computed "
                 "with, as if they were not",
                 c->quantized);
        add_note(notes, out, text);
    }
    if (c->mtp_unused > 0 && c->mtp == 0 && ++expected_count) {
        snprintf(text, sizeof text,
                 "config.json: without 'mtp_loss_scaling_factor', the %zu block%s of "
                 "'num_nextn_predict_layers' %s left out (--mtp trains them)",
                 c->mtp_unused, c->mtp_unused == 1 ? "" : "s", c->mtp_unused == 1 ? "is" : "are");
        add_note(notes, out, text);
    }
    for (size_t i = 0; i < n; i++) {
        const size_t remaining = c->unknown_keys - i;
        if (i < AR_CONFIG_NOTES)
            snprintf(text, sizeof text, "config.json: key '%s' is not known here and was ignored", c->unknown[i]);
        else
            snprintf(text, sizeof text, "config.json: %zu more key%s not known here and %s ignored", remaining,
                     remaining == 1 ? " is" : "s are", remaining == 1 ? "was" : "were");
        add_note(notes, out, text);
    }
    if (json_array_size(notes) == expected_count)
        return notes;
    json_decref(notes);
    return NULL;
}
