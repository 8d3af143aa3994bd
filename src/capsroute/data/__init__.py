"""Data for training and evaluation. Start with `load_dataset`, `TrainBatches`, `EvalBatches`.

Images are uint8 until the last moment and leave as floats in [0, 1]; normalisation is the
model's. Every random choice is a pure function of a seed and a position: see `rng`.
"""

from capsroute.data.augment import Augment, rotate_shift
from capsroute.data.batches import EvalBatches, TrainBatches
from capsroute.data.cifar import load_cifar
from capsroute.data.datasets import Dataset, default_root, list_datasets, load_dataset
from capsroute.data.diverse_multimnist import DiverseMultiMNIST
from capsroute.data.download import Check, download, verify
from capsroute.data.errors import DataError, MissingDataError
from capsroute.data.image_folder import load_image_folder
from capsroute.data.listing import Listing, Skipped, list_image_folder
from capsroute.data.mnist import load_mnist
from capsroute.data.preview import contact_sheet
from capsroute.data.splits import ArraySplit, Split

__all__ = [
    "ArraySplit",
    "Augment",
    "Check",
    "DataError",
    "Dataset",
    "DiverseMultiMNIST",
    "EvalBatches",
    "Listing",
    "MissingDataError",
    "Skipped",
    "Split",
    "TrainBatches",
    "contact_sheet",
    "default_root",
    "download",
    "list_datasets",
    "list_image_folder",
    "load_cifar",
    "load_dataset",
    "load_image_folder",
    "load_mnist",
    "rotate_shift",
    "verify",
]
