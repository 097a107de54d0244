/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/grads.h"

#include <math.h>
#include <stdio.h>

#include "cli/command.h"
#include "cli/main.h"
#include "cli/table.h"
#include "ref/io/json.h"

typedef struct grads_values {
    ari_common common;
    const char *model, *block, *input, *out;
    int tp, numerics, device, algorithm, mlp_order;
    double timeout;
} grads_values;

static const char *const numerics_names[] = {"exact", "native", NULL};
static const char *const device_names[] = {"cpu", "cuda", NULL};
static const char *const algorithm_names[] = {"direct", "ring", NULL};
static const char *const order_names[] = {"column-row", "row-column", NULL};

static const ari_option options[] = {
    {.name = "input",
     .kind = ARI_OPT_STRING,
     .at = offsetof(grads_values, input),
     .value = "FILE.safetensors",
     .help = "input_ids [b, s]; optional attention_mask ([b, s] of 0/1, or additive [b|1, heads|1, s, s]), labels"},
    {.name = "block",
     .kind = ARI_OPT_STRING,
     .at = offsetof(grads_values, block),
     .value = "DIR",
     .help = "a single block in place of a model: case.json and inputs.safetensors"},
    {.name = "out",
     .kind = ARI_OPT_STRING,
     .at = offsetof(grads_values, out),
     .value = "DIR",
     .help = "where outputs.safetensors and grads.safetensors (or block.safetensors) go"},
    {.name = "tp",
     .kind = ARI_OPT_INT,
     .at = offsetof(grads_values, tp),
     .min = 1,
     .max = 4096,
     .value = "N",
     .help = "tensor-parallel ranks (default 1)"},
    {.name = "mlp-order",
     .kind = ARI_OPT_ENUM,
     .at = offsetof(grads_values, mlp_order),
     .choices = order_names,
     .help = "how the MLP's two layers are split (default column-row)"},
    {.name = "collectives",
     .kind = ARI_OPT_ENUM,
     .at = offsetof(grads_values, algorithm),
     .choices = algorithm_names,
     .help = "how the simulated cluster moves data; the bits are the same (default direct)"},
    {.name = "timeout",
     .kind = ARI_OPT_DOUBLE,
     .at = offsetof(grads_values, timeout),
     .min = 0.01,
     .max = 86400,
     .value = "S",
     .help = "longest wait of a rank for another, in seconds (default 60)"},
    {.name = "numerics",
     .kind = ARI_OPT_ENUM,
     .at = offsetof(grads_values, numerics),
     .choices = numerics_names,
     .help = "exact (native: not in this version)"},
    {.name = "device",
     .kind = ARI_OPT_ENUM,
     .at = offsetof(grads_values, device),
     .choices = device_names,
     .help = "cpu (cuda: not in this version)"},
    {.name = "dp", .kind = ARI_OPT_LATER},
    {.name = "cp", .kind = ARI_OPT_LATER},
    {.name = "pp", .kind = ARI_OPT_LATER},
    {.name = "sp", .kind = ARI_OPT_LATER},
    {.name = "zero", .kind = ARI_OPT_LATER},
    {.name = "micro-batches", .kind = ARI_OPT_LATER},
    {.name = "per-rank", .kind = ARI_OPT_LATER},
    {.name = "sensitivity", .kind = ARI_OPT_LATER},
    {.name = "trace", .kind = ARI_OPT_LATER},
    {.name = "timeline", .kind = ARI_OPT_LATER},
    {0},
};

static const ari_positional positionals[] = {
    {.name = "MODEL",
     .at = offsetof(grads_values, model),
     .help = "a folder with a Hugging Face config.json (and weights), or a bundled name"},
    {0},
};

static const ari_args_spec spec = {
    .command = "grads",
    .summary = "Runs one forward and backward on given inputs and writes outputs and gradients.",
    .example = "anyrank grads MODEL --input batch.safetensors --out results --tp 2\nanyrank grads --block DIR --out "
               "results --tp 4",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(grads_values, common),
};

static ar_status check_values(const grads_values *v)
{
    if (v->numerics != 0)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--numerics native: not in this version");
    if (v->device != 0)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--device cuda: not in this version");
    if (!v->model && !v->block)
        return ar_error_set(AR_ERR_ARG, "give a MODEL, or --block DIR");
    if (v->model && v->block)
        return ar_error_set(AR_ERR_ARG, "give a MODEL or --block, not both");
    if (v->model && !v->input)
        return ar_error_set(AR_ERR_ARG, "--input FILE.safetensors is missing: it holds the model's input_ids");
    if (v->block && v->input)
        return ar_error_set(AR_ERR_ARG, "--input goes with a MODEL; a block reads DIR/inputs.safetensors");
    if (!v->out)
        return ar_error_set(AR_ERR_ARG, "--out DIR is missing: it says where the results go");
    return AR_OK;
}

static json_t *as_json(const ar_grads_result *r, const grads_values *v)
{
    json_t *files = json_array(), *o = ari_json_begin("grads");
    for (int i = 0; i < 2; i++) {
        if (r->file[i][0])
            json_array_append_new(files, json_string(r->file[i]));
    }
    json_object_set_new(o, "result", json_string("same"));
    json_object_set_new(o, "numerics", json_string("exact"));
    json_object_set_new(o, "layout", json_pack("{s:i, s:i}", "world", v->tp, "tp", v->tp));
    json_object_set_new(o, "outputs_hash", json_string(r->outputs_hash));
    json_object_set_new(o, "tensors", json_integer((json_int_t)r->tensors));
    json_object_set_new(o, "seconds", ari_json_number(r->seconds));
    if (v->model)
        json_object_set_new(o, "loss", json_pack("[o]", ari_json_number((double)r->loss)));
    if (json_object_set_new(o, "files", files) != 0) {
        json_decref(o);
        return NULL;
    }
    return o;
}

static ar_status run(const grads_values *v)
{
    ar_grads_result r;
    AR_TRY(check_values(v));
    const ar_grads_options o = {.model = v->model,
                                .block = v->block,
                                .input = v->input,
                                .out = v->out,
                                .tp = v->tp,
                                .seed = v->common.seed,
                                .mlp_order = (ar_mlp_order)v->mlp_order,
                                .algorithm = v->algorithm == 1 ? AR_SIM_RING : AR_SIM_DIRECT,
                                .threads = v->common.threads,
                                .timeout_ns = (uint64_t)(v->timeout * 1e9)};
    AR_TRY(ar_grads(&r, &o));
    if (ari_wants_text(&v->common)) {
        for (int i = 0; i < 2; i++) {
            if (r.file[i][0])
                printf("%s\n", r.file[i]);
        }
        if (v->model)
            printf("loss %.9g\n", (double)r.loss);
        printf("%zu tensors in %s at tp=%d; hash %s\n", r.tensors, ARI_SECONDS(r.seconds), v->tp, r.outputs_hash);
    }
    return ari_json_end(as_json(&r, v), &v->common);
}

int ari_command_grads(int argc, char **argv)
{
    grads_values v = {.tp = 1, .timeout = 60.0};
    int exit_code = ARI_EXIT_SAME;
    if (!ari_args_begin(&spec, argc, argv, &v, &exit_code))
        return exit_code;
    const ar_status st = run(&v);
    if (st != AR_OK)
        ari_print_error("grads", st);
    return ari_exit_code(st);
}
