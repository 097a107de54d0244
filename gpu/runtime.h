/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_RUNTIME_H
#define ARI_GPU_RUNTIME_H

/* Memory and queues of a GPU device: what is not kernels. gpu/runtime_cuda.cu over the CUDA runtime,
 * gpu/runtime_host.cc for the emulated device. */
#include "gpu/imma.h"
#include "gpu/kernel.h"

namespace ARI_GPU
{

/* What ARI_IMMA_VARIABLE asked for when the device was made. */
ari_imma imma_of(const ar_device *d);

/* Slots of the device's table. */
ar_status queue_create(ar_device *d, ar_queue **gives, ar_queue_kind kind, const char *name);
void destroy(ar_device *d);
ar_status alloc(ar_device *d, ar_buf *gives, size_t bytes);
void free(ar_device *d, ar_buf b);
ar_status copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes);
ar_status zero(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes);

/* Memory for a kernel's own use on one queue; given back when the variable goes, and not taken again before what was
 * enqueued on q until then is done. */
class scratch
{
  public:
    scratch(ar_device *device, ar_queue *queue) : d(device), q(queue), b{nullptr}
    {
    }
    ~scratch();
    scratch(const scratch &) = delete;
    scratch &operator=(const scratch &) = delete;
    /* Once. Errors: AR_ERR_MEMORY. */
    ar_status take(size_t bytes);
    ar_buf buf() const
    {
        return b;
    }

  private:
    ar_device *d;
    ar_queue *q;
    ar_buf b;
};

} // namespace ARI_GPU

#endif
