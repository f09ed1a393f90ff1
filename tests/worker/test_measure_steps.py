"""Where a server keeps its step times, and what happens where it cannot."""

import logging
from pathlib import Path

import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.worker.startup import sps_cache


class UnwritableTable:
    def save(self, path):
        raise PermissionError(13, "Permission denied", str(path))


def test_a_server_without_a_cache_says_so_and_goes_on(caplog):
    with caplog.at_level(logging.WARNING):
        sps_cache._save(UnwritableTable(), Path("/cache/table.json"), named=False)
    assert "cannot be kept" in caplog.text
    assert "/cache/table.json" in caplog.text


def test_a_named_file_that_cannot_be_written_ends_the_start():
    with pytest.raises(
        ConfigError, match=r"--speculative-dspark-sps-table-path='/x/t.json' cannot be written: Permission"
    ):
        sps_cache._save(UnwritableTable(), Path("/x/t.json"), named=True)


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does for a user that nobody knows
    assert sps_cache._cache_folder().is_absolute()
