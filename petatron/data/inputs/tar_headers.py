"""Reads the headers of a tar by the few rules that its writers follow."""

from __future__ import annotations

TAR_BLOCK = 512
MAX_TAR_NAME_BYTES = 1 << 20
TAR_FILE_TYPES = (b"0", b"\x00", b"7")
BARE_TAR_TYPES = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Links, devices, folders and FIFOs, which have a header alone, whatever size it says."""


class DamagedTar(Exception):
    """What is wrong with the tar."""


def split_member_name(name: str) -> tuple[str, str, str]:
    """Returns the key of a member, a dot if it has an ending, and the ending."""
    folder, slash, base = name.rpartition("/")
    stem, dot, ending = base.partition(".")
    return f"{folder}{slash}{stem}", dot, ending.lower()


def check_tar_header(header: bytes) -> None:
    """Raises `DamagedTar` for a header that is cut off or has another checksum."""
    if len(header) < TAR_BLOCK:
        raise DamagedTar("it ends too early")
    checksum = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    if checksum != tar_number(header[148:156]):
        raise DamagedTar("it is no tar, or damaged")


def tar_number(field: bytes) -> int:
    """Returns a number in octal digits, or in binary where its first bit says so."""
    if field[0] & 0x80:
        number = int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
    else:
        digits = field.strip(b" \x00")
        if not all(digit in b"01234567" for digit in digits):
            raise DamagedTar("it is no tar, or damaged")
        number = int(digits or b"0", 8)
    if number >= 1 << 62:
        raise DamagedTar("it is no tar, or damaged")
    return number


def tar_header_name(header: bytes) -> str:
    """Returns the name that a header has room for."""
    name = header[:100].partition(b"\x00")[0]
    prefix = header[345:500].partition(b"\x00")[0] if header[257:263] == b"ustar\x00" else b""
    return (prefix + b"/" + name if prefix else name).decode(errors="replace")


def pax_path(content: bytes) -> bytes | None:
    """Returns the name in an extended header: lines of a length, a key and a value."""
    while content:
        digits, _, rest = content.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        line = content[:length]
        key, _, value = line[len(digits) + 1 :].partition(b"=")
        if not length or not rest:
            raise DamagedTar("an extended header is damaged")
        if key == b"path":
            return value.removesuffix(b"\n")
        content = content[length:]
    return None
