"""Options that name a model."""

from pathlib import Path

import click


class Checkpoint(click.ParamType):  # type: ignore[type-arg]  # generic in some releases of click, not in others
    """A folder, or a name on the Hugging Face hub, whose files are downloaded; the folder in both cases.

    The same values as of ``--model-path`` and ``--speculative-draft-model-path``.
    """

    name = "folder|name"

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, Path):
            return value
        from sglang_dspark.hub import local_folder

        flag = value if param is None else param.opts[-1]
        return Path(local_folder(value, flag=flag))
