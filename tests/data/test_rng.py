import numpy as np
import pytest
import torch

from capsroute.data.rng import (
    DRAWS,
    AugmentDraws,
    GeneratorDraws,
    Purpose,
    below,
    image_draws,
    permutation,
)

PINNED_DRAWS = [
    2684095488,
    3497965580,
    4268556838,
    1888414677,
    1192010242,
    1287287723,
    3325636912,
    2626905299,
]
PINNED_ORDER = [5, 3, 7, 2, 4, 1, 0, 6]


def test_draws_are_a_pure_function_of_their_position():
    whole = image_draws(7, 3, 0, 50)
    assert whole.shape == (50, 8)
    assert whole.min() >= 0 and whole.max() < 2**32
    assert torch.equal(image_draws(7, 3, 20, 31), whole[20:31])
    assert image_draws(7, 3, 4, 4).shape == (0, 8)


def test_seed_step_and_purpose_each_change_the_draws():
    base = image_draws(7, 3, 0, 5)
    assert not torch.equal(base, image_draws(8, 3, 0, 5))
    assert not torch.equal(base, image_draws(7, 4, 0, 5))
    assert not torch.equal(base, image_draws(7, 3, 0, 5, purpose=Purpose.FIXED_SET))


def test_the_stream_is_pinned():
    """A change here changes the data of every run: it must never happen silently."""
    first = np.random.Philox(key=np.array([7, 2], dtype=np.uint64), counter=3 << 64).random_raw(1)
    assert image_draws(7, 3, 0, 1)[0, 0] == int(first[0]) & 0xFFFFFFFF
    assert image_draws(0, 0, 0, 1)[0].tolist() == PINNED_DRAWS
    assert permutation(0, 0, 8).tolist() == PINNED_ORDER


def test_below_covers_its_range_evenly():
    picks = below(image_draws(0, 0, 0, 20_000).flatten(), 7)
    share = torch.bincount(picks, minlength=7) / len(picks)
    sigma = (1 / 7 * 6 / 7 / len(picks)) ** 0.5
    assert len(share) == 7
    assert (share - 1 / 7).abs().max() < 4 * sigma
    assert below(torch.tensor([2**32 - 1]), 7) == 6


def test_permutation_visits_everything_once_and_differs_by_epoch():
    order = permutation(5, 0, 1000)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, permutation(5, 0, 1000))
    assert not torch.equal(order, permutation(5, 1, 1000))


@pytest.mark.parametrize("allocated", [AugmentDraws, GeneratorDraws])
def test_what_reads_the_same_draws_shares_no_column(allocated):
    """`AugmentDraws` and `GeneratorDraws` are columns of different draws: see test_batches.py."""
    columns = []
    for name, column in vars(allocated).items():
        if not name.startswith("_"):
            indices = range(DRAWS)[column]
            columns += [indices] if isinstance(indices, int) else indices
    assert len(columns) >= 5 and len(set(columns)) == len(columns)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=r"`seed` \(=.*must be in"):
        image_draws(seed, 0, 0, 1)


def test_seed_must_be_an_integer():
    with pytest.raises(TypeError):
        image_draws(0.5, 0, 0, 1)
