"""`capsroute reproduce`: lists, runs, resumes, stops in time, submits."""

import re
import signal

import pytest

from capsroute.experiments import list_experiments
from capsroute.experiments.reproduce import reproduce as reproduce_one
from small_experiments import register_tiny, write_diverged, write_evidence

CPU = ("--device", "cpu")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    def register(**changes):
        return register_tiny(monkeypatch, tmp_path / "data", **changes)

    return register


def test_runs_what_is_missing_and_skips_what_is_done(run, tmp_path, tiny):
    tiny()
    status, out, err = run("reproduce", "tin*", "--seeds", 0, *CPU)
    assert (status, err) == (0, "") and "tiny_seed0: starts in runs/tiny_seed0" in out
    assert "tiny_seed0: done, evidence in results/tiny/seed0" in out
    before = (tmp_path / "results/tiny/seed0/summary.json").stat().st_mtime_ns
    status, out, _ = run("reproduce", "tiny", "--seeds", 0, 1, *CPU)
    assert status == 0 and "1 of 2 runs are done already" in out and "tiny_seed0" not in out
    assert (tmp_path / "results/tiny/seed1/summary.json").is_file()
    assert (tmp_path / "results/tiny/seed0/summary.json").stat().st_mtime_ns == before


def test_a_budget_stops_in_time_and_says_how_to_go_on(run, tmp_path, tiny):
    tiny(steps=100_000, eval_every=100_000)
    arguments = ("reproduce", "tiny", "--seeds", 0, 1, "--budget-minutes", 0.03, *CPU)
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    assert "time to stop: 2 runs are left, tiny_seed0 cut after a checkpoint" in out
    assert out.rstrip().endswith(f"Go on with capsroute {' '.join(map(str, arguments))}")
    assert (tmp_path / "runs/tiny_seed0/state.pt").is_file() and not (tmp_path / "results").exists()
    _, out, _ = run(*arguments)
    assert "tiny_seed0: goes on" in out and "resuming after step" in out


def test_the_budget_is_spent_between_two_runs(monkeypatch, run, tiny):
    tiny()
    clock = iter([0.0, 0.0, 0.0, 10_000.0])
    monkeypatch.setattr("capsroute.cli.reproduce.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("capsroute.cli.reproduce._run_one", lambda job, runtime: None)
    status, out, _ = run("reproduce", "tiny", "--seeds", 0, 1, "--budget-minutes", 5)
    assert status == 0 and "time to stop: 1 run is left. Go on with" in out


def test_a_signal_ends_with_its_status(monkeypatch, run, tiny):
    tiny()

    def interrupted(job, runtime, reporter):
        reporter.step = lambda done: signal.raise_signal(signal.SIGTERM)
        return reproduce_one(job, runtime, reporter)

    monkeypatch.setattr("capsroute.cli.reproduce.reproduce", interrupted)
    status, out, _ = run("reproduce", "tiny", *CPU)
    assert status == 128 + signal.SIGTERM and "1 run is left, tiny_seed0 cut" in out


def test_another_machine_keeps_data_elsewhere(run, monkeypatch, tmp_path, tiny):
    tiny()
    monkeypatch.setenv("CAPSROUTE_DATA", str(tmp_path / "nowhere"))
    status, _, err = run("reproduce", "tiny", *CPU)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert run("reproduce", "tiny", "--data-root", "data", *CPU)[0] == 0
    assert '"data_root": null' in (tmp_path / "results/tiny/seed0/config.json").read_text()


def test_list_shows_every_experiment(run, tmp_path, tiny):
    status, out, _ = run("reproduce", "--list")
    assert status == 0
    for group in ("Table 1: CIFAR-10 and CIFAR-100 (16)", "simple backbone (30)", "MNIST (6)"):
        assert group in out
    assert set(re.findall(r"[│|] ([a-z]\w+) ", out)) >= set(list_experiments())
    write_evidence(tmp_path / "results", "fast_cifar10", [95.0, 94.8])
    write_evidence(tmp_path / "results", "fast_cifar10", [95.2, 95.0], seed=1)
    _, out, _ = run("reproduce", "--list", "fast_*", "inverted_resnet_cifar10_r2")
    line = next(line for line in out.splitlines() if "fast_cifar10 " in line)
    assert "94.90 ± 0.14" in line and "95.10 ± 0.14" in line and "seed 0 1 done" in line
    line = next(line for line in out.splitlines() if "inverted_resnet_cifar10_r2" in line)
    assert "95.14" in line and "not run" in line
    assert "(94.85)" in out and "paper % (mean)" in re.sub(r"[^\w%()]+", " ", out)
    assert "cnn_cifar10" not in out


def test_list_shows_what_diverged(run, tmp_path):
    write_diverged(tmp_path / "results", "fast_cifar10")
    write_evidence(tmp_path / "results", "fast_cifar100", [77.0])
    write_diverged(tmp_path / "results", "fast_cifar100", seed=1)
    _, out, _ = run("reproduce", "--list", "fast_*")
    line = next(line for line in out.splitlines() if "fast_cifar10 " in line)
    assert line.count(" diverged ") == 3 and "seed 0 diverged" in line
    line = next(line for line in out.splitlines() if "fast_cifar100 " in line)
    assert line.count("77.00") == 2 and "seed 0 done; seed 1 diverged" in line


def test_evidence_of_another_recipe_is_not_done_and_in_the_way(run, tmp_path, tiny):
    """As `capsroute report` has it, which counts no such run."""
    tiny()
    assert run("reproduce", "tiny", *CPU)[0] == 0
    tiny(steps=8, eval_every=8)
    status, out, err = run("reproduce", "tiny", *CPU)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "tiny_seed0: not run, since results/tiny/seed0 is of another recipe (`steps` is" in err
    assert err.endswith("; move results/tiny/seed0 and runs/tiny_seed0 away first\n")
    assert "seed 0 of another recipe" in run("reproduce", "--list", "tiny")[1]
    for folder in ("results/tiny/seed0", "runs/tiny_seed0"):
        (tmp_path / folder).rename(tmp_path / folder.replace("/", "_"))
    assert "tiny_seed0: done" in run("reproduce", "tiny", *CPU)[1]


def test_list_shows_what_was_cut(run, tiny):
    tiny(steps=100_000, eval_every=5)
    run("reproduce", "tiny", "--seeds", 4, "--budget-minutes", 0.02, *CPU)
    _, out, _ = run("reproduce", "--list", "tiny")
    assert re.search(r"seed 0 not run; seed 4 cut after (step|epoch) \d", out)


def test_jobs_are_submitted_and_numbered(monkeypatch, run, tiny):
    tiny()
    asked = []

    def submit(jobs, cluster, runtime, reporter):
        asked.append((jobs, cluster))
        return ["11", "12"]

    monkeypatch.setattr("capsroute.cli.reproduce.submit", submit)
    status, out, _ = run(
        *("reproduce", "tiny", "--seeds", 0, 1, "--slurm", "--partition", "long"),
        *("--minutes", 30, "--sbatch", "account=mine", "mem=32G"),
    )
    assert status == 0 and "tiny_seed1: job 12, log in runs/slurm" in out
    ((jobs, cluster),) = asked
    assert [job.name for job in jobs] == ["tiny_seed0", "tiny_seed1"]
    assert (cluster.partition, cluster.minutes, cluster.gpus) == ("long", 30, 1)
    assert cluster.options == {"account": "mine", "mem": "32G"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which experiments?"),
        (("inverted_resnet_cifar10",), "did you mean 'inverted_resnet_cifar10_r2'?"),
        (("fast_cifar10", "--seeds", "-1"), "--seeds"),
        (("fast_cifar10", "--budget-minutes", "0"), "`--budget-minutes` must be above 0"),
        (("fast_cifar10", "--slurm", "--budget-minutes", "3"), "use `--minutes`"),
        (("fast_cifar10", "--slurm", "--sbatch", "account"), "must be NAME=VALUE, got 'account'"),
        (("fast_cifar10", "--device", "gpu"), "`--device` must be auto, cpu or cuda"),
        (("fast_cifar10", "--partition", "gpu"), "`--partition` must be given with `--slurm`"),
        (("fast_cifar10", "--sbatch", "mem=1G"), "`--sbatch` must be given with `--slurm`"),
        (("fast_cifar10", "--seeds"), "`--seeds` must name one at least"),
        (("fast_cifar10",), "cifar"),
    ],
)
def test_mistakes(run, arguments, message):
    status, _, err = run("reproduce", *arguments)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and message in err
