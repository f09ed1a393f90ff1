"""Access the parts of SGLang that may move with its next release. If a move would go unnoticed, the part is probed.

Numbers of releases appear in `engine.support` alone.
"""
