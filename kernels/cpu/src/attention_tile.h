// One tile of keys and some query rows: products, softmax within the tile, merging of tiles.
//
// Each output has one accumulator, which takes its products in the order of their index; lanes hold different outputs.
// So a row's bits depend on the row and the tile alone, not on the rows beside it. Keys that a row does not see have the
// weight zero, and adding zeros at the end changes no sum: blocks of rows need not agree on where they stop.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
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
  static void weave(const T* const* values, int d, int left, uint32_t* out) { write(out, read(values[0] + d, left)); }
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
  // Two keys' values in turns: pairs for the products.
  static void weave(const bf16* const* values, int d, int left, uint32_t* out) {
    weave(read(values[0] + d, left), read(values[1] + d, left), std::make_index_sequence<2 * W>(), out);
  }
  template <size_t... LANE>
  static void weave(vu x, vu y, std::index_sequence<LANE...>, uint32_t* out) {
    const short low[] = {static_cast<short>(LANE / 2 + LANE % 2 * 2 * W)...}, high[] = {static_cast<short>(W + LANE / 2 + LANE % 2 * 2 * W)...};
    write(out, _mm512_permutex2var_epi16((__m512i)x, _mm512_loadu_si512(low), (__m512i)y));
    write(out + W, _mm512_permutex2var_epi16((__m512i)x, _mm512_loadu_si512(high), (__m512i)y));
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

// Where a head's keys and values of a tile lie, up to `end`, a multiple of W.
template <class T>
struct Rows {
  const T* keys[KEYS];
  const T* values[KEYS];
  int end = 0;
};

#if defined(__clang__)
#define GLLM_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define GLLM_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, vu{__VA_ARGS__})
#endif

// One step of a transposition: x and y exchange the blocks of STEP lanes that lie off the diagonal.
template <int STEP, size_t... LANE>
inline void exchange(vu& x, vu& y, std::index_sequence<LANE...>) {
  vu low = GLLM_SHUFFLE(x, y, (LANE & STEP ? W + LANE - STEP : LANE)...);
  y = GLLM_SHUFFLE(x, y, (LANE & STEP ? W + LANE : LANE + STEP)...);
  x = low;
}

template <int STEP = 1>
inline void transpose(vu (&rows)[W]) {
#pragma GCC unroll 16
  for (int row = 0; row < W; row++)
    if (!(row & STEP)) exchange<STEP>(rows[row], rows[row + STEP], std::make_index_sequence<W>());
  if constexpr (STEP * 2 < W) transpose<STEP * 2>(rows);
}

// Keys -> [width / PER_ELEMENT][KEYS] elements, as far as rows.end, zeros beyond the width.
template <class M>
void pack_keys(const Rows<typename M::Stored>& rows, int width, uint32_t* out) {
  constexpr int STEP = W * M::PER_ELEMENT;
  for (int key = 0; key < rows.end; key += W) {
    for (int d = 0; d < width; d += STEP) {
      vu block[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) block[i] = M::read(rows.keys[key + i] + d, width - d);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) write(out + (d / M::PER_ELEMENT + i) * KEYS + key, block[i]);
    }
  }
}

// Values -> [KEYS / PER_ELEMENT][columns] elements, as far as rows.end, zeros beyond the width.
template <class M>
void pack_values(const Rows<typename M::Stored>& rows, int width, int columns, uint32_t* out) {
  constexpr int STEP = W * M::PER_ELEMENT;
  for (int key = 0; key < rows.end; key += M::PER_ELEMENT, out += columns) {
    const typename M::Stored* const* from = rows.values + key;
    for (int d = 0; d < width; d += STEP) M::weave(from, d, width - d, out + d);
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
  if constexpr (VECTORS > 1) multiply_vectors<M, ROWS, VECTORS - 1>(p, vector, end);
}

// For `rows` <= BLOCK_ROWS rows and `vectors` vectors of columns.
template <class M, int ROWS = BLOCK_ROWS>
void multiply(const Product& p, int rows, int vectors) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply<M, ROWS - 1>(p, rows, vectors);
  multiply_vectors<M, ROWS>(p, 0, vectors);
}

// -- softmax ----------------------------------------------------------------------------------------------------------

struct Range {  // of keys in a tile
  int begin, end;
};

struct Scoring {
  float scale;
  float softcap;  // 0: none

  vf operator()(vf products) const {
    vf scores = products * splat(scale);
    return softcap > 0 ? splat(softcap) * tanh(scores * splat(1 / softcap)) : scores;
  }
};

// e^x for x <= 0, to within 2 units in the last place; at least 1e-38. NaN for NaN.
inline vf exp_negative(vf x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  vf shifted = fma(x, splat(1.44269504f), shift);
  vf whole = shifted - shift;
  vf r = fma(whole, splat(-1.42860677e-6f), fma(whole, splat(-0.693145752f), x));
  constexpr float taylor[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  vf p = splat(1.0f / 720);
  for (float term : taylor) p = fma(p, r, splat(term));
  return p * (vf)(((vi)shifted - (0x4b400000 - 127)) << 23);
}

// Which lanes of vector `v` lie in the range: all bits set, or none.
inline vi inside(Range seen, int v) {
  alignas(64) static constexpr auto numbers = [] {
    std::array<int32_t, KEYS> all{};
    for (int key = 0; key < KEYS; key++) all[key] = key;
    return all;
  }();
  const vi key = read<vi>(&numbers[v * W]);
  return (key >= seen.begin) & (key < seen.end);
}

template <int STEP, size_t... LANE>
inline vf swapped(vf x, std::index_sequence<LANE...>) {
  return (vf)GLLM_SHUFFLE((vu)x, (vu)x, (LANE ^ STEP)...);
}

// All lanes together, by halves; every lane gets the result.
template <int STEP = W / 2, class Function>
inline vf fold(vf x, Function function) {
  x = function(x, swapped<STEP>(x, std::make_index_sequence<W>()));
  if constexpr (STEP > 1) return fold<STEP / 2>(x, function);
  return x;
}

// From products of a row with `vectors` vectors of keys to their weights, the largest score and the sum of the weights.
template <class M>
void softmax(float* products, Range seen, int vectors, Scoring scoring, typename M::Weight* weights, float& top, float& sum) {
  vf highest = splat(-INFINITY), total{};
  for (int v = 0; v < vectors; v++) {
    vf scores = inside(seen, v) ? scoring(load(products + v * W)) : splat(-INFINITY);
    store(products + v * W, scores);
    highest = max(highest, scores);
  }
  highest = fold(highest, max);
  for (int v = 0; v < vectors; v++) {
    vf found = exp_negative(load(products + v * W) - highest);
    total += M::keep(weights + v * W, inside(seen, v) ? found : vf{});
  }
  top = highest[0];
  sum = fold(total, [](vf x, vf y) { return x + y; })[0];
}

// -- merging ----------------------------------------------------------------------------------------------------------

// Results of some rows over some tiles: out [rows][columns] times `sum`, relative to the largest score, `top`.
struct Result {
  float* out;
  float* top;
  float* sum;  // 0: the row sees nothing of the tiles
  int columns;

  Result from(int row) const { return {out + row * columns, top + row, sum + row, columns}; }

  static int64_t floats(int rows, int columns) { return static_cast<int64_t>(rows) * (columns + 2); }
  static Result in(float* memory, int rows, int columns) {
    return {memory, memory + rows * columns, memory + rows * (columns + 1), columns};
  }
  void clear(int rows) const {
    std::fill_n(out, rows * columns, 0.0f);
    std::fill_n(top, rows, -INFINITY);
    std::fill_n(sum, rows, 0.0f);
  }

  // `more`, of the tile that comes next, joins the first `rows` rows.
  void merge(Result more, int rows) const {
    for (int row = 0; row < rows; row++)
      if (more.sum[row] != 0) from(row).merge_row(more.from(row));
  }

 private:
  void merge_row(Result more) const {
    const bool higher = *more.top > *top;
    const vf factor = exp_negative(splat(higher ? *top - *more.top : *more.top - *top));
    const vf keep = higher ? factor : splat(1.0f), add = higher ? splat(1.0f) : factor;
    if (higher) *top = *more.top;
    *sum = fma(splat(*more.sum), add, splat(*sum) * keep)[0];
    for (int at = 0; at < columns; at += W) store(out + at, fma(load(more.out + at), add, load(out + at) * keep));
  }
};

}  // namespace
}  // namespace gllm
