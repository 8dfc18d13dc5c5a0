"""Every test of the data folder has its own stores."""

import pytest


@pytest.fixture(autouse=True)
def data_root(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    return tmp_path / "stores"
