"""Candidates from requests' own texts: the kernels and their torch form against a search in lists."""

import pytest
import torch
from dspark_kernels import (
    ASKED_ROWS,
    CACHED_ROWS,
    LEAST_MATCH,
    MOST_MATCH,
    USUAL,
    ChainRules,
    SecondTexts,
    StepRequests,
    find_chains,
    suffix_match,
)
from dspark_kernels.drafting import suffix_match as module

FORMS = [suffix_match, suffix_match.reference]


def literal(text, num_candidates, bounds=USUAL):
    """Matched tokens and candidates of one text, by the definition."""
    least, most, length, row = bounds
    for matched in range(most, least - 1, -1):
        for start in range(len(text) - 1, matched - 1, -1):
            suffix = text[len(text) - matched :]
            if text[start - matched : start] == suffix and min(suffix) >= 0:
                period = len(text) - start
                found = [text[start + place % period] for place in range(min(num_candidates, length))]
                return [matched + row, 0, *found] + [-1] * (num_candidates - len(found))
    return [0, 0] + [-1] * num_candidates


def case_of(texts, device, index_dtype=torch.int64, seed=0):
    """Requests with these texts, whose slots lie anywhere; what no text has is poison."""
    generator, most = torch.Generator().manual_seed(seed), max(map(len, texts))
    slots = 1 + torch.randperm(len(texts) * most, generator=generator).view(len(texts), most)
    slot_tokens = torch.full((len(texts) * most + 1,), 1)
    table = torch.zeros((len(texts) + 3, most), dtype=torch.int32)
    rows = torch.randperm(len(table), generator=generator)[: len(texts)]
    for row, text, of_text in zip(rows.tolist(), texts, slots, strict=True):
        slot_tokens[of_text[: len(text) - 1]] = torch.tensor(text[:-1], dtype=torch.int64)
        table[row] = of_text
    requests = StepRequests(
        anchors=torch.tensor([text[-1] for text in texts], device=device),
        prefix_lens=torch.tensor([len(text) - 1 for text in texts], device=device, dtype=index_dtype),
        req_pool_indices=rows.to(device, index_dtype),
        req_to_token=table.to(device),
    )
    return requests, slot_tokens.to(device)


def texts_of(bs, most, seed):
    """Texts of few different tokens, so that much repeats, with parts of pictures in them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most + 1, (bs,), generator=generator).tolist()
    texts = [torch.randint(3, (length,), generator=generator).tolist() for length in lengths]
    return [[-1 if place % 37 == 36 else token for place, token in enumerate(text[:-1])] + text[-1:] for text in texts]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("bs", "most", "num_candidates"), [(1, 1, 1), (5, 90, 8), (3, 300, 2), (17, 40, 17)])
def test_what_followed_the_longest_and_latest_match(device, form, bs, most, num_candidates):
    texts = texts_of(bs, most, seed=bs)
    found = form(*case_of(texts, device, torch.int32 if bs == 5 else torch.int64), num_candidates)
    assert found.tolist() == [literal(text, num_candidates) for text in texts]
    assert bs < 5 or {0, LEAST_MATCH} < {row[0] for row in found.tolist()}


@pytest.mark.parametrize("form", FORMS)
def test_requests_have_bounds_of_their_own(device, form):
    bounds = [USUAL, (1, 3, 2, ASKED_ROWS), (MOST_MATCH + 1, *USUAL[1:]), (2, 2, 4, 0), (1, MOST_MATCH, 9, ASKED_ROWS)]
    texts = texts_of(5, 90, seed=3)
    found = form(*case_of(texts, device), 5, ChainRules(torch.tensor(bounds, device=device)))
    assert found.tolist() == [
        literal(*case, bounds=of) for case, of in zip([(t, 5) for t in texts], bounds, strict=True)
    ]
    assert {row[0] > ASKED_ROWS for row in found.tolist()} == {True, False}


def rules_of(bounds, seconds, row, device):
    """Rules of requests whose second texts are pairs of tokens and what is needed."""
    requests = [request for request, (tokens, _) in enumerate(seconds) for _ in tokens]
    parts = [[value for pair in seconds for value in pair[part]] for part in range(2)]
    second = (torch.tensor(part, device=device) for part in (*parts, [row] * len(requests), requests))
    return ChainRules(torch.tensor(bounds, device=device), SecondTexts(*second))


@pytest.mark.parametrize(
    ("ending", "matched", "rest"),
    [
        ([1], 1, [2, 3]),
        ([9, 2], 1, [3, 5]),
        ([9, 3], 1, [7, -1]),
        ([1, 2], 2, [3, 4]),
        ([0, 2, 3], 2, [5, 6]),
        ([1, 2, 3], 3, [4, -1]),
        ([8, 8, 8], None, []),
        ([6], None, []),
    ],
    ids=str,
)
def test_labels_go_on_where_a_text_ends_with_their_beginning(device, ending, matched, rest):
    """The longest one counts, and of equals the first; without one the text's own chain does."""
    text = [-1, 1, 2, 3, 4, -1, 2, 3, 5, 6, -1, 3, 7, -1, 2, 9, -1]
    labels = [text, [9, 1, 2, 3, 9, 9, 1, 2, 3, 9, 9, 1, 9, 9, 1, 9, 9]]
    case = case_of([[8, 8, 8, 8, 0, *ending]], device)
    rules = rules_of([(3, 8, 2, 0)], [labels], ASKED_ROWS, device)
    expected = [matched + ASKED_ROWS, 0, *rest, -1] if matched else suffix_match(*case, 3, rules)[0].tolist()
    assert find_chains(*case, 3, rules).tolist() == [expected]


def literal_of_both(text, answers, num_candidates, bounds):
    """Matched tokens and candidates of a text next to answers, by the definition."""
    own = literal(text, num_candidates, bounds)
    for matched in range(MOST_MATCH, max(own[0], LEAST_MATCH - 1), -1):
        suffix = text[-matched:]
        for answer in answers:
            for end in range(matched, len(answer)):
                if answer[end - matched : end] == suffix and min(*suffix, answer[end]) >= 0:
                    return [CACHED_ROWS + matched, 0, *answer[end:][: min(num_candidates, bounds[2])]]
    return own


def test_second_texts_of_some_requests_are_theirs(device):
    """A request without one finds nothing, though it ends as another's goes on; no text goes on in the next."""
    texts = [[9, 0, 1, 2], [0, 1, 2], [7, 5, 6], [0, 1, 2]]
    labels = [([-1, 1, 2, 3, -1], [9, 1, 2, 9, 9]), ([], []), ([-1, 5, 6], [9, 1, 2]), ([-1, 1, 2, 4, 4, -1], [1] * 6)]
    rules = rules_of([USUAL] * 4, labels, ASKED_ROWS, device)
    asked = [ASKED_ROWS + 2, 0]
    found = find_chains(*case_of(texts, device), 2, rules).tolist()
    assert found == [[*asked, 3, -1], [0, 0, -1, -1], [*asked, -1, -1], [*asked, 4, 4]]
    some = torch.tensor([3, 1], device=device)
    part = find_chains(*case_of([texts[3], texts[1]], device), 2, rules.take(some)).tolist()
    assert part == [found[3], found[1]]


def up_to_the_first_that_is_none(chains):
    """Chains with nothing after their first -1, which no draft follows."""
    return [[*chain, -1][: [*chain, -1].index(-1)] for chain in chains]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("bs", "most", "num_candidates"), [(1, 9, 1), (5, 90, 8), (17, 40, 17)])
def test_answers_go_on_where_they_match_farther_than_the_own_text(device, monkeypatch, form, bs, most, num_candidates):
    """Odd sizes; some requests have no answer, want a part of a chain, no own chain, or what they have asked for."""
    monkeypatch.setattr(module, "suffix_match", form)
    kinds = [USUAL, (LEAST_MATCH, MOST_MATCH, 2, 0), (MOST_MATCH + 1, *USUAL[1:]), (2, 4, 9, ASKED_ROWS)]
    bounds, texts = [kinds[request % 4] for request in range(bs)], texts_of(bs, most, seed=bs)
    answers = [texts_of(request % 3 + (bs == 1), 2 * most, seed=50 + request) for request in range(bs)]
    seconds = []
    for of_request in answers:
        tokens = [token for answer in of_request for token in (-1, *answer)]
        pairs = zip(tokens, [*tokens, -1][1:], strict=True)
        needed = [LEAST_MATCH if min(pair) >= 0 else MOST_MATCH + 1 for pair in pairs]
        seconds.append((tokens, needed))
    rules = rules_of(bounds, seconds, CACHED_ROWS, device)
    found = find_chains(*case_of(texts, device), num_candidates, rules).tolist()
    expected = [literal_of_both(*case, num_candidates, of) for *case, of in zip(texts, answers, bounds, strict=True)]
    assert up_to_the_first_that_is_none(found) == up_to_the_first_that_is_none(expected)
    assert bs < 5 or {row[0] // CACHED_ROWS for row in found} == {0, 1, 2}


def test_tiles_and_programs_share_a_text(device, monkeypatch):
    """Every program has several tiles, and the last of equals lies in any of them."""
    monkeypatch.setattr(module, "_TILE", 16)
    texts = [texts_of(1, 200, seed)[0] for seed in range(9)]
    for text in texts:
        assert suffix_match(*case_of([text], device), 4).tolist() == [literal(text, 4)]
