/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer's way in; -DFUZZ_TARGET=fuzz_map says which target it drives. */
#include "tests/fuzz/targets.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return FUZZ_TARGET(data, size);
}

#ifdef FUZZ_LENGTH_BYTES
/* The file begins with the length of its header, of so many bytes at this place. Most inputs get it right after they
 * were changed, or none would pass the first check: the header ends with the last brace. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    const size_t start = FUZZ_LENGTH_AT + FUZZ_LENGTH_BYTES;
    size = LLVMFuzzerMutate(data, size, room);
    if (seed % 16 == 0 || size < start)
        return size;
    size_t end = size;
    while (end > start && data[end - 1] != '}')
        end--;
    for (size_t i = 0; i < FUZZ_LENGTH_BYTES; i++)
        data[FUZZ_LENGTH_AT + i] = (uint8_t)((end - start) >> (8 * i));
    return size;
}
#endif
