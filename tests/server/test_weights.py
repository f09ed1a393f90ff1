"""Weights that change under a server: it has the texts, log-probabilities and traces of the new pair."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any

import psutil
import pytest
import torch
from golden_replay import (
    FILE,
    answered,
    bare,
    from_disk,
    from_tensors,
    from_trainer,
    load_target,
    serialized,
    trained_drafter,
    tuned,
)
from golden_server import (
    CASES,
    DRAFT,
    DRAFTER_ALONE,
    PACE_MS,
    TARGET,
    assert_golden_traces,
    assert_pool_is_whole,
    assert_rounds_of_reference,
    call,
    endless,
    generate,
    greedy,
    in_background,
    policy,
    refused,
    rounds_of,
    wait_for_running,
)
from reference_decoding import decode_greedy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sglang_dspark.draft.weights import load_draft_model

PROMPT = CASES[0]["prompt_ids"]
LENGTH = 24
DRAFTER = "/dspark/drafter"


@cache
def reference(target, draft):
    """Return what a pair writes if the drafter reads the target's embedding and LM head, and log-probabilities."""
    model = load_draft_model(draft, dtype=torch.float32, device="cpu")
    model.embed_tokens = model.lm_head = None
    network = load_target(target, model)
    decoded = decode_greedy(model, network, PROMPT, max_new_tokens=LENGTH + 8)
    with torch.no_grad():
        logits, _ = network([*PROMPT, *decoded.output_ids])
    chosen = logits[len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(decoded.output_ids)[:, None])
    return decoded, chosen[:LENGTH, 0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    return tuned(folder / "target"), trained_drafter(folder / "draft")


def drafted(server, length: int = LENGTH) -> dict[str, Any]:
    with policy(server, "static"):
        answer: dict[str, Any] = server.post_json(
            "/generate", {**greedy(PROMPT, length, speculation=DRAFTER_ALONE), "return_logprob": True}
        )
    return answer


@pytest.mark.parametrize("update", [from_disk, from_tensors])
def test_a_server_follows_the_target(dspark, folders, update):
    decoded, logprobs = reference(folders[0], DRAFT)
    assert decoded.output_ids[:LENGTH] != CASES[0]["output_ids"][:LENGTH]
    version = update.__name__
    try:
        update(dspark, folders[0], weight_version=version)
        answer = drafted(dspark)
        by_version = dspark.get_json("/dspark/stats")["weight_versions"]
        named = [dspark.get_json("/dspark/capabilities")["target"][key] for key in ("path", "name")]
        listed = dspark.get_json("/v1/models")["data"][0]["id"]
    finally:
        update(dspark, TARGET, weight_version="default")
    assert named == [str(folders[0] if update is from_disk else TARGET)] * 2 and listed == named[1]
    assert_rounds_of_reference(answer, decoded)
    assert answer["meta_info"]["weight_version"] == version
    found = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=0)
    assert by_version[-1] | {"accept_length": 0} == {
        "weight_version": version,
        "drafter": str(DRAFT),
        "rounds": answer["meta_info"]["dspark"]["rounds"],
        "accept_length": 0,
        "drafter_fit": "unknown",
    }
    assert by_version[-1]["accept_length"] == answer["meta_info"]["dspark"]["accept_length"]
    assert_golden_traces(dspark, CASES[:1])


@pytest.mark.thorough
@pytest.mark.parametrize("route", ["disk", "tensors"])
def test_ten_updates_in_a_row_take_no_memory(dspark, folders, tmp_path, route):
    """No process of the server grows, nor does its K/V, and the texts are those of the last pair."""
    of_target, of_drafter = (from_disk, by_route) if route == "disk" else (from_tensors, by_selector)
    drafter = bare(folders[1], tmp_path / "bare")
    resident = []
    try:
        for _ in range(13):
            of_target(dspark, folders[0])
            of_drafter(dspark, drafter)
            answer = drafted(dspark)
            server = psutil.Process(dspark.pid)
            resident.append(sum(one.memory_info().rss for one in (server, *server.children(recursive=True))))
    finally:
        from_disk(dspark, TARGET)
        by_route(dspark, DRAFT)
    assert_rounds_of_reference(answer, reference(folders[0], drafter)[0])
    assert resident[-1] - resident[2] < 5 * (drafter / FILE).stat().st_size
    assert_pool_is_whole(dspark)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scheduled", "graphs", "parallel", "replicas"])
def test_other_servers_follow_the_target(request, folders, name, tmp_path):
    """SGLang's own worker, whose drafter would load the target's tensors; captured steps; two ranks or replicas."""
    server, length = request.getfixturevalue(name), 6
    decoded, _ = reference(folders[0], DRAFT)
    update = from_disk if name in ("scheduled", "replicas") else from_tensors
    try:
        update(server, folders[0])
        ids = server.post_json("/generate", greedy(PROMPT, length))["output_ids"]
        if name == "graphs":
            rounds = rounds_of(drafted(server, length))
            drafts = [r.block.tokens for r in decoded.rounds[: len(rounds)]]
            assert [found["draft"][: len(drafts[0])] for found in rounds] == drafts
        if name in ("parallel", "replicas"):
            by_route(server, bare(folders[1], tmp_path / "bare"))
            assert server.get_json("/dspark/capabilities")["drafter"]["path"] == str(tmp_path / "bare")
            assert server.post_json("/generate", greedy(PROMPT, length))["output_ids"] == ids
    finally:
        update(server, TARGET)
    if name in ("parallel", "replicas"):
        by_route(server, DRAFT)
    assert ids == decoded.output_ids[:length]
    assert server.post_json("/generate", greedy(PROMPT, length))["output_ids"] == CASES[0]["output_ids"][:length]


def test_a_server_follows_a_trainer(dspark, folders):
    """The route is the one on which the processes of a trainer broadcast their tensors."""
    decoded, _ = reference(folders[0], DRAFT)
    try:
        from_trainer(dspark, folders[0])
        answer = drafted(dspark)
    finally:
        from_disk(dspark, TARGET)
    assert_rounds_of_reference(answer, decoded)


HALTED: dict[str, tuple[dict[str, str] | None, dict[str, bool]]] = {
    "awaited": (None, {}),
    "aborted by the update": (None, {"abort_all_requests": True, "flush_cache": False}),
    "aborted by a pause": ({"mode": "abort"}, {}),
    "encoded again": ({"mode": "retract"}, {}),
    "continued": ({"mode": "in_place"}, {"flush_cache": False}),
}
"""What becomes of a request that an update meets: the pause before the update, and fields of the update."""
OFTEN = {("dspark", "encoded again")}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.thorough)
        for case in product(("dspark", "plain"), HALTED)
    ],
)
def test_a_request_that_an_update_meets(request, folders, name, how):
    """It is treated as on a plain server; greedy decoding says which text is right."""
    server, (pause, fields) = request.getfixturevalue(name), HALTED[how]
    body, answers = endless(PROMPT, 400, return_logprob=False, speculation={"max_verify": 1}), []
    old = server.post_json("/generate", body)["output_ids"]
    try:
        with policy(server, "static", pace_ms=PACE_MS) if name == "dspark" else nullcontext():
            thread = in_background(lambda: answers.append(server.post_json("/generate", body)))
            wait_for_running(server, 1)
            if pause:
                answered(server, "/pause_generation", pause)
            from_disk(server, folders[0], weight_version=how, **fields)
            if pause:
                answered(server, "/continue_generation", {})
        thread.join()
    finally:
        from_disk(server, TARGET, weight_version="default")
    ids, info = answers[0]["output_ids"], answers[0]["meta_info"]
    if "abort" in how:
        assert info["finish_reason"]["type"] == "abort" and 0 < len(ids) < 400 and ids == old[: len(ids)]
        return
    spans = [(span["version"], span["start"]) for span in info["weight_versions"]]
    if how == "awaited":
        assert ids == old and spans == [("default", 0)]
        return
    [(_, _), (version, begun)] = spans
    assert version == how and 0 < begun < 400
    # The step under way may still have had the old weights.
    kept = [count for count in range(begun, begun + 9) if ids[:count] == old[:count]]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (TARGET, folders[0])]
    assert any(goes_on(ids, count, models if how == "continued" else models[1:] * 2) for count in kept)


@torch.no_grad()
def goes_on(ids, count, models):
    """Return whether a text is greedy after so many tokens, if one target has encoded all but the last of them."""
    text = torch.tensor([[*PROMPT, *ids]])
    encoded = len(PROMPT) + count - 1
    known = models[0](text[:, :encoded]).past_key_values
    likeliest = models[1](text[:, encoded:-1], past_key_values=known).logits.argmax(-1)
    return torch.equal(likeliest, text[:, encoded + 1 :])


def test_a_target_of_nan_ends_no_server(dspark):
    """Its texts mean nothing, as on a plain server, until other weights come."""
    named = {"model.norm.weight": torch.full((128,), torch.nan)}
    try:
        from_tensors(dspark, named)
        for parameters in ({}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.5}):
            assert len(dspark.post_json("/generate", endless(PROMPT, 12, parameters))["output_ids"]) == 12
    finally:
        from_disk(dspark, TARGET)
    assert_golden_traces(dspark, CASES[:1])


def by_route(server, folder):
    answered(server, DRAFTER, {"path": str(folder)})


def by_disk(server, folder):
    answered(server, "/update_weights_from_disk", {"model_path": str(folder), "load_format": "draft"})


def by_prefix(server, folder):
    named = {f"draft.{name}": tensor for name, tensor in load_file(folder / FILE).items()}
    target = dict(list(load_file(TARGET / FILE).items())[:2])
    from_tensors(server, target | named)


def by_selector(server, folder):
    from_tensors(server, folder, selector="draft")


@pytest.mark.parametrize("update", [by_route, by_disk, by_prefix, by_selector])
def test_a_server_drafts_with_another_drafter(dspark, folders, update):
    decoded, _ = reference(TARGET, folders[1])
    try:
        update(dspark, folders[1])
        answer = drafted(dspark)
    finally:
        by_route(dspark, DRAFT)
    assert_rounds_of_reference(answer, decoded)
    assert dspark.get_json("/model_info")["model_path"] == str(TARGET)
    assert_golden_traces(dspark, CASES[:1])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks"), [("advised", 1), ("parallel", 2)])
def test_a_drafter_that_an_update_leaves_behind_is_named(request, name, ranks, tmp_path):
    """And one that is sent with its target is not."""
    server, answers = request.getfixturevalue(name), {}
    bodies = [endless(case["prompt_ids"], 128, speculation=DRAFTER_ALONE) for case in CASES]
    pair = load_file(TARGET / FILE) | {f"draft.{key}": tensor for key, tensor in load_file(DRAFT / FILE).items()}
    logged = len(server.log_path.read_text())
    try:
        with policy(server, "static"):
            from_disk(server, tuned(tmp_path / "target", by=3.0), weight_version="frozen")
            answers["frozen"] = generate(server, bodies[:2], 2)
            from_tensors(server, pair, weight_version="co-trained")
            answers["co-trained"] = generate(server, bodies, 4)
        found = {version["weight_version"]: version for version in server.get_json("/dspark/stats")["weight_versions"]}
        log = server.log_path.read_text()[logged:]
    finally:
        from_disk(server, TARGET, weight_version="default")
        by_route(server, DRAFT)
    for version, verdict in (("frozen", "misfit"), ("co-trained", "fits")):
        told = [answer["meta_info"] for answer in answers[version]]
        assert found[version]["drafter_fit"] == verdict
        assert found[version]["rounds"] == sum(info["dspark"]["rounds"] for info in told)
        assert {info["weight_version"] for info in told} == {version}
    assert found["frozen"]["accept_length"] < 1.2 < 2 < found["co-trained"]["accept_length"]
    assert log.count("hardly predicts this target") == ranks


def test_a_drafter_is_replaced_while_a_request_runs(dspark, folders):
    """Its text goes on as it would have, and nothing waits for its end."""
    answers: list[dict[str, Any]] = []
    body = endless(PROMPT, 800)
    [expected] = [dspark.post_json("/generate", body)["output_ids"]]
    with policy(dspark, "static", pace_ms=PACE_MS), ThreadPoolExecutor(4) as pool:  # they wait for each other
        thread = in_background(lambda: answers.append(dspark.post_json("/generate", body)))
        wait_for_running(dspark, 1)
        bodies = [{"path": str(folder)} for folder in (folders[1], DRAFT) * 2]
        said = list(pool.map(lambda asked: answered(dspark, DRAFTER, asked), bodies))
    thread.join()
    answered(dspark, DRAFTER, {"path": str(DRAFT)})
    assert "Requests are running" in said[0]["message"]
    assert answers[0]["output_ids"] == expected
    assert_golden_traces(dspark, CASES[:1])


@pytest.mark.parametrize(("route", "key"), [(DRAFTER, "path"), ("/dspark/policy", "policy")])
@pytest.mark.parametrize("more", [{"{key}": "\ud800"}, {"\udc00": 1}, {"{key}": "a\ud83d"}])
def test_half_of_a_letter_is_refused(dspark, route, key, more):
    """JSON can have it, UTF-8 cannot."""
    body = {key: "auto"} | {name.format(key=key): value for name, value in more.items()}
    assert "in UTF-8" in json.loads(refused(dspark, route, body))["message"]


def test_drafters_wait_as_other_calls_do(dspark):
    """So many, and next to those of other routes; the rest are told."""
    asked = [(DRAFTER, {"path": str(DRAFT)}), ("/dspark/policy", {"policy": "auto"})] * 24
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: call(dspark, one[0], body=one[1]), asked))
    refused = [json.loads(text)["message"] for status, text in answers if status == 503]
    assert {status for status, _ in answers} == {200, 503} and len(refused) <= len(asked) - 16
    assert all("16 calls already wait" in message for message in refused)
    assert {asked[place][0] for place, (status, _) in enumerate(answers) if status == 503} == {
        DRAFTER,
        "/dspark/policy",
    }
    assert_golden_traces(dspark, CASES[:1])


BAD: dict[str, tuple[str, Any, str]] = {
    "of another shape": ("target", {"model.embed_tokens.weight": torch.zeros(3, 3)}, "AssertionError"),
    "unreadable": ("target", ["bm9uc2Vuc2U="], "UnpicklingError"),
    "of no rank": ("target", [], "IndexError"),
    "of no drafter": ("all", {"draft.no.weight": torch.zeros(3)}, "unexpected no.weight"),
    "NaN": ("draft", {"norm.weight": torch.full((128,), torch.nan)}, "no finite numbers"),
}


DOWN = "model.layers.1.mlp.down_proj.weight"
DAMAGED: dict[str, Any] = {
    "is missing": {DOWN: None},
    "has the shape": {DOWN: lambda weight: weight[:, :100].contiguous()},
}


@pytest.mark.parametrize("named", DAMAGED)
def test_a_checkpoint_that_lacks_a_weight_is_refused_before_any_is_written(dspark, tmp_path, named):
    """SGLang alone would keep the old weight, or pad the new one."""
    damaged = tuned(tmp_path / "target")
    tensors = load_file(damaged / FILE)
    for name, change in DAMAGED[named].items():
        weight = tensors.pop(name)
        tensors |= {} if change is None else {name: change(weight)}
    save_file(tensors, damaged / FILE, metadata={"format": "pt"})
    message = json.loads(refused(dspark, "/update_weights_from_disk", {"model_path": str(damaged)}))["message"]
    assert f"{DOWN} {named}" in message and "No weight was changed" in message
    assert dspark.get_json("/dspark/stats")["weights"]["failure"] == message
    assert_golden_traces(dspark, CASES[:1])
    from_disk(dspark, TARGET)


def test_weights_that_do_not_fit_end_no_server(dspark):
    """Plain SGLang would end: it reads and writes them without a fence."""
    said = refused(dspark, "/update_weights_from_tensor", {"serialized_named_tensors": []})
    assert "begin_weight_update()" in said
    answered(dspark, "/begin_weight_update", {})
    for selector, tensors, named in BAD.values():
        sent = serialized(tensors) if isinstance(tensors, dict) else tensors
        body = {"serialized_named_tensors": sent, "selector": selector}
        message = json.loads(refused(dspark, "/update_weights_from_tensor", body))["message"]
        assert named in message
        assert dspark.get_json("/dspark/stats")["weights"]["failure"] == message
    assert refused(dspark, "/begin_weight_update", {})
    answered(dspark, "/end_weight_update", {})
    assert "sglang[checkpoint-engine]" in refused(dspark, "/update_weights_from_ipc", {"zmq_handles": {}})
    folder = "/no/such/folder"
    assert folder in refused(dspark, "/update_weights_from_disk", {"model_path": folder})
    assert_golden_traces(dspark, CASES[:1])
    from_disk(dspark, TARGET)
    assert dspark.get_json("/dspark/stats")["weights"]["failure"] is None
