"""Exceptions raised by sglang-dspark.

Every message names the flag, key or tensor, the value that was found, and what to do instead.
"""


class DSparkError(Exception):
    """Base class of all errors raised by this package."""


class ConfigError(DSparkError, ValueError):
    """A flag, environment variable or combination of server arguments that cannot work."""


class UnservedError(ConfigError):
    """A device, target or pair that DSPARK does not serve, whatever the options."""


class CheckpointError(DSparkError, ValueError):
    """A draft checkpoint that is missing, incomplete, misshapen or unfit for the target."""


class BusyError(DSparkError, RuntimeError):
    """The scheduler does not answer a question in time."""


class EngineError(DSparkError, RuntimeError):
    """This SGLang is not one the plugin can drive, or a hook did not take effect."""


class LaunchError(DSparkError, RuntimeError):
    """A server that was started as a child process died or never answered."""
