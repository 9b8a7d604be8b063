// From products of one row with a tile's keys to weights, and the merging of tiles.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>

#include "attention_products.h"

namespace gllm {
namespace {

// -- softmax ----------------------------------------------------------------------------------------------------------

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

// Lanes of vector `v` that the row does not see become `other`; WHOLE: it sees them all.
template <bool WHOLE>
inline vf masked(Range seen, int v, vf x, float other) {
  if constexpr (WHOLE) return x;
  return inside(seen, v) ? x : splat(other);
}

// From products of a row with `vectors` vectors of keys to their weights, the largest score and the sum of the weights.
template <class M, bool WHOLE>
void softmax(float* products, Range seen, int vectors, Scoring scoring, typename M::Weight* weights, float& top,
             float& sum) {
  vf highest = splat(-INFINITY), total{};
  for (int v = 0; v < vectors; v++) {
    vf scores = masked<WHOLE>(seen, v, scoring(load(products + v * W)), -INFINITY);
    store(products + v * W, scores);
    highest = max(highest, scores);
  }
  top = largest(highest);
  for (int v = 0; v < vectors; v++) {
    vf found = exp_negative(load(products + v * W) - splat(top));
    total += M::keep(weights + v * W, masked<WHOLE>(seen, v, found, 0.0f));
  }
  sum = gllm::sum(total);
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

  void copy(Result other, int rows) const {
    std::copy_n(other.out, rows * columns, out);
    std::copy_n(other.top, rows, top);
    std::copy_n(other.sum, rows, sum);
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
