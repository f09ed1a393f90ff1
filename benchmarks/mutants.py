"""Break the code on purpose, one place at a time: the test that guards the place has to fail.

The list is tests/mutants.toml. It names functions and classes, not files, so that code and tests may move. Every change
is made in a copy of the working tree.
"""

from __future__ import annotations

import ast
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants.toml"
CODE, TESTS = ("sglang_dspark", "kernels/dspark_kernels", "training"), ("tests",)
TIMEOUT_S = 900
CAUGHT, SURVIVED, NOT_RUN = "caught", "SURVIVED", "NOT RUN"


@dataclass(frozen=True)
class Place:
    """A function, a class or a whole module.

    Attributes:
        file: relative to the repository.
        name: qualified, as `Class.method`; empty for a module.
        lines: its first and last one, counted from 1.
    """

    file: str
    name: str
    lines: tuple[int, int]

    @property
    def address(self) -> str:
        """Return a name like ``sglang_dspark.worker.graphs:GraphExecutor.run``; packages have no ``__init__``."""
        module = self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{module}:{self.name}" if self.name else module

    def is_called(self, text: str) -> bool:
        """Return whether this is its name; a module, and what comes before a colon, may be the end of a dotted path."""
        if ":" in text or not self.name:
            return f".{self.address}".endswith(f".{text}")
        return self.name == text


@cache
def places(folders: tuple[str, ...]) -> list[Place]:
    """Return all modules below the folders, their classes, and the functions of both."""

    def below(file: str, node: ast.AST, outer: str) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min(part.lineno for part in (child, *child.decorator_list))
                yield Place(file, outer + child.name, (first, child.end_lineno or first))
            if isinstance(child, ast.ClassDef):
                yield from below(file, child, f"{outer}{child.name}.")
            elif isinstance(child, ast.If | ast.Try | ast.With):
                yield from below(file, child, outer)

    found = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        file, source = path.relative_to(ROOT).as_posix(), path.read_text()
        found += [Place(file, "", (1, source.count("\n") + 1)), *below(file, ast.parse(source), "")]
    return found


def find(text: str, folders: tuple[str, ...]) -> Place:
    """Return the place with this name, which may have a module and a colon before it.

    Raises:
        ValueError: there is none, or there are several.
    """
    found = [place for place in places(folders) if place.is_called(text.replace("::", ":"))]
    if not found:
        raise ValueError(f"{text}: no function, class or module below {', '.join(folders)} has this name")
    if len(found) > 1:
        raise ValueError(f"{text}: name the module, too, of {' or '.join(place.address for place in found)}")
    return found[0]


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        place: what holds the text.
        old: text that occurs once in it.
        new: what takes its place.
        test: id of the test that has to fail.
        why: what would go wrong for a user.
    """

    place: Place
    old: str
    new: str
    test: str
    why: str

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Mutant:
        """Read an entry of the list.

        Raises:
            ValueError: its place or its test is not found.
        """
        function, bracket, parameters = entry["test"].partition("[")
        test = find(function, TESTS)
        test_id = f"{test.file}::{test.name}{bracket}{parameters}"
        return cls(find(entry["in"], CODE), entry["old"], entry["new"], test_id, entry["why"])

    def change(self, source: str) -> str:
        """Return what the file holds with the change.

        Raises:
            ValueError: the old text does not occur exactly once in its place.
        """
        lines, (first, last) = list(io.StringIO(source)), self.place.lines
        inside = "".join(lines[first - 1 : last])
        if (times := inside.count(self.old)) != 1:
            raise ValueError(f"{self.place.address}: {self.old!r} occurs {times} times, not once")
        return "".join([*lines[: first - 1], inside.replace(self.old, self.new), *lines[last:]])

    def apply(self, tree: Path) -> str:
        """Change the file below ``tree``; returns what it held."""
        path = tree / self.place.file
        source = path.read_text()
        path.write_text(self.change(source))
        return source


def read_entries() -> list[dict[str, Any]]:
    """Return the list as it is written."""
    entries: list[dict[str, Any]] = tomllib.loads(MUTANTS.read_text())["mutant"]
    return entries


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
        (tree / mutant.place.file).write_text(source)
    # Of pytest: 0 all passed, 1 some failed; the rest were not run, for an error of syntax perhaps.
    passed = SURVIVED if " passed" in done.stdout else NOT_RUN  # a test that is skipped shows nothing
    verdicts = {0: passed, 1: CAUGHT, -signal.SIGSEGV: CAUGHT}
    return verdicts.get(done.returncode, NOT_RUN), done.stdout + done.stderr


@click.command()
@click.option("--only", default="", help="Try those with this text in file, place, test or reason.")
@click.option("--jobs", default=1, show_default=True, help="Copies of the tree in which mutants are tried at once.")
def main(only: str, jobs: int) -> None:
    """Try every mutant of tests/mutants.toml and print a table; fail unless all are caught."""
    listed = [Mutant.of(entry) for entry in read_entries()]
    mutants = [m for m in listed if only in f"{m.place.file} {m.place.name} {m.test} {m.why}"]
    if not mutants:
        raise click.UsageError(f"no mutant has --only {only!r} in its file, place, test or reason")
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
            click.echo(f"{verdict:9} {seconds:5.0f} s  {mutant.place.file}: {mutant.why}")
            if verdict != CAUGHT:
                wrong += 1
                click.echo(f"  by {mutant.test}\n{printed[-1500:]}", err=True)
    click.echo(f"{len(mutants) - wrong} of {len(mutants)} caught")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
