// Jobs of all sizes from two threads at once while the number of threads changes; each tile must be computed once.
#include <atomic>
#include <thread>
#include <vector>

#include "pool.h"

int main() {
  gllm::set_threads(4);
  std::atomic<int> wrong{0};
  auto run_jobs = [&](int jobs, int seed) {
    for (int job = 0; job < jobs; job++) {
      std::vector<int> computed(1 + (job * 7 + seed) % 33);
      gllm::parallel_for(computed.size(), [&](int64_t tile) { computed[tile]++; });
      for (int count : computed) wrong += count != 1;
      if (job % 7 == 0) gllm::set_threads(1 + job % 5);
    }
  };
  run_jobs(2000, 1);
  std::thread other([&] { run_jobs(2000, 2); });
  run_jobs(2000, 3);
  other.join();
  return wrong != 0;
}
