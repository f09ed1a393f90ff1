"""The list of SGLang's fields that we touch holds on this release."""

import ast
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs

from sglang_dspark.engine import sglang_types

PROTOCOLS = [
    found
    for found in vars(sglang_types).values()
    if getattr(found, "_is_protocol", False) and found.__module__ == sglang_types.__name__
]
NOT_THERE = {
    "mrope_deltas",  # ours
    "get_internal_state_communicator",  # of a list of channels, by name
}


def attributes_in(source):
    """Return the attributes that a module uses: most are set as it goes."""
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_sglang_has_what_we_touch(protocol):
    [path] = re.findall(r"^``(sglang\.[\w.]+)``", protocol.__doc__)
    there = pkgutil.resolve_name(path)
    known = {*dir(there), *(name for base in there.__mro__ for name in vars(base).get("__annotations__", ()))}
    known |= {field.name for field in record_fields(there)} if there is ServerArgs else set()
    known |= attributes_in(Path(inspect.getsourcefile(there)).read_text())
    touched = {*protocol.__annotations__, *(name for name, of in vars(protocol).items() if inspect.isfunction(of))}
    assert {name for name in touched - known if not name.startswith("__")} <= NOT_THERE
