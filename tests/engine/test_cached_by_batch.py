"""The cache of a batch belongs to its requests, not to their names."""

from types import SimpleNamespace

from sglang_dspark.engine.scheduler.cached_by_batch import CachedByBatch


def request(temperature):
    return SimpleNamespace(rid="again", temperature=temperature)


def test_a_request_id_that_is_used_again_is_another_request():
    last = CachedByBatch(lambda reqs: [req.temperature for req in reqs])
    assert last.read([request(3.0)]) == [3.0]
    assert last.read([request(0.0)]) == [0.0]


def test_the_same_requests_are_read_once():
    made = []
    last = CachedByBatch(lambda reqs: made.append(list(reqs)))
    first, second = request(1.0), request(1.0)
    for reqs in ([first, second], [first, second], [second, first], [second]):
        last.read(reqs)
    assert made == [[first, second], [second, first], [second]]
