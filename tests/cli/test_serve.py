"""`petatron serve`: what is wrong is said before a model is loaded, and help loads nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.mesh.launch.environment import api_key_from_env


@pytest.fixture(autouse=True)
def no_key_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PETATRON_API_KEY", raising=False)


def _assert_fails(capsys: pytest.CaptureFixture[str], words: list[str], said: str, *, code: int = 2) -> None:
    assert main(["serve", *words]) == code
    assert said in capsys.readouterr().err


def test_wrong_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    here = str(tmp_path)
    _assert_fails(capsys, [], "CHECKPOINT is not given")
    _assert_fails(capsys, ["--tp", "2", here], "CHECKPOINT is not given")
    _assert_fails(capsys, [here, "--load", here], "is given twice")
    _assert_fails(capsys, [str(tmp_path / "none")], "is not a folder")
    _assert_fails(capsys, [here, "--host", "0.0.0.0"], "no API key is set")
    _assert_fails(capsys, [here, "--max-open", "0", "--port", "70000"], "--port 70000 is not a port")
    _assert_fails(capsys, [here, "--watch"], "needs the folder of a run")
    _assert_fails(capsys, [here], "holds no checkpoint", code=1)
    _assert_fails(capsys, [here, "--api-key-file", str(tmp_path / "none")], "--api-key-file", code=1)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "empty").chmod(0o600)
    _assert_fails(capsys, [here, "--api-key-file", str(tmp_path / "empty")], "has no key")


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    _assert_fails(capsys, [str(tmp_path)], "pip install 'petatron[serve]'", code=1)


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "keys"
    file.write_text("0123456789abcdef0\n0123456789abcdef1\n")
    for mode in (0o640, 0o604, 0o620, 0o602):
        file.chmod(mode)
        words = [str(tmp_path), "--host", "0.0.0.0", "--api-key-file", str(file)]
        _assert_fails(capsys, words, "may be read or changed by other users")
    file.chmod(0o600)
    _assert_fails(
        capsys, [str(tmp_path), "--host", "0.0.0.0", "--api-key-file", str(file)], "holds no checkpoint", code=1
    )
    assert api_key_from_env({"PETATRON_API_KEY": "x"}) == "x" and api_key_from_env({"PETATRON_API_KEY": ""}) is None


def test_a_port_in_use_is_named():
    pytest.importorskip("fastapi")
    from petatron.base.errors import LaunchError
    from petatron.serve.http.server import address_of, open_listener
    from petatron.serve.serve_options import ServeOptions

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--port {port}"):
            open_listener(ServeOptions(port=port))
    with open_listener(ServeOptions(port=0)) as listener:
        assert address_of(listener).startswith("http://127.0.0.1:") and listener.proto == socket.IPPROTO_TCP


def test_help_imports_neither_torch_nor_a_framework():
    program = (
        "import sys; from petatron.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'fastapi', 'pydantic', 'uvicorn'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--watch" in done.stdout and "--api-key-file" in done.stdout
