"""Predictors from every kind of file, and pictures of every kind."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import capsroute
from capsroute.data.decoding import decode
from capsroute.inference import Prediction, Predictor
from capsroute.models import pretrained
from capsroute.models.description import Description
from capsroute.models.weights import save_model

SIZE = 20


def make_model(channels=1, multilabel=True, **options):
    torch.manual_seed(0)
    model = capsroute.create_model(
        "inverted_small_multimnist",
        image_size=SIZE,
        in_channels=channels,
        num_classes=4,
        multilabel=multilabel,
        **options,
    )
    model.class_names = ["ant", "bee", "cat", "dog"]
    return model.eval()


@pytest.fixture
def checkpoint(tmp_path):
    save_model(make_model(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_run_folder_and_its_checkpoint_are_the_same_model(checkpoint):
    images = torch.rand(3, 1, SIZE, SIZE)
    model = make_model()
    with torch.no_grad():
        expected = model.probabilities(model(images))
    for source in (checkpoint, checkpoint.parent, str(checkpoint)):
        predictor = Predictor.load(source)
        torch.testing.assert_close(predictor.probabilities(images), expected)
        assert predictor.class_names == model.class_names and predictor.multilabel
        assert (predictor.image_size, predictor.in_channels) == ((SIZE, SIZE), 1)
        assert predictor.name == "inverted_small_multimnist"
        assert predictor.model is not None and not predictor.model.training
        assert predictor.checkpoint == checkpoint


def test_a_model_is_called_by_what_it_was_loaded_from(checkpoint, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "pets"
    run.mkdir(parents=True)
    checkpoint.rename(run / "model.safetensors")
    (tmp_path / "latest").symlink_to(run)
    (run / "plots").mkdir()
    monkeypatch.chdir(run / "plots")
    for source, name in (
        (run, "pets"),
        (f"{run}/", "pets"),
        ("..", "pets"),
        (tmp_path / "latest", "latest"),
        (run / "model.safetensors", "model.safetensors"),
    ):
        predictor = Predictor.load(source)
        assert predictor.source == name
        assert predictor.title == f"{name} (inverted_small_multimnist)"
    shipped = Predictor.load("inverted_small_multimnist")
    assert shipped.source == shipped.title == "inverted_small_multimnist"
    in_memory = Predictor.from_model(make_model())
    assert (in_memory.source, in_memory.title) == (None, "inverted_small_multimnist")


def test_a_name_of_shipped_weights(checkpoint, monkeypatch):
    monkeypatch.setattr(pretrained, "FILES", checkpoint.parent)
    checkpoint.rename(checkpoint.with_name("inverted_small_multimnist_r2.safetensors"))
    assert Predictor.load("inverted_small_multimnist").iterations == 2
    with pytest.raises(ValueError, match="did you mean 'inverted_small_multimnist'"):
        Predictor.load("inverted_small_multinist")
    with pytest.raises(ValueError, match=r"no such model; .* pretrained models: inverted_small"):
        Predictor.load("zzzzzz")


def test_iterations_can_be_changed(checkpoint):
    images = torch.rand(2, 1, SIZE, SIZE)
    one, two = (Predictor.load(checkpoint, iterations=count) for count in (1, 2))
    assert one.iterations == 1
    assert not torch.allclose(one.probabilities(images), two.probabilities(images))


def test_what_is_no_model_is_one_line(tmp_path, checkpoint):
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        (tmp_path / "empty").mkdir()
        Predictor.load(tmp_path / "empty")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="whole safetensors file"):
        Predictor.load(tmp_path / "text.safetensors")
    close = str(tmp_path / "modle.safetensors")
    with pytest.raises(ValueError, match=r"did you mean '.*/model\.safetensors'"):
        Predictor.load(close)


def test_an_exported_file_runs_on_the_cpu_alone(tmp_path, monkeypatch):
    description = Description("m", ["a", "b"], (2, 2), 1, False, iterations=2)
    loaded = (description, lambda images: torch.full((len(images), 2), 0.5))
    monkeypatch.setattr("capsroute.inference.load_exported", lambda path: loaded)
    file = tmp_path / "model.onnx"
    file.touch()
    for device in ("auto", "cpu"):
        assert Predictor.load(file, device=device).name == "m"
    for device in ("cuda", "foo"):
        with pytest.raises(ValueError, match=f"`device` must be auto or cpu for .* got '{device}'"):
            Predictor.load(file, device=device)


def picture(mode, size=(40, 31)):
    width, height = size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    if mode == "LA":
        return Image.fromarray(pixels[..., :2])
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK", "I;16", "LA"])
def test_a_picture_is_prepared_as_training_decodes_it(tmp_path, mode, channels):
    name = "image.tif" if mode == "CMYK" else "image.png"
    picture(mode).save(tmp_path / name)
    predictor = Predictor.from_model(make_model(channels))
    with Image.open(tmp_path / name) as image:
        prepared = predictor.prepare(image)
    expected = decode(tmp_path / name, (SIZE, SIZE), channels)
    assert prepared.dtype == torch.float32 and prepared.shape == (channels, SIZE, SIZE)
    np.testing.assert_array_equal(prepared.numpy(), expected.astype(np.float32) / 255)


def test_a_turned_jpeg_is_prepared_as_training_decodes_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    big = picture("RGB", (400, 300)).resize((800, 600))
    big.save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as image:
        prepared = Predictor.from_model(make_model(3)).prepare(image)
    expected = decode(tmp_path / "turned.jpg", (SIZE, SIZE), 3)
    np.testing.assert_array_equal(prepared.numpy(), expected.astype(np.float32) / 255)


def test_a_model_trained_on_crops_sees_the_middle_of_a_larger_picture():
    image = picture("L", (30, 30))
    model = make_model()
    model.resize = (30, 30)
    cropped = Predictor.from_model(model).prepare(image)
    expected = np.asarray(image, dtype=np.float32)[5:25, 5:25] / 255
    np.testing.assert_array_equal(cropped[0].numpy(), expected)


def test_other_channel_counts_are_refused_in_one_line():
    with pytest.raises(ValueError, match="takes images of 5 channels"):
        Predictor.from_model(make_model(5)).prepare(picture("RGB"))


def test_decisions():
    several = Predictor.from_model(make_model())
    (answer,) = several.decide(torch.tensor([[0.2, 0.9, 0.6, 0.5]]), top_k=2)
    assert answer.labels == ["bee", "cat"]  # 0.5 is not above the threshold
    assert [name for name, _ in answer.ranked] == ["bee", "cat"]
    assert several.decide(torch.zeros(1, 4))[0].labels == []
    one = Predictor.from_model(make_model(multilabel=False))
    (answer,) = one.decide(torch.tensor([[0.1, 0.2, 0.3, 0.4]]), top_k=9)
    assert answer.labels == ["dog"] and len(answer.ranked) == 4
    with pytest.raises(ValueError, match="`top_k` must be at least 1"):
        one.decide(torch.zeros(1, 4), top_k=0)


def test_predict_takes_pictures():
    predictor = Predictor.from_model(make_model(multilabel=False))
    pictures = [picture("RGB"), picture("L", (9, 50))]
    answers = predictor.predict(pictures, top_k=4)
    prepared = torch.stack([predictor.prepare(image) for image in pictures])
    assert answers == predictor.decide(predictor.probabilities(prepared), 4)
    for answer in answers:
        assert sum(p for _, p in answer.ranked) == pytest.approx(1, abs=1e-5)
    assert predictor.predict([]) == []


@pytest.mark.parametrize("picture", ["cat.png", torch.rand(1, 20, 20)])
def test_what_is_no_picture_is_told_in_one_line(picture):
    predictor = Predictor.from_model(
        capsroute.create_model("inverted_small_multimnist", image_size=20), device="cpu"
    )
    with pytest.raises(TypeError, match=r"must be a picture of Pillow, got a (str|Tensor); `Image"):
        predictor.predict([picture])


def test_an_answer_has_one_shape_for_json():
    answer = Prediction(["bee"], [("bee", 0.75), ("cat", 0.25)], "a light background")
    bee, cat = {"label": "bee", "probability": 0.75}, {"label": "cat", "probability": 0.25}
    assert answer.as_dict() == {
        "labels": ["bee"],
        "ranked": [bee, cat],
        "remark": "a light background",
    }
    assert answer.as_dict(top_k=1)["ranked"] == [bee]


def test_scores_that_are_not_finite_are_no_answer():
    model = make_model()
    with torch.no_grad():
        model.classifier.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        Predictor.from_model(model).predict([picture("L")])


def test_dark_digits_on_white_are_remarked_on_and_left_alone():
    model = capsroute.create_model("inverted_small_multimnist")
    model.class_names = [str(digit) for digit in range(10)]
    predictor = Predictor.from_model(model)
    paper = Image.new("L", (36, 36), 255)
    prepared = predictor.prepare(paper)
    assert prepared.min() == 1.0
    assert "invert the image first" in (predictor.remark(prepared) or "")
    assert predictor.remark(1 - prepared) is None
    white, black = predictor.predict([paper, Image.new("L", (36, 36), 0)])
    assert (white.remark, black.remark) == (predictor.remark(prepared), None)
    assert Predictor.from_model(make_model()).remark(torch.ones(1, SIZE, SIZE)) is None


def test_an_image_in_memory_keeps_its_pixels():
    data = io.BytesIO()
    picture("L", (SIZE, SIZE)).save(data, format="PNG")
    with Image.open(data) as image:
        prepared = Predictor.from_model(make_model()).prepare(image)
    expected = np.asarray(picture("L", (SIZE, SIZE)), dtype=np.float32) / 255
    np.testing.assert_array_equal(prepared[0].numpy(), expected)
