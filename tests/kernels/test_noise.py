"""Counter-based noise: the same bits everywhere, one stream per (seed, position), and tails that are really there."""

import math
import random

import pytest
import torch
from torch import Tensor

from kernels import gumbel, row_keys

MASK = 0xFFFFFFFF
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def keys_of(seed: int, position: int) -> Tensor:
    return row_keys(torch.tensor([seed - 2**64 if seed >= 2**63 else seed]), torch.tensor([position]))


def mix(h: int) -> int:
    """MurmurHash3's finaliser with Python's whole numbers."""
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def unmix(h: int) -> int:
    """Its inverse."""
    h = (h ^ h >> 16) * pow(0xC2B2AE35, -1, 2**32) & MASK
    h = h ^ h >> 13 ^ h >> 26
    h = h * pow(0x85EBCA6B, -1, 2**32) & MASK
    return h ^ h >> 16


def plain_noise(seed: int, position: int, token: int) -> float:
    """The definition of the noise, with Python's numbers."""
    low = mix(seed & MASK ^ 0x9E3779B9)
    high = mix(seed >> 32 ^ low)
    h = mix(mix(token ^ mix(low ^ position)) ^ mix(high + position * 0x7F4A7C15 & MASK))
    uniform = ((h + 2**31 & MASK) + 0.5) / 2**32
    return -math.log(-math.log1p(-uniform))


def signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


@pytest.mark.parametrize("seed", EDGES)
def test_noise_is_its_definition_in_whole_numbers(seed):
    generator = random.Random(seed)
    for position in (0, 1, 511, 2**20 + 7, 2**31 - 1):
        ids = [0, 1, 2, 49_151, 151_935, 2**31 - 1, *(generator.randrange(200_000) for _ in range(40))]
        noise = gumbel(keys_of(seed, position), torch.tensor(ids))[0].tolist()
        expected = [plain_noise(seed, position, token) for token in ids]
        # float32 is coarse near the losing end: uniforms near 1.
        assert noise == pytest.approx(expected, rel=2e-6, abs=1e-6 if min(expected) > -2 else 1e-3)


def test_noise_never_depends_on_the_other_rows_or_their_order():
    for vocab_size in (1, 7, 160, 1023, 50_257):
        ids = torch.arange(vocab_size)
        keys = row_keys(torch.arange(21) * 12345, torch.arange(21) + 3)
        together = gumbel(keys, ids)
        for row in range(21):
            assert torch.equal(gumbel(keys[row : row + 1], ids)[0], together[row])
        assert torch.equal(gumbel(keys.flip(0), ids), together.flip(0))


def test_noise_of_chosen_candidates_is_that_of_the_whole_vocabulary():
    keys = row_keys(torch.arange(5), torch.arange(5))
    whole = gumbel(keys, torch.arange(5000))
    candidates = torch.randint(5000, (5, 33), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(keys, candidates), whole.gather(1, candidates))


def test_small_seeds_never_share_the_noise_of_a_position():
    """Streams of seeds that differ in few bits must not be each other's, shifted or reordered."""
    seeds, positions = torch.arange(2048), torch.arange(4096)
    keys = row_keys(seeds.repeat_interleave(4096), positions.repeat(2048)).to(torch.int64)
    joined = keys[:, 0] << 32 | keys[:, 1] & MASK
    assert bool((joined.sort().values.diff() != 0).all())


@pytest.mark.parametrize("rank", [0, 1, 2, 1000, 2**20, 2**31 - 1, 2**31, 2**32 - 2**20, 2**32 - 2, 2**32 - 1])
def test_the_ends_of_the_counter_are_finite_and_exact_where_winners_are(rank):
    """An id is built whose 32 bits are of a given rank; the smallest ranks are the largest noise."""
    first, second = (int(key) & MASK for key in keys_of(77, 5)[0])
    token = unmix(unmix(rank + 2**31 & MASK) ^ second) ^ first
    noise = gumbel(keys_of(77, 5), torch.tensor([signed(token)])).item()
    exact = -math.log(-math.log1p(-(rank + 0.5) / 2**32))
    assert math.isfinite(noise)
    if rank < 2**32 - 2**20:
        assert noise == pytest.approx(exact, rel=1e-6, abs=1e-6)
    else:
        assert -3.3 < noise < -1.8


def test_noise_is_gumbel_distributed():
    sample = gumbel(row_keys(torch.arange(64), torch.arange(64)), torch.arange(4096)).flatten().double()
    assert sample.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert sample.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    # Kolmogorov-Smirnov: the distribution function of the sample against exp(-exp(-x)).
    uniforms = (-(-sample).exp()).exp().sort().values
    distance = (uniforms - torch.arange(1, len(uniforms) + 1) / len(uniforms)).abs().max().item()
    assert distance < 2.0 / math.sqrt(len(uniforms))


@pytest.mark.parametrize("axis", ["seed", "position"])
@pytest.mark.parametrize("probability", [1e-2, 1e-4, 3e-6])
def test_rare_tokens_get_their_share(axis, probability):
    """Two tokens, one of them rare: how often it wins over many positions, or over many seeds."""
    draws, won = 1 << 23 if probability < 1e-5 else 1 << 20, 0
    ids = torch.tensor([5, 9])
    odds = torch.tensor([math.log(probability), math.log1p(-probability)])
    for numbers in torch.arange(draws).split(1 << 20):
        fixed = torch.full_like(numbers, 3)
        keys = row_keys(numbers, fixed) if axis == "seed" else row_keys(fixed, numbers)
        won += int(((gumbel(keys, ids) + odds).argmax(-1) == 0).sum())
    expected = draws * probability
    assert abs(won - expected) < 4 * math.sqrt(expected)


def test_every_bit_of_seed_position_and_id_reaches_the_noise():
    """Flipping one bit of an input leaves noise that has nothing to do with the noise before."""
    ids = torch.arange(2000)

    def bits(seed: int, position: int, flip: int = 0) -> Tensor:
        return gumbel(keys_of(seed, position), ids ^ flip)[0] > 0.3665  # its median

    base = bits(5, 77)
    changed = [bits(5 ^ 1 << bit, 77) for bit in range(64)] + [bits(5, 77 ^ 1 << bit) for bit in range(30)]
    for other in changed + [bits(5, 77, 1 << bit) for bit in range(11, 30)]:
        assert 850 < int((base == other).sum()) < 1150


def test_the_noise_stays_what_it_is():
    """A reply that is resumed by a newer worker goes on with this noise: change it never, or with KERNEL_VERSION."""
    noise = gumbel(keys_of(2**64 - 3, 12_345), torch.tensor([0, 1, 49_151]))[0].tolist()
    assert noise == pytest.approx([-0.1075484, -0.4676690, -0.5900611], abs=1e-5)
