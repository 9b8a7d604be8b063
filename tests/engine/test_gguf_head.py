"""The head of GGUF files: every type of value, the real one of the demo model, and files with wrong bytes."""

import random
from contextlib import suppress
from pathlib import Path

import gguf
import pytest

from engine.gguf_head import read_metadata
from tests.worker import text_fixtures as fixtures
from worker.models import ModelError, resolve_model
from worker.tokenizer import load_tokenizer


def test_its_metadata_equal_those_that_the_gguf_package_reads() -> None:
    path = resolve_model("smollm2")
    fields = gguf.GGUFReader(path).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert read_metadata(path) == expected


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {"uint8": 200, "int8": -2, "uint16": 60000, "int16": -3, "uint32": 2**31, "int32": -4, "uint64": 2**60}
    values |= {"int64": -(2**60), "float32": 0.5, "float64": 0.1, "bool": True, "string": "é漢"}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    arrays = {"x.numbers": [1, -2], "x.texts": ["a", ""], "x.switches": [True, False], "x.floats": [0.5, 1.5]}
    for name, array in arrays.items():
        writer.add_array(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = {f"x.{kind}": value for kind, value in values.items()} | arrays
    assert read_metadata(tmp_path / "m.gguf") == {"general.architecture": "llama", **expected}


def test_a_file_that_was_cut_or_changed_is_named_or_read(tmp_path: Path) -> None:
    """Whatever bytes are wrong, nothing but ModelError comes out, and nothing huge is taken from a wrong length."""
    data = fixtures.write_gguf(tmp_path / "whole.gguf", **fixtures.byte_level_fields()).read_bytes()
    rng, path = random.Random(9), tmp_path / "broken.gguf"
    for cut in [*range(60), *(rng.randrange(len(data)) for _ in range(60))]:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"broken\.gguf: "):
            load_tokenizer(path)
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(changed)
        with suppress(ModelError):
            load_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 something else", b"GGUF\x03\0\0\0" + b"\xff" * 40])
def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.gguf: not a readable GGUF file"):
        load_tokenizer(path)
