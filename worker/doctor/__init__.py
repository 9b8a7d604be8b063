"""What is wrong with a server or a queue, and what to do about it: one small function a question. Writes nothing."""
