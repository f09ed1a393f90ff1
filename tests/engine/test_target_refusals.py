"""Targets of families that are refused."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_dspark.draft.families import FAMILIES, UNSERVED, family_of, is_left_to_sglang
from sglang_dspark.errors import UnservedError


@cache
def models():
    """Classes of SGLang's models by name: their parents and their text. Some import on a GPU alone."""
    found = {}
    for file in Path(find_spec("sglang.srt.models").submodule_search_locations[0]).glob("*.py"):
        for text in re.split(r"^(?=class )", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            name, parents = re.match(r"class (\w+)(?:\((.*?)\))?:", text, re.DOTALL).groups()
            found[name] = re.findall(r"\w+", parents or ""), text
    return found


def captures(architecture):
    """Return whether SGLang's own worker can ask the class, or a base of it, for hidden states."""
    parents, text = models().get(architecture, ((), ""))
    return bool(re.search(r"def set_(dflash|dspark)_layers_to_capture", text)) or any(map(captures, parents))


def test_an_unknown_target_is_told_of_sglangs_own():
    with pytest.raises(UnservedError, match="SGLang's own worker may serve it on a GPU"):
        family_of(["NoSuchForCausalLM"])
    assert is_left_to_sglang(["NoSuchForCausalLM"]) and is_left_to_sglang(None)
    assert not is_left_to_sglang(["LlamaForCausalLM"])


@pytest.mark.parametrize("architecture", UNSERVED)
def test_what_no_dspark_serves_is_refused_with_the_reason(architecture):
    with pytest.raises(UnservedError) as caught:
        family_of([architecture])
    assert str(caught.value).endswith(UNSERVED[architecture])
    assert not is_left_to_sglang([architecture])
    assert architecture not in {family.architecture for family in FAMILIES}


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM"])
def test_what_is_left_to_sglang_can_be_asked_for_hidden_states(architecture):
    assert is_left_to_sglang([architecture]) and captures(architecture)


@pytest.mark.parametrize(
    ("backend", "is_ragged"), [("kda", True), ("gdn", False), ("short_conv", False), ("lightning", False)]
)
def test_recurrences_that_sglangs_own_worker_verifies_raggedly(backend, is_ragged):
    """The source of SGLang's backends agrees with what the list says of its own worker."""
    [folder] = find_spec("sglang.srt.layers.attention.linear").submodule_search_locations
    text = (Path(folder) / f"{backend}_backend.py").read_text(encoding="utf-8")
    assert ("supports_ragged_verify_graph: bool = True" in text) == is_ragged
