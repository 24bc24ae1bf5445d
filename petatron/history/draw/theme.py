"""Colors of light and dark drawings. Runs have the colors of Okabe and Ito's palette, which color-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Theme:
    """Colors of the page, its text, and the runs in their order."""

    page: str
    text: str
    muted: str
    grid: str
    alarm: str
    runs: tuple[str, ...]

    def run_color(self, index: int) -> str:
        return self.runs[index % len(self.runs)]


THEMES: Mapping[str, Theme] = {
    "light": Theme(
        "#ffffff", "#1c2128", "#656d76", "#e4e7eb", "#cf222e",
        ("#0072b2", "#d55e00", "#009e73", "#b5478a", "#8a6d00", "#3a87c8", "#5b5fc7", "#444c56"),
    ),
    "dark": Theme(
        "#0f1419", "#e6edf3", "#8b949e", "#262c34", "#ff7b72",
        ("#58a6ff", "#ff9e4a", "#3fb98f", "#e48ac0", "#e3c341", "#79d0ff", "#a5a5ff", "#c9d1d9"),
    ),
}  # fmt: skip
