"""Break the code on purpose, one place at a time: the test that guards the place has to fail.

The list is tests/mutants.toml. Every change is made in a copy of the working tree.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import click

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants.toml"
TIMEOUT_S = 900
CAUGHT, SURVIVED, NOT_RUN = "caught", "SURVIVED", "NOT RUN"


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: relative to the repository.
        old: text that occurs once in it.
        new: what takes its place.
        test: id of the test that has to fail.
        why: what would go wrong for a user.
    """

    file: str
    old: str
    new: str
    test: str
    why: str

    def apply(self, tree: Path) -> str:
        """Change the file below ``tree``; returns what it held.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        path = tree / self.file
        source = path.read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {source.count(self.old)} times, not once")
        path.write_text(source.replace(self.old, self.new))
        return source


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """Return the list."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]


def copy_tree(target: Path) -> None:
    """Copy the files that git knows, or would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy of the tree, with its code."""
    # Two changes within a second may leave a file as old and as long as it was: bytecode would be taken for fresh.
    paths = {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        command, cwd=tree, env=os.environ | paths, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def try_one(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """Return the verdict, and what pytest printed."""
    source = mutant.apply(tree)
    try:
        done = run_tests(tree, [mutant.test])
    finally:
        (tree / mutant.file).write_text(source)
    # Of pytest: 0 all passed, 1 some failed; the rest were not run, for an error of syntax perhaps.
    passed = SURVIVED if " passed" in done.stdout else NOT_RUN  # a test that is skipped shows nothing
    verdicts = {0: passed, 1: CAUGHT, -signal.SIGSEGV: CAUGHT}
    return verdicts.get(done.returncode, NOT_RUN), done.stdout + done.stderr


@click.command()
@click.option("--only", default="", help="Try those with this text in file, test or reason.")
@click.option("--jobs", default=1, show_default=True, help="Copies of the tree in which mutants are tried at once.")
def main(only: str, jobs: int) -> None:
    """Try every mutant of tests/mutants.toml and print a table; fail unless all are caught."""
    mutants = [m for m in read_mutants() if only in f"{m.file} {m.test} {m.why}"]
    if not mutants:
        raise click.UsageError(f"no mutant has --only {only!r} in its file, test or reason")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            tree = Path(folder) / str(job)
            copy_tree(tree)
            trees.put(tree)
        unchanged = run_tests(tree, sorted({mutant.test for mutant in mutants}))
        if unchanged.returncode != 0:
            raise click.ClickException(f"the tests fail without any change:\n{unchanged.stdout[-4000:]}")

        def judge(mutant: Mutant) -> tuple[float, str, str]:
            tree, start = trees.get(), time.monotonic()
            try:
                verdict, printed = try_one(mutant, tree)
            finally:
                trees.put(tree)
            return time.monotonic() - start, verdict, printed

        wrong = 0
        for mutant, (seconds, verdict, printed) in zip(mutants, pool.map(judge, mutants), strict=True):
            click.echo(f"{verdict:9} {seconds:5.0f} s  {mutant.file}: {mutant.why}")
            if verdict != CAUGHT:
                wrong += 1
                click.echo(f"  by {mutant.test}\n{printed[-1500:]}", err=True)
    click.echo(f"{len(mutants) - wrong} of {len(mutants)} caught")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
