"""Where sample indices are kept."""

from __future__ import annotations

from pathlib import Path

from petatron.base.log import get_logger
from petatron.config.schema.data import DataConfig
from petatron.config.schema.data_blend import default_cache_folder


def sample_index_folder(data: DataConfig, prefix: str) -> Path | None:
    """Returns the cache folder of sample indices: the user's, else `cache` next to the data.

    None if the default folder is a link: whoever made the data could choose where files are written.
    """
    default_folder = Path(default_cache_folder(prefix, data.object_storage_cache_path))
    folder = Path(data.data_cache_path) if data.data_cache_path else default_folder
    if folder != default_folder or not default_folder.is_symlink():
        return folder
    get_logger(__name__).warning(
        "%s is a symbolic link, and may have come with the data: sample indices stay in memory and are built again on the next start. "
        "Give --data-cache-path the folder itself if you want them there.",
        default_folder,
    )
    return None
