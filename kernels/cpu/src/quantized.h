// Weights in groups of 32 along the inner axis, each with a scale of its own: 8 bits (scale * (u - 128), GGML's Q8_0) or
// 4 bits (scale * (u - 8), Q4_0). Rows are rounded to 8 bits in the same groups, and a group's products added as whole
// numbers, exactly: only the sums over groups are floating-point, in one order.
#pragma once
#include "linear.h"

namespace gllm {

constexpr int GROUP = 32;

// 16-bit floats, finite, as float32: the exponent is moved by a product, which is right for subnormals too.
inline vf from_half(const char* from) {
  vh halves;
  memcpy(&halves, from, sizeof halves);
  vu u = __builtin_convertvector(halves, vu);
  vf size = floats((u & 0x7fff) << 13) * splat(5.192296858534828e33f);  // 2^112
  return floats(bits(size) | ((u & 0x8000) << 16));
}

// sum + the four products of bytes, u8 times s8, exactly.
inline vi add_bytes(vi sum, vu w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)splat(x));
#elif defined(__AVX512F__)
  const __m512i bytes = (__m512i)splat(x), even = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
  const vu low = w & 0x00ff00ffu, high = (w >> 8) & 0x00ff00ffu;
  sum += (vi)_mm512_madd_epi16((__m512i)low, even);
  return sum + (vi)_mm512_madd_epi16((__m512i)high, _mm512_srai_epi16(bytes, 8));
#elif defined(__AVX2__)
  const __m256i bytes = (__m256i)splat(x), even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
  const vu low = w & 0x00ff00ffu, high = (w >> 8) & 0x00ff00ffu;
  sum += (vi)_mm256_madd_epi16((__m256i)low, even);
  return sum + (vi)_mm256_madd_epi16((__m256i)high, _mm256_srai_epi16(bytes, 8));
#else
  for (int byte = 0; byte < 4; byte++) {
    const int32_t factor = static_cast<int8_t>(x >> (8 * byte));
    sum += (vi)((w >> (8 * byte)) & 0xff) * factor;
  }
  return sum;
#endif
}

// A row's group: 8 units of 4 bytes, then its scale, then offset * the sum of its bytes.
struct RowGroup {
  int8_t bytes[GROUP];
  float scale;
  int32_t correction;
};

// To 8 bits by the largest magnitude. What is not finite makes the scale NaN, and with it the row's outputs.
template <class T>
inline RowGroup round_group(const T* x, int64_t count, int offset) {
  RowGroup group{};
  float most = 0, wrong = 0;
  for (int64_t i = 0; i < count; i++) {
    const float v = value(x[i]), size = v < 0 ? -v : v;
    most = size > most ? size : most;
    wrong += v * 0.0f;
  }
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  int32_t sum = 0;
  for (int64_t i = 0; i < count && wrong == 0; i++) {
    const float shifted = value(x[i]) * inverse + 12582912.0f;  // the nearest whole number in the low bits
    int32_t whole;
    memcpy(&whole, &shifted, 4);
    whole -= 0x4b400000;
    group.bytes[i] = static_cast<int8_t>(whole > 127 ? 127 : whole < -127 ? -127 : whole);
    sum += group.bytes[i];
  }
  group.scale = most / 127.0f + wrong;
  group.correction = offset * sum;
  return group;
}

// A panel's group: its bytes unit by unit for all outputs (4 bits: units u and u + 4 in one byte), then its scales.
// Rows are bytes already, whatever they were: nothing here is compiled again for another kind of rows.
template <int BITS>
struct Groups {
  static constexpr int ELEMENTS = GROUP, OFFSET = BITS == 8 ? 128 : 8, UNITS = BITS;  // stored units of 4 bytes
  static constexpr int64_t SCALES = UNITS * 4 * COLUMNS, WEIGHT_BYTES = SCALES + 2 * COLUMNS;
  static constexpr int64_t ROW_BYTES = sizeof(RowGroup);
#if defined(__AVX512F__)
  static constexpr int ROWS = 6;
#elif defined(__AVX2__) || defined(__ARM_NEON)
  static constexpr int ROWS = 2;
#else
  static constexpr int ROWS = 1;
#endif

  template <int rows>
  static void add_steps(float* sums, const Piece& piece, bool first) {
    const char *w = piece.w, *x = piece.x, *ahead = piece.ahead;
    vf sum[rows][VECTORS];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) sum[row][v] = first ? vf{} : load(sums + row * COLUMNS + v * W);
    for (int64_t step = piece.steps; step; step--, w += WEIGHT_BYTES, x += piece.height * ROW_BYTES) {
      for (int64_t line = 0; line < piece.fetch; line += 64) __builtin_prefetch(ahead + line);
      ahead += piece.fetch;
      add_group<rows>(sum, w, x, piece.height);
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) store(sums + row * COLUMNS + v * W, sum[row][v]);
  }

 private:
  template <int rows>
  static inline void add_group(vf (&sum)[rows][VECTORS], const char* w, const char* x, int64_t height) {
    vi dots[rows][VECTORS];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) dots[row][v] = -(vi)splat(load_unit(x + (9 * height + row) * 4));
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) {
        const vu bytes = load_units(w + (unit * COLUMNS + v * W) * 4);
        const vu low = BITS == 8 ? bytes : bytes & 0x0f0f0f0fu, high = (bytes >> 4) & 0x0f0f0f0fu;
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
          dots[row][v] = add_bytes(dots[row][v], low, load_unit(x + (unit * height + row) * 4));
          if (BITS == 4) dots[row][v] = add_bytes(dots[row][v], high, load_unit(x + ((unit + 4) * height + row) * 4));
        }
      }
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) {
      const vf scale = from_half(w + SCALES + v * W * 2);
#pragma GCC unroll 16
      for (int row = 0; row < rows; row++) {
        const vf own = floats(splat(load_unit(x + (8 * height + row) * 4)));
        sum[row][v] = fma(__builtin_convertvector(dots[row][v], vf), scale * own, sum[row][v]);
      }
    }
  }
};

template <class Element, int BITS>
struct Quantized : Groups<BITS> {
  // In a block: for each group, units [8][height], scales [height], corrections [height].
  static void pack_block(const Element* x, int64_t stride, int64_t rows, int64_t inner, char* block, int64_t height) {
    for (int64_t row = 0; row < rows; row++) pack_row(x + row * stride, inner, block, row, height);
  }

  static void pack_row(const Element* row, int64_t inner, char* block, int64_t index, int64_t height) {
    for (int64_t first = 0; first < inner; first += GROUP, block += Quantized::ROW_BYTES * height) {
      const RowGroup group = round_group(row + first, inner - first < GROUP ? inner - first : GROUP, Quantized::OFFSET);
      for (int64_t part = 0; part < Quantized::ROW_BYTES / 4; part++)
        memcpy(block + (part * height + index) * 4, reinterpret_cast<const char*>(&group) + part * 4, 4);
    }
  }
};

}  // namespace gllm
