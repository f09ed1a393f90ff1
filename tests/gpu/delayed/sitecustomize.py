"""Has streams of a server fall behind each other at random, and overwrites what its steps leave behind.

Whatever is in order only because one stream happens to be faster than another is not in order here. Python imports this
module at start-up when its folder is on ``PYTHONPATH``.
"""

import logging
import random

from patching import late, patch_worker

logger = logging.getLogger(__name__)

MOST_CYCLES = 2_000_000  # a millisecond


def delay(module):
    """Delay each stream where it has waited for another one, and the stream of steps before each of them."""
    import torch

    luck, state = random.Random(0), {"serving": False}

    def sleep(stream):
        if state["serving"] and not torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(luck.randrange(MOST_CYCLES))

    def wait(self, stream=None, original=torch.cuda.Event.wait):
        original(self, stream)
        sleep(stream or torch.cuda.current_stream())

    def decode(*given, original=module.DSparkWorker.decode, **named):
        if not state["serving"]:
            state["serving"] = True
            logger.warning("streams are delayed")
        sleep(torch.cuda.current_stream())
        return original(*given, **named)

    torch.cuda.Event.wait, module.DSparkWorker.decode = wait, decode


patch_worker(late("stale", "spoil"))
patch_worker(delay)
