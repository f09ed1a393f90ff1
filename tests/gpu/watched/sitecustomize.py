"""Makes a server log every wait for the device in a decode step.

Python imports this module at start-up when its folder is on ``PYTHONPATH``.
"""

import logging
import warnings

from patching import patch_worker

logger = logging.getLogger(__name__)


def watch(module):
    """Let PyTorch warn of synchronising calls inside ``decode``, and write the warnings to the log."""
    import torch

    def decode(*given, original=module.DSparkWorker.decode, **named):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return original(*given, **named)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                for warning in caught:
                    if "called a synchronizing" in str(warning.message):
                        logger.warning("waits for the device: %s:%d", warning.filename, warning.lineno)

    module.DSparkWorker.decode = decode


patch_worker(watch)
