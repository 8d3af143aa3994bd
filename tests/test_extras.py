"""Install hints: one wording, right where the package runs from."""

from capsroute import extras


def test_a_checkout_is_installed_again_and_a_package_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert extras.install_hint("serve") == 'pip install "capsroute[serve]"'
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    hint = f'pip install -c "{tmp_path}/constraints.txt" -e "{tmp_path}[serve]"'
    assert extras.install_hint("serve") == hint
