/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_DUMP_NPY_H
#define ARI_DUMP_NPY_H

#include "anyrank/dump.h"

/* NumPy's .npy, versions 1.0 to 3.0: one array a file. */
typedef struct ari_npy {
    ar_st_entry entry; /* the elements row-major as they lie in the file: of an array in Fortran order that is its
                          transpose. Named by the file, without folder and ".npy" */
    int ndim;          /* of the array */
    size_t shape[AR_ST_MAX_DIMS];
    bool fortran;    /* the file is in Fortran order, and so `entry` is not the array */
    ar_dump_box box; /* the whole array, of `entry` */
    void *map;
    size_t map_bytes;
} ari_npy;

/** Maps and checks a file; hostile input is safe. Gives; ari_npy_close. Errors: AR_ERR_IO; AR_ERR_FORMAT
 *  ("InvalidNpy: FILE: ..."); AR_ERR_UNSUPPORTED (big-endian numbers, dtypes that no safetensors file has, more than
 *  AR_ST_MAX_DIMS dimensions: what to write in their place is said); AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_npy_open(ari_npy **gives, const char *path);
/** Accepts NULL. */
void ari_npy_close(ari_npy *f);

#endif
