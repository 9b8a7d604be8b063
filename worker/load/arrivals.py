"""When jobs come, in seconds from the start of a load. Endless, and the same for the same generator."""

from collections.abc import Callable, Iterator
from random import Random

Process = Callable[[float, Random], Iterator[float]]


def constant(rate: float, generator: Random) -> Iterator[float]:
    """`rate` jobs a second at equal distances."""
    number = 0
    while True:
        yield number / rate
        number += 1


def poisson(rate: float, generator: Random) -> Iterator[float]:
    """Independent of each other, as those of many users are: exponential distances with a mean of 1 / rate."""
    now = 0.0
    while True:
        yield now
        now += generator.expovariate(rate)


def bursts(size: int) -> Process:
    """`size` jobs at one moment; the moments come as a Poisson process, so that `rate` jobs come a second."""

    def process(rate: float, generator: Random) -> Iterator[float]:
        for moment in poisson(rate / size, generator):
            for _ in range(size):
                yield moment

    return process
