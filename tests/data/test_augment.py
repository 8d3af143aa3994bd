import math

import pytest
import torch
import torch.nn.functional as F

from capsroute.data import Augment, DataError, rotate_shift
from capsroute.data.augment import (
    center_crop,
    cutmix,
    cutout,
    random_crop,
    random_flip,
    to_float,
)
from capsroute.data.rng import below, image_draws


@pytest.fixture
def images() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(1, 256, (40, 3, 8, 9), dtype=torch.uint8)


@pytest.fixture
def draws() -> torch.Tensor:
    return image_draws(1, 2, 0, 40)


@pytest.mark.parametrize(("padding", "size"), [(4, None), (2, 7), (0, 8)])
def test_crop_against_a_loop(images, draws, padding, size):
    found = random_crop(images, draws[:, :2], padding, size)
    padded = F.pad(images, (padding,) * 4)
    rows, columns = (8, 9) if size is None else (size, size)
    for i in range(len(images)):
        top = int(below(draws[i, 0], padded.shape[2] - rows + 1))
        left = int(below(draws[i, 1], padded.shape[3] - columns + 1))
        assert torch.equal(found[i], padded[i, :, top : top + rows, left : left + columns])


def test_every_offset_of_the_crop_occurs():
    images = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5).expand(3000, 1, 5, 5)
    found = random_crop(images, image_draws(0, 0, 0, 3000)[:, :2], 4)
    assert len(found.flatten(1).unique(dim=0)) == 81


def test_flip_against_a_loop(images, draws):
    found = random_flip(images, draws[:, 2])
    flipped = 0
    for i in range(len(images)):
        mirrored = draws[i, 2] < 2**31
        flipped += int(mirrored)
        assert torch.equal(found[i], images[i].flip(2) if mirrored else images[i])
    assert 10 < flipped < 30


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_cutout_against_a_loop(images, draws, size):
    found = cutout(images, draws[:, 3:5], size)
    for i in range(len(images)):
        top = int(below(draws[i, 3], 8)) - size // 2
        left = int(below(draws[i, 4], 9)) - size // 2
        expected = images[i].clone()
        expected[:, max(top, 0) : top + size, max(left, 0) : left + size] = 0
        assert torch.equal(found[i], expected)


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_cutmix_against_a_loop(images, probability):
    generator = torch.Generator().manual_seed(5)
    draws = torch.randint(2**32, (len(images), 2), generator=generator)
    others = 255 - images
    mixed, share = cutmix(images, others, draws, probability)
    height, width = images.shape[-2:]
    for index, (area, centre) in enumerate(draws.tolist()):
        expected, part = images[index].clone(), area / 2**32 / probability
        if part < 1:
            rows, columns = int(height * part**0.5), int(width * part**0.5)
            top = (centre * height >> 32) - rows // 2
            left = (centre % 2**16 * width >> 16) - columns // 2
            inside = (
                slice(None),
                slice(max(top, 0), max(top + rows, 0)),
                slice(max(left, 0), max(left + columns, 0)),
            )
            expected[inside] = others[index][inside]
        assert torch.equal(mixed[index], expected)
        theirs = (mixed[index] != images[index]).any(0).double().mean().item()
        assert share[index].item() == pytest.approx(theirs)


def test_cutmix_mixes_as_many_images_as_it_is_told():
    draws = torch.randint(2**32, (4000, 2), generator=torch.Generator().manual_seed(0))
    black = torch.zeros(4000, 1, 8, 8)
    _, share = cutmix(black, black + 1, draws, 0.5)
    # every other image, less those whose rectangle has no pixel
    assert 0.44 < (share > 0).double().mean() < 0.5
    # uniform areas of mean 1/2, of which a part falls outside
    assert 0.1 < share.mean() < 0.25


def test_augment_is_pure_and_acts_on_bytes_as_on_floats(images, draws):
    augment = Augment(cutout=3)
    found = augment(images, draws)
    assert found.dtype == torch.uint8 and found.shape == images.shape
    assert torch.equal(found, augment(images, draws))
    mirrored = random_flip(random_crop(images, draws[:, :2], 4), draws[:, 2])
    assert torch.equal(found, cutout(mirrored, draws[:, 3:5], 3))  # each part has its own draws
    assert torch.equal(to_float(found), augment(to_float(images), draws))
    assert torch.equal(augment(images[7:9], draws[7:9]), found[7:9])


def test_augment_can_do_nothing(images, draws):
    assert torch.equal(Augment(padding=0, flip=False)(images, draws), images)


def test_padding_is_black():
    white = torch.full((200, 1, 6, 6), 255, dtype=torch.uint8)
    found = Augment(flip=False)(white, image_draws(0, 0, 0, 200))
    assert found.unique().tolist() == [0, 255]


def test_image_smaller_than_the_crop(images, draws):
    with pytest.raises(DataError, match=r"16×17 pixels \(with padding\) are smaller than the crop"):
        Augment(crop=17)(images, draws)
    with pytest.raises(DataError, match=r"smaller than the crop of 9×9"):
        center_crop(images, 9)


def test_center_crop(images):
    assert torch.equal(center_crop(images, 4), images[:, :, 2:6, 2:6])


@pytest.mark.parametrize("field", ["padding", "cutout", "crop"])
def test_bad_settings(field):
    with pytest.raises(ValueError, match=rf"`{field}` \(=-1\) must be at least"):
        Augment(**{field: -1})


def test_to_float_spans_zero_to_one():
    levels = torch.arange(256, dtype=torch.uint8)
    found = to_float(levels)
    assert found.dtype == torch.float32
    assert found[0] == 0 and found[255] == 1
    assert torch.allclose(found, levels / 255, atol=1e-7)
    assert torch.equal((found * 255).round().byte(), levels)


def test_no_rotation_and_no_shift_is_the_identity(images):
    x = to_float(images).double()
    assert torch.allclose(rotate_shift(x, 0), x, atol=1e-12)


@pytest.mark.parametrize(("dx", "dy"), [(2, 0), (0, 3), (-2, 1)])
def test_shift_by_whole_pixels(images, dx, dy):
    x = to_float(images).double()
    expected = torch.zeros_like(x)
    height, width = x.shape[2:]
    for i in range(height):
        for j in range(width):
            if 0 <= i - dy < height and 0 <= j - dx < width:
                expected[:, :, i, j] = x[:, :, i - dy, j - dx]
    assert torch.allclose(rotate_shift(x, 0, dx, dy), expected, atol=1e-12)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_quarter_turns_go_anticlockwise(turns):
    x = torch.rand(2, 3, 7, 7, dtype=torch.float64)
    assert torch.allclose(rotate_shift(x, 90 * turns), torch.rot90(x, turns, (2, 3)), atol=1e-9)


def test_images_that_are_not_square_are_not_distorted():
    """A quarter turn of a wide image, seen through its own frame."""
    x = torch.rand(1, 1, 4, 8, dtype=torch.float64)
    expected = torch.zeros_like(x)
    expected[..., :, 2:6] = torch.rot90(x[..., :, 2:6], 1, (2, 3))
    assert torch.allclose(rotate_shift(x, 90), expected, atol=1e-9)


def test_rotation_comes_before_the_shift():
    x = torch.rand(3, 1, 9, 9, dtype=torch.float64)
    both = rotate_shift(x, 90, 2, -1)
    assert torch.allclose(both, rotate_shift(rotate_shift(x, 90), 0, 2, -1), atol=1e-9)


def test_one_angle_an_image():
    x = torch.rand(3, 1, 9, 9)
    angles = torch.tensor([0.0, 30.0, -45.0])
    found = rotate_shift(x, angles, dx=torch.tensor([1.0, 0.0, 2.0]))
    for i, dx in enumerate((1, 0, 2)):
        alone = rotate_shift(x[i : i + 1], angles[i].item(), dx)
        assert torch.allclose(found[i], alone[0], atol=1e-6)
    assert math.isfinite(found.sum())


def test_rotate_shift_wants_floats(images):
    with pytest.raises(TypeError, match=r"`images` is torch.uint8; expected float"):
        rotate_shift(images, 10)
