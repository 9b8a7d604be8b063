// The dtypes that this library multiplies and attends in: all, or the one that kernels/cpu/build.py was asked for. A model
// needs one, and half of the compiler's time would go into the other.
#pragma once

namespace gllm {

#if defined(GLLM_ONLY_BFLOAT16)
constexpr bool BFLOAT16 = true, FLOAT32 = false;
#elif defined(GLLM_ONLY_FLOAT32)
constexpr bool BFLOAT16 = false, FLOAT32 = true;
#else
constexpr bool BFLOAT16 = true, FLOAT32 = true;
#endif

}  // namespace gllm
