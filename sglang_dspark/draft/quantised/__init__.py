"""Quantised drafters: how each scheme stores a weight, and the weight that it stands for.

A scheme is recognised by the configuration beside the tensors (:mod:`recognition`), or by the form of the file. While a
checkpoint is open, its codes, scales and zero points look like the one tensor that they stand for
(:mod:`modules`), so that the rest of the loader reads ordinary tensors by their ordinary names, one at a time.
Compressed-tensors and the gguf package, which sglang requires, compute their own forms.
"""
