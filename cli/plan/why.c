/* SPDX-License-Identifier: Apache-2.0 */
/* Why the first layout of a ranking is first, next to another layout. */
#include <stdlib.h>
#include <string.h>

#include "cli/plan/plan.h"
#include "ref/io/json.h"

static ar_status bad_layout(const char *text)
{
    return ar_error_set(AR_ERR_ARG, "--why '%s': extents are expected, as 'tp=8 pp=16', of those that --gpus has",
                        text);
}

ar_status ari_why_read(ari_choice *c, const char *text, int gpus)
{
    int remaining = gpus;
    *c = (ari_choice){.cp_inner = 0};
    for (const char *cursor = text + strspn(text, " ,"); *cursor; cursor += strspn(cursor, " ,")) {
        const size_t name = strcspn(cursor, "=");
        int axis = -1;
        for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
            const char *axis_name = ari_layout_axes[ari_planned_axes[i]].name;
            axis = strlen(axis_name) == name && strncmp(cursor, axis_name, name) == 0 ? i : axis;
        }
        char *end = NULL;
        const long n = axis >= 0 && cursor[name] ? strtol(cursor + name + 1, &end, 10) : 0;
        if (n < 1 || n > ARI_MAX_GPUS || (*end && !strchr(" ,", *end)))
            return bad_layout(text);
        if (remaining % (int)n != 0)
            return bad_layout(text);
        remaining /= (int)n;
        c->extent[axis] = (int)n;
        cursor = end;
    }
    return AR_OK;
}

static bool has_extents(const ari_choice *c, const ari_choice *requested)
{
    bool is_match = true;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        is_match = is_match && (requested->extent[i] == 0 || requested->extent[i] == c->extent[i]);
    return is_match;
}

static const char *signed_seconds(char text[ARI_NUMBER], double seconds)
{
    snprintf(text, ARI_NUMBER, "%s%s", seconds < 0.0 ? "-" : "+", ARI_SECONDS(seconds < 0.0 ? -seconds : seconds));
    return text;
}
#define SIGNED(seconds) signed_seconds((char[ARI_NUMBER]){0}, (seconds))

static ar_status print_beside(FILE *out, const ari_plan_request *a, const ari_candidate *best_layout,
                              const ari_candidate *f)
{
    ari_search s = a->search;
    ari_depth d, e;
    s.first_only = true; /* their cost breakdowns are not shown */
    AR_TRY(ari_depth_of(&d, &s, &best_layout->choice, NULL));
    AR_TRY(ari_depth_of(&e, &s, &f->choice, NULL));
    char names[2][ARI_CHOICE_TEXT];
    const ari_column columns[] = {{"time of a step", ARI_LEFT},
                                  {ari_choice_text(names[0], &best_layout->choice, ARI_LAYOUT_AXES, " "), ARI_RIGHT},
                                  {ari_choice_text(names[1], &f->choice, ARI_LAYOUT_AXES, " "), ARI_RIGHT},
                                  {"loses", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    for (int k = 0; k < ARI_TIME_KINDS; k++) {
        if (d.time.seconds[k] > 0.0 || e.time.seconds[k] > 0.0)
            ari_table_row(&t, "%s\t%s\t%s\t%s", ari_time_name((ari_time_kind)k), ARI_SECONDS(d.time.seconds[k]),
                          ARI_SECONDS(e.time.seconds[k]), SIGNED(e.time.seconds[k] - d.time.seconds[k]));
    }
    ari_table_row(&t, "sum\t%s\t%s\t%s", ARI_SECONDS(d.found.seconds), ARI_SECONDS(e.found.seconds),
                  SIGNED(e.found.seconds - d.found.seconds));
    ari_table_row(&t, "memory of a rank\t%s\t%s\t%s", ARI_BYTES((uint64_t)d.found.bytes),
                  ARI_BYTES((uint64_t)e.found.bytes), e.found.fits ? "" : "does not fit");
    return ari_table_end(&t, out, 2);
}

/* Finds the best layout with the extents of --why; NULL: none is legal. */
static ar_status find_asked(const ari_candidate **found, const ari_plan_request *a, const ari_ranking *r)
{
    ari_choice requested;
    *found = NULL;
    AR_TRY(ari_why_read(&requested, a->v->why, a->search.ranks));
    for (size_t i = r->n; i-- > 0;)
        *found = r->layout[i].legal == AR_OK && has_extents(&r->layout[i].choice, &requested) ? &r->layout[i] : *found;
    return AR_OK;
}

ar_status ari_why_print(FILE *out, const ari_plan_request *a, const ari_ranking *r)
{
    char why[ARI_WHY_LINES][ARI_WHY_TEXT];
    const ari_candidate *found = NULL;
    AR_TRY(ari_ranking_why(why, &a->search, r));
    for (int i = 0; i < ARI_WHY_LINES && why[i][0]; i++)
        fprintf(out, "why: %s\n", why[i]);
    if (!a->v->why)
        return AR_OK;
    AR_TRY(find_asked(&found, a, r));
    if (found)
        return print_beside(out, a, &r->layout[0], found);
    fprintf(out, "why: no layout of %s is legal\n", a->v->why);
    return AR_OK;
}

ar_status ari_why_json(json_t *object, const ari_plan_request *a, const ari_ranking *r)
{
    char why[ARI_WHY_LINES][ARI_WHY_TEXT];
    const ari_candidate *found = NULL;
    ari_depth d;
    AR_TRY(ari_ranking_why(why, &a->search, r));
    json_t *lines = json_array();
    for (int i = 0; i < ARI_WHY_LINES && why[i][0]; i++)
        json_array_append_new(lines, ari_json_text(why[i]));
    json_object_set_new(object, "why", lines);
    if (!a->v->why)
        return AR_OK;
    AR_TRY(find_asked(&found, a, r));
    if (found)
        AR_TRY(ari_depth_of(&d, &a->search, &found->choice, NULL));
    json_object_set_new(object, "asked", found ? ari_depth_json(&d) : json_null());
    return AR_OK;
}
