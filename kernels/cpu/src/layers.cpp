// A stack of decoder layers in one call: what the separate functions compute, bit for bit, with no caller between them.
#include <algorithm>
#include <utility>

#include "attention.h"
#include "pool.h"
#include "rows.h"

extern "C" void gllm_linear(int32_t format, const void* x, int64_t x_stride, int64_t rows, const void* weight,
                            int64_t inner, int64_t outputs, const void* bias, void* y, int64_t y_stride,
                            int32_t widened);
extern "C" void gllm_rms_norm(int32_t half, const void* x, int64_t tokens, int64_t stride, int64_t heads, int64_t width,
                              const float* weight, float eps, void* y);
extern "C" void gllm_gate(int32_t half, int32_t with_gelu, const void* gate_up, int64_t rows, int64_t width, void* y);

namespace gllm {
namespace {

// The structures are as kernels/cpu/layers.py lays them out.
struct Linear {
  const void* weight;
  const void* bias;
  int64_t inner, outputs;
  int64_t format;
};

struct Layer {
  const float *input_norm, *q_norm, *k_norm, *attended_norm, *mlp_norm, *gated_norm;  // null: none
  Linear qkv, output, gate_up, down;
  void* kv;
  int32_t window;  // 0: none
  int32_t rope;    // which of the step's; -1: none
};

constexpr int ROPES = 4;

struct Step {
  void* hidden;  // [tokens][qkv.inner], in and out
  void* memory;  // for what lies between, as the caller has counted
  const int64_t *blocks, *offsets;
  const float *cos[ROPES], *sin[ROPES];
  int64_t tokens;
  float eps, multiplier;  // of norms; of what is added to hidden states
  int32_t half, gelu;
  int32_t joint;  // a token's query heads are normalised together, and its key heads; else each
  Attention attention;
};

template <class T>
class Run {
 public:
  Run(const Step& step, const Layer& first)
      : step_(step), tokens_(step.tokens), width_(first.qkv.inner), hidden_(static_cast<T*>(step.hidden)) {
    T* free = static_cast<T*>(step.memory);
    auto take = [&](int64_t count, int64_t width) { return std::exchange(free, free + count * width); };
    const int64_t group = std::min(tokens_, GROUP_TOKENS);
    queries_ = take(tokens_, first.output.inner);
    attended_ = take(tokens_, first.output.inner);
    normed_ = take(group, width_);
    more_ = take(group, width_);
    wide_ = take(group, std::max(first.qkv.outputs, first.gate_up.outputs));
    gated_ = take(group, first.down.inner);
  }

  void layer(const Layer& layer) {
    for_groups([&](int64_t first, int64_t count) {
      multiply(layer.qkv, norm(hidden_ + first * width_, count, layer.input_norm, normed_), count, wide_);
      turn_and_store(layer, first, count);
    });
    attend(layer);
    for_groups([&](int64_t first, int64_t count) {
      T* hidden = hidden_ + first * width_;
      add(layer.output, attended_ + first * layer.output.inner, count, layer.attended_norm, hidden);
      multiply(layer.gate_up, norm(hidden, count, layer.mlp_norm, normed_), count, wide_);
      gllm_gate(step_.half, step_.gelu, wide_, count, layer.down.inner, gated_);
      add(layer.down, gated_, count, layer.gated_norm, hidden);
    });
  }

 private:
  // work(first, count) for tokens that are few enough for all that is made of them to stay in the last cache.
  template <class Work>
  void for_groups(Work&& work) const {
    const int64_t groups = divide_up(tokens_, GROUP_TOKENS), most = divide_up(tokens_, groups);
    for (int64_t first = 0; first < tokens_; first += most) work(first, std::min(most, tokens_ - first));
  }

  void multiply(const Linear& linear, const T* x, int64_t count, T* y) {
    gllm_linear(static_cast<int32_t>(linear.format), x, linear.inner, count, linear.weight, linear.inner,
                linear.outputs, linear.bias, y, linear.outputs, 0);
  }

  T* norm(T* x, int64_t count, const float* weight, T* y) {
    if (!weight) return x;
    gllm_rms_norm(step_.half, x, count, width_, 1, width_, weight, step_.eps, y);
    return y;
  }

  // The product of x, normalised and scaled, joins the hidden states; rounded at each step of it.
  void add(const Linear& linear, const T* x, int64_t count, const float* weight, T* hidden) {
    multiply(linear, x, count, more_);
    T* all = norm(more_, count, weight, normed_);
    const vf factor = splat(step_.multiplier);
    for_tokens(count, [&](int64_t token) {
      T *to = hidden + token * width_, *more = all + token * width_;
      if (step_.multiplier != 1) map(more, width_, [factor](vf x) { return x * factor; }, more);
      map(to, width_, [](vf x, vf y) { return x + y; }, to, more);
    });
  }

  // Queries and keys, normalised and turned: queries to a place of their own, keys and values into the cache.
  void turn_and_store(const Layer& layer, int64_t first, int64_t count) {
    const Attention& a = step_.attention;
    const int64_t width = a.width, queries = a.kv_heads * a.group;
    for_tokens(count, [&](int64_t index) {
      T* from = wide_ + index * layer.qkv.outputs;
      const int64_t token = first + index;
      T* slot = static_cast<T*>(layer.kv) + step_.blocks[token] * a.kv_block + step_.offsets[token] * a.kv_key;
      norm_heads(from, queries, layer.q_norm);
      norm_heads(from + queries * width, a.kv_heads, layer.k_norm);
      for (int64_t head = 0; head < queries; head++, from += width)
        turn(layer, from, token, queries_ + (token * queries + head) * width);
      for (int64_t head = 0; head < a.kv_heads; head++, from += width)
        turn(layer, from, token, slot + head * a.kv_head);
      for (int64_t head = 0; head < a.kv_heads; head++, from += width)
        memcpy(slot + a.kv_values + head * a.kv_head, from, width * sizeof(T));
    });
  }

  void norm_heads(T* heads, int64_t count, const float* weight) const {
    if (!weight) return;
    const int64_t all = count * step_.attention.width, width = step_.joint ? all : step_.attention.width;
    for (T* row = heads; row < heads + all; row += width) rms_norm_row(row, weight, width, step_.eps, row);
  }

  void turn(const Layer& layer, const T* from, int64_t token, T* to) const {
    const int64_t width = step_.attention.width;
    if (layer.rope < 0)
      memcpy(to, from, width * sizeof(T));
    else
      rope_row(from, step_.cos[layer.rope] + token * width, step_.sin[layer.rope] + token * width, width, to);
  }

  void attend(const Layer& layer) {
    Attention call = step_.attention;
    call.q = queries_, call.kv = layer.kv, call.out = attended_, call.window = layer.window;
    gllm_attention(step_.half, &call);
  }

  template <class Work>
  void for_tokens(int64_t count, Work&& work) const {
    parallel_for(divide_up(count, TILE_TOKENS), [&](int64_t tile) {
      for (int64_t token = tile * TILE_TOKENS, end = std::min(count, token + TILE_TOKENS); token < end; token++)
        work(token);
    });
  }

  static constexpr int64_t GROUP_TOKENS = 280, TILE_TOKENS = 4;

  const Step& step_;
  const int64_t tokens_, width_;  // of hidden states
  T *hidden_, *queries_, *attended_, *normed_, *more_, *wide_, *gated_;
};

template <class T>
void run(const Step& step, const Layer* layers, int64_t count) {
  Run<T> run(step, layers[0]);
  for (int64_t number = 0; number < count; number++) run.layer(layers[number]);
}

}  // namespace
}  // namespace gllm

// `step` is a Step, `layers` [count] are Layers of equal shapes.
extern "C" void gllm_layers(const void* step, const void* layers, int64_t count) {
  using namespace gllm;
  const Step& asked = *static_cast<const Step*>(step);
  const Layer* stack = static_cast<const Layer*>(layers);
  asked.half ? run<bf16>(asked, stack, count) : run<float>(asked, stack, count);
}
