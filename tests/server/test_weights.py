"""New weights of the target: a server has the texts, log-probabilities and traces of the new pair."""

from __future__ import annotations

import json

import pytest
import torch
from changed_weights import answered, from_disk, from_tensors, serialized, tuned
from golden_replay import load_target
from golden_server import (
    CASES,
    DRAFT,
    DRAFTER_ALONE,
    TARGET,
    assert_golden_traces,
    assert_rounds_of_reference,
    call,
    greedy,
    policy,
)
from reference_decoding import decode_greedy

from sglang_dspark.draft.weights import load_draft_model

PROMPT = CASES[0]["prompt_ids"]
LENGTH = 24


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """A target, and what it writes with the golden drafter, which reads its embedding and LM head."""
    folder = tuned(tmp_path_factory.mktemp("tuned") / "target")
    model = load_draft_model(DRAFT, dtype=torch.float32, device="cpu")
    model.embed_tokens = model.lm_head = None
    target = load_target(folder, model)
    decoded = decode_greedy(model, target, PROMPT, max_new_tokens=LENGTH + 8)
    assert decoded.output_ids[:LENGTH] != CASES[0]["output_ids"][:LENGTH]
    with torch.no_grad():
        logits, _ = target([*PROMPT, *decoded.output_ids])
    chosen = logits[len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(decoded.output_ids)[:, None])
    return folder, decoded, chosen[:LENGTH, 0]


@pytest.mark.parametrize("update", [from_disk, from_tensors])
def test_a_server_follows_the_target(dspark, new, update):
    folder, decoded, logprobs = new
    body = {**greedy(PROMPT, LENGTH, speculation=DRAFTER_ALONE), "return_logprob": True}
    try:
        update(dspark, folder, weight_version="new")
        with policy(dspark, "static"):
            answer = dspark.post_json("/generate", body)
    finally:
        update(dspark, TARGET)
    assert_rounds_of_reference(answer, decoded)
    assert answer["meta_info"]["weight_version"] == "new"
    found = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=0)
    assert_golden_traces(dspark, CASES[:1])


BAD = {
    "of another shape": (serialized({"model.embed_tokens.weight": torch.zeros(3, 3)}), "AssertionError"),
    "unreadable": (["bm9uc2Vuc2U="], "UnpicklingError"),
    "of no rank": ([], "IndexError"),
}


def test_weights_that_do_not_fit_end_no_server(dspark):
    """SGLang alone would end: it reads and writes them without a fence."""
    before = call(dspark, "/update_weights_from_tensor", body={"serialized_named_tensors": []})
    assert before[0] == 400 and "begin_weight_update()" in before[1]
    answered(dspark, "/begin_weight_update", {})
    for tensors, named in BAD.values():
        status, text = call(dspark, "/update_weights_from_tensor", body={"serialized_named_tensors": tensors})
        message = json.loads(text)["message"]
        assert status == 400 and named in message and "goes on with what it has" in message
    assert call(dspark, "/begin_weight_update", body={})[0] == 400
    answered(dspark, "/end_weight_update", {})
    status, text = call(dspark, "/update_weights_from_disk", body={"model_path": "/no/such/folder"})
    assert status == 400 and "/no/such/folder" in text
    assert_golden_traces(dspark, CASES[:1])
