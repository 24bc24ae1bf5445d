"""A stand-in for the Hugging Face hub: a folder laid out as OWNER/NAME/files, and a local server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_parquet(path: Path, rows: Sequence[object], *, key: str = "text", row_group_size: int = 3) -> Path:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(rows))), key: list(rows)})
    parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@dataclass
class StandInHub:
    """What the server was asked for (`downloads`), and how it refuses (`refuse`: an HTTP status and the hub's error code)."""

    folder: Path
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    refuse: tuple[int, str] | None = None


@contextmanager
def serve(folder: Path) -> Iterator[StandInHub]:
    hub = StandInHub(folder)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _json(self, content: object) -> None:
            self._answer(json.dumps(content).encode(), Content_Type="application/json")

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if hub.refuse is not None:
                self._answer(b"{}", hub.refuse[0], X_Error_Code=hub.refuse[1])
            elif parts[0] == "api" and "tree" in parts:  # api/models/OWNER/NAME/tree/COMMIT
                root = folder / parts[2] / parts[3]
                files = [path for path in sorted(root.rglob("*")) if path.is_file()]
                names = [(path.relative_to(root).as_posix(), path.read_bytes()) for path in files]
                self._json([{"type": "file", "path": name, "size": len(x), "oid": sha1(x)} for name, x in names])
            elif parts[0] == "api":  # api/datasets/OWNER/NAME or api/models/OWNER/NAME/revision/main
                root = folder / parts[2] / parts[3]
                names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
                siblings = [{"rfilename": name} for name in names]
                card = {"license": ["cc-by-sa-3.0", "gfdl"]}
                self._json({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "cardData": card})
            else:  # datasets/OWNER/NAME/resolve/COMMIT/file, or of a model without the first
                owner, name, _, _, *file = parts if parts[0] != "datasets" else parts[1:]
                content = (folder / owner / name / "/".join(file)).read_bytes()
                if self.command == "GET":
                    hub.downloads.append("/".join(file))
                etag = f'"{sha1(content)}"'
                self._answer(content, ETag=etag, X_Repo_Commit=COMMIT)

        def do_POST(self) -> None:
            parts = self.path.strip("/").split("/")
            asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
            root = folder / parts[2] / parts[3]
            sizes = {name: (root / name).stat().st_size for name in asked}
            self._json([{"type": "file", "path": name, "size": size, "oid": "0"} for name, size in sizes.items()])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
