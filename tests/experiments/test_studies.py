"""Sections of the report that look closer."""

import json

from capsroute.experiments.studies import Studies


def test_what_was_not_measured_has_no_section(tmp_path):
    studies = Studies.read(tmp_path)
    assert studies == Studies()
    assert not any(studies.sections({})) and not studies.figures()


def test_batch_norm_statistics(tmp_path):
    found = {"images": 10_000, "accuracy_as_trained": 75.45, "accuracy": 75.5}
    (tmp_path / "batch_norm").mkdir()
    (tmp_path / "batch_norm" / "mine_seed0.json").write_text(json.dumps(found))
    (section,) = filter(None, Studies.read(tmp_path).sections({}))
    assert "averages over 10,000 images drawn as in training" in section
    assert section.endswith("| mine_seed0 | 75.45 | 75.50 |")


def test_gradient_rounding(tmp_path):
    errors = {"backbone": {"error": 0.15, "along": 0.98}, "capsules": {"error": 0.02, "along": 1}}
    (tmp_path / "gradient_rounding").mkdir()
    found = {"bf16": {"everything": errors, "other images": errors}}
    (tmp_path / "gradient_rounding" / "mine.json").write_text(json.dumps(found))
    (section,) = filter(None, Studies.read(tmp_path).sections({}))
    assert section.splitlines()[-4:] == [
        "| weights | in bfloat16 | gradient of backbone | gradient of capsules |",
        "| --- | --- | --- | --- |",
        "| mine | everything | 0.150 (0.980) | 0.020 (1.000) |",
        "| mine | other images | 0.150 (0.980) | 0.020 (1.000) |",
    ]


def test_tuning(tmp_path):
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "fast.csv").write_text(
        "change,epochs,seed,val_accuracy,seconds,device,commit,config\n"
        "as it is,100,0,94.1,80,H200,0123456789,aa\n"
        "optim.lr=9,100,0,,,,0123456789,bb\n"
    )
    (section,) = filter(None, Studies.read(tmp_path).sections({}))
    rows = [
        "| fast | `as it is` | 100 | 0 | 94.10 | `01234567` |",
        "| fast | `optim.lr=9` | 100 | 0 | diverged | `01234567` |",
    ]
    assert section.splitlines()[-2:] == rows
    (tmp_path / "tuning" / "notes.md").write_text("What else to know.\n")
    (section,) = filter(None, Studies.read(tmp_path).sections({}))
    assert section.splitlines()[-4:] == [*rows, "", "What else to know."]
