"""An experiment's row: last and best epoch apart, and what diverged or departs in no mean."""

import dataclasses

from capsroute.experiments import preset
from capsroute.experiments.check import check
from capsroute.experiments.report import TIMINGS
from small_experiments import report, report_text, row_of, write_diverged, write_evidence


def test_last_and_best_epochs_stand_apart_with_mean_and_spread(results):
    cells = row_of(report_text(results), "inverted_resnet_cifar10_r2")
    assert cells["last epoch"] == "94.50 ± 0.26 (n = 3)"
    assert cells["best test epoch"] == "94.70 ± 0.26 (n = 3)"
    assert cells["paper"] == "95.14" and cells["params"] == "1,828,817"
    assert cells["against"] == "▼ −0.44; ▼ −0.15 (authors' average 94.85)"
    assert cells["training"] == "0.1 min on H200"


def test_one_seed_has_no_spread_and_more_than_the_paper_no_mark(results):
    cells = row_of(report_text(results), "inverted_simple_cifar10_r2")
    assert cells["best test epoch"] == "85.10 (n = 1)" and cells["against"] == "+0.05"


def test_runs_that_depart_from_their_preset_are_shown_and_not_counted(results):
    write_evidence(results, "inverted_resnet_cifar10_r2", [99.0], seed=7, epochs=10)
    text = report_text(results)
    assert row_of(text, "inverted_resnet_cifar10_r2")["best test epoch"] == "94.70 ± 0.26 (n = 3)"
    assert "`inverted_resnet_cifar10_r2`, seed 7: `epochs` is 10 there and 350 here" in text


def test_the_models_own_iterations_may_be_written_out(results):
    model = dataclasses.replace(preset("inverted_small_multimnist").config.model, iterations=2)
    write_evidence(results, "inverted_small_multimnist", [70.0], model=model)
    text = report_text(results)
    assert row_of(text, "inverted_small_multimnist")["last epoch"] == "70.00 (n = 1)"


def test_a_seed_that_diverged_is_shown_and_forbids_a_judgement(results):
    write_diverged(results, "inverted_simple_cifar10_r2", seed=1)
    write_diverged(results, "inverted_resnet_cifar10_r2", seed=3)
    text = report(results)
    cells = row_of(text, "inverted_simple_cifar10_r2")
    assert cells["last epoch"] == cells["best test epoch"] == "85.10 (n = 1, 1 diverged)"
    assert cells["against"] == "–"
    cells = row_of(text, "inverted_resnet_cifar10_r2")
    assert cells["best test epoch"] == "94.70 ± 0.26 (n = 3, 1 diverged)"
    assert cells["against"] == "–"  # with the authors' average neither
    assert check(results, results.parent, results.parent / TIMINGS) == []


def test_all_seeds_diverged(results):
    for seed in (0, 1):
        write_diverged(results, "inverted_simple_cifar10_a_r5", seed=seed)
    cells = row_of(report(results), "inverted_simple_cifar10_a_r5")
    assert cells["last epoch"] == cells["best test epoch"] == "diverged (n = 2)"
    assert cells["against"] == cells["training"] == "–"
    assert check(results, results.parent, results.parent / TIMINGS) == []


def test_a_diverged_run_of_another_recipe_is_none_of_the_presets(results):
    write_diverged(results, "inverted_simple_cifar10_r2", seed=1, epochs=10)
    text = report_text(results)
    cells = row_of(text, "inverted_simple_cifar10_r2")
    assert cells["best test epoch"] == "85.10 (n = 1)" and cells["against"] == "+0.05"
    assert "`inverted_simple_cifar10_r2`, seed 1: `epochs` is 10 there and 350 here" in text
