"""Numbers as people say them."""

NOTHING = "-"
_STEPS = ((86_400_000, "d", 3_600_000, "h"), (3_600_000, "h", 60_000, "m"), (60_000, "m", 1000, "s"))


def duration(ms: float | None) -> str:
    """Like 850ms, 4.2s, 45s, 3m20s, 2h5m, 3d4h; never rounded up."""
    if ms is None:
        return NOTHING
    if ms < 0:
        return "-" + duration(-ms)
    for size, name, part, part_name in _STEPS:
        if ms >= size:
            rest = int(ms % size // part)
            return f"{int(ms // size)}{name}" + (f"{rest}{part_name}" if rest else "")
    if ms < 1000:
        return f"{int(ms)}ms"
    return f"{int(ms) // 100 / 10}s" if ms < 10_000 else f"{int(ms) // 1000}s"


def size(count: int | None) -> str:
    """Like 312 B, 4.0 KiB, 1.5 GiB."""
    if count is None:
        return NOTHING
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(count: int, word: str) -> str:
    """`1 job`, `1,204 jobs`."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def number(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"
