"""Targets of families that are refused."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_dspark.draft.families import FAMILIES, UNSERVED, family_of, left_to_sglang
from sglang_dspark.errors import UnservedError

OWN_DSPARK = (
    "SGLang's own worker may serve it on a GPU, with a drafter for it: --speculative-dspark-engine auto or builtin"
)


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
    with pytest.raises(UnservedError, match=f"perhaps {OWN_DSPARK}"):
        family_of(["NoSuchForCausalLM"])
    assert left_to_sglang(["NoSuchForCausalLM"]) == left_to_sglang(None) == "this plugin does not know its architecture"
    assert left_to_sglang(["LlamaForCausalLM"]) is None


@pytest.mark.parametrize("unserved", UNSERVED, ids=lambda unserved: unserved.architectures[0])
def test_who_serves_what_dspark_does_not(unserved):
    for architecture in unserved.architectures:
        with pytest.raises(UnservedError) as caught:
            family_of([architecture])
        assert unserved.instead in str(caught.value) and unserved.reason in str(caught.value)
        assert str(caught.value).endswith(OWN_DSPARK) == bool(unserved.own_dspark) <= captures(architecture)
        assert left_to_sglang([architecture]) == (unserved.reason if unserved.own_dspark else None)
    assert not unserved.reason.endswith(".")  # one sentence, with the remedy
    assert not {family.architecture for family in FAMILIES} & set(unserved.architectures)


@pytest.mark.parametrize(
    ("architecture", "recurrence"),
    [
        ("KimiLinearForCausalLM", "Kimi delta attention (KDA)"),
        ("NemotronHForCausalLM", "Mamba 2"),
        ("Lfm2MoeForCausalLM", "short convolutions"),
    ],
)
def test_a_recurrence_is_named(architecture, recurrence):
    with pytest.raises(UnservedError, match=re.escape(f"its layers of {recurrence} keep a recurrent state")):
        family_of([architecture])


@pytest.mark.parametrize(
    ("backend", "is_ragged"), [("kda", True), ("gdn", False), ("short_conv", False), ("lightning", False)]
)
def test_recurrences_that_sglangs_own_worker_verifies_raggedly(backend, is_ragged):
    """The source of SGLang's backends agrees with what the list says of its own worker."""
    [folder] = find_spec("sglang.srt.layers.attention.linear").submodule_search_locations
    text = (Path(folder) / f"{backend}_backend.py").read_text(encoding="utf-8")
    assert ("supports_ragged_verify_graph: bool = True" in text) == is_ragged
