"""The versions and the device of a run, which its first record keeps."""

from __future__ import annotations

import platform

import numpy as np
import torch

from petatron.base.device import DeviceInfo
from petatron.base.version import __version__


def environment_properties(device: DeviceInfo) -> dict[str, str]:
    """Returns versions and device by name; nothing that tells who ran it, or where.

    >>> from petatron.base.device import detect_device
    >>> sorted(environment_properties(detect_device("cpu")))
    ['device', 'device memory', 'numpy', 'petatron', 'python', 'system', 'torch']
    """
    properties = {
        "petatron": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.name,
        "device memory": f"{device.memory_bytes / 1e9:.1f} GB",
    }
    if device.kind == "cuda" and torch.version.cuda is not None:
        properties["CUDA"] = torch.version.cuda
    return properties
