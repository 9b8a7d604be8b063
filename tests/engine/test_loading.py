"""Weights on disk: loaded exactly or refused, naming file and tensor. Nothing half-loaded is ever served."""

import pickle
import struct
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from tests.engine.checkpoint_files import (
    INDEX,
    WEIGHTS,
    K,
    Q,
    assert_equals,
    change_config,
    change_index,
    change_tensors,
    copy_checkpoint,
    oracle_of,
    shard,
)
from tests.engine.driving import request, run

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.fixture
def refuse(make_engine):
    """refuse(directory, *parts): loading is refused with a message that has all the parts."""

    def check(directory, *parts: str) -> None:
        with pytest.raises(ModelError) as error:
            make_engine(model=str(directory))
        for part in parts:
            assert part in str(error.value)

    return check


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, NORM, Q, "model.layers.0.mlp.up_proj.weight"])
def test_a_missing_tensor_is_refused_by_file_and_name(llama, refuse, name):
    change_tensors(llama, **{name: None})
    refuse(llama, f"tensor {name} is missing", str(llama / WEIGHTS))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.0.weight",
        "model.layers.0.attention.bias",
        "extra",
    ],
)
def test_a_tensor_that_no_module_takes_is_refused_by_file_and_name(llama, refuse, name):
    change_tensors(llama, **{name: torch.zeros(32)})
    refuse(llama, f"tensor {name} has no place", str(llama / WEIGHTS))


def test_buffers_that_follow_from_the_configuration_are_skipped(llama, make_engine):
    change_tensors(llama, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert len(run(make_engine(model=str(llama)), [request("x", [3])])["x"].tokens) == 8


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, NORM, Q, "model.layers.0.mlp.down_proj.weight"])
@pytest.mark.parametrize("change", ["transposed", "one row more", "one row less", "flat", "extra axis"])
def test_a_mis_shaped_tensor_is_refused_with_both_shapes(llama, refuse, name, change):
    tensor = load_file(llama / WEIGHTS)[name]
    changed = {
        "transposed": tensor.T if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1] else tensor[:-1],
        "one row more": torch.cat((tensor, tensor[:1])),
        "one row less": tensor[:-1],
        "flat": tensor.flatten() if tensor.dim() == 2 else tensor[None],
        "extra axis": tensor[..., None],
    }[change]
    change_tensors(llama, **{name: changed})
    refuse(llama, str(llama / WEIGHTS), name, str(list(changed.shape)), str(list(tensor.shape)))


def test_wrong_sizes_that_cancel_out_in_a_stack_are_refused(llama, refuse):
    tensors = load_file(llama / WEIGHTS)
    both = torch.cat((tensors[Q], tensors[K]))
    change_tensors(llama, **{Q: both[:28], K: both[28:]})
    refuse(llama, Q, "[28, 32]", "[32, 32]")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_of_no_usual_float_type_is_refused(llama, refuse, dtype):
    change_tensors(llama, **{NORM: torch.ones(32).to(dtype)})
    refuse(llama, str(llama / WEIGHTS), NORM, str(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_other_float_types_are_converted_one_by_one(llama, make_engine, dtype):
    norm = load_file(llama / WEIGHTS)[NORM]
    change_tensors(llama, **{NORM: norm.to(dtype), Q: load_file(llama / WEIGHTS)[Q].to(dtype)})
    assert_equals(make_engine(model=str(llama)), oracle_of(llama))


def test_biases_that_only_the_file_knows_are_not_dropped(checkpoints, tmp_path, make_engine, refuse):
    """Qwen2's q, k and v biases stand in no configuration; without them the text is fluent nonsense."""
    directory = copy_checkpoint(checkpoints, tmp_path / "qwen2", "qwen2")
    tensors = load_file(directory / WEIGHTS)
    large = {name: tensor * 20 for name, tensor in tensors.items() if name.endswith("_proj.bias")}
    assert len(large) == 6
    change_tensors(directory, **large)
    assert_equals(make_engine(model=str(directory)), oracle_of(directory))
    change_tensors(directory, **{"model.layers.0.self_attn.v_proj.bias": None})
    refuse(directory, "model.layers.0.self_attn.v_proj.bias is missing")


# -- tied heads -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tied(checkpoints, tmp_path):
    return copy_checkpoint(checkpoints, tmp_path / "tied", "llama", tie_word_embeddings=True)


def test_a_tied_head_may_be_absent_or_equal(tied, make_engine):
    assert HEAD not in load_file(tied / WEIGHTS)
    assert_equals(make_engine(model=str(tied)), oracle_of(tied))
    change_tensors(tied, **{HEAD: load_file(tied / WEIGHTS)[EMBEDDING].clone()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equals(make_engine(model=str(tied)), oracle_of(tied))


def test_a_tied_head_that_differs_is_warned_of_and_not_used(tied, make_engine):
    before = oracle_of(tied)
    change_tensors(tied, **{HEAD: torch.randn(160, 32, generator=torch.Generator().manual_seed(0))})
    with pytest.warns(UserWarning, match=r"lm_head.weight differs from the embedding"):
        engine = make_engine(model=str(tied))
    assert_equals(engine, before)


@pytest.mark.parametrize("shape", [(160, 16), (159, 32)])
def test_a_tied_head_of_another_shape_is_refused(tied, refuse, shape):
    change_tensors(tied, **{HEAD: torch.zeros(shape)})
    refuse(tied, HEAD, str(list(shape)))


def test_an_untied_head_is_not_replaced_by_the_embedding(llama, refuse):
    change_tensors(llama, **{HEAD: None})
    refuse(llama, HEAD)


# -- shards -----------------------------------------------------------------------------------------------------------


def test_shards_are_loaded_by_their_index_and_stray_files_ignored(llama, make_engine):
    oracle = oracle_of(llama)
    names = shard(llama)
    (llama / "model-00009-of-00003.safetensors").write_bytes(b"rubbish")
    (llama / "pytorch_model.bin").write_bytes(b"rubbish")
    save_file({"extra": torch.zeros(3)}, llama / "consolidated.safetensors")
    save_file({"extra": torch.zeros(3)}, llama / WEIGHTS)
    assert len(names) == 3
    assert_equals(make_engine(model=str(llama)), oracle)


def test_a_missing_shard_is_refused_by_name(llama, refuse):
    (llama / shard(llama)[1]).unlink()
    refuse(llama, "model-00002-of-00003.safetensors", "no such file")


def test_a_tensor_missing_from_its_shard_is_refused_by_both_names(llama, refuse):
    path = llama / shard(llama)[1]
    tensors = load_file(path)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, path)
    refuse(llama, str(path), f"tensor {name} is missing")


def test_a_tensor_missing_from_the_index_is_refused(llama, refuse):
    shard(llama)
    path = llama / INDEX
    path.write_text(path.read_text().replace(f'"{Q}"', '"model.layers.1.self_attn.p_proj.weight"'))
    refuse(llama, "p_proj.weight is missing")


def test_a_shard_of_the_wrong_model_is_refused(llama, checkpoints, refuse):
    names = shard(llama)
    save_file(load_file(checkpoints("qwen2")[0] / WEIGHTS), llama / names[2])
    refuse(llama, names[2], "the index")


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/tmp/model.safetensors", "sub/model.safetensors", "..", ".", "", 3, None]
)
def test_an_index_pointing_outside_the_directory_is_refused(llama, refuse, file):
    (llama.parent / WEIGHTS).write_bytes((llama / WEIGHTS).read_bytes())
    shard(llama)
    change_index(llama, **{Q: file})
    refuse(llama, INDEX, Q, repr(file))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', "{"])
def test_a_broken_index_is_refused_by_name(llama, refuse, content):
    shard(llama)
    (llama / INDEX).write_text(content)
    refuse(llama, INDEX)


def test_no_weights_at_all_are_refused_by_name(llama, refuse):
    (llama / WEIGHTS).rename(llama / "pytorch_model.safetensors")
    refuse(llama, WEIGHTS, "no such file")


# -- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("damage", ["cut by 100", "cut by 1", "header only", "half a header", "empty", "huge header"])
def test_a_damaged_file_is_refused_by_name(llama, refuse, damage, sharded):
    path = llama / (shard(llama)[1] if sharded else WEIGHTS)
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    path.write_bytes(
        {
            "cut by 100": whole[:-100],
            "cut by 1": whole[:-1],
            "header only": whole[: 8 + header],
            "half a header": whole[: 8 + header // 2],
            "empty": b"",
            "huge header": struct.pack("<Q", 2**60) + whole[8:],
        }[damage]
    )
    refuse(llama, str(path), "not a complete safetensors file")


@pytest.mark.parametrize("extra", [1, 100, 4096])
def test_trailing_bytes_are_refused(llama, refuse, extra):
    path = llama / WEIGHTS
    path.write_bytes(path.read_bytes() + b"\0" * extra)
    refuse(llama, str(path), "not a complete safetensors file")


class Bomb:
    """A pickle that would leave a mark when it is loaded."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_a_pickle_under_the_name_of_safetensors_is_refused_and_not_loaded(llama, refuse):
    (llama / WEIGHTS).write_bytes(pickle.dumps({"weights": Bomb()}))
    refuse(llama, str(llama / WEIGHTS), "not a complete safetensors file")
    torch.save({NORM: torch.ones(32)}, llama / WEIGHTS)
    refuse(llama, str(llama / WEIGHTS), "not a complete safetensors file")


def test_remote_code_beside_the_weights_is_never_run(llama, make_engine):
    (llama / "modeling_custom.py").write_text("raise SystemExit('remote code was run')")
    change_config(llama, auto_map={"AutoModelForCausalLM": "modeling_custom.Custom"})
    assert len(run(make_engine(model=str(llama)), [request("x", [3])])["x"].tokens) == 8


def test_a_directory_in_place_of_the_weights_is_refused_by_name(llama, refuse):
    (llama / WEIGHTS).unlink()
    (llama / WEIGHTS).mkdir()
    refuse(llama, str(llama / WEIGHTS))


def test_other_weights_have_another_fingerprint(llama, make_engine):
    first = make_engine(model=str(llama)).info.numerics
    assert make_engine(model=str(llama)).info.numerics == first
    norm = load_file(llama / WEIGHTS)[NORM]
    change_tensors(llama, **{NORM: norm * 1.0000002})
    assert make_engine(model=str(llama)).info.numerics != first


def test_workers_that_draw_other_noise_or_run_on_another_processor_have_other_numerics(llama, make_engine, monkeypatch):
    """Else a resume would say `exact` of a text that is not the one that the dead worker would have written."""
    first = make_engine(model=str(llama)).info.numerics
    assert make_engine(model=str(llama), seed=1).info.numerics != first
    here = torch.cpu.get_capabilities()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: here | {"num_logical_cores": 96})
    assert make_engine(model=str(llama)).info.numerics == first
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: here | {"amx_bf16": not here.get("amx_bf16")})
    assert make_engine(model=str(llama)).info.numerics != first
