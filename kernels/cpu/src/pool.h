// Threads of our own. Tiles are handed out one by one, so that a thread whose core is taken by somebody else holds up
// one tile and not its whole share; whoever waits spins for a moment and then sleeps, so that it never takes a core.
#pragma once
#include <cstdint>

namespace gllm {

inline int64_t divide_up(int64_t count, int64_t size) { return (count + size - 1) / size; }

using TileFunction = void (*)(void* context, int64_t tile);

int threads();
void set_threads(int count);
void run_tiles(int64_t tiles, TileFunction function, void* context);

// work(tile) for each tile in [0, tiles), in any order and on any thread. Must not be called from within `work`; results
// must not depend on who computes a tile. Called from several threads at once, the second one works alone.
template <class Work>
void parallel_for(int64_t tiles, Work&& work) {
  auto call = [](void* context, int64_t tile) { (*static_cast<Work*>(context))(tile); };
  run_tiles(tiles, call, &work);
}

}  // namespace gllm
