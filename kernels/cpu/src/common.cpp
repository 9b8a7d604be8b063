// What every level has beside its kernels.
#include <cstdint>

#include "pool.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

// The level and the digest of the sources, as kernels/cpu/build.py gave them.
extern "C" const char* gllm_build() { return GLLM_BUILD; }

extern "C" void gllm_set_threads(int32_t count) { gllm::set_threads(count); }

// Ask for 2 MiB pages where whole ones lie in the range: reading at 4 KiB pages loses a third of the bandwidth.
extern "C" void gllm_advise_huge(void* begin, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = 2 << 20, first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes) / page * page;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}
