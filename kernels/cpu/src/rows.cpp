// Norms, rotary embedding, gates and the cache's writes: a row each, so no row knows of another.
#include "rows.h"

#include "pool.h"

namespace gllm {
namespace {

constexpr int64_t TILE_ELEMENTS = 16384;  // a tile of fewer elements costs more to hand out than to compute

// work(row) for each row of `width` elements, many rows to a tile.
template <class Work>
void for_rows(int64_t rows, int64_t width, Work&& work) {
  const int64_t some = width >= TILE_ELEMENTS ? 1 : TILE_ELEMENTS / (width ? width : 1);
  parallel_for((rows + some - 1) / some, [&](int64_t tile) {
    for (int64_t row = tile * some; row < rows && row < (tile + 1) * some; row++) work(row);
  });
}

// Rows of several heads per token: tokens `stride` elements apart, heads side by side.
template <class T>
struct Heads {
  const T* x;
  int64_t stride, heads, width;
  const T* row(int64_t index) const { return x + index / heads * stride + index % heads * width; }
};

template <class T>
void rms_norm(Heads<T> in, int64_t tokens, const float* weight, float eps, T* y) {
  for_rows(tokens * in.heads, in.width,
           [&](int64_t row) { rms_norm_row(in.row(row), weight, in.width, eps, y + row * in.width); });
}

template <class T>
void rope(Heads<T> in, int64_t tokens, const float* cos, const float* sin, T* y) {
  for_rows(tokens * in.heads, in.width, [&](int64_t row) {
    const int64_t angle = row / in.heads * in.width;
    rope_row(in.row(row), cos + angle, sin + angle, in.width, y + row * in.width);
  });
}

template <class T>
void gate(bool with_gelu, const T* gate_up, int64_t rows, int64_t width, T* y) {
  for_rows(rows, width, [&](int64_t row) {
    const T *gates = gate_up + row * 2 * width, *ups = gates + width;
    if (with_gelu)
      map(y + row * width, width, [](vf g, vf up) { return gelu(g) * up; }, gates, ups);
    else
      map(y + row * width, width, [](vf g, vf up) { return silu(g) * up; }, gates, ups);
  });
}

template <class T>
void store_kv(T* kv, const T* values, int64_t tokens, const int64_t* blocks, const int64_t* offsets,
              const int64_t* shape) {
  const int64_t pool = shape[0], heads = shape[1], block_size = shape[2], width = shape[3];
  for_rows(tokens * 2, heads * width, [&](int64_t row) {
    const int64_t token = row / 2, part = row % 2;
    for (int64_t head = 0; head < heads; head++) {
      T* to = kv + (((part * pool + blocks[token]) * heads + head) * block_size + offsets[token]) * width;
      memcpy(to, values + (row * heads + head) * width, width * sizeof(T));
    }
  });
}

template <class Work>
void of_type(int32_t half, Work&& work) {
  half ? work(bf16{}) : work(float{});
}

}  // namespace
}  // namespace gllm

using namespace gllm;

// x [tokens][heads][width], tokens `stride` elements apart, weight [width] float32 -> y, contiguous. x and y are bfloat16
// where `half`, else float32.
extern "C" void gllm_rms_norm(int32_t half, const void* x, int64_t tokens, int64_t stride, int64_t heads, int64_t width,
                              const float* weight, float eps, void* y) {
  of_type(half, [&]<class T>(T) {
    Heads<T> in{static_cast<const T*>(x), stride, heads, width};
    rms_norm(in, tokens, weight, eps, static_cast<T*>(y));
  });
}

// x as above, cos and sin [tokens][width] float32 -> y, contiguous.
extern "C" void gllm_rope(int32_t half, const void* x, int64_t tokens, int64_t stride, int64_t heads, int64_t width,
                          const float* cos, const float* sin, void* y) {
  of_type(half, [&]<class T>(T) {
    Heads<T> in{static_cast<const T*>(x), stride, heads, width};
    rope(in, tokens, cos, sin, static_cast<T*>(y));
  });
}

// gate_up [rows][2 * width] -> silu(gate) * up, or gelu(gate) * up, [rows][width].
extern "C" void gllm_gate(int32_t half, int32_t with_gelu, const void* gate_up, int64_t rows, int64_t width, void* y) {
  of_type(half, [&]<class T>(T) {
    gate(with_gelu, static_cast<const T*>(gate_up), rows, width, static_cast<T*>(y));
  });
}

// values [tokens][2][heads][width] -> kv [2][pool][heads][block_size][width] at (blocks[t], offsets[t]); `shape` holds
// pool, heads, block_size and width.
extern "C" void gllm_store_kv(int32_t half, void* kv, const void* values, int64_t tokens, const int64_t* blocks,
                              const int64_t* offsets, const int64_t* shape) {
  of_type(half, [&]<class T>(T) {
    store_kv(static_cast<T*>(kv), static_cast<const T*>(values), tokens, blocks, offsets, shape);
  });
}
