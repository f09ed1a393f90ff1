"""Gives a server the policy ``random``: in every step each request verifies another number of drafts, often none.

It also keeps the pace that a test asks for, and times steps of one context once at start-up, for a few seconds, where
users' servers do so five times with two contexts: no test depends on what a step takes.
Python imports this module at start-up when its folder is on ``PYTHONPATH``.
"""

import importlib
import os

from patching import (
    attend_literally,
    complete_cpu,
    compute_from_copies,
    keep_states_of_texts,
    offer_a_pace,
    offer_random_lengths,
    plant_faults,
    serve_sglangs_own,
)

plant_faults()
offer_random_lengths()
offer_a_pace()
compute_from_copies()
complete_cpu()
if "SGLANG_USE_CPU_ENGINE" in os.environ:
    serve_sglangs_own()
if "SNAPSHOTS_ON_A_CPU" in os.environ:
    keep_states_of_texts()
if "LITERAL_ATTENTION" in os.environ:
    attend_literally()


def at_start():
    """Emulate graphs where the environment says so; a forked server has imported everything by then."""
    if "EMULATED_GRAPHS" in os.environ:
        importlib.import_module("emulation").install()


at_start()
