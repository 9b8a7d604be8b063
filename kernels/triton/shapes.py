"""Which variant of a kernel serves which shape: tiles, warps and stages. Launches and the compile checks ask here.

The numbers are those to start from, chosen by resources and never timed on a card. Each is checked to compile without
spills within the shared memory of sm_80, sm_90 and sm_100. Those of attention decide bits: see `numerics`.
"""

from dataclasses import dataclass

SPLIT = 512  # keys: partial outputs stay below 3 % of the bytes, and 1,024 of context still make two programs a head
# Where keys lie is loaded too, which takes every second stage: so many keep two tiles in flight.
STAGES = 5
Options = dict[str, int | bool]
ONE: Options = {"num_warps": 4, "num_stages": 1}  # of kernels that prepare a step
Tiles = dict[str, int]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention kernels are compiled for. `width` is a head's, `itemsize` that of queries, keys and values."""

    group: int
    width: int
    block_size: int
    itemsize: int

    @property
    def padded(self) -> int:
        return power_of_two(self.width)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def decode_tiles(shape: AttentionShape) -> tuple[Tiles, Options]:
    """Of `decode_splits` and `prefill_splits`, which must be the same."""
    block_n = 16 if shape.itemsize == 4 else 32 if shape.padded > 128 else 64
    return {"block_n": block_n, "split": SPLIT}, attention_options(4)


def prefill_tiles(shape: AttentionShape, target: int) -> tuple[Tiles, Options]:
    """Of `prefill_tiles`. Wide matrix products (sm_90 on) take 128 rows with 8 warps: 4 spill, as do those of sm_80."""
    if shape.itemsize == 4:
        return {"block_m": 16, "block_n": 32}, attention_options(8)
    if shape.padded > 128:
        return {"block_m": 64, "block_n": 32}, attention_options(8)
    if target < 90:
        return {"block_m": 64, "block_n": 32}, attention_options(4)
    return {"block_m": 128, "block_n": 64 if shape.padded > 64 else 128}, attention_options(8)


def attention_options(warps: int) -> Options:
    """Without contraction: masked and unmasked tiles must round alike."""
    return {"num_warps": warps, "num_stages": STAGES, "enable_fp_fusion": False}


def row_warps(width: int) -> int:
    """Warps for a program that holds a whole row: 16 elements a thread."""
    return min(16, max(1, power_of_two(width) // 512))


def skinny_tiles(itemsize: int, *, gated: bool) -> tuple[Tiles, Options]:
    """Of `skinny_linear`: 4 KB or more of weights a stage and program, so that few programs keep the memory busy."""
    block_k = 256 if itemsize < 4 and not gated else 128
    return {"block_n": 16, "block_k": block_k}, {"num_warps": 4, "num_stages": 4}
