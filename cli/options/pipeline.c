/* SPDX-License-Identifier: Apache-2.0 */
/* Options of a pipeline: its ranks, the layers of its stages, and its schedule by name or as a file. */
#include <string.h>

#include "cli/options/run.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/pipeline/schedule_private.h"

#define ARI_VALUES ari_run_values
const ari_option ari_pipeline_options[] = {
    ARI_OPTION_SECTION("pipeline"),
    ARI_OPTION_INT("pp", run.parallel.pp, 1, 4096, "N",
                   "pipeline ranks, or groups of the others: each holds some of the layers, the first also the "
                   "embedding, the last the head"),
    ARI_OPTION_FILE("schedule-pp", schedule_pp, "NAME|FILE",
                    "with --pp: in which order its ranks go through the micro-batches: 1f1b, gpipe, interleaved, "
                    "zero-bubble, or a file of torch.distributed.pipelining with a line for each rank, as "
                    "0F0,0F1,0B0,0B1 (default 1f1b)",
                    .choices = ari_pp_schedule_names,
                    .details = "A file's stages and micro-batches are those of the layout where --virtual-stages and "
                               "--micro-batches are not given."),
    ARI_OPTION_INT("virtual-stages", run.parallel.virtual_stages, 1, 256, "V",
                   "with --schedule-pp interleaved: parts of the layers that each rank of --pp holds and that take "
                   "turns (default 2)"),
    ARI_OPTION_ROW(STAGES, "stages", run.parallel.stages, .value = "LIST",
                   .help = "with --pp: layers of each stage, as 3,5,4 (default: evenly, and where that cannot be, one "
                           "more in the middle)"),
    {0},
};
#undef ARI_VALUES

/* Returns the schedule with that name; AR_PP_SCHEDULES: none. */
static ar_pp_schedule named(const char *text)
{
    return text ? (ar_pp_schedule)ari_word_of(text, ari_pp_schedule_names, AR_PP_SCHEDULES) : (ar_pp_schedule)0;
}

static bool is_file(const ari_run_values *v)
{
    return named(v->schedule_pp) == AR_PP_SCHEDULES;
}

static ar_status check_name(const char *text)
{
    if (!text || named(text) < AR_PP_SCHEDULES || strpbrk(text, "./"))
        return AR_OK;
    const char *near = ari_nearest(text, ari_pp_schedule_names, AR_PP_SCHEDULES);
    return ar_error_set(AR_ERR_ARG,
                        "--schedule-pp: got '%s', expected 1f1b, gpipe, interleaved, zero-bubble or a file's path, as "
                        "./%s%s%s%s",
                        ARI_SHOW(text), ARI_SHOW(text), near ? "; did you mean " : "", near ? near : "",
                        near ? "?" : "");
}

ar_status ari_pipeline_check(const ari_run_values *v)
{
    const ar_parallel *p = &v->run.parallel;
    const char *option = v->schedule_pp ? "--schedule-pp" : p->virtual_stages > 0 ? "--virtual-stages" : "--stages";
    AR_TRY(check_name(v->schedule_pp));
    if ((v->schedule_pp || p->virtual_stages > 0 || p->stages.n > 0) && p->pp < 2)
        return ar_error_set(AR_ERR_ARG, "%s is about the ranks of --pp: give --pp N of at least 2 too", option);
    if (p->virtual_stages > 1 && !is_file(v) && named(v->schedule_pp) != AR_PP_INTERLEAVED)
        return ar_error_set(AR_ERR_ARG, "--virtual-stages %d take turns: give --schedule-pp interleaved too",
                            p->virtual_stages);
    if (p->pp > 1 && p->forward_first)
        return ar_error_set(AR_ERR_ARG, "--forward-first in a pipeline is its --schedule-pp gpipe: give that");
    return AR_OK;
}

void ari_pipeline_complete(ar_parallel *p, const ari_run_values *v)
{
    if (v->schedule_pp && !is_file(v))
        p->schedule = named(v->schedule_pp);
    p->virtual_stages =
        p->schedule == AR_PP_INTERLEAVED && p->virtual_stages == 0 ? 2 : ari_at_least_one(p->virtual_stages);
}

ar_status ari_pipeline_load(ar_parallel *p, const ari_run_values *v)
{
    ar_pipeline_schedule *schedule = NULL;
    if (!is_file(v))
        return AR_OK;
    AR_TRY(ari_pipeline_schedule_read(&schedule, v->schedule_pp));
    const ar_pipeline_shape shape = ari_pipeline_schedule_shape(schedule);
    p->own_schedule = schedule;
    if (v->run.parallel.virtual_stages == 0)
        p->virtual_stages = shape.stages / shape.ranks;
    if (v->run.parallel.micro_batches == 0)
        p->micro_batches = shape.micro_batches;
    return AR_OK;
}

json_t *ari_stages_json(const ar_stages *s)
{
    json_t *layers = json_array();
    for (int i = 0; i < s->n; i++)
        json_array_append_new(layers, json_integer(s->layers[i]));
    return layers;
}
