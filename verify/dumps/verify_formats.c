/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of a run that no tensor of it shows, as its capture recorded it: the format in which gradients are reduced
 * (a communication hook, FSDP2's reduce_dtype), and parameters whose update is orthogonalised in 16 bits. */
#include <jansson.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "verify/dumps/verify_impl.h"

/* A rank's gradient is a few times as large as the ranks' mean, and is rounded once before it is added, once after. */
static const double REDUCED_ROUNDINGS = 4.0;
/* Five iterations of Newton and Schulz in bf16 leave the small singular values of an update anywhere between zero and
 * the others: two right runs of Muon differ by a twentieth of the largest step. */
static const double ORTHOGONAL_PART = 0.125;

static double roundoff_of_name(const json_t *name)
{
    const char *text = json_string_value(name);
    return !text ? 0.0 : strcmp(text, "bf16") == 0 ? 0x1p-9 : strcmp(text, "f16") == 0 ? 0x1p-12 : 0.0;
}

static ar_status take_names(ari_verifying *v, const json_t *names)
{
    const size_t n = json_array_size(names);
    AR_TRY(ARI_TAKE(&v->orthogonal, &v->arena, v->orthogonals + n, "names of parameters"));
    for (size_t i = 0; i < n; i++) {
        char *name = NULL;
        const char *text = json_string_value(json_array_get(names, i));
        AR_TRY(ari_arena_text(&v->arena, &name, text ? text : "", "names of parameters"));
        v->orthogonal[v->orthogonals++] = name;
    }
    return AR_OK;
}

ar_status ari_verify_formats(ari_verifying *v)
{
    for (int k = 0; k < 2; k++) {
        const char *text = ar_dump_metadata(v->dump[k], "anyrank.formats");
        json_t *said = NULL;
        if (!text)
            continue;
        AR_TRY(ari_json_parse(&said, text, strlen(text), ar_dump_path(v->dump[k])));
        const json_t *reduced = json_object_get(said, "reduced");
        if (roundoff_of_name(reduced) > v->reduced) {
            v->reduced = roundoff_of_name(reduced);
            ari_printable(v->report->reduced, sizeof v->report->reduced, json_string_value(reduced));
        }
        const ar_status st = v->orthogonals ? AR_OK : take_names(v, json_object_get(said, "orthogonal"));
        json_decref(said);
        AR_TRY(st);
    }
    return AR_OK;
}

ar_status ari_excuse_reduced(ari_pair *pair, ari_verifying *v)
{
    const char pass = pair->row->pass;
    if (v->reduced == 0.0 || !pass || !strchr("gmvc", pass) || pair->tally.different == 0 || !pair->format[0].is_float)
        return AR_OK;
    const double parts = pass == 'v' ? 2.0 * REDUCED_ROUNDINGS : REDUCED_ROUNDINGS; /* of a square */
    AR_TRY(ARI_TAKE(&pair->doubt, &v->arena, 1, pair->row->name));
    *pair->doubt = (ari_doubt){.all = parts * v->reduced * pair->tally.max_reference};
    return AR_OK;
}

void ari_find_excused_by_reduction(const ari_verifying *v)
{
    for (const ari_pair *p = v->pair; v->reduced > 0.0 && p < v->pair + v->pairs; p++) {
        ar_verify_row *r = p->row;
        const bool of_gradient = r->pass && strchr("gmvc", r->pass), of_update = r->pass == 'n' && v->many_excused;
        r->excused_by_reduction = r->state == AR_VERIFY_SAME &&
                                  (r->excused_by_reduction || (r->elements_doubted > 0 && (of_gradient || of_update)));
        v->report->excused_by_reduction += r->excused_by_reduction;
    }
}

double ari_orthogonal_part(const ari_verifying *v, const char *name, size_t stem)
{
    for (size_t i = 0; i < v->orthogonals; i++) {
        if (strlen(v->orthogonal[i]) == stem && memcmp(v->orthogonal[i], name, stem) == 0)
            return ORTHOGONAL_PART;
    }
    return 0.0;
}
