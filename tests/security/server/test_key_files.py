"""Files with API keys: those that other users may read or change are refused, and secrets as orchestrators mount them are taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.cli.serve.key_file import check_key_file, key_file_problem

KEY = "a-key-of-some-length-0123456789"
# A secret of Kubernetes: files in a folder with a date, to which ..data leads, and links to them; all of it on a tmpfs of root.
_MOUNT = """
set -e
mount -t tmpfs tmpfs {folder}
mkdir {folder}/..2026_01_01
printf %s {key} > {folder}/..2026_01_01/keys
chmod 644 {folder}/..2026_01_01/keys
ln -s ..2026_01_01 {folder}/..data
ln -s ..data/keys {folder}/keys
{remount}
exec {python} -c "
from pathlib import Path
from petatron.base.errors import ConfigError
from petatron.cli.serve.arguments import _read_keys
try:
    print(_read_keys(Path('{folder}/keys')))
except ConfigError as error:
    print(error)
"
"""


@pytest.mark.parametrize(
    ("mode", "owner", "user", "read_only", "refused"),
    [
        (0o600, 1000, 1000, False, False),
        (0o400, 1000, 1000, False, False),
        (0o600, 0, 0, False, False),
        (0o644, 1000, 1000, False, True),
        (0o640, 1000, 1000, False, True),
        (0o644, 1000, 1000, True, True),  # it is on a medium of the user, who could have made it private
        (0o644, 0, 0, False, True),
        (0o644, 0, 1000, False, True),  # the administrator of a shared machine has to close it
        (0o644, 0, 0, True, False),
        (0o444, 0, 1000, True, False),
        (0o440, 0, 1000, True, False),  # Kubernetes with an fsGroup
        (0o664, 0, 1000, True, True),
        (0o602, 1000, 1000, False, True),
        (0o600, 1001, 0, False, False),  # a file of the host's user, for root of a container
        (0o644, 1001, 0, False, True),
        (0o644, 1001, 1000, True, True),
    ],
)
def test_who_may_read_and_change_it_decides(mode: int, owner: int, user: int, read_only: bool, refused: bool):
    assert (key_file_problem(mode, owner, user=user, read_only=read_only) is not None) is refused


def test_the_mode_that_counts_is_that_of_the_file_behind_a_link(tmp_path: Path):
    file, link = tmp_path / "keys", tmp_path / "link"
    file.write_text(KEY)
    link.symlink_to(file)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"may be read .* chmod 600"):
        check_key_file(link)
    file.chmod(0o600)
    check_key_file(link)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_secret_of_an_orchestrator_is_taken_as_it_is_mounted(tmp_path: Path, read_only: bool):
    remount = f"mount -o remount,ro {tmp_path}" if read_only else ""
    script = _MOUNT.format(folder=tmp_path, key=KEY, remount=remount, python=sys.executable)
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this user may not mount in a namespace of its own")
    done = subprocess.run([*command, "sh", "-c", script], capture_output=True, text=True)
    if read_only:
        assert done.stdout.strip() == str([KEY]) and "its mount" in done.stderr
    else:
        assert "may be read or changed by other users" in done.stdout
