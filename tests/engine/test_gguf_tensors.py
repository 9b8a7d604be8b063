"""GGUF tensors of every type against the gguf package's own dequantisation, mixed in one file; what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor

from engine.errors import ModelError
from engine.gguf import GgufSource
from engine.gguf_head import read_head
from engine.gguf_tensors import PIECE, GgufTensors
from engine.weights import Loader, open_checkpoint
from tests.engine import models
from tests.engine.gguf_files import interleave, settings_of, tensors_of, write_gguf

Kind = GGMLQuantizationType
WRITABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
OTHERS = [Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ2_XXS, Kind.TQ1_0]  # what more the package reads
NO_FLOATS = [Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.F64, Kind.Q8_K]
COLUMNS = 512
ROWS = PIECE // COLUMNS * 2 + 5  # three pieces, the last one short


def stored(kind: GGMLQuantizationType, rows: int, seed: int = 0, columns: int = COLUMNS) -> np.ndarray:
    """Rows of a type as a file has them, uint8; random blocks with finite scales where the package cannot write it."""
    generator = np.random.default_rng(seed)
    if kind in WRITABLE:
        values = generator.standard_normal((rows, columns), np.float32)
        return quantize(values, kind).view(np.uint8).reshape(rows, -1)
    block, size = GGML_QUANT_SIZES[kind]
    return generator.integers(0, 60, (rows, columns // block * size), dtype=np.uint8)


def write_raw(path: Path, tensors: dict[str, tuple[GGMLQuantizationType, np.ndarray]]) -> Path:
    writer = GGUFWriter(path, "llama")
    for name, (kind, raw) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_in(path: Path) -> GgufTensors:
    return GgufTensors(path, read_head(path)[1], 32)


def copied(path: Path, name: str, dtype: torch.dtype = torch.float32, rows: Tensor | None = None) -> Tensor:
    found = tensors_in(path)
    target = torch.full(found.shape(name), torch.nan, dtype=dtype)
    found.copy(name, target, rows)
    return target


@pytest.mark.parametrize("kind", [*WRITABLE, *K_QUANTS, *OTHERS], ids=lambda kind: kind.name)
def test_a_type_is_read_as_the_gguf_package_reads_it(tmp_path, kind):
    raw = stored(kind, ROWS)
    path = write_raw(tmp_path / "one.gguf", {"a": (kind, raw)})
    expected = torch.from_numpy(dequantize(raw, kind).copy()).view(ROWS, COLUMNS)
    assert torch.equal(copied(path, "a"), expected)
    assert torch.equal(copied(path, "a", torch.bfloat16), expected.bfloat16())
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(copied(path, "a", rows=order)[order], expected)


def test_types_may_be_mixed_in_one_file(tmp_path):
    kinds = [*WRITABLE, *K_QUANTS, *OTHERS]
    raws = {f"t{number}": (kind, stored(kind, number + 1, number)) for number, kind in enumerate(kinds)}
    path = write_raw(tmp_path / "mixed.gguf", raws)
    for name, (kind, raw) in raws.items():
        assert np.array_equal(copied(path, name).numpy(), dequantize(raw, kind).reshape(-1, COLUMNS)), kind.name


def test_a_row_longer_than_a_piece_and_a_vector_are_read_whole(tmp_path):
    values = np.random.default_rng(3).standard_normal((2, PIECE + 64), np.float32)
    raws = {"long": (Kind.F32, values), "vector": (Kind.F32, values[0])}
    path = write_raw(tmp_path / "long.gguf", raws)
    assert np.array_equal(copied(path, "long").numpy(), values)
    assert np.array_equal(copied(path, "vector").numpy(), values[0])


def test_only_llamas_query_and_key_rows_are_reordered(tmp_path):
    """Converters store them for interleaved rope in this family alone; any other tensor comes as it is."""
    for kind in ("llama", "qwen2", "qwen3"):
        model = models.build(kind)
        path = write_gguf(tmp_path / f"{kind}.gguf", settings_of(model), tensors_of(model), architecture=kind)
        source = GgufSource(path)
        for name, parameter in model.named_parameters():
            assert torch.equal(source.read(name), parameter), name
    weight = models.build("llama").state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert not np.array_equal(interleave(weight, 4), weight), "the test's files would show nothing"


# -- refusals ---------------------------------------------------------------------------------------------------------


def refuse(path: Path, *parts: str) -> None:
    with pytest.raises(ModelError) as error:
        tensors_in(path)
    for part in (str(path), *parts):
        assert part in str(error.value)


@pytest.mark.parametrize("kind", NO_FLOATS, ids=lambda kind: kind.name)
def test_a_type_that_is_no_weight_is_refused_by_tensor_and_type(tmp_path, kind):
    _, size = GGML_QUANT_SIZES[kind]
    refuse(write_raw(tmp_path / "m.gguf", {"a": (kind, np.zeros((1, size), np.uint8))}), "tensor a", kind.name)


def patched(path: Path, old: bytes, new: bytes) -> Path:
    """The file with bytes changed in its head; they must occur once there."""
    whole = path.read_bytes()
    assert whole.count(old) == 1
    path.write_bytes(whole.replace(old, new))
    return path


def described(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    """A tensor's entry in the head."""
    numbers = b"".join(size.to_bytes(8, "little") for size in shape)
    text = len(name).to_bytes(8, "little") + name.encode() + len(shape).to_bytes(4, "little")
    return text + numbers + kind.to_bytes(4, "little") + offset.to_bytes(8, "little")


@pytest.fixture
def two(tmp_path) -> Path:
    """Two matrices of 4 x 32 in float32, 512 bytes each."""
    values = np.arange(128, dtype=np.float32).reshape(4, 32)
    return write_raw(tmp_path / "two.gguf", {"aa": (Kind.F32, values), "bb": (Kind.F32, values)})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("bb", [32, 4], 5, 512), "5 is not a valid"),
        (("bb", [32, 4], 99, 512), "99 is not a valid"),
        (("bb", [32, 4], 0, 0), "aa and bb lie over each other"),
        (("bb", [32, 4], 0, 480), "aa and bb lie over each other"),
        (("bb", [32, 4], 0, 500), "aligned to 32"),
        (("bb", [32, 4], 0, 1024), "lies at byte"),
        (("bb", [32, 4], 0, 2**63), "lies at byte"),
        (("bb", [32, 40], 0, 512), "lies at byte"),
        (("bb", [2**40, 2**40], 0, 512), "lies at byte"),
        (("bb", [32, 2], 0, 512), "bytes follow the last tensor"),
        (("bb", [0, 4], 0, 512), "has shape [4, 0]"),
        (("bb", [4, 32], 2, 512), "Q4_0 with its blocks of 32"),
        (("aa", [32, 4], 0, 512), "aa"),
    ],
    ids=str,
)
def test_a_tensor_that_is_not_where_or_what_it_may_be_is_refused(two, entry, message):
    if entry[0] == "aa":
        patched(two, described("bb", [32, 4], 0, 512), described(*entry))
        with pytest.raises(ModelError, match="two tensors have the same name"):
            GgufSource(two)
        return
    refuse(patched(two, described("bb", [32, 4], 0, 512), described(*entry)), message)


def test_bytes_behind_the_last_tensor_are_refused_but_for_padding(two):
    whole = two.read_bytes()
    two.write_bytes(whole + bytes(31))
    assert tensors_in(two).shape("bb") == [4, 32]
    two.write_bytes(whole + bytes(32))
    refuse(two, "32 bytes follow the last tensor")


def test_a_key_that_stands_twice_is_refused(tmp_path):
    model = models.build("llama")
    path = write_gguf(tmp_path / "m.gguf", settings_of(model) | {"llama.block_counx": 2}, tensors_of(model))
    patched(path, b"llama.block_counx", b"llama.block_count")
    with pytest.raises(ModelError, match=r"llama\.block_count stands in it twice"):
        GgufSource(path)


@pytest.mark.parametrize("count", [2, 3])
def test_one_part_of_a_split_file_is_refused_by_that_name(tmp_path, count):
    model = models.build("llama")
    settings = settings_of(model) | {"split.no": 0, "split.count": count, "split.tensors.count": 21}
    path = write_gguf(tmp_path / f"m-00001-of-{count:05d}.gguf", settings, tensors_of(model))
    with pytest.raises(ModelError, match=rf"one of {count} parts \(split\.count\)"):
        GgufSource(path)


def test_a_scale_that_is_no_number_is_refused_by_tensor(tmp_path):
    model = models.build("llama", hidden_size=64, intermediate_size=128)
    path = write_gguf(tmp_path / "m.gguf", settings_of(model), tensors_of(model), kind=Kind.Q8_0)
    whole, info = bytearray(path.read_bytes()), next(i for i in read_head(path)[1] if i.name == "blk.1.ffn_up.weight")
    whole[info.offset : info.offset + 2] = np.float16("nan").tobytes()
    path.write_bytes(whole)
    with open_checkpoint(str(path)) as (config, source, _):
        loader = Loader(source, torch.bfloat16, torch.device("cpu"))
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has numbers that are NaN"):
            loader.tensor("model.layers.1.mlp.up_proj.weight", config.intermediate_size, config.hidden_size)
