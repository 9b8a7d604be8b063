// Vectors of float32, as wide as the level's registers, on the compilers' vector extensions. A tail is computed with the
// same operations as the body, on a vector filled up with zeros: an element's bits never depend on where it stands.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace gllm {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};

inline vf splat(float x) { return x - vf{}; }
inline vu splat(uint32_t x) { return x - vu{}; }
inline vu bits(vf x) { return (vu)x; }
inline vf floats(vu x) { return (vf)x; }

// x * y + z, rounded once where the processor can; a level rounds always once or always twice.
inline vf fma(vf x, vf y, vf z) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, y, z);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(x, y, z);
#elif defined(__ARM_NEON)
  return vfmaq_f32(z, x, y);
#else
  return x * y + z;
#endif
}

inline vf max(vf x, vf y) { return x > y ? x : y; }  // y where one is NaN
inline vf min(vf x, vf y) { return x < y ? x : y; }

inline vf load(const float* from) {
  vf x;
  memcpy(&x, from, sizeof x);
  return x;
}

inline vf load(const bf16* from) {
  vh x;
  memcpy(&x, from, sizeof x);
  return floats(__builtin_convertvector(x, vu) << 16);
}

inline void store(float* to, vf x) { memcpy(to, &x, sizeof x); }

// To the nearest, ties to even, as torch rounds; NaN stays NaN. With AVX-512 BF16 what is below 1.2e-38 becomes zero, as
// it does in that level's products.
inline void store(bf16* to, vf x) {
#if defined(__AVX512BF16__)
  vh y = (vh)_mm512_cvtneps_pbh(x);
#else
  vu u = bits(x);
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  vh y = __builtin_convertvector(x == x ? rounded : splat(uint32_t{0x7fc0}), vh);
#endif
  memcpy(to, &y, sizeof y);
}

// The first `count` < W elements; the rest of the vector is zero.
template <class T>
inline vf load_part(const T* from, int64_t count) {
  T whole[W] = {};
  memcpy(whole, from, count * sizeof(T));
  return load(whole);
}

template <class T>
inline void store_part(T* to, vf x, int64_t count) {
  T whole[W];
  store(whole, x);
  memcpy(to, whole, count * sizeof(T));
}

// What is left of numbers that are stored as T.
template <class T>
inline vf rounded(vf x) {
  T stored[W];
  store(stored, x);
  return load(stored);
}

inline float value(float x) { return x; }
inline float value(bf16 x) {
  uint32_t u = uint32_t{x.bits} << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// For each i in [0, count): out[i] = function(x[i], ...), with vectors.
template <class Out, class Function, class... In>
inline void map(Out* out, int64_t count, Function&& function, const In*... x) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(out + i, function(load(x + i)...));
  if (i < count) store_part(out + i, function(load_part(x + i, count - i)...), count - i);
}

// e^x to within 2 units in the last place: x = n ln 2 + r, a polynomial in r (Taylor to r^7), times 2^n in two steps so
// that the ends come out right: inf above 88.73, 0 below -104, NaN for NaN.
inline vf exp(vf x) {
  x = x < splat(-104.0f) ? splat(-104.0f) : x;
  x = x > splat(89.0f) ? splat(89.0f) : x;
  const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  vf shifted = fma(x, splat(1.44269504f), shift);
  vi n = (vi)shifted - 0x4b400000;
  vf whole = shifted - shift;
  vf r = fma(whole, splat(-0.693145752f), x);
  r = fma(whole, splat(-1.42860677e-6f), r);
  constexpr float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  vf p = splat(1.0f / 5040);
  for (float term : taylor) p = fma(p, r, splat(term));
  vi half = n >> 1, rest = n - half;
  vi low = (half + 127) << 23, high = (rest + 127) << 23;
  return p * (vf)low * (vf)high;
}

inline vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

// Good to 1e-7 absolutely, which is what a cap on scores needs; not relatively, near 0.
inline vf tanh(vf x) { return splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp(x + x)); }

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

inline float sum(vf x) {
  return fold(x, [](vf one, vf other) { return one + other; })[0];
}

inline float largest(vf x) { return fold(x, max)[0]; }

}  // namespace gllm
