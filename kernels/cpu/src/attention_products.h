// Products of some query rows with one tile of keys, and of weights with its values.
//
// Each output has one accumulator, which takes its products in the order of their index; lanes hold different outputs.
// So a row's bits depend on the row and the tile alone, not on the rows beside it. Keys that a row does not see have
// the weight zero, and adding zeros at the end changes no sum: blocks of rows need not agree on where they stop.
#pragma once
#include <algorithm>
#include <utility>

#include "vec.h"

namespace gllm {
namespace {

constexpr int KEYS = 128;  // of a tile: fewer cost more merges, more do not stay in the caches beside their values

// How many rows and vectors a product holds in registers at once.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, BLOCK_VECTORS = 4;
#elif defined(__ARM_NEON)
constexpr int BLOCK_ROWS = 4, BLOCK_VECTORS = 4;
#else
constexpr int BLOCK_ROWS = 4, BLOCK_VECTORS = 2;
#endif

inline int divide_up(int count, int size) { return (count + size - 1) / size; }
inline int round_up(int count, int size) { return divide_up(count, size) * size; }

template <class Vector, class T>
inline Vector read(const T* from) {
  Vector x;
  memcpy(&x, from, sizeof x);
  return x;
}

template <class Vector, class T>
inline void write(T* to, Vector x) {
  memcpy(to, &x, sizeof x);
}

// -- what products are made of ----------------------------------------------------------------------------------------

// An element is 4 bytes along the axis that is summed over: PER_ELEMENT values of a cache of `Stored`.
template <class T>
struct WholeKeys {
  using Stored = T;
  using Weight = float;
  static constexpr int PER_ELEMENT = 1;
  static vu read(const T* from) { return bits(load(from)); }
  static vu read(const T* from, int left) { return bits(left < W ? load_part(from, left) : load(from)); }
  // PER_ELEMENT keys' values, as elements.
  static void weave(const vu (&values)[1], vu (&out)[1]) { out[0] = values[0]; }
  static vf add(vf sum, vu columns, uint32_t row) { return fma(floats(columns), floats(splat(row)), sum); }
  // Stores weights and returns what was stored.
  static vf keep(float* to, vf weights) {
    store(to, weights);
    return weights;
  }
};

using Float32Keys = WholeKeys<float>;

#if defined(__AVX512BF16__)
// Weights are rounded to bfloat16, as in every flash attention; their sum is of the rounded ones, so that equal values
// have themselves for an average.
struct Bfloat16Keys {
  using Stored = bf16;
  using Weight = bf16;
  static constexpr int PER_ELEMENT = 2;
  static vu read(const bf16* from) { return gllm::read<vu>(from); }
  static vu read(const bf16* from, int left) {
    return left < 2 * W ? (vu)_mm512_maskz_loadu_epi16((uint32_t{1} << left) - 1, from) : read(from);
  }
  static void weave(const vu (&values)[2], vu (&out)[2]) {
    weave(values[0], values[1], std::make_index_sequence<2 * W>(), out);
  }
  template <size_t... LANE>
  static void weave(vu x, vu y, std::index_sequence<LANE...>, vu (&out)[2]) {
    alignas(64) static constexpr uint16_t turns[2][2 * W] = {{(LANE / 2 + LANE % 2 * 2 * W)...},
                                                             {(W + LANE / 2 + LANE % 2 * 2 * W)...}};
    for (int half = 0; half < 2; half++)
      out[half] = (vu)_mm512_permutex2var_epi16((__m512i)x, _mm512_load_si512(turns[half]), (__m512i)y);
  }
  static vf add(vf sum, vu columns, uint32_t row) {
    return _mm512_dpbf16_ps(sum, (__m512bh)columns, (__m512bh)splat(row));
  }
  static vf keep(bf16* to, vf weights) {
    vh rounded = (vh)_mm512_cvtneps_pbh(weights);
    write(to, rounded);
    return floats(__builtin_convertvector(rounded, vu) << 16);
  }
};
#else
using Bfloat16Keys = WholeKeys<bf16>;
#endif

// -- packing ----------------------------------------------------------------------------------------------------------

struct Range {  // of keys in a tile
  int begin, end;
};

// Where a head's keys and values of a tile lie, up to `end`, a multiple of W.
template <class T>
struct Rows {
  const T* keys[KEYS];
  const T* values[KEYS];
  int end = 0;
};

// W keys from column d on, turned: one vector of keys per element. `left` columns are there; WHOLE: enough for a vector.
template <class M, bool WHOLE = false>
inline void turn(const typename M::Stored* const* keys, int d, int left, vu (&block)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) block[i] = WHOLE ? M::read(keys[i] + d) : M::read(keys[i] + d, left);
  transpose(block);
}

// Keys -> [width / PER_ELEMENT][KEYS] elements, zeros beyond the width.
template <class M>
void pack_keys(const Rows<typename M::Stored>& rows, int width, uint32_t* out) {
  for (int key = 0; key < rows.end; key += W, out += W)
    for (int d = 0; d < width; d += W * M::PER_ELEMENT) {
      vu block[W];
      turn<M>(rows.keys + key, d, width - d, block);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) write(out + (d / M::PER_ELEMENT + i) * KEYS, block[i]);
    }
}

// PER_ELEMENT keys' values from column d on, as elements.
template <class M, bool WHOLE = false>
inline void weave(const typename M::Stored* const* values, int d, int left, vu (&out)[M::PER_ELEMENT]) {
  vu found[M::PER_ELEMENT];
  for (int i = 0; i < M::PER_ELEMENT; i++) found[i] = WHOLE ? M::read(values[i] + d) : M::read(values[i] + d, left);
  M::weave(found, out);
}

// Values -> [KEYS / PER_ELEMENT][columns] elements, zeros beyond the width.
template <class M>
void pack_values(const Rows<typename M::Stored>& rows, int width, int columns, uint32_t* out) {
  for (int key = 0; key < rows.end; key += M::PER_ELEMENT, out += columns)
    for (int d = 0; d < width; d += W * M::PER_ELEMENT) {
      vu block[M::PER_ELEMENT];
      weave<M>(rows.values + key, d, width - d, block);
      for (int i = 0; i < M::PER_ELEMENT; i++) write(out + d + i * W, block[i]);
    }
}

// -- products ---------------------------------------------------------------------------------------------------------

// out [rows][columns] = rows [rows][depth] x columns [depth][columns], in elements; distances between rows in elements.
struct Product {
  const uint32_t* rows;
  int row_stride;
  const uint32_t* columns;
  int column_stride;
  float* out;
  int out_stride;
  int depth;
};

template <class M, int ROWS, int VECTORS>
void multiply_block(const Product& p, int vector) {
  vf sums[ROWS][VECTORS] = {};
  const uint32_t* column = p.columns + vector * W;
  for (int k = 0; k < p.depth; k++, column += p.column_stride) {
    vu columns[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) columns[v] = read<vu>(column + v * W);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[row][v] = M::add(sums[row][v], columns[v], p.rows[row * p.row_stride + k]);
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store(p.out + row * p.out_stride + (vector + v) * W, sums[row][v]);
}

template <class M, int ROWS, int VECTORS = BLOCK_VECTORS>
void multiply_vectors(const Product& p, int vector, int end) {
  for (; vector + VECTORS <= end; vector += VECTORS) multiply_block<M, ROWS, VECTORS>(p, vector);
  if constexpr (VECTORS > 1) multiply_vectors<M, ROWS, 1>(p, vector, end);
}

// For `rows` rows and `vectors` vectors of columns.
template <class M, int ROWS = BLOCK_ROWS>
void multiply(Product p, int rows, int vectors) {
  for (; rows >= ROWS; rows -= ROWS, p.rows += ROWS * p.row_stride, p.out += ROWS * p.out_stride)
    multiply_vectors<M, ROWS>(p, 0, vectors);
  if constexpr (ROWS > 1)
    if (rows) multiply<M, ROWS / 2>(p, rows, vectors);
}

}  // namespace
}  // namespace gllm
