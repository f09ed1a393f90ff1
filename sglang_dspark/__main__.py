"""``python -m sglang_dspark``."""

from sglang_dspark.cli import main

main()
