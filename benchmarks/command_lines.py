"""Counts public command lines that start with DSPARK, here and in an earlier checkout, and flags by what they become.

    git worktree add ../before COMMIT
    python benchmarks/command_lines.py --before ../before --output benchmarks/results/command_lines.json

A line of ``tests/data/command_lines.toml`` starts if SGLang and the plugin resolve its arguments, for a tiny target of
its class, on a GPU that is faked. No server runs.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_dspark.tools import provenance

ROOT = provenance.REPOSITORY
SUPPORT = ROOT / "tests" / "support"
BY_ITSELF = "--outcomes"


def outcomes() -> list[dict[str, object]]:
    """Return what becomes of each line in this process, with the package that it imports."""
    from faked_gpu import Pairs
    from public_commands import LINES, outcome
    from sglang.srt.plugins import load_plugins

    from sglang_dspark.engine.launch import hooks

    load_plugins()
    hooks.install = lambda *places: None  # patches of SGLang would stay for the next line
    logging.disable()
    pairs = Pairs(Path(tempfile.mkdtemp()))
    for line in LINES:
        assert outcome(line.plain, pairs)["starts"], f"{line.source} does not start without DSPARK"
    return [outcome(line.with_dspark, pairs) for line in LINES]


def outcomes_in(checkout: Path) -> list[dict[str, object]]:
    """Return the same, with the package of a checkout."""
    paths = [checkout, checkout / "kernels", SUPPORT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        subprocess.run([sys.executable, __file__, BY_ITSELF, file], check=True, env=env)
        found: list[dict[str, object]] = json.loads(file.read_text())
    return found


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout."""
    words = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Write and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of an earlier commit")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    sys.path.append(str(SUPPORT))
    from public_commands import LINES, counted

    before, now = outcomes_in(args.before.resolve()), outcomes_in(ROOT)
    rows = [
        {"source": line.source, "gpu": line.gpu, "target": line.target, "flags": line.flags, "before": old, "now": new}
        for line, old, new in zip(LINES, before, now, strict=True)
    ]
    started = [sum(bool(one["starts"]) for one in found) for found in (before, now)]
    result = {"lines": len(rows), "start_before": started[0], "start_now": started[1], "flags_of_sglang": counted()}
    provenance.write_json(
        args.output, {**provenance.record(), "before": commit_of(args.before), **result, "command_lines": rows}
    )
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == [BY_ITSELF]:
        Path(sys.argv[2]).write_text(json.dumps(outcomes()))
    else:
        main()
