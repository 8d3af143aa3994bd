"""`capsroute data`, and how bad data ends: one line, exit status 2."""

import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import capsroute
from capsroute.cli.data import _ABOUT
from capsroute.data import cifar, list_datasets
from capsroute.models.weights import save_model
from data import small_cifar

fetching = sys.modules["capsroute.data.download"]
BINARY, PYTHON = cifar.DISTRIBUTIONS["cifar100"]


@pytest.fixture
def pets(tmp_path):
    for index in range(5):
        for name, red in (("cat", 0), ("dog", 200)):
            (tmp_path / "pets" / name).mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (9, 8), (red + index, 0, 0))
            image.save(tmp_path / "pets" / name / f"{index}.png")
    return tmp_path / "pets"


def cifar100(monkeypatch, root, form=BINARY):
    small_cifar.write("cifar100", root, form)
    small_cifar.trust(monkeypatch, "cifar100", root, form)


def test_show_a_generated_dataset(run, tmp_path):
    arguments = ("data", "show", "diverse_multimnist", "--count", 9)
    status, out, err = run(*arguments, "--out", "sheets/a.png")
    assert (status, err) == (0, "")
    assert "9 train images of diverse_multimnist (36×36×1, 10 classes)" in out
    run(*arguments, "--out", "sheets/b.png")
    run(*arguments, "--seed", 1, "--out", "sheets/c.png")
    first, same, other = ((tmp_path / "sheets" / f"{name}.png").read_bytes() for name in "abc")
    assert first == same != other
    assert len(list((tmp_path / "sheets").iterdir())) == 3  # no temporary file stays


def test_show_a_folder_and_what_was_skipped(run, pets):
    (pets / "cat" / "broken.png").write_bytes(b"no image")
    status, out, err = run("data", "show", pets, "--split", "test")
    assert status == 0 and out.startswith("pets.png: 2 test images of pets (8×9×3, 2 classes)")
    with Image.open("pets.png") as sheet:
        assert sheet.width > 2 * 72
    assert "broken.png" in err and "left out 1 file that could not be read" in err
    status, _, err = run("data", "show", pets, "--strict")
    assert status == 2 and err.startswith("error: ") and "broken.png" in err


def test_captions(monkeypatch, run, pets):
    seen = []

    def note(images, labels):
        seen.append(labels)
        return sheet(images, labels)

    module = sys.modules["capsroute.cli.data"]
    sheet = module.contact_sheet
    monkeypatch.setattr(module, "contact_sheet", note)
    run("data", "show", pets)
    run("data", "show", "diverse_multimnist", "--count", 30)
    folder, digits = seen
    assert sorted(folder) == ["cat"] * 4 + ["dog"] * 4
    assert {len(caption) for caption in digits} == {1, 5} and any(" + " in c for c in digits)


def test_list_names_every_dataset_and_what_is_here(monkeypatch, run, tmp_path):
    assert tuple(_ABOUT) == list_datasets()
    cifar100(monkeypatch, tmp_path)
    status, out, _ = run("data", "list", "--root", tmp_path)
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert status == 0 and set(lines) == set(list_datasets())
    assert "missing" in lines["cifar10"] and "cifar-100-binary" in lines["cifar100"]
    assert "package" in lines["diverse_multimnist"] and "missing" in lines["fashion_mnist"]


def test_verify(monkeypatch, run, tmp_path):
    cifar100(monkeypatch, tmp_path)
    status, out, err = run("data", "verify", "cifar100", "--root", tmp_path)
    assert (status, err) == (0, "") and out.count("sha1 ok") == 2 and "all 2 files" in out
    path = tmp_path / BINARY.folder / "test.bin"
    path.write_bytes(path.read_bytes()[:-1])
    status, out, err = run("data", "verify", "cifar100", "--root", tmp_path)
    assert (status, err) == (1, "")
    assert f"ok   {tmp_path / BINARY.folder / 'train.bin'}" in out
    assert f"BAD  {path}: sha1" in out and "truncated or damaged" in out
    assert "cifar100: 1 of 2 bad" in out


def test_verify_the_package_and_what_is_missing(run):
    status, out, _ = run("data", "verify", "mnist")
    assert status == 0 and out.count("sha1 ok") == 4
    status, out, _ = run("data", "verify", "cifar10")
    assert status == 1 and "capsroute data download cifar10" in out


def test_download(monkeypatch, run, tmp_path):
    """From a file: URL, which needs neither network nor server."""
    origin = tmp_path / "origin"
    cifar100(monkeypatch, origin)
    archive = small_cifar.pack(origin, BINARY)
    remote = replace(
        fetching.REMOTES["cifar100"][0], url=archive.as_uri(), md5=fetching._md5(archive)
    )
    monkeypatch.setitem(fetching.REMOTES, "cifar100", (remote,))
    monkeypatch.setattr(fetching, "PAUSE_S", 0)
    root = tmp_path / "root"
    status, out, err = run("data", "download", "cifar100", "--root", root)
    assert (status, err) == (0, "")
    assert "cifar-100-binary.tar.gz: " in out and "(100 %)" in out
    assert f"cifar100 is in {root / BINARY.folder}" in out
    status, out, _ = run("data", "download", "cifar100", "--root", root)
    assert status == 0 and "%" not in out  # there and whole
    monkeypatch.setitem(fetching.REMOTES, "cifar100", (replace(remote, md5="0" * 32),))
    status, _, err = run("data", "download", "cifar100", "--root", tmp_path / "other")
    assert status == 2 and one_line(err) and "expected 0000" in err


def test_help(run):
    for arguments in ((), ("--help",)):
        status, out, _ = run("data", *arguments)
        assert status == 0
        for name in ("list", "show", "download", "verify"):
            assert f"  {name} " in out and f"  capsroute data {name}" in out
    for name in ("list", "show", "download", "verify"):
        status, out, _ = run("data", name, "--help")
        assert status == 0 and f"For example `capsroute data {name}" in out
        assert "None" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shwo",), "no command `data shwo`; did you mean 'show'?"),
        (("show", "diverse_multimnst"), "did you mean 'diverse_multimnist'?"),
        (("show", "./nowhere"), "no such folder"),
        (("show", "cifar10"), "capsroute data download cifar10"),
        (("show",), "NAME"),
        (("show", "mnist", "--count", "0"), "`--count` must be between 1 and"),
        (("show", "mnist", "--out", "sheet.jpg"), "ends in .png, got sheet.jpg"),
        (("show", "mnist", "--split", "tset"), "--split"),
        (("show", "mnist", "--image-size", "12"), "mnist has 28×28 images"),
        (("download", "cifar1"), "did you mean 'cifar10'?"),
        (("download", "mnist"), "inside the package"),
        (("verify", "cifar1"), "did you mean 'cifar10'?"),
    ],
)
def test_mistakes(run, arguments, message):
    status, out, err = run("data", *arguments)
    assert (status, out) == (2, "")
    assert one_line(err) and message in err


def one_line(err: str) -> bool:
    return err.startswith("error: ") and err.count("\n") == 1


def wrong_digest(monkeypatch, root):
    small_cifar.write("cifar100", root, BINARY)
    return "cifar100", "train.bin: sha1"


def truncated_file(monkeypatch, root):
    cifar100(monkeypatch, root)
    path = root / BINARY.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-10])
    small_cifar.trust(monkeypatch, "cifar100", root, BINARY)  # even were its digest right
    return "cifar100", "truncated"


def pickle_with_code(monkeypatch, root):
    cifar100(monkeypatch, root, PYTHON)
    trap = {"data": small_cifar.RunsCode(root / "trap"), "fine_labels": []}
    (root / PYTHON.folder / "train").write_bytes(pickle.dumps(trap))
    small_cifar.trust(monkeypatch, "cifar100", root, PYTHON)
    return "cifar100", "refused"


def label_out_of_range(monkeypatch, root):
    cifar100(monkeypatch, root)
    data = small_cifar.binary_file(np.zeros((2, 3072), np.uint8), np.array([1, 100]), 1)
    (root / BINARY.folder / "test.bin").write_bytes(data)
    small_cifar.trust(monkeypatch, "cifar100", root, BINARY)
    return "cifar100", "label 100 is out of range; expected 0 to 99"


def empty_class_folder(monkeypatch, root):
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
    Image.new("RGB", (9, 8)).save(root / "cat" / "0.png")
    return root, "dog: empty class folder"


def one_class_only(monkeypatch, root):
    (root / "cat").mkdir(parents=True)
    Image.new("RGB", (9, 8)).save(root / "cat" / "0.png")
    return root, "one class only, `cat`"


def a_file(monkeypatch, root):
    root.write_bytes(b"")
    return root, "is a file; expected a folder"


def a_file_as_root(monkeypatch, root):
    root.write_bytes(b"")
    return "cifar100", "is a file; expected a folder"


BAD = [
    wrong_digest,
    truncated_file,
    pickle_with_code,
    label_out_of_range,
    empty_class_folder,
    one_class_only,
    a_file,
    a_file_as_root,
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_model(capsroute.create_model("inverted_small_multimnist"), path)
    return path


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.__name__)
@pytest.mark.parametrize("command", ["show", "eval"])
def test_bad_data(monkeypatch, run, tmp_path, checkpoint, case, command):
    root = tmp_path / "root"
    data, message = case(monkeypatch, root)
    arguments = {
        "show": ("data", "show", data, "--root", root),
        "eval": ("eval", checkpoint, "--data", data, "--data-root", root),
    }
    status, out, err = run(*arguments[command])
    assert (status, out) == (2, "")
    assert one_line(err) and message in err
    assert not (root / "trap").exists()


@pytest.mark.parametrize("command", ["verify", "download", "list"])
def test_a_root_that_is_a_file(run, tmp_path, command):
    (tmp_path / "root").write_bytes(b"")
    name = () if command == "list" else ("cifar10",)
    status, out, err = run("data", command, *name, "--root", tmp_path / "root")
    assert (status, out) == (2, "")
    assert one_line(err) and "must be a folder" in err


def test_a_damaged_folder_of_idx_files(run, tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + bytes(11))
    for name in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte").write_bytes(b"")
    status, _, err = run("data", "show", tmp_path)
    assert status == 2 and one_line(err) and "train-images-idx3-ubyte" in err
