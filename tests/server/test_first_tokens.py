"""Promised first tokens of texts in many scripts, streamed and whole: no text changes, and each promise is counted."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from golden_server import call, last_answer, wait_until

FAMILY = "👨\u200d👩\u200d👧"
TEXTS = [
    "Привет, мир",
    "Καλημέρα κόσμε",
    "صباح الخير",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好，世界",
    "こんにちは世界",
    "안녕하세요",
    "გამარჯობა",
    f"{FAMILY}👍🏽🇩🇪❤\ufe0f",
    "e\u0301o\u0302\u0323",
]
# The server's promise for none.
ASKED = [None, {"ttft_ms": 0.1}, {"ttft_ms": 600_000}]
GREEDY = {"sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
BAD = [0, -1, 1e300, "5", "５０👍🏽", True, [5], {}, None]
NO_JSON = [float("inf"), float("nan"), 10**400]


def prompts(server):
    """Each text, and its tokens up to within its last letter."""
    tokens = server.post_json("/tokenize", {"model": "m", "prompt": TEXTS})["tokens"]
    return [{"text": text} for text in TEXTS] + [{"input_ids": ids[:-1]} for ids in tokens]


def test_texts_of_many_scripts_are_promised_first_tokens(advised, plain_letters):
    bodies = [GREEDY | prompt for prompt in prompts(advised)]
    expected = [plain_letters.post_json("/generate", body)["text"] for body in bodies]
    assert len(set(expected)) > len(TEXTS)
    wanted = [(body, place, asked) for place, body in enumerate(bodies) for asked in ASKED]
    sent = [body | {"speculation": asked, "stream": place % 2 == 0} for body, place, asked in wanted]
    before = advised.get_json("/dspark/stats")["promises"]
    with ThreadPoolExecutor(len(sent)) as pool:
        answers = list(pool.map(lambda body: last_answer(advised, body), sent))
    assert [answer["text"] for answer in answers] == [text for text in expected for _ in ASKED]
    promises = [answer["meta_info"].get("dspark_promise") for answer in answers]
    outcomes = [promise and (promise["promised_ttft_ms"], promise["ttft_outcome"]) for promise in promises]
    assert outcomes == [None, (0.1, "unreachable"), (600_000, "kept")] * len(bodies)
    after = advised.get_json("/dspark/stats")
    grown = {outcome: after["promises"][outcome] - before[outcome] for outcome in before}
    assert {outcome: count for outcome, count in grown.items() if count} == {
        "ttft_kept": len(bodies),
        "ttft_unreachable": len(bodies),
    }
    assert after["failed_advice"] == {}
    kept = re.compile(r'sglang:dspark_promises_total{.*kind="ttft".*outcome="kept".*} (.+)')
    wait_until(lambda: any(float(value) >= len(bodies) for value in kept.findall(call(advised, "/metrics")[1])))


def test_a_bad_promise_is_refused_by_name_beside_any_text(advised):
    for value, text in zip(BAD + NO_JSON, TEXTS, strict=True):
        status, answer = call(advised, "/generate", body=GREEDY | {"text": text, "speculation": {"ttft_ms": value}})
        assert status == 400
        bound = "speculation.ttft_ms must be a number from 0.1 to 600000, not "
        assert ("JSON decode error" if value in NO_JSON else bound) in answer
