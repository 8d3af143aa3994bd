"""The measure itself, on a model that looks at one corner."""

import pytest
import torch
from explained_models import images, make

from capsroute.explain.deletion import SHARE, blur, hottest, measure_deletion


def test_the_hottest_and_the_coldest_pixels():
    heat = torch.rand(3, 10, 10, generator=torch.Generator().manual_seed(0))
    hot, cold = hottest(heat), hottest(heat, largest=False)
    assert hot.shape == (3, 1, 10, 10)
    assert hot.sum(dim=(1, 2, 3)).tolist() == [SHARE * 100] * 3
    assert not (hot & cold).any()
    for one, mask in zip(heat, hot[:, 0], strict=True):
        assert one[mask].min() > one[~mask].max() - 2e-3  # ties aside


def test_of_equally_cold_pixels_the_furthest_from_heat_are_coldest():
    heat = torch.zeros(1, 10, 10)
    heat[0, :, 0] = 1.0
    cold = hottest(heat, largest=False)[0, 0]
    assert not cold[:, :4].any()


def test_blurring_keeps_what_is_even_and_the_mean_of_what_is_not():
    even = torch.full((1, 3, 16, 12), 0.25)
    torch.testing.assert_close(blur(even), even)
    dot = torch.zeros(1, 1, 33, 33)
    dot[0, 0, 16, 16] = 1.0
    spread = blur(dot)
    assert spread.sum().item() == pytest.approx(1, abs=1e-3) and spread.max() < 0.02
    torch.testing.assert_close(spread, spread.flip(2).flip(3))


def test_a_model_that_looks_at_one_corner(monkeypatch):
    """Its hottest pixels cost it all, any others nothing."""
    model = make("inverted", multilabel=True)
    batch = images(model, 4)
    corner = torch.zeros(model.image_size)
    corner[:11, :11] = 1.0  # a fifth of 24 × 24, and a little more

    def forward(pixels):
        sharp = (pixels - blur(pixels)).abs() * corner
        return 100 * (sharp.sum(dim=(1, 2, 3))[:, None] - 15.0).expand(-1, 10)

    monkeypatch.setattr(model, "forward", forward)
    heat = corner.expand(4, -1, -1) * torch.rand(4, 24, 24)
    monkeypatch.setitem(measure_deletion.__globals__["MAPS"], "corner", lambda *_: heat)
    told = []
    found = measure_deletion(model, batch, ["corner"], lambda *done: told.append(done))
    assert told == [(4, 4)]
    assert {"corner", "gradient_times_input_smoothed", "random_pixels"} <= set(found)
    assert found["corner"].kept == pytest.approx(1, abs=1e-3)
    assert found["corner"].coldest == pytest.approx(0, abs=1e-3)
    assert found["corner"].hottest == pytest.approx(1, abs=1e-3)
    assert found["corner"].misplaced == pytest.approx(1, abs=1e-3)  # it is hot for all of them
    assert found["random_pixels"].hottest < 0.01
