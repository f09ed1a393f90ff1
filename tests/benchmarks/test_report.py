"""Tests of reports: figures, pages, paired ratios, the judge of texts in 16 bits, and tables of the documents.

Pairs of a shape are as large as the released ones, and are served without weights.
"""

import csv
import json
import re
from collections import Counter
from math import prod
from statistics import median

import numpy as np
import pandas as pd
import pytest
import report
import torch
from click.testing import CliRunner
from golden_replay import load_golden
from judge import LEAK, NEAR_TIE, Judge, judged_tokens, power
from paired_ratio import frame_baselines, main, paired_ratios, ratios_to_each, spread_of, summarise
from scipy.stats import ttest_1samp
from serving.results import with_loads
from shape_pair import SHAPES, write_pair
from stage_loop import DATA, DRAFT
from tables import DOCUMENTS, MARKED, RESULTS, ROOT, TABLES, written
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

RECORD = {
    "command": "python sweep.py <&>",
    "target": "target",
    "draft": "drafter",
    "prompts": [{"file": "set.jsonl"}],
    "sampling": {"max_tokens": 96, "temperature": 0.0},
    "hardware": {"cpu": "some CPU, 2 cores", "gpu": ""},
    "versions": {"sglang": "1"},
    "commit": "0123456789abcdef",
}
GAINS = {"plain@float32": (1.0, 1.0, 1.0), "static:7@float32": (2.0, 1.0, 0.5), "auto@float32": (2.0, 1.5, 1.1)}
USERS = (1, 4, 16)


def sweep():
    """Plain, a fixed length that loses at many users, and auto; the machine drifts from round to round."""
    rows = []
    for config, gains in GAINS.items():
        policy = re.match("[a-z]+", config).group()
        for users, gain in zip(USERS, gains, strict=True):
            for index, speed in enumerate((10.0, 30.0, 20.0)):
                counts = {"verified": 60, "decode_rounds": 20, "accepted": 15, "steps": 20, "plain_steps": 5}
                if policy == "plain":
                    counts = dict.fromkeys(counts)
                figures = {"output_tok_s": gain * speed * users, "per_user_tok_s": gain * speed, "accept_length": 1.75}
                figures |= {
                    "ttft_ms": 100.0,
                    "tpot_ms": 20.0,
                    "itl_p50_ms": 30.0,
                    "itl_p95_ms": 40.0,
                    "itl_p99_ms": 50.0,
                }
                row = {"config": config, "policy": policy, "concurrency": users, "round": index}
                row |= {"dtype": "float32", "timestamp": "2026-01-01T00:00:00+00:00"}
                rows.append(row | {"verify_len": 7 if policy == "static" else None} | figures | counts)
    return pd.DataFrame(rows)


def test_points_are_medians_with_the_range_as_bars():
    (panel,) = report.draw(with_loads(sweep())).axes
    line, _, (bars,) = {bar.get_label(): bar for bar in panel.containers}["plain"]
    assert line.get_xydata().tolist() == [[1, 20], [4, 80], [16, 320]]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[10, 30], [40, 120], [160, 480]]
    assert {text.get_text() for text in panel.get_legend().get_texts()} == {"plain", "static:7", "auto"}


@pytest.mark.slow
def test_report_has_all_parts(tmp_path):
    sweep().to_csv(tmp_path / "sweep.csv", index=False)
    (tmp_path / "provenance.json").write_text(json.dumps(RECORD))
    result = CliRunner().invoke(report.main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.md").read_text()
    assert f"]({report.FIGURE})" in page and (tmp_path / report.FIGURE).read_bytes().startswith(b"\x89PNG")
    for title in ("Speed", "Latency", "Speculation", "Where the numbers come from"):
        assert f"\n## {title}\n" in page
    assert "python sweep.py <&>" in page and "max_tokens 96" in page
    assert re.search(r"\| 1 user \| auto \| 40.0 \| - \| 40.0 \| - \| 2\.00 \| plain \| 2\.00 to 2\.00 \|", page)


TARGET = DATA / "target"
TOKENS = 64


@pytest.fixture(scope="module")
def judge():
    return Judge(TARGET, "cpu", NEAR_TIE["bfloat16"])


@pytest.fixture(scope="module")
def prompts():
    return [case.prompt_ids[:length] for case in load_golden(DRAFT).cases for length in (6, 9)]


@torch.inference_mode()
def written_pair(prompts, *, together, leak=0.0):
    """Return texts of a server in bfloat16 that runs so many prompts at a time, of which some tokens are wrong."""
    network = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    generator, texts = torch.Generator().manual_seed(1), []
    for start in range(0, len(prompts), together):
        batch = prompts[start : start + together]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        cache, columns = DynamicCache(), []
        for _ in range(TOKENS):
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = network(ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
            # The runner-up is what is hardest to notice.
            wrong = (torch.rand(len(batch), 1, generator=generator) < leak).long()
            ids = output.logits[:, -1].topk(2).indices.gather(1, wrong)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            columns.append(ids)
        texts += torch.cat(columns, dim=1).tolist()
    return texts


@pytest.mark.slow
def test_two_plain_servers_pass_and_a_leak_does_not(judge, prompts):
    expected, other = written_pair(prompts, together=8), written_pair(prompts, together=3)
    splits = judge.splits(prompts, expected, other)
    assert all(split.explained for split in splits)
    leaking = written_pair(prompts, together=3, leak=LEAK)
    found = judge.splits(prompts, expected, leaking, [other])
    assert any(not split.explained for split in found)
    # Six of ten tokens of this small target are near-ties, which excuse a leak.
    assert power(judged_tokens(leaking, found), judge.tie_share(prompts, expected)) > 0.7


def test_a_split_of_the_target_alone_is_excused(judge, prompts):
    expected, got, other = [4, 5, 6], [4, 9, 1], [4, 9, 7]
    [split] = judge.splits(prompts[:1], [expected], [got])
    assert (split.position, split.expected, split.got, split.explained) == (1, 5, 9, split.near_tie)
    assert judge.splits(prompts[:1], [expected], [got], [[other]])[0].emitted
    assert not judge.splits(prompts[:1], [expected], [got], [[[8, 9, 1]]])[0].emitted
    assert judge.splits(prompts[:1], [expected], [expected]) == []


def test_a_text_that_merely_ends_earlier_is_no_near_tie(judge, prompts):
    [split] = judge.splits(prompts[:1], [[4, 5, 6]], [[4, 5]])
    assert not split.explained
    assert judge.splits(prompts[:1], [[4, 5, 6]], [[4, 5]], [[[4, 5]]])[0].explained


def test_only_what_comes_before_a_difference_is_judged(judge, prompts):
    texts, expected = [[4, 9, 1, 1], [4, 5, 6, 7]], [[4, 5, 6, 7]] * 2
    assert judged_tokens(texts, judge.splits(prompts[:2], expected, texts)) == 2 + 4


def test_power_is_that_of_a_count():
    draws = torch.rand((20_000, 300), generator=torch.Generator().manual_seed(0))
    ties = torch.rand(draws.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    noticed = ((draws < LEAK) & ~ties).any(dim=1).double().mean()
    assert power(300, 0.1) == pytest.approx(float(noticed), abs=0.01)


DRIFT = [10.0, 40.0, 5.0, 80.0, 20.0, 60.0]


def ratio_sweep(ratios, *, concurrency=4):
    """Plain and static rounds on a machine whose speed drifts; static is ``ratios`` times as fast."""
    rows = []
    for index, (speed, ratio) in enumerate(zip(DRIFT, ratios, strict=False)):
        for config, policy, factor in (("p", "plain", 1.0), ("s", "static", ratio)):
            row = {"config": config, "policy": policy, "dtype": "float32", "concurrency": concurrency, "round": index}
            rows.append(row | {"output_tok_s": speed * factor, "versions": "x=1"})
    return with_loads(pd.DataFrame(rows))


def ratios_of(frame, **options):
    return paired_ratios(frame, "output_tok_s", frame_baselines(frame, **options))


def test_pairing_removes_the_drift():
    (row,) = summarise(ratios_of(ratio_sweep([1.1] * 6))).itertuples()
    assert (row.config, row.baseline, row.load, row.rounds, row.above) == ("s", "p", "4 users", 6, 6)
    assert (row.ratio, row.low, row.high) == pytest.approx((1.1, 1.1, 1.1))


def test_interval_is_that_of_the_mean_logarithm():
    ratios = [1.0, 1.2, 0.9, 1.5, 1.1, 1.3]
    interval = ttest_1samp(np.log(ratios), 0).confidence_interval(0.95)
    (row,) = summarise(ratios_of(ratio_sweep(ratios))).itertuples()
    assert row.ratio == pytest.approx(np.exp(np.log(ratios).mean()))
    assert (row.low, row.high) == pytest.approx((np.exp(interval.low), np.exp(interval.high)))
    assert (row.smallest, row.largest, row.above) == (pytest.approx(0.9), pytest.approx(1.5), 4)


def test_interval_covers_the_true_ratio_as_often_as_it_says_even_with_few_rounds():
    """1000 sweeps of 5 rounds: of 95 % intervals, 36 to 64 miss in all but one case in 25."""
    logs = np.random.default_rng(0).normal(0.2, 0.1, (1000, 5))
    pairs = pd.DataFrame({"config": "s", "baseline": "p", "load": np.repeat(np.arange(1000), 5)})
    summary = summarise(pairs.assign(ratio=np.exp(logs.ravel())))
    missed = 1000 - int(((summary["low"] <= np.exp(0.2)) & (np.exp(0.2) <= summary["high"])).sum())
    assert 36 <= missed <= 64


def test_command_prints_the_table(tmp_path):
    path = tmp_path / "sweep.csv"
    ratio_sweep([1.25] * 3).to_csv(path, index=False)
    result = CliRunner().invoke(main, [str(path)])
    assert result.exit_code == 0 and "1.25 (1.25 to 1.25)" in result.output and "3/3" in result.output


def test_one_configuration_against_each_of_the_others():
    slow, fast = ratio_sweep([0.8] * 6, concurrency=8), ratio_sweep([1.3] * 6, concurrency=1)
    ours = [part[part["config"] == "p"].assign(config="auto", policy="auto") for part in (slow, fast)]
    frame = pd.concat([slow, fast, *(part.assign(output_tok_s=part["output_tok_s"] * 1.1) for part in ours)])
    summary = summarise(ratios_to_each(frame, "output_tok_s", "auto"))
    assert set(summary["config"]) == {"auto"}
    assert summary[["load", "baseline"]].to_numpy().tolist() == [
        ["8 users", "p"], ["8 users", "s"], ["1 user", "p"], ["1 user", "s"]
    ]  # fmt: skip
    assert summary["ratio"].tolist() == pytest.approx([1.1, 1.1 / 0.8, 1.1, 1.1 / 1.3])
    for label, part in (("none", frame), ("auto", frame[frame["config"] == "auto"])):
        with pytest.raises(ConfigError, match=label):
            ratios_to_each(part, "output_tok_s", label)


def test_a_ratio_comes_with_its_spread_of():
    """JSON has no NaN for an interval of few rounds."""
    found = {"rounds": 2, "ratio": 1.0, "low": None, "high": None, "smallest": 0.5, "largest": 2.0}
    assert spread_of([2.0, 0.5]) == found
    of_four = spread_of([1.2, 1.3, 1.2, 1.3])
    assert 1.1 < of_four["low"] < of_four["ratio"] < of_four["high"] < 1.4


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_hold_the_tables_of_the_files(document):
    assert document.read_text(encoding="utf-8") == written(document), "write them with python benchmarks/tables.py"


def test_every_table_stands_in_one_document():
    """A marker in any other document would never be renewed."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *(ROOT / "sglang_dspark").rglob("*.md")]
    found = Counter(match.group(2) for file in files for match in MARKED.finditer(file.read_text(encoding="utf-8")))
    assert found == dict.fromkeys(TABLES, 1)
    assert {file for file in files if "<!-- table:" in file.read_text(encoding="utf-8")} == set(DOCUMENTS)


def test_the_table_of_the_readme_is_computed_as_it_says():
    """Medians of the rounds, and the geometric mean of the ratios of each round; here without pandas."""
    with (RESULTS / "sweep" / "sweep.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["concurrency"] == "1"]
    speeds = {
        policy: {row["round"]: float(row["output_tok_s"]) for row in rows if row["policy"] == policy}
        for policy in ("plain", "off", "auto")
    }
    expected = [median(by_round.values()) for by_round in speeds.values()]
    for above, below in (("off", "plain"), ("auto", "off")):
        ratios = [speed / speeds[below][index] for index, speed in speeds[above].items()]
        expected.append(prod(ratios) ** (1 / len(ratios)))
    (row,) = re.findall(r"^\| 1 \|(.*)\|$", TABLES["sweep"](), re.MULTILINE)
    cells = [float(cell.split()[0]) for cell in row.split("|")]
    assert cells[:3] == pytest.approx(expected[:3], abs=0.5)
    assert cells[3:5] == pytest.approx(expected[3:], abs=0.005)


# Millions of weights, as published: of the target, and of the drafter without the embedding and the LM head.
@pytest.mark.slow
def test_a_shape_has_the_published_number_of_weights(tmp_path):
    write_pair(SHAPES["qwen3-8b"], tmp_path)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "target"))
        draft = DraftModel(read_config(tmp_path / "draft"), own_embedding=False, own_lm_head=False)
    assert sum(weight.numel() for weight in target.parameters()) / 1e6 == pytest.approx(8190.7, abs=0.05)
    assert sum(weight.numel() for weight in draft.parameters()) / 1e6 == pytest.approx(1126.4, abs=0.05)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "target")) == target.config.vocab_size


@pytest.mark.slow
@pytest.mark.thorough
def test_a_pair_is_served_without_weights(tmp_path):
    write_pair(SHAPES["tiny"], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert tokenizer.decode(tokenizer.encode("Größe 12 {x}")) == "Größe 12 {x}"
    flags = (
        *("--dtype", "bfloat16", "--load-format", "dummy", *dspark_flags(tmp_path / "draft")),
        *("--speculative-dspark-schedule", "static", "--speculative-dspark-simulate-acceptance", "1.0"),
    )
    with LaunchedServer(tmp_path / "target", *CPU_FLAGS, *flags, env=CPU_ENV) as server:
        messages = [{"role": "user", "content": "How long does a step take?"}]
        body = {"model": "m", "messages": messages, "max_tokens": 40, "ignore_eos": True}
        answer = server.post_json("/v1/chat/completions", body)
        stats = server.get_json("/dspark/stats")
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["choices"][0]["message"]["content"].strip()
    assert stats["accept_length"] == 8.0  # of the block of seven and the bonus token, in every step
