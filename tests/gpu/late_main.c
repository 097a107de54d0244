/* SPDX-License-Identifier: Apache-2.0 */
/* Every kind of layout on the emulated device under two seeds of late streams: the bits of one rank on the CPU. Exit
 * status 0: all; 77: a build without the device, or for
 * ThreadSanitizer. */
#include <stdio.h>

#include "anyrank/device.h"
#include "gpu/device_private.h"
#include "support/late_layouts.h"
#include "support/small.h"

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    printf("streams that run late take turns: ThreadSanitizer has nothing to watch, and takes minutes\n");
    return 77;
#endif
    ar_device *d = NULL;
    if (ari_device_emulated_create(&d) == AR_ERR_UNSUPPORTED) {
        printf("%s\n", ar_error_message());
        return 77;
    }
    ar_device_destroy(d);
    size_t wrong = late_layouts_run(1, small_only() ? 1 : 2);
    if (!small_only()) /* under a sanitizer what is compared does not matter */
        wrong += late_layouts_check(1) + late_layouts_check(2);
    return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
