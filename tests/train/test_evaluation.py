import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from capsroute.data import ArraySplit, load_dataset, rotate_shift
from capsroute.data.diverse_multimnist import DiverseMultiMNIST
from capsroute.models.base import ImageClassifier, Task
from capsroute.train.evaluation import (
    ClassRow,
    CountRow,
    Evaluation,
    Point,
    _shifted,
    _Tally,
    _turned,
    evaluate,
    finite,
    robustness,
)


class PixelsAreScores(ImageClassifier):
    """The image's pixels are the probabilities of its classes."""

    scores_are_probabilities = True

    def __init__(self, classes, multilabel):
        super().__init__(Task(classes, (1, classes), 1, multilabel=multilabel))

    def compute_scores(self, images):
        return images.flatten(1)


def predict(sets, classes):
    """An image for each predicted set of classes."""
    images = torch.full((len(sets), 1, 1, classes), 10, dtype=torch.uint8)
    for row, chosen in enumerate(sets):
        images[row, 0, 0, list(chosen)] = 200
    return images


def many_hot(sets, classes):
    return torch.tensor([[float(k in chosen) for k in range(classes)] for chosen in sets])


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_one_class_an_image(batch_size):
    true, predicted = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 0, 0]
    split = ArraySplit(predict([{k} for k in predicted], 4), torch.tensor(true))
    model = PixelsAreScores(4, multilabel=False)
    evaluation = evaluate(model, split, batch_size=batch_size, device="cpu")
    assert evaluation.images == 6 and evaluation.accuracy == pytest.approx(50)
    assert evaluation.confusion == ((2, 1, 0, 0), (1, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0))
    assert evaluation.classes == (
        ClassRow(3, pytest.approx(200 / 3), 50.0),
        ClassRow(2, 50.0, 50.0),
        ClassRow(1, 0.0, None),  # never predicted
        ClassRow(0, None, None),
    )
    assert evaluation.counts == () and not evaluation.multilabel and evaluation.not_finite == 0


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_several_labels_an_image(batch_size):
    cases = [  # true, predicted
        ({0}, {0}),  # right
        ({0, 1}, {0, 1}),  # right
        ({0, 1}, {0, 2}),  # 1 taken for 2
        ({1, 2}, {1}),  # 2 missed, nothing in its stead
        ({1}, {1, 0}),  # 0 too many
        ({0}, {1, 2}),  # 0 missed, 1 and 2 wrong
    ]
    images = predict([predicted for _, predicted in cases], 3)
    split = ArraySplit(images, many_hot([true for true, _ in cases], 3))
    model = PixelsAreScores(3, multilabel=True)
    evaluation = evaluate(model, split, batch_size=batch_size, device="cpu")
    assert evaluation.images == 6 and evaluation.accuracy == pytest.approx(100 / 3)
    assert evaluation.confusion == ((3, 1, 1, 0), (0, 3, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0))
    assert evaluation.classes == (
        ClassRow(4, 75.0, 75.0),
        ClassRow(4, 75.0, 75.0),
        ClassRow(1, 0.0, 0.0),
    )
    assert evaluation.counts == (
        CountRow(1, 3, pytest.approx(100 / 3)),
        CountRow(2, 3, pytest.approx(100 / 3)),
    )


def test_the_model_is_left_as_it_was_and_bad_scores_are_counted():
    model = PixelsAreScores(2, multilabel=False)
    split = ArraySplit(predict([{0}, {1}], 2), torch.tensor([0, 1]))
    spoiled = evaluate(
        model,
        split,
        batch_size=2,
        device="cpu",
        transform=lambda images, rows: images.masked_fill(rows.view(-1, 1, 1, 1) == 1, torch.nan),
    )
    assert model.training and spoiled.not_finite == 1


def test_progress_and_positions_do_not_depend_on_the_batch():
    model = PixelsAreScores(2, multilabel=False).eval()
    split = ArraySplit(predict([{0}] * 5, 2), torch.zeros(5, dtype=torch.int64))
    heard, seen = [], []

    def transform(images, rows):
        seen.extend(rows.tolist())
        return images

    evaluate(
        model,
        split,
        batch_size=2,
        device="cpu",
        transform=transform,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == [(1, 3), (2, 3), (3, 3)] and seen == [0, 1, 2, 3, 4]
    assert not model.training


def test_an_endless_source_is_measured_on_a_fixed_sample():
    split = load_dataset("diverse_multimnist").train
    assert isinstance(split, DiverseMultiMNIST)
    first, again = finite(split), finite(split)
    assert len(first) == 10_000 and torch.equal(first.images, again.images)
    assert finite(first) is first


class LooksAtTheCentre(ImageClassifier):
    """Class 1 when the centre pixel of 5×5 is lit."""

    def __init__(self):
        super().__init__(Task(2, 5, 1))

    def compute_scores(self, images):
        lit = images[:, 0, 2, 2]
        return torch.stack([torch.full_like(lit, 0.5), lit], dim=1)


class LooksRight(LooksAtTheCentre):
    """Class 1 when the pixel two to the right of the centre is lit."""

    def compute_scores(self, images):
        return super().compute_scores(images.roll(-2, dims=3))


def dot(row, column, count=8):
    images = torch.zeros(count, 1, 5, 5, dtype=torch.uint8)
    images[:, 0, row, column] = 255
    return ArraySplit(images, torch.ones(count, dtype=torch.int64))


def test_shifts_go_four_ways_and_rotations_two():
    settings = {"batch_size": 3, "device": "cpu"}
    points = robustness(LooksAtTheCentre(), dot(2, 2), degrees=(0, 90), shifts=(0, 1), **settings)
    assert points == [  # about the centre, a rotation leaves the dot where it is
        Point("rotation", 0, 100.0),
        Point("rotation", 90, 100.0),
        Point("shift", 0, 100.0),
        Point("shift", 1, 0.0),
    ]
    # a quarter of the images each goes right, down, left, up
    assert robustness(LooksRight(), dot(2, 2), shifts=(2,), **settings)[0].accuracy == 25.0
    # and half of them turn either way
    assert robustness(LooksRight(), dot(0, 2), degrees=(90,), **settings)[0].accuracy == 50.0


def test_progress_of_robustness_runs_through_all_points():
    heard = []
    robustness(
        LooksAtTheCentre(),
        dot(2, 2),
        degrees=(10,),
        shifts=(1,),
        batch_size=4,
        device="cpu",
        progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_evaluation_json_has_a_name_for_every_row_and_column():
    counts, classes = (CountRow(1, 3, 100.0),), (ClassRow(2, 50.0, None), ClassRow(1, 100.0, 50.0))
    matrix = ((1, 1, 0), (0, 1, 0), (0, 0, 0))
    several = Evaluation(True, 3, 100.0, classes, matrix, counts, not_finite=1)
    assert several.as_dict(["a", "b"], [Point("shift", 1, 70.0)]) == {
        "images": 3,
        "accuracy": 100.0,
        "not_finite": 1,
        "classes": [
            {"name": "a", "support": 2, "recall": 50.0, "precision": None},
            {"name": "b", "support": 1, "recall": 100.0, "precision": 50.0},
        ],
        "counts": [{"labels": 1, "images": 3, "accuracy": 100.0}],
        "confusion": {"labels": ["a", "b", "none"], "rows_true_columns_predicted": matrix},
        "robustness": [{"kind": "shift", "value": 1, "accuracy": 70.0}],
    }
    one = Evaluation(False, 3, 100.0, classes, ((1, 1), (0, 1)))
    assert one.as_dict(["a", "b"])["confusion"]["labels"] == ["a", "b"]


class NumbersSent(TorchDispatchMode):
    """Counts the Python numbers that become tensors, each a copy that a GPU is waited for."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function is torch.ops.aten.scalar_tensor.default
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("transform", [_turned(30.0), _shifted(1.0)], ids=["turned", "shifted"])
def test_a_batch_is_counted_without_reading_or_sending_a_number(multilabel, transform):
    """No GPU is needed: tensors of the meta device cannot be read, by whatever operation."""
    model = PixelsAreScores(3, multilabel)
    meta = {"device": "meta"}
    targets = torch.zeros(4, 3, **meta) if multilabel else torch.zeros(4, dtype=torch.long, **meta)
    tally = _Tally(model, torch.device("meta"))
    with NumbersSent() as sent:
        images = transform(torch.zeros(4, 1, 1, 3, **meta), torch.arange(4, **meta))
        tally.add(model(images), targets)
    assert sent.count == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
@pytest.mark.parametrize("multilabel", [False, True])
def test_nothing_waits_for_the_gpu_inside_the_loop(multilabel):
    sets = [{row % 3} for row in range(12)]
    targets = many_hot(sets, 3) if multilabel else torch.tensor([row % 3 for row in range(12)])

    def forbid_waiting(images, rows):
        torch.cuda.set_sync_debug_mode("error")
        return rotate_shift(images, 0.0 * rows)

    def allow_at_the_end(done, total):
        if done == total:
            torch.cuda.set_sync_debug_mode("default")

    try:
        evaluation = evaluate(
            PixelsAreScores(3, multilabel),
            ArraySplit(predict(sets, 3), targets),
            batch_size=4,
            device="cuda",
            transform=forbid_waiting,
            progress=allow_at_the_end,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert evaluation.accuracy == 100.0
