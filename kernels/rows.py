"""Matrix products whose rows do not depend on one another.

Stock matrix products pick their algorithm by the number of rows, and with it the order of accumulation: the same row
may come out with other bits in a batch of 1 and of 37. Which row counts agree differs by processor, library and shape,
so it is measured once per shape: counts that gave the same bits as the fixed tile of `TILE` rows are used as they are;
other inputs are cut into such counts, and the last piece is padded to one.

The measurement uses sums that cancel to nothing but their rounding errors. On ordinary random data two orders of
accumulation agree most of the time after rounding to bfloat16, and a wrong count would pass.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

TILE = 16  # the fixed tile that all are compared with: never worse than one row for a memory-bound product
COUNTS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
ONE_PIECE = 64  # up to so many rows, padding costs less than a second pass over the weights
WINDOWS = 4  # how many groups of rows each small count is tried on; large ones have rows enough in one
Product = Callable[[Tensor], Tensor]


def cancelling(rows: int, outputs: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [rows, width] and w [outputs, width] with x @ w.T = 0 in exact arithmetic: what comes out is rounding error."""
    generator = torch.Generator(device).manual_seed(0)
    half, odd = divmod(width, 2)
    order = torch.randperm(width, generator=generator, device=device)
    w = torch.randn(outputs, half, generator=generator, device=device).to(dtype)
    x = torch.randn(rows, half, generator=generator, device=device).to(dtype)
    x, w = torch.cat((x, -x, x.new_zeros(rows, odd)), 1), torch.cat((w, w, w.new_ones(outputs, odd)), 1)
    return x[:, order], w[:, order]


class RowCounts:
    """The row counts of one product that agree with its fixed tile, bit for bit. Only these are ever computed with."""

    def __init__(self, agreeing: Iterable[int]) -> None:
        self.agreeing = sorted({TILE, *agreeing})

    @classmethod
    def measure(cls, product: Product, x: Tensor) -> "RowCounts":
        """Try COUNTS on x [rows, ...], as far as there are rows."""
        tiled = torch.cat([product(tile) for tile in x.split(TILE)])

        def agrees(rows: int) -> bool:
            windows = WINDOWS if rows <= TILE else 1
            starts = range(0, min(len(x) - rows, (windows - 1) * rows) + 1, rows)
            return all(torch.equal(product(x[i : i + rows]), tiled[i : i + rows]) for i in starts)

        return cls(rows for rows in COUNTS if rows <= len(x) and agrees(rows))

    def both(self, other: "RowCounts") -> "RowCounts":
        """The counts that agree for this product and for another."""
        return RowCounts(set(self.agreeing) & set(other.agreeing))

    def padded(self, rows: int) -> int:
        """The smallest count that holds `rows` rows. There must be one."""
        return self.agreeing[bisect_left(self.agreeing, rows)]

    def pieces(self, rows: int) -> list[int]:
        """Counts to compute `rows` rows with, in order; the last may be more than is left, and is padded.

        Few rows go into one piece: a second one would read the weights again. Many go into the largest that fit.
        """
        pieces: list[int] = []
        while rows > min(ONE_PIECE, self.agreeing[-1]):
            pieces.append(self.agreeing[bisect_right(self.agreeing, rows) - 1])
            rows -= pieces[-1]
        return [*pieces, self.padded(rows)] if rows else pieces

    def cut(self, rows: int) -> list[int]:
        """As `pieces`, for a multiple of TILE, with nothing to pad."""
        whole = [count for count in self.agreeing if count % TILE == 0]
        pieces: list[int] = []
        while rows:
            pieces.append(whole[bisect_right(whole, rows) - 1])
            rows -= pieces[-1]
        return pieces

    def apply(self, product: Product, x: Tensor) -> Tensor:
        """product(x) for x [T, ...], each row with the bits that it would have in any other batch."""
        pieces = self.pieces(x.shape[0]) or [0]
        missing = sum(pieces) - x.shape[0]
        if missing:
            x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
        out = product(x) if len(pieces) == 1 else torch.cat([product(part) for part in x.split(pieces)])
        return out[: x.shape[0] - missing] if missing else out
