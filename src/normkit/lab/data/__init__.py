"""The lab's data: named sets, folders of images, texts, and batches of them."""

from normkit.lab.data.batching import batches, windows
from normkit.lab.data.folder import FolderSet
from normkit.lab.data.load import LOADERS, Available, DataKind, available, get, is_text, load, load_any, load_text
from normkit.lab.data.share import WHOLE, Share
from normkit.lab.data.types import DataError, DataSet, Images, TextSet

__all__ = [
    "LOADERS",
    "WHOLE",
    "Available",
    "DataError",
    "DataKind",
    "DataSet",
    "FolderSet",
    "Images",
    "Share",
    "TextSet",
    "available",
    "batches",
    "get",
    "is_text",
    "load",
    "load_any",
    "load_text",
    "windows",
]
