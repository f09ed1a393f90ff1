"""The cache of a batch belongs to its requests, not to their names."""

from sglang_objects import request

from sglang_dspark.engine.batch import CachedByBatch


def again(temperature):
    return request(rid="again", temperature=temperature)


def test_a_request_id_that_is_used_again_is_another_request():
    last = CachedByBatch(lambda reqs: [req.sampling_params.temperature for req in reqs])
    assert last.read([again(3.0)]) == [3.0]
    assert last.read([again(2.0)]) == [2.0]


def test_the_same_requests_are_read_once():
    made = []
    last = CachedByBatch(lambda reqs: made.append(list(reqs)))
    first, second = again(1.0), again(1.0)
    for reqs in ([first, second], [first, second], [second, first], [second]):
        last.read(reqs)
    assert made == [[first, second], [second, first], [second]]
