"""Rotary embedding tables: the angle of every position, in the variants that checkpoints ask for."""

import math

import torch
from torch import Tensor

from engine.modelconfig import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each of the head_dim / 2 planes, float32. Su et al. 2021; Llama 3.1's release."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_long_waves(frequencies, rope)
    return frequencies


def _stretch_long_waves(frequencies: Tensor, rope: Rope) -> Tensor:
    """Waves longer than the original context are stretched by the factor, short ones kept, others blended."""
    wave = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wave
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(turns < rope.low_freq_factor, frequencies / rope.factor, between)
    return torch.where(turns > rope.high_freq_factor, frequencies, stretched)


def rope_tables(rope: Rope, head_dim: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, 1, head_dim], float32, as Backend.rope takes them: doubled, sin's first half negated."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    doubled = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return doubled[0][:, None].to(device), doubled[1][:, None].to(device)
