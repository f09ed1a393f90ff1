"""Gives a server the policy ``random``: in every step each request verifies another number of drafts, often none.

It also times steps of one context once at start-up, for a few seconds, where users' servers do so five times with two
contexts: no test depends on what a step takes.
Python imports this module at start-up when its folder is on ``PYTHONPATH``.
"""

import os

from patching import attend_with_sinks, complete_cpu, patch_worker


def offer(module):
    """Let ``POST /dspark/policy`` take ``{"policy": "random"}`` too, and the step times be known soon."""
    from random_policy import RandomPolicy

    from sglang_dspark.scheduling import sps_profiler
    from sglang_dspark.worker.startup import measure_steps

    sps_profiler.MAX_PASSES, measure_steps._CONTEXTS, measure_steps.LIMIT_S["cpu"] = 1, (64,), 6.0

    def switch_policy(self, fields, original=module.DSparkWorker.switch_policy):
        if fields != {"policy": "random"}:
            return original(self, fields)
        self.schedule.policy = RandomPolicy(self.max_verify)
        return {"policy": "random"}

    module.DSparkWorker.switch_policy = switch_policy


patch_worker(offer)
complete_cpu()
if "ATTENTION_SINKS" in os.environ:
    attend_with_sinks()
