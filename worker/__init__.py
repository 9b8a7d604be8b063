"""The service between Redis and the engine: asyncio, text, metrics. No tensors."""
