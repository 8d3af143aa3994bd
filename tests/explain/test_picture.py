"""The PNG's titles, at their worst."""

import io
import itertools
from dataclasses import replace

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox
from PIL import Image

import capsroute
from capsroute.explain import draw_explanation, explain

LONG = "white wolf, Arctic wolf, Canis lupus tundrarum; or none of them"


@pytest.fixture(scope="module")
def explained():
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist").eval()
    image = torch.rand(1, 36, 36)
    return explain(model, image, list(range(10))), image


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved."""
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **k: (saved.append(figure), save(figure, *a, **k))
    )
    return saved


@pytest.mark.parametrize("count", [1, 3, 10])
def test_titles_neither_overlap_nor_leave_the_picture(explained, figures, count):
    explanation, image = explained
    many = replace(
        explanation,
        class_names=[LONG] * 5 + ["ohneLeerzeichen" * 4] * 5,
        classes=list(range(count)),
        predicted=list(range(10)),
    )
    with Image.open(io.BytesIO(draw_explanation(many, image))) as picture:
        assert picture.format == "PNG"
    (figure,) = figures
    canvas = FigureCanvasAgg(figure)
    maps = figure.subfigs[0]
    titles = [axis.title for axis in maps.axes] + [maps._suptitle]
    boxes = [title.get_window_extent(canvas.get_renderer()) for title in titles]
    for index, box in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:index])
    told = "4 of 10 classes shown" in maps._suptitle.get_text()
    assert told is (count == 10)


def layers_of(explanation, *entropies):
    pairs = zip(explanation.layers, entropies, strict=True)
    return [replace(layer, entropy=list(entropy), used=2) for layer, entropy in pairs]


def test_curves_that_coincide_stand_side_by_side(explained, figures):
    explanation, image = explained
    same = replace(explanation, classes=[0], layers=layers_of(explanation, *[(1.0, 0.6)] * 2))
    draw_explanation(same, image)
    (axis,) = figures[0].subfigs[2].axes
    lines = [tuple(line.get_xdata()) for line in axis.lines if line.get_linestyle() == "-"]
    assert len(lines) == len(set(lines)) == 2


def test_no_layer_has_the_colour_of_a_class(explained, figures):
    explanation, image = explained
    bent = replace(explanation, classes=[0], layers=layers_of(explanation, *[(1.0, 0.6)] * 2))
    draw_explanation(bent, image)
    (axis,) = figures[0].subfigs[2].axes
    for line in axis.lines:
        red, green, blue = to_rgb(line.get_color())
        assert max(red, green, blue) - min(red, green, blue) < 0.06  # a grey


def test_a_flat_line_is_not_drawn(explained, figures):
    explanation, image = explained
    flat = replace(explanation, classes=[0], layers=layers_of(explanation, *[(1.0, 0.995)] * 2))
    bent = replace(
        explanation, classes=[0], layers=layers_of(explanation, (1.0, 0.995), (1.0, 0.9))
    )
    sizes = [Image.open(io.BytesIO(draw_explanation(one, image))).height for one in (flat, bent)]
    assert sizes[0] < sizes[1] - 100
    words = [text.get_text() for text in figures[0].subfigs[2].texts]
    assert not figures[0].subfigs[2].axes and "class capsules: routed" in " ".join(words)
    assert figures[1].subfigs[2].axes


def test_patches_of_deep_trees_do_not_overlap(figures):
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_resnet_cifar100", iterations=1).eval()
    image = torch.rand(3, 32, 32)
    draw_explanation(explain(model, image, [0]), image)
    renderer = FigureCanvasAgg(figures[0]).get_renderer()
    boxes = [
        artist.get_window_extent(renderer) for artist in figures[0].findobj(match=AnnotationBbox)
    ]
    assert len(boxes) > 20
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
