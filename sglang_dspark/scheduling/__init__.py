"""Decides what a step drafts and how much it verifies, from measured step times and expected survivals.

Nothing here knows of SGLang: every decision can be tested in milliseconds, without a server.
"""
