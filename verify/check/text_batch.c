/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/text_batch.h"

#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/io/file.h"

ar_status ari_text_ids(int64_t **gives, size_t batch, size_t seq, size_t vocab, const char *text, uint64_t seed)
{
    size_t count = 0, length = 0;
    unsigned char *bytes = NULL;
    AR_TRY(ari_mul_size(&count, batch, seq));
    AR_TRY(ari_alloc((void **)gives, count, sizeof **gives, "token ids"));
    const ar_status st = ari_text_load(&bytes, &length, text);
    if (st != AR_OK) {
        free(*gives);
        *gives = NULL;
        return st;
    }
    const size_t start = (size_t)((seed * 7919u) % length);
    for (size_t i = 0; i < count; i++)
        (*gives)[i] = (int64_t)(bytes[(start + i) % length] % vocab);
    free(bytes);
    return AR_OK;
}
