"""For tests: evidence as runs leave it, and an experiment of a second. Not a test module."""

import dataclasses
import json

from capsroute.experiments import Preset, preset, presets
from capsroute.experiments.cells import parameters
from capsroute.experiments.report import TIMINGS, Measured, figures, results_text, write_report
from capsroute.models import model_info
from capsroute.train.config import Config, DataConfig, ModelConfig, OptimConfig
from small_idx import write_digits

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ORIGIN = {  # what everything measured must say
    "device": "NVIDIA H200",
    "python": "3.11.7",
    "torch": "2.13.0",
    "capsroute": "0.1.0",
    "commit": COMMIT,
    "dirty": False,
}


def write_evidence(results, experiment, accuracies, *, seed=0, summary=None, whole=True, **changes):
    """`accuracies` of the last epochs, the first of them of those before unless not `whole`.

    `changes` go into the config, `summary` there.
    """
    config = dataclasses.replace(preset(experiment).config, seed=seed, **changes)
    folder = results / experiment / f"seed{seed}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json())
    before = [accuracies[0]] * (config.epochs - len(accuracies)) if whole else []
    curve = [*before, *accuracies]
    records = [
        {
            "step": 10 * epoch,
            "epoch": float(epoch),
            "test_accuracy": accuracy,
            "val_accuracy": None,
            "seconds": 3.0 * len(accuracies) * epoch / len(curve),
            "images_per_second": 1000.0,
        }
        for epoch, accuracy in enumerate(curve, 1)
    ]
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    last = records[-1]
    known = {
        "experiment": experiment,
        "model": config.model.model,
        "dataset": config.data.data,
        "iterations": config.model.iterations or model_info(config.model.model).task.iterations,
        "seed": seed,
        "params": parameters(config.model),
        "epochs": last["epoch"],
        "steps": last["step"],
        "test_accuracy_last": last["test_accuracy"],
        "test_accuracy_best": max(accuracies),
        "val_accuracy": None,
        "train_seconds": last["seconds"],
        "images_per_second": last["images_per_second"],
        "dtype": config.dtype,
    } | ORIGIN
    (folder / "summary.json").write_text(json.dumps(known | (summary or {})))
    return folder


def write_diverged(results, experiment, accuracies=(10.0,), *, seed=0, **changes):
    """Of a run that was evaluated, once and at chance, before its loss was no number any more."""
    folder = write_evidence(results, experiment, accuracies, seed=seed, whole=False, **changes)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    names = ("experiment", "seed", "device", "python", "torch", "capsroute", "commit", "dirty")
    found = {name: summary[name] for name in names} | {"error": "the loss is not finite in step 11"}
    (folder / "diverged.json").write_text(json.dumps(found))
    return folder


def report_text(results):
    """What RESULTS.md would say, and no figure drawn."""
    measured = Measured.read(results, results.parent / TIMINGS)
    return results_text(measured, figures(measured))


def report(results):
    """RESULTS.md beside the results, written and read."""
    write_report(Measured.read(results, results.parent / TIMINGS), results.parent)
    return (results.parent / "RESULTS.md").read_text()


def row_of(text, experiment):
    """The cells of an experiment's row in the first table that has it, by heading."""
    lines = text.splitlines()
    names = [line.split("|")[1].strip().strip("[").split("]")[0] for line in lines if "|" in line]
    rows = [line for line in lines if "|" in line]
    index = names.index(experiment)
    heading = max(i for i, name in enumerate(names[:index]) if name == "experiment")
    cells = [[cell.strip() for cell in rows[i].strip("|").split("|")] for i in (heading, index)]
    return dict(zip(*cells, strict=True))


def register_tiny(monkeypatch, root, *, name="tiny", **changes):
    """An experiment on forty images in Fashion-MNIST's format, which `root` then holds."""
    write_digits(root)
    config = Config(
        experiment=name,
        model=ModelConfig("inverted_small_multimnist", 1),
        data=DataConfig("fashion_mnist"),
        optim=OptimConfig(optimizer="adam", lr=1e-3),
        batch_size=8,
        steps=12,
        eval_every=6,
        checkpoint_every=2,
        eval_batch_size=20,
    )
    config = dataclasses.replace(config, **changes)
    monkeypatch.setitem(presets._PRESETS, name, Preset(name, "For tests.", config))
    monkeypatch.setenv("CAPSROUTE_DATA", str(root))
    return config
