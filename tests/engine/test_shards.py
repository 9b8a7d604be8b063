"""Safetensors files one by one: where they may lie, what their heads may say, and which numbers they may hold."""

import json
import os
import struct
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import files_of, fingerprint
from engine.errors import ModelError
from engine.shards import SafetensorsSource
from engine.weights import Loader, open_checkpoint
from tests.engine.checkpoint_files import (
    INDEX,
    WEIGHTS,
    Q,
    assert_equals,
    change_config,
    change_index,
    change_tensors,
    oracle_of,
    shard,
)

NORM = "model.norm.weight"


def opened(directory: Path) -> None:
    with open_checkpoint(str(directory)) as (_, source, _):
        for name in source.names():
            source.read(name)


def refuse(directory: Path, *parts: str) -> None:
    """Opening and reading it is refused with a message that has all the parts."""
    with pytest.raises(ModelError) as error:
        opened(directory)
    for part in parts:
        assert part in str(error.value)


# -- where files lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_the_links_of_a_hub_cache_are_followed(llama, tmp_path, make_engine, sharded):
    """A snapshot is a folder of links to files named by their digest, outside of it."""
    oracle = oracle_of(llama)
    if sharded:
        shard(llama)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(llama.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:064x}", snapshot))
    assert_equals(make_engine(model=str(snapshot)), oracle)


def test_a_link_to_nothing_is_refused_by_name(llama):
    (llama / WEIGHTS).unlink()
    (llama / WEIGHTS).symlink_to(llama / "nowhere")
    refuse(llama, WEIGHTS, "no such file")


def test_a_pipe_in_place_of_weights_is_not_waited_for(llama):
    names = shard(llama)
    (llama / names[1]).unlink()
    os.mkfifo(llama / names[1])
    refuse(llama, names[1], "not a complete safetensors file")


def test_a_single_file_beside_an_index_is_not_read(llama, make_engine):
    oracle, whole = oracle_of(llama), load_file(llama / WEIGHTS)
    shard(llama)
    save_file({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, llama / WEIGHTS)
    assert_equals(make_engine(model=str(llama)), oracle)


@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "config.json", "weights\0.safetensors", "a" * 300, "~", "\\..\\x", "\ud800"]
)
def test_an_index_naming_what_is_no_weight_file_is_refused(llama, file):
    torch.save({Q: torch.zeros(32, 32)}, llama / "pytorch_model.bin")
    shard(llama)
    change_index(llama, **{Q: file})
    refuse(llama, str(llama))


@pytest.mark.parametrize("file", ["weights\0.safetensors", "a" * 300, "\ud800"])
def test_the_fingerprint_of_names_that_no_file_can_have_is_refused(llama, file):
    """A worker takes it before the engine reads anything."""
    shard(llama)
    change_index(llama, **{Q: file})
    with pytest.raises(ModelError, match="cannot be read"):
        fingerprint(files_of(llama))


def test_a_directory_of_pickles_is_refused(llama):
    torch.save(load_file(llama / WEIGHTS), llama / "pytorch_model.bin")
    (llama / WEIGHTS).unlink()
    refuse(llama, WEIGHTS, "no such file")


# -- two shards, one tensor -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
def test_a_tensor_in_two_shards_is_refused_by_both_names(llama, same):
    """Else it would depend on the order of reading which of the two a model gets."""
    placed = shard(llama)
    first, second = (load_file(llama / name) for name in placed[:2])
    name = sorted(first)[0]
    second[name] = first[name].clone() if same else first[name] + 1
    save_file(second, llama / placed[1])
    refuse(llama, placed[1], f"tensor {name} is in it, but the index does not place it here")


def test_a_tensor_that_no_index_names_is_refused(llama):
    placed = shard(llama)
    index = json.loads((llama / INDEX).read_text())
    del index["weight_map"][Q]
    (llama / INDEX).write_text(json.dumps(index))
    refuse(llama, next(name for name in placed if Q in load_file(llama / name)), f"tensor {Q}", "index")


# -- heads ------------------------------------------------------------------------------------------------------------


def write_head(path: Path, head: Any, data: bytes, size: int | None = None) -> None:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)


def entry(dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADS: dict[str, Any] = {
    "no JSON": b"\x80\x04\x95 a pickle",
    "a list": [],
    "a number": 7,
    "an empty text": b"",
    "no Unicode": b'{"\xff": 1}',
    "an entry that is no object": {"a": 1},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 16]}},
    "no dtype": {"a": {"shape": [2, 2], "data_offsets": [0, 16]}},
    "an unknown dtype": {"a": entry("F33")},
    "another's name of a dtype": {"a": entry("torch.float32")},
    "a dtype of another size": {"a": entry("F16")},
    "a shape of another size": {"a": entry(shape=[2, 3])},
    "a negative shape": {"a": entry(shape=[-2, -2])},
    "a shape beyond numbers": {"a": entry(shape=[2**62, 2**62])},
    "offsets backwards": {"a": entry(offsets=[16, 0])},
    "offsets beyond the file": {"a": entry(offsets=[16, 32])},
    "offsets beyond numbers": {"a": entry(offsets=[0, 2**70])},
    "one offset": {"a": entry(offsets=[0])},
    "two tensors over each other": {"a": entry(), "b": entry()},
    "two that share some bytes": {"a": entry(shape=[3], offsets=[0, 12]), "b": entry(shape=[3], offsets=[4, 16])},
    "a hole": {"a": entry(shape=[1], offsets=[0, 4]), "b": entry(shape=[2], offsets=[8, 16])},
    "bytes of nobody before": {"a": entry(shape=[3], offsets=[4, 16])},
    "bytes of nobody after": {"a": entry(shape=[3], offsets=[0, 12])},
    "metadata that is no text": {"__metadata__": {"format": 1}, "a": entry()},
    "no end": b'{"a":',
    "nesting without end": b"[" * 100_000,
}


@pytest.mark.parametrize("head", HEADS)
def test_a_wrong_head_is_refused_by_file(llama, head):
    write_head(llama / WEIGHTS, HEADS[head], bytes(16))
    refuse(llama, str(llama / WEIGHTS))


@pytest.mark.parametrize("size", [0, 1, 8, 2**31, 2**32, 2**60, 2**63, 2**64 - 1])
def test_a_wrong_length_of_the_head_costs_nothing(llama, size):
    began = time.process_time()
    write_head(llama / WEIGHTS, {"a": entry()}, bytes(16), size)
    refuse(llama, str(llama / WEIGHTS), "not a complete safetensors file")
    assert time.process_time() - began < 1


def test_data_that_is_not_aligned_is_read(tmp_path):
    """Nothing in the format's reader asks for alignment, and old files have none."""
    values = torch.randn(2, 2)
    text = json.dumps({"a": entry()})
    write_head(tmp_path / WEIGHTS, (text + " " * (3 + -len(text) % 8)).encode(), values.numpy().tobytes())
    with ExitStack() as stack:
        source, target = SafetensorsSource(tmp_path, stack), torch.empty(2, 2)
        source.copy("a", target)
    assert torch.equal(target, values)


# -- numbers ----------------------------------------------------------------------------------------------------------

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("served", FLOATS[:3], ids=str)
def test_each_float_type_is_loaded_into_each_as_torch_converts_it(tmp_path, stored, served):
    values = torch.randn(40, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(stored)
    parts = {"a": values[:13].contiguous(), "b": values[13:].contiguous(), "v": values[0].clone()}
    save_file(parts, tmp_path / WEIGHTS)
    with ExitStack() as stack:
        loader = Loader(SafetensorsSource(tmp_path, stack), served, torch.device("cpu"))
        stacked, vector = loader.stacked([("a", 13), ("b", 27)], 7), loader.tensor("v", 7)
        loader.close()
    assert stacked.dtype == vector.dtype == served
    assert torch.equal(stacked, values.to(served))
    assert torch.equal(vector, values[0].to(served))
    assert loader.bytes == 41 * 7 * served.itemsize


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e5m2, torch.complex64], ids=str)
def test_what_is_no_usual_float_is_refused_by_tensor_and_type(tmp_path, dtype):
    save_file({"a": torch.zeros(4).to(dtype)}, tmp_path / WEIGHTS)
    with ExitStack() as stack:
        loader = Loader(SafetensorsSource(tmp_path, stack), torch.float32, torch.device("cpu"))
        with pytest.raises(ModelError, match=rf"tensor a has dtype {dtype}"):
            loader.tensor("a", 4)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_tensor(llama, make_engine, number):
    tensor = load_file(llama / WEIGHTS)[Q]
    tensor[3, 5] = number
    change_tensors(llama, **{Q: tensor})
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .*q_proj.* NaN, or infinite in float32"):
        make_engine(model=str(llama))


def test_a_number_that_float16_does_not_hold_is_refused_there_only(llama, make_engine):
    norm = load_file(llama / WEIGHTS)[NORM]
    norm[0] = 70_000.0
    change_tensors(llama, **{NORM: norm})
    with pytest.raises(ModelError, match=rf"tensor {NORM} has numbers that are NaN, or infinite in float16"):
        make_engine(model=str(llama), dtype="float16")
    for dtype in ("bfloat16", "float32"):
        make_engine(model=str(llama), dtype=dtype)


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "hidden_size", "num_hidden_layers", "head_dim"])
def test_a_wrong_size_in_the_configuration_takes_no_memory(llama, make_engine, key):
    """Shapes are compared with those of the file before memory is asked for: this would be hundreds of gigabytes."""
    change_config(llama, **{key: 2**30})
    with pytest.raises(ModelError, match=r"shape \[|num_hidden_layers: at most|is missing"):
        make_engine(model=str(llama))
