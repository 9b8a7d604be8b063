// The inner product of all levels and number formats. See linear.cpp for how products are cut into pieces.
//
// Weights are packed in panels of COLUMNS outputs, a panel step by step along the inner axis. Each output adds up its
// steps one after the other in one accumulator, whatever the number of rows, the blocking or the thread: a row's bits
// depend on that row and the weights alone.
#pragma once
#include "vec.h"

namespace gllm {

constexpr int COLUMNS = 32;           // outputs of a panel
constexpr int VECTORS = COLUMNS / W;  // vectors that hold one number of each of them

// Some steps of a panel and of a block of rows. While they are multiplied, `fetch` bytes per step are fetched from
// `ahead`.
struct Piece {
  const char* w;
  const char* x;
  int64_t height, steps;
  const char* ahead;
  int64_t fetch;
};

inline vu load_units(const char* from) {
  vu units;
  memcpy(&units, from, sizeof units);
  return units;
}

inline void store_units(char* to, vu units, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_epi32(to, (1u << count) - 1, (__m512i)units);
#else
  memcpy(to, &units, count * 4);
#endif
}

inline uint32_t load_unit(const char* from) {
  uint32_t unit;
  memcpy(&unit, from, sizeof unit);
  return unit;
}

// A format tells how many elements a step has, its bytes of weights per panel and of rows per row, how many rows are
// computed at once (their accumulators fill the registers), how rows are packed into a block, and how steps are added:
//   sums [rows][COLUMNS] = (first ? 0 : sums) + the piece's products.

// Steps of one unit: 4 bytes of each output, a float32 or two bfloat16.
template <class Element>
struct Dense {
  static constexpr int ELEMENTS = 4 / sizeof(Element);
  static constexpr int64_t WEIGHT_BYTES = 4 * COLUMNS, ROW_BYTES = 4;
#if defined(__AVX512F__)
  static constexpr int ROWS = 14;
#elif defined(__AVX2__) || defined(__ARM_NEON)
  static constexpr int ROWS = 3;
#else
  static constexpr int ROWS = 1;
#endif

  static vf add(vf sum, vu w, uint32_t x) {
    if constexpr (sizeof(Element) == 4) return fma(floats(w), floats(splat(x)), sum);
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)splat(x));
#else
    sum = fma(floats(w << 16), floats(splat(x << 16)), sum);
    return fma(floats(w & 0xffff0000u), floats(splat(x & 0xffff0000u)), sum);
#endif
  }

  // Unit `unit` of `inner` elements; those past the end are zero.
  static uint32_t unit_of(const Element* elements, int64_t unit, int64_t inner) {
    uint32_t found = 0;
    const int64_t first = unit * ELEMENTS;
    memcpy(&found, elements + first, inner - first >= ELEMENTS ? 4 : sizeof(Element));
    return found;
  }

  // W steps at a time are turned; rows are units beside each other in the end.
  static void pack_block(const Element* x, int64_t stride, int64_t rows, int64_t inner, char* block, int64_t height) {
    static_assert(ROWS <= W);
    const int64_t steps = (inner + ELEMENTS - 1) / ELEMENTS, whole = inner / ELEMENTS / W * W;
    for (int64_t step = 0; step < whole; step += W) {
      vu units[W];
#pragma GCC unroll 16
      for (int row = 0; row < W; row++)
        units[row] = row < rows ? load_units(reinterpret_cast<const char*>(x + row * stride + step * ELEMENTS)) : vu{};
      transpose(units);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store_units(block + (step + i) * height * 4, units[i], rows);
    }
    for (int64_t step = whole; step < steps; step++)
      for (int64_t row = 0; row < rows; row++) {
        const uint32_t unit = unit_of(x + row * stride, step, inner);
        memcpy(block + (step * height + row) * 4, &unit, 4);
      }
  }

  template <int rows>
  static void add_steps(float* sums, const Piece& piece, bool first) {
    const char *w = piece.w, *x = piece.x, *ahead = piece.ahead;
    vf sum[rows][VECTORS];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) sum[row][v] = first ? vf{} : load(sums + row * COLUMNS + v * W);
    for (int64_t step = piece.steps; step; step--, w += WEIGHT_BYTES, x += piece.height * 4, ahead += piece.fetch) {
      vu weights[VECTORS];
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) weights[v] = load_units(w + v * W * 4);
      __builtin_prefetch(ahead);
      if (piece.fetch > 64) __builtin_prefetch(ahead + 64);
#pragma GCC unroll 16
      for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) sum[row][v] = add(sum[row][v], weights[v], load_unit(x + row * 4));
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) store(sums + row * COLUMNS + v * W, sum[row][v]);
  }
};

template <class Format, int rows = Format::ROWS>
void add_steps(int count, float* sums, const Piece& piece, bool first) {
  if constexpr (rows > 1)
    if (count < rows) return add_steps<Format, rows - 1>(count, sums, piece, first);
  Format::template add_steps<rows>(sums, piece, first);
}

}  // namespace gllm
