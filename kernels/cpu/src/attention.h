// What attention is asked for.
#pragma once
#include <cstdint>

namespace gllm {

// As kernels/cpu/attention.py lays it out. Strides are in elements.
struct Attention {
  const void* q;
  const void* kv;
  void* out;
  const int64_t* tables;
  const int32_t *counts, *lengths;
  int64_t q_token, q_head;
  int64_t kv_values, kv_block, kv_head, kv_key;
  int64_t table_stride;
  int32_t sequences, kv_heads, group, width, block_size;
  int32_t window;  // 0: none
  float scale;
  float softcap;  // 0: none
};

void attend_bfloat16(const Attention& call);
void attend_float32(const Attention& call);

}  // namespace gllm

// `call` is an Attention. Bfloat16 where `half`, else float32.
extern "C" void gllm_attention(int32_t half, const void* call);
