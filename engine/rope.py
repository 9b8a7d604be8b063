"""Rotary embedding: the angle of every position, in the variants that checkpoints ask for."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.ropeconfig import Rope
from kernels import to_device

Turn = tuple[Tensor, Tensor]  # cos and sin [T, 1, head_dim], as Backend.rope takes them


def inverse_frequencies(rope: Rope, head_dim: int, length: int = 0) -> Tensor:
    """Radians per position of each rotated plane, float32 [int(head_dim * fraction) / 2]. Su et al. 2021.

    `length` is what the sequence may grow to; only kinds that depend on it look at it.
    """
    width = int(head_dim * rope.fraction)
    return VARIANTS[rope.kind](rope, width, rope.regime(length))


def _powers(theta: float, width: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _default(rope: Rope, width: int, regime: int) -> Tensor:
    return _powers(rope.theta, width)


def _linear(rope: Rope, width: int, regime: int) -> Tensor:
    return _powers(rope.theta, width) / rope.factor


def _dynamic(rope: Rope, width: int, length: int) -> Tensor:
    """Theta grows with the length, so that the slowest plane turns as far as it did in training (NTK-aware)."""
    stretch = rope.factor * length / rope.max_positions - (rope.factor - 1)
    return _powers(rope.theta * stretch ** (width / (width - 2)), width)


def _llama3(rope: Rope, width: int, regime: int) -> Tensor:
    """Llama 3.1: waves longer than the original context are stretched, short ones kept, others blended."""
    frequencies = _powers(rope.theta, width)
    turns = rope.trained_positions / (2 * math.pi / frequencies)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(turns < rope.low_freq_factor, frequencies / rope.factor, between)
    return torch.where(turns > rope.high_freq_factor, frequencies, stretched)


def _yarn(rope: Rope, width: int, regime: int) -> Tensor:
    """Peng et al. 2023: planes with more than beta_fast turns in training are kept, less than beta_slow stretched."""

    def plane(turns: float) -> float:
        """The plane, counted from the fastest, that turns so often within the original context."""
        return width * math.log(rope.trained_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = plane(rope.beta_fast), plane(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0, 1)
    frequencies = _powers(rope.theta, width)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _longrope(rope: Rope, width: int, long: int) -> Tensor:
    """Each plane has a factor of its own, one for short and one for long sequences (Ding et al. 2024)."""
    return _powers(rope.theta, width) / torch.tensor(rope.long_factors if long else rope.short_factors)


VARIANTS: dict[str, Callable[[Rope, int, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def turn(rope: Rope, angles: Tensor, head_dim: int) -> Turn:
    """cos and sin of angles [T, planes]: doubled, sin's first half negated. Planes that are not rotated stand still."""
    still = angles.new_ones(len(angles), head_dim // 2 - angles.shape[1])
    cos = torch.cat((angles.cos() * rope.magnitude, still), -1)
    sin = torch.cat((angles.sin() * rope.magnitude, torch.zeros_like(still)), -1)
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def plane_order(rope: Rope, head_dim: int) -> list[int] | None:
    """How a head's elements must be reordered so that it can be rotated whole, its still planes among the others.

    Files rotate the halves of a head's first part, and leave the rest: [first half, second half, rest]. Backend.rope
    turns element i with element i + head_dim / 2. A product of queries and keys does not see the order. None: as it is.
    """
    width, half = int(head_dim * rope.fraction), head_dim // 2
    if width == head_dim:
        return None
    planes = width // 2
    rest = range(width, head_dim)
    return [*range(planes), *rest[: half - planes], *range(planes, width), *rest[half - planes :]]


class Rotation:
    """One rope for a step's tokens: a table by position, or, where it depends on the length, frequencies by row."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, rows: int, device: torch.device) -> None:
        self._rope, self._head_dim = rope, head_dim
        frequencies = inverse_frequencies(rope, head_dim)
        if rope.depends_on_length:
            self._rows = frequencies.expand(rows, -1).to(device, copy=True)
        else:
            table = turn(rope, torch.outer(torch.arange(positions, dtype=torch.float32), frequencies), head_dim)
            self._cos, self._sin = (part.to(device) for part in table)

    def open(self, row: int, length: int) -> None:
        """A sequence that may grow to `length` takes a row."""
        if self._rope.depends_on_length:
            self._rows[row] = to_device(inverse_frequencies(self._rope, self._head_dim, length), self._rows.device)

    def at(self, positions: Tensor, rows: Tensor) -> Turn:
        """cos and sin of tokens at positions [T] of the sequences in rows [T]."""
        if not self._rope.depends_on_length:
            return self._cos[positions], self._sin[positions]
        return turn(self._rope, positions.to(torch.float32)[:, None] * self._rows[rows], self._head_dim)
