"""An environment that was switched for servers on a CPU: what its processes import, with and without a GPU's driver."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sglang_dspark import on_cpu
from sglang_dspark.tools.cli import main

PACKAGE = Path(on_cpu.__file__).parents[2]
# Stands for SGLang, whose import takes seconds.
SGLANG = "import os\nengine = os.environ.get('SGLANG_USE_CPU_ENGINE')\n"
REPORT = "import sglang, importlib.util as u; print(sglang.engine, u.find_spec('sgl_kernel').origin)"


class Environment:
    """A virtual environment with this package, an SGLang and a kernel package for CUDA."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        [self.packages] = folder.glob("lib/python3*/site-packages")
        self._python = folder / "bin" / "python"
        (self.packages / "a.pth").write_text("\n".join([str(PACKAGE), *(path for path in sys.path if path)]))
        (self.packages / "sglang.py").write_text(SGLANG)
        self.kernels = self.packages / "sgl_kernel"
        (self.kernels / "sm90").mkdir(parents=True)
        for file in ("__init__.py", "sm90/common_ops.abi3.so"):
            (self.kernels / file).touch()

    def run(self, *arguments: str, **env: str) -> str:
        return subprocess.run([self._python, *arguments], env=env, check=True, capture_output=True, text=True).stdout

    def imports(self, **env: str) -> tuple[str, str]:
        """Return what SGLang is told to serve on, and the file of its kernel package."""
        engine, kernels = self.run("-c", REPORT, **env).split()
        return engine, kernels


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    found = Environment(tmp_path_factory.mktemp("environment"))
    assert "wrote" in found.run("-m", "sglang_dspark", "enable-cpu")
    return found


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Folder of a library with the name of the driver."""
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", folder / "libcuda.so.1"], check=True)
    return str(folder)


@pytest.mark.skipif(on_cpu.has_driver(), reason="this machine has the driver of a GPU")
def test_without_a_driver_the_stand_in_is_imported(environment):
    assert environment.imports() == ("1", on_cpu.STAND_IN)


def test_with_a_driver_nothing_changes(environment, driver):
    assert environment.imports(LD_LIBRARY_PATH=driver) == ("None", str(environment.kernels / "__init__.py"))


def test_what_the_user_said_of_the_engine_stays(environment):
    assert environment.imports(SGLANG_USE_CPU_ENGINE="0") == ("0", str(environment.kernels / "__init__.py"))


def test_threads_wait_without_a_core_unless_the_user_says_otherwise(environment, driver):
    report = ("-c", "import sglang, os; print(os.environ.get('OMP_WAIT_POLICY'))")
    assert environment.run(*report) == "PASSIVE\n"
    assert environment.run(*report, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE\n"
    assert environment.run(*report, SGLANG_USE_CPU_ENGINE="0") == "None\n"
    assert environment.run(*report, LD_LIBRARY_PATH=driver) == "None\n"


def test_a_kernel_package_for_cpus_is_left_alone(environment):
    build = environment.kernels / "common_ops.abi3.so"
    build.touch()
    try:
        assert environment.imports()[1] == str(environment.kernels / "__init__.py")
    finally:
        build.unlink()


def test_an_environment_that_the_package_has_left_is_silent(environment):
    line = (environment.packages / "sglang_dspark_on_cpu.pth").read_text()
    assert on_cpu.__file__ in line
    gone = [sys.executable, "-I", "-S", "-c", line.replace(on_cpu.__file__, "/gone/__init__.py")]
    done = subprocess.run(gone, check=True, capture_output=True, text=True)
    assert done.stdout == done.stderr == ""


def test_a_program_imports_the_package_that_it_chooses(environment, tmp_path):
    """The package is found like that of another working tree, in the folder where the process starts."""
    (tmp_path / "sglang_dspark.py").touch()
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sglang_dspark; print(sglang_dspark.__file__)"
    assert environment.run("-c", program).strip() == str(tmp_path / "sglang_dspark.py")


def test_enable_cpu_is_undone(tmp_path, monkeypatch):
    monkeypatch.setattr(on_cpu, "path_file", lambda: tmp_path / "on_cpu.pth")
    run = CliRunner().invoke
    assert run(main, ["enable-cpu"]).exit_code == 0 and on_cpu.is_enabled()
    result = run(main, ["enable-cpu", "--undo"])
    assert "removed" in result.output and not on_cpu.is_enabled()
    assert run(main, ["enable-cpu", "--undo"]).exit_code == 0  # there is nothing to undo


def test_an_environment_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(on_cpu, "path_file", lambda: tmp_path / "absent" / "on_cpu.pth")
    result = CliRunner().invoke(main, ["enable-cpu"])
    assert result.exit_code == 1 and "on_cpu.pth cannot be written" in result.output


def test_the_stand_in_knows_what_sglang_imports_and_nothing_else():
    from sglang_dspark.on_cpu import sgl_kernel

    with pytest.raises(NotImplementedError, match="build_tree_kernel_efficient_cpu does not exist on a CPU"):
        sgl_kernel.build_tree_kernel_efficient_cpu()
    with pytest.raises(AttributeError):
        sgl_kernel.gelu_and_mul  # noqa: B018


def test_the_stand_in_writes_slots_where_sglang_reads_them():
    """Requests may be in any rows of the table, and one of them needs none."""
    from sglang_dspark.on_cpu import sgl_kernel

    table, slots = torch.zeros(4, 8, dtype=torch.int32), torch.arange(1, 6)
    begins, ends = (torch.tensor(columns, dtype=torch.int32) for columns in ([2, 5, 0], [5, 5, 2]))
    sgl_kernel.assign_req_to_token_pool_cpu(torch.tensor([3, 1, 0]), table, begins, ends, slots, 8)
    expected = torch.zeros(4, 8, dtype=torch.int32)
    expected[3, 2:5], expected[0, :2] = torch.tensor([1, 2, 3]), torch.tensor([4, 5])
    assert torch.equal(table, expected)
