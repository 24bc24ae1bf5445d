"""The playground page and the headers that it is served with."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PlaygroundPage:
    """One file without a build step: a page that runs its own script alone and requests nothing but this server."""

    html: str

    @classmethod
    def read(cls) -> PlaygroundPage:
        return cls((Path(__file__).parent / "playground.html").read_text(encoding="utf-8"))

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Content-Security-Policy": self.policy,
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "Cross-Origin-Opener-Policy": "same-origin",
        }

    @property
    def policy(self) -> str:
        """Returns the Content-Security-Policy: the page's own script and style by their hashes, and text never becomes markup."""
        hashes: dict[str, list[str]] = {"script": [], "style": []}
        for kind, content in _INLINE.findall(self.html):
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            hashes[kind].append(f"'sha256-{digest}'")
        sources = [f"{kind}-src {' '.join(digests)}" for kind, digests in hashes.items()]
        rules = [
            "default-src 'none'",
            *sources,
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
        return "; ".join(rules)
