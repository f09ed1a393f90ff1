"""Tests of an environment that was switched for servers on a CPU, and of the stand-in's recurrent layers."""

import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from dspark_kernels import causal_conv_rows, commit_conv_windows, commit_gated_delta, gated_delta
from recurrent_rows import Rows, part, replayed

from sglang_dspark import on_cpu
from sglang_dspark.on_cpu import sgl_kernel
from sglang_dspark.on_cpu.sgl_kernel import mamba
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


def test_threads_spin_briefly_unless_the_user_says_otherwise(environment, driver):
    report = (
        "-c",
        "import sglang, os; print([os.environ.get(name) for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')])",
    )
    assert environment.run(*report) == f"{list(on_cpu.WAITING.values())}\n"
    assert environment.run(*report, OMP_WAIT_POLICY="ACTIVE") == "['ACTIVE', None]\n"
    assert environment.run(*report, GOMP_SPINCOUNT="7") == "[None, '7']\n"
    assert environment.run(*report, SGLANG_USE_CPU_ENGINE="0") == "[None, None]\n"
    assert environment.run(*report, LD_LIBRARY_PATH=driver) == "[None, None]\n"


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


HEADS, DIMS, CHANNELS = (2, 4), (6, 5), 7
SLOTS = [4, 2, 3]


@pytest.fixture
def made():
    return Rows(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("windows_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoded_token_is_convolved_as_a_verified_one(dtype, windows_dtype):
    made = Rows(torch.device("cpu"), dtype)
    x, weight, bias = made.conv(3, CHANNELS)
    expected = made.rand(6, CHANNELS, 3, dtype=windows_dtype)
    found, rows = expected.clone(), made.state_rows([1, 1, 1], SLOTS)
    out = mamba.causal_conv1d_update_cpu(x, found, weight, bias, "silu", conv_state_indices=rows.slots)
    torch.testing.assert_close(out, causal_conv_rows(x, weight, bias, expected, rows))
    commit_conv_windows(x[None], expected[None], replayed(rows, [1, 1, 1]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoded_token_advances_its_state_as_a_verified_one(dtype):
    made = Rows(torch.device("cpu"), dtype)
    q, inputs, gates = made.delta(3, HEADS, DIMS)
    expected = made.rand(6, HEADS[1], *DIMS[::-1], dtype=torch.float32)
    found, rows = expected.clone(), made.state_rows([1, 1, 1], SLOTS)
    out = decoded(q, inputs, gates, found, rows)
    torch.testing.assert_close(out, gated_delta(q, inputs, gates, expected, rows))
    commit_gated_delta(part(inputs, None), part(gates, None), expected[None], replayed(rows, [1, 1, 1]))
    torch.testing.assert_close(found, expected)


def decoded(q, inputs, gates, states, rows):
    """Outputs of rows of which each request has those of ``rows``; ``states`` advance."""
    return mamba.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=gates.a_log,
        dt_bias=gates.dt_bias,
        q=q[None],
        k=inputs.k[None],
        v=inputs.v[None],
        a=inputs.a,
        b=inputs.b,
        initial_state_source=states,
        initial_state_indices=rows.slots,
        cu_seqlens=rows.indptr,
    )[0]


@pytest.mark.parametrize("lens", [[3, 1, 5], [2, 2, 1]])
def test_prompts_at_once_are_their_tokens_one_by_one(made, lens):
    """Also those that go on after a prefix, and those shorter than a window."""
    total, rows = sum(lens), made.state_rows(lens, SLOTS, torch.int32)
    x, weight, bias = made.conv(total, CHANNELS)
    q, inputs, gates = made.delta(total, HEADS, DIMS)
    windows, states = made.rand(6, CHANNELS, 3), made.rand(6, HEADS[1], *DIMS[::-1])
    windows[SLOTS[1]] = 0.0
    one_by_one = SimpleNamespace(windows=windows.clone(), states=states.clone())
    windows[SLOTS[1]] = 9.0  # of whoever had the slot before
    found = mamba.causal_conv1d_fn_cpu(
        x.T,
        weight,
        bias,
        activation="silu",
        conv_states=windows,
        has_initial_state=torch.tensor([True, False, True]),
        cache_indices=rows.slots,
        query_start_loc=rows.indptr,
    ).T
    outputs = decoded(q, inputs, gates, states, rows)
    for first, end, slot in rows.with_rows():
        for row in range(first, end):
            at, single = slice(row, row + 1), made.state_rows([1], [slot])
            token = mamba.causal_conv1d_update_cpu(
                x[at], one_by_one.windows, weight, bias, "silu", conv_state_indices=single.slots
            )
            torch.testing.assert_close(found[at], token)
            expected = decoded(q[at], part(inputs, at), gates, one_by_one.states, single)
            torch.testing.assert_close(outputs[at], expected)
    torch.testing.assert_close(windows, one_by_one.windows)
    torch.testing.assert_close(states, one_by_one.states)


def test_norms_and_gates_are_their_formulas(made):
    x, gate, weight = made.rand(3, 8), made.rand(3, 8), made.rand(8)
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = unit * weight * torch.nn.functional.silu(gate)
    torch.testing.assert_close(sgl_kernel.layernorm_fn(x, weight, None, z=gate, eps=1e-6), expected)
    torch.testing.assert_close(sgl_kernel.rms_norm_gated(x, gate, weight, None, "silu", eps=1e-6), expected)
    found = sgl_kernel.rms_norm_gated(x, gate, weight, None, "sigmoid", eps=1e-6)
    torch.testing.assert_close(found, unit * weight * gate.sigmoid())

    shared, routed, scorer = made.rand(3, 8), made.rand(3, 8), made.rand(8)
    expected = routed + (x @ scorer).sigmoid()[:, None] * shared
    sgl_kernel.fused_gate_sigmoid_mul_add(x, scorer, shared, routed)
    torch.testing.assert_close(routed, expected)


def test_heads_are_split_and_normalised(made):
    q_gate, k, q_weight, k_weight = made.rand(2, 2 * 2 * 4), made.rand(2, 4), made.rand(4), made.rand(4)
    q, key, gate = sgl_kernel.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, 1e-6, 4, 2)
    heads = q_gate.view(2 * 2, 2, 4)
    assert torch.equal(gate, heads[:, 1]) and gate.is_contiguous()
    for found, given, weight in ((q, heads[:, 0], q_weight), (key, k, k_weight)):
        torch.testing.assert_close(found, given / (given.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight))

    qkvz, ba = torch.arange(2 * 18.0).view(2, 18), torch.arange(2 * 4.0).view(2, 4)
    mixed, z, b, a = sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 1, 2, 3, 3)
    assert (mixed.shape, z.shape) == ((2, 12), (2, 2, 3))
    assert mixed[1].tolist() == list(range(18, 30)) and z[1].flatten().tolist() == list(range(30, 36))
    assert (b[1].tolist(), a[1].tolist()) == ([4.0, 5.0], [6.0, 7.0])
