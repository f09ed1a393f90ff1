"""A feature and its line can go, and the rest imports, passes its types and decodes."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sglang_objects import model_config, server_args

from sglang_dspark.engine.feature import all_features
from sglang_dspark.features import FEATURES

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "worker" / "test_eager_executor.py"
USED_BY_ALL = ("memory", "reports", "sessions", "slo", "streams", "weights")
"""Features that every server uses, because any request may ask for them, or a reader."""
DECODE_AND_IMPORT_ALL = """
import sys, pytest
assert pytest.main(sys.argv[1:]) == 0
import importlib, pkgutil, sglang_dspark
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine import checks, flags, hooks
for module in pkgutil.walk_packages(sglang_dspark.__path__, "sglang_dspark."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
found = [*checks.all_checks(), *flags.all_rules(), *hooks.all_hooks()]
print("\\n", sglang_dspark.__file__, *[feature.package.rpartition(".")[2] for feature in all_features()])
"""


def without(names: list[str], folder: Path) -> Path:
    """Return a copy of the tree in ``folder`` without these features and their lines."""
    left_out = shutil.ignore_patterns("__pycache__", "drafters")
    for tree in ("sglang_dspark", "kernels", "training"):
        shutil.copytree(ROOT / tree, folder / tree, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", folder)
    features = folder / "sglang_dspark" / "features"
    lines = (features / "__init__.py").read_text()
    for name in names:
        if (features / name).is_dir():
            shutil.rmtree(features / name)
        else:
            (features / f"{name}.py").unlink()
        assert lines.count(f'    "{name}",\n') == 1
        lines = lines.replace(f'    "{name}",\n', "")
    (features / "__init__.py").write_text(lines)
    return folder


def run(tree: Path, *words: str) -> str:
    """Return what Python prints that finds the package only in ``tree``."""
    paths = os.pathsep.join(str(tree / name) for name in ("", "kernels", "training"))
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "2"}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=tree, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def imports_and_decodes(tree: Path, left: list[str]) -> None:
    golden = f"{GOLDEN}::test_the_golden_rounds_are_decoded_in_one_batch"
    printed = run(tree, "-c", DECODE_AND_IMPORT_ALL, *"-q -n0 -p no:cacheprovider --rootdir".split(), str(ROOT), golden)
    assert "1 passed" in printed
    assert printed.splitlines()[-1].split() == [str(tree / "sglang_dspark" / "__init__.py"), *left]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_core_is_complete_without_any_feature(tmp_path):
    imports_and_decodes(without(list(FEATURES), tmp_path), [])


@pytest.fixture(scope="module")
def types(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("types")


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_can_go(name, types, tmp_path):
    tree = without([name], tmp_path)
    imports_and_decodes(tree, [other for other in FEATURES if other != name])
    assert "no issues found" in run(tree, "-m", "mypy", "--cache-dir", str(types))


PAGE = (ROOT / "docs" / "features.md").read_text()
USE = """
import logging, sys
from types import SimpleNamespace as Made
from sglang_dspark.engine.feature import all_features
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
[feature] = [each for each in all_features() if each.package.endswith("long_prompts")]
assert not feature.is_used(Made(log_requests=False)) and feature.is_used(Made(log_requests=True))
part = feature.part(Made(max_verify=7))
part.prefill_done(Made(reqs=[Made(origin_input_ids=[1] * length) for length in (7, 8)]))
"""


@pytest.mark.thorough
def test_a_reader_adds_the_feature_of_the_page(tmp_path):
    tree = without([], tmp_path)
    files = re.findall(r"<!-- file: (\S+) -->\n   ```python\n(.*?)   ```\n", PAGE, re.DOTALL)
    [(path, code)] = files
    (tree / "sglang_dspark" / path).write_text(textwrap.dedent(code))
    features = tree / "sglang_dspark" / "features" / "__init__.py"
    [line] = re.findall(r"Add the line `(.*?)` to `FEATURES`", PAGE)
    features.write_text(features.read_text().replace('    "nodes",', f'    {line}\n    "nodes",'))
    assert run(tree, "-c", USE).splitlines() == ["DSPARK: a prompt of 8 tokens"]


def test_every_feature_has_its_line():
    found = (ROOT / "sglang_dspark" / "features").glob("[a-z]*")
    assert {path.stem for path in found} == set(FEATURES) and list(FEATURES) == sorted(FEATURES)
    assert [feature.package for feature in all_features()] == [f"sglang_dspark.features.{name}" for name in FEATURES]


USED = [
    ({}, {}, []),
    ({"enable_lora": True}, {}, ["adapters"]),
    ({"lora_paths": ["a=b"]}, {}, ["adapters"]),
    ({"enable_lora": False, "lora_paths": ["a=b"]}, {}, []),  # SGLang ignores the paths
    ({"enable_hierarchical_cache": True}, {}, ["host_cache"]),
    ({"enable_return_routed_experts": True}, {}, ["experts"]),
    ({"nnodes": 2}, {}, ["nodes"]),
    ({}, {"is_multimodal": True}, ["pictures"]),
    ({}, {"model_is_mrope": True}, ["pictures"]),
    ({}, {"architecture": "Qwen3NextForCausalLM"}, ["recurrent"]),
]


@pytest.mark.parametrize(("given", "target", "used"), USED)
def test_features_are_used_if_arguments_or_the_target_ask_for_them(given, target, used):
    args = server_args(model_config(**target), **given)
    found = [feature.package.rpartition(".")[2] for feature in all_features() if feature.is_used(args)]
    assert found == sorted([*USED_BY_ALL, *used])
