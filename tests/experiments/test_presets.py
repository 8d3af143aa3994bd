"""Presets: every experiment of the paper is there, under the names that the design gives."""

from dataclasses import replace

import pytest
import torch

from capsroute import create_model
from capsroute.experiments import list_experiments, preset
from capsroute.experiments.presets import MOST_EPOCHS, limit_epochs
from capsroute.experiments.tables import all_tables, cifar, iterations, multimnist
from capsroute.models import model_info


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
    with torch.device("meta"):
        model = create_model(config.model.model, **config.model.options())
    expected = config.model.iterations
    assert model.iterations == (info.task.iterations if expected is None else expected)
    if expected is not None and not name.startswith("fast_"):
        assert name.endswith(f"_r{expected}")
    if chosen.paper_accuracy is not None:
        assert config.epochs == 350 and config.batch_size == 128 and config.seed == 0
        plain = config.model.options().keys() <= {"iterations", "bn_group"}
        if plain and config.model.iterations == info.task.iterations:  # a cell of the table
            assert chosen.paper_accuracy == info.paper_accuracy


def test_the_papers_recipes():
    inverted = preset("inverted_resnet_cifar10_r2").config
    assert (inverted.optim.optimizer, inverted.optim.lr) == ("sgd", 0.1)
    assert (inverted.optim.momentum, inverted.optim.weight_decay) == (0.9, 5e-4)
    assert inverted.optim.milestones == (150, 250) and inverted.model.bn_group == 16
    assert inverted.data.padding == 4 and inverted.data.flip
    assert (inverted.epochs, inverted.dtype, inverted.eval_every) == (350, "bfloat16", 0)
    assert preset("dynamic_simple_cifar10_r1").config.optim.lr == 1e-3
    assert preset("em_simple_cifar10_r2").config.optim.lr == 1e-2
    digits = preset("dynamic_vector_multimnist_r3").config
    assert (digits.optim.optimizer, digits.optim.lr) == ("sgd", 0.1)
    assert digits.data.padding == 0 and not digits.data.flip


def test_ablations_are_what_their_letters_say():
    assert preset("inverted_simple_cifar10_a_r2").config.model.layer_norm is False
    assert preset("inverted_simple_cifar10_b_r2").config.model.schedule == "sequential"
    assert preset("inverted_simple_cifar10_c_r2").config.model.activations is True


def test_only_what_the_paper_prints_is_called_the_papers():
    printed, average = preset("inverted_resnet_cifar10_r2"), preset("inverted_resnet_cifar10_r1")
    assert printed.paper_accuracy == 95.14 and "95.14 % in the paper" in printed.summary
    assert average.paper_accuracy is None and "in the paper" not in average.summary
    assert (printed.authors_average, average.authors_average) == (94.85, 94.73)


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
