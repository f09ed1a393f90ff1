"""Forms of targets and caches, one after the other, against plain servers of the same flags.

Each is asked for the same: greedy texts and what became of every draft, seeded texts whose drafts are accepted,
requests that are retracted, and a prefix that is found again. What is drawn depends on no form: tests/exactness.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from family_targets import COMMON, picture_target, written_target
from golden_server import (
    DRAFT,
    DRAFTER_ALONE,
    TARGET,
    TWO_RANKS,
    VOCAB,
    assert_pool_is_whole,
    assert_retracted_unnoticed,
    displace,
    endless,
    generate,
    output_ids,
    policy,
    together,
)
from quantised_target import OF_ROWS, int8_target
from random_drafter import random_drafter
from server_pool import (
    EIGHT_BITS,
    HOST_MEMORY,
    LITERAL_FLAGS,
    LITERALLY,
    NO_SNAPSHOTS,
    WHOLE_WINDOWS,
    Recipe,
    ServerPool,
)

from sglang_dspark.tools.launch import LaunchedServer, dspark_flags

pytestmark = pytest.mark.thorough


@dataclass(frozen=True)
class Form:
    """A target and the flags of both of its servers.

    Attributes:
        architecture: of a tiny target with random weights; the golden target without one.
        page: slots of K/V per page.
        flags: more of them.
        speculative: flags only of the server with DSPARK.
        flat: temperature at which drafter and target agree often, though they may know nothing of each other.
        pool: slots of K/V, too few for what is asked at once.
        env: of both servers.
        int8: whether the golden target is quantised. The last bit of a sum decides how an activation is rounded, so a
            text may go on otherwise where tokens are nearly as likely, or after it was encoded again.
        recurrent: whether layers keep states, which are cached where a text ended, and nowhere else.
        drafter: of ``random_drafter``, for a tiny target.
    """

    architecture: str = ""
    page: int = 1
    flags: tuple[str, ...] = ()
    speculative: tuple[str, ...] = ()
    flat: float = 2.0
    pool: int = 640
    env: Mapping[str, str] = field(default_factory=dict)
    int8: bool = False
    recurrent: bool = False
    drafter: str = "tiny"

    @property
    def host_memory(self) -> bool:
        """Return whether prefixes move there."""
        return HOST_MEMORY[0] in self.flags

    @property
    def reads_images(self) -> bool:
        """Return whether the target brings a processor, and a tokenizer in it."""
        return "ForConditionalGeneration" in self.architecture and not LITERALLY.items() <= self.env.items()

    def model(self, folder: Path) -> Path:
        """The target's folder."""
        if self.int8:
            return int8_target(folder, OF_ROWS)
        if self.reads_images:
            return picture_target(self.architecture, folder / "target")
        return written_target(self.architecture, folder / "target") if self.architecture else TARGET

    def plain(self, folder: Path) -> tuple[str, ...]:
        """Flags of the plain server."""
        pool = ("--max-total-tokens", str(self.pool), "--schedule-conservativeness", "0.01", "--context-length", "256")
        tokenizer = () if self.reads_images else ("--tokenizer-path", str(TARGET))
        states = (*NO_SNAPSHOTS, "--max-mamba-cache-size", "60") if self.recurrent else ()
        return (*pool, *states, "--page-size", str(self.page), *tokenizer, *self.flags)

    def dspark(self, folder: Path) -> tuple[str, ...]:
        """Flags of the one with DSPARK."""
        draft = random_drafter(folder / "draft", self.drafter) if self.architecture else DRAFT
        return (*self.plain(folder), *dspark_flags(draft), *self.speculative)


FP8 = ("--kv-cache-dtype", "fp8_e4m3")
RANDOM = {"flat": 8.0}
# Of targets whose LM head is the embedding, which says the last token again.
TIED_FLAT = 32.0
GEMMA4_12B = {"flat": TIED_FLAT, "drafter": "gemma"}
FORMS = {
    "llama": Form("LlamaForCausalLM", **RANDOM),
    "qwen2": Form("Qwen2ForCausalLM", flat=TIED_FLAT),
    "qwen3-moe": Form("Qwen3MoeForCausalLM", **RANDOM),
    "mistral": Form("MistralForCausalLM", **RANDOM),
    "ministral3": Form("Ministral3ForCausalLM", **RANDOM),
    "phi3": Form("Phi3ForCausalLM", **RANDOM),
    "internlm3": Form("InternLM3ForCausalLM", **RANDOM),
    "apertus": Form("ApertusForCausalLM", **RANDOM),
    "qwen2-moe": Form("Qwen2MoeForCausalLM", **RANDOM),
    "glm4-moe": Form("Glm4MoeForCausalLM", **RANDOM),
    # Windows and sinks; layers of two kinds, in pools of their own.
    "gpt-oss": Form("GptOssForCausalLM", flags=LITERAL_FLAGS, **RANDOM, env=LITERALLY),
    "gemma4": Form("Gemma4ForConditionalGeneration", flags=LITERAL_FLAGS, flat=TIED_FLAT, env=LITERALLY),
    "gemma4-12b": Form("Gemma4UnifiedForConditionalGeneration", flags=LITERAL_FLAGS, **GEMMA4_12B, env=LITERALLY),
    "qwen2.5-vl": Form("Qwen2_5_VLForConditionalGeneration", **RANDOM),
    "qwen3-vl": Form("Qwen3VLForConditionalGeneration", **RANDOM),
    "qwen3-vl-moe": Form("Qwen3VLMoeForConditionalGeneration", **RANDOM),
    "qwen3.5": Form(
        "Qwen3_5ForCausalLM", flags=("--chunked-prefill-size", "32"), **RANDOM, recurrent=True, env=WHOLE_WINDOWS
    ),
    "qwen3.5-wrapper": Form("Qwen3_5ForConditionalGeneration", **RANDOM, recurrent=True, env=WHOLE_WINDOWS),
    "qwen3.5-moe": Form("Qwen3_5MoeForCausalLM", **RANDOM, recurrent=True, env=WHOLE_WINDOWS),
    "qwen3.5-moe-wrapper": Form(
        "Qwen3_5MoeForConditionalGeneration",
        **RANDOM,
        pool=270,  # half of its texts are short
        recurrent=True,
        env=WHOLE_WINDOWS,
    ),
    "qwen3-next": Form("Qwen3NextForCausalLM", **RANDOM, recurrent=True, env=WHOLE_WINDOWS),
    "qwen3.5-two-ranks": Form(
        "Qwen3_5ForCausalLM",
        flags=("--tp-size", "2", "--max-running-requests", "4"),
        speculative=("--speculative-dspark-block-size", "3"),
        pool=320,
        **RANDOM,
        recurrent=True,
        env=WHOLE_WINDOWS | TWO_RANKS,
    ),
    "int8": Form(int8=True),
    # Step times of two ranks that share two cores take a minute to measure for more requests and drafts.
    "two-ranks": Form(
        flags=("--tp-size", "2", "--max-running-requests", "4"),
        speculative=("--speculative-dspark-block-size", "3"),
        pool=320,
        env=TWO_RANKS,
    ),
    **{f"pages-{size}": Form(page=size, pool=1024) for size in (16, 32, 64)},
    "pages-128": Form(page=128, pool=1408),
    **{f"fp8-pages-{size}": Form(page=size, flags=FP8, pool=1024) for size in (1, 16, 32, 64)},
    "fp8-e5m2": Form(flags=("--kv-cache-dtype", "fp8_e5m2"), pool=1024),
    **{f"host-memory-pages-{size}": Form(page=size, flags=HOST_MEMORY, pool=1024) for size in (1, 16, 64)},
}


def _needed(name: str) -> list[pytest.MarkDecorator]:
    """Marks of a form that not every machine can serve."""
    return [EIGHT_BITS] if FP8[0] in FORMS[name].flags else []


@dataclass(frozen=True)
class Pair:
    """Two servers of a form."""

    form: Form
    plain: LaunchedServer
    dspark: LaunchedServer


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    recipes = {}
    for name, form in FORMS.items():
        recipes[f"{name} plain"] = Recipe([form.plain], model=form.model, env=form.env)
        recipes[f"{name} dspark"] = Recipe([form.dspark], model=form.model, env=form.env)
    servers = ServerPool(recipes, tmp_path_factory.mktemp("forms"), most=2)
    try:
        yield servers
    finally:
        servers.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.xdist_group(f"form {name}"), *_needed(name)]) for name in FORMS],
)
def pair(request: pytest.FixtureRequest, pool: ServerPool) -> Pair:
    return Pair(FORMS[request.param], pool.get(f"{request.param} plain"), pool.get(f"{request.param} dspark"))


def bodies(form: Form, num: int, longest: int, tokens: int, **fields: Any) -> list[dict[str, Any]]:
    """Greedy requests with random prompts."""
    draw = random.Random(num)
    ids = range(2, COMMON["vocab_size"]) if form.architecture else VOCAB
    prompts = [draw.choices(ids, k=draw.choice((3, 17, longest))) for _ in range(num)]
    return [endless(prompt, tokens, **fields) for prompt in prompts]


def test_texts_and_what_became_of_every_draft(pair):
    asked = bodies(pair.form, 6, 60, 24)
    expected = output_ids(pair.plain, asked, 1)
    assert len(set(map(tuple, expected))) > 3
    with policy(pair.dspark, "static"):
        answers = generate(pair.dspark, [body | {"speculation": {"trace": True}} for body in asked], 3)
    assert [answer["output_ids"] for answer in answers] == expected
    for body, answer in zip(asked, answers, strict=True):
        assert_trace_tells_the_text(body["input_ids"] + answer["output_ids"], answer["meta_info"]["dspark_trace"])
    with policy(pair.dspark, "random"):
        assert output_ids(pair.dspark, asked * 2, 6) == expected * 2


def test_seeded_texts_whose_drafts_are_accepted(pair):
    """Greedy drafts of random weights are hardly ever right; these are, as nearly all tokens are equally likely.

    What they should be is what the server writes without drafts.
    """
    if pair.form.int8:
        pytest.skip("tokens are too nearly alike for a quantised target")
    asked = bodies(pair.form, 6, 60, 24, speculation={"trace": True})
    for seed, body in enumerate(asked):
        body["sampling_params"] = body["sampling_params"] | {"temperature": pair.form.flat, "sampling_seed": seed}
    with policy(pair.dspark, "off"):
        expected = output_ids(pair.dspark, asked, 1)
    with policy(pair.dspark, "static"):
        answers = generate(pair.dspark, asked, 3)
    assert [answer["output_ids"] for answer in answers] == expected
    traces = [answer["meta_info"]["dspark_trace"] for answer in answers]
    for body, answer, trace in zip(asked, answers, traces, strict=True):
        assert_trace_tells_the_text(body["input_ids"] + answer["output_ids"], trace)
    assert sum(entry["accepted"] for trace in traces for entry in trace if entry is not None) > 50
    with policy(pair.dspark, "random"):
        assert output_ids(pair.dspark, asked * 2, 6) == expected * 2


def assert_trace_tells_the_text(text: Sequence[int], trace: Sequence[dict[str, Any] | None]) -> None:
    """Drafts up to the number that was accepted are the text, and the next one is not."""
    rounds = [entry for entry in trace if entry is not None]
    assert len(rounds) > 3
    for entry in rounds:
        place, accepted = entry["start"], entry["accepted"]
        assert entry["anchor"] == text[place]
        written = text[place + 1 : place + 1 + len(entry["draft"])]
        assert all(draft == token for draft, token in zip(entry["draft"][:accepted], written, strict=False))
        if accepted < min(entry["verified"], len(written)):
            assert entry["draft"][accepted] != written[accepted]


def test_retracted_requests(pair):
    asked = bodies(pair.form, 14, 40, max(90, pair.form.page))
    for body in asked:  # SGLang reserves all tokens of a request that ignores the end when it is admitted
        body["sampling_params"] = body["sampling_params"] | {"ignore_eos": False}
    expected = output_ids(pair.plain, asked, 14)
    with policy(pair.dspark, "random"):
        if not pair.form.int8:
            assert_retracted_unnoticed(pair.dspark, asked, expected)
            return
        answers = together(pair.dspark, asked)
    assert [len(answer["output_ids"]) for answer in answers] == [len(text) for text in expected]
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert_pool_is_whole(pair.dspark)


def test_a_prefix_that_is_found_again_keeps_its_drafts(pair):
    [body] = bodies(pair.form, 1, 17, 40, speculation=DRAFTER_ALONE)
    prompt = (body["input_ids"] * 80)[:80]
    pair.dspark.flush_cache()
    with policy(pair.dspark, "static"):
        [first] = generate(pair.dspark, [body | {"input_ids": prompt}], 1)
        if pair.form.host_memory:
            displace(pair.dspark, 2 * pair.form.pool // 150)  # more than the device holds
        [again] = generate(pair.dspark, [body | {"input_ids": prompt}], 1)
    infos = first["meta_info"], again["meta_info"]
    whole_pages = 79 // pair.form.page * pair.form.page
    if not pair.form.recurrent:  # states lie where texts ended: test_recurrent_targets.py
        assert (infos[0]["cached_tokens"], infos[1]["cached_tokens"]) == (0, whole_pages)
    assert first["output_ids"] == again["output_ids"]
    assert infos[0]["spec_accept_length"] == infos[1]["spec_accept_length"]
    drafts = [[entry["draft"] for entry in info["dspark_trace"] if entry is not None] for info in infos]
    assert drafts[0] == drafts[1]
