/* SPDX-License-Identifier: Apache-2.0 */
/* What programs write of log-probabilities, as JSON: a record of one's own, a response of vLLM's server (completions
 * and chat, as OpenAI's with prompt_logprobs, token_ids and prompt_token_ids beside), one of SGLang's /generate. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/json.h"
#include "verify/logprobs/logprobs.h"

/* Where a value comes from, for messages. */
typedef struct source {
    const char *where;
    bool given;
} source;

static ar_status refuse(const source *from, const char *what)
{
    return ar_error_set(AR_ERR_FORMAT, "%s: %s", from->where, what);
}

/* The first array under one of the names; *name is the one it has. */
static const json_t *find_array(const json_t *object, const char *const *names, const char **name)
{
    for (size_t i = 0; names[i]; i++) {
        const json_t *value = json_object_get(object, names[i]);
        if (json_is_array(value)) {
            *name = names[i];
            return value;
        }
    }
    *name = names[0];
    return NULL;
}

static ar_status read_tokens(int64_t *out, const json_t *list, const char *name, const source *from)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *value = json_array_get(list, i);
        if (!json_is_integer(value))
            return ar_error_set(AR_ERR_FORMAT, "%s: %s[%zu] is no integer", from->where, name, i);
        out[i] = json_integer_value(value);
    }
    return AR_OK;
}

/* A log-probability, or NaN for null. */
static ar_status read_number(double *out, const json_t *value, const char *name, size_t i, const source *from)
{
    *out = (double)NAN;
    if (json_is_null(value))
        return AR_OK;
    const bool low = json_is_string(value) && strcmp(json_string_value(value), "-Infinity") == 0;
    if (!json_is_number(value) && !low)
        return ar_error_set(AR_ERR_FORMAT, "%s: %s[%zu] is neither a number nor null", from->where, name, i);
    *out = low ? -(double)INFINITY : json_number_value(value);
    return AR_OK;
}

/* --- records of one's own ----------------------------------------------------------------------------------------- */

/* Which tokens m numbers are of: all n, where the first has none; all but the first; or the last m. A null in front
 * is the first token's: with it n - 1 numbers would be those of other tokens. */
static ar_status place_numbers(ari_sequence *q, const json_t *list, const char *name, const source *from)
{
    const size_t m = json_array_size(list);
    if (m > q->n)
        return ar_error_set(AR_ERR_FORMAT, "%s: %s has %zu numbers for %zu tokens", from->where, name, m, q->n);
    if (m + 1 == q->n && json_is_null(json_array_get(list, 0)) && q->prompt == 0)
        return ar_error_set(AR_ERR_FORMAT,
                            "%s: %s begins with null, as of the first token, and has %zu entries for %zu tokens: "
                            "expected an entry for each, or no null in front",
                            from->where, name, m, q->n);
    for (size_t i = 0; i < m; i++)
        AR_TRY(read_number(&q->given[q->n - m + i], json_array_get(list, i), name, i, from));
    if (m == q->n && fabs(q->given[0]) > 0.0) /* 0 is what some write for none */
        return ar_error_set(AR_ERR_FORMAT,
                            "%s: %s has a number for the first token, which nothing predicts: expected null there, or "
                            "%zu numbers for the tokens after it",
                            from->where, name, m - 1);
    if (m == q->n)
        q->given[0] = (double)NAN;
    return AR_OK;
}

static ar_status add_own(ari_sequences *s, const json_t *record, const source *from)
{
    static const char *const
        whole[] = {"tokens", "token_ids", "input_ids", NULL},
        *const prompts[] = {"prompt_ids", "prompt_token_ids", NULL},
        *const responses[] = {"response_ids", "output_ids", "completion_ids", "response_token_ids", NULL},
        *const numbers[] = {"logprobs",      "log_probs", "token_logprobs", "response_logprobs", "rollout_log_probs",
                            "old_log_probs", NULL};
    const char *name, *prompt_name, *number_name;
    const json_t *prompt = find_array(record, prompts, &prompt_name), *tokens = find_array(record, responses, &name);
    const json_t *number = find_array(record, numbers, &number_name);
    ari_sequence *q;
    if (!prompt || !tokens) {
        prompt = NULL;
        tokens = find_array(record, whole, &name);
    }
    if (!tokens)
        return refuse(from, "expected \"tokens\": [..], or \"prompt_ids\" and \"response_ids\"");
    const size_t first = json_array_size(prompt), n = first + json_array_size(tokens);
    if (n == 0)
        return refuse(from, "has no tokens");
    if (from->given && !number)
        return refuse(from, "has no log-probabilities: expected \"logprobs\": [..]");
    AR_TRY(ari_sequences_add(&q, s, n, from->given));
    q->prompt = first;
    if (prompt)
        AR_TRY(read_tokens(q->tokens, prompt, prompt_name, from));
    AR_TRY(read_tokens(q->tokens + first, tokens, name, from));
    return from->given ? place_numbers(q, number, number_name, from) : AR_OK;
}

/* --- vLLM --------------------------------------------------------------------------------------------------------- */

/* "token_id:17", as return_tokens_as_token_ids has them. */
static ar_status read_token_text(int64_t *out, const json_t *value, const source *from)
{
    static const char prefix[] = "token_id:";
    const char *text = json_string_value(value);
    char *end = NULL;
    if (!text || strncmp(text, prefix, sizeof prefix - 1) != 0)
        return refuse(from, "says tokens as text: ask vLLM for return_token_ids, or return_tokens_as_token_ids");
    *out = strtoll(text + sizeof prefix - 1, &end, 10);
    return *end == '\0' && end > text + sizeof prefix - 1 ? AR_OK : refuse(from, "has a token_id that is no number");
}

/* The numbers of a choice's last tokens, with echo of all: a list of numbers (completions), or one of objects (chat). */
static ar_status read_choice(ari_sequence *q, size_t first, const json_t *ids, const json_t *list, bool objects,
                             const json_t *texts, const source *from)
{
    const size_t m = json_array_size(list);
    if (ids)
        AR_TRY(read_tokens(q->tokens + first, ids, "token_ids", from));
    for (size_t i = 0; i < m; i++) {
        const json_t *one = json_array_get(list, i);
        const size_t at = q->n - m + i;
        if (!ids)
            AR_TRY(read_token_text(&q->tokens[at], objects ? json_object_get(one, "token") : json_array_get(texts, i),
                                   from));
        if (q->given && at > 0)
            AR_TRY(read_number(&q->given[at], objects ? json_object_get(one, "logprob") : one, "logprobs", i, from));
    }
    return AR_OK;
}

/* Of each place of the prompt an object by token id, {"17": {"logprob": -1.5, ..}, ..}, or null. */
static ar_status read_prompt(ari_sequence *q, const json_t *list, const source *from)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        char id[24];
        const json_t *one = json_array_get(list, i);
        if (json_is_null(one))
            continue;
        snprintf(id, sizeof id, "%lld", (long long)q->tokens[i]);
        const json_t *found = json_object_get(json_object_get(one, id), "logprob");
        if (!found)
            return ar_error_set(AR_ERR_FORMAT, "%s: prompt_logprobs[%zu] has no entry for the prompt's token %s",
                                from->where, i, id);
        if (i > 0)
            AR_TRY(read_number(&q->given[i], found, "prompt_logprobs", i, from));
    }
    return AR_OK;
}

static const json_t *of_either(const json_t *choice, const json_t *response, const char *key)
{
    const json_t *own = json_object_get(choice, key);
    return json_is_array(own) ? own : json_object_get(response, key);
}

static ar_status add_choice(ari_sequences *s, const json_t *choice, const json_t *response, const source *from)
{
    const json_t *log = json_object_get(choice, "logprobs"), *content = json_object_get(log, "content");
    const json_t *list = json_is_array(content) ? content : json_object_get(log, "token_logprobs");
    const json_t *ids = json_object_get(choice, "token_ids"), *texts = json_object_get(log, "tokens");
    const json_t *prompt = of_either(choice, response, "prompt_token_ids");
    const json_t *before = of_either(choice, response, "prompt_logprobs");
    ari_sequence *q;
    const size_t first = json_array_size(prompt), m = json_array_size(list);
    if (!json_is_array(prompt))
        return refuse(from, "has no prompt_token_ids: ask vLLM for return_token_ids, and for no stream");
    if (from->given && !json_is_array(list) && !json_is_array(before))
        return refuse(from, "has no log-probabilities: ask vLLM for logprobs or prompt_logprobs");
    if (json_is_array(ids) && json_is_array(list) && json_array_size(ids) != m && first + json_array_size(ids) != m)
        return refuse(from, "has another number of token_ids than of logprobs");
    if (json_is_array(before) && json_array_size(before) != json_array_size(prompt))
        return refuse(from, "has another number of prompt_logprobs than of prompt_token_ids");
    const size_t n = first + (json_is_array(ids) ? json_array_size(ids) : m);
    if (n == 0)
        return refuse(from, "has no tokens");
    AR_TRY(ari_sequences_add(&q, s, n, from->given));
    q->prompt = first;
    AR_TRY(read_tokens(q->tokens, prompt, "prompt_token_ids", from));
    AR_TRY(read_choice(q, first, json_is_array(ids) ? ids : NULL, list, json_is_array(content), texts, from));
    return from->given && json_is_array(before) ? read_prompt(q, before, from) : AR_OK;
}

/* --- SGLang ------------------------------------------------------------------------------------------------------- */

/* [[log-probability or null, id, text or null], ..] */
static ar_status read_triples(ari_sequence *q, size_t first, const json_t *list, const source *from)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *one = json_array_get(list, i), *id = json_array_get(one, 1);
        if (!json_is_integer(id))
            return refuse(from, "has a token_logprobs entry that is not [log-probability, id, text]");
        q->tokens[first + i] = json_integer_value(id);
        if (q->given && first + i > 0)
            AR_TRY(read_number(&q->given[first + i], json_array_get(one, 0), "token_logprobs", i, from));
    }
    return AR_OK;
}

static ar_status add_sglang(ari_sequences *s, const json_t *record, const source *from)
{
    const json_t *meta = json_object_get(record, "meta_info");
    const json_t *in = json_object_get(meta, "input_token_logprobs"),
                 *out = json_object_get(meta, "output_token_logprobs");
    const size_t first = json_array_size(in), n = first + json_array_size(out);
    const json_t *all = json_object_get(meta, "prompt_tokens");
    ari_sequence *q;
    if (n == 0)
        return refuse(from, "has no token_logprobs: ask SGLang for return_logprob with logprob_start_len 0");
    if (json_is_integer(all) && (size_t)json_integer_value(all) != first)
        return refuse(from, "has log-probabilities for a part of the prompt alone: ask SGLang for logprob_start_len 0");
    AR_TRY(ari_sequences_add(&q, s, n, from->given));
    q->prompt = first;
    AR_TRY(read_triples(q, 0, in, from));
    return read_triples(q, first, out, from);
}

/* --- any ---------------------------------------------------------------------------------------------------------- */

static ar_status add_record(ari_sequences *s, const json_t *record, const source *from)
{
    static const char *const unread[] = {"labels", "attention_mask", "position_ids", "loss_mask", "response_mask"};
    const json_t *choices = json_object_get(record, "choices");
    if (!json_is_object(record))
        return refuse(from, "expected an object with \"tokens\", or a server's response");
    for (size_t i = 0; i < sizeof unread / sizeof *unread; i++) {
        if (json_object_get(record, unread[i]))
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "%s: '%s' would not be looked at: give the tokens of a sequence without padding, and "
                                "null where there is no log-probability",
                                from->where, unread[i]);
    }
    for (size_t i = 0; i < json_array_size(choices); i++)
        AR_TRY(add_choice(s, json_array_get(choices, i), record, from));
    if (json_is_array(choices))
        return AR_OK;
    return json_is_object(json_object_get(record, "meta_info")) ? add_sglang(s, record, from)
                                                                : add_own(s, record, from);
}

ar_status ari_records_add(ari_sequences *s, const void *json, const char *where, bool given)
{
    const json_t *value = json;
    if (!json_is_array(value))
        return add_record(s, value, &(source){where, given});
    for (size_t i = 0; i < json_array_size(value); i++) {
        char at[440];
        snprintf(at, sizeof at, "%s: entry %zu", where, i);
        AR_TRY(add_record(s, json_array_get(value, i), &(source){at, given}));
    }
    return AR_OK;
}
