"""Writes the tables of measured figures into the documents, computed from the files in ``benchmarks/results``.

    python benchmarks/tables.py

A table stands between two comments, of which the first one names its function in :data:`TABLES`. Beside the table its
function writes what was measured, and links the file. A test compares the documents with what this script writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import click
import support_matrix
from tabled import drafter, simulated, speeds, step_parts
from tabled.layout import RESULTS, markdown_table

ROOT = Path(__file__).resolve().parents[1]
DRAFTER = ROOT / "sglang_dspark" / "drafters" / "smollm2-135m-instruct" / "README.md"
DOCS = ROOT / "docs"
DOCUMENTS = (
    ROOT / "README.md",
    DRAFTER,
    ROOT / "benchmarks" / "README.md",
    *(DOCS / f"{name}.md" for name in ("performance", "scheduling", "support")),
)
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def support() -> str:
    """Return the support matrix."""
    return markdown_table(support_matrix.HEADER, list(support_matrix.rows(RESULTS)))


TABLES: dict[str, Callable[[], str]] = {
    "sweep": speeds.speeds,
    "h200_shape": speeds.shape,
    "equal_work": speeds.equal_work,
    "h200_pair": speeds.bundled_on_gpu,
    "attention": step_parts.attention,
    "fixed_lengths": speeds.fixed_lengths,
    "step_times": step_parts.step_times,
    "kernels": step_parts.kernels,
    "calibration": drafter.calibration,
    "accept_lengths": drafter.accept_lengths,
    "ablation": simulated.ablation,
    "adversarial": simulated.adversarial,
    "published": simulated.published,
    "support": support,
    "oracle": speeds.oracle,
    "draft_windows": drafter.draft_windows,
}


def written(document: Path) -> str:
    """Return the text of ``document`` with all its tables as the results have them."""

    def renew(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        content = TABLES[name]().replace("](", f"]({os.path.relpath(RESULTS, document.parent)}/")
        return f"{start}\n{content}\n\n{end}"

    return MARKED.sub(renew, document.read_text(encoding="utf-8"))


@click.command(help="Writes the tables of measured figures into the documents.")
def main() -> None:
    """Command line; see the module."""
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")


if __name__ == "__main__":
    main()
