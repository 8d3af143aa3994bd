"""Splits as PyTorch's own datasets, their images one by one; and images held out by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset, random_split

from capsroute.data import ArraySplit, DataError, DiverseMultiMNIST, EvalBatches, TrainBatches
from capsroute.data.image_folder import FolderSplit
from capsroute.data.splits import split_by_name

PINNED = {"0/1.png", "1/4.png", "1/9.png"}


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
def test_pytorch_joins_and_parts_them(make, tmp_path, mnist):
    split = make(tmp_path, mnist)
    assert isinstance(split, Dataset)  # what type checkers want of a loader's argument
    both = split + split
    assert len(both) == 14 and torch.equal(both[9][0], split[2][0])
    parts = random_split(split, [3, 4])
    assert sorted(int(label) for part in parts for _, label in part) == list(range(7))


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


def held_out(files, fraction=0.2, seed=0):
    """The names that are held out of files `class/name`."""
    files = sorted(files)
    classes = sorted({file.split("/")[0] for file in files})
    labels = torch.tensor([classes.index(file.split("/")[0]) for file in files])
    stay, held = split_by_name(files, labels, fraction, seed)
    assert sorted(stay.tolist() + held.tolist()) == list(range(len(files)))
    return {files[row] for row in held.tolist()}


def a_folder(counts):
    return {f"{label}/{n}.png" for label, count in enumerate(counts) for n in range(count)}


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 30), min_size=2, max_size=5),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**63 - 1),
    added=st.text("abcxyz", min_size=1),
)
def test_an_image_more_moves_at_most_one_other_of_its_class(counts, fraction, seed, added):
    files = a_folder([2, *counts])
    new = f"0/{added}.png"
    before, after = held_out(files, fraction, seed), held_out({*files, new}, fraction, seed)
    moved = before ^ (after - {new})
    assert len(moved) <= 1 and all(name.startswith("0/") for name in moved)


@pytest.mark.parametrize(
    ("counts", "fraction", "expected"),
    [
        ([10, 12, 13, 20], 0.2, [2, 2, 3, 4]),
        ([1, 2, 3, 4], 0.2, [0, 1, 1, 1]),
        ([1, 2, 9], 0.9, [0, 1, 8]),
    ],
)
def test_a_share_of_each_class_is_held_out_by_name(counts, fraction, expected):
    held = [int(name.split("/")[0]) for name in held_out(a_folder(counts), fraction)]
    assert torch.bincount(torch.tensor(held), minlength=len(counts)).tolist() == expected


def test_names_and_seed_decide_what_is_held_out_and_where_they_stand_does_not():
    names = [f"{n}.png" for n in range(40)]
    labels = torch.arange(2).repeat(20)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    (_, first), (_, shuffled), (_, other) = (
        split_by_name(names, labels, 0.25, seed=3),
        split_by_name([names[row] for row in order], labels[order], 0.25, seed=3),
        split_by_name(names, labels, 0.25, seed=4),
    )
    assert set(first.tolist()) == {order[row] for row in shuffled.tolist()}
    assert set(first.tolist()) != set(other.tolist())


def test_what_is_held_out_by_name_is_pinned():
    """A change here makes test images of those that runs were trained on."""
    assert held_out(a_folder([5, 10])) == PINNED


def test_classes_of_one_image_leave_none_to_hold_out():
    with pytest.raises(DataError, match=r"0\.2 holds out none of the 3 images in 3 classes"):
        held_out(a_folder([1, 1, 1]))
