/* SPDX-License-Identifier: Apache-2.0 */
/* Prints whether a difference is one that rounding explains. */
#include <math.h>

#include "cli/shared/table.h"
#include "cli/verify/report.h"
#include "ref/core/text.h"

enum { DIGITS = 24 };

static const char *percentile_text(char *out, const ari_normal_row *r)
{
    snprintf(out, DIGITS, isnan(r->percentile) ? "-" : "%.3g", r->percentile);
    return out;
}

static ar_status print_unusual(FILE *out, const ari_normal *n)
{
    enum { MOST = 10 };
    const ari_column columns[] = {{"tensor", ARI_LEFT},
                                  {"rms", ARI_RIGHT},
                                  {"largest", ARI_RIGHT},
                                  {"percentile", ARI_RIGHT},
                                  {n->draws > 0 ? "of the median draw" : "of the bound", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    for (size_t i = 0; i < n->rows && i < MOST && n->row[i].ratio > 0.0; i++) {
        const ari_normal_row *row = &n->row[i];
        ari_table_row(&t, "%s\t%.2e\t%.2e\t%s\t%.3g", ARI_SHOW(row->row->name), row->rms, row->largest,
                      percentile_text((char[DIGITS]){0}, row), row->ratio);
    }
    return ari_table_end(&t, out, 2);
}

static bool has_unusual(const ari_normal *n)
{
    return n->rows > 0 && n->row[0].ratio != 0.0;
}

ar_status ari_verify_print_normal(FILE *out, const ari_normal *n)
{
    fprintf(out, "%s\n", n->sentence);
    if (has_unusual(n) && n->draws > 0)
        fprintf(out, "of %zu draws; a right run is called not normal at most once in %zu\n", n->draws, n->draws + 1);
    return has_unusual(n) ? print_unusual(out, n) : AR_OK;
}

void ari_verify_print_not_normal(FILE *out, const ari_normal *n, const ari_verify_cause *cause)
{
    if (has_unusual(n) && !n->normal)
        ari_verify_print_cause(out, cause);
}
