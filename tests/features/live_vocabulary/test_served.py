"""Tokens of a list are replaced by those that answers have."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dspark.draft.reduced_vocabulary import Listed
from sglang_dspark.features.live_vocabulary.served import SPAN, LiveVocabulary


class Heads:
    """Proposes tokens 0 to 49 of 100 at first."""

    has_others = True

    def __init__(self):
        self.listed = Listed(np.arange(50), np.arange(101) // 50 != 1)
        self.replaced = []

    def replace(self, columns, tokens):
        listed, has = self.listed
        self.replaced.append((listed[columns].tolist(), tokens))
        has[listed[columns]], has[tokens] = False, True
        listed[columns] = tokens


def started(heads, kept):
    """Return the part of a server whose tokenizer has added these tokens."""
    tokenizer = SimpleNamespace(added_tokens_decoder=dict.fromkeys(kept))
    target, drafter = SimpleNamespace(tokenizer=tokenizer), SimpleNamespace(heads=heads)
    part = LiveVocabulary(SimpleNamespace(target_worker=target, drafter=drafter))
    part.ready()
    return part


def spoken(part, counts):
    """Have steps commit so many of each token, and two requests' ends; then the next batch comes."""
    tokens = torch.tensor([token for token, number in counts.items() for _ in range(number)])
    for chunk in tokens.split(8):
        committed = torch.full((2, 9), -1)
        committed[1, : len(chunk)] = chunk
        part.step_done([], SimpleNamespace(committed=committed), [1], [])
    part.batch_comes(None)


@pytest.mark.parametrize(
    ("counts", "replaced"),
    [
        ({7: SPAN - 1, 60: 1}, []),  # rare
        ({7: SPAN - 100, 60: 99}, []),  # too few tokens yet
        ({7: SPAN - 100, 60: 30, 61: 70}, [([49, 47], [61, 60])]),
        ({**dict.fromkeys(range(48), 20), 60: 11, 61: 12, 62: 1, 63: 40}, [([49], [63])]),
        ({**dict.fromkeys(range(50), 19), **dict.fromkeys(range(60, 68), 10)}, []),
    ],
    ids=["rare", "few", "frequent", "a list in use", "none rarer"],
)
def test_frequent_tokens_take_the_places_of_rare_ones(counts, replaced):
    heads = Heads()
    part = started(heads, kept=[48])
    spoken(part, counts)
    assert heads.replaced == replaced
    part.batch_comes(None)
    assert heads.replaced == replaced and part.report() == {"replaced_tokens": sum(len(new) for _, new in replaced)}


def test_languages_take_turns():
    """A list has room for one of them; what was said long ago gives way."""
    heads = Heads()
    part, kept = started(heads, kept=[3]), 3
    for language in (range(50, 98), range(48), range(50, 98)):
        for _ in range(12):
            spoken(part, dict.fromkeys(language, -(-SPAN // len(language))))
        assert heads.listed.has[[*language, kept]].all()
