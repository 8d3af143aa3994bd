import pickle

import numpy as np
import pytest
import small_cifar
import torch

from capsroute.data import DataError, MissingDataError, cifar, load_cifar

FORMS = [(name, form) for name, forms in cifar.DISTRIBUTIONS.items() for form in forms]
IDS = [form.folder for _, form in FORMS]


def prepare(monkeypatch, name, root, form):
    small_cifar.write(name, root, form)
    small_cifar.trust(monkeypatch, name, root, form)


def check(name: str, arrays: cifar.CifarArrays) -> None:
    expected = small_cifar.contents(name)
    train = [arrays for file, arrays in expected.items() if "test" not in file]
    test = next(arrays for file, arrays in expected.items() if "test" in file)
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in train]))
    assert torch.equal(arrays.train_images, pixels.view(-1, 3, 32, 32))
    assert arrays.train_labels.tolist() == [int(x) for _, labels in train for x in labels]
    assert torch.equal(arrays.test_images, torch.from_numpy(test[0]).view(-1, 3, 32, 32))
    assert arrays.test_labels.tolist() == test[1].tolist()
    assert arrays.train_labels.dtype == torch.int64


@pytest.mark.parametrize(("name", "form"), FORMS, ids=IDS)
def test_unpacked_folder(monkeypatch, tmp_path, name, form):
    prepare(monkeypatch, name, tmp_path, form)
    check(name, load_cifar(name, tmp_path))
    check(name, load_cifar(name, tmp_path / form.folder))


@pytest.mark.parametrize(("name", "form"), FORMS, ids=IDS)
def test_archive(monkeypatch, tmp_path, name, form):
    prepare(monkeypatch, name, tmp_path, form)
    small_cifar.pack(tmp_path, form)
    check(name, load_cifar(name, tmp_path))


def test_published_digests_are_complete():
    for _, form in FORMS:
        assert {len(digest) for digest in form.digests.values()} == {
            {"sha1": 40, "md5": 32}[form.algorithm]
        }
    assert len(cifar.CLASS_NAMES["cifar100"]) == len(set(cifar.CLASS_NAMES["cifar100"])) == 100
    assert cifar.CLASS_NAMES["cifar10"][3] == "cat"


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_missing(tmp_path, name):
    with pytest.raises(MissingDataError) as info:
        load_cifar(name, tmp_path)
    message = str(info.value)
    form = cifar.DISTRIBUTIONS[name][0]
    for part in (form.folder, next(iter(form.digests)), str(tmp_path), "toronto.edu"):
        assert part in message
    assert f"capsroute data download {name}" in message
    assert "\n" not in message


def test_one_file_missing(monkeypatch, tmp_path):
    form = cifar.DISTRIBUTIONS["cifar10"][0]
    prepare(monkeypatch, "cifar10", tmp_path, form)
    (tmp_path / form.folder / "data_batch_3.bin").unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3.bin not found in .*batches-bin"):
        load_cifar("cifar10", tmp_path)


def test_wrong_digest(tmp_path):
    form = cifar.DISTRIBUTIONS["cifar10"][0]
    small_cifar.write("cifar10", tmp_path, form)
    with pytest.raises(DataError, match=r"data_batch_1.bin: sha1 .*, expected aadd24ac"):
        load_cifar("cifar10", tmp_path)


def test_truncated_file(monkeypatch, tmp_path):
    form = cifar.DISTRIBUTIONS["cifar100"][0]
    prepare(monkeypatch, "cifar100", tmp_path, form)
    path = tmp_path / form.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"train.bin: sha1 .*truncated or damaged"):
        load_cifar("cifar100", tmp_path)
    small_cifar.trust(monkeypatch, "cifar100", tmp_path, form)
    with pytest.raises(DataError, match=r"expected records of 3074: truncated"):
        load_cifar("cifar100", tmp_path)


def test_truncated_archive(monkeypatch, tmp_path):
    form = cifar.DISTRIBUTIONS["cifar100"][1]
    prepare(monkeypatch, "cifar100", tmp_path, form)
    path = small_cifar.pack(tmp_path, form)
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(DataError, match="damaged archive"):
        load_cifar("cifar100", tmp_path)


def test_archive_without_a_file(monkeypatch, tmp_path):
    form = cifar.DISTRIBUTIONS["cifar100"][1]
    prepare(monkeypatch, "cifar100", tmp_path, form)
    (tmp_path / form.folder / "test").unlink()
    small_cifar.pack(tmp_path, form)
    with pytest.raises(MissingDataError, match=r"test not found in .*cifar-100-python.tar.gz"):
        load_cifar("cifar100", tmp_path)


def test_a_pickle_that_runs_code_is_refused(monkeypatch, tmp_path):
    form = cifar.DISTRIBUTIONS["cifar10"][1]
    prepare(monkeypatch, "cifar10", tmp_path, form)
    trap = tmp_path / "trap"
    path = tmp_path / form.folder / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": small_cifar.RunsCode(trap), "labels": []}))
    with pytest.raises(DataError, match=r"md5 .*, expected"):
        load_cifar("cifar10", tmp_path)
    # even were its digest the right one
    small_cifar.trust(monkeypatch, "cifar10", tmp_path, form)
    with pytest.raises(DataError, match=r"refused; .*it asks for (posix|nt)\.mkdir"):
        load_cifar("cifar10", tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"labels": []}),
        pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 0]}, protocol=4),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, protocol=4),
    ],
    ids=["garbage", "a list", "no data", "float pixels", "labels missing"],
)
def test_a_pickle_of_something_else(monkeypatch, tmp_path, data):
    form = cifar.DISTRIBUTIONS["cifar10"][1]
    prepare(monkeypatch, "cifar10", tmp_path, form)
    (tmp_path / form.folder / "data_batch_1").write_bytes(data)
    small_cifar.trust(monkeypatch, "cifar10", tmp_path, form)
    with pytest.raises(DataError, match=r"data_batch_1: (refused|expected a dict)"):
        load_cifar("cifar10", tmp_path)


def test_a_pickle_written_by_python_2():
    """The official batches: protocol 2, strings for bytes, numpy's old module names."""
    data = (
        b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87R(K\x01K\x01K\x02\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x02\x07\xfftbs."
    )
    batch = cifar.unpickle_arrays(data, "batch")
    assert batch["data"].tolist() == [[7, 255]]


@pytest.mark.parametrize("which", [0, 1], ids=["binary", "python"])
def test_label_out_of_range(monkeypatch, tmp_path, which):
    form = cifar.DISTRIBUTIONS["cifar10"][which]
    prepare(monkeypatch, "cifar10", tmp_path, form)
    pixels, labels = np.zeros((2, 3072), np.uint8), np.array([1, 10])
    file = list(form.digests)[2]
    data = (
        small_cifar.python_file(pixels, labels, form.label_key)
        if form.label_key
        else small_cifar.binary_file(pixels, labels, form.label_column)
    )
    (tmp_path / form.folder / file).write_bytes(data)
    small_cifar.trust(monkeypatch, "cifar10", tmp_path, form)
    with pytest.raises(DataError, match=f"{file}: label 10 is out of range; expected 0 to 9"):
        load_cifar("cifar10", tmp_path)


def test_a_file_instead_of_a_folder(tmp_path):
    path = tmp_path / "cifar"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is a file; expected a folder that holds cifar10"):
        load_cifar("cifar10", path)


def test_unknown_name(tmp_path):
    with pytest.raises(DataError, match="did you mean 'cifar100'"):
        load_cifar("cifar1000", tmp_path)
