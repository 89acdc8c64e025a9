"""The lab's data: named sets, folders of images, and batches of them."""

from normkit.lab.data.batching import batches
from normkit.lab.data.folder import FolderSet
from normkit.lab.data.images import DataError, DataSet, Images
from normkit.lab.data.sets import Available, available, get, load, load_any

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
