// Attention in bfloat16, apart from float32's so that both are compiled side by side, or one of them only.
#include "attention_tasks.h"

void gllm::attend_bfloat16(const Attention& call) { attention<Bfloat16Keys>(call); }
