"""`explain` and its pictures, on models of every family."""

import base64
import html.parser
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from explained_models import FAMILIES, images, make
from PIL import Image

import capsroute
from capsroute.explain import DEFAULT_MAP, default_map, draw_explanation, explain, page
from capsroute.explain.heat import EM_MAPS, MAPS, contrast
from capsroute.explain.trace import trace
from capsroute.inference import Predictor


def example(family="inverted", **options):
    model = make(family, **options)
    return model, images(model, 1)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_explanation_is_whole(family):
    model, image = example(family)
    explanation = explain(model, image, [1, 0])
    with torch.no_grad():
        expected = model.probabilities(model(image[None]))[0]
    np.testing.assert_allclose(explanation.probabilities, expected, rtol=1e-4, atol=1e-5)
    assert explanation.classes == [1, 0] and set(explanation.heat) == {0, 1}
    for heat in explanation.heat.values():
        assert heat.shape == model.image_size and heat.min() >= 0 and heat.max() == 1
    assert len(explanation.layers) == len(model.route(image[None]).used)
    assert explanation.links
    json.loads(json.dumps(explanation.as_dict()))


@pytest.mark.parametrize("family", FAMILIES)
def test_links_lead_from_the_class_to_the_image(family):
    model, image = example(family)
    explanation = explain(model, image, [2])
    height, width = model.image_size
    levels = set()
    for link in explanation.links:
        assert link.child.layer == link.parent.layer - 1
        levels.add(link.child.layer)
        assert 0 < link.share <= 1 and 0 <= link.coefficient <= 1
        top, left, bottom, right = link.child.box
        assert 0 <= top < bottom <= height and 0 <= left < right <= width
        above = link.parent.box
        assert above.top <= top and above.left <= left
        assert above.bottom >= bottom and above.right >= right
    assert levels == set(range(len(explanation.layers)))
    root = explanation.trees[2]
    assert root.capsule.capsule == 2 and root.capsule.layer == len(explanation.layers)
    for node in root.walk():
        shares = [child.share for child in node.children]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 1 + 1e-6


def test_the_strongest_link_is_the_largest_part_of_the_score():
    model, image = example("inverted")
    explanation = explain(model, image, [3])
    routing = model.route(image[None])
    link = explanation.links[0]
    row, column, capsule = link.child.row, link.child.column, link.child.capsule
    _, rows, columns, capsules, _ = routing.poses[0][routing.used[0]].shape
    index = (row * columns + column) * capsules + capsule
    used = routing.coefficients[1][routing.used[1]]
    assert link.coefficient == pytest.approx(used[0, index, 3].item(), rel=1e-4)
    assert rows == columns == 1


def test_classes_are_the_predicted_ones_unless_given():
    model, image = example("inverted", multilabel=True)
    explanation = explain(model, image)
    chosen = [i for i, p in enumerate(explanation.probabilities) if p > 0.5]
    assert sorted(explanation.predicted) == chosen
    assert explanation.classes == (explanation.predicted or [np.argmax(explanation.probabilities)])
    single, image = example("inverted", multilabel=False)
    assert explain(single, image).classes == [int(np.argmax(explain(single, image).probabilities))]
    with torch.no_grad():
        model.classifier.bias.fill_(-50)  # nothing is predicted: the likeliest is explained
    nothing = explain(model, image)
    assert nothing.predicted == [] and len(nothing.classes) == 1
    assert b"PNG" in draw_explanation(nothing, image)[:8]
    assert "Predicted: nothing" in page(nothing, image)


def test_classes_may_be_named():
    model, image = example("inverted")
    assert explain(model, image, ["3", 1, "1"]).classes == [3, 1]
    assert explain(model, image, "3").classes == explain(model, image, 3).classes == [3]
    for one in (np.int64(3), torch.tensor(3)):
        assert explain(model, image, one).classes == [3]
    for wrong in (1.5, [1.5], [[1, 2]]):
        with pytest.raises(ValueError, match="`classes` must name classes, or count them, got"):
            explain(model, image, wrong)
    for counted in (np.array([3, 0]), torch.tensor([3, 0])):
        explanation = explain(model, image, counted)
        assert explanation.classes == [3, 0] and json.dumps(explanation.as_dict())
    model.class_names = list("abcdefghij")
    assert explain(model, image, ["c"]).classes == [2]


def test_wrong_arguments_are_one_line():
    model, image = example("inverted")
    with pytest.raises(ValueError, match="`classes` must be between 0 and 9, got 10"):
        explain(model, image, [10])
    with pytest.raises(ValueError, match="`map` must be one of contrast"):
        explain(model, image, map="heat")
    with pytest.raises(ValueError, match=r"`image` must have shape \(C, H, W\)"):
        explain(model, image[None])
    with pytest.raises(ValueError, match=r"`image` must have shape \(C, H, W\)"):
        draw_explanation(explain(model, image), image[None])
    with pytest.raises(TypeError, match=r"`image` must be a tensor \(C, H, W\), got Image; `Pred"):
        explain(model, Image.new("L", (24, 24)))
    with pytest.raises(ValueError, match="`classes` must name classes, got '11'; did you mean '1'"):
        explain(model, image, ["11"])
    with pytest.raises(TypeError, match=r"of capsroute, got a Predictor; pass its `\.model`"):
        explain(Predictor.from_model(model, device="cpu"), image)
    with pytest.raises(TypeError, match=r"must be a model of capsroute, got a str$"):
        explain("inverted_small_multimnist", image)


def test_mixed_windows_are_not_explained():
    model = make("inverted", windows="mixed")
    with pytest.raises(TypeError, match=r"its windows are mixed.*`model.route` shows its routing"):
        explain(model, images(model)[0])


def test_explaining_leaves_the_model_alone():
    model, image = example("inverted")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():  # as a server calls it
        explain(model, image)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_compiled_and_in_inference_mode_the_explanation_is_the_same():
    model, image = example("inverted")
    expected = explain(model, image)
    with torch.inference_mode():
        got = explain(torch.compile(model, backend="eager"), image.clone())
    assert got.as_dict() == expected.as_dict()


def test_a_model_in_training_mode_is_explained_as_it_will_predict():
    """The mode that `create_model` leaves a model in; of this one, BatchNorm minds."""
    model, image = example("em")
    expected = explain(model, image, [0])
    model.train()
    model.capsules.eval()  # frozen, as in fine-tuning
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert explain(model, image, [0]).as_dict() == expected.as_dict()
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_which_layers_routed():
    """Two iterations: only the class layer's second one reaches the scores."""
    model, image = example("inverted", iterations=2)
    explanation = explain(model, image, [0])
    assert [layer.routed for layer in explanation.layers] == [False, True]
    assert [layer.used for layer in explanation.layers] == [1, 2]
    assert "Shared evenly, not routed: capsule layer 1" in explanation.notes()[0]
    model, image = example("inverted", iterations=1)
    assert "No layer routed" in explain(model, image, [0]).notes()[0]
    model, image = example("inverted", iterations=3)
    assert explain(model, image, [0]).notes() == []


def test_what_went_to_nobody_is_told():
    model, image = example("inverted", iterations=3)
    explanation = explain(model, image, [0])
    below, top = explanation.layers
    lossy = replace(explanation, layers=[below, replace(top, nobody=0.254)])
    assert lossy.notes() == ["Went to no parent: 25 % under class capsules."]


def test_hardly_routed_is_not_called_even():
    model, image = example("inverted", iterations=2)
    with torch.no_grad():
        for layer in model.capsules.layers:
            layer.norm.weight.mul_(0.05)  # short poses agree with none more than with others
    explanation = explain(model, image, [0])
    assert [layer.even for layer in explanation.layers] == [True, False]
    hardly, evenly = explanation.notes()
    percent = explanation.layers[1].deviation_percent
    assert hardly.startswith("Hardly routed: class capsules. Shares differ from even by at most ")
    assert percent in hardly and "almost from the votes alone" in hardly
    assert evenly.startswith("Shared evenly, not routed: capsule layer 1.")
    assert f"within {percent} of even" in page(explanation, image)


def test_the_digits_model_keeps_its_map():
    """The numbers in results/separation are of this map."""
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist").eval()
    assert default_map(model) == DEFAULT_MAP == "contrast"
    image = images(model, 1)[0]
    explanation = explain(model, image, [3])
    heat = contrast(trace(model, image[None]), torch.tensor([3]))[0]
    np.testing.assert_allclose(explanation.heat[3], heat / heat.max(), rtol=1e-6)
    assert explanation.map == "contrast" and not explanation.sees_most
    assert all(link.child.shown == link.child.box for link in explanation.links)


def test_the_rival_is_named_where_the_heat_is_of_a_margin():
    model, image = example("inverted")
    scores = model(image[None])[0]
    first, second = scores.argsort(descending=True)[:2].tolist()
    explanation = explain(model, image, [first, second], map="contrast")
    assert explanation.rivals == {first: second, second: first}
    names = [explanation.class_names[index] for index in (second, first)]
    assert [one["rival"] for one in explanation.as_dict()["classes"]] == names
    assert all(f"what tells it from {name}<" in page(explanation, image) for name in names)
    plain = explain(model, image, [first], map="contribution")
    assert plain.rivals == {} and plain.as_dict()["classes"][0]["rival"] is None
    assert "what tells it from" not in page(plain, image)


def test_the_rival_named_is_the_one_that_the_heat_is_held_against(monkeypatch):
    """Where two others are equally strong, rounding may order the model's own scores otherwise."""
    model, image = example("inverted")
    first, second, third = model(image[None])[0].argsort(descending=True)[:3].tolist()

    def trace_with_the_others_swapped(*arguments):
        traced = trace(*arguments)
        scores = traced.routing.scores.clone()
        scores[:, [second, third]] = scores[:, [third, second]]
        return replace(traced, routing=replace(traced.routing, scores=scores))

    monkeypatch.setattr("capsroute.explain.explanation.trace", trace_with_the_others_swapped)
    assert explain(model, image, [first], map="contrast").rivals == {first: second}


@pytest.mark.parametrize("asked", sorted(set(MAPS) - set(EM_MAPS)))
def test_em_has_no_map_of_what_votes_say(asked):
    model, image = example("em")
    explanation = explain(model, image, [0])
    assert explanation.map in ("fields", "grid") and explanation.rivals == {}
    expected = f"`map` must be one of fields, grid, coefficients for an EM model.*, got '{asked}'"
    with pytest.raises(ValueError, match=expected):
        explain(model, image, [0], map=asked)


@pytest.fixture(scope="module")
def deep():
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_resnet_cifar10").eval()
    image = images(model, 1)[0]
    return model, image, explain(model, image, [3])


def test_where_a_capsule_sees_nearly_everything_places_are_shown(deep):
    model, image, explanation = deep
    assert default_map(model) == explanation.map == "grid" and explanation.sees_most
    assert explain(model, image, [3], map="contribution").map == "contribution"
    for link in explanation.links:
        seen, shown = link.child.box, link.child.shown
        assert (seen.bottom - seen.top) * (seen.right - seen.left) > 32 * 32 / 2
        side = {0: 9, 1: 13, 2: 21}[link.child.layer]
        assert shown.bottom - shown.top <= side and shown.right - shown.left <= side
    boxes = {link.child.shown for link in explanation.links}
    assert len(boxes) > 6  # not one picture over and over
    text = page(explanation, image)
    assert "what lies around each capsule&#x27;s place" in text
    assert "<code>grid</code>: What each place of the primary capsules gave" in text


def test_a_tree_says_how_much_of_its_class_it_shows(deep):
    _, image, explanation = deep
    shares = [link.share for link in explanation.links if link.parent.layer == 3]
    (entry,) = explanation.as_dict()["classes"]
    assert entry["carried"] == pytest.approx(sum(shares)) and len(shares) == 3
    assert entry["caption"] == (
        f"3 of 800 links to 3 are shown, with {100 * sum(shares):.0f} % of all that spoke for it"
    )
    assert entry["caption"] in page(explanation, image)


def decode_uri(uri):
    kind, data = uri.split(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_heat_travels_as_an_overlay():
    model, image = example("inverted")
    explanation = explain(model, image, [4])
    (entry,) = explanation.as_dict()["classes"]
    overlay = decode_uri(entry["heat"])
    assert overlay.mode == "RGBA" and overlay.size == model.image_size[::-1]
    opacity = np.asarray(overlay)[..., 3]
    np.testing.assert_array_equal(opacity, np.rint(255 * explanation.heat[4]))


@pytest.mark.parametrize("family", ["inverted_linear", "em"])
def test_the_png_can_be_opened(family):
    model, image = example(family)
    data = draw_explanation(explain(model, image, [0, 1, 2, 3, 4]), image)
    with Image.open(io.BytesIO(data)) as picture:
        picture.load()
        assert picture.format == "PNG" and picture.width > 900


class Page(html.parser.HTMLParser):
    VOID = ("meta", "img", "line", "rect", "image")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else():
    model, image = example("inverted")
    model.class_names = ["<script>alert(1)</script>", *"abcdefgh", "a & b"]
    explanation = replace(explain(model, image, [0, 9]), predicted=[0])
    text = page(explanation, image)
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.links and all(link.startswith("data:image/png;base64,") for link in parsed.links)
    assert "script" not in [tag for tag, _ in parsed.tags] and "url(" not in text
    assert "a &amp; b" in text and "http" not in text
    for tag, attributes in parsed.tags:
        if tag == "img":
            assert "alt" in attributes
    assert text.count('role="img"') == 2 and 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_colour_images_are_explained_too():
    model = make("inverted", in_channels=3)
    image = images(model, 1)[0]
    explanation = explain(model, image, [0])
    assert explanation.heat[0].shape == model.image_size
    assert draw_explanation(explanation, image)
