"""Models on disk: geometry, fingerprint, and how to get the default one. No torch, except in `convert`."""

from halfmoon.models.folder import Geometry, ModelFolder, ModelFolderError, read_config
from halfmoon.models.kv_layers import ConfigUnusable, kv_shape
from halfmoon.models.kv_size import KvShape, dtype_bytes

__all__ = [
    "ConfigUnusable",
    "Geometry",
    "KvShape",
    "ModelFolder",
    "ModelFolderError",
    "dtype_bytes",
    "kv_shape",
    "read_config",
]
