"""Install hints: one wording, right where the package runs from."""

import sys

from capsroute import extras


def test_a_checkout_is_installed_again_and_a_package_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert extras.install_hint("serve") == 'pip install "capsroute[serve]"'
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    hint = f'pip install -c "{tmp_path}/constraints.txt" -e "{tmp_path}[serve]"'
    assert extras.install_hint("serve") == hint


def test_what_is_installed_and_does_not_import_is_not_to_be_installed(monkeypatch):
    broken = RuntimeError("operator torchvision::nms\n does not exist")
    told = extras.why_unusable("json", "timm", broken)
    assert told == "is installed but cannot be imported: operator torchvision::nms does not exist"
    assert extras.why_unusable("json", "timm", ImportError()).endswith(": ImportError")
    monkeypatch.setitem(sys.modules, "timm", None)
    told = extras.why_unusable("timm", "timm", ImportError("none"))
    assert told == f"is not installed: {extras.install_hint('timm')}"
