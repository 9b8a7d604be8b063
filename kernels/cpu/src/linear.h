// The inner product of all levels and number formats. See linear.cpp for the layouts.
//
// A unit is 4 bytes of one output's weights along the inner axis: one float32, two bfloat16. Each output adds up its
// units one after the other in one accumulator, whatever the number of rows, the blocking or the thread: a row's bits
// depend on that row and the weights alone.
#pragma once
#include "vec.h"

namespace gllm {

constexpr int COLUMNS = 32;             // outputs of a panel
constexpr int VECTORS = COLUMNS / W;    // vectors of a panel's unit

struct Float32 {
  using type = float;
  static constexpr int PER_UNIT = 1;
  static vf add(vf sum, vu w, uint32_t x) { return fma(floats(w), floats(splat(x)), sum); }
};

struct Bfloat16 {
  using type = bf16;
  static constexpr int PER_UNIT = 2;
  static vf add(vf sum, vu w, uint32_t x) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)splat(x));
#else
    sum = fma(floats(w << 16), floats(splat(x << 16)), sum);
    return fma(floats(w & 0xffff0000u), floats(splat(x & 0xffff0000u)), sum);
#endif
  }
};

// How many rows are computed at once: their accumulators fill the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 14;
#elif defined(__AVX2__)
constexpr int ROWS = 3;
#elif defined(__ARM_NEON)
constexpr int ROWS = 3;
#else
constexpr int ROWS = 1;
#endif

// Part of a panel's units and of a block's rows. x is [units][stride]; while they are multiplied, `step` bytes per unit
// are fetched from `ahead`.
struct Piece {
  const uint32_t* w;
  const uint32_t* x;
  int64_t stride, units;
  const char* ahead;
  int64_t step;
};

// sums [rows][COLUMNS] = (first ? 0 : sums) + the piece's products.
template <class Format, int rows>
void add_units(float* sums, const Piece& piece, bool first) {
  const uint32_t *w = piece.w, *x = piece.x;
  const char* ahead = piece.ahead;
  vf sum[rows][VECTORS];
#pragma GCC unroll 16
  for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) sum[row][v] = first ? vf{} : load(sums + row * COLUMNS + v * W);
  for (int64_t unit = piece.units; unit; unit--, w += COLUMNS, x += piece.stride, ahead += piece.step) {
    vu weights[VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) memcpy(&weights[v], w + v * W, sizeof(vu));
    __builtin_prefetch(ahead);
    if (piece.step > 64) __builtin_prefetch(ahead + 64);
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) sum[row][v] = Format::add(sum[row][v], weights[v], x[row]);
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) store(sums + row * COLUMNS + v * W, sum[row][v]);
}

template <class Format, int rows = ROWS>
void add_units(int count, float* sums, const Piece& piece, bool first) {
  if constexpr (rows > 1)
    if (count < rows) return add_units<Format, rows - 1>(count, sums, piece, first);
  add_units<Format, rows>(sums, piece, first);
}

}  // namespace gllm
