// The largest numbers of rows, by blocks of columns: what sampling begins with (kernels/top.py).
#include <cmath>

#include "pool.h"
#include "vec.h"

namespace gllm {
namespace {

constexpr int64_t BLOCK = 64;        // columns, as kernels/top.py has them
constexpr int64_t TILE_BLOCKS = 256;  // of a row

// The larger of two; NaN where one is.
inline vf larger(vf x, vf y) { return (x >= y) | (x != x) ? x : y; }

// NaN where one of the numbers is.
inline float largest_of(const float* x, int64_t count) {
  vf found = splat(-INFINITY);
  int64_t i = 0;
  for (; i + W <= count; i += W) found = larger(found, load(x + i));
  float most = fold(found, larger)[0];
  for (; i < count; i++) most = most >= x[i] || most != most ? most : x[i];
  return most;
}

int64_t find(const float* x, int64_t count, float wanted) {
  int64_t i = 0;
  while (i + 1 < count && x[i] != wanted) i++;
  return i;
}

// The first column of the largest number; 0 or any other for a row with NaN.
int64_t first_of_largest(const float* x, int64_t columns, const float* maxima, int64_t blocks) {
  const float most = largest_of(maxima, blocks);
  const int64_t first = find(maxima, blocks, most) * BLOCK;
  return first + find(x + first, columns - first < BLOCK ? columns - first : BLOCK, most);
}

}  // namespace
}  // namespace gllm

// x [rows][columns], rows `stride` apart -> maxima [rows][ceil(columns / 64)], and ids [rows]: the first column of the
// largest number.
extern "C" void gllm_best(const float* x, int64_t stride, int64_t rows, int64_t columns, float* maxima, int64_t* ids) {
  using namespace gllm;
  const int64_t blocks = divide_up(columns, BLOCK), tiles = divide_up(blocks, TILE_BLOCKS);
  parallel_for(rows * tiles, [&](int64_t tile) {
    const int64_t row = tile / tiles, first = tile % tiles * TILE_BLOCKS;
    for (int64_t block = first; block < blocks && block < first + TILE_BLOCKS; block++) {
      const int64_t column = block * BLOCK, count = columns - column < BLOCK ? columns - column : BLOCK;
      maxima[row * blocks + block] = largest_of(x + row * stride + column, count);
    }
  });
  parallel_for(rows, [&](int64_t row) {
    ids[row] = first_of_largest(x + row * stride, columns, maxima + row * blocks, blocks);
  });
}
