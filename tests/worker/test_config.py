"""Settings: one table behind the flags, the environment and --print-config."""

import inspect

import pytest

from engine.config import EngineConfig
from worker.config import OPTIONS, Settings, SettingsError, resolve


def test_config_table_and_settings_have_the_same_names() -> None:
    assert [option.name for option in OPTIONS] == sorted(
        Settings.__struct_fields__, key=[option.name for option in OPTIONS].index
    )
    assert {option.name for option in OPTIONS} == set(Settings.__struct_fields__)


def test_config_every_default_survives_its_own_reader() -> None:
    """What --print-config shows for a default can be given back as a value."""
    for option in OPTIONS:
        default = getattr(Settings(), option.name)
        if default is not None:
            assert option.read(str(default)) == default, option.name


def test_config_flag_wins_over_environment_over_default() -> None:
    result = resolve({"lease": "0.5", "queue": None}, {"GLLM_LEASE": "9", "GLLM_QUEUE": "q2"})
    assert (result.settings.lease, result.settings.queue, result.settings.grace) == (0.5, "q2", 30.0)
    sources = {name: result.sources[name] for name in ("lease", "queue", "grace")}
    assert sources == {"lease": "flag --lease", "queue": "environment GLLM_QUEUE", "grace": "default"}


def test_config_every_setting_is_read_from_its_variable() -> None:
    given = {
        "GLLM_MODEL": "m",
        "GLLM_REDIS": "unix:///tmp/r",
        "GLLM_QUEUE": "q",
        "GLLM_DEVICE": "cpu",
        "GLLM_DTYPE": "bfloat16",
        "GLLM_PREFIX_CACHE": "on",
        "GLLM_SHARE_ACROSS_TENANTS": "true",
        "GLLM_DETERMINISTIC": "no",
        "GLLM_BLOCK_SIZE": "8",
        "GLLM_KV_BLOCKS": "9",
        "GLLM_KV_MEMORY": "2GiB",
        "GLLM_GPU_MEMORY": "0.5",
        "GLLM_MAX_SEQUENCES": "3",
        "GLLM_MAX_STEP_TOKENS": "4",
        "GLLM_MAX_MODEL_LEN": "5",
        "GLLM_MODEL_DEFAULTS": "yes",
        "GLLM_THREADS": "6",
        "GLLM_KERNELS": "torch",
        "GLLM_GRAPHS": "off",
        "GLLM_QUANTIZE": "int8",
        "GLLM_SEED": "7",
        "GLLM_METRICS_HOST": "0.0.0.0",
        "GLLM_METRICS_PORT": "0",
        "GLLM_LOG_FORMAT": "console",
        "GLLM_LOG_LEVEL": "debug",
        "GLLM_LEASE": "0.25",
        "GLLM_GRACE": "0",
    }
    result = resolve({}, given)
    assert result.settings == Settings(
        model="m",
        redis="unix:///tmp/r",
        queue="q",
        device="cpu",
        dtype="bfloat16",
        prefix_cache=True,
        share_across_tenants=True,
        deterministic=False,
        block_size=8,
        kv_blocks=9,
        kv_memory=2 * 2**30,
        gpu_memory=0.5,
        max_sequences=3,
        max_step_tokens=4,
        max_model_len=5,
        model_defaults=True,
        threads=6,
        kernels="torch",
        graphs=False,
        quantize="int8",
        seed=7,
        metrics_host="0.0.0.0",
        metrics_port=0,
        log_format="console",
        log_level="debug",
        lease=0.25,
        grace=0.0,
    )
    assert all(source.startswith("environment GLLM_") for source in result.sources.values())


def test_config_redis_has_a_second_variable() -> None:
    assert resolve({}, {"GLLM_REDIS_URL": "redis://a/0"}).settings.redis == "redis://a/0"
    both = resolve({}, {"GLLM_REDIS_URL": "redis://a/0", "GLLM_REDIS": "redis://b/0"})
    assert (both.settings.redis, both.sources["redis"]) == ("redis://b/0", "environment GLLM_REDIS")


def test_config_empty_variable_counts_as_unset() -> None:
    result = resolve({}, {"GLLM_SEED": "", "GLLM_REDIS": "", "GLLM_REDIS_URL": "redis://a/0"})
    assert (result.settings.seed, result.settings.redis) == (0, "redis://a/0")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("2GiB", 2**31),
        ("2gib", 2**31),
        (" 512 MB ", 512_000_000),
        ("1.5g", 1_500_000_000),
        ("0.5KiB", 512),
        ("3Mi", 3 * 2**20),
        ("7B", 7),
    ],
)
def test_config_reads_memory_sizes(text: str, size: int) -> None:
    assert resolve({"kv_memory": text}, {}).settings.kv_memory == size


@pytest.mark.parametrize(
    ("text", "value"), [("0.45", 0.45), ("1", 1), (".9", 0.9), ("40GiB", 40 * 2**30), ("5000000000", 5_000_000_000)]
)
def test_config_reads_a_share_of_a_gpu_or_a_size(text: str, value: float) -> None:
    assert resolve({"gpu_memory": text}, {}).settings.gpu_memory == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("auto", "auto"), ("true", True), ("1", True), ("ON", True), ("false", False), ("0", False), ("no", False)],
)
def test_config_deterministic_has_three_values(text: str, value: object) -> None:
    assert resolve({"deterministic": text}, {}).settings.deterministic is value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", " "),
        ("redis", "http://localhost"),
        ("redis", "redis://h:99999/0"),
        ("queue", "a b"),
        ("queue", "{x}"),
        ("device", "tpu"),
        ("dtype", "float8"),
        ("prefix_cache", "maybe"),
        ("deterministic", "2"),
        ("block_size", "0"),
        ("block_size", "1e3"),
        ("block_size", "4097"),
        ("kv_blocks", "-1"),
        ("gpu_memory", "0"),
        ("gpu_memory", "1.5"),
        ("gpu_memory", "-0.5"),
        ("gpu_memory", "nan"),
        ("gpu_memory", "inf"),
        ("gpu_memory", "half"),
        ("kv_memory", "0"),
        ("kv_memory", "2 XB"),
        ("kv_memory", "-1GiB"),
        ("kv_memory", "ib"),
        ("max_sequences", "0"),
        ("max_step_tokens", "1.5"),
        ("max_model_len", "none"),
        ("threads", "0"),
        ("seed", "-1"),
        ("seed", str(2**64)),
        ("metrics_host", "  "),
        ("metrics_port", "65536"),
        ("metrics_port", "http"),
        ("log_format", "xml"),
        ("log_level", "INFO "),
        ("lease", "0"),
        ("lease", "nan"),
        ("lease", "inf"),
        ("lease", "15s"),
        ("grace", "-1"),
    ],
)
def test_config_refuses_by_name_and_value(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as flag:
        resolve({name: value}, {})
    assert str(flag.value).startswith(f"--{name.replace('_', '-')}: ")
    assert f"got {value!r}" in str(flag.value)
    with pytest.raises(SettingsError, match=f"^GLLM_{name.upper()}: "):
        resolve({}, {f"GLLM_{name.upper()}": value})


def test_config_lines_show_value_and_source_and_hide_the_password() -> None:
    lines = resolve({"prefix_cache": False}, {"GLLM_REDIS_URL": "redis://:secret@h/0"}).lines()
    assert len(lines) == len(OPTIONS)
    assert not any("secret" in line for line in lines)
    shown = dict(line.split(" = ", 1) for line in lines)
    assert shown["redis"].split(maxsplit=1) == ['"redis://:***@h/0"', "# environment GLLM_REDIS_URL"]
    assert shown["prefix_cache"].split("#")[1].strip() == "flag --no-prefix-cache"
    assert shown["kv_blocks"].split() == ["null", "#", "default"]


def test_config_engine_gets_its_share() -> None:
    settings = Settings(dtype="float32", kv_blocks=7, prefix_cache=True, seed=3, threads=2, max_model_len=9)
    config = settings.engine_config("/models/x.gguf", (2, 5))
    assert config == EngineConfig(
        model="/models/x.gguf",
        dtype="float32",
        kv_blocks=7,
        max_step_tokens=None,
        prefix_cache=True,
        seed=3,
        threads=2,
        max_model_len=9,
        eos_token_ids=(2, 5),
    )


def test_config_every_engine_setting_can_be_set_on_a_worker() -> None:
    """But for what follows from the model, and how steps are planned, which `auto` knows best."""
    ours = set(Settings.__struct_fields__)
    assert set(inspect.signature(EngineConfig).parameters) - ours == {"eos_token_ids", "overlap"}


def test_config_only_looks_at_the_named_options() -> None:
    few = [option for option in OPTIONS if option.name == "queue"]
    assert resolve({}, {"GLLM_SEED": "x", "GLLM_QUEUE": "q"}, few).settings.queue == "q"
