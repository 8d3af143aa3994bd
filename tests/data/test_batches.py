from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Subset

from capsroute.data import ArraySplit, Augment, DiverseMultiMNIST, EvalBatches, TrainBatches
from capsroute.data.image_folder import FolderSplit
from capsroute.data.rng import AugmentDraws, below
from capsroute.data.splits import stratified_split


def make_split(count: int = 37) -> ArraySplit:
    """Images that tell which they are: all pixels of image i are i, and so is its label."""
    values = torch.arange(count)
    images = values.to(torch.uint8).view(-1, 1, 1, 1).expand(count, 3, 6, 6).contiguous()
    return ArraySplit(images, values)


def textured_split(count: int = 37) -> ArraySplit:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 6, 6), dtype=torch.uint8)
    return ArraySplit(images, torch.arange(count))


def test_cifar_has_391_steps_the_last_of_80():
    split = ArraySplit(torch.zeros(50_000, 1, 1, 1, dtype=torch.uint8), torch.zeros(50_000))
    batches = TrainBatches(split, 128)
    assert batches.steps_per_epoch == 391
    assert [batches.global_size(step) for step in (0, 389, 390, 391, 781)] == [
        128,
        128,
        80,
        128,
        80,
    ]
    assert len(batches.batch(390)[0]) == 80


def test_images_and_targets_belong_together():
    images, targets = TrainBatches(make_split(), 10).batch(0)
    assert images.dtype == torch.float32 and images.shape == (10, 3, 6, 6)
    assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), targets)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    world=st.integers(1, 5),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_image_once_an_epoch_over_all_ranks(count, batch_size, world, epoch, seed):
    world = min(world, batch_size)
    split = make_split(count)
    ranks = [TrainBatches(split, batch_size, seed=seed, rank=r, world=world) for r in range(world)]
    steps = ranks[0].steps_per_epoch
    seen: list[int] = []
    for step in range(epoch * steps, (epoch + 1) * steps):
        shares = [rank.plan(step)[:, 0].tolist() for rank in ranks]
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == ranks[0].global_size(step)
        seen += [row for share in shares for row in share]
    assert sorted(seen) == list(range(count))


@settings(max_examples=20, deadline=None)
@given(world=st.integers(2, 5), step=st.integers(0, 200))
def test_ranks_together_see_what_one_process_sees(world, step):
    """The same images in the same order, with the same augmentation."""
    split, augment = textured_split(), Augment(padding=2, cutout=2)
    alone = TrainBatches(split, 16, seed=3, augment=augment).batch(step)
    shares = [
        TrainBatches(split, 16, seed=3, rank=rank, world=world, augment=augment).batch(step)
        for rank in range(world)
    ]
    assert torch.equal(torch.cat([images for images, _ in shares]), alone[0])
    assert torch.equal(torch.cat([targets for _, targets in shares]), alone[1])


@pytest.mark.parametrize("step", [0, 5])
def test_mixed_images_have_shares_of_two_classes(step):
    split = textured_split()
    options = {"seed": 3, "augment": Augment(padding=0), "cutmix": 1.0, "classes": 37}
    batches = TrainBatches(split, 16, **options)
    images, targets = batches.batch(step)
    plain, labels = TrainBatches(split, 16, seed=3, augment=Augment(padding=0)).batch(step)
    draws = batches.plan(step)[:, -8:]
    partners = below(draws[:, 5], len(split))
    others = Augment(padding=0)(split.images[partners], draws) * (1 / 255)
    assert ((images == plain) | (images == others)).all()
    kept = 1 - (images != plain).any(1).flatten(1).float().mean(1, keepdim=True)
    ours, theirs = (torch.nn.functional.one_hot(rows, 37) for rows in (labels, partners))
    torch.testing.assert_close(targets, kept * ours + (1 - kept) * theirs)
    assert (targets.amax(1) < 1).any()
    shares = [
        TrainBatches(split, 16, rank=rank, world=3, **options).batch(step) for rank in range(3)
    ]
    assert torch.equal(torch.cat([part for part, _ in shares]), images)
    assert torch.equal(torch.cat([part for _, part in shares]), targets)


def test_ranks_together_generate_what_one_process_generates(mnist):
    source = DiverseMultiMNIST.from_digits(mnist.test_images[:200], mnist.test_labels[:200])
    alone = TrainBatches(source, 15, seed=3).batch(7)
    shares = [TrainBatches(source, 15, seed=3, rank=r, world=4).batch(7) for r in range(4)]
    assert torch.equal(torch.cat([images for images, _ in shares]), alone[0])
    assert torch.equal(torch.cat([targets for _, targets in shares]), alone[1])


def test_a_batch_depends_on_nothing_but_its_step():
    split, augment = textured_split(), Augment()
    straight = TrainBatches(split, 8, seed=1, augment=augment)
    expected = [straight.batch(step) for step in range(15)]
    for step in (14, 3, 3, 9, 0):
        resumed = TrainBatches(split, 8, seed=1, augment=augment)
        images, targets = resumed.batch(step)
        assert torch.equal(images, expected[step][0]) and torch.equal(targets, expected[step][1])


def test_global_random_state_is_neither_used_nor_changed():
    batches = TrainBatches(textured_split(), 8, augment=Augment())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = batches.batch(0)[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(batches.batch(0)[0], first)


def test_epochs_and_seeds_differ():
    split = make_split()
    order = [TrainBatches(split, 37, seed=s).batch(e)[1] for s, e in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(order[0], order[1])
    assert not torch.equal(order[0], order[2])


def test_rows_of_a_plan_can_be_rendered_apart():
    """What accumulation of gradients does."""
    batches = TrainBatches(textured_split(), 10, augment=Augment(padding=1))
    whole = batches.batch(2)[0]
    parts = [batches.render(rows)[0] for rows in batches.plan(2).split(4)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.fixture(scope="module")
def digits(mnist) -> DiverseMultiMNIST:
    return DiverseMultiMNIST.from_digits(mnist.train_images, mnist.train_labels)


class Watched(Augment):
    """Notes where images are cropped and whether they are mirrored; 9 × 9 places, 4 px around."""

    def __call__(self, images, draws):
        offsets = below(draws[:, AugmentDraws.CROP], 9)
        mirrored = below(draws[:, AugmentDraws.FLIP], 2)
        type(self).seen = torch.cat([offsets, mirrored[:, None]], dim=1)
        return super().__call__(images, draws)


def test_augmentation_of_generated_images_tells_nothing_about_their_digits(digits):
    images, targets = TrainBatches(digits, 20_000, augment=Watched()).batch(0)
    assert images.shape == (20_000, 1, 36, 36)
    overall = targets.mean(0)
    for column in Watched.seen.T:
        for value in column.unique():
            there = targets[column == value]
            sigma = (overall * (1 - overall) / len(there)).sqrt()
            assert ((there.mean(0) - overall).abs() < 4.5 * sigma).all()


def test_augmentation_does_not_change_which_images_are_generated(digits):
    plain = TrainBatches(digits, 50, seed=4)
    augmented = TrainBatches(digits, 50, seed=4, augment=Augment(padding=0, flip=True))
    images, targets = plain.batch(3)
    mirrored, same = augmented.batch(3)
    assert torch.equal(targets, same)
    flipped = (mirrored == images.flip(3)).flatten(1).all(1)
    assert (flipped | (mirrored == images).flatten(1).all(1)).all() and 10 < flipped.sum() < 40


def test_ranks_of_generated_and_augmented_images_make_one_batch(digits):
    whole = TrainBatches(digits, 10, augment=Augment()).batch(2)[0]
    shares = [TrainBatches(digits, 10, rank=r, world=3, augment=Augment()) for r in range(3)]
    assert torch.equal(torch.cat([share.batch(2)[0] for share in shares]), whole)


@pytest.mark.parametrize("generated", [False, True])
def test_a_compiler_reads_the_same_draws(digits, generated):
    """As a whole graph, which a GPU captures."""
    split = digits if generated else textured_split()
    batches = TrainBatches(split, 10, augment=Augment(padding=2, cutout=3))
    compiled = torch.compile(batches.render, backend="eager", fullgraph=True, dynamic=False)
    for found, expected in zip(compiled(batches.plan(1)), batches.batch(1), strict=True):
        assert torch.equal(found, expected)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40), batch_size=st.integers(1, 15), world=st.integers(1, 5))
def test_evaluation_sees_every_image_once(count, batch_size, world):
    split = make_split(count)
    seen: list[int] = []
    for rank in range(world):
        batches = EvalBatches(split, batch_size, rank=rank, world=world)
        found = [targets for _, targets in batches]
        assert len(found) == len(batches)
        assert all(1 <= len(targets) <= batch_size for targets in found)
        seen += torch.cat(found).tolist() if found else []
    assert seen == list(range(count))


def test_evaluation_images_are_floats_and_can_be_cropped():
    (images, _), *_ = EvalBatches(make_split(), 4, crop=2)
    assert images.shape == (4, 3, 2, 2)
    assert torch.allclose(images[3], torch.tensor(3 / 255))


@pytest.fixture
def folder_split(tmp_path: Path) -> FolderSplit:
    for i in range(23):
        Image.new("L", (6, 6), i).save(tmp_path / f"{i:02d}.png")
    paths = tuple(sorted(tmp_path.iterdir()))
    return FolderSplit(paths, torch.arange(23), (6, 6), 1)


def test_streamed_batches_equal_those_in_memory(folder_split):
    values = torch.arange(23).to(torch.uint8).view(-1, 1, 1, 1).expand(23, 1, 6, 6)
    in_memory = ArraySplit(values.contiguous(), torch.arange(23))
    options = {"seed": 2, "augment": Augment(padding=1)}
    streamed, direct = (
        TrainBatches(folder_split, 5, **options),
        TrainBatches(in_memory, 5, **options),
    )
    for step in (0, 1, 2, 11, 4, 3):  # in order, ahead and back
        found, expected = streamed.batch(step), direct.batch(step)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    streamed_eval = [images for images, _ in EvalBatches(folder_split, 4)]
    assert torch.equal(torch.cat(streamed_eval)[:, 0, 0, 0], torch.arange(23) * (1 / 255))


def test_array_split_checks_its_arrays():
    with pytest.raises(TypeError, match=r"`images` is torch.float32 .* expected uint8"):
        ArraySplit(torch.zeros(2, 1, 3, 3), torch.zeros(2))
    with pytest.raises(TypeError, match=r"must be tensors, got ndarray and Tensor"):
        ArraySplit(np.zeros((2, 1, 4, 4), np.uint8), torch.zeros(2))
    with pytest.raises(ValueError, match=r"`targets` has 3 rows for 2 images"):
        ArraySplit(torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"`batch_size` \(=0\) must be at least 1"),
        ({"batch_size": 2, "rank": 2, "world": 2}, r"`rank` \(=2\) must be in \[0, 2\)"),
        ({"batch_size": 2, "world": 3}, r"`batch_size` \(=2\) must be at least `world` \(=3\)"),
        ({"batch_size": 2, "seed": -1}, r"`seed` \(=-1\)"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainBatches(make_split(), **arguments)


@pytest.mark.parametrize("batches", [TrainBatches, EvalBatches])
def test_subsets_of_pytorch_are_for_its_loader(batches):
    split = ArraySplit(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2))
    with pytest.raises(TypeError, match=r"`split` must be .*, got a Subset: PyTorch's `Data"):
        batches(Subset(split, [0]), 1)


def test_empty_split():
    with pytest.raises(ValueError, match="`split` is empty"):
        EvalBatches(make_split(0), 4)


def test_stratified_split_is_disjoint_and_even():
    labels = torch.arange(10).repeat_interleave(torch.arange(10, 20))
    stay, held = stratified_split(labels, 0.2, seed=4)
    assert sorted(stay.tolist() + held.tolist()) == list(range(len(labels)))
    assert torch.bincount(labels[held]).tolist() == [2, 2, 3, 2, 3, 3, 3, 4, 3, 4]
    again = stratified_split(labels, 0.2, seed=4)
    assert torch.equal(held, again[1])
    assert not torch.equal(held, stratified_split(labels, 0.2, seed=5)[1])


def test_no_class_loses_all_its_images():
    stay, held = stratified_split(torch.tensor([0, 0, 1, 1, 2]), 0.9, seed=0)
    assert stay.tolist()[-1] == 4 and len(held) == 2


@pytest.mark.parametrize(
    ("fraction", "message"),
    [(1.0, "must be between 0 and 1"), (0.01, "holds out none of the")],
)
def test_impossible_splits(fraction, message):
    with pytest.raises(ValueError, match=message):
        stratified_split(torch.tensor([0, 0, 1, 1]), fraction, seed=0)
