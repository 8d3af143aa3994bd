"""The command line as a user meets it: what it prints, and how it fails."""

import os
import re
import signal
import subprocess
import sys

import pytest

import capsroute
from capsroute.cli import COMMANDS
from capsroute.models.pretrained import list_pretrained


def test_models_lists_names_counts_accuracies_and_inputs(run):
    status, out, _ = run("models", "inverted_*")
    assert status == 0
    line = next(line for line in out.splitlines() if "inverted_resnet_cifar10 " in line)
    assert "1,828,817" in line and "95.14" in line and "32x32x3" in line
    assert "em_simple_cifar10" not in out


def test_models_fit_into_80_columns_and_say_which_have_weights(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run("models")
    assert status == 0 and "…" not in out and max(map(len, out.splitlines())) <= 80
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert set(capsroute.list_models()) <= set(rows)
    shipped = {name for name in capsroute.list_models() if rows[name][-1] == "yes"}
    assert shipped == set(list_pretrained())


@pytest.mark.parametrize("family", ["inverted_simple", "em_simple", "dynamic_simple", "cnn"])
def test_the_rows_of_a_model_hold_all_its_parameters(run, family):
    name = f"{family}_cifar10"
    status, out, _ = run("models", name)
    (total,) = (line for line in out.splitlines() if "total" in line)
    assert status == 0 and f"{capsroute.models.model_info(name).parameters:,}" in total
    assert "dataset: cifar10; no weights" in out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "inverted_simple_cifar10",
            ["16x16x256", "16x16x32x4x4", "7x7x32x4x4", "5x5x32x4x4", "800x4x4", "10x4x4"],
        ),
        ("em_simple_cifar10", ["16x16x32x4x4", "7x7x32", "5x5x32", "800x4x4", "Batch Norm"]),
        ("dynamic_simple_cifar10", ["24x24x256", "8x8x32x8", "2048x8", "10x16", "Squash"]),
        ("inverted_vector_multimnist", ["18x18x1024", "8x8x16x64", "6x6x16x64", "576x64"]),
        ("cnn_multimnist", ["18x18x1024", "8x8x1024", "6x6x1024", "6x6x640"]),
        ("inverted_resnet_cifar10", ["128-dim. residual building block, stride=2", "16x16x128"]),
    ],
)
def test_models_shows_the_rows_of_the_papers_tables(run, name, expected):
    status, out, _ = run("models", name)
    assert status == 0
    for text in expected:
        assert text in out


def test_overview_help_and_version(run):
    for arguments in ((), ("--help",)):
        status, out, _ = run(*arguments)
        assert status == 0 and "models" in out
        assert "usage: capsroute [--import MODULE] COMMAND" in out
        assert "Start with `capsroute train`" in out
    assert run("--version")[1].startswith("capsroute ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(run, command):
    status, out, _ = run(command, "--help")
    examples = re.split("For example|Examples:", out)[1]
    assert status == 0 and f"capsroute {command}" in examples and "None" not in out
    assert not re.search(r"\(default:\s*\)", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("modles",), "no command 'modles'; did you mean 'models'?"),
        (("models", "inverted_simple_cifr10"), "did you mean 'inverted_simple_cifar10'?"),
        (("models", "--patern", "x"), "Unrecognized options: --patern"),
        (("export", "model", "--to", "onx"), "got 'onx'; did you mean 'onnx'?"),
        (("bench", "nope"), "`NAME` must name registered models, got 'nope'"),
        (("bench", "--device", "tpu"), "`--device` must be auto, cpu or cuda, got 'tpu'"),
        (("serve",), "error: `MODEL` must be given: A run's folder, a checkpoint, "),
        (("export", "pets"), "error: `--to` must be given: onnx, torch-export or safetensors (see"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_on_by_default_is_shown_with_what_turns_it_off(run, command):
    """An option's help says what it turns on: beside `--no-…` alone it would say the opposite."""
    _, out, _ = run(command, "--help")
    assert not [line for line in out.splitlines() if line.strip(" │").startswith("--no-")]


def test_a_terminal_without_utf8_gets_the_same_line(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "capsroute", "train", "--lrr", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: Unrecognized options: --lrr, 3; did you mean --lr?")
    assert not list(tmp_path.iterdir())


def test_debug_adds_the_traceback(run):
    status, _, err = run("modles", "--debug")
    assert status == 2 and "Traceback" in err


COMMAND = f"{sys.executable} -m capsroute"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_do_not_wait_for_pytorch(option):
    code = f"import sys, capsroute.cli as c; c.main([{option!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_an_interrupt_while_pytorch_loads_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "capsroute", "models"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        # a shell's background jobs ignore interrupts, and so would the child of one
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("arguments", ["reproduce --list", "models", "--help"])
def test_a_reader_that_goes_away_is_no_mistake(arguments):
    command = ["bash", "-c", f"{COMMAND} {arguments} | true; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("where", "message"), [(">&-", "stdout is closed"), (">/dev/full", "No space left on device")]
)
def test_an_output_that_takes_nothing_is_one_line(where, message):
    done = subprocess.run(
        f"{COMMAND} --help {where}", shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and message in done.stderr


def test_names_may_follow_options_that_take_a_value(run):
    status, out, err = run("reproduce", "fast*", "--device", "cpu", "cnn*", "--list")
    assert status == 0 and "fast_cifar10" in out and "cnn_cifar10" in out, err


@pytest.mark.parametrize("switch", ["--capture", "--no-capture", "--tensorboard"])
def test_names_may_follow_options_that_are_on_or_off(run, switch):
    status, out, err = run("reproduce", "fast*", switch, "cnn*", "--list")
    assert status == 0 and "fast_cifar10" in out and "cnn_cifar10" in out, err
