"""How many KV blocks: as told, or as the memory that is really free allows."""

from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import DeviceError
from engine.modelconfig import ModelConfig

CPU_SHARE, CUDA_SHARE = 0.25, 0.9  # of free memory; a CPU's is shared with everything else on the machine
CPU_MOST_BYTES = 4 << 30


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * model.layers * model.kv_heads * block_size * model.head_dim * dtype.itemsize


def kv_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> int:
    """Usable blocks of the pool. Raises DeviceError naming the numbers when not even one block fits."""
    if config.kv_blocks is not None:
        return config.kv_blocks
    size = block_bytes(model, config.block_size, dtype)
    budget = config.kv_memory if config.kv_memory is not None else free_budget(device)
    blocks = min(budget // size, config.max_sequences * -(-max_model_len // config.block_size))
    if blocks < 1:
        raise DeviceError(f"kv_memory: {budget} bytes do not hold one KV block of {size} bytes")
    return blocks


def free_budget(device: torch.device) -> int:
    """Bytes that the pool may take of what is free on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return min(int(_available_bytes() * CPU_SHARE), CPU_MOST_BYTES)


def _available_bytes() -> int:
    """What the machine has available, and the control group still allows."""
    limits = [CPU_MOST_BYTES * 4]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        limits.append(int(text) - int(used.read_text()))
    return max(0, min(limits))
