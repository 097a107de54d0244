/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_VERIFY_REPORT_H
#define ARI_CLI_VERIFY_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "anyrank/verify.h"

/** Everything but the last line: nothing where nothing differs and nothing is odd. `most`: rows of a table. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_print(FILE *to, const ar_verify_report *r, size_t most);
/** The last line: the key fact. */
void ari_verify_print_verdict(FILE *to, const ar_verify_report *r);
/** The result for machines. Gives; NULL without memory. */
json_t *ari_verify_json(const ar_verify_report *r);

/* How a comparison's figures are spelled. Each writes into out[0 .. ARI_VERIFY_TEXT) and gives it back. */
enum { ARI_VERIFY_TEXT = 21 * AR_ST_MAX_DIMS + 3 };
const char *ari_verify_shape_text(char *out, int ndim, const size_t *shape);
/** The place of an element, row-major, in the row's tensor. */
const char *ari_verify_index_text(char *out, const ar_verify_row *r, size_t element);
/** As many digits as tell two values of the dtype apart. */
const char *ari_verify_value_text(char *out, ar_dtype t, double x);
/** The largest difference: of numbers, unless only one of the two is one. */
const char *ari_verify_size_text(char *out, const ar_verify_row *r);
/** "-" where one of the two is all zero. */
const char *ari_verify_cosine_text(char *out, const ar_verify_row *r, int digits);
/** "within 3 ulp". */
const char *ari_verify_rule_text(char *out, const ar_verify_report *r);

/* The same as expressions, in storage that lives to the end of the enclosing block. */
#define ARI_SHAPE(ndim, shape) ari_verify_shape_text((char[ARI_VERIFY_TEXT]){0}, (ndim), (shape))
#define ARI_INDEX(r, element) ari_verify_index_text((char[ARI_VERIFY_TEXT]){0}, (r), (element))
#define ARI_VALUE(t, x) ari_verify_value_text((char[ARI_VERIFY_TEXT]){0}, (t), (x))
#define ARI_SIZE(r) ari_verify_size_text((char[ARI_VERIFY_TEXT]){0}, (r))
#define ARI_COSINE(r, digits) ari_verify_cosine_text((char[ARI_VERIFY_TEXT]){0}, (r), (digits))
#define ARI_RULE(r) ari_verify_rule_text((char[ARI_VERIFY_TEXT]){0}, (r))

static inline const char *ari_plural(size_t n)
{
    return n == 1 ? "" : "s";
}

/** How many tensors have copies that differ. */
static inline size_t ari_verify_copies(const ar_verify_report *r)
{
    size_t n = 0;
    for (size_t i = 0; i < r->rows; i++)
        n += r->row[i].copies_differ;
    return n;
}

/** Whether differences are measured by what is allowed. */
static inline bool ari_has_ratio(const ar_verify_report *r)
{
    return r->rule != AR_VERIFY_BITS;
}

#endif
