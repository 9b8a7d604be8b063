"""A tiny model whose vocabulary has the pieces of characters, whole ones, and words of several scripts."""

from pathlib import Path

import pytest

from tests.chaos.workload import VOCABULARY, WORDS
from tests.engine import models
from tests.worker.text_fixtures import CHATML, byte_level_backend
from tests.worker.text_fixtures import save as save_tokenizer


@pytest.fixture(scope="session")
def multibyte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("multibyte-model")
    models.save(directory, "llama", vocab_size=VOCABULARY)
    return save_tokenizer(directory, byte_level_backend(WORDS), chat_template=CHATML, eos_token="<|im_end|>")
