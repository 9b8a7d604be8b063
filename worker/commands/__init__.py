"""What stands behind `gllm <command>`. A module is imported when `gllm` starts, what it needs when its command runs."""
