"""Splits as PyTorch's own datasets: their images one by one."""

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from capsroute.data import ArraySplit, DiverseMultiMNIST, EvalBatches, TrainBatches
from capsroute.data.image_folder import FolderSplit


def held_in_memory(tmp_path, mnist):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (7, 3, 6, 5), dtype=torch.uint8)
    return ArraySplit(images, torch.arange(7))


def decoded_on_demand(tmp_path, mnist):
    paths = tuple(tmp_path / f"{index}.png" for index in range(7))
    for index, path in enumerate(paths):
        Image.new("L", (5, 6), 30 * index).save(path)
    return FolderSplit(paths, torch.arange(7), (6, 5), 1)


@pytest.mark.parametrize("make", [held_in_memory, decoded_on_demand])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_images_of_our_own_batches(make, workers, tmp_path, mnist):
    split = make(tmp_path, mnist)
    ours = list(EvalBatches(split, 3))
    theirs = list(DataLoader(split, batch_size=3, num_workers=workers))
    assert len(ours) == len(theirs) == 3
    for (images, targets), (expected, labels) in zip(theirs, ours, strict=True):
        assert images.dtype == torch.float32 and targets.dtype == torch.int64
        assert torch.equal(images, expected) and torch.equal(targets, labels)


@pytest.mark.parametrize("make", [held_in_memory, decoded_on_demand])
def test_positions_count_from_either_end_and_end_a_loop(make, tmp_path, mnist):
    split = make(tmp_path, mnist)
    assert [int(target) for _, target in split] == list(range(7))
    assert torch.equal(split[-1][0], split[6][0])
    for index in (7, -8):
        with pytest.raises(IndexError, match=rf"`index` must be in \[-7, 7\), got {index}"):
            split[index]
    with pytest.raises(TypeError):
        split[1:3]


def test_generated_images_are_those_of_a_first_batch(mnist):
    split = DiverseMultiMNIST.from_digits(mnist.test_images, mnist.test_labels, length=20)
    image, target = split[5]
    assert image.shape == (1, 36, 36) and target.shape == (10,)
    assert image.max() <= 1 and 1 <= target.sum() <= 2
    assert torch.equal(image, split[5][0]) and not torch.equal(image, split[6][0])
    batches = TrainBatches(split, 20, seed=0)
    assert torch.equal(image, batches.batch(0)[0][5])
    images, targets = next(iter(DataLoader(split, batch_size=4)))
    assert images.shape == (4, 1, 36, 36) and targets.shape == (4, 10)
