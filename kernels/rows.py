"""Matrix products whose rows do not depend on one another.

Stock matrix products pick their algorithm by the number of rows, and with it the order of accumulation: the same row
may come out with other bits in a batch of 1 and of 37. Which row counts agree differs by processor, library and shape,
so it is measured once per shape: counts that gave the same bits as the fixed tile of `TILE` rows are used as they are;
other inputs are padded to one that did, and cut where no larger one did.

The measurement uses sums that cancel to nothing but their rounding errors. On ordinary random data two orders of
accumulation agree most of the time after rounding to bfloat16, and a wrong count would pass.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TILE = 16  # the fixed tile that all are compared with: never worse than one row for a memory-bound product
SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
LARGE = (32, 48, 80, 128, 272, 512, 1024)
WINDOWS = 4  # how many different groups of rows each count is tried on
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
    """Which row counts of one product agree with its fixed tile, bit for bit.

    `small`: the agreeing counts up to TILE. `chunk`: the largest of LARGE up to which all agreed; multiples of TILE
    below it are used, longer inputs are cut by it.
    """

    def __init__(self, small: Sequence[int], chunk: int) -> None:
        self.small, self.chunk = tuple(small), chunk

    @classmethod
    def measure(cls, product: Product, x: Tensor) -> "RowCounts":
        """Try counts on x [rows, ...], rows as many as the largest count to be tried."""
        tiled = torch.cat([product(tile) for tile in x.split(TILE)])

        def agrees(rows: int) -> bool:
            starts = range(0, min(len(x) - rows, (WINDOWS - 1) * rows) + 1, rows)
            return all(torch.equal(product(x[i : i + rows]), tiled[i : i + rows]) for i in starts)

        chunk = TILE
        for rows in LARGE:
            if rows > len(x) or not agrees(rows):
                break
            chunk = rows
        return cls([rows for rows in SMALL if agrees(rows)] or [TILE], chunk)

    def both(self, other: "RowCounts") -> "RowCounts":
        """The counts that agree for this product and for another."""
        return RowCounts([rows for rows in self.small if rows in other.small], min(self.chunk, other.chunk))

    def padded(self, rows: int) -> int:
        """The row count to compute `rows` rows with (rows <= chunk)."""
        return next((count for count in self.small if count >= rows), -(-rows // TILE) * TILE)

    def apply(self, product: Product, x: Tensor) -> Tensor:
        """product(x) for x [T, ...], each row with the bits that it would have in any other batch."""
        rows = x.shape[0]
        if rows > self.chunk:
            return torch.cat([self.apply(product, part) for part in x.split(self.chunk)])
        padded = self.padded(rows)
        if padded == rows:
            return product(x)
        return product(torch.cat((x, x.new_zeros(padded - rows, *x.shape[1:]))))[:rows]
