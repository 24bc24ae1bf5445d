"""A signature tells who made a checkpoint: whoever changes anything in it, and mends all digests, cannot sign it again."""

from __future__ import annotations

import json
import os
import re
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

from petatron.base.errors import CheckpointError, ConfigError
from petatron.checkpoint.files import signature
from petatron.checkpoint.files.manifest import table_digest
from petatron.checkpoint.files.signature import SIGNATURE_FILE, open_signer, read_public_keys
from petatron.checkpoint.inspect.verify_checkpoint import verify_checkpoint
from petatron.cli.main import main
from petatron.validate import load_config
from tests.longform import diagonal
from tests.security.limits import limited
from tests.unit.checkpoint.rewriting import rewrite_manifest

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


def test_a_resumed_run_says_that_it_no_longer_signs(
    signed: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, own, _ = signed
    words = ["train", *FLAGS, "--train-iters", "2", "--load", str(step.parent), "--override-opt-param-scheduler"]
    notice = "earlier steps are signed, new ones will not be"
    assert main([*words, "--save", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.count(notice) == 1 and notice in (tmp_path / "a" / "metrics.jsonl").read_text()
    assert main([*words, "--save", str(tmp_path / "b"), "--sign-key", str(own)]) == 0
    assert main([*words, "--log-dir", str(tmp_path / "c")]) == 0, "nothing is saved, so nothing is not signed"
    assert main(["train", *FLAGS, "--train-iters", "3", "--load", str(tmp_path / "a"), "--save", str(tmp_path / "d"),
                 "--override-opt-param-scheduler"]) == 0, "that checkpoint has no signature"  # fmt: skip
    assert notice not in capsys.readouterr().out


def test_where_the_key_is_is_written_nowhere(
    signed: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints and settings go to others."""
    step, own, _ = signed
    files = [path for path in step.parent.rglob("*") if path.is_file()]
    assert {"manifest.json", "config.yaml", "metrics.jsonl"} <= {path.name for path in files}
    assert [path for path in files if str(own).encode() in path.read_bytes()] == []
    assert "# sign_key: null  (where a private key is is not kept" in (step.parent / "config.yaml").read_text()
    load_config(files=[step.parent / "config.yaml"])
    moved = make_key(tmp_path, "moved")
    words = ["train", *FLAGS, "--train-iters", "2", "--load", str(step.parent), "--save", str(tmp_path / "more")]
    assert main([*words, "--sign-key", str(moved), "--override-opt-param-scheduler"]) == 0
    assert "sign_key" not in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(step), str(tmp_path / "more" / "step-00000002")]) == 1
    assert "sign_key" not in capsys.readouterr().out


def test_older_checkpoints_that_say_where_the_key_was(
    signed: tuple[Path, Path, Path], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_manifest(copy, lambda body: body["facts"]["facts"]["config"]["checkpoint"].update(sign_key="/home/me/key"))
    main(["checkpoint", "diff", str(signed[0]), str(copy)])
    main(["checkpoint", "inspect", str(copy)])
    assert "/home/me/key" not in capsys.readouterr().out


def test_a_key_without_checkpoints_to_sign_is_a_problem_among_the_others(tmp_path: Path) -> None:
    flags = ["--mock-data", "--train-iters", "1", "--sign-key", str(make_key(tmp_path, "k"))]
    with pytest.raises(ConfigError) as caught:
        load_config(flags, preset="tiny-llama")
    assert {problem.where for problem in caught.value.problems} == {"--sign-key", "--lr"}
    assert "needs --save" in str(caught.value)


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


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "k"
    path.write_text(text)
    path.chmod(mode)
    return path


BAD_KEYS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "none", "none is missing"),
    "a FIFO": (lambda folder: (path := folder / "k", os.mkfifo(path))[0], "is a FIFO, not a file"),
    "empty": (lambda folder: key_file(folder, ""), "is empty"),
    "blank": (lambda folder: key_file(folder, " \n\n"), "is empty"),
    "a gigabyte": (
        lambda folder: (path := key_file(folder, "x"), os.truncate(path, 1 << 30))[0],
        "it has 1,073,741,824 bytes",
    ),
    "a public key": (
        lambda folder: make_key(folder, "k").with_suffix(".pub"),
        "holds a public key.*the file without .pub",
    ),
    "a public key in PEM": (lambda folder: make_key(folder, "k", pem=True).with_suffix(".pub"), "holds a public key"),
    "no key, for all to read": (lambda folder: key_file(folder, "junk", 0o644), "holds no private key"),
    "half a key": (
        lambda folder: key_file(folder, make_key(folder, "h").read_text()[:200]),
        "a private key that is damaged, or of another",
    ),
    "half a key in PEM": (
        lambda folder: key_file(folder, make_key(folder, "h", pem=True).read_text()[:50]),
        "a private key that is damaged",
    ),
    "for all to read": (lambda folder: (key := make_key(folder, "k"), key.chmod(0o644))[0], "others may read"),
    "locked": (lambda folder: make_key(folder, "k", pem=True, encryption=BestAvailableEncryption(b"x")), "passphrase"),
    "another kind": (
        lambda folder: make_key(folder, "k", pem=True, key=ec.generate_private_key(ec.SECP256R1())),
        "not Ed25519",
    ),
    "no key": (lambda folder: key_file(folder, "x"), "no private key"),
}


@diagonal(2)
@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_key_that_cannot_be_used_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    make, words = BAD_KEYS[name]
    path = make(tmp_path)
    with limited(), pytest.raises(CheckpointError, match=words):
        open_signer(path)
    run = tmp_path / "new" / "run"
    assert main(["train", *FLAGS, "--train-iters", "1", "--save", str(run), "--sign-key", str(path)]) == 1
    assert re.search(words, capsys.readouterr().err) and not run.parent.exists(), "no folder, and no .lock in it"


def test_public_keys_come_in_both_forms_and_nothing_else(tmp_path: Path) -> None:
    ssh, pem = make_key(tmp_path, "a"), make_key(tmp_path, "b", pem=True)
    both = tmp_path / "both.pub"
    both.write_bytes(b"# trusted\n" + ssh.with_suffix(".pub").read_bytes() + b" name@host\n")
    assert read_public_keys(both) == read_public_keys(ssh.with_suffix(".pub"))
    assert len(read_public_keys(pem.with_suffix(".pub"))) == 1
    other = make_key(tmp_path, "c", pem=True, key=ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(CheckpointError, match="line 1 has a key that is not Ed25519"):
        read_public_keys(other.with_suffix(".pub"))
    os.mkfifo(tmp_path / "pipe.pub")
    with limited(), pytest.raises(CheckpointError, match="is a FIFO, not a file"):
        read_public_keys(tmp_path / "pipe.pub")


def test_every_key_of_a_file_counts(signed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Several in PEM, several lines, and both in one file; a list may be longer than a key."""
    pems = [make_key(tmp_path, f"p{n}", pem=True).with_suffix(".pub") for n in range(3)]
    lines = [make_key(tmp_path, f"s{n}").with_suffix(".pub") for n in range(3)]
    whole = tmp_path / "all.pub"
    whole.write_bytes(
        b"  # ours\r\n" + b"\n".join(path.read_bytes() for path in [*pems, *lines]) + b" x" * 10_000 + b"\r\n"
        + signed[1].with_suffix(".pub").read_bytes()
    )  # fmt: skip
    found = read_public_keys(whole)
    single = [key for path in [*pems, *lines, signed[1].with_suffix(".pub")] for key in read_public_keys(path)]
    assert found == single and len(set(found)) == 7
    assert main(["checkpoint", "verify", str(signed[0]), "--require-signature", str(whole)]) == 0


RSA = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAQQ== me@host"
BAD_LINES = {
    "another type": (RSA, "line 3 has a key of type ssh-rsa, not Ed25519"),
    "a certificate": ("ssh-ed25519-cert-v01@openssh.com AAAA", "line 3 has a key of type ssh-ed25519-cert-v01"),
    "options": ('restrict,command="a b" ssh-ed25519 AAAA', "line 3 has options before the key"),
    "an authority": ("cert-authority ssh-ed25519 AAAA", "line 3 has options before the key"),
    "damaged": ("ssh-ed25519 AAAA", "line 3 has a key that is damaged"),
    "no content": ("ssh-ed25519", "line 3 has a key that is damaged"),
    "junk": ("what is this", "line 3 is no public key"),
    "escapes": ("ssh-\x1b[2J AAAA", r"line 3 has a key of type ssh-\u001b"),
    "an open block": ("-----BEGIN PUBLIC KEY-----\nMCow", "line 3 begins a key that is damaged"),
    "a private key": ("-----BEGIN OPENSSH PRIVATE KEY-----\nx\n-----END OPENSSH PRIVATE KEY-----", "line 3 begins a private key"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_the_line_that_spoils_a_list_is_named(tmp_path: Path, name: str) -> None:
    line, words = BAD_LINES[name]
    good = make_key(tmp_path, "good").with_suffix(".pub").read_text()
    (tmp_path / "list").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(CheckpointError) as caught:
        read_public_keys(tmp_path / "list")
    assert (
        words in str(caught.value) and str(tmp_path / "list") in str(caught.value) and "\x1b" not in str(caught.value)
    )


def test_all_lines_that_spoil_a_list_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"{RSA}\n# no key\njunk\n" + f"{RSA}\n" * 20)
    with pytest.raises(CheckpointError, match=r"line 1 .*; line 3 is no public key; line 4 .*and 14 more lines"):
        read_public_keys(tmp_path / "list")


@pytest.mark.parametrize(
    ("text", "words"), [("", "is empty"), ("\n \n", "is empty"), ("# ours\n", "has comments and no public key")]
)
def test_a_list_without_keys(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(CheckpointError, match=f"list {words}"):
        read_public_keys(tmp_path / "list")


SIGNATURE = {"format": "petatron signature", "algorithm": "ed25519"}
BROKEN_SIGNATURES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda path: path.write_text("{"), "it is not JSON"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe{"), "it is not JSON"),
    "nested": (lambda path: path.write_text("[" * 9000), "it is not JSON"),
    "a list": (lambda path: path.write_text("[]"), "it has another format"),
    "another format": (lambda path: path.write_text("{}"), "it has another format"),
    "no key": (lambda path: path.write_text(json.dumps(SIGNATURE)), "it has no key of 32 bytes"),
    "numbers": (lambda path: path.write_text(json.dumps(SIGNATURE | {"key": 7, "signature": []})), "it has no key of 32 bytes"),
    "no base64": (lambda path: path.write_text(json.dumps(SIGNATURE | {"key": "?", "signature": "\u00e9"})), "it has no key of"),
    "a gigabyte": (lambda path: os.truncate(path, 1 << 30), "it cannot be read: it has 1,073,741,824 bytes, and such a file at most"),
    "a FIFO": (lambda path: (path.unlink(), os.mkfifo(path)), "it is a FIFO, not a file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "it is a folder, not a file"),
}  # fmt: skip


@diagonal(2)
@pytest.mark.parametrize("name", BROKEN_SIGNATURES)
def test_a_broken_signature_is_told_in_our_words(
    signed: tuple[Path, Path, Path], copy: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Also where nobody asks who signed: it is a file of the checkpoint that was damaged."""
    make, words = BROKEN_SIGNATURES[name]
    make(copy / SIGNATURE_FILE)
    for asked in ([], ["--require-signature", str(signed[1].with_suffix(".pub"))]):
        with limited():
            assert main(["checkpoint", "verify", str(copy), *asked]) == 1
        out = capsys.readouterr().out
        assert (
            f"{copy / SIGNATURE_FILE} cannot be read as a signature: {words}" in out
            and "Copy the checkpoint again" in out
        )
        assert not re.search(
            "Error|Expecting|decode|codec|int\\(", out.partition("cannot be read as a signature")[2]
        ), out


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.exceptions", None)
    with pytest.raises(CheckpointError, match=r"pip install 'petatron\[sign\]'"):
        signature.open_signer(make_key(tmp_path, "k"))
