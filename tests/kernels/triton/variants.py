"""Every variant of every kernel that launches can ask for, as the compiler wants to have it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from kernels.triton import decode, floors, heads, lottery, prefill, row, skinny, steps
from kernels.triton.backend import GATE_BLOCK, HEADS
from kernels.triton.sampling import CHUNK, WIDE
from kernels.triton.shapes import ONE, AttentionShape, Options, decode_tiles, prefill_tiles, row_warps, skinny_tiles
from kernels.triton.state import RECORDS, TOKENS

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
TARGETS = (80, 90, 100)
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Variant:
    """A kernel, its constants, and the `types` of its arguments; `aligned` ones and pointers are multiples of 16."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: Options
    aligned: frozenset[str]
    wide_loads: bool = False  # 128-bit loads are a must
    matrix_units: bool = False  # and on sm_90 its wide matrix products
    targets: tuple[int, ...] = TARGETS


STRIDES = frozenset((
    "q_token", "q_head", "block_stride", "head_stride", "key_stride", "out_token", "out_head",
))  # fmt: skip
ATTENTION = {
    "tables": "*i32", "rows": "*i32", "starts": "*i32", "lengths": "*i32", "splits": "*i32", "tile_starts": "*i32",
    "outs": "*fp32", "tops": "*fp32", "totals": "*fp32", "scale": "fp32", "factor": "fp32", "softcap": "fp32",
    "window": "i32", "count": "i32", "heads": "i32", "table_stride": "i32",
}  # fmt: skip
# (dtype, group, head size): what Llama, Qwen, Mistral, Phi and Gemma ask for
SHAPES = (
    ("bfloat16", 4, 128), ("bfloat16", 2, 128), ("bfloat16", 1, 96), ("bfloat16", 7, 64), ("bfloat16", 8, 256),
    ("float16", 4, 128), ("float32", 4, 128), ("float32", 2, 64),
)  # fmt: skip


def typed(kernel: Any, known: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    """Types of all arguments that are no constants; strides are int32."""
    return {name: known.get(name, "i32") for name in kernel.arg_names if name not in constants}


def attention() -> Iterator[Variant]:
    for (dtype, group, width), (windowed, capped) in product(SHAPES, product((False, True), repeat=2)):
        if (windowed or capped) and (dtype, group, width) not in (("bfloat16", 4, 128), ("bfloat16", 8, 256)):
            continue
        shape = AttentionShape(group, width, 16, SIZES[dtype])
        known = ATTENTION | dict.fromkeys(("q", "keys", "values", "out"), POINTERS[dtype])
        flags = {"windowed": windowed, "capped": capped, "most": 64, "group": group, "width": width, "block_size": 16}
        for kernel, (tiles, options), targets in (
            (decode.decode_splits, decode_tiles(shape), TARGETS),
            (prefill.prefill_splits, decode_tiles(shape), TARGETS),
            *((prefill.prefill_tiles, prefill_tiles(shape, target), (target,)) for target in TARGETS),
        ):
            constants = flags | tiles
            yield Variant(
                f"{kernel.__name__} {dtype} group {group} width {width}{' window' * windowed}{' softcap' * capped}",
                kernel, typed(kernel, known, constants), constants, options, STRIDES, wide_loads=True,
                matrix_units=kernel is prefill.prefill_tiles and dtype != "float32", targets=targets,
            )  # fmt: skip


def merging() -> Iterator[Variant]:
    for dtype, width in (("bfloat16", 128), ("float32", 96)):
        constants = {"width": width}
        kernel, options = decode.merge_splits, {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
        known = ATTENTION | {"out": POINTERS[dtype]}
        yield Variant(
            f"merge_splits {dtype} {width}", kernel, typed(kernel, known, constants), constants, options, STRIDES
        )


def rows() -> Iterator[Variant]:
    shapes = (
        ("bfloat16", 4096, "bfloat16"), ("float16", 1024, "float16"), ("bfloat16", 128, "float32"),
        ("bfloat16", 5120, "bfloat16"), ("float32", 2048, "float32"),
    )  # fmt: skip
    for dtype, width, weight in shapes:
        known = dict.fromkeys(("x", "y", "hidden", "more"), POINTERS[dtype])
        known |= {"weight": POINTERS[weight], "eps": "fp32"}
        constants, options = {"width": width}, {"num_warps": row_warps(width), "num_stages": 1}
        for kernel in (row.rms_norm, row.add_rms_norm):
            name = f"{kernel.__name__} {dtype} {width}"
            aligned = frozenset(("x_token", "x_head", "y_token", "y_head", "hidden_row", "more_row", "y_row"))
            yield Variant(
                name, kernel, typed(kernel, known, constants), constants, options, aligned, wide_loads=width > 512
            )
    for dtype, gelu in product(POINTERS, (False, True)):
        known, constants = dict.fromkeys(("gate_up", "y"), POINTERS[dtype]), {"block": GATE_BLOCK, "gelu": gelu}
        aligned, options = frozenset(("gate_up_row", "y_row", "inner")), {"num_warps": 4, "num_stages": 1}
        name = f"gate {dtype}{' gelu' * gelu}"
        yield Variant(name, row.gate, typed(row.gate, known, constants), constants, options, aligned, wide_loads=True)


def turning() -> Iterator[Variant]:
    names = ("qkv", "queries", "keys", "values", "q_norm", "k_norm")
    shapes = (("bfloat16", 32, 8, 128), ("bfloat16", 32, 32, 96), ("float32", 16, 8, 64))
    aligned = STRIDES | {"qkv_token", "turn_stride", "query_token"}
    for (dtype, count, kv_heads, width), normed in product(shapes, (False, True)):
        known = dict.fromkeys(names, POINTERS[dtype]) | dict.fromkeys(("cos", "sin"), "*fp32") | {"eps": "fp32"}
        known |= dict.fromkeys(("blocks", "offsets"), "*i64") | {"turns": "*i32"}
        constants = {"heads": count, "kv_heads": kv_heads, "width": width, "at_once": HEADS, "normed": normed,
                     "turned": True}  # fmt: skip
        kernel, options = heads.norm_rope_store, {"num_warps": 2, "num_stages": 1}
        name = f"norm_rope_store {dtype} {count} + {kv_heads} of {width}{' normed' * normed}"
        wide = width in (64, 128)  # halves of 48 bfloat16 are no multiple of 64 bytes
        yield Variant(name, kernel, typed(kernel, known, constants), constants, options, aligned, wide_loads=wide)


SAMPLING = {
    "logits": "*fp32", "values": "*fp32", "tokens": "*i32", "counters": "*i32", "floors": "*fp32", "rows": "*i32",
    "temperatures": "*fp32", "seeds": "*i64", "positions": "*i32", "totals": "*fp32", "winners": "*i32",
    "last_tokens": "*i32", "out": "*i32", "broken_out": "*i32", "top_ks": "*i32", "top_ps": "*fp64",
    "min_floors": "*fp32", "found": "*fp32",
}  # fmt: skip


def sampling() -> Iterator[Variant]:
    narrow = {"num_warps": 1, "num_stages": 1}
    chunks: dict[str, Any] = {"chunk": CHUNK, "padded": 64}
    kinds = (
        (lottery.chunk_best, {"chunk": CHUNK}, WIDE, True), (lottery.draw, chunks | {"filtered": False}, WIDE, True),
        (lottery.draw, chunks | {"filtered": True}, WIDE, True), (lottery.choose, {"padded": 64}, narrow, False),
        (floors.candidates, chunks, WIDE, True), (floors.find_floors, {"block": CHUNK, "padded": 64}, WIDE, True),
    )  # fmt: skip
    for kernel, constants, options, wide in kinds:
        filtered = " filtered" * constants.get("filtered", False)
        types, name = typed(kernel, SAMPLING, constants), f"{kernel.__name__}{filtered}"
        yield Variant(name, kernel, types, constants, options, frozenset(("logits_row", "vocab")), wide_loads=wide)


def preparing() -> Iterator[Variant]:
    pointers = (
        "memory", "records", "tables", "lengths", "last_tokens", "places", "rows", "starts", "ends", "entries", "sent",
        "splits", "tile_starts",
    )  # fmt: skip
    wide = ("ids", "positions", "blocks", "offsets", "token_rows")
    sized: dict[str, Any] = {"block_size": 16, "most": 256}
    kinds = (
        (steps.apply_differences, {"block": RECORDS}), (steps.advance, sized), (steps.open_entries, {"most": 256}),
        (steps.spread, sized | {"block": TOKENS}), (steps.lay_out, {"most": 256, "windowed": False}),
        (steps.lay_out, {"most": 256, "windowed": True}),
    )  # fmt: skip
    for kernel, constants in kinds:
        known = dict.fromkeys(pointers, "*i32") | dict.fromkeys(wide, "*i64")
        known |= {"count": "*i32"} if kernel is steps.apply_differences else {}
        types = typed(kernel, known, constants)
        name = f"{kernel.__name__}{' window' * constants.get('windowed', False)}"
        yield Variant(name, kernel, types, constants, ONE, frozenset())


def products() -> Iterator[Variant]:
    aligned = frozenset(("outputs", "x_row", "weight_row", "residual_row", "y_row"))
    kinds = ((True, False, False), (True, True, False), (False, False, True))  # normed, gated, added
    for (dtype, inner), flags in product((("bfloat16", 4096), ("bfloat16", 1000), ("float32", 1024)), kinds):
        known = dict.fromkeys(("x", "norm", "weight", "residual", "y"), POINTERS[dtype]) | {"eps": "fp32"}
        tiles, options = skinny_tiles(SIZES[dtype], gated=flags[1])
        constants = {"inner": inner, **dict(zip(("normed", "gated", "added"), flags, strict=True)), **tiles}
        name = f"skinny_linear {dtype} {inner} {flags}"
        types = typed(skinny.skinny_linear, known, constants)
        yield Variant(name, skinny.skinny_linear, types, constants, options, aligned, wide_loads=True)


def every_variant() -> list[Variant]:
    return [*attention(), *merging(), *rows(), *turning(), *sampling(), *preparing(), *products()]
