"""What a sweep serves, asks, and in which order."""

from collections import Counter

import pytest
from serving.configurations import Configuration, choose_baselines, parse_configuration, parse_configurations
from serving.prompts import Prompt, load_mixed_prompts, load_prompts, round_prompts
from serving.schedule import WARM_UP_ROUND, interleave

from sglang_dspark.errors import ConfigError

PLAIN, STATIC, OTHER = (Configuration(label, "plain", "", "float32") for label in ("plain", "static", "other"))


def test_static_configuration_becomes_flags_and_a_policy():
    configuration = parse_configuration("static:3@float32 --speculative-dspark-block-size 5", "bfloat16")
    assert configuration.label == "static:3@float32 --speculative-dspark-block-size 5"
    assert configuration.verify_len == 3
    assert configuration.server_flags("DRAFT") == (
        *("--dtype", "float32", "--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "DRAFT"),
        *("--speculative-dspark-block-size", "5"),
    )
    assert configuration.policy_fields == {"policy": "static", "verify_len": 3}


def test_threshold_configuration_sets_the_threshold():
    configuration = parse_configuration("threshold:0.35", "bfloat16")
    assert configuration.policy_fields == {"policy": "threshold", "confidence_threshold": 0.35}


def test_plain_configuration_needs_no_drafter_and_takes_the_default_dtype():
    configuration = parse_configuration("again=plain", "float16")
    assert configuration.label == "again"
    assert configuration.server_flags(None) == ("--dtype", "float16")
    assert configuration.verify_len is None


def test_speculation_without_a_drafter_is_refused():
    with pytest.raises(ConfigError, match="--draft"):
        parse_configuration("auto", "float32").server_flags(None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "form"),
        ("static:", "form"),
        ("eagle", "eagle"),
        ("plain@int8", "int8"),
        ("plain:3", "plain takes no argument"),
        ("auto:3", "auto takes no argument"),
        ("static:-1", "'-1'"),
        ("static:x", "'x'"),
        ("threshold", "0 to 1"),
        ("threshold:1.5", "0 to 1"),
    ],
)
def test_malformed_configurations_are_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_configuration(text, "float32")


def test_equal_labels_are_refused():
    with pytest.raises(ConfigError, match="again="):
        parse_configurations(["plain", "plain"], "float32")
    assert len(parse_configurations(["plain", "again=plain"], "float32")) == 2


def test_baseline_is_the_plain_configuration_of_the_same_dtype():
    served = [
        ("a", "static", "float32"),
        ("b", "plain", "float32"),
        ("c", "auto", "bfloat16"),
        ("d", "off", "bfloat16"),
    ]
    assert choose_baselines(served) == {"a": "b", "b": "b", "c": "c", "d": "c"}


def test_every_configuration_runs_equally_often_at_every_position():
    configurations = [PLAIN, STATIC, OTHER]
    cells = [cell for cell in interleave(configurations, [1, 8], 6) if not cell.is_warm_up]
    assert len(cells) == 3 * 2 * 6
    for concurrency in (1, 8):
        seen = Counter((cell.configuration, cell.position) for cell in cells if cell.concurrency == concurrency)
        assert set(seen.values()) == {2} and len(seen) == 9


def test_cells_that_are_compared_run_in_a_row():
    cells = interleave([PLAIN, STATIC, OTHER], [1, 8], 2)
    groups = [cells[start : start + 3] for start in range(0, len(cells), 3)]
    for group in groups:
        assert len({(cell.concurrency, cell.round) for cell in group}) == 1
        assert {cell.configuration for cell in group} == {PLAIN, STATIC, OTHER}
        assert [cell.position for cell in group] == [0, 1, 2]
    assert [(group[0].round, group[0].concurrency) for group in groups] == [
        *((WARM_UP_ROUND, 1), (WARM_UP_ROUND, 8), (0, 1), (0, 8), (1, 1), (1, 8)),
    ]


def test_rounds_take_consecutive_prompts_and_start_over():
    prompts = [Prompt(index, str(index)) for index in range(5)]
    assert [p.index for p in round_prompts(prompts, 0, 3)] == [0, 1, 2]
    assert [p.index for p in round_prompts(prompts, 1, 3)] == [3, 4, 0]
    assert [p.index for p in round_prompts(prompts, WARM_UP_ROUND, 2)] == [3, 4]


def test_first_turn_of_every_line_is_the_prompt(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one", "more"]}\n{"turns": ["two \\u00e9"]}\n', encoding="utf-8")
    assert load_prompts(path) == [Prompt(0, "one"), Prompt(1, "two é")]


@pytest.mark.parametrize("line", ["{}", "[1]", '{"turns": []}', '{"turns": [3]}', '{"turns": "text"}', "text", ""])
def test_malformed_prompt_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2"):
        load_prompts(path)


def test_prompt_files_take_turns(tmp_path):
    for name, count in (("a", 3), ("b", 2)):
        lines = [f'{{"turns": ["{name}{index}"]}}' for index in range(count)]
        (tmp_path / name).write_text("\n".join(lines))
    mixed = load_mixed_prompts([tmp_path / "a", tmp_path / "b"])
    assert mixed == [Prompt(index, text) for index, text in enumerate(("a0", "b0", "a1", "b1"))]


def test_missing_and_empty_prompt_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        load_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="empty"):
        load_prompts(tmp_path / "empty.jsonl")
