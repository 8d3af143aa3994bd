"""The benchmark's plan, its check against the reference, and its file; no timing is judged."""

import dataclasses

import pytest
import torch

from capsroute.bench import Case, agrees_with_reference, check, plan_cases, time_case
from capsroute.bench.rows import COLUMNS, OLD_COLUMNS, Row, append_row, find_row, read_rows
from capsroute.bench.timing import Timing
from capsroute.cli import main
from capsroute.train.provenance import versions

CPU = torch.device("cpu")
SMALL = Case("inverted_small_multimnist", 2, "train", batch=2, dtype="float32")
WHERE = dict.fromkeys(("device", "torch", "cuda", "triton", "python", "capsroute", "commit"), "x")
WHERE["dirty"] = False


def plan(*models, modes=("train",), batches=(8,), alone=True, reference=True):
    return plan_cases(models, modes, batches, dtype="float32", alone=alone, reference=reference)


def test_each_comparison_is_planned_once_and_before_what_it_is_for():
    cases = plan("inverted_resnet_cifar10:1,4", "cnn_cifar10")
    told = [(case.part, case.impl, case.iterations) for case in cases]
    assert told == [
        ("backbone", "auto", None),
        ("model", "reference", 1),
        ("model", "auto", 1),
        ("model", "reference", 4),
        ("model", "auto", 4),
        ("model", "auto", None),
    ]
    assert [case.iterations for case in plan("inverted_small_multimnist", reference=False)] == [2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("inverted_resnet_cifar1", "`models` must .* did you mean 'inverted_resnet_cifar10'"),
        ("nope:2", "`models` must name registered models, got 'nope'; choose from .* and"),
        ("inverted_resnet_cifar10:0", "NAME:1,2,4"),
        ("inverted_resnet_cifar10:", "NAME:1,2,4"),
        ("cnn_cifar10:2", "has none"),
    ],
)
def test_bad_names_are_told(text, said):
    with pytest.raises(ValueError, match=said):
        plan(text)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("model", ["inverted_small_multimnist", "em_simple_cifar10"])
def test_a_case_runs(mode, model):
    case = dataclasses.replace(SMALL, model=model, mode=mode)
    timing = time_case(case, CPU, repeats=3, compile=False)
    assert 0 < timing.p20_ms <= timing.median_ms <= timing.p80_ms
    assert timing.peak_mib is None


def test_the_backbone_alone_runs():
    case = Case("inverted_resnet_cifar10", 2, "train", batch=2, dtype="float32").alone
    assert time_case(case, CPU, repeats=1, compile=False).median_ms > 0


def test_another_image_size_runs():
    case = dataclasses.replace(SMALL, model="inverted_simple_cifar10", image_size=20)
    assert case.what == "inverted_simple_cifar10_r2 at 20"
    assert time_case(case, CPU, repeats=1, compile=False).median_ms > 0


def test_the_check_passes_for_what_is_right_and_fails_for_what_is_not(monkeypatch):
    assert agrees_with_reference(SMALL, CPU)
    low = dataclasses.replace(SMALL, dtype="bfloat16")
    assert agrees_with_reference(low, CPU)
    build = check.build_model

    def wrong(case, device):
        model = build(case, device)
        if case.impl == "auto":
            for layer in model.capsules.layers:
                layer.scale = 0.5
        return model

    monkeypatch.setattr(check, "build_model", wrong)
    monkeypatch.setattr(check, "_agrees", check._agrees.__wrapped__)  # which remembers
    assert not agrees_with_reference(SMALL, CPU)
    assert not agrees_with_reference(low, CPU)


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_the_check_sees_a_wrong_gradient_beside_a_backbone_in_bfloat16(monkeypatch, factor):
    """Whose own error is larger than all that capsules contribute to the gradient's length."""
    case = Case("inverted_resnet_cifar10", 2, "train", batch=2)
    compute = check._scores_and_gradients

    def wrong(case, device, dtype):
        found = compute(case, device, dtype)
        if case.impl == "auto":
            found["gradients of capsules.layers.1"] *= factor
        return found

    monkeypatch.setattr(check, "_agrees", check._agrees.__wrapped__)
    assert agrees_with_reference(case, CPU)
    monkeypatch.setattr(check, "_scores_and_gradients", wrong)
    assert not agrees_with_reference(case, CPU)


def test_a_gradient_that_does_not_arrive_is_a_wrong_one(monkeypatch):
    case = Case("inverted_small_multimnist", 2, "train", batch=2)
    build = check.build_model

    def cut_off(case, device):
        model = build(case, device)
        model.capsules.layers[1].weight.requires_grad_(case.impl != "auto")
        return model

    monkeypatch.setattr(check, "_agrees", check._agrees.__wrapped__)
    assert agrees_with_reference(case, CPU)
    monkeypatch.setattr(check, "build_model", cut_off)
    assert not agrees_with_reference(case, CPU)


def test_no_speed_up_is_printed_when_the_check_fails(monkeypatch, capsys):
    monkeypatch.setattr("capsroute.cli.bench.agrees_with_reference", lambda case, device: False)
    arguments = ["bench", "inverted_small_multimnist", "--modes", "infer", "--batch", "2"]
    arguments += ["--reference", "--repeats", "1", "--compile", "no", "--device", "cpu"]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 1
    printed = capsys.readouterr()
    assert "DIFFERS FROM THE REFERENCE" in printed.out
    assert printed.err.startswith("error: 1 of 2 differ from the reference: inverted_small")
    cells = [line.split("│") for line in printed.out.splitlines() if line.startswith("│")]
    assert cells and all(line[-2].strip() == "" for line in cells)


def test_rows_are_added_and_found_again(tmp_path):
    path = tmp_path / "new" / "speed.csv"
    assert read_rows(path) == []
    row = Row(SMALL, Timing(2.0, 1.0, 3.0, None), compiled=True, checked=True, where=WHERE)
    append_row(path, row)
    append_row(path, dataclasses.replace(row, case=SMALL.reference))
    rows = read_rows(path)
    assert [line["impl"] for line in rows] == ["auto", "reference"]
    assert rows[0]["images_per_s"] == "1000" and rows[0]["peak_mib"] == ""
    assert find_row(SMALL, True, rows, WHERE) == row
    assert find_row(dataclasses.replace(SMALL, batch=3), True, rows, WHERE) is None
    assert find_row(SMALL, False, rows, WHERE) is None
    assert find_row(SMALL, True, rows, WHERE | {"commit": "another"}) is None
    assert find_row(SMALL, True, rows, WHERE | {"dirty": True}) is None
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_rows_have_the_shapes_whether_asked_for_or_not(tmp_path):
    path = tmp_path / "speed.csv"
    timing = Timing(2.0, 1.0, 3.0, None)
    for case in (SMALL, dataclasses.replace(SMALL, image_size=20)):
        append_row(path, Row(case, timing, compiled=True, checked=True, where=WHERE))
    shapes = [(row["image_size"], row["channels"], row["classes"]) for row in read_rows(path)]
    assert shapes == [("36", "1", "10"), ("20", "1", "10")]


def test_a_file_from_before_rows_had_shapes_is_gone_on_with(tmp_path):
    path = tmp_path / "speed.csv"
    row = Row(SMALL, Timing(2.0, 1.0, 3.0, None), compiled=True, checked=True, where=WHERE)
    known = {name: "" if value is None else value for name, value in row.as_dict().items()}
    known["image_size"] = ""
    values = [str(known[name]) for name in OLD_COLUMNS]
    path.write_text(f"{','.join(OLD_COLUMNS)}\n{','.join(values)}\n")
    assert find_row(SMALL, True, read_rows(path), WHERE) == row
    smaller = dataclasses.replace(SMALL, image_size=20)
    assert find_row(smaller, True, read_rows(path), WHERE) is None
    append_row(path, dataclasses.replace(row, case=smaller))
    old, new = read_rows(path)
    assert (old["image_size"], old["channels"]) == ("", "") and new["image_size"] == "20"
    assert old["median_ms"] == new["median_ms"] == "2.0"
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_another_file_is_not_overwritten(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="that `capsroute bench` wrote"):
        read_rows(path)


def test_a_case_that_fails_does_not_end_the_others(monkeypatch, capsys):
    real = time_case

    def fails_once(case, device, **options):
        if case.iterations == 1:
            raise RuntimeError("the compiler\ngave up")
        return real(case, device, **options)

    monkeypatch.setattr("capsroute.cli.bench.time_case", fails_once)
    arguments = ["bench", "inverted_small_multimnist:1,2", "--modes", "infer", "--batch", "2"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--repeats", "1", "--compile", "no", "--device", "cpu"])
    printed = capsys.readouterr()
    assert stop.value.code == 1 and "failed: the compiler gave up" in printed.out
    assert "1 of 2 failed" in printed.err and "_r2 " in printed.out


def test_a_benchmark_goes_on_where_it_was_cut(tmp_path, capsys, monkeypatch):
    clean = {**versions(), "dirty": False}
    monkeypatch.setattr("capsroute.cli.bench.versions", lambda: clean)
    out = str(tmp_path / "speed.csv")
    arguments = ["bench", "inverted_small_multimnist:1", "--modes", "infer", "--batch", "2"]
    arguments += ["--repeats", "1", "--compile", "no", "--device", "cpu", "--out", out]
    main(arguments)
    assert "[1/1] inverted_small_multimnist_r1" in capsys.readouterr().out
    main(arguments)
    assert "already" in capsys.readouterr().out
    assert len(read_rows(tmp_path / "speed.csv")) == 1


def test_a_cpu_is_told_and_measured_with_little(monkeypatch, capsys):
    asked = []

    def time_nothing(case, device, *, repeats, compile):
        asked.append((case.batch, case.dtype, repeats, compile))
        return Timing(1.0, 1.0, 1.0, None)

    monkeypatch.setattr("capsroute.cli.bench.time_case", time_nothing)
    monkeypatch.setattr("capsroute.cli.bench.agrees_with_reference", lambda case, device: True)
    main(["bench", "cnn_cifar10", "--modes", "infer", "--device", "cpu"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "this measures a CPU, which is slow: batch 8, float32, 5 calls, not compiled"
    given = ["--batch", "2", "--dtype", "bfloat16", "--repeats", "9", "--compile", "yes"]
    main(["bench", "cnn_cifar10", "--modes", "infer", "--device", "cpu", *given])
    assert asked == [(8, "float32", 5, False), (2, "bfloat16", 9, True)]


@pytest.mark.parametrize("option", ["--batch", "--repeats"])
def test_nothing_to_measure_is_told(option, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "cnn_cifar10", "--device", "cpu", option, "0"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: `{option}` must be at least 1, got 0\n"


def test_an_unknown_model_is_one_line_and_nothing_else(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "inverted_resnet_cifar1", "--device", "cpu"])
    assert stop.value.code == 2
    told = "error: `NAME` must name registered models, got 'inverted_resnet_cifar1'; "
    assert capsys.readouterr() == ("", f"{told}did you mean 'inverted_resnet_cifar10'?\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--modes"], "`--modes` must name train, infer or both, got nothing"),
        (["--bn-group", "0"], "`--bn-group` must be at least 1, got 0"),
        (["--image-size", "5"], "is `--image-size` too small?"),
        (["--out", "binary.csv"], "`--out` must be a CSV file that can be written, got binary.csv"),
        (["--out", "."], "`--out` must be a CSV file that can be written, got ."),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_measured(
    options, said, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "inverted_resnet_cifar10", "--device", "cpu", *options])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == ""
    assert printed.err.startswith("error: ") and said in printed.err
    assert (tmp_path / "binary.csv").read_bytes() == b"\xff\xfe\x00"
