"""Models on disk: geometry, fingerprint, and how to get the default one. No torch, except in `convert`."""

from halfmoon.models.folder import Geometry, ModelFolder, ModelFolderError, dtype_bytes

__all__ = ["Geometry", "ModelFolder", "ModelFolderError", "dtype_bytes"]
