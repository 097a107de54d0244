/* SPDX-License-Identifier: Apache-2.0 */
#include "support/plan_draw.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Globs of an architecture's parts; those of a block stand behind its number. NULL: it has none. */
typedef struct branch_names {
    const char *module, *norm, *first, *last;
} branch_names;
typedef struct part_names {
    const char *tokens, *blocks, *final_norm, *head;
    branch_names attention, mlp;
} part_names;

static const part_names names_of[] = {
    [AR_ARCH_LLAMA] = {"embed_tokens",
                       "model.layers",
                       "model.norm",
                       "lm_head",
                       {"self_attn", "input_layernorm", "self_attn.[qkv]_proj", "self_attn.o_proj"},
                       {"mlp", "post_attention_layernorm", "mlp.[gu]*_proj", "mlp.down_proj"}},
    [AR_ARCH_QWEN3] = {"embed_tokens",
                       "model.layers",
                       "model.norm",
                       "lm_head",
                       {"self_attn", "input_layernorm", "self_attn.[qkv]_proj", "self_attn.o_proj"},
                       {"mlp", "post_attention_layernorm", "mlp.[gu]*_proj", "mlp.down_proj"}},
    [AR_ARCH_GPT2] = {"wte",
                      "transformer.h",
                      "ln_f",
                      "lm_head",
                      {"attn", "ln_1", "attn.c_attn", "attn.c_proj"},
                      {"mlp", "ln_2", "mlp.c_fc", "mlp.c_proj"}},
    [AR_ARCH_PHI3] = {"embed_tokens",
                      "model.layers",
                      "model.norm",
                      "lm_head",
                      {"self_attn", "input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj"},
                      {"mlp", "post_attention_layernorm", "mlp.gate_up_proj", "mlp.down_proj"}},
    [AR_ARCH_STARCODER2] = {"embed_tokens",
                            "model.layers",
                            "model.norm",
                            "lm_head",
                            {"self_attn", "input_layernorm", "self_attn.[qkv]_proj", "self_attn.o_proj"},
                            {"mlp", "post_attention_layernorm", "mlp.c_fc", "mlp.c_proj"}},
    [AR_ARCH_STACK] = {
        "embed", "layers", NULL, NULL, {"attn", "ln1", "attn.w[qkv]", "attn.wo"}, {"mlp", "ln2", "mlp.w1", "mlp.w2"}}};

static const char whole[] = "R", features[] = "S(-1)", tokens[] = "S(1)", terms[] = "P(sum)";
static const char colwise[] = "colwise", rowwise[] = "rowwise", replicate[] = "replicate";
static const char *const styles[] = {colwise, rowwise, replicate};

/* What can be wrong in a branch. Each declares a value of the right shape that is not there. */
typedef enum flaw {
    LAST_LEAVES_TERMS,  /* the last layer's, and nothing adds them up */
    TERMS_PREPARED,     /* nor does the module, which says that they are the whole */
    FIRST_LEAVES_TERMS, /* the first layers' */
    INPUT_SUMMED,       /* what is whole is added up: the input, */
    MIDDLE_SUMMED,      /* what is between the layers, */
    INPUT_PREPARED,     /* the input by the module, */
    OUTPUT_PREPARED,    /* its output */
    FLAWS,
    NO_FLAW = FLAWS
} flaw;

typedef struct draw {
    char *text;
    uint64_t *seed;
    const part_names *names;
    plan_draw_options o;
    const char *stream; /* between the branches */
    bool some_norms;    /* are in sequence style, the others replicated */
    size_t layer;
} draw;

unsigned plan_draw_below(uint64_t *seed, unsigned n)
{
    uint64_t z = *seed += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (unsigned)((z ^ (z >> 31)) % n);
}

static unsigned pick(draw *d, unsigned n)
{
    return plan_draw_below(d->seed, n);
}

static const char *one_of(draw *d, const char *const *all, unsigned n)
{
    return all[pick(d, n)];
}

static void add(draw *d, const char *format, ...)
{
    const size_t used = strlen(d->text);
    va_list args;
    va_start(args, format);
    vsnprintf(d->text + used, PLAN_DRAW_TEXT - used, format, args);
    va_end(args);
}

static void begin_rule(draw *d, bool in_block, const char *part, const char *style)
{
    add(d, "%s{\"modules\": \"", d->text[strlen(d->text) - 1] == '[' ? "" : ", ");
    if (in_block)
        add(d, "%s.%zu.", d->names->blocks, d->layer);
    add(d, "%s\", \"style\": \"%s\"", part, style);
}

/* Of a layer; NULL: not declared. */
static void rule(draw *d, bool in_block, const char *part, const char *style, const char *input, const char *output)
{
    begin_rule(d, in_block, part, style);
    if (input)
        add(d, ", \"input\": \"%s\"", input);
    if (output)
        add(d, ", \"output\": \"%s\"", output);
    add(d, "}");
}

/* A norm's style, in sequence at least the first; returns what it leaves. */
static const char *norm(draw *d, bool in_block, const char *part)
{
    if (!d->some_norms || !part)
        return d->stream;
    const bool sequence = pick(d, 2) || (in_block && d->layer == 0 && part == d->names->attention.norm);
    rule(d, in_block, part, sequence ? "sequence" : "replicate", NULL, NULL);
    return sequence ? d->stream : whole;
}

/* A declaration that says what would be so without it. */
static const char *maybe(draw *d, const char *p)
{
    return pick(d, 3) == 0 ? p : NULL;
}

/* What its rules say. NULL: nothing. */
typedef struct branch {
    const char *first, *last;                  /* styles */
    const char *in, *out, *last_in, *last_out; /* of the layers */
    const char *enter[2], *leave[2];           /* of the module */
} branch;

static const char *left_by(const char *style)
{
    return style == colwise ? features : whole;
}

/* A module that makes of its input, or of what its last layer has left, something else first. */
static void prepare(draw *d, branch *b, const char *arrives)
{
    const char *const inputs[] = {whole, features}, *const left[] = {whole, features, terms};
    if (pick(d, 4) == 0) {
        b->enter[0] = arrives;
        b->enter[1] = one_of(d, inputs, 2);
        b->in = maybe(d, b->enter[1]);
    }
    if (pick(d, 4) == 0) {
        b->leave[0] = b->last_out = one_of(d, left, b->last == rowwise ? 3 : 2);
        b->leave[1] = d->stream;
    }
}

static branch draw_branch(draw *d, bool attention, const char *arrives)
{
    const char *const middles[] = {whole, features, tokens};
    branch b = {.first = one_of(d, styles, 3), .last = one_of(d, styles, 3), .in = maybe(d, arrives)};
    const char *middle = one_of(d, middles, d->o.sp && !attention ? 3 : 2);
    if (pick(d, 2)) { /* most plans have the pair that needs nothing between */
        b.first = colwise;
        b.last = rowwise;
        middle = features;
    }
    b.out = middle == left_by(b.first) ? maybe(d, middle) : middle;
    b.last_in = middle == (b.last == rowwise ? features : whole) ? maybe(d, middle) : middle;
    b.last_out = maybe(d, d->stream);
    prepare(d, &b, arrives);
    return b;
}

/* Whether the flaw can be there; then it is. */
static bool spoil(draw *d, branch *b, flaw f, const char *arrives)
{
    const bool needs_whole_stream = f == LAST_LEAVES_TERMS || f == TERMS_PREPARED;
    const bool needs_whole_input = f == INPUT_SUMMED || f == INPUT_PREPARED;
    if ((needs_whole_stream && d->stream != whole) || (needs_whole_input && arrives != whole))
        return false;
    if (f == LAST_LEAVES_TERMS || f == TERMS_PREPARED) {
        const char *middle = b->out ? b->out : left_by(b->first);
        b->last_in = middle == features ? NULL : middle;
        b->last = rowwise;
        b->last_out = terms;
        b->leave[0] = b->leave[1] = f == TERMS_PREPARED ? whole : NULL;
    } else if (f == FIRST_LEAVES_TERMS) {
        b->first = rowwise;
        b->out = terms;
        b->last_in = whole;
    } else if (f == INPUT_SUMMED) {
        b->in = terms;
        b->enter[0] = NULL;
    } else if (f == MIDDLE_SUMMED) {
        b->out = whole;
        b->last_in = terms;
    } else if (f == INPUT_PREPARED) {
        b->enter[0] = terms;
        b->enter[1] = whole;
        b->in = NULL;
    } else {
        b->last_out = whole;
        b->leave[0] = terms;
        b->leave[1] = d->stream;
    }
    return true;
}

static void write_branch(draw *d, const branch_names *n, const branch *b)
{
    rule(d, true, n->first, b->first, b->in, b->out);
    rule(d, true, n->last, b->last, b->last_in, b->last_out);
    if (!b->enter[0] && !b->leave[0])
        return;
    begin_rule(d, true, n->module, "prepare");
    if (b->enter[0])
        add(d, ", \"input\": [[\"%s\", \"%s\"], null]", b->enter[0], b->enter[1]);
    if (b->leave[0])
        add(d, ", \"output\": [\"%s\", \"%s\"]", b->leave[0], b->leave[1]);
    add(d, "}");
}

static void add_branch(draw *d, const branch_names *n, bool attention, bool wrong)
{
    const char *arrives = norm(d, true, n->norm);
    branch b = draw_branch(d, attention, arrives);
    while (wrong && !spoil(d, &b, (flaw)pick(d, FLAWS), arrives))
        continue;
    write_branch(d, n, &b);
}

static void add_head(draw *d, const char *style, const char *arrives, bool wrong)
{
    const char *in = maybe(d, arrives);
    const char *out = pick(d, 2) ? NULL : style == colwise ? whole : features;
    if (wrong && style == rowwise)
        out = terms;
    else if (wrong)
        in = terms;
    rule(d, false, d->names->head, style, in, out);
}

bool plan_draw_knows(const ar_config *c)
{
    return (size_t)c->arch < sizeof names_of / sizeof *names_of && names_of[c->arch].blocks && c->experts.n == 0;
}

void plan_draw(char text[PLAN_DRAW_TEXT], uint64_t *seed, const ar_config *c, plan_draw_options o)
{
    static const char *const tables[] = {"replicate", "vocab", "hidden"}, *const heads[] = {replicate, colwise,
                                                                                            rowwise};
    draw d = {.text = text, .seed = seed, .names = &names_of[c->arch], .o = o, .stream = o.sp ? tokens : whole};
    const unsigned table = pick(&d, 3), head = c->tied ? table : pick(&d, 3);
    const unsigned places = 2 * (unsigned)c->layers + (d.names->head != NULL);
    unsigned wrong = o.wrong ? pick(&d, places) : places; /* the branch, or the head, that is */
    snprintf(text, PLAN_DRAW_TEXT, "{\"rules\": [");
    rule(&d, false, d.names->tokens, tables[table], NULL, NULL);
    d.some_norms = o.sp && pick(&d, 3) > 0;
    const char *arrives = norm(&d, false, d.names->final_norm);
    if (d.names->head && wrong == places - 1 && heads[head] != rowwise && arrives != whole)
        wrong = 0;
    if (d.names->head)
        add_head(&d, heads[head], arrives, wrong == places - 1);
    for (d.layer = 0; d.layer < c->layers; d.layer++) {
        add_branch(&d, &d.names->attention, true, wrong == 2 * d.layer);
        add_branch(&d, &d.names->mlp, false, wrong == 2 * d.layer + 1);
    }
    add(&d, "]}");
}
