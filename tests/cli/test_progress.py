import signal

import pytest

from capsroute.cli.progress import LineReporter, LiveReporter, progress_bars


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
