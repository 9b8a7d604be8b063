"""From logits to tokens, by concern: rows (state), adjust, filters, draw, logprobs. See engine.sampler."""
