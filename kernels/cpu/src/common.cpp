// What every level has beside its kernels.
#include <cstdint>

#include "pool.h"
#include "vec.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
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

// Make real memory of a range now, its content left alone: what is written later need not wait for the system's pages.
extern "C" void gllm_populate(void* begin, int64_t bytes) {
#if defined(__linux__)
  constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE; older kernels than 5.14 refuse it, and nothing is lost
  const uintptr_t page = sysconf(_SC_PAGESIZE), first = reinterpret_cast<uintptr_t>(begin) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + bytes;
  madvise(reinterpret_cast<void*>(first), end - first, POPULATE_WRITE);
#else
  (void)begin, (void)bytes;
#endif
}

// Read a range of memory once, on all threads, and do next to nothing with it: the bound of whatever reads weights.
extern "C" void gllm_read(const uint32_t* from, int64_t bytes, uint32_t* found) {
  constexpr int64_t TILE = 1 << 18;
  const int64_t tiles = bytes / TILE;
  gllm::parallel_for(tiles, [&](int64_t tile) {
    const uint32_t *at = from + tile * (TILE / 4), *end = at + TILE / 4;
    gllm::vu all[4] = {};
    for (; at < end; at += 4 * gllm::W)
      for (int i = 0; i < 4; i++) {
        gllm::vu part;
        memcpy(&part, at + i * gllm::W, sizeof part);
        __builtin_prefetch(at + i * gllm::W + 512);
        all[i] |= part;
      }
    if (((all[0] | all[1]) | (all[2] | all[3]))[0] == 0x12345678) *found = 1;
  });
}
