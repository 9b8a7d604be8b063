// Attention in float32: see attention_bfloat16.cpp.
#include "attention_tasks.h"

void gllm::attend_float32(const Attention& call) { attention<Float32Keys>(call); }
