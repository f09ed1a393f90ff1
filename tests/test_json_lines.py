"""JSON lines end at line feeds alone."""

import pytest

from sglang_dspark.files import lines_of

SEPARATORS = "\u2028\u2029\u0085"  # ends of lines to Python, letters to JSON


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nb", "a\n\nb\n", f"a{SEPARATORS}b\nc"])
def test_lines_are_those_of_a_file(text, tmp_path):
    path = tmp_path / "lines"
    path.write_text(text, encoding="utf-8", newline="")
    with path.open(encoding="utf-8", newline="\n") as file:
        assert lines_of(text) == [line.removesuffix("\n") for line in file]
