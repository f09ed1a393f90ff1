"""Quantised drafters: codes, scales and zero points look like the one weight that they stand for.

The configuration beside the tensors tells the scheme, so that the rest of the loader reads ordinary tensors by their
ordinary names, one at a time. Compressed-tensors and gguf, which sglang requires, compute their own forms.
"""
