"""Run in a child process under AddressSanitizer: `python sanitized.py LIBRARY`. No torch, no import of ours.

Every buffer has exactly the bytes that the kernel may touch, so that the first one beside it ends the process.
"""

import ctypes
import itertools
import sys

I32, I64, F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_float
COLUMNS = 32


ONE = 0x3F800000  # the bits of 1.0


def buffer(count: int, half: int, value: int = 0) -> ctypes.Array:
    """`count` numbers, 1.0 or 0.0, as bfloat16 or float32 in memory of exactly that size."""
    kind, one = (ctypes.c_uint16, 0x3F80) if half else (ctypes.c_uint32, ONE)
    return (kind * count)(*[one * value] * count)


def integers(values: list[int]) -> ctypes.Array:
    return (I64 * len(values))(*values)


def no_weights(inner: int, outputs: int, half: int) -> ctypes.Array:
    """Packed zeros."""
    return (ctypes.c_uint32 * (-(-outputs // COLUMNS) * -(-inner // (1 + half)) * COLUMNS))()


def linear(library: ctypes.CDLL, half: int) -> None:
    """Sums of ones: each output is `inner`, plus bias."""
    for inner, outputs, rows in itertools.product((1, 5, 66, 300), (1, 31, 33, 70), (1, 3, 15, 29, 260)):
        if inner > 66 and rows > 29:
            continue
        packed = no_weights(inner, outputs, half)
        library.gllm_pack(I32(half), buffer(outputs * inner, half, 1), I64(outputs), I64(inner), packed)
        x, y, one = buffer(rows * inner, half, 1), buffer(rows * outputs, half, 1), buffer(outputs, half, 1)
        library.gllm_linear(
            I32(half), x, I64(inner), I64(rows), packed, I64(inner), I64(outputs), one, y, I64(outputs), I32(0)
        )
        assert len(set(y)) == 1, (inner, outputs, rows)
        ids, found = integers([0, outputs - 1]), buffer(2 * inner, half)
        library.gllm_unpack_rows(I32(half), packed, I64(inner), ids, I64(2), found)
        assert list(found) == list(buffer(2 * inner, half, 1))


def rows_of_heads(library: ctypes.CDLL, half: int) -> None:
    for width, heads, tokens in itertools.product((2, 34, 80), (1, 3), (1, 5)):
        stride, size = (heads + 1) * width, tokens * heads * width
        x = buffer((tokens - 1) * stride + heads * width, half, 1)
        shape = [I64(tokens), I64(stride), I64(heads), I64(width)]
        y = buffer(size, half)
        library.gllm_rms_norm(I32(half), x, *shape, buffer(width, 0, 1), F32(1e-6), y)
        assert len(set(y)) == 1
        angles = buffer(tokens * width, 0, 1)
        library.gllm_rope(I32(half), x, *shape, angles, angles, y)
        assert len(set(y)) == 1


def gates(library: ctypes.CDLL, half: int) -> None:
    for width, rows, kind in itertools.product((1, 33, 100), (1, 7), (0, 1)):
        y = buffer(rows * width, half)
        library.gllm_gate(I32(half), I32(kind), buffer(2 * rows * width, half, 1), I64(rows), I64(width), y)
        assert len(set(y)) == 1


def cache(library: ctypes.CDLL, half: int) -> None:
    pool, heads, size, width = 3, 2, 4, 10
    kv = buffer(2 * pool * heads * size * width, half)
    places = integers([2, 0]), integers([3, 0])
    values = buffer(2 * 2 * heads * width, half, 1)
    library.gllm_store_kv(I32(half), kv, values, I64(2), *places, integers([pool, heads, size, width]))
    assert sum(1 for value in kv if value) == 2 * 2 * heads * width


class Attention(ctypes.Structure):
    """As attention.h declares it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv", "out", "tables", "counts", "lengths")),
        ("strides", I64 * 7),
        ("sizes", I32 * 6),
        ("scoring", F32 * 2),
    )


def address(memory: ctypes.Array) -> int:
    return ctypes.addressof(memory)


def attention(library: ctypes.CDLL, half: int) -> None:
    """Values of one: whatever the weights, their average is one.

    Sequences: a decode, a chunk, a whole prefill, and two decodes with a common beginning.
    """
    kv_heads, counts, lengths = 2, [1, 7, 40, 1, 1], [150, 130, 40, 400, 410]
    for width, group, size, window in ((8, 1, 16, 0), (65, 3, 1, 0), (80, 9, 24, 33), (33, 13, 300, 0)):
        blocks = [-(-length // size) for length in lengths]
        columns, pool = max(blocks), sum(blocks)
        tables, free = list[int](), list(range(pool))
        for count in blocks:
            tables += [free.pop() for _ in range(count)] + [-1] * (columns - count)
        common = 399 // size
        tables[4 * columns : 4 * columns + common] = tables[3 * columns : 3 * columns + common]
        heads, plane = kv_heads * group, pool * kv_heads * size * width
        q, out = buffer(sum(counts) * heads * width, half, 1), buffer(sum(counts) * heads * width, half)
        kv, table = buffer(2 * plane, half, 1), integers(tables)
        spans = (I32 * 5)(*counts), (I32 * 5)(*lengths)
        strides = heads * width, width, plane, kv_heads * size * width, size * width, width, columns
        call = Attention(address(q), address(kv), address(out), address(table), *map(address, spans))
        call.strides, call.sizes = strides, (5, kv_heads, group, width, size, window)
        call.scoring = (0.1, 0.0)
        library.gllm_attention(I32(half), ctypes.byref(call))
        assert list(out) == list(q), (width, group, size, window)


class Linear(ctypes.Structure):
    """As layers.cpp declares it."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("sizes", I64 * 3))


class Layer(ctypes.Structure):
    """As layers.cpp declares it."""

    _fields_ = (
        ("norms", ctypes.c_void_p * 6),
        ("linears", Linear * 4),
        ("kv", ctypes.c_void_p),
        ("numbers", I32 * 2),
    )


class Step(ctypes.Structure):
    """As layers.cpp declares it."""

    _fields_ = (
        ("pointers", ctypes.c_void_p * 4),
        ("angles", ctypes.c_void_p * 8),
        ("tokens", I64),
        ("scaling", F32 * 2),
        ("switches", I32 * 3),
        ("attention", Attention),
    )


HIDDEN, INNER, KV_HEADS, POOL, SIZE, TOKENS = 19, 33, 2, 3, 2, 4


def layer_of(half: int, width: int, heads: int, joint: int, keep: list[ctypes.Array]) -> Layer:
    """Norms and biases of one, weights of zero, an empty cache."""

    def put(memory: ctypes.Array) -> int:
        keep.append(memory)
        return address(memory)

    layer, queries, keys = Layer(), heads * width, KV_HEADS * width
    norms = HIDDEN, *((queries, keys) if joint else (width, width)), HIDDEN, HIDDEN, HIDDEN
    layer.norms = tuple(put(buffer(size, 0, 1)) for size in norms)
    shapes = (HIDDEN, queries + 2 * keys), (queries, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN)
    for part, (inner, outputs) in zip(layer.linears, shapes, strict=True):
        part.weight, part.bias = put(no_weights(inner, outputs, half)), put(buffer(outputs, half, 1))
        part.sizes = inner, outputs, half
    layer.kv = put(buffer(2 * POOL * SIZE * keys, half))
    return layer


def attention_within(width: int, group: int, table: ctypes.Array, spans: tuple[ctypes.Array, ...]) -> Attention:
    """What attention is asked in every layer, on caches as `layer_of` makes them."""
    call, head = Attention(None, None, None, *map(address, (table, *spans))), SIZE * width
    call.strides = KV_HEADS * group * width, width, POOL * KV_HEADS * head, KV_HEADS * head, head, width, 2
    call.sizes, call.scoring = (2, KV_HEADS, group, width, SIZE, 0), (0.1, 0.0)
    return call


def layers(library: ctypes.CDLL, half: int) -> None:
    """A decode and a prefill. Keys and values are one; hidden states grow by the multiplier twice a layer: to three."""
    for width, group, joint in ((6, 1, 0), (10, 3, 1)):
        keep, heads = list[ctypes.Array](), KV_HEADS * group
        stack = (Layer * 2)(*(layer_of(half, width, heads, joint, keep) for _ in range(2)))
        row = 2 * heads * width + 2 * HIDDEN + max((heads + 2 * KV_HEADS) * width, 2 * INNER) + INNER
        hidden, memory = buffer(TOKENS * HIDDEN, half, 1), buffer(TOKENS * row, half)
        places, table = (integers([0, 1, 1, 2]), integers([1, 0, 1, 0])), integers([0, -1, 1, 2])
        cos, sin, spans = buffer(TOKENS * width, 0, 1), buffer(TOKENS * width, 0), ((I32 * 2)(1, 3), (I32 * 2)(2, 3))
        step = Step(tuple(map(address, (hidden, memory, *places))), tokens=TOKENS)
        step.angles[0], step.angles[4] = address(cos), address(sin)
        step.scaling, step.switches = (0.0, 0.5), (half, joint, joint)
        step.attention = attention_within(width, group, table, spans)
        library.gllm_layers(ctypes.byref(step), stack, I64(2))
        assert set(hidden) == {0x4040 if half else 0x40400000}
        caches = [memory for memory in keep if address(memory) in (stack[0].kv, stack[1].kv)]
        assert [sum(map(bool, kv)) for kv in caches] == [TOKENS * 2 * KV_HEADS * width] * 2


def best(library: ctypes.CDLL, half: int) -> None:
    """The largest of each row stands at its end. Logits are float32, whatever the rows are."""
    for rows, columns in itertools.product((1, 3), (1, 31, 64, 65, 300)):
        x, maxima, ids = buffer(rows * columns, 0), buffer(rows * -(-columns // 64), 0), integers([0] * rows)
        for row in range(rows):
            x[(row + 1) * columns - 1] = ONE
        library.gllm_best(x, I64(columns), I64(rows), I64(columns), maxima, ids)
        assert list(ids) == [columns - 1] * rows
        assert sum(maxima) == rows * ONE


def main(path: str) -> None:
    library = ctypes.CDLL(path)
    for threads in (1, 3):
        library.gllm_set_threads(I32(threads))
        for case, half in itertools.product((linear, rows_of_heads, gates, cache, attention, layers, best), (0, 1)):
            case(library, half)
    print("clean")


if __name__ == "__main__":
    main(sys.argv[1])
