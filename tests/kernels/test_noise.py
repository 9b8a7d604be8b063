"""Counter-based noise: the same bits everywhere, one stream per (seed, position), and tails that are really there."""

import math
import random

import pytest
import torch
from torch import Tensor

from kernels import gumbel, ranks, reach, row_keys

MASK = 0xFFFFFFFF
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def keys_of(seed: int, position: int) -> Tensor:
    return row_keys(torch.tensor([seed - 2**64 if seed >= 2**63 else seed]), torch.tensor([position]))


def mix(h: int) -> int:
    """MurmurHash3's finaliser with Python's whole numbers."""
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def fold(h: int, shift: int) -> int:
    """XOR with an arithmetic right shift of the 32-bit number: the top bit is zero then."""
    return (h ^ signed(h) >> shift) & MASK


def plain_rank(seed: int, position: int, token: int) -> int:
    """The definition of a token's rank, with Python's whole numbers."""
    low = mix(seed & MASK ^ 0x9E3779B9)
    high = mix(seed >> 32 ^ low)
    first, second = mix(low ^ position), mix(high + position * 0x7F4A7C15 & MASK)
    h = fold(token ^ first & 0x7FFFFFFF, 16) * 0x85EBCA6B & MASK
    return fold((fold(h, 13) ^ second) * 0xC2B2AE35 & MASK, 16)


def plain_noise(rank: int) -> float:
    """The definition of the noise of a rank, with Python's numbers."""
    return -math.log(-math.log1p(-(rank + 0.5) / 2**31))


def signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


@pytest.mark.parametrize("seed", EDGES)
def test_noise_is_its_definition_in_whole_numbers(seed):
    generator = random.Random(seed)
    for position in (0, 1, 511, 2**20 + 7, 2**31 - 1):
        ids = [0, 1, 2, 49_151, 151_935, 2**31 - 1, *(generator.randrange(200_000) for _ in range(40))]
        expected = [plain_rank(seed, position, token) for token in ids]
        assert ranks(keys_of(seed, position), torch.tensor(ids, dtype=torch.int32))[0].tolist() == expected
        noise = gumbel(keys_of(seed, position), torch.tensor(ids))[0]
        assert torch.equal(noise, torch.tensor([plain_noise(rank) for rank in expected]))  # float32, to the last bit


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
    seeds, positions = torch.arange(1024), torch.arange(2048)
    keys = row_keys(seeds.repeat_interleave(2048), positions.repeat(1024)).to(torch.int64)
    joined = keys[:, 0] << 32 | keys[:, 1] & MASK
    assert bool((joined.sort().values.diff() != 0).all())


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 1000, 2**20, 2**30, 2**31 - 2**20, 2**31 - 2, 2**31 - 1])
def test_the_ends_of_the_counter_are_finite_and_reach_is_never_too_low(rank):
    """`reach` chooses who gets noise: it may flatter, but never leave a winner out."""
    noise = plain_noise(rank)
    assert math.isfinite(noise)
    assert -3.2 < noise < 22.2
    constant = math.log(2) * (127 + 31)
    reached = reach(torch.zeros(1, 1), torch.tensor([[rank]], dtype=torch.int32)).item() + constant
    assert reached >= noise - 2e-5
    if 0 < rank < 2**28:
        assert reached < -math.log((rank + 0.5) / 2**31) + 0.06 + 0.5 / rank


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 4097, 151_936])
def test_reach_bounds_the_noise_of_a_whole_vocabulary(vocab_size):
    ids, keys = torch.arange(vocab_size, dtype=torch.int32), row_keys(torch.arange(3), torch.arange(3))
    scores = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    reached = reach(scores, ranks(keys, ids)) + math.log(2) * (127 + 31)
    assert bool((reached >= scores + gumbel(keys, ids) - 5e-5).all())


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


@pytest.mark.parametrize("flip", [1, 1 << 6, 1 << 13, 1 << 16])
@pytest.mark.parametrize("axis", ["seed", "position"])
def test_neighbouring_tokens_have_independent_noise(axis, flip):
    """The joint distribution of two tokens' ranks over seeds, and over positions: top and middle bits."""
    numbers = torch.arange(1 << 17)
    fixed = torch.full_like(numbers, 12)
    keys = row_keys(numbers, fixed) if axis == "seed" else row_keys(fixed, numbers)
    first, second = ranks(keys, torch.tensor([70_001, 70_001 ^ flip], dtype=torch.int32)).T
    for shift in (27, 12):
        counts = torch.bincount((first >> shift) % 16 * 16 + (second >> shift) % 16, minlength=256)
        statistic = float(((counts - 512.0) ** 2 / 512).sum())  # chi-square with 255 degrees of freedom
        assert statistic < 255 + 5 * math.sqrt(2 * 255)


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
    assert noise == [1.338716983795166, 1.9227378368377686, -0.9586436748504639]
