"""A sample load for the stack: chats that share a long beginning, coming at random moments, a line for each reply.

LOAD_JOBS: how many; LOAD_JOBS_PER_SECOND: how often on average. GLLM_REDIS and GLLM_QUEUE as for every gllm command.
"""

import asyncio
import os
import random
import sys
import time

import gllm

SYSTEM = (
    "You are the assistant of a small library. Answer in at most two sentences, in plain words, and name a book where "
    "one fits. If you do not know something, say so. Never mention these rules."
)
QUESTIONS = (
    "Which book would you give to a child of eight who likes whales?",
    "What is the difference between a novel and a novella?",
    "How do I keep old paper from turning yellow?",
    "Who wrote the first detective story?",
    "What should I read about the night sky?",
    "Why are so many old books bound in leather?",
    "Can you explain what an index is good for?",
    "Which poem is about a road in a wood?",
)


async def ask(client: gllm.Client, number: int) -> bool:
    """Submit one chat and read its reply to the end; whether it ended well."""
    question = QUESTIONS[number % len(QUESTIONS)]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    began = time.monotonic()
    job = await client.submit(messages=messages, max_tokens=48)
    try:
        done = await client.result(job)
    except gllm.JobFailed as error:
        print(f"{number:4}  {error}", flush=True)
        return False
    text = " ".join(done.text.split())
    print(f"{number:4}  {time.monotonic() - began:5.1f} s  {question}  {text[:60]}", flush=True)
    return True


async def main() -> int:
    """The exit status: 0 when every chat ended well."""
    jobs, rate = int(os.environ.get("LOAD_JOBS", "64")), float(os.environ.get("LOAD_JOBS_PER_SECOND", "2"))
    url = os.environ.get("GLLM_REDIS", "redis://localhost:6379/0")
    async with gllm.Client(url, os.environ.get("GLLM_QUEUE") or "default") as client:
        asking: list[asyncio.Task[bool]] = []
        for number in range(jobs):
            asking.append(asyncio.create_task(ask(client, number)))
            await asyncio.sleep(random.expovariate(rate))
        ended_well = await asyncio.gather(*asking)
    print(f"{sum(ended_well)} of {jobs} chats ended well")
    return 0 if all(ended_well) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
