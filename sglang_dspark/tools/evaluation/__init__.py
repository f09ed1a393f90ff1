"""Evaluate a drafter on sets of prompts: DeepSpec's accept-length protocol, on a running server or in process."""
