"""Continuous batching on one device: tokens in, tokens out. No Redis, no asyncio, no text."""
