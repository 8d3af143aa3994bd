"""`capsroute report`: writes, and with --check finds what does not agree."""

import pytest

from small_experiments import write_evidence


@pytest.fixture
def evidence(tmp_path):
    return write_evidence(tmp_path / "results", "fast_cifar10", [95.0, 94.8])


def test_writes_a_report_that_passes_its_own_check(run, tmp_path, evidence):
    status, out, err = run("report")
    assert (status, err) == (0, "") and "wrote RESULTS.md" in out
    assert "no benchmarks/gpu.csv: the figure of time and memory is left out" in out
    assert "95.00 (n = 1)" in (tmp_path / "RESULTS.md").read_text()
    assert (tmp_path / "results/figures/convergence_beyond.png").is_file()
    assert run("report", "--check") == (0, "1 result, all traced\n", "")


def test_check_names_each_problem_and_writes_nothing(run, tmp_path, evidence):
    run("report")
    (tmp_path / "README.md").write_text(
        "It got <!-- results: fast_cifar10 test_accuracy_last mean -->95.0 %"
    )
    status, out, _ = run("report", "--check")
    assert status == 1 and out.count("\n") == 1 and "94.8 in the results, 95.0 in the text" in out
    (tmp_path / "README.md").unlink()
    (tmp_path / "RESULTS.md").unlink()
    assert run("report", "--check")[0] == 1 and not (tmp_path / "RESULTS.md").exists()


def test_numbers_of_pages_follow_the_results_and_each_change_is_told(run, tmp_path, evidence):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("It got <!-- results: fast_cifar10 test_accuracy_last mean -->95.0 %")
    status, out, err = run("report")
    assert (status, err) == (0, "")
    assert "docs/page.md: fast_cifar10 test_accuracy_last mean: 95.0 → 94.8\n" in out
    assert page.read_text().endswith("-->94.8 %")
    assert run("report", "--check")[0] == 0


def test_runs_in_no_average_are_told(run, tmp_path, evidence):
    config = write_evidence(tmp_path / "results", "fast_cifar100", [77.0]) / "config.json"
    config.write_text(config.read_text().replace('"fast_cifar100"', '"trial"'))
    status, _, err = run("report")
    line = "`fast_cifar100`, seed 0: there is no preset 'trial'"
    assert (status, err) == (0, f"in no average: {line}\n")
    assert f"- {line}\n" in (tmp_path / "RESULTS.md").read_text()


def test_another_folder(run, tmp_path, evidence):
    assert run("report", "--results", tmp_path / "results", "--out", "new/page")[0] == 0
    assert (tmp_path / "new/page/RESULTS.md").is_file()
    assert (tmp_path / "new/page/results/figures/convergence_beyond.png").is_file()
    assert not (tmp_path / "RESULTS.md").exists()


def test_mistakes(run, evidence):
    status, _, err = run("report", "--results", "nowhere")
    assert status == 2 and err.startswith("error: `--results` must be a folder") and "\n" in err
    (evidence / "summary.json").write_text("{")
    status, _, err = run("report")
    assert status == 2 and err.count("\n") == 1 and "summary.json" in err
