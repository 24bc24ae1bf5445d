"""The ticks of an axis and the text of numbers, shared by all drawings."""

from __future__ import annotations

import math

_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def ticks(low: float, high: float, most: int, *, x_axis: str = "") -> list[float]:
    """Returns up to `most` round numbers within an axis; whole ones for steps and tokens.

    >>> ticks(0, 10, 6), ticks(1, 7200, 4, x_axis="time"), ticks(0.9, 1.1, 3, x_axis="step")
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [1800.0, 3600.0, 5400.0, 7200.0], [1.0])
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return []
    rough = (high - low) / max(1, most)
    if x_axis == "time":
        step = next((float(step) for step in _TIME_STEPS_S if step >= rough), None) or _round_up(rough / 86400) * 86400
    else:
        step = _round_up(rough)
    if x_axis in ("step", "tokens"):
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    count = min(4 * most, math.floor(high / step + 1e-9) - first + 1)
    places = dict.fromkeys((first + index) * step for index in range(count))
    # Far from zero a short axis has few numbers at all, and a product may be rounded out of it.
    return [place for place in places if low - step * 1e-6 <= place <= high + step * 1e-6]


def _round_up(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def x_text(value: float, x_axis: str) -> str:
    """Formats a place on the x axis.

    >>> x_text(1500, "step"), x_text(2.5e9, "tokens"), x_text(5400, "time"), x_text(50, "time")
    ('1.5k', '2.5B', '1:30 h', '50 s')
    """
    if x_axis != "time":
        return compact(value)
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours // 24}d {hours % 24}h" if hours >= 48 else f"{hours}:{minutes:02d} h"
    return f"{minutes}:{seconds:02d} min" if minutes else f"{seconds} s"


def compact(value: float) -> str:
    """Up to four significant digits and a unit.

    >>> [compact(value) for value in (0, 2.34567, 12345, 1.5e6, 3e-4, -0.25, 1e20)]
    ['0', '2.346', '12.35k', '1.5M', '3e-4', '-0.25', '1e20']
    """
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size != 0 and (size < 1e-3 or size >= 1e15):
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"
