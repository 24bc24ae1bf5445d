"""A signature tells who made a checkpoint: whoever changes anything in it, and mends all digests, cannot sign it again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files import signature
from petatron.checkpoint.files.manifest import table_digest
from petatron.checkpoint.files.signature import SIGNATURE_FILE, open_signer, read_public_keys
from petatron.checkpoint.inspect.inspect import verify_checkpoint
from petatron.cli.main import main

FLAGS = "tiny-llama --mock-data --num-layers 1 --seq-length 16 --lr 1e-3 --eval-iters 0 --live off --num-workers 0 --device cpu".split()


def make_key(folder: Path, name: str, *, pem: bool = False, key: object = None, encryption: object = None) -> Path:
    private = key or ed25519.Ed25519PrivateKey.generate()
    form = PrivateFormat.PKCS8 if pem else PrivateFormat.OpenSSH
    path = folder / name
    path.write_bytes(private.private_bytes(Encoding.PEM, form, encryption or NoEncryption()))  # type: ignore[attr-defined]
    path.chmod(0o600)
    kinds = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) if pem else (Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(private.public_key().public_bytes(*kinds))  # type: ignore[attr-defined]
    return path


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A signed checkpoint, its key, and the key of somebody else."""
    folder = tmp_path_factory.mktemp("signed")
    own, other = make_key(folder, "own"), make_key(folder, "other", pem=True)
    words = ["train", *FLAGS, "--train-iters", "1", "--save", str(folder / "out"), "--sign-key", str(own)]
    assert main(words) == 0
    return folder / "out" / "step-00000001", own, other


@pytest.fixture
def copy(signed: tuple[Path, Path, Path], tmp_path: Path) -> Path:
    source, target = signed[0], tmp_path / "step-00000001"
    for path in sorted(source.rglob("*")):
        new = target / path.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            new.write_bytes(path.read_bytes())
    return target


def problems(step: Path, *keys: Path) -> list[str]:
    trusted = [key for path in keys for key in read_public_keys(path.with_suffix(".pub"))]
    return [finding.text for finding in verify_checkpoint(step, trusted_keys=trusted).findings]


def test_the_key_that_signed_is_told_from_others(
    signed: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    step, own, other = signed
    assert problems(step, own) == [] and problems(step, other, own) == []
    (found,) = problems(step, other)
    assert "which is not a trusted key" in found and "SHA256:" in found
    verify = ["checkpoint", "verify", str(step.parent), "--require-signature"]
    assert main([*verify, str(own.with_suffix(".pub"))]) == 0
    assert main([*verify, str(other.with_suffix(".pub"))]) == 1
    assert "not a trusted key" in capsys.readouterr().out


def test_a_signed_checkpoint_is_resumed_and_continued(signed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    step, own, _ = signed
    words = ["train", *FLAGS, "--train-iters", "2", "--load", str(step.parent), "--save", str(tmp_path / "more")]
    assert main([*words, "--sign-key", str(own), "--override-opt-param-scheduler"]) == 0
    assert problems(tmp_path / "more" / "step-00000002", own) == []


def test_its_files_have_digests_that_cannot_be_forged(signed: tuple[Path, Path, Path]) -> None:
    table = json.loads((signed[0] / "state" / "rank-00000.table.json").read_text())
    assert all(len(digest) == 64 for _, digests in table["files"].values() for digest in digests)


def change_step(step: Path) -> None:
    """A forger who knows the format: another fact, and a manifest whose own digest fits."""
    from petatron.checkpoint.files.manifest import _digest

    body = json.loads((step / "manifest.json").read_text())
    body.pop("digest")
    body["facts"]["forged"] = True
    (step / "manifest.json").write_text(json.dumps({**body, "digest": _digest(body)}, indent=1))


def change_table(step: Path) -> None:
    path = step / "state" / "rank-00000.table.json"
    content = path.read_bytes().replace(b'"local"', b'"local" ')
    path.write_bytes(content)
    manifest = step / "manifest.json"
    body = json.loads(manifest.read_text())
    assert body["tables"][str(path.relative_to(step))][1] != table_digest(content)


def change_weight(step: Path) -> None:
    path = next((step / "model").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def sign_by_other(step: Path) -> None:
    key = make_key(step.parent, "forger")
    (step / SIGNATURE_FILE).write_bytes(open_signer(key)((step / "manifest.json").read_bytes()))


def no_signature(step: Path) -> None:
    (step / SIGNATURE_FILE).unlink()


def not_a_signature(step: Path) -> None:
    (step / SIGNATURE_FILE).write_text(
        '{"format": "petatron signature", "algorithm": "ed25519", "key": "", "signature": 7}'
    )


FORGERIES = {
    "another fact": (change_step, "is not a signature of this manifest"),
    "another table": (change_table, ""),
    "another weight": (change_weight, "does not have the content that was saved"),
    "another signer": (sign_by_other, "which is not a trusted key"),
    "nobody": (no_signature, "is not signed"),
    "no signature": (not_a_signature, "cannot be read as a signature"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_whatever_is_changed_is_found(signed: tuple[Path, Path, Path], copy: Path, name: str) -> None:
    assert problems(copy, signed[1]) == []
    change, words = FORGERIES[name]
    change(copy)
    found = problems(copy, signed[1])
    assert found and words in " ".join(found), found


def test_a_signature_over_weak_digests_is_not_enough(signed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    assert main(["train", *FLAGS, "--train-iters", "1", "--save", str(tmp_path / "out")]) == 0
    step = tmp_path / "out" / "step-00000001"
    assert not (step / SIGNATURE_FILE).exists()
    (step / SIGNATURE_FILE).write_bytes(open_signer(signed[1])((step / "manifest.json").read_bytes()))
    (found,) = problems(step, signed[1])
    assert "was saved without --sign-key" in found


BAD_KEYS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "none", "is not a file"),
    "for all to read": (lambda folder: (key := make_key(folder, "k"), key.chmod(0o644))[0], "others may read"),
    "locked": (lambda folder: make_key(folder, "k", pem=True, encryption=BestAvailableEncryption(b"x")), "passphrase"),
    "another kind": (
        lambda folder: make_key(folder, "k", pem=True, key=ec.generate_private_key(ec.SECP256R1())),
        "not Ed25519",
    ),
    "no key": (lambda folder: (path := folder / "k", path.write_text("x"), path.chmod(0o600))[0], "no private key"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_key_that_cannot_be_used_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    make, words = BAD_KEYS[name]
    path = make(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        open_signer(path)


def test_public_keys_come_in_both_forms_and_nothing_else(tmp_path: Path) -> None:
    ssh, pem = make_key(tmp_path, "a"), make_key(tmp_path, "b", pem=True)
    both = tmp_path / "both.pub"
    both.write_bytes(b"# trusted\n" + ssh.with_suffix(".pub").read_bytes() + b" name@host\n")
    assert read_public_keys(both) == read_public_keys(ssh.with_suffix(".pub"))
    assert len(read_public_keys(pem.with_suffix(".pub"))) == 1
    other = make_key(tmp_path, "c", pem=True, key=ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(CheckpointError, match="not Ed25519"):
        read_public_keys(other.with_suffix(".pub"))
    (tmp_path / "junk.pub").write_text("junk")
    with pytest.raises(CheckpointError, match="no public key"):
        read_public_keys(tmp_path / "junk.pub")
    os.mkfifo(tmp_path / "pipe.pub")
    with pytest.raises(CheckpointError, match="is not a file"):
        read_public_keys(tmp_path / "pipe.pub")


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.exceptions", None)
    with pytest.raises(CheckpointError, match=r"pip install 'petatron\[sign\]'"):
        signature.open_signer(make_key(tmp_path, "k"))
