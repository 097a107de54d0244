/* SPDX-License-Identifier: Apache-2.0 */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "ref/comm/process_impl.h"

/* "Open MPI v4.1.4, package: ..", "MPICH Version:\t4.0.2\n..": what stands before the first comma or line's end. MPI
 * need not be initialised for that. */
bool ari_mpi_describe(char *text, size_t size)
{
    char all[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    if (MPI_Get_library_version(all, &length) != MPI_SUCCESS) {
        snprintf(text, size, "it does not tell its version");
        return false;
    }
    all[strcspn(all, ",\n")] = '\0';
    for (char *tab = strchr(all, '\t'); tab; tab = strchr(tab, '\t'))
        *tab = ' ';
    snprintf(text, size, "%s", all);
    return true;
}
