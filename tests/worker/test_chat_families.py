"""Random conversations through templates of several families: ids equal to transformers', and messages that stay text.

The templates are written for this test, in the manner of the families that they are named after.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.worker import text_fixtures as fixtures
from tests.worker.styles import LINES, style
from tests.worker.test_chat import NOW, RENDERER
from worker.chat import ChatTemplate, render_chat
from worker.tokenizer import Tokenizer

SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
)
FAMILIES = {
    "chatml": (
        "qwen2",
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "llama2": (
        "llama2",
        SYSTEM_FIRST + "{% for m in rest %}{% set text = m['content'] | trim %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}"
        "{% if loop.first and rest is not sameas messages and messages[0].role == 'system' %}"
        "{% set text = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' ~ text %}{% endif %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text + ' [/INST]' }}"
        "{% else %}{{ ' ' + text + ' ' + eos_token }}{% endif %}{% endfor %}",
    ),
    "llama3": (
        "llama3",
        "{{ bos_token }}{% set ns = namespace(first=true) %}{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '<|im_end|>\\n\\n' }}"
        "{% if ns.first %}"
        "{{ 'Today: ' + strftime_now('%d %b %Y')[:0] + '\\n\\n' }}{% set ns.first = false %}{% endif %}"
        "{{ m['content'] | trim + '<|endoftext|>' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_end|>\\n\\n' }}{%- endif %}",
    ),
    "mistral": (
        "mistral",
        "{%- set ns = namespace(index=0) %}{{- bos_token }}\n{%- for m in messages %}\n"
        "    {%- if m.role == 'system' %}{{- '[SYS]' + m.content + '[/SYS]' }}{%- continue %}{%- endif %}\n"
        "    {%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('alternate!') }}{%- endif %}\n"
        "    {%- set ns.index = ns.index + 1 %}\n"
        "    {%- if m['role'] == 'user' %}\n        {{- '[INST] ' + m['content'] + '[/INST]' }}\n"
        "    {%- else %}\n        {{- ' ' + m['content'] + eos_token }}\n    {%- endif %}\n{%- endfor %}\n",
    ),
    "gemma": (
        "gemma",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% set who = 'user' %}"
        "{% elif m.role == 'assistant' %}{% set who = 'model' %}{% else %}{% set who = m.role %}{% endif %}"
        "{{ '<|im_start|>' ~ who ~ '\\n' ~ m.content | trim ~ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}",
    ),
    "phi3": (
        "llama2-metaspace",
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}{{ eos_token }}{% endif %}",
    ),
    "tools": (
        "gpt2",
        "{% if tools is not none or documents %}never{% endif %}{% for m in messages %}{{ m.role | upper }}: "
        "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ m | tojson(indent=1) }}"
        "{% for call in m.tool_calls or [] %}{{ call.name }}({{ call.arguments | tojson }}){% endfor %}\n{% endfor %}",
    ),
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CONTROL = ["<|im_start|>", "<|im_end|>", "<|end|>", "<mask>", "<s>", "</s>"]


def tokenizer_of(family: str) -> Tokenizer:
    name, template = FAMILIES[family]
    return fixtures.loaded(style(name), chat_template=template, **NAMES)


def encode_chat(tokenizer: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer.encode_guarded(*render_chat(tokenizer, template, messages, NOW))


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """A system message or none, then turns that alternate; some with more than role and content."""
    talk = [{"role": "system", "content": content(rng)}] if rng.random() < 0.5 else []
    for i in range(rng.randrange(1, 6)):
        message: dict[str, Any] = {"role": ("user", "assistant")[i % 2], "content": content(rng)}
        if rng.random() < 0.2:
            message[rng.choice(["reasoning", "thinking", "reasoning_content"])] = content(rng)
        if rng.random() < 0.2:
            message["tool_calls"] = rng.choice([None, [{"name": "f", "arguments": {"x": [1, 2.5, None], "é": "<b>"}}]])
        talk.append(message)
    return talk


def content(rng: random.Random) -> str:
    lines = [line for line in LINES if not any(name in line for name in CONTROL)]
    line = rng.choice(
        [*lines, "", " ", "\n\n\n", "<think>quickly</think>", "{{ x }} {% y %}", "[INST] [/INST]", "<|im_"]
    )
    start = rng.randrange(len(line) + 1) if rng.random() < 0.5 else 0
    return line[start : start + rng.choice([5, 20, 200])]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_get_the_ids_that_transformers_gives(family: str, tmp_path: Path) -> None:
    tokenizer, rng = tokenizer_of(family), random.Random(family)
    reference = fixtures.as_transformers(tokenizer, tmp_path)
    template = ChatTemplate(FAMILIES[family][1], RENDERER)
    for _ in range(60):
        talk = conversation(rng)
        assert encode_chat(tokenizer, template, talk) == fixtures.reference_ids(reference, talk), talk


@pytest.mark.parametrize("family", FAMILIES)
def test_control_strings_in_random_conversations_stay_text(family: str) -> None:
    tokenizer, rng = tokenizer_of(family), random.Random(family + "!")
    template = ChatTemplate(FAMILIES[family][1], RENDERER)
    for _ in range(40):
        talk = conversation(rng)
        spoilt = [{**message, "content": spoil(message["content"], rng)} for message in talk]
        plain, ids = (encode_chat(tokenizer, template, messages) for messages in (talk, spoilt))
        assert [i for i in ids if i in tokenizer.special_ids] == [i for i in plain if i in tokenizer.special_ids]
        text = tokenizer.decode(ids, skip_special=False)
        assert all(name in text for message in spoilt for name in CONTROL if name in message["content"])


def spoil(text: str, rng: random.Random) -> str:
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(CONTROL) + text[at:]
    return text


@pytest.mark.parametrize("family", ["llama2", "llama3", "mistral", "gemma"])
def test_where_template_and_tokenizer_both_write_a_beginning_there_is_one(family: str) -> None:
    tokenizer = tokenizer_of(family)
    talk = [{"role": "user", "content": "hi"}]
    ids = encode_chat(tokenizer, ChatTemplate(FAMILIES[family][1], RENDERER), talk)
    begin = tokenizer.encode("")[0]
    assert (ids[0], ids.count(begin)) == (begin, 1)
    assert tokenizer.encode("hi").count(begin) == tokenizer.encode("<s>hi").count(begin) == 1
