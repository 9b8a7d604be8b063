// Attention in float32, apart from bfloat16's so that both are compiled side by side.
#include "attention_tasks.h"

void gllm::attend_float32(const Attention& call) { attention<Float32Keys>(call); }
