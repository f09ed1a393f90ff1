"""The worker's part in the ends of texts."""

import pytest
from sglang_objects import request

from sglang_dspark.features.ends.served import Ends


@pytest.mark.parametrize(("counted", "expected"), [(3, 3), (4, 4), (9, 4)])
def test_reasoning_has_at_most_the_tokens_of_the_text(counted, expected):
    req = request([5] * 4)
    req.reasoning_tokens = counted
    Ends().request_ended(req)
    assert req.reasoning_tokens == expected
