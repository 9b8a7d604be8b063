#include "attention.h"

#include <cstdlib>

#include "dtypes.h"

extern "C" void gllm_attention(int32_t half, const void* call) {
  using namespace gllm;
  const auto& attention = *static_cast<const Attention*>(call);
  if constexpr (BFLOAT16)
    if (half) return attend_bfloat16(attention);
  if constexpr (FLOAT32)
    if (!half) return attend_float32(attention);
  abort();
}
