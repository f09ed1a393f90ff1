"""Tests of `evaluate` and `calibrate` against a fake server whose rounds follow a known distribution.

`evaluate` also runs in process on the golden pair; rounds are counted by hand, and tables fit.
"""

import io
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_server import GAMMA, ROUNDS_PER_ANSWER, STRETCH
from rich.console import Console

from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sts import StsCalibration
from sglang_dspark.tools.cli.measure import _tables
from sglang_dspark.tools.evaluation import Answer, MeasuredSet, recorded_blocks
from sglang_dspark.tools.simulator.workload import RecordedBlocks

NUM_PROMPTS = 20


@pytest.fixture
def sets(tmp_path):
    """Two files of prompts."""
    paths = []
    for name in ("math", "chat"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"turns": [f"{name} {i}", "later"]}) + "\n" for i in range(NUM_PROMPTS)))
        paths += ["--prompts", path]
    return paths


def true_acceptance():
    """Mean of a sigmoid of N(1, 1.5): what the stand-in accepts a draft with."""
    logits = np.random.default_rng(0).normal(1.0, 1.5, size=1_000_000)
    return float((1 / (1 + np.exp(-logits))).mean())


@pytest.mark.slow
def test_everything_is_measured_and_written(run, server, sets, tmp_path):
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "jsonl")}
    outputs = ["--output", paths["json"], "--blocks", paths["jsonl"]]
    result = run("evaluate", "--url", server.url, *sets, *outputs, "--temperature", 0.5)
    assert result.exit_code == 0, result.output

    content = json.loads(paths["json"].read_text())
    assert (content["target"], content["draft"]) == ("Target-1B", "draft-1b")
    assert content["protocol"] == {
        "max_tokens": 128,
        "temperature": 0.5,
        "limit": None,
        "shuffle_seed": None,
        "raw": False,
        "chat_template_kwargs": {},
    }
    assert [prompts["file"] for prompts in content["prompts"]] == ["math.jsonl", "chat.jsonl"]
    assert {"command", "commit", "versions", "hardware"} <= content.keys()
    assert [one["set"] for one in content["results"]] == ["math", "chat"]
    rate = true_acceptance()
    for one in content["results"]:
        assert one["rounds"] == NUM_PROMPTS * ROUNDS_PER_ANSWER
        expected = sum(rate**k for k in range(GAMMA + 1))
        assert one["accept_length"] == pytest.approx(expected, abs=5 * one["standard_error"])
        assert one["conditional"] == pytest.approx([rate] * GAMMA, abs=0.07)
        assert one["survival"][0] == pytest.approx(rate, abs=0.04)
        # The head's logits are stretched, so it is too sure of itself.
        assert min(row["ece"] for row in one["confidence"]) > 0.05

    blocks = RecordedBlocks.load(paths["jsonl"])
    assert len(blocks.accepted) == 2 * NUM_PROMPTS * ROUNDS_PER_ANSWER
    assert blocks.logits.std() == pytest.approx(1.5 * STRETCH, rel=0.05)
    asked = [body["messages"][0]["content"] for _, _, body in server.requests]
    assert sorted(asked) == sorted(f"{name} {i}" for name in ("math", "chat") for i in range(NUM_PROMPTS))
    assert {body["temperature"] for _, _, body in server.requests} == {0.5}


def test_a_chat_template_that_is_left_out_takes_no_arguments(run, server, sets):
    options = ("--raw", "--chat-template-kwargs", '{"enable_thinking": false}')
    result = run("evaluate", "--url", server.url, *sets, *options)
    assert result.exit_code == 2
    assert "has no effect with --raw" in " ".join(result.output.split())
    result = run("evaluate", "--url", server.url, *sets, "--chat-template-kwargs", "[1]")
    assert result.exit_code == 2
    assert "'[1]' is not a JSON object" in result.output


def test_in_process_the_chat_template_gets_its_arguments(run, sets, target, draft, tmp_path):
    chat = Path(shutil.copytree(target, tmp_path / "chat", copy_function=shutil.copyfile))
    refusal = "{% if think is not defined %}{{ raise_exception('nobody said whether to think') }}{% endif %}"
    (chat / "chat_template.jinja").write_text(refusal + "{{ messages[0]['content'] }}")
    options = ("--target", chat, "--draft", draft, "--limit", 2, "--max-tokens", 12)
    silent = run("evaluate", *sets, *options)
    assert "nobody said whether to think" in str(silent.exception)
    result = run("evaluate", *sets, *options, "--chat-template-kwargs", '{"think": false}')
    assert result.exit_code == 0, result.output


def test_a_drafter_without_a_confidence_head(run, server, sets):
    server.has_head = False
    result = run("evaluate", "--url", server.url, *sets, "--limit", 5)
    assert result.exit_code == 0, result.output
    assert "given all before" in result.output
    assert "ECE" not in result.output


def test_in_process_with_and_without_the_markov_head(run, sets, target, draft, tmp_path):
    options = ("--target", target, "--draft", draft, "--raw", "--limit", 6, "--max-tokens", 16)
    result = run("evaluate", *sets, *options, "--output", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(one["set"], one["markov"]) for one in results] == [
        (name, markov) for name in ("math", "chat") for markov in (True, False)
    ]
    assert all(1 <= one["accept_length"] <= 8 and len(one["survival"]) == 7 for one in results)


def test_in_process_with_a_list_and_rounded_weights(run, sets, target, draft, tmp_path):
    save_token_ids(tmp_path / "list.json", range(0, 256, 2))
    options = ("--target", target, "--draft", draft, "--raw", "--limit", 6, "--max-tokens", 16)
    lean = ("--draft-vocabulary", tmp_path / "list.json", "--draft-quantization", "int8")
    result = run("evaluate", *sets, *options, *lean, "--output", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    keys = ("proposed_tokens", "quantization", "markov")
    rounds = {tuple(map(one.get, keys)): one["num_rounds"] for one in found["results"] if one["set"] == "math"}
    ways = [(proposed, form, True) for form in (None, "int8") for proposed in (128, 256)]
    assert rounds.keys() == {*ways, (128, None, False)}
    assert rounds[256, None, True] < rounds[128, None, True] and len({rounds[way] for way in ways}) == 4
    assert found["draft_vocabulary"][0]["file"] == "list.json"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--target and --draft belong together"),
        (("--draft", "DRAFT", "--blocks", "x.jsonl"), "are for a server"),
        (("--draft", "DRAFT", "--temperature", 0.7), "with --target it is 0 or 1"),
        (("--draft-quantization", "int8"), "a server has --speculative-dspark-draft-quantization"),
    ],
)
def test_options_that_do_not_go_together(run, sets, target, draft, options, says):
    in_process = () if "--draft-quantization" in options else ("--target", target)
    result = run("evaluate", *sets, *in_process, *(draft if value == "DRAFT" else value for value in options))
    assert result.exit_code == 2
    assert says in result.output


CALIBRATION_PROMPTS = 40


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"prompt {i}"]}) + "\n" for i in range(CALIBRATION_PROMPTS)))
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
    assert calibration.num_samples == 0.7 * CALIBRATION_PROMPTS * ROUNDS_PER_ANSWER
    # 1200 rounds: perfect predictions would show 0.03
    assert max(calibration.ece_after) < 0.06 < min(calibration.ece_before)

    rows = [words for line in result.output.splitlines() if (words := line.split())[:1] and words[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    held_out = 0.3 * CALIBRATION_PROMPTS * ROUNDS_PER_ANSWER
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


MEASURED_GAMMA = 3
SURE, UNSURE = 3.0, -3.0


def measured_set(name, answers):
    return MeasuredSet.from_answers(name, answers, MEASURED_GAMMA)


def answer(accepted, *, stopped=False, num_tokens=None, confidence=None, verified=MEASURED_GAMMA):
    """An answer with these drafts accepted round by round; the first token comes from prefill."""
    trace = [None]
    for index, count in enumerate(accepted):
        logits = [SURE] * MEASURED_GAMMA if confidence is None else confidence[index]
        entry = {"start": 0, "anchor": 0, "draft": [7] * MEASURED_GAMMA, "confidence": logits, "verified": verified}
        trace += [entry | {"accepted": count}, *[None] * count]
    return Answer(trace, len(trace) if num_tokens is None else num_tokens, stopped)


def test_rounds_are_pooled_over_the_answers():
    measured = measured_set("set", [answer([3, 0]), answer([1])])
    assert measured.accept_length == pytest.approx((4 + 1 + 2) / 3)
    assert measured.survival == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert measured.conditional == pytest.approx([2 / 3, 1 / 2, 1])
    assert measured.verify_rate == pytest.approx(7 / 12)
    assert (measured.num_answers, len(measured.accepted)) == (2, 3)


def test_an_accepted_stop_token_ends_the_round_without_a_bonus():
    # One token of prefill; of three accepted drafts the second is the stop token.
    measured = measured_set("set", [answer([3], stopped=True, num_tokens=3)])
    assert (measured.proposed.tolist(), measured.accepted.tolist(), measured.committed.tolist()) == ([2], [2], [2])
    assert measured.survival == [1, 1, 0]  # nobody proposed a third one


def test_a_stop_token_that_the_target_adds_is_a_bonus_token():
    measured = measured_set("set", [answer([1], stopped=True, num_tokens=3)])
    assert (measured.proposed.tolist(), measured.committed.tolist()) == ([MEASURED_GAMMA], [2])


def test_an_answer_that_is_cut_by_its_length_counts_its_last_round_in_full():
    measured = measured_set("set", [answer([3], num_tokens=2)])
    assert measured.accept_length == 4


@pytest.mark.parametrize(("num_answers", "share"), [(2, 0.5), (10, 0.3), (97, 0.25), (4, 0.9)])
def test_whole_answers_are_held_out_all_over_the_set(num_answers, share):
    measured = measured_set("set", [answer([0, 1, 2, 0, 1])] * num_answers)
    test = measured.held_out(share)
    fitted, held_out = set(measured.answer[~test]), set(measured.answer[test])
    assert not fitted & held_out
    assert len(held_out) == pytest.approx(share * num_answers, abs=1)
    assert len(held_out) < 10 or np.diff(sorted(held_out)).max() <= 1 / share + 1


def test_a_split_without_rounds_on_one_side():
    with pytest.raises(ConfigError, match=r"--held-out 0.3 of 2 prompts leaves no round in the held-out part"):
        measured_set("set", [answer([1])] * 2).held_out(0.3)
    with pytest.raises(ConfigError, match="in the fit part"):
        measured_set("set", [answer([]), answer([1])]).held_out(0.5)


def test_calibration_of_a_head_that_is_right_and_of_one_that_is_not():
    logit = float(np.log(0.75 / 0.25))
    answers = [answer([1 if n % 4 else 0], confidence=[[logit, UNSURE, UNSURE]]) for n in range(400)]
    first = measured_set("set", answers).confidence()[0]
    assert first["ece"] == pytest.approx(0.0, abs=1e-9)
    assert first["brier"] == pytest.approx(0.1875)
    assert (first["predicted_mean"], first["observed_mean"]) == pytest.approx((0.75, 0.75))
    wrong = measured_set("set", [answer([0], confidence=[[logit] * 3])]).confidence()[0]
    assert wrong["ece"] == pytest.approx(0.75)
    assert wrong["auc"] is None


def test_the_standard_error_is_that_of_repeated_samples():
    rng = np.random.default_rng(0)

    def sample():
        """Answers of different difficulty."""
        answers = [answer(rng.binomial(MEASURED_GAMMA, rng.choice([0.2, 0.8]), size=12).tolist()) for _ in range(50)]
        return measured_set("set", answers)

    sets = [sample() for _ in range(300)]
    spread = np.std([one.accept_length for one in sets])
    assert np.mean([one.standard_error for one in sets]) == pytest.approx(spread, rel=0.12)


def test_blocks_for_the_simulator_take_the_sets_in_turn_and_leave_out_what_stopped():
    easy = measured_set("easy", [answer([3, 3]), answer([3], stopped=True, num_tokens=2)])
    hard = measured_set("hard", [answer([0]), answer([1, 0])])
    blocks = recorded_blocks([easy, hard], "both")
    assert blocks.accepted.tolist() == [3, 3, 0, 1, 0]
    assert blocks.answer.tolist() == [0, 0, 1, 3, 3]
    assert blocks.logits.shape == (5, MEASURED_GAMMA)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([], "ended with its first token"),
        ([answer([])], "ended with its first token"),
        ([answer([1], verified=2)], "--speculative-dspark-schedule static"),
    ],
)
def test_rounds_that_say_nothing_about_the_drafter(answers, says):
    with pytest.raises(ConfigError, match=says):
        measured_set("set", answers)


SHOWN_GAMMA, COLUMNS = 7, 100


def shown_set(name, rounds=400, *, has_head=True):
    rng, trace = random.Random(name), [None]
    for _ in range(rounds):
        confidence = [rng.gauss(1, 2) for _ in range(SHOWN_GAMMA)] if has_head else None
        accepted = rng.randint(0, SHOWN_GAMMA)
        entry = {"draft": [7] * SHOWN_GAMMA, "confidence": confidence, "verified": SHOWN_GAMMA, "accepted": accepted}
        trace += [entry, *[None] * accepted]
    return MeasuredSet.from_answers(name, [Answer(trace, len(trace), False)], SHOWN_GAMMA)


@pytest.mark.parametrize("has_head", [True, False])
def test_tables_fit_a_hundred_columns(has_head):
    measured = [shown_set(name, has_head=has_head) for name in ("gsm8k", "humaneval", "mt-bench", "livecodebench")]
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    for table in _tables(measured):
        assert console.measure(table).maximum <= COLUMNS
        console.print(table)
    shown = console.export_text()
    assert f"{measured[3].conditional[SHOWN_GAMMA - 1]:.3f}" in shown
