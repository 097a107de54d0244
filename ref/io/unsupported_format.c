/* SPDX-License-Identifier: Apache-2.0 */
/* Files of other programs, by their first bytes. */
#include "ref/io/file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"

#define SAVE_NUMPY "from safetensors.numpy import save_file; "
#define SAVE_TORCH "from safetensors.torch import save_file; "
#define TO_TOKENS ".astype('<u4').tofile('tokens.u32')"

/* `tensors` and `tokens` are lines of Python, or "-m", a module and its arguments; @ is the file's path. */
typedef struct kind {
    const char *what;
    const char *magic;
    size_t bytes;        /* of the magic */
    const char *tensors; /* writes tensors.safetensors */
    const char *tokens;  /* writes tokens.u32 */
} kind;

enum { NPY, NPZ, TORCH, DISTCP, OLD_TORCH, ZIP, GGUF, HDF5, ARROW, PARQUET, GZIP, ZSTD, SAFETENSORS, KINDS };

/* A magic of less than four bytes would refuse honest tokens. GGUF's has its version's upper bytes, which no text has;
 * that of an old torch.save is the pickled number that it begins with. */
static const kind kinds[KINDS] = {
    [NPY] = {"a NumPy array (.npy)", "\x93NUMPY", 6,
             "import numpy as np; " SAVE_NUMPY "save_file({'NAME': np.load('@')}, 'tensors.safetensors')",
             "import numpy as np; np.load('@').ravel()" TO_TOKENS},
    [NPZ] = {"an archive of NumPy arrays (.npz)", "PK\x03\x04", 4,
             "import numpy as np; " SAVE_NUMPY "save_file(dict(np.load('@')), 'tensors.safetensors')",
             "import numpy as np; np.load('@')['NAME'].ravel()" TO_TOKENS},
    [TORCH] = {"a file of torch.save", "PK\x03\x04", 4,
               "import torch; " SAVE_TORCH "save_file({k: v.clone() for k, v in torch.load('@', map_location='cpu', "
               "weights_only=True).items()}, 'tensors.safetensors')",
               "import torch; torch.load('@').flatten().numpy()" TO_TOKENS},
    [DISTCP] = {"a part of a checkpoint of torch.distributed.checkpoint, which is its whole folder", "PK\x03\x04", 4,
                NULL, NULL},
    [OLD_TORCH] = {"a file of torch.save", "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20j\xa8P\x19", 14, NULL, NULL},
    [ZIP] = {"a zip archive", "PK\x03\x04", 4, NULL, NULL},
    [GGUF] = {"a GGUF file", "GGUF", 4,
              "from transformers import AutoModelForCausalLM as M; M.from_pretrained('.', "
              "gguf_file='#').save_pretrained('OUT')",
              NULL},
    [HDF5] = {"an HDF5 file", "\x89HDF\r\n\x1a\n", 8,
              "import h5py; " SAVE_NUMPY
              "f = h5py.File('@'); save_file({k: f[k][()] for k in f}, 'tensors.safetensors')",
              "import h5py; h5py.File('@')['NAME'][()].ravel()" TO_TOKENS},
    [ARROW] = {"an Arrow file", "ARROW1\0", 7, NULL, NULL},
    [PARQUET] = {"a Parquet file", "PAR1\x15", 5, NULL,
                 "import numpy as np, pandas as pd; np.concatenate(pd.read_parquet('@')['input_ids'])" TO_TOKENS},
    [GZIP] = {"compressed by gzip", "\x1f\x8b\x08", 3, NULL, NULL},
    [ZSTD] = {"compressed by zstd", "\x28\xb5\x2f\xfd", 4, NULL, NULL},
    [SAFETENSORS] = {"a safetensors file", "", 0, NULL, NULL}, /* the length of a header, and the header */
};

/* True if the bytes contain a word. */
static bool holds(const unsigned char *head, size_t n, const char *word)
{
    const size_t m = strlen(word);
    for (size_t i = 0; i + m <= n; i++) {
        if (memcmp(head + i, word, m) == 0)
            return true;
    }
    return false;
}

/* The kind of file that begins with these bytes; KINDS: none in the list. A zip is known by the name of its first
 * member, and by its own. */
static int kind_of(const unsigned char *head, size_t n, const char *path, ari_wanted wanted)
{
    int found = 0;
    if (wanted != ARI_WANT_TENSORS && n > 10 && memcmp(head + 4, "\0\0\0\0{\"", 6) == 0)
        return SAFETENSORS;
    while (found < SAFETENSORS && (n < kinds[found].bytes || memcmp(head, kinds[found].magic, kinds[found].bytes) != 0))
        found++;
    if (found == SAFETENSORS)
        return KINDS;
    if (found == NPZ && ari_ends_in(path, ".distcp"))
        return DISTCP;
    if (found == NPZ && !ari_ends_in(path, ".npz") && !holds(head, n, ".npy"))
        return ari_ends_in(path, ".zip") && !holds(head, n, ".pkl") ? ZIP : TORCH;
    if (found == GGUF && (n < 8 || head[4] > 9 || head[5] != 0 || head[6] != 0 || head[7] != 0))
        return KINDS;
    if (found == GZIP && wanted == ARI_WANT_TOKENS)
        return KINDS;
    return found;
}

void ari_unsupported_format_conversion(char out[ARI_FORMAT_CONVERSION], const char *lines, const char *path,
                                       const char *name)
{
    size_t n = 0;
    out[0] = '\0';
    const bool is_module = lines && strncmp(lines, "-m ", 3) == 0;
    if (lines)
        n = (size_t)snprintf(out, ARI_FORMAT_CONVERSION, "; this converts it:\n  python3 %s", is_module ? "" : "-c \"");
    for (const char *c = lines; c && *c && n < ARI_FORMAT_CONVERSION - 2; c++) {
        if (*c == '@' || *c == '#')
            n += (size_t)snprintf(out + n, ARI_FORMAT_CONVERSION - n, "%s", ARI_SHOW(*c == '@' ? path : name));
        else
            n += (size_t)snprintf(out + n, ARI_FORMAT_CONVERSION - n, "%c", *c);
    }
    if (lines && !is_module && n < ARI_FORMAT_CONVERSION - 1)
        snprintf(out + n, ARI_FORMAT_CONVERSION - n, "\"");
}

ar_status ari_unsupported_format_check(const char *path, const void *head, size_t n, ari_wanted wanted)
{
    static const char *const expected[] = {"a safetensors file", "tokens: bytes, u16, u32 or a safetensors file",
                                           "text"};
    const int found = kind_of(head, n, path, wanted);
    if (found == KINDS)
        return AR_OK;
    const kind *k = &kinds[found == OLD_TORCH ? TORCH : found];
    const char *lines = wanted == ARI_WANT_TENSORS ? k->tensors : wanted == ARI_WANT_TOKENS ? k->tokens : NULL;
    char convert[ARI_FORMAT_CONVERSION];
    ari_unsupported_format_conversion(convert, lines, path, path);
    return ar_error_set(AR_ERR_FORMAT, "%s: is %s, expected %s%s", ARI_SHOW(path), k->what, expected[wanted], convert);
}

ar_status ari_unsupported_format_check_file(int fd, size_t bytes, const char *path, ari_wanted wanted)
{
    unsigned char head[ARI_FORMAT_HEAD];
    const size_t n = bytes < sizeof head ? bytes : sizeof head;
    AR_TRY(ari_file_pread(fd, head, n, 0, path));
    return ari_unsupported_format_check(path, head, n, wanted);
}

ar_status ari_file_read_text(unsigned char **gives, size_t *length, const char *path, size_t limit)
{
    AR_TRY(ari_file_read(gives, length, path, limit));
    const ar_status st = ari_unsupported_format_check(
        path, *gives, *length < ARI_FORMAT_HEAD ? *length : ARI_FORMAT_HEAD, ARI_WANT_TEXT);
    if (st != AR_OK) {
        free(*gives);
        *gives = NULL;
    }
    return st;
}
