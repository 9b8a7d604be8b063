"""docs/protocol.md says what the code does: every field, event, key, code, reason and limit, both ways."""

import fnmatch
import json
import re
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec.inspect import type_info

from gllm import client, keys, protocol, validate
from gllm.keys import PRIORITIES, Keys
from gllm.protocol import Done, Error, Job, ReplyEvent, Timings, TokenLogprob, Usage, decode_event
from gllm.validate import decode_job
from tests.docs.pages import ROOT, Page, codes

PAGE = Page("docs/protocol.md")
LUA = {path.name: path.read_text() for path in (ROOT / "worker" / "lua").glob("*.lua")}
EVENTS = get_args(ReplyEvent)
EXAMPLES = [json.loads(line) for block in PAGE.blocks("json") for line in block.splitlines()]
POWERS = {2**31 - 1: "2^31 - 1", 2**64 - 1: "2^64 - 1"}


def encoded_names(kind: type) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def of_type(kind: type) -> list[dict[str, Any]]:
    return [example for example in EXAMPLES if example.get("type") == kind.__struct_config__.tag]


def bounds(node: Any) -> set[float]:
    """The numbers by which a type limits its values, those of its items too."""
    inner = [*getattr(node, "types", ()), getattr(node, "item_type", None)]
    own = [getattr(node, name, None) for name in ("gt", "ge", "lt", "le", "min_length", "max_length")]
    return {number for number in own if number is not None}.union(*(bounds(item) for item in inner if item))


def spelled(number: float) -> str:
    return POWERS.get(int(number), f"{number:,g}")


def default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    return "none" if value is None else json.dumps(value).removesuffix(".0")


def test_body_table_has_every_field_with_range_and_default() -> None:
    table = PAGE.table("The body")
    fields = {field.name: field for field in msgspec.structs.fields(Job)}
    assert list(table) == list(fields)
    for name, (kind, given, _) in table.items():
        assert given.strip("`") == default(fields[name]), name
        # a list of ids is said to hold ids, which have one range everywhere
        numbers = {} if kind.startswith("list of integers") else bounds(type_info(fields[name].type))
        missing = [
            spelled(number)
            for number in numbers
            if not re.search(rf"(?<![\d^]){re.escape(spelled(number))}(?!\d)", kind)
        ]
        assert [number for number in missing if "ids" not in kind or number not in ("0", "2^31 - 1")] == [], name


def test_entry_table_has_every_field_that_the_claim_reads() -> None:
    (fields,) = re.findall(r"^local FIELDS = \{(.*)\}$", LUA["delayed.lua"], re.MULTILINE)
    used = set(re.findall(r"'(\w+)'", fields))
    assert used >= set(re.findall(r"fields\.(\w+)", LUA["claim.lua"] + LUA["endings.lua"]))
    assert set(PAGE.table("Submit")) == used


def test_event_table_has_every_event_with_its_fields() -> None:
    table = PAGE.table("Read the reply")
    assert set(table) == {event.__struct_config__.tag for event in EVENTS}
    for event in EVENTS:
        words = re.findall(r"\w+", " ".join(codes(table[event.__struct_config__.tag][0])))
        assert words == encoded_names(event)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example)[:40])
def test_json_example_of_the_protocol_page_is_of_the_protocol(example: dict[str, Any]) -> None:
    data = json.dumps(example).encode()
    if "type" in example:
        decode_event(data)
    else:
        decode_job(data)


@pytest.mark.parametrize("event", EVENTS)
def test_json_examples_show_every_field_of_every_event(event: type) -> None:
    shown = [set(example) - {"type"} for example in of_type(event)]
    assert set().union(*shown) == set(encoded_names(event))


def test_json_example_of_the_end_shows_all_of_usage_and_timings() -> None:
    (done,) = of_type(Done)
    for name, kind in (("usage", Usage), ("timings", Timings)):
        assert list(done[name]) == encoded_names(kind)


def test_json_examples_show_logprobs_as_objects() -> None:
    shown = [example["logprobs"][0] for example in EXAMPLES if isinstance(example.get("logprobs"), list)]
    assert [set(item) for item in shown] == [set(encoded_names(TokenLogprob))]


def test_key_table_is_that_of_the_code() -> None:
    rows = [line.split("|")[1] for line in (keys.__doc__ or "").splitlines() if line.startswith("|")][2:]
    assert {name for row in rows for name in re.findall(r"[\w:<>]+", row)} == {
        name for row in PAGE.table("Keys") for name in re.findall(r"[\w:<>]+", row)
    }


def test_every_key_on_the_page_is_a_key_of_the_queue() -> None:
    """Patterns of ACL rules match one at least."""
    found = set(re.findall(r"gllm:\{(\w+)\}:([\w:*-]+)", PAGE.text))
    assert found
    for queue, name in found:
        all_keys = Keys(queue)
        shapes = [all_keys.jobs(priority, 0) for priority in PRIORITIES]
        shapes += [of(job_id) for of in (all_keys.job, all_keys.out, all_keys.cancel) for job_id in ("job1", "shop-1")]
        shapes += [all_keys.meta, all_keys.delayed, all_keys.dead]
        assert fnmatch.filter(shapes, all_keys.base.replace("[", "[[]") + name), name


def lua_number(name: str, file: str = "common.lua") -> int:
    (product,) = re.findall(rf"local {name} = ([\d *]+)", LUA[file])
    result = 1
    for factor in product.split("*"):
        result *= int(factor)
    return result


def test_lives_of_keys_are_those_of_the_scripts() -> None:
    day, reply = lua_number("DAY_MS"), lua_number("REPLY_LIFE_MS")
    assert (day, reply, client.CANCEL_SECONDS) == (24 * 3600 * 1000, 10 * 60 * 1000, 86400)
    table = PAGE.table("Keys")
    assert "24 hours" in table["out:<id>"][2]
    assert "10 minutes after its end" in table["out:<id>"][2]
    assert "24 hours after its end" in table["job:<id>"][2]
    assert "EX 86400" in PAGE.text


def test_error_codes_and_finish_reasons_are_all_explained() -> None:
    kinds = get_type_hints(Error)["code"], get_type_hints(Done)["finish_reason"]
    assert list(PAGE.table("Errors")) == list(get_args(kinds[0]))
    (sentence,) = re.findall(r"\*\*`finish_reason`\*\* is (.*?)\.", PAGE.text, re.DOTALL)
    assert codes(sentence) == list(get_args(kinds[1]))


def test_dead_letters_are_explained_with_all_their_reasons_and_fields() -> None:
    calls = r"(?:refuse|close|send_letter)\((?:[^()]|\([^()]*\))*?, '(\w+)'(?:\)|, ')"
    returned = r"return '\w+', .*, '(\w+)'$"
    text = "".join(LUA.values())
    found = [re.findall(pattern, text, re.MULTILINE) for pattern in (calls, returned, r"reason = '(\w+)'")]
    assert all(found)
    assert set(PAGE.table("Dead letters")) == {reason for reasons in found for reason in reasons}
    body = re.search(r"^local function bury.*?^end", LUA["common.lua"], re.DOTALL | re.MULTILINE)
    assert body is not None
    written = set(re.findall(r"(?:add\(|^ *|, |\{)'(\w+)'", body[0], re.MULTILINE)) - {"XADD", "dead", "MAXLEN"}
    named = {
        word for code in codes(PAGE.sections["Dead letters"].partition("|")[0]) for word in re.findall(r"\w+", code)
    }
    assert named - {"dead"} == written


def test_limits_are_those_of_the_code() -> None:
    limits = {name: int(row[0].split()[0].replace(",", "")) for name, row in list(PAGE.table("Limits").items())[:3]}
    assert limits == {"queue name": 64, "id": 128, "body": protocol.MAX_BODY_BYTES}
    assert keys.QUEUE_NAME.pattern.endswith("{1,64}")
    assert keys.JOB_ID.pattern.endswith("{1,128}")
    table = PAGE.table("Limits")
    sizes = {
        "messages": 1024,
        "stop": 16,
        "stop_token_ids": 64,
        "logit_bias": 1024,
        "metadata": validate.MAX_METADATA_BYTES,
    }
    assert {name: table[name][0].split()[0].strip(",") for name in sizes} == {
        name: f"{n:,}" for name, n in sizes.items()
    }
    for name in set(sizes) - {"metadata"}:
        field = next(field for field in msgspec.structs.fields(Job) if field.name == name)
        assert sizes[name] in bounds(type_info(field.type)), name
    client_code = "".join(path.read_text() for path in (ROOT / "gllm").glob("*.py"))
    (label,) = re.findall(r"^MAX_LABEL_CHARACTERS = (\d+)", client_code, re.MULTILINE)
    assert all(f"up to {label} characters" in PAGE.table("Submit")[name][0] for name in ("affinity", "tenant"))
    assert f"{lua_number('MAX_LABEL_BYTES', 'endings.lua'):,} bytes" in PAGE.table("Limits")["labels"][0]


def test_terminal_entry_id_on_the_page_is_the_one() -> None:
    assert set(re.findall(r"\b\d{16}-0\b", PAGE.text)) == {protocol.TERMINAL_ENTRY_ID}


def test_python_on_the_protocol_page_is_the_example_that_runs() -> None:
    (block,) = PAGE.blocks("python")
    assert block in (ROOT / "examples" / "producer.py").read_text()
