import logging
import signal

import pytest

from capsroute.cli import progress
from capsroute.cli.progress import LineReporter, LiveReporter, duration, notes_to, progress_bars


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_for_a_terminal_and_leave_stdout_alone(monkeypatch, capsys, terminal):
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")  # as rich is told
    with progress_bars() as begin:
        begin("measuring")(2, 5)
        begin("turned images")(0, 3)
    out, err = capsys.readouterr()
    assert out == ""
    for shown in ("measuring", "2/5", "turned images", "0/3"):
        assert (shown in err) == terminal


@pytest.mark.parametrize("reporter", [LineReporter, LiveReporter])
@pytest.mark.parametrize(
    ("signum", "said"),
    [
        (signal.SIGINT, "stopping: a checkpoint is saved first; Ctrl-C again to stop at once"),
        (signal.SIGTERM, "the same signal again to stop at once"),
        (signal.SIGALRM, ""),
    ],
)
def test_a_signal_is_answered_in_one_line(capfd, reporter, signum, said):
    with reporter() as screen:
        screen.stopping(signum)
    out, err = capfd.readouterr()
    assert said in err and len(err.split("\n")) == (3 if said else 1) and not out.strip()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "1 s"),
        (99, "99 s"),
        (99.6, "2 min"),
        (5_940, "99 min"),
        (6_000, "1 h 40 min"),
        (47 * 3600 + 60, "47 h 1 min"),
        (50 * 3600, "2 days 2 h"),
    ],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_a_log_soon_says_how_long_the_run_will_take(clock, capsys):
    reporter = LineReporter()
    reporter.start(0, 1_500, 3)
    clock(60)  # the first step compiles
    for step in range(1, 5):
        reporter.step(step)
        assert capsys.readouterr().out == ("step 3/1500  about 75 min left\n" if step == 3 else "")
        clock(3)
    reporter.step(5)
    reporter.progress(5, 1.0, 50.0, 12.0)
    assert capsys.readouterr().out == (
        "step 5/1500  epoch 1.67  loss 1.0000  train 50.00 %  12 images/s  about 75 min left\n"
    )


def test_the_time_left_of_a_resumed_run_is_that_of_the_steps_to_come(clock, capsys):
    reporter = LineReporter()
    reporter.start(100, 200, 10)
    for step in range(101, 201):
        reporter.step(step)
        clock(2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["resuming after step 100 of 200", "step 104/200  about 3 min left"]
    record = {"step": 200, "epoch": 20.0, "train_loss": 0.5, "train_accuracy": 90.0}
    record |= {"val_accuracy": None, "test_accuracy": 80.0, "seconds": 400.0}
    reporter.evaluated(record | {"images_per_second": 12.0})
    assert capsys.readouterr().out.endswith("12 images/s  400 s\n")  # nothing is left


def test_a_bar_prints_names_as_they_are(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    long = "2 classes ([red], [bold]) in " + "a/very/long/path/" * 4
    with LiveReporter() as reporter:
        reporter.message(long)
    assert long in capsys.readouterr().out


def test_what_the_package_logs_is_told_while_a_run_goes_on(capsys):
    logger = logging.getLogger("capsroute.models")
    with notes_to(LineReporter()):
        logger.info("made to fit")
        logger.debug("which nobody asked for")
    logger.info("too late")
    assert capsys.readouterr().out == "made to fit\n"
    package = logging.getLogger("capsroute")
    assert package.level == logging.NOTSET and package.propagate
    assert not logger.isEnabledFor(logging.INFO)  # which loggers remember, if not told
