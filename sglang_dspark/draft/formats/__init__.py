"""The formats in which drafters are published, and their readers to one configuration and one set of tensor names."""

from sglang_dspark.draft.formats.checkpoint import read, read_config, read_content
from sglang_dspark.draft.formats.readers import Reading

__all__ = ["Reading", "read", "read_config", "read_content"]
