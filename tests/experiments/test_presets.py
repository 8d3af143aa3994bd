"""Presets: every experiment of the paper is there, under the names that the design gives."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from capsroute import create_model, losses
from capsroute.experiments import list_experiments, preset
from capsroute.experiments.presets import MOST_EPOCHS, limit_epochs
from capsroute.experiments.tables import all_tables, cifar, iterations, multimnist
from capsroute.layers import ConvCaps
from capsroute.models import model_info
from capsroute.models.backbones import GhostBatchNorm2d
from capsroute.train.optim import learning_rate
from capsroute.train.step import choose_loss


def test_the_papers_experiments_are_all_there():
    names = set(list_experiments())
    cells = {"inverted_simple": 4, "inverted_resnet": 2, "dynamic_simple": 1, "dynamic_resnet": 1}
    cells |= {"em_simple": 2, "em_resnet": 2}
    table = {f"{row}_{data}_r{r}" for row, r in cells.items() for data in ("cifar10", "cifar100")}
    table |= {f"{cnn}_{data}" for cnn in ("cnn", "resnet18") for data in ("cifar10", "cifar100")}
    assert len(table) == 16 and table <= names
    lines = ["inverted_simple_cifar10", "dynamic_simple_cifar10", "em_simple_cifar10"]
    lines += [f"inverted_simple_cifar10_{ablation}" for ablation in "abc"]
    figure = {f"{line}_r{r}" for line in lines for r in range(1, 6)}
    assert len(figure) == 30 and figure <= names
    digits = {"inverted_vector_multimnist_r2", "inverted_matrix_multimnist_r2", "cnn_multimnist"}
    digits |= {"inverted_matrix_multimnist_wide_r2", "dynamic_vector_multimnist_r3"}
    digits |= {"cnn_multimnist_learned_pool"}
    assert digits <= names
    for printed, wanted in ((cifar(), table), (iterations(), figure), (multimnist(), digits)):
        assert {row.experiment for row in printed.rows} == wanted


def test_every_experiment_stands_in_a_table():
    rows = [row for table in all_tables() for row in table.rows]
    assert {row.experiment for row in rows} == set(list_experiments())
    assert all(
        len(row.cells) == len(table.headings) for table in all_tables() for row in table.rows
    )


@pytest.mark.parametrize("name", list_experiments())
def test_a_preset_fits_its_model_and_data(name):
    chosen = preset(name)
    config = chosen.config
    info = model_info(config.model.model)
    assert config.data.data == info.dataset
    model = built(name)
    expected = config.model.iterations
    assert model.iterations == (info.task.iterations if expected is None else expected)
    if expected is not None and not name.startswith("fast_"):
        assert name.endswith(f"_r{expected}")
    if chosen.paper_accuracy is not None:
        assert config.epochs == 350 and config.batch_size == 128 and config.seed == 0
        plain = config.model.options().keys() <= {"iterations", "bn_group"}
        if plain and config.model.iterations == info.task.iterations:  # a cell of the table
            assert chosen.paper_accuracy == info.paper_accuracy


SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 5e-4}
DYNAMIC = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0}
EM = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.0}
STEPS = {"lr_schedule": "step", "milestones": (150, 250), "warmup": 0.0}
PLAIN = {"label_smoothing": 0.0, "ema": 0.0, "clip": 0.0, "accumulate": 1, "capsule_decay": None}
CIFAR = {"padding": 4, "flip": True, "cutout": 0, "cutmix": 0.0, "crop": None, "validation": 0.0}
DIGITS = CIFAR | {"padding": 0, "flip": False}

PAPER = sorted({row.experiment for t in (cifar(), iterations(), multimnist()) for row in t.rows})


def fields(part, expected):
    return {name: getattr(part, name) for name in expected}


@functools.cache
def built(name):
    config = preset(name).config
    with torch.device("meta"):
        return create_model(config.model.model, **config.model.options())


def test_the_paper_has_49_experiments():
    assert len(PAPER) == 49


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_optimisers(name):
    """Appendix A.1 for CIFAR; on DiverseMultiMNIST all models have the same, but for decay."""
    routing = name.partition("_")[0]
    own = SGD if "multimnist" in name else {"dynamic": DYNAMIC, "em": EM}.get(routing, SGD)
    expected = own | STEPS | PLAIN
    if "multimnist" in name:
        expected["warmup"] = 1 / 350
        expected["weight_decay"] = 0.0 if routing == "dynamic" else 5e-4  # docs/reproduce.md
    assert fields(preset(name).config.optim, expected) == expected


@pytest.mark.parametrize("name", [name for name in PAPER if "multimnist" in name])
def test_digits_rise_to_the_papers_learning_rate_in_one_of_350_epochs(name):
    """At 0.1 from the first step one of them explodes (docs/reproduce.md)."""
    optim, epoch = preset(name).config.optim, 469
    rates = [
        learning_rate(optim, step, 350 * epoch, epoch)
        for step in (0, epoch // 2, epoch - 1, epoch, 150 * epoch - 1, 150 * epoch, 250 * epoch)
    ]
    assert rates == pytest.approx([0.1 / 469, 0.1 * 235 / 469, 0.1, 0.1, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_lengths_and_images(name):
    config = preset(name).config
    assert (config.epochs, config.steps, config.batch_size) == (350, None, 128)
    assert (config.dtype, config.eval_every, config.sync_bn) == ("bfloat16", 0, False)
    expected = DIGITS if "multimnist" in name else CIFAR
    assert fields(config.data, expected) == expected


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_batch_norms_see_16_images(name):
    """8 GPUs and batches of 128, for all models: where there is no BatchNorm there is no group."""
    config = preset(name).config
    norms = [module for module in built(name).modules() if isinstance(module, nn.BatchNorm2d)]
    assert config.model.bn_group == (16 if norms else None)
    assert all(isinstance(norm, GhostBatchNorm2d) and norm.group == 16 for norm in norms)
    simple = name.startswith(("inverted_simple", "dynamic_simple"))
    digits = "multimnist" in name and not name.startswith("cnn")
    assert bool(norms) == (not simple and not digits)  # as the appendix has them


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_losses(name):
    config = preset(name).config
    several = "multimnist" in name
    classification = losses.binary_cross_entropy if several else losses.cross_entropy
    published = {"dynamic": losses.margin, "em": losses.spread}
    expected = published.get(name.partition("_")[0], classification)
    scores = torch.rand(4, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.eye(10)[:4] if several else torch.arange(4)
    chosen = choose_loss(config.optim, built(name))
    assert torch.equal(chosen(scores, targets, 0.0), expected(scores, targets))


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_iterations(name):
    """Those of the name; a model that does not route has none."""
    _, _, count = name.rpartition("_r")
    routed = int(count) if count.isdigit() else None
    config = preset(name).config
    assert config.model.iterations == built(name).iterations == routed
    assert (routed is None) == name.startswith(("cnn", "resnet18"))


def test_only_what_the_paper_prints_is_called_the_papers():
    printed, average = preset("inverted_resnet_cifar10_r2"), preset("inverted_resnet_cifar10_r1")
    assert printed.paper_accuracy == 95.14 and "95.14 % in the paper" in printed.summary
    assert average.paper_accuracy is None and "in the paper" not in average.summary
    assert (printed.authors_average, average.authors_average) == (94.85, 94.73)


def test_mixed_presets_differ_from_the_papers_in_their_windows_alone():
    mixed = [name for name in list_experiments() if "_mixed_" in name]
    assert len(mixed) == 6
    for name in mixed:
        plain = preset(name.replace("_mixed", "")).config
        model = replace(plain.model, windows="mixed")
        assert preset(name).config == replace(plain, experiment=name, model=model)
        layers = create_model(model.model, **model.options()).capsules.layers
        windows = {layer.windows for layer in layers if isinstance(layer, ConvCaps)}
        assert windows == {"mixed"}


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'em_resnet_cifar10_r2'"):
        preset("em_resnet_cifar10")


@pytest.fixture
def own_images():
    """The preset as it is on a CPU, wherever the test runs."""
    return replace(preset("own_images").config, batch_size=32, steps=1_500)


def test_few_images_are_seen_at_most_so_often(own_images):
    limited = limit_epochs(own_images, 95)
    assert (limited.steps, limited.epochs) == (None, MOST_EPOCHS)
    evaluations = own_images.steps // own_images.eval_every
    assert limited.eval_every == 3 * MOST_EPOCHS // evaluations  # as many as before
    enough = 32 * 1_500 // MOST_EPOCHS
    assert limit_epochs(own_images, enough) == own_images
    assert limit_epochs(own_images, enough - 32).steps is None
    chosen = replace(own_images, eval_every=7)
    assert limit_epochs(chosen, 2, evaluations_open=False).eval_every == 7
    in_epochs = replace(own_images, steps=None, epochs=900)
    assert limit_epochs(in_epochs, 2) == in_epochs
