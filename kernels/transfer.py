"""Numbers on their way between host and device, without waiting for what the device was asked to do before.

CUDA copies from and to ordinary memory only when all earlier work is done, so that no step could be launched while
another runs. Page-locked memory has no such wait; torch keeps it for the next copy once the device is through with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(numbers: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A list of numbers, or of equally long tuples of them, as a tensor on the device."""
    return to_device(torch.tensor(numbers, dtype=dtype), device)


def upload_all(lists: Sequence[list[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Several lists of whole numbers in one copy: int64 each."""
    numbers = upload([number for part in lists for number in part], device)
    return numbers.split([len(part) for part in lists])


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on the device; on a CPU the very same."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def page_locked(count: int, device: torch.device) -> Tensor:
    """Memory of the host's for so many int32 numbers on their way to or from the device, to be used again and again."""
    return torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")


def send(source: Tensor, target: Tensor) -> None:
    """Start a copy between page-locked memory and the device, either way. Both are contiguous and alike."""
    target.copy_(source, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A tensor whose numbers the host may read once the device has come so far; on a CPU the very same."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Arrival:
    """When copies to the host are there. `start` them, then `wait`: the device may have been given more meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def start(self) -> None:
        """All copies so far belong to it."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
