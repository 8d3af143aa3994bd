import hashlib

import pytest
import torch

from capsroute.data import DataError, DiverseMultiMNIST, TrainBatches, load_dataset
from capsroute.data.rng import image_draws

COUNT = 60_000
TEST_SET_SHA1 = "3978ec61cb3ff27722416f798cb4f0cf3e08afd0"


@pytest.fixture(scope="module")
def source(mnist) -> DiverseMultiMNIST:
    return DiverseMultiMNIST.from_digits(mnist.train_images, mnist.train_labels)


@pytest.fixture(scope="module")
def sample(source) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices behind 60,000 images: digits and shifts, without the pixels."""
    return source.choose(image_draws(11, 0, 0, COUNT))


def assert_share(hits: torch.Tensor, expected: float) -> None:
    sigma = (expected * (1 - expected) / len(hits)) ** 0.5
    assert abs(hits.double().mean().item() - expected) < 4 * sigma


def place_slowly(digit: torch.Tensor, shift: int) -> torch.Tensor:
    """The specification, digit by digit: all 81 places on a 36×36 canvas."""
    canvas = torch.zeros(36, 36, dtype=torch.int64)
    top, left = divmod(shift, 9)
    canvas[top : top + 28, left : left + 28] = digit
    return canvas


def test_images_are_the_clipped_sums_of_shifted_digits(source, mnist):
    order = torch.argsort(mnist.train_labels, stable=True)
    draws = image_draws(3, 0, 0, 300)
    # the corners, and the ends of the table, whose windows reach furthest
    draws[0, 3:5] = 0
    draws[1, 3:5] = 2**32 - 1
    draws[2, 1], draws[2, 3] = 0, 2**32 - 1
    draws[3, 1], draws[3, 3] = 2**32 - 1, 0
    images, targets, placed = source.generate(draws)
    chosen, shifts = source.choose(draws)
    for i in range(len(draws)):
        digits = [torch.zeros(28, 28, dtype=torch.uint8)] * 2
        classes = set()
        for k in range(2):
            if chosen[i, k] < len(order):
                digits[k] = mnist.train_images[order[chosen[i, k]]]
                classes.add(int(mnist.train_labels[order[chosen[i, k]]]))
        expected = [place_slowly(digits[k], int(shifts[i, k])) for k in range(2)]
        assert torch.equal(placed[i].long(), torch.stack(expected))
        assert torch.equal(images[i, 0].long(), sum(expected).clamp(max=255))
        assert set(targets[i].nonzero().flatten().tolist()) == classes


def test_shapes_and_types(source):
    images, targets, placed = source.generate(image_draws(0, 0, 0, 4))
    assert images.shape == (4, 1, 36, 36) and images.dtype == torch.uint8
    assert targets.shape == (4, 10) and targets.dtype == torch.float32
    assert placed.shape == (4, 2, 36, 36) and placed.dtype == torch.uint8


def test_one_image_and_none(source):
    assert source.generate(image_draws(0, 0, 0, 1))[0].shape == (1, 1, 36, 36)
    assert source.generate(image_draws(0, 0, 0, 0))[0].shape == (0, 1, 36, 36)


def test_one_in_six_is_single(source, sample):
    chosen, _ = sample
    assert_share(chosen[:, 1] == 60_000, 1 / 6)


def test_pairs_never_repeat_a_class(source, sample):
    kinds = source.labels[sample[0]]
    assert (kinds[:, 0] != kinds[:, 1]).all()
    _, targets, _ = source.generate(image_draws(11, 0, 0, 2000))
    singles = sample[0][:2000, 1] == 60_000
    assert torch.equal(targets.sum(1), 2.0 - singles.float())
    assert targets.max() == 1


def test_share_of_each_class(source, sample, mnist):
    """The formula of the module's docstring."""
    kinds = source.labels[sample[0]]
    p = torch.bincount(mnist.train_labels).double() / len(mnist.train_labels)
    ratio = p / (1 - p)
    for k in range(10):
        expected = p[k] / 6 + 5 / 6 * (p[k] + p[k] * (ratio.sum() - ratio[k]))
        assert_share((kinds == k).any(1), float(expected))


def test_every_digit_is_equally_likely(source, sample):
    """First digits, in 100 bins of the table; second ones within what their first leaves."""
    first, second = sample[0].unbind(1)
    for block in range(0, 100, 7):
        assert_share(first // 600 == block, 1 / 100)
    kinds = source.labels[sample[0]]
    for k in (0, 9):
        others = second[(kinds[:, 0] == k) & (second < 60_000)]
        available = 60_000 - int(source.class_size[k])
        middle = int(source.class_start[5])
        below_middle = middle - (int(source.class_size[0]) if k == 0 else 0)
        assert_share(others < middle, below_middle / available)


def test_shifts_are_uniform(sample):
    _, shifts = sample
    for column in range(2):
        rows, columns = shifts[:, column] // 9, shifts[:, column] % 9
        for value in range(9):
            assert_share(rows == value, 1 / 9)
            assert_share(columns == value, 1 / 9)
        counts = torch.bincount(shifts[:, column], minlength=81).double()
        assert len(counts) == 81
        chi2 = ((counts - COUNT / 81) ** 2 / (COUNT / 81)).sum()
        assert chi2 < 80 + 4 * (2 * 80) ** 0.5


def test_choices_are_independent(sample):
    """Singles, digits and shifts of an image, and of neighbouring images, do not correlate."""
    chosen, shifts = sample
    columns = torch.cat([chosen, shifts], dim=1).double()
    columns = torch.cat([columns[:-1, [0, 2, 3]], columns[1:, [0, 2, 3]]], dim=1)
    correlation = torch.corrcoef(columns.T) - torch.eye(6)
    assert correlation.abs().max() < 4.5 / COUNT**0.5


def test_same_seed_same_bytes_on_every_call(source):
    batches = TrainBatches(source, 32, seed=5)
    again = TrainBatches(source, 32, seed=5)
    for step in (0, 1, 4000):
        images, targets = batches.batch(step)
        repeated, same_targets = again.batch(step)
        assert torch.equal(images, repeated) and torch.equal(targets, same_targets)
    assert not torch.equal(batches.batch(0)[0], batches.batch(1)[0])
    assert not torch.equal(batches.batch(0)[0], TrainBatches(source, 32, seed=6).batch(0)[0])


def test_every_epoch_is_new(source):
    batches = TrainBatches(source, 128)
    assert batches.steps_per_epoch == 469
    assert batches.global_size(468) == 96
    assert not torch.equal(batches.batch(0)[0], batches.batch(469)[0])


def test_the_test_set_is_pinned(mnist):
    test = load_dataset("diverse_multimnist").test
    assert test.images.shape == (10_000, 1, 36, 36)
    assert_share(test.targets.sum(1) == 1, 1 / 6)
    digest = hashlib.sha1(test.images.numpy().tobytes()).hexdigest()
    assert digest == TEST_SET_SHA1
    source = DiverseMultiMNIST.from_digits(mnist.test_images, mnist.test_labels)
    images, targets, placed = source.fixed_set()
    assert torch.equal(images, test.images) and torch.equal(targets, test.targets)
    assert placed.shape == (10_000, 2, 36, 36)
    # the README's floor: 2.3 % of the test images share one set of labels
    assert targets.unique(dim=0, return_counts=True)[1].max().item() == 233


def test_train_validation_and_test_digits_are_disjoint(mnist):
    """By what `load_dataset` really uses: the digits of its sources, cut out of their images."""

    def boxes(images):
        """Digits cut to their own box, so that their shift does not matter."""
        images = images.numpy()
        ends = []
        for lit in (images.any(axis=2), images.any(axis=1)):  # rows, columns
            ends += [lit.argmax(axis=1), lit.shape[1] - lit[:, ::-1].argmax(axis=1)]
        cut = [image[y:v, x:w] for image, y, v, x, w in zip(images, *ends, strict=True)]
        return {(box.shape, box.tobytes()) for box in cut}

    def singles(split):
        return boxes(split.images[split.targets.sum(1) == 1][:, 0])

    dataset = load_dataset("diverse_multimnist", validation=0.05)
    # the table of the training source: 36×36 a digit after a margin of zeros, a blank one last
    table = dataset.train.pixels[8 * 36 + 8 :].view(-1, 36, 36)[:-1, :28, :28]
    trained_on = boxes(table)
    assert trained_on < boxes(mnist.train_images)
    validation, test = singles(dataset.validation), singles(dataset.test)
    assert len(validation) > 300 and len(test) > 1000
    assert not validation & trained_on and not test & trained_on
    assert test <= boxes(mnist.test_images)


def test_small_sources_work(mnist):
    """Two classes of one digit each: a pair is always both."""
    digits = mnist.train_images[[0, 1]]
    source = DiverseMultiMNIST.from_digits(digits, torch.tensor([0, 9]), length=10)
    assert len(source) == 10
    _, targets, _ = source.generate(image_draws(0, 0, 0, 500))
    assert (targets[:, 1:9] == 0).all()
    assert targets[:, [0, 9]].sum(1).min() == 1


def test_bad_sources(mnist):
    images = mnist.train_images[:3]
    with pytest.raises(DataError, match=r"`labels` holds classes \[4\]; expected two"):
        DiverseMultiMNIST.from_digits(images, torch.tensor([4, 4, 4]))
    with pytest.raises(DataError, match=r"of 0 to 9"):
        DiverseMultiMNIST.from_digits(images, torch.tensor([4, 10, 4]))
    with pytest.raises(DataError, match=r"`digits` is torch.float32; expected uint8"):
        DiverseMultiMNIST.from_digits(images / 255, torch.tensor([1, 2, 3]))
    with pytest.raises(DataError, match=r"`digits` has shape \(3, 27, 28\)"):
        DiverseMultiMNIST.from_digits(images[:, 1:], torch.tensor([1, 2, 3]))
