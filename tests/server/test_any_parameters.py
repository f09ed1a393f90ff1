"""Parameters in and out of range: the DSPARK server accepts and refuses what the plain server does."""

from __future__ import annotations

from collections import Counter
from typing import Any

from golden_server import CASES, call, greedy, output_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROMPTS = [case["prompt_ids"] for case in CASES[:4]]

# Values of the right types, in and out of range; wrong types are in test_refusals.py.
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.0, 0.7, 1, 3.5, -1, None]),
        "top_k": st.sampled_from([-1, 1, 5, 10**6, 0, -2, None]),
        "top_p": st.sampled_from([1.0, 0.3, 1e-6, 0.0, 1.2]),
        "min_p": st.sampled_from([0.0, 0.5, 1.0, -0.1, 2]),
        "frequency_penalty": st.sampled_from([0, 0.5, -2, 2, 2.1, -3, None]),
        "presence_penalty": st.sampled_from([0, 1.5, -2, 5]),
        "repetition_penalty": st.sampled_from([1, 1.0, 0.1, 2, 0, -1, 3, None]),
        "min_new_tokens": st.sampled_from([0, 1, 3, 4, 100, -1, None]),
        "max_new_tokens": st.sampled_from([1, 3, 4, 0, -1]),
        "logit_bias": st.sampled_from([{}, {"3": 1.0}, {"3": -100, "255": 100}, {"256": 1.0}, {"-1": 1}, {"x": 1}]),
        "stop": st.sampled_from(["a", ["a", "b"], [], None]),
        "stop_token_ids": st.sampled_from([[1], [3, 4], [], None]),
        "regex": st.sampled_from(["[a-c]+", "(", None]),
        "json_schema": st.sampled_from(['{"type": "integer"}', "{", None]),
        "ebnf": st.sampled_from(['root ::= "a"', "root :=", None]),
        "sampling_seed": st.sampled_from([0, 7, -1, 2**63 - 1, None]),
        "n": st.sampled_from([1, 2]),
        "ignore_eos": st.sampled_from([True, False, None]),
        "skip_special_tokens": st.sampled_from([True, False]),
    },
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "return_logprob": st.sampled_from([True, False, None]),
        "top_logprobs_num": st.sampled_from([0, 1, 5]),
        "logprob_start_len": st.sampled_from([-1, 0, 2, 3, 4]),
        "stream": st.sampled_from([False, None]),
    },
)


def test_any_parameters_get_the_status_of_the_plain_server(letters, plain_letters):
    """And leave a neighbour's text alone."""
    codes: Counter[int] = Counter()
    different: list[Any] = []

    @settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(parameters=PARAMETERS, fields=FIELDS)
    def try_one(parameters: dict[str, Any], fields: dict[str, Any]) -> None:
        request = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, **parameters}, **fields}
        code, expected = (call(server, "/generate", body=request)[0] for server in (letters, plain_letters))
        codes[code] += 1
        if code != expected or code >= 500:
            different.append((code, expected, request))

    bodies = [greedy(prompt, 32) for prompt in PROMPTS]
    expected = output_ids(plain_letters, bodies)
    try_one()
    print(f"{codes.total()} requests of random parameters, by status: {dict(codes)}")  # noqa: T201
    assert different == []
    assert min(codes[200], codes[400]) > 5
    assert output_ids(letters, bodies) == expected
