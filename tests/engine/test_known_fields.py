"""What SGLang can be asked for, as far as somebody has looked: a new name fails here until it is served or refused.

`data/sglang_fields.json` lists the names of all releases that are served. Before a name is added to it,
`server_args.py` or `front_end/requests.py` has to refuse what DSPARK does not serve.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.engine.compat import arguments

KNOWN: dict[str, list[str]] = json.loads((Path(__file__).parents[1] / "data" / "sglang_fields.json").read_text())
NAMES = {
    "arguments": lambda: {field.name for field in arguments.fields()},
    "request": lambda: {field.name for field in dataclasses.fields(GenerateReqInput)},
    "sampling": lambda: {field.name for field in msgspec.structs.fields(SamplingParams)},
}


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_has_been_looked_at(kind):
    found = NAMES[kind]()
    assert len(found) > 10
    assert sorted(found - set(KNOWN[kind])) == []


def test_names_are_in_order_and_once():
    assert all(names == sorted(set(names)) for names in KNOWN.values())
