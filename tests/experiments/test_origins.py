"""Where evidence came from: files that are no run's say it too, and commits exist."""

import json

import pytest

from capsroute.experiments.check import check
from capsroute.experiments.origins import CODE, check_commits, check_studies, check_tuning
from capsroute.experiments.report import TIMINGS
from capsroute.experiments.studies import OLD_TUNING_COLUMNS, TUNING_COLUMNS
from shell import git
from small_experiments import COMMIT, ORIGIN, report, write_evidence

STUDY = {"command": "python tools/pose_movement.py"} | ORIGIN
CHANGES = {
    "change": "as it is",
    "epochs": "30",
    "seed": "0",
    "val_accuracy": "76.39",
    "seconds": "94",
    "config": "6e9c6f961fb6",
} | {name: text for name, text in STUDY.items() if name != "command"}


def write_study(results, name="others/maps.json", **changes):
    path = results / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(STUDY | changes))
    return path


def write_tuning(results, columns=TUNING_COLUMNS, **changes):
    path = results / "tuning" / "fast.csv"
    path.parent.mkdir(parents=True)
    row = CHANGES | changes
    path.write_text(f"{','.join(columns)}\n{','.join(str(row[name]) for name in columns)}\n")
    return path


class TestStudies:
    @pytest.mark.parametrize("dirty", [False, None])  # None: there was no git to tell
    def test_one_that_says_where_it_was_made(self, tmp_path, dirty):
        write_study(tmp_path, dirty=dirty)
        assert check_studies(tmp_path) == []

    @pytest.mark.parametrize("name", ["others/maps.json", "maps.json"])
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            *(({key: None}, f"`{key}` is unknown") for key in STUDY if key != "dirty"),
            ({"dirty": True}, "it was made from a changed tree (`dirty`), so nobody can run it"),
            ({"commit": "abc"}, "`commit` must be 40 hex digits, got 'abc'"),
        ],
    )
    def test_one_that_does_not(self, tmp_path, name, changes, message):
        path = write_study(tmp_path, name, **changes)
        (problem,) = check_studies(tmp_path)
        assert problem.startswith(f"{path}: {message}")

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_one_that_cannot_be_read(self, tmp_path, text):
        path = write_study(tmp_path)
        path.write_text(text)
        (problem,) = check_studies(tmp_path)
        assert problem.startswith(f"{path} must be ") and "\n" not in problem

    def test_one_that_keeps_silent_about_changes(self, tmp_path):
        path = write_study(tmp_path)
        path.write_text(path.read_text().replace('"dirty"', '"clean"'))
        (problem,) = check_studies(tmp_path)
        assert problem.endswith("it does not say whether the tree was changed (`dirty`)")

    def test_a_config_is_no_measurement_and_what_lies_beside_it_is(self, tmp_path):
        write_study(tmp_path, "unfinished/mine.config.json", commit=None)
        assert check_studies(tmp_path) == []
        write_study(tmp_path, "unfinished/mine.json", commit=None)
        assert len(check_studies(tmp_path)) == 1


class TestTuning:
    @pytest.mark.parametrize("columns", [TUNING_COLUMNS, OLD_TUNING_COLUMNS])
    def test_rows_that_say_where_they_were_measured(self, tmp_path, columns):
        write_tuning(tmp_path, columns)
        assert check_tuning(tmp_path) == []

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"device": ""}, "`device` is unknown"),
            ({"commit": ""}, "`commit` is unknown"),
            ({"commit": "abc"}, "`commit` must be 40 hex digits, got 'abc'"),
            ({"dirty": True}, "it was made from a changed tree"),
            ({"seconds": "9,9"}, "there must be a cell for each column"),
            ({"val_accuracy": "good"}, "`val_accuracy` must be a number, got 'good'"),
        ],
    )
    def test_rows_that_do_not(self, tmp_path, changes, message):
        path = write_tuning(tmp_path, **changes)
        (problem,) = check_tuning(tmp_path)
        assert problem.startswith(f"{path}, line 2: {message}")

    def test_a_column_that_was_taken_away(self, tmp_path):
        path = write_tuning(tmp_path, [name for name in OLD_TUNING_COLUMNS if name != "commit"])
        (problem,) = check_tuning(tmp_path)
        assert problem == f"{path} must have the columns that tools/tune_recipe.py writes"


@pytest.fixture
def checkout(tmp_path):
    """A repository of ours, with two commits."""
    root = tmp_path / "checkout"
    (root / CODE).parent.mkdir(parents=True)
    (root / CODE).touch()
    git(tmp_path, "init", "--quiet", root)
    git(root, "add", ".")
    for message in ("first", "second"):
        git(root, "commit", "--quiet", "--allow-empty", "--message", message)
    return root


class TestCommits:
    def test_those_that_exist(self, checkout, tmp_path):
        named = [(tmp_path, git(checkout, "rev-parse", name)) for name in ("HEAD", "HEAD~1")]
        git(checkout, "reset", "--quiet", "--hard", "HEAD~1")  # no branch leads to the other
        assert check_commits(named, checkout) == []

    @pytest.mark.parametrize("commit", [COMMIT, "abc", "HEAD", "two\nlines"])
    def test_one_that_does_not_exist_is_told_for_each_file(self, checkout, tmp_path, commit):
        files = [tmp_path / "a.json", tmp_path / "b.json"]
        good = git(checkout, "rev-parse", "HEAD")
        named = [(files[1], commit), (files[0], good), (files[0], commit), (files[0], commit)]
        assert check_commits(named, checkout) == [
            f"{path}: there is no commit {commit} in this repository, so nobody can run it again"
            for path in files
        ]

    def test_what_is_there_and_no_commit(self, checkout, tmp_path):
        tree = git(checkout, "rev-parse", "HEAD^{tree}")
        assert len(check_commits([(tmp_path, tree)], checkout)) == 1

    def test_where_nobody_can_tell(self, checkout, tmp_path, monkeypatch):
        named = [(tmp_path, COMMIT)]
        assert check_commits(named, tmp_path) == []  # no repository
        shallow, theirs = tmp_path / "shallow", tmp_path / "theirs"
        git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{checkout}", shallow)
        assert check_commits(named, shallow) == []
        git(tmp_path, "init", "--quiet", theirs)  # results of somebody who installed the package
        assert check_commits(named, theirs) == []
        assert len(check_commits(named, checkout)) == 1
        monkeypatch.setenv("PATH", str(tmp_path))  # not even the program
        assert check_commits(named, checkout) == []


def test_every_file_that_names_a_commit_is_looked_at(checkout):
    results = checkout / "results"
    legs = {"resumed_from": [STUDY | {"commit": "a" * 40}], "commit": "b" * 40}
    write_evidence(results, "fast_cifar10", [95.0], summary=legs)
    write_study(results, commit="c" * 40)
    write_tuning(results, commit="d" * 40)
    benchmarks = checkout / TIMINGS.parent
    benchmarks.mkdir()
    (benchmarks / "times.csv").write_text(f"ms,commit\n1.5,{'e' * 40}\n1.6,\n")
    (benchmarks / "times.json").write_text(json.dumps({"commit": "f" * 40}))
    (benchmarks / "more.json").write_text(json.dumps({"commit": ["g"]}))  # no commit at all
    report(results)
    problems = check(results, checkout, checkout / TIMINGS)
    told = {problem.partition("there is no commit ")[2][0] for problem in problems}
    assert len(problems) == 7 and told == set("abcdef[")
    git(checkout, "rm", "-rq", "--cached", CODE)  # in no checkout of ours nothing is said
    assert check(results, checkout, checkout / TIMINGS) == []
