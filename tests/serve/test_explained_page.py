"""The page of `capsroute explain` in a real browser, on screens wide and narrow."""

import pytest
import torch
from browser import chromium, find_chromium

import capsroute
from capsroute.explain import explain, page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_chromium() is None, reason="no Chromium here: apt-get install chromium"
    ),
]


def test_every_column_of_its_tables_is_seen(tmp_path):
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist", iterations=5).eval()
    image = torch.rand(1, 36, 36)
    (tmp_path / "page.html").write_text(page(explain(model, image, [2, 4]), image))
    beyond = (
        "[...document.querySelectorAll('.scroll:has(table)')]"
        ".map((e) => e.scrollWidth - e.clientWidth)"
    )
    with chromium(find_chromium()) as tab:
        for width in (1280, 390, 320):
            tab.view(width, 900, phone=width < 1000)
            tab.open(f"file://{tmp_path}/page.html?{width}")
            tab.evaluate("document.querySelectorAll('details').forEach((e) => (e.open = true))")
            assert tab.evaluate(beyond) == [0, 0, 0]
            assert tab.evaluate("document.documentElement.scrollWidth") == width
