"""Rotary embedding as config.json describes it, in all spellings. Unknown types and parameters are refused by name."""

import math
from typing import Any, NamedTuple

from msgspec import Struct

from engine.errors import ModelError
from engine.families import FULL, SLIDING, Family
from engine.settings import Settings

ORIGINAL = "original_max_position_embeddings"


class Parameters(NamedTuple):
    needed: frozenset[str]
    optional: frozenset[str]


def _parameters(needed: str, optional: str = "") -> Parameters:
    return Parameters(frozenset(needed.split()), frozenset(optional.split()))


ROPE_PARAMETERS = {
    "default": _parameters(""),
    "linear": _parameters("factor", ORIGINAL),
    "dynamic": _parameters("factor", ORIGINAL),
    "yarn": _parameters("factor", f"{ORIGINAL} attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"),
    "longrope": _parameters("short_factor long_factor", f"{ORIGINAL} attention_factor factor"),
    "llama3": _parameters(f"factor low_freq_factor high_freq_factor {ORIGINAL}"),
}
KEEP_ORIGINAL = ("yarn", "longrope", "llama3")  # kinds whose maths reads the original limit; beside the parameters too
EXTENDING = ("linear", "dynamic", "yarn")  # kinds whose factor extends the limit, unless they say what it was before


class Rope(Struct, frozen=True, kw_only=True):
    """Rotary embedding: `kind` is a key of ROPE_PARAMETERS. What a kind does not read is left at its default.

    `original_max_positions` is the limit before scaling, where the checkpoint gives one, and `max_positions` its
    present one; `magnitude` multiplies cos and sin; only the first `fraction` of a head is rotated.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    fraction: float = 1.0
    magnitude: float = 1.0
    max_positions: int = 0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def trained_positions(self) -> int:
        return self.original_max_positions or self.max_positions

    @property
    def limit_factor(self) -> float:
        """By how much the scaling extends the position limit that the checkpoint names."""
        return self.factor if self.kind in EXTENDING and self.original_max_positions is None else 1.0

    @property
    def depends_on_length(self) -> bool:
        return self.kind in ("dynamic", "longrope")

    def regime(self, length: int) -> int:
        """What of a sequence's final length decides its frequencies; equal regimes, equal frequencies."""
        if self.kind == "dynamic":
            return max(length, self.max_positions)
        return int(self.kind == "longrope" and length > self.trained_positions)


class Ropes(NamedTuple):
    full: Rope
    sliding: Rope  # of windowed layers


def read_ropes(settings: Settings, family: Family, head_dim: int) -> Ropes:
    """One rope for all layers, or (Gemma 3) one for those that see everything and one for those with a window."""
    place, given = _given(settings)

    def read(parameters: Any) -> Rope:
        return read_rope(settings, family, head_dim, place, parameters)

    if not family.local_rope:
        rope = read(given)
        return Ropes(rope, rope)
    local = {"rope_theta": settings.raw.get("rope_local_base_freq")}
    if place == "rope_scaling":  # as it was written before transformers 5: for the layers that see everything
        return Ropes(read(given), read(local))
    if set(given) - {FULL, SLIDING}:
        raise settings.refuse(place, f"nothing but {FULL} and {SLIDING}")
    return Ropes(read(given.get(FULL, {})), read(local | given.get(SLIDING, {})))


def _given(settings: Settings) -> tuple[str, dict[str, Any]]:
    """The place of the rope parameters and what is there, without nulls, the type under the name rope_type.

    Both places and both names that checkpoints use: rope_scaling or rope_parameters, type or rope_type. Two sets that
    differ are refused.
    """
    newer, older = (_without_nulls(settings, place) for place in ("rope_parameters", "rope_scaling"))
    if newer and any(newer.get(key) != value for key, value in older.items()):
        raise settings.refuse("rope_scaling", f"the same as rope_parameters, {newer!r},")
    return ("rope_parameters", newer) if newer else ("rope_scaling", older)


def _without_nulls(settings: Settings, place: str) -> dict[str, Any]:
    given = settings.raw.get(place) or {}
    if not isinstance(given, dict):
        raise settings.refuse(place, "an object")
    given = {key: value for key, value in given.items() if value is not None}
    older_name = given.pop("type", None)
    return given if older_name is None else {"rope_type": older_name} | given


def read_rope(settings: Settings, family: Family, head_dim: int, place: str, given: dict[str, Any]) -> Rope:
    """The rope of parameters `given` at `place`; what stands beside them counts where they are silent."""
    if not isinstance(given, dict):
        raise settings.refuse(place, "an object of objects")
    found = {key: value for key, value in given.items() if value is not None}
    older_name = found.pop("type", "default")
    kind = found.pop("rope_type", older_name)
    kind = family.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_PARAMETERS:
        supported = ", ".join(ROPE_PARAMETERS)
        raise ModelError(f"{settings.path}: rope type {kind!r} is not supported (supported: {supported})")
    beside = {"rope_theta": settings.raw.get("rope_theta")}
    if "partial_rotary_factor" in family.keys:
        beside["partial_rotary_factor"] = settings.raw.get("partial_rotary_factor")
    _refuse_unknown(settings, kind, found, beside)
    found = {key: value for key, value in beside.items() if value is not None} | found
    if kind in KEEP_ORIGINAL and settings.given(ORIGINAL):
        found[ORIGINAL] = settings.raw[ORIGINAL]
    return _rope(Settings(found, settings.path, place), kind, settings.count("max_position_embeddings"), head_dim)


def _refuse_unknown(settings: Settings, kind: str, found: dict[str, Any], beside: dict[str, Any]) -> None:
    known = ROPE_PARAMETERS[kind]
    if unknown := sorted(found.keys() - known.needed - known.optional - beside.keys()):
        message = f"rope parameter {unknown[0]} = {found[unknown[0]]!r} is unknown for type {kind!r}"
        raise ModelError(f"{settings.path}: {message}")


def _rope(scaling: Settings, kind: str, max_positions: int, head_dim: int) -> Rope:
    fraction, theta = scaling.number("partial_rotary_factor", 1.0), scaling.number("rope_theta", 10000.0)
    rotated = int(head_dim * fraction)
    if fraction > 1 or rotated < (4 if kind == "dynamic" else 2) or rotated % 2:
        raise scaling.refuse("partial_rotary_factor", f"a fraction that leaves an even part of {head_dim}")
    if theta <= 1:
        raise scaling.refuse("rope_theta", "more than 1")
    values: dict[str, Any] = {
        name: scaling.number(name)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if name in ROPE_PARAMETERS[kind].needed or scaling.given(name)
    }
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise scaling.refuse("high_freq_factor", f"more than low_freq_factor = {values['low_freq_factor']}")
    if kind == "llama3" or scaling.given(ORIGINAL):
        values["original_max_positions"] = int(scaling.number(ORIGINAL))
        if values["original_max_positions"] < 2:
            raise scaling.refuse(ORIGINAL, "more than 1")
    if kind == "longrope":
        values["short_factors"] = scaling.numbers("short_factor", rotated // 2)
        values["long_factors"] = scaling.numbers("long_factor", rotated // 2)
    return Rope(
        theta=theta,
        kind=kind,
        fraction=fraction,
        max_positions=max_positions,
        truncate=scaling.flag("truncate", True),
        magnitude=_magnitude(scaling, kind, max_positions),
        **values,
    )


def _magnitude(scaling: Settings, kind: str, max_positions: int) -> float:
    """By what cos and sin are multiplied. Peng et al. 2023 (YaRN); Ding et al. 2024 (LongRoPE)."""
    if scaling.given("attention_factor"):
        return scaling.number("attention_factor")
    original = scaling.number(ORIGINAL) if scaling.given(ORIGINAL) else float(max_positions)
    if kind == "longrope":
        factor = scaling.optional_number("factor") or max_positions / original
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if kind != "yarn":
        return 1.0
    whole, part = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
    if whole and part:
        return _yarn_magnitude(scaling, whole) / _yarn_magnitude(scaling, part)
    return _yarn_magnitude(scaling, 1.0)


def _yarn_magnitude(scaling: Settings, weight: float) -> float:
    factor = scaling.number("factor")
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
