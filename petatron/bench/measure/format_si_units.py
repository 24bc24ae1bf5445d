"""Amounts and speeds as people read them: a few digits, and the prefix that leaves something before the point."""

from __future__ import annotations

_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def format_si(amount: float, unit: str, *, digits: int = 3) -> str:
    """Formats an amount with its unit; the largest prefix is T, so that FP8 and bf16 GEMMs have the same.

    >>> format_si(4.018e12, "B/s"), format_si(1.3e15, "FLOP/s"), format_si(12.34e9, "B/s"), format_si(5.0, "FLOP/s")
    ('4.02 TB/s', '1300 TFLOP/s', '12.3 GB/s', '5.00 FLOP/s')
    """
    prefix, size = next((pair for pair in _PREFIXES if amount >= pair[1]), ("", 1.0))
    value = amount / size
    return f"{value:.{max(0, digits - len(str(int(value))))}f} {prefix}{unit}"
