"""A load for a queue: when jobs come, what they are, who reads the replies, and what it all took."""
