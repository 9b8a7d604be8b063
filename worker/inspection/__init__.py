"""Reading a queue as a person asks about it: `Inspector` and the structs that it returns. Never prints.

Gentle by design: a bounded number of commands and of bytes, however long the queue is; no KEYS, no walk over all jobs.
"""
