#include "pool.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace gllm {
namespace {

constexpr int SPINS = 2000;  // some 50 microseconds: longer than the gap between two kernels of a step, shorter than a step
constexpr int TILE_BITS = 28;
constexpr uint64_t TILE_MASK = (uint64_t{1} << TILE_BITS) - 1;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Value>
void wait_while(const std::atomic<Value>& word, Value old) {
  for (int spin = 0; spin < SPINS; spin++) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause();
  }
  word.wait(old, std::memory_order_acquire);
}

// A job and its tiles in one word: [job 8 | tiles 28 | next 28]. Who takes a number below `tiles` holds the job open
// until it has counted that tile as done, so its function and context cannot change meanwhile.
class Pool {
 public:
  void resize(int count) {
    std::lock_guard<std::mutex> lock(caller_);
    wanted_ = count < 1 ? 1 : count;
    while (static_cast<int>(helpers_.size()) < wanted_ - 1) {
      int number = static_cast<int>(helpers_.size());
      helpers_.emplace_back([this, number] { help(number); });
      helpers_.back().detach();
    }
    allowed_.store(wanted_ - 1, std::memory_order_release);
  }

  int size() const { return wanted_; }

  void run(int64_t tiles, TileFunction function, void* context) {
    std::unique_lock<std::mutex> lock(caller_, std::try_to_lock);
    if (tiles <= 1 || wanted_ == 1 || !lock.owns_lock() || tiles > static_cast<int64_t>(TILE_MASK / 2)) {
      for (int64_t tile = 0; tile < tiles; tile++) function(context, tile);
      return;
    }
    function_ = function;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    job_ = (job_ + 1) & 0xff;
    ticket_.store((job_ << (2 * TILE_BITS)) | (static_cast<uint64_t>(tiles) << TILE_BITS), std::memory_order_release);
    posted_.fetch_add(1, std::memory_order_release);
    posted_.notify_all();
    take_tiles();
    for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != tiles;) wait_while(done_, done);
  }

 private:
  void help(int number) {
    uint32_t seen = 0;
    for (;;) {
      wait_while(posted_, seen);
      seen = posted_.load(std::memory_order_acquire);
      if (number < allowed_.load(std::memory_order_acquire)) take_tiles();
    }
  }

  void take_tiles() {
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      if ((ticket & TILE_MASK) >= tiles_of(ticket)) return;
      ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      uint64_t tile = ticket & TILE_MASK, tiles = tiles_of(ticket);
      if (tile >= tiles) return;
      function_(context_, static_cast<int64_t>(tile));
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tiles) done_.notify_all();
    }
  }

  static uint64_t tiles_of(uint64_t ticket) { return (ticket >> TILE_BITS) & TILE_MASK; }

  std::mutex caller_;
  std::vector<std::thread> helpers_;
  std::atomic<int> wanted_{1};  // also read by who does not hold the lock
  std::atomic<int> allowed_{0};
  TileFunction function_ = nullptr;
  void* context_ = nullptr;
  uint64_t job_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> posted_{0};
};

// Never destroyed: its threads may still wait in it when the process ends.
Pool& pool() {
  static Pool* made = new Pool;
  return *made;
}

}  // namespace

int threads() { return pool().size(); }
void set_threads(int count) { pool().resize(count); }
void run_tiles(int64_t tiles, TileFunction function, void* context) { pool().run(tiles, function, context); }

}  // namespace gllm
