#include "attention.h"

#include "attention_tasks.h"

extern "C" void gllm_attention(int32_t half, const void* call) {
  const auto& attention = *static_cast<const gllm::Attention*>(call);
  half ? gllm::attention<gllm::Bfloat16Keys>(attention) : gllm::attend_float32(attention);
}
