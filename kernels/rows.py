"""Matrix products whose rows do not depend on one another.

Stock matrix products pick their algorithm by the number of rows, and with it the order of accumulation: the same row
may come out with other bits in a batch of 1 and of 37. Which row counts agree differs by processor, library and shape,
so it is measured once per shape, on random data: counts that gave the same bits as the fixed tile of `TILE` rows are
used as they are; other inputs are padded to one that did, and cut where no larger one did.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TILE = 16  # the fixed tile that all are compared with: never worse than one row for a memory-bound product
SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
LARGE = (32, 48, 80, 128, 272, 512, 1024)
Product = Callable[[Tensor], Tensor]


class RowCounts:
    """Which row counts of one product agree with its fixed tile, bit for bit.

    `small`: the agreeing counts up to TILE. `chunk`: the largest of `large` up to which all agreed; multiples of TILE
    below it are used, longer inputs are cut by it. `sample(rows)` makes a random input [rows, ...].
    """

    def __init__(self, product: Product, sample: Callable[[int], Tensor], large: tuple[int, ...] = LARGE) -> None:
        x = sample(max(large))
        tiled = torch.cat([product(tile) for tile in x.split(TILE)])
        self.small = tuple(rows for rows in SMALL if torch.equal(product(x[:rows]), tiled[:rows])) or (TILE,)
        self.chunk = TILE
        for rows in large:
            if not torch.equal(product(x[:rows]), tiled[:rows]):
                break
            self.chunk = rows

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
