import hashlib
import io
import re
import sys
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import small_cifar

from capsroute.data import DataError, MissingDataError, cifar, download, load_cifar, verify

fetching = sys.modules["capsroute.data.download"]  # its name in the package is the function's


class Server(ThreadingHTTPServer):
    """Serves `files`; cuts the first `cuts` answers short; remembers the ranges asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges: list[str] = []
        self.cuts = 0
        self.understands_ranges = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        server = self.server
        server.ranges.append(self.headers["Range"])
        data = server.files.get(self.path.lstrip("/"))
        if data is None:
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        start = start if server.understands_ranges else 0
        if start >= len(data):
            self.send_error(416)
            return
        body = data[start:]
        self.send_response(206 if server.understands_ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.cuts:
            server.cuts -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetching, "PAUSE_S", 0)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cifar10(monkeypatch, server, tmp_path):
    """The server offers a small CIFAR-10 archive under its right digest."""
    form = cifar.DISTRIBUTIONS["cifar10"][0]
    origin = tmp_path / "origin"
    small_cifar.write("cifar10", origin, form)
    small_cifar.trust(monkeypatch, "cifar10", origin, form)
    offer(monkeypatch, server, small_cifar.pack(origin, form).read_bytes())
    return server


def offer(monkeypatch, server, data: bytes, md5: str | None = None) -> None:
    remote = replace(
        fetching.REMOTES["cifar10"][0],
        url=server.url + "cifar-10-binary.tar.gz",
        md5=md5 or hashlib.md5(data).hexdigest(),
    )
    server.files[remote.name] = data
    monkeypatch.setitem(fetching.REMOTES, "cifar10", (remote,))


def archive_of(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, "/etc/passwd", 0
        archive.addfile(member)
    return stream.getvalue()


def test_download_then_load(cifar10, tmp_path):
    calls = []
    folder = download("cifar10", tmp_path, progress=lambda *call: calls.append(call))
    assert folder == tmp_path / "cifar-10-batches-bin"
    assert len(load_cifar("cifar10", tmp_path).train_images) == 5 * small_cifar.PER_FILE
    total = len(cifar10.files["cifar-10-binary.tar.gz"])
    assert calls[-1] == ("cifar-10-binary.tar.gz", total, total)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar-10-batches-bin", "origin"]
    assert all(check.ok for check in verify("cifar10", tmp_path))


def test_what_is_whole_is_not_fetched_again(cifar10, tmp_path):
    download("cifar10", tmp_path)
    asked = len(cifar10.ranges)
    download("cifar10", tmp_path)
    assert len(cifar10.ranges) == asked


def test_a_damaged_file_is_replaced(cifar10, tmp_path):
    path = download("cifar10", tmp_path) / "test_batch.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    download("cifar10", tmp_path)
    assert path.read_bytes() == good


def test_a_cut_transfer_resumes_where_it_ended(cifar10, tmp_path):
    cifar10.cuts = 2
    download("cifar10", tmp_path)
    total = len(cifar10.files["cifar-10-binary.tar.gz"])
    half = total // 2
    assert cifar10.ranges == [
        "bytes=0-",
        f"bytes={half}-",
        f"bytes={half + (total - half) // 2}-",
    ]


def test_a_later_call_resumes(cifar10, tmp_path):
    cifar10.cuts = fetching.ATTEMPTS
    with pytest.raises(MissingDataError, match=r"connection ended after .* same command resumes"):
        download("cifar10", tmp_path)
    part = tmp_path / "cifar-10-binary.tar.gz.part"
    kept = part.stat().st_size
    assert kept > 0
    download("cifar10", tmp_path)
    assert cifar10.ranges[-1] == f"bytes={kept}-"
    assert not part.exists()


def test_a_server_without_ranges_starts_over(cifar10, tmp_path):
    cifar10.cuts, cifar10.understands_ranges = 1, False
    download("cifar10", tmp_path)
    assert all(check.ok for check in verify("cifar10", tmp_path))


def test_a_whole_part_needs_its_name_only(cifar10, tmp_path):
    data = cifar10.files["cifar-10-binary.tar.gz"]
    (tmp_path / "cifar-10-binary.tar.gz.part").write_bytes(data)
    download("cifar10", tmp_path)
    assert all(check.ok for check in verify("cifar10", tmp_path))


def test_wrong_digest_is_refused(monkeypatch, cifar10, tmp_path):
    offer(monkeypatch, cifar10, b"something else", md5="0" * 32)
    with pytest.raises(DataError, match=r"md5 .*, expected 0000.*not kept"):
        download("cifar10", tmp_path)
    assert not any(path.is_file() for path in tmp_path.glob("*"))
    assert not any((tmp_path / "cifar-10-batches-bin").iterdir())


def test_not_found(monkeypatch, cifar10, tmp_path):
    cifar10.files.clear()
    with pytest.raises(MissingDataError, match="404"):
        download("cifar10", tmp_path)
    assert len(cifar10.ranges) == 1


def test_no_network(monkeypatch, cifar10, tmp_path):
    remote = replace(fetching.REMOTES["cifar10"][0], url="http://127.0.0.1:1/x.tar.gz")
    monkeypatch.setitem(fetching.REMOTES, "cifar10", (remote,))
    with pytest.raises(MissingDataError, match=r"127.0.0.1:1/x.tar.gz: .*refused"):
        download("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../outside", tarfile.REGTYPE),
        ("cifar-10-batches-bin/../../outside", tarfile.REGTYPE),
        ("cifar-10-batches-bin/link", tarfile.SYMTYPE),
    ],
)
def test_an_archive_that_leads_outside_is_refused(monkeypatch, server, tmp_path, name, kind):
    root = tmp_path / "root"
    offer(monkeypatch, server, archive_of(name, kind))
    with pytest.raises(DataError, match="refused to unpack"):
        download("cifar10", root)
    assert not (tmp_path / "outside").exists()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [
        "cifar-10-binary.tar.gz"
    ]


def test_an_archive_of_something_else(monkeypatch, server, tmp_path):
    offer(monkeypatch, server, archive_of("readme"))
    with pytest.raises(DataError, match="expected a folder cifar-10-batches-bin"):
        download("cifar10", tmp_path)


def test_fashion_mnist_is_single_files(monkeypatch, server, tmp_path):
    md5 = {}
    for file in fetching.FASHION_MD5:
        server.files[file] = file.encode()
        md5[file] = hashlib.md5(file.encode()).hexdigest()
    remotes = tuple(
        replace(remote, url=server.url + remote.name, md5=md5[remote.name])
        for remote in fetching.REMOTES["fashion_mnist"]
    )
    monkeypatch.setitem(fetching.REMOTES, "fashion_mnist", remotes)
    monkeypatch.setattr(fetching, "FASHION_MD5", md5)
    folder = download("fashion_mnist", tmp_path)
    assert folder == tmp_path / "FashionMNIST" / "raw"
    assert sorted(path.name for path in folder.iterdir()) == sorted(md5)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"x")
    (folder / "t10k-images-idx3-ubyte.gz").rename(folder / "t10k-images-idx3-ubyte")
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    details = [check.detail.split(":")[0].split()[0] for check in verify("fashion_mnist", tmp_path)]
    assert details == ["md5", "missing", "unpacked", "md5"]
    assert [check.ok for check in verify("fashion_mnist", tmp_path)] == [True, False, False, False]


def test_names(tmp_path):
    with pytest.raises(DataError, match="`mnist` needs no download"):
        download("mnist", tmp_path)
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        download("cifr10", tmp_path)
    with pytest.raises(DataError, match="no digests are known for `imagenet`"):
        verify("imagenet", tmp_path)


def test_a_file_in_the_way(cifar10, tmp_path):
    root = tmp_path / "root"
    root.write_bytes(b"")
    with pytest.raises(DataError, match="a file is in the way"):
        download("cifar10", root)


def test_verify_reports_each_file(monkeypatch, tmp_path):
    form = cifar.DISTRIBUTIONS["cifar10"][0]
    small_cifar.write("cifar10", tmp_path, form)
    small_cifar.trust(monkeypatch, "cifar10", tmp_path, form)
    path = tmp_path / form.folder / "data_batch_2.bin"
    path.write_bytes(b"damaged")
    (tmp_path / form.folder / "data_batch_4.bin").unlink()
    checks = verify("cifar10", tmp_path)
    assert [check.ok for check in checks] == [True, False, True, False, True, True]
    assert "missing" in checks[3].detail
    assert "expected" in checks[1].detail and checks[1].file == str(path)


def test_verify_of_nothing(tmp_path):
    (check,) = verify("cifar100", tmp_path)
    assert not check.ok and "capsroute data download cifar100" in check.detail


def test_verify_the_packed_set(tmp_path):
    assert [check.ok for check in verify("diverse_multimnist", tmp_path)] == [True] * 4
