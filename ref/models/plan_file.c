/* SPDX-License-Identifier: Apache-2.0 */
/* Plans from JSON files: rules as in planner.md, and Hugging Face's tp_plan; and back to rules. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/layers/layers_private.h"
#include "ref/models/plan.h"
#include "ref/placement/placement_private.h"

typedef struct reader {
    ar_plan *p;
    const char *file;
    const json_t *aliases; /* NULL: none */
    json_t *unused;        /* the rules that no other rule has referred to */
    char location[2 * ARI_PRINTABLE];
} reader;

static ar_status invalid(const reader *r, const char *format, ...) AR_PRINTF(2, 3);
static ar_status invalid(const reader *r, const char *format, ...)
{
    char problem[512];
    va_list args;
    va_start(args, format);
    vsnprintf(problem, sizeof problem, format, args);
    va_end(args);
    return ar_error_set(AR_ERR_FORMAT, "%s: %s%s", ARI_SHOW(r->file), r->location, problem);
}

static void at_rule(reader *r, const char *glob)
{
    snprintf(r->location, sizeof r->location, "rule %zu, '%s': ", r->p->rules + 1, ARI_SHOW(glob));
}

static ar_status known_keys(const reader *r, const json_t *object, const char *const *allowed_keys, size_t n,
                            const char *list)
{
    const char *key = ari_json_unknown_key(object, allowed_keys, n);
    return key ? invalid(r, "unknown key '%s'; known are %s", ARI_SHOW(key), list) : AR_OK;
}

/* --- values ------------------------------------------------------------------------------------------------------- */

static ar_status read_placement(const reader *r, ar_placement *p, const char *key, const json_t *text)
{
    char why[256];
    if (!json_is_string(text))
        return invalid(r, "'%s' has to be a placement, as \"R\" or \"S(1)\"", key);
    ar_status st = ari_placement_read(p, json_string_value(text));
    if (st == AR_OK)
        st = ari_placement_check(*p, 3); /* for activations [b, s, features] */
    if (st == AR_OK)
        return AR_OK;
    snprintf(why, sizeof why, "%s", ar_error_message());
    return invalid(r, "'%s' is no placement of an activation: %s", key, why);
}

/* Reads [from, to]; null: not declared. */
static ar_status read_pair(const reader *r, ar_plan_value *v, const char *key, const json_t *pair)
{
    if (json_is_null(pair))
        return AR_OK;
    if (!json_is_array(pair) || json_array_size(pair) != 2)
        return invalid(r, "'%s' of prepare says what there is and what is wanted, as [\"S(1)\", \"R\"]", key);
    v->is_declared = true;
    AR_TRY(read_placement(r, &v->src, key, json_array_get(pair, 0)));
    return read_placement(r, &v->dst, key, json_array_get(pair, 1));
}

/* A list of pairs by position, then those by keyword. */
static ar_status read_arguments(const reader *r, ar_plan_rule *rule, const json_t *list, const json_t *named)
{
    size_t n = json_array_size(list);
    const char *name;
    json_t *pair;
    if (list && !json_is_array(list))
        return invalid(r, "'input' of prepare is a list with one element for each argument by position");
    if (named && !json_is_object(named))
        return invalid(r, "'named_input' is an object from names of arguments to [from, to]");
    if (n + json_object_size(named) > AR_PLAN_ARGUMENTS)
        return invalid(r, "%zu arguments; %d are possible", n + json_object_size(named), AR_PLAN_ARGUMENTS);
    for (size_t i = 0; i < n; i++)
        AR_TRY(read_pair(r, &rule->input[i], "input", json_array_get(list, i)));
    json_object_foreach((json_t *)(uintptr_t)named, name, pair)
    {
        ar_plan_value *v = &rule->input[n++];
        if (name[0] == '\0' || strlen(name) >= sizeof v->name)
            return invalid(r, "the argument '%s' has a name of 1 to %zu bytes", ARI_SHOW(name), sizeof v->name - 1);
        memcpy(v->name, name, strlen(name) + 1);
        AR_TRY(read_pair(r, v, "named_input", pair));
    }
    return AR_OK;
}

static ar_status read_values(const reader *r, ar_plan_rule *rule, const json_t *o)
{
    const json_t *input = json_object_get(o, "input"), *named = json_object_get(o, "named_input"),
                 *out = json_object_get(o, "output"), *local = json_object_get(o, "use_local_output");
    if (local && !json_is_boolean(local))
        return invalid(r, "'use_local_output' has to be true or false");
    rule->global_output = json_is_false(local);
    if (rule->style == AR_STYLE_PREPARE) {
        AR_TRY(read_arguments(r, rule, input, named));
        return out ? read_pair(r, &rule->output, "output", out) : AR_OK;
    }
    if (named)
        return invalid(r, "'named_input' is for prepare; a %s module has one input", ari_style_name(rule->style));
    rule->input[0].is_declared = input != NULL;
    rule->output.is_declared = out != NULL;
    if (input)
        AR_TRY(read_placement(r, &rule->input[0].src, "input", input));
    return out ? read_placement(r, &rule->output.dst, "output", out) : AR_OK;
}

/* --- names -------------------------------------------------------------------------------------------------------- */

/* Reads the glob for an alias, or for an alias of an alias. */
static ar_status read_glob(const reader *r, char glob[AR_PLAN_GLOB], const char *text)
{
    const char *name = text;
    size_t remaining = json_object_size(r->aliases);
    for (const json_t *target; (target = json_object_get(r->aliases, name)) != NULL; name = json_string_value(target)) {
        if (!json_is_string(target))
            return invalid(r, "the alias '%s' has to be a string", ARI_SHOW(name));
        json_object_del(r->unused, name);
        if (remaining-- == 0)
            return invalid(r, "the aliases lead from '%s' back to '%s'; one of them has to be a glob", ARI_SHOW(text),
                           ARI_SHOW(name));
    }
    if (name[0] == '\0' || strlen(name) >= AR_PLAN_GLOB)
        return invalid(r, "a glob has 1 to %d bytes, this one %zu", AR_PLAN_GLOB - 1, strlen(name));
    memcpy(glob, name, strlen(name) + 1);
    return AR_OK;
}

static bool equal_value(const ar_plan_value *a, const ar_plan_value *b)
{
    return a->is_declared == b->is_declared && strcmp(a->name, b->name) == 0 && ari_placement_same(a->src, b->src, 3) &&
           ari_placement_same(a->dst, b->dst, 3);
}

static bool equal_rule(const ar_plan_rule *a, const ar_plan_rule *b)
{
    bool equal = a->style == b->style && a->global_output == b->global_output && equal_value(&a->output, &b->output);
    for (int i = 0; equal && i < AR_PLAN_ARGUMENTS; i++)
        equal = equal_value(&a->input[i], &b->input[i]);
    return equal;
}

/* The later of two globs decides, but the same glob twice with two meanings is a contradiction. */
static ar_status add_rule(const reader *r, const ar_plan_rule *rule)
{
    const bool prepares = rule->style == AR_STYLE_PREPARE;
    if (r->p->rules == AR_PLAN_RULES)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: more than %d rules, the most of a plan; use globs", ARI_SHOW(r->file),
                            AR_PLAN_RULES);
    for (size_t i = 0; i < r->p->rules; i++) {
        const ar_plan_rule *before = &r->p->rule[i];
        if ((before->style == AR_STYLE_PREPARE) != prepares || strcmp(before->glob, rule->glob) != 0)
            continue;
        if (!equal_rule(before, rule))
            return invalid(r, "rule %zu has the same glob and says %s, this one %s%s; keep one", i + 1,
                           ari_style_name(before->style), ari_style_name(rule->style),
                           before->style == rule->style ? " with other inputs or outputs" : "");
    }
    return ari_plan_put(r->p, rule);
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

static ar_status read_style(const reader *r, ar_style *style, const json_t *name)
{
    for (int s = 0; json_is_string(name) && s < AR_STYLES; s++) {
        *style = (ar_style)s;
        if (strcmp(ari_style_name(*style), json_string_value(name)) == 0)
            return AR_OK;
    }
    return invalid(r, "'style' is %s; it has to be replicate, colwise, rowwise, vocab, hidden, sequence or prepare",
                   json_is_string(name) ? ARI_SHOW(json_string_value(name))
                   : name               ? "no string"
                                        : "missing");
}

static ar_status read_rule(reader *r, const json_t *o)
{
    static const char *const keys[] = {"modules", "style", "input", "output", "named_input", "use_local_output"};
    ar_plan_rule rule = {.style = AR_STYLE_REPLICATE};
    const char *modules = json_string_value(json_object_get(o, "modules"));
    at_rule(r, modules ? modules : "?");
    if (!json_is_object(o))
        return invalid(r, "has to be an object");
    if (!modules)
        return invalid(r, "'modules' has to be the glob of names that the rule is for");
    AR_TRY(known_keys(r, o, keys, sizeof keys / sizeof *keys,
                      "modules, style, input, output, named_input and use_local_output"));
    AR_TRY(read_glob(r, rule.glob, modules));
    AR_TRY(read_style(r, &rule.style, json_object_get(o, "style")));
    AR_TRY(read_values(r, &rule, o));
    return add_rule(r, &rule);
}

static ar_status read_rules(reader *r, const json_t *o)
{
    static const char *const keys[] = {"rules", "aliases", "note"};
    const json_t *rules = json_object_get(o, "rules");
    AR_TRY(known_keys(r, o, keys, sizeof keys / sizeof *keys, "rules, aliases and note"));
    r->aliases = json_object_get(o, "aliases");
    if (r->aliases && !json_is_object(r->aliases))
        return invalid(r, "'aliases' has to be an object from names to globs");
    if (!json_is_array(rules))
        return invalid(r, "'rules' has to be an array");
    if (r->aliases && !(r->unused = json_copy((json_t *)(uintptr_t)r->aliases)))
        return ar_error_set(AR_ERR_MEMORY, "%s: out of memory", ARI_SHOW(r->file));
    for (size_t i = 0; i < json_array_size(rules); i++)
        AR_TRY(read_rule(r, json_array_get(rules, i)));
    r->location[0] = '\0';
    const char *unused = json_object_iter_key(json_object_iter(r->unused));
    return unused ? invalid(r, "no rule has the alias '%s'", ARI_SHOW(unused)) : AR_OK;
}

/* --- Hugging Face's tp_plan --------------------------------------------------------------------------------------- */

/* Names of transformers 4.5x and 5 (transformers/integrations/tensor_parallel.py, transformers/distributed), with their
 * declarations; NULL if these are the style's own. A local layer works on plain tensors: if rowwise, it leaves its
 * partial sums to the enclosing module, which has to "gather" (sum) them, as experts of sharded width do. */
static const struct tp_style {
    const char *name;
    ar_style style;
    const char *input, *output;
} tp_styles[] = {
    {"colwise", AR_STYLE_COLWISE, NULL, NULL},
    {"rowwise", AR_STYLE_ROWWISE, NULL, NULL},
    {"colwise_rep", AR_STYLE_COLWISE, NULL, "R"},
    {"colwise_gather_output", AR_STYLE_COLWISE, NULL, "R"},
    {"rowwise_rep", AR_STYLE_ROWWISE, "R", NULL},
    {"rowwise_split_input", AR_STYLE_ROWWISE, "R", NULL},
    {"local_colwise", AR_STYLE_COLWISE, NULL, "S(-1)"},
    {"local_rowwise", AR_STYLE_ROWWISE, NULL, "P(sum)"},
    {"packed_colwise", AR_STYLE_COLWISE, NULL, NULL},
    {"embedding_rowwise", AR_STYLE_VOCAB, NULL, NULL},
    {"embedding_colwise", AR_STYLE_HIDDEN, NULL, NULL},
    {"sequence_parallel", AR_STYLE_SEQUENCE, NULL, NULL},
    {"replicate", AR_STYLE_REPLICATE, NULL, NULL},
    {"replicated_with_grad_allreduce", AR_STYLE_REPLICATE, NULL, NULL},
    {"mla_kv_a_proj", AR_STYLE_REPLICATE, NULL, NULL}, /* reduces the rotary key's gradient, as the layer does here */
    {"gather", AR_STYLE_PREPARE, NULL, "R"},
    {"all_reduce", AR_STYLE_PREPARE, NULL, "R"},
    {"moe_tp_experts", AR_STYLE_PREPARE, NULL, "R"},
};

/* Styles of other libraries' plans and their meaning here. */
static const struct other_style {
    const char *name, *requirement;
} other_styles[] = {
    {"grouped_gemm", "shares whole experts out over ranks: a layout's ep does, no plan"},
    {"ep_router", "shares whole experts out over ranks: a layout's ep does, no plan"},
    {"ep_dispatch_experts", "shares whole experts out over ranks: a layout's ep does, no plan"},
    {"moe_identity_expert", "is for experts that give back their input, which are not computed"},
    {"packed_rowwise", "is for a layer whose input is packed, of which there is none"},
    {"local_packed_rowwise", "is for a layer whose input is packed, of which there is none"},
    {"local", "is for a module that works with its parts of parameters by itself"},
    {"local_params", "is for a module that works with its parts of parameters by itself"},
};

static ar_status refuse_style(const reader *r, const char *name, const char *known_styles)
{
    for (size_t i = 0; i < sizeof other_styles / sizeof *other_styles; i++) {
        if (strcmp(other_styles[i].name, name) == 0)
            return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %sthe style '%s' %s; known are %s", ARI_SHOW(r->file),
                                r->location, name, other_styles[i].requirement, known_styles);
    }
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %sthe style '%s' of a tp_plan is not in this version; known are %s",
                        ARI_SHOW(r->file), r->location, ARI_SHOW(name), known_styles);
}

static ar_status declare(ar_plan_value *v, const char *text)
{
    v->is_declared = text != NULL;
    AR_TRY(text ? ari_placement_read(&v->dst, text) : AR_OK);
    v->src = v->dst;
    return AR_OK;
}

static ar_status read_tp_rule(reader *r, const char *modules, const char *name)
{
    ar_plan_rule rule = {.style = AR_STYLE_REPLICATE};
    char known_styles[400];
    ari_text list = ari_text_in(known_styles, sizeof known_styles);
    at_rule(r, modules);
    AR_TRY(read_glob(r, rule.glob, modules));
    for (size_t i = 0; i < sizeof tp_styles / sizeof *tp_styles; i++) {
        const struct tp_style *s = &tp_styles[i];
        ari_say(&list, "%s%s", i > 0 ? ", " : "", s->name);
        if (strcmp(s->name, name) != 0)
            continue;
        rule.style = s->style;
        AR_TRY(declare(&rule.input[0], s->input));
        AR_TRY(declare(&rule.output, s->output));
        if (s->style == AR_STYLE_PREPARE)
            rule.output.src = (ar_placement){AR_PARTIAL_SUM, 0};
        return add_rule(r, &rule);
    }
    return refuse_style(r, name, known_styles);
}

static ar_status read_tp_plan(reader *r, const json_t *o)
{
    const char *glob;
    json_t *style;
    json_object_foreach((json_t *)(uintptr_t)o, glob, style)
    {
        at_rule(r, glob);
        if (!json_is_string(style))
            return invalid(r, "has to be the name of a style: this object has no 'rules', so it is a tp_plan");
        AR_TRY(read_tp_rule(r, glob, json_string_value(style)));
    }
    return AR_OK;
}

/* --- files -------------------------------------------------------------------------------------------------------- */

static void reader_fini(reader *r)
{
    json_decref(r->unused);
}

static ar_status read_plan(ar_plan *out, const json_t *o, const char *file)
{
    ARI_ENDED(ar_plan_fini) ar_plan p = {0};
    ARI_ENDED(reader_fini) reader r = {.p = &p, .file = file};
    const json_t *tp = json_object_get(o, "tp_plan");
    AR_TRY(ar_plan_empty(&p, file));
    if (!json_is_object(o))
        return invalid(&r, "a plan is an object with 'rules', or a tp_plan from globs to styles");
    if (json_is_object(tp) && !json_object_get(o, "rules"))
        AR_TRY(known_keys(&r, o, (const char *const[]){"tp_plan", "note"}, 2, "tp_plan and note"));
    if (json_object_get(o, "rules"))
        AR_TRY(read_rules(&r, o));
    else
        AR_TRY(read_tp_plan(&r, json_is_object(tp) ? tp : o));
    if (p.rules == 0)
        return invalid(&r, "has no rules; without a plan a model is split as its architecture's default");
    *out = p;
    p = (ar_plan){0};
    return AR_OK;
}

ar_status ar_plan_parse(ar_plan *p, const char *text, size_t length, const char *name)
{
    json_auto_t *o = NULL;
    AR_TRY(ari_json_parse(&o, text, length, name));
    return read_plan(p, o, name);
}

ar_status ar_plan_load(ar_plan *p, const char *path)
{
    json_auto_t *o = NULL;
    AR_TRY(ari_json_load(&o, path));
    return read_plan(p, o, path);
}

/* --- back into JSON ----------------------------------------------------------------------------------------------- */

static json_t *placement_json(ar_placement p)
{
    char text[AR_PLACEMENT_TEXT];
    return json_string(ari_placement_name(text, p));
}

static json_t *pair_json(const ar_plan_value *v)
{
    return v->is_declared ? json_pack("[o, o]", placement_json(v->src), placement_json(v->dst)) : json_null();
}

/* Writes the arguments of prepare: a list of positional inputs if there are any, and an object of keyword inputs. */
static int put_arguments(json_t *o, const ar_plan_rule *rule)
{
    json_t *list = json_array(), *named = json_object();
    size_t n = 0; /* number of positional inputs: up to the first keyword, otherwise up to the last given input */
    int failed = 0;
    for (size_t i = 0; i < AR_PLAN_ARGUMENTS && !rule->input[i].name[0]; i++) {
        const bool before_keyword = i + 1 < AR_PLAN_ARGUMENTS && rule->input[i + 1].name[0];
        n = rule->input[i].is_declared || before_keyword ? i + 1 : n;
    }
    for (size_t i = 0; i < AR_PLAN_ARGUMENTS; i++) {
        const ar_plan_value *v = &rule->input[i];
        if (i < n)
            failed |= json_array_append_new(list, pair_json(v));
        else if (v->name[0])
            failed |= json_object_set_new(named, v->name, pair_json(v));
    }
    if (json_array_size(list) > 0)
        failed |= json_object_set(o, "input", list);
    if (json_object_size(named) > 0)
        failed |= json_object_set(o, "named_input", named);
    failed |= !list || !named;
    json_decref(list);
    json_decref(named);
    return failed;
}

static json_t *rule_json(const ar_plan_rule *rule)
{
    const bool prepares = rule->style == AR_STYLE_PREPARE;
    json_t *o = json_pack("{s:o, s:s}", "modules", ari_json_text(rule->glob), "style", ari_style_name(rule->style));
    int failed = !o;
    if (prepares)
        failed |= put_arguments(o, rule);
    else if (rule->input[0].is_declared)
        failed |= json_object_set_new(o, "input", placement_json(rule->input[0].src));
    if (rule->output.is_declared)
        failed |=
            json_object_set_new(o, "output", prepares ? pair_json(&rule->output) : placement_json(rule->output.dst));
    if (rule->global_output)
        failed |= json_object_set_new(o, "use_local_output", json_false());
    if (!failed)
        return o;
    json_decref(o);
    return NULL;
}

ar_status ari_plan_rules_json(json_t **out, const ar_plan *p)
{
    json_auto_t *rules = json_array();
    int failed = !rules;
    for (size_t i = 0; i < p->rules && !failed; i++)
        failed = json_array_append_new(rules, rule_json(&p->rule[i]));
    if (failed)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its rules as JSON", ARI_SHOW(ari_plan_file(p)));
    ARI_GIVE(out, rules);
    return AR_OK;
}

ar_status ari_plan_hash(char hex[65], const ar_plan *p)
{
    json_t *rules = NULL;
    AR_TRY(ari_plan_rules_json(&rules, p));
    ARI_OWNED char *text = json_dumps(rules, JSON_COMPACT);
    json_decref(rules);
    if (!text)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its hash", ARI_SHOW(ari_plan_file(p)));
    ari_sha256_of(hex, text, strlen(text));
    return AR_OK;
}
