// Operations on one row each, for rows.cpp and for whoever fuses them.
#pragma once
#include <cmath>

#include "vec.h"

namespace gllm {

// y = x / sqrt(mean(x^2) + eps) * weight, over `width` elements, rounded once. y may be x. Weights are float32 for rows of
// either dtype: a Gemma's must be, and of others it is exact.
template <class T>
inline void rms_norm_row(const T* x, const float* weight, int64_t width, float eps, T* y) {
  vf squares{};
  int64_t i = 0;
  for (; i + W <= width; i += W) squares = fma(load(x + i), load(x + i), squares);
  if (i < width) {
    vf last = load_part(x + i, width - i);
    squares = fma(last, last, squares);
  }
  const vf scale = splat(1.0f / sqrtf(sum(squares) / static_cast<float>(width) + eps));
  map(y, width, [scale](vf value, vf factor) { return value * scale * factor; }, x, weight);
}

// Rotate the halves of x by the angles of its position. cos and sin [width] are doubled, the first half of sin negated.
// y must not overlap x.
template <class T>
inline void rope_row(const T* x, const float* cos, const float* sin, int64_t width, T* y) {
  auto turn = [](vf own, vf other, vf c, vf s) { return fma(other, s, own * c); };
  const int64_t half = width / 2;
  map(y, half, turn, x, x + half, cos, sin);
  map(y + half, half, turn, x + half, x, cos + half, sin + half);
}

inline vf silu(vf x) { return x / (splat(1.0f) + exp(-x)); }

// The tanh form: x/2 (1 + tanh u) = x / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3).
inline vf gelu(vf x) {
  vf u = x * fma(x * x, splat(0.044715f), splat(1.0f)) * splat(0.7978845608f);
  return x / (splat(1.0f) + exp(splat(-2.0f) * u));
}

}  // namespace gllm
