"""The lab's data: named sets, folders of images, and batches of them."""

from normkit.lab.data.batching import batches
from normkit.lab.data.folder import FolderSet
from normkit.lab.data.load import Available, available, get, load, load_any
from normkit.lab.data.types import DataError, DataSet, Images

__all__ = [
    "Available",
    "DataError",
    "DataSet",
    "FolderSet",
    "Images",
    "available",
    "batches",
    "get",
    "load",
    "load_any",
]
