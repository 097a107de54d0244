/* SPDX-License-Identifier: Apache-2.0 */
/* Why a machine has no GPU for a build with CUDA: texts of the states that no machine here is in. */
#include "gpu/native.h"
#include "tests/support/test.h"

Test(no_gpu, each_state_of_a_driver_has_its_own_text, .timeout = 300)
{
    static const struct {
        ari_gpu_machine machine;
        const char *text;
    } cases[] = {
        {{13000, 0, 35, "old", "cudaErrorInsufficientDriver", false},
         "this machine has no NVIDIA driver (this build needs one for CUDA 13.0 or newer)"},
        {{13000, 0, 35, "old", "cudaErrorInsufficientDriver", true},
         "the NVIDIA driver is loaded, but its library, libcuda.so.1, is not found: a container must be started with "
         "the GPU (docker --gpus all)"},
        {{13000, 12080, 35, "old", "cudaErrorInsufficientDriver", true},
         "the NVIDIA driver is for CUDA 12.8, and this build needs one for 13.0: update the driver, or build with the "
         "toolkit of CUDA 12.8"},
        {{12060, 13010, 100, "none", "cudaErrorNoDevice", true},
         "the NVIDIA driver shows no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)"},
        {{12060, 13010, 0, "no error", "cudaSuccess", true},
         "the NVIDIA driver shows no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)"},
        {{12060, 13010, 999, "unknown error", "cudaErrorUnknown", true},
         "the NVIDIA driver does not work: unknown error (cudaErrorUnknown)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_eq(ari_gpu_why_none(&cases[i].machine), AR_ERR_UNSUPPORTED);
        cr_expect_str_eq(ar_error_message(), cases[i].text);
    }
}
