"""Create `.venv` and install the project into it, in the versions that constraints.txt names.

With the number of another SGLang, create `.venv-NUMBER` on top of `.venv`: that SGLang, without its requirements but
the grammar libraries, in front of the packages of `.venv`, and a stand-in for SGLang's kernel package, which has none
for a CPU. So the server tests run against it on a CPU, and take 40 MB instead of the 12 GB of another torch.

Needs nothing but Python. uv does the installation (ten times faster than pip on this many large wheels) with the
machine's pip configuration translated; where that fails, pip itself gets its turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PROJECT = ["--editable", f"{ROOT}[demo,test,bench,dev]"]
CONSTRAINTS = ROOT / "constraints.txt"
SERVED_PYTHONS = ((3, 11), (3, 12))  # on 3.13 a dependency of sglang 0.5.15 has no wheel and wants a Rust compiler

# pip's option -> uv's variable. The environment wins over the files in both, so variables that are set stay.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}


def main(sglang: str | None = None) -> None:
    """Create or complete an environment; ends with a non-zero exit status when that is impossible.

    Args:
        sglang: the release to put on top of `.venv`; None for `.venv` itself.
    """
    if sys.version_info[:2] not in SERVED_PYTHONS:
        served = " or ".join(f"{major}.{minor}" for major, minor in SERVED_PYTHONS)
        sys.exit(f"needs Python {served}, this is {sys.version.split()[0]}; run: make env PYTHON=/path/to/python3.11")
    if sglang is not None:
        put_on_top(sglang)
        return
    create_environment()
    uv_pin = next(line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.startswith("uv=="))
    if run("-m", "pip", "install", "--quiet", uv_pin) and install_with_uv():
        return
    print("uv could not install the project; trying pip, which takes several minutes more", flush=True)
    if not run("-m", "pip", "install", "--constraint", str(CONSTRAINTS), *PROJECT):
        sys.exit("the installation failed; see the messages above")


def create_environment() -> None:
    """Make `.venv` with pip inside, unless a working one is there."""
    if PYTHON.exists() and run("-m", "pip", "--version"):
        return
    print(f"creating {VENV} with Python {sys.version.split()[0]}", flush=True)
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"Python's venv module cannot set up pip ({error}); on Debian and Ubuntu: apt install python3-venv")


def put_on_top(sglang: str) -> None:
    """Make `.venv-SGLANG` from `.venv`, which is there."""
    top = ROOT / f".venv-{sglang}"
    print(f"creating {top} on top of {VENV}", flush=True)
    venv.create(top, with_pip=False, clear=True)
    [packages] = top.glob("lib/python3.*/site-packages")
    [below] = VENV.glob("lib/python3.*/site-packages")
    lines = [str(ROOT / ".ci" / "on_cpu"), f"import site; site.addsitedir({str(below)!r})"]
    (packages / "below.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--python", str(top / "bin" / "python"), "--no-deps", "--compile-bytecode"]
    options += ["--index-strategy", "unsafe-best-match"]
    wanted = [f"sglang=={sglang}", *newer_beside(sglang)]
    if run("-m", "uv", "pip", "install", *options, *wanted, env=os.environ | uv_settings()):
        return
    if not run("-m", "pip", "install", "--no-deps", "--target", str(packages), *wanted):
        sys.exit(f"{' '.join(wanted)} could not be installed; see the messages above")


def newer_beside(sglang: str) -> list[str]:
    """Small packages that SGLang needs newer than `.venv` has them, as its constraints or the newest ones name them."""
    constraints = ROOT / f"constraints-{sglang}.txt"
    if not constraints.exists():
        constraints = max(ROOT.glob("constraints-*.txt"))
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(("llguidance==", "xgrammar=="))]


def install_with_uv() -> bool:
    """Install with uv; False when it fails."""
    options = ["--python", str(PYTHON), "--constraint", str(CONSTRAINTS), "--build-constraint", str(CONSTRAINTS)]
    # pip takes the best version that any index has; uv by itself stops at the first index that knows the name.
    options += ["--index-strategy", "unsafe-best-match"]
    # As pip does. Without bytecode, and where none may be written later, each of a server's processes compiles 7,000
    # modules when it starts, which doubles the time to start it.
    options += ["--compile-bytecode"]
    return run("-m", "uv", "pip", "install", *options, *PROJECT, env=os.environ | uv_settings())


def uv_settings() -> dict[str, str]:
    """Pip's configuration, of files and variables, as uv's variables."""
    listed = subprocess.run([PYTHON, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, quoted = line.partition("=")
        variable = UV_VARIABLES.get(key.rpartition(".")[2])
        if variable and variable not in os.environ:
            value = quoted.strip("'\"")
            settings[variable] = ",".join(value.split()) if variable == "UV_FIND_LINKS" else value
    return settings


def run(*arguments: str, env: dict[str, str] | None = None) -> bool:
    """Run the environment's Python; whether it succeeded."""
    return subprocess.run([PYTHON, *arguments], check=False, env=env, cwd=ROOT).returncode == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
