import pytest

from capsroute.cli.progress import progress_bars


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
