"""``python -m sglang_dspark``."""

from sglang_dspark.tools.cli import main

main()
