"""Has the replicas of a server do one after another what would disturb the others."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch import distributed

_FOR_EVER = timedelta(days=1)  # SGLang ends the processes of a server of which one has failed


@contextmanager
def turn(start: str, replica: int, replicas: int) -> Iterator[None]:
    """Wait until all replicas have come here, and those before this one have been through the block.

    Args:
        start: names this start of the server.
        replica: number of this one, from 0; one of its ranks calls.
        replicas: their number.
    """
    path = Path(tempfile.gettempdir()) / f"sglang-dspark-{start}"
    store = distributed.FileStore(str(path), replicas)  # type: ignore[attr-defined]
    store.set(f"{replica} is here", "")
    here, through = (f"{other} is here" for other in range(replicas)), (f"{done} is through" for done in range(replica))
    store.wait([*here, *through], _FOR_EVER)
    try:
        yield
    finally:
        store.set(f"{replica} is through", "")
