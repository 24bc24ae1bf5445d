"""Tells addresses such as s3://bucket/key from paths of this machine."""

from __future__ import annotations


def is_remote(path: str) -> bool:
    """
    >>> is_remote("s3://bucket/a.jsonl"), is_remote("data/a.jsonl")
    (True, False)
    """
    return "://" in path
