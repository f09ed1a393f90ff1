"""`calibrate` against a stand-in for the server whose rounds follow a known distribution."""

import json

import pytest
from trace_server import GAMMA, ROUNDS_PER_ANSWER, STRETCH

from sglang_dspark.scheduling.sts import StsCalibration

NUM_PROMPTS = 40


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"prompt {i}"]}) + "\n" for i in range(NUM_PROMPTS)))
    return path


@pytest.fixture
def calibrate(run, server, prompts, tmp_path):
    """``calibrate(*options)`` runs the command on the stand-in; the file goes to ``tmp_path / "sts.json"``."""
    fixed = ("--url", server.url, "--prompts", prompts, "--output", tmp_path / "sts.json")
    return lambda *options: run("calibrate", *fixed, *options)


def test_temperatures_are_found_written_and_measured(calibrate, tmp_path, server):
    result = calibrate()
    assert result.exit_code == 0, result.output
    calibration = StsCalibration.load(tmp_path / "sts.json", GAMMA, target="Target-1B", draft="draft-1b")
    assert calibration.temperatures == pytest.approx([STRETCH] * GAMMA, rel=0.3)
    assert calibration.dataset == "prompts.jsonl"
    assert calibration.num_samples == 0.7 * NUM_PROMPTS * ROUNDS_PER_ANSWER
    # 1200 rounds: perfect predictions would show 0.03
    assert max(calibration.ece_after) < 0.06 < min(calibration.ece_before)

    rows = [words for line in result.output.splitlines() if (words := line.split())[:1] and words[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    held_out = 0.3 * NUM_PROMPTS * ROUNDS_PER_ANSWER
    assert float(rows[0][1]) == held_out > float(rows[1][1]) > float(rows[3][1])
    eces = (calibration.ece_before, calibration.ece_after)
    for row, temperature, *position_eces in zip(rows, calibration.temperatures, *eces, strict=True):
        assert row[2:5] == [f"{temperature:.3f}", *(f"{ece:.2%}" for ece in position_eces)]
        auc, brier_before, brier_after = map(float, row[6:])
        assert auc > 0.7
        assert brier_after < brier_before
    assert f"--speculative-dspark-confidence-sts-path {tmp_path / 'sts.json'}" in result.output


def test_what_the_server_is_asked(calibrate, server):
    assert calibrate("--max-tokens", 64, "--temperature", 0.7, "--limit", 20).exit_code == 0
    assert len(server.requests) == 20
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body == {
        "model": "default",
        "messages": body["messages"],
        "max_tokens": 64,
        "temperature": 0.7,
        "return_meta_info": True,
        "speculation": {"trace": True, "preset": "none"},
    }
    assert {body["messages"][0]["content"] for _, _, body in server.requests} == {f"prompt {i}" for i in range(20)}


def test_the_chat_template_gets_its_arguments(calibrate, server):
    """Without one: test_evaluate.py."""
    assert calibrate("--chat-template-kwargs", '{"enable_thinking": false}').exit_code == 0
    assert {str(body["chat_template_kwargs"]) for _, _, body in server.requests} == {"{'enable_thinking': False}"}


def test_raw_prompts_and_an_api_key(calibrate, server):
    assert calibrate("--raw", "--api-key", "secret", "--max-tokens", 64).exit_code == 0
    path, headers, body = server.requests[0]
    assert path == "/generate"
    assert headers["Authorization"] == "Bearer secret"
    assert body["sampling_params"] == {"max_new_tokens": 64, "temperature": 0.0}


def test_the_same_answers_give_the_same_file(calibrate, tmp_path):
    texts = []
    for concurrency in (1, 16):
        result = calibrate("--concurrency", concurrency)
        assert result.exit_code == 0, result.output
        texts.append((tmp_path / "sts.json").read_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"verified": GAMMA - 1}, "start the server with --speculative-dspark-schedule static"),
        ({"drafted": GAMMA - 1, "verified": GAMMA - 1}, "did not verify a whole block of drafts"),
        ({"verified": GAMMA - 1}, 'POST /dspark/policy {"policy": "static"}'),
        ({"has_head": False}, "the drafter has no confidence head"),
        ({"block_size": GAMMA + 1}, "start the server without --speculative-dspark-block-size"),
        ({"has_traces": False}, "no answer has a dspark_trace; serve with the sglang-dspark plugin"),
        ({"algorithm": None}, "--speculative-algorithm None; start it with --speculative-algorithm DSPARK"),
    ],
)
def test_servers_that_cannot_be_calibrated(calibrate, server, tmp_path, state, says):
    vars(server).update(state)
    result = calibrate()
    assert result.exit_code == 1
    assert says in result.output
    assert not (tmp_path / "sts.json").exists()


def test_a_server_that_refuses_a_prompt(calibrate, server, prompts):
    with prompts.open("a") as file:
        file.write('{"prompt": "refuse"}\n')
    result = calibrate("--concurrency", 1)
    assert (result.exit_code, "penalties are not served" in result.output) == (1, True)
    assert f"Error: {server.url}/v1/chat/completions: HTTP 400:" in result.output


def test_nobody_answers(calibrate):
    result = calibrate("--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "--url http://127.0.0.1:9: " in result.output
    assert "check that a DSPARK server is running there" in result.output
