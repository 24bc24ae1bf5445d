"""Draws a model from its spec: one box for each part, in the order in which a token passes them; equal layers once."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from petatron.plan.model_parts import LayerGroup, ModelPart, ModelParts

_WIDTH, _LEFT, _RIGHT, _TOP = 720, 150, 20, 84
_TITLE_HEIGHT, _LINE, _GAP, _GROUP_GAP = 26, 15, 8, 18
_BOX, _BRANCH, _EDGE, _TEXT, _MUTED = "#eef1f5", "#dbe9f6", "#9aa4b1", "#1c2128", "#656d76"
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def model_svg(parts: ModelParts, *, title: str) -> str:
    """Returns an SVG document: GEMMs with their widths, parameters, and the share of the FLOPs."""
    drawing = _Drawing(parts)
    body = list(drawing.draw())
    height = drawing.y + 12
    total = (
        f"{short_number(parts.parameters)} parameters, {short_number(parts.flops)}FLOP per token forward and backward"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="20" y="30" font-size="17" fill="{_TEXT}">{escape(title)}</text>',
            f'<text x="20" y="50" fill="{_MUTED}">{escape(total)}</text>',
            f'<text x="{_WIDTH - _RIGHT}" y="{_TOP - 10}" text-anchor="end" fill="{_MUTED}">parameters, share of FLOPs</text>',
            *body,
            "</svg>",
            "",
        ]
    )


def model_text(parts: ModelParts) -> Iterator[str]:
    """Yields the lines of a table of the same."""
    yield f"{'part':44}{'parameters':>18}{'of FLOPs':>10}"
    for part in parts.before:
        yield _row(part.title, part, 1, parts.flops)
    for group in parts.groups:
        for index, part in parts.between:
            if index == group.first:
                yield _row(part.title, part, 1, parts.flops)
        yield group_name(group)
        for layer in group.layers:
            for number, part in enumerate(layer):
                yield _row(f"  {'-' if number == 0 else ' '} {part.title}", part, group.repeats, parts.flops)
    for part in parts.after:
        yield _row(part.title, part, 1, parts.flops)
    yield f"{'all':44}{parts.parameters:>18,}{'100 %':>10}"


def group_name(group: LayerGroup) -> str:
    """Returns `layers 0 to 11`, and how often several different ones repeat.

    >>> group_name(LayerGroup(3, 1, ((),))), group_name(LayerGroup(0, 12, ((),))), group_name(LayerGroup(1, 7, ((), ())))
    ('layer 3', 'layers 0 to 11', 'layers 1 to 14, 7 times')
    """
    if group.first == group.last:
        return f"layer {group.first}"
    times = f", {group.repeats} times" if len(group.layers) > 1 else ""
    return f"layers {group.first} to {group.last}{times}"


def short_number(value: float) -> str:
    """Returns three digits and a unit.

    >>> short_number(110106428), short_number(30522), short_number(768), short_number(0)
    ('110 M', '30.5 k', '768 ', '0 ')
    """
    for size, unit in _UNITS:
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} "


def _row(name: str, part: ModelPart, times: int, all_flops: float) -> str:
    share = times * part.flops / all_flops if all_flops else 0.0
    return f"{name:44}{times * part.parameters:>18,}{f'{100 * share:.1f} %' if share else '':>10}"


class _Drawing:
    def __init__(self, parts: ModelParts) -> None:
        self._parts, self.y = parts, _TOP

    def draw(self) -> Iterator[str]:
        for part in self._parts.before:
            yield from self._box(part, 1, _BOX)
        for group in self._parts.groups:
            for index, part in self._parts.between:
                if index == group.first:
                    yield from self._box(part, 1, _BOX)
            yield from self._group(group)
        for part in self._parts.after:
            yield from self._box(part, 1, _BOX)

    def _group(self, group: LayerGroup) -> Iterator[str]:
        self.y += _GROUP_GAP - _GAP
        top = self.y
        for number, layer in enumerate(group.layers):
            self.y += _GAP if number else 0
            for part in layer:
                yield from self._box(part, group.repeats, _BRANCH)
        bottom, x = self.y - _GAP, _LEFT - 14
        yield f'<path d="M {x + 6} {top} H {x} V {bottom} H {x + 6}" fill="none" stroke="{_EDGE}" stroke-width="2"/>'
        middle, times = (top + bottom) / 2, f"{group.repeats} x" if group.repeats > 1 else ""
        first = f"layer {group.first}" if group.first == group.last else f"layers {group.first}-{group.last}"
        lines = [f'<tspan font-size="15" fill="{_TEXT}">{times}</tspan>'] * bool(times) + [f"<tspan>{first}</tspan>"]
        for at, line in enumerate(lines):
            y = middle + 4 + (at - (len(lines) - 1) / 2) * 17
            yield f'<text x="{x - 8}" y="{y:.0f}" text-anchor="end" fill="{_MUTED}">{line}</text>'
        self.y += _GROUP_GAP - _GAP

    def _box(self, part: ModelPart, times: int, fill: str) -> Iterator[str]:
        lines = [", ".join(part.gemms[at : at + 2]) for at in range(0, len(part.gemms), 2)]
        height, width = _TITLE_HEIGHT + _LINE * len(lines), _WIDTH - _LEFT - _RIGHT
        share = times * part.flops / self._parts.flops if self._parts.flops else 0.0
        cost = short_number(times * part.parameters) + (f", {100 * share:.1f} %" if share else "")
        norms = f'<tspan dx="8" fill="{_MUTED}">{part.norms}</tspan>' if part.norms else ""
        yield (
            f'<rect x="{_LEFT}" y="{self.y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{_EDGE}"/>'
            f'<text x="{_LEFT + 12}" y="{self.y + 17}" fill="{_TEXT}">{escape(part.title.replace("_", " "))}{norms}</text>'
            f'<text x="{_LEFT + width - 12}" y="{self.y + 17}" text-anchor="end" fill="{_TEXT}">{cost}</text>'
        )
        for number, line in enumerate(lines, start=1):
            y = self.y + 17 + _LINE * number
            yield f'<text x="{_LEFT + 12}" y="{y}" font-size="11" fill="{_MUTED}">{escape(line.replace("->", "→"))}</text>'
        self.y += height + _GAP
