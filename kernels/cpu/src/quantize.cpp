// From float32 weights to groups of 8 or 4 bits, by the rules of GGML's Q8_0 and Q4_0: what was read from such a file
// comes back as the same bits. And rows back to floats, for embeddings.
#include <cmath>

#include "pool.h"
#include "quantized.h"

namespace gllm {
namespace {

// The nearest 16-bit float, ties to even; too large ones become the largest.
uint16_t to_half(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000, size = u & 0x7fffffff;
  if (size >= 0x477fe000) return sign | 0x7bff;
  if (size >= 0x38800000) return sign | ((size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13);
  float shifted;
  memcpy(&shifted, &size, 4);
  shifted += 0.5f;  // its last bit is 2^-24, the smallest subnormal
  uint32_t v;
  memcpy(&v, &shifted, 4);
  return sign | (v - 0x3f000000);
}

float from_half_bits(uint16_t half) {
  char all[2 * W] = {};
  memcpy(all, &half, 2);
  return from_half(all)[0];
}

struct WeightGroup {
  uint8_t values[GROUP];  // with the offset added
  uint16_t scale;
};

WeightGroup round_weights(const float* x, int64_t count, int bits) {
  float most = 0;
  for (int64_t i = 0; i < count; i++)
    if ((x[i] < 0 ? -x[i] : x[i]) > (most < 0 ? -most : most)) most = x[i];
  const float step = bits == 8 ? (most < 0 ? -most : most) / 127.0f : most / -8.0f;
  const int offset = bits == 8 ? 128 : 8, top = bits == 8 ? 255 : 15;
  const float inverse = step != 0 ? 1.0f / step : 0.0f;
  WeightGroup group{};
  group.scale = to_half(step);
  for (int64_t i = 0; i < GROUP; i++) {
    const float shifted = (i < count ? x[i] * inverse : 0.0f) + (static_cast<float>(offset) + 0.5f);
    const int whole = static_cast<int>(floorf(shifted));
    group.values[i] = static_cast<uint8_t>(whole < 0 ? 0 : whole > top ? top : whole);
  }
  return group;
}

template <int BITS>
struct Layout {
  using Format = Quantized<float, BITS>;

  static char* group_of(char* packed, int64_t inner, int64_t output, int64_t group) {
    const int64_t groups = (inner + GROUP - 1) / GROUP;
    return packed + (output / COLUMNS * groups + group) * Format::WEIGHT_BYTES;
  }

  // Of element `i` of a group, for one column: its byte, and in 4 bits whether it is the upper half.
  static int64_t byte_of(int64_t column, int i) {
    const int unit = i / 4 % Format::UNITS;
    return (unit * COLUMNS + column) * 4 + i % 4;
  }

  static int shift_of(int i) { return BITS == 4 && i / 4 >= Format::UNITS ? 4 : 0; }

  static void put(char* to, int64_t column, const WeightGroup& group) {
    for (int i = 0; i < GROUP; i++) to[byte_of(column, i)] |= static_cast<char>(group.values[i] << shift_of(i));
    memcpy(to + Format::SCALES + 2 * column, &group.scale, 2);
  }

  static void pack(const float* weight, int64_t outputs, int64_t inner, char* packed) {
    parallel_for((outputs + COLUMNS - 1) / COLUMNS, [&](int64_t panel) {
      for (int64_t first = 0; first < inner; first += GROUP) {
        char* to = group_of(packed, inner, panel * COLUMNS, first / GROUP);
        memset(to, 0, Format::WEIGHT_BYTES);
        for (int64_t column = 0; column < COLUMNS && panel * COLUMNS + column < outputs; column++) {
          const float* from = weight + (panel * COLUMNS + column) * inner + first;
          put(to, column, round_weights(from, inner - first < GROUP ? inner - first : GROUP, BITS));
        }
      }
    });
  }

  template <class T>
  static void unpack_row(char* packed, int64_t inner, int64_t id, T* row) {
    for (int64_t at = 0; at < inner; at++) {
      const char* from = group_of(packed, inner, id, at / GROUP);
      const int i = at % GROUP, stored = static_cast<uint8_t>(from[byte_of(id % COLUMNS, i)]);
      const int value = ((stored >> shift_of(i)) & (BITS == 8 ? 255 : 15)) - Format::OFFSET;
      uint16_t scale;
      memcpy(&scale, from + Format::SCALES + 2 * (id % COLUMNS), 2);
      store_part(row + at, splat(from_half_bits(scale) * static_cast<float>(value)), 1);
    }
  }
};

template <class Work>
void of_bits(int32_t bits, Work&& work) {
  bits == 8 ? work(Layout<8>{}) : work(Layout<4>{});
}

}  // namespace
}  // namespace gllm

using namespace gllm;

// weight [outputs][inner] float32 -> packed, in `bits` bits: 34 or 18 bytes for 32 elements of an output.
extern "C" void gllm_quantize(int32_t bits, const float* weight, int64_t outputs, int64_t inner, void* packed) {
  of_bits(bits, [&](auto layout) { layout.pack(weight, outputs, inner, static_cast<char*>(packed)); });
}

// Rows ids [count] of a weight in `bits` bits -> rows [count][inner], bfloat16 where `half`, else float32.
extern "C" void gllm_quantized_rows(int32_t bits, int32_t half, void* packed, int64_t inner, const int64_t* ids,
                                    int64_t count, void* rows) {
  of_bits(bits, [&](auto layout) {
    parallel_for(count, [&](int64_t index) {
      if (half)
        layout.unpack_row(static_cast<char*>(packed), inner, ids[index], static_cast<bf16*>(rows) + index * inner);
      else
        layout.unpack_row(static_cast<char*>(packed), inner, ids[index], static_cast<float*>(rows) + index * inner);
    });
  });
}
