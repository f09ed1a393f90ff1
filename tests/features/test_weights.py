"""Weights do not come while there is no memory for them, and on all ranks or on none."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import io_struct
from sglang_objects import worker

from sglang_dspark.errors import CheckpointError
from sglang_dspark.features.weights import Weights, write_weights

NEW_DRAFTER = io_struct.UpdateWeightFromDiskReqInput(model_path="other", load_format="draft", flush_cache=False)
TENSORS = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[])


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("UpdateWeightFromDiskReq", {"model_path": "m"}),
        ("UpdateWeightFromDiskReq", {"model_path": "m", "load_format": "draft"}),
        ("UpdateWeightsFromTensorReq", {"serialized_named_tensors": []}),
        ("BeginWeightUpdateReq", {}),
    ],
)
def test_nothing_is_written_into_memory_that_is_released(kind, given):
    manager = SimpleNamespace(offload_tags={"weights"})
    answer = write_weights(lambda *_: pytest.fail("written"), manager, getattr(io_struct, f"{kind}Input")(**given))
    assert isinstance(answer, getattr(io_struct, f"{kind}Output"))
    assert not answer.success and "POST /resume_memory_occupation" in answer.message


class Rank:
    """One of several ranks, whose drafter notes what is written over it.

    Args:
        others: what the other ranks answer.
    """

    def __init__(self, monkeypatch, *others):
        self.drafted, self.followed, self.barriers, self.given = [], [], [], []
        self.model = SimpleNamespace(load_weights=self.given.extend)
        drafter = SimpleNamespace(
            num_drawn=7,
            follow_target=lambda: None,
            write=self.drafted.extend,
            load_new=lambda path: partial(self.drafted.append, path),
        )
        decoder = SimpleNamespace(
            drafter=drafter,
            target_worker=worker(model=self.model),
            weights_changed=lambda **new: self.followed.append(new["new_drafter"]),
        )
        self.weights = Weights(decoder)
        self.weights.ready()
        decoder.parts = [self.weights]
        self.manager = SimpleNamespace(
            offload_tags=set(),
            scheduler=SimpleNamespace(draft_worker=decoder),
            tp_worker=SimpleNamespace(device="cpu"),
            tp_cpu_group=None,
            _session=None,
            record_weight_version_after_update=lambda version: None,
        )

        def gathered(answers, mine, group):
            answers[:] = [mine, *others]

        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1 + len(others))
        monkeypatch.setattr(torch.distributed, "barrier", lambda **ranks: self.barriers.append(ranks))
        monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)

    def write(self, request, fails=None):
        """Have SGLang write a tensor of the target and one of the drafter, whose memory is then used again."""
        tensor = torch.ones(1)

        def original(request):
            self.model.load_weights([("norm", tensor.clone()), ("draft.fc", tensor)])
            tensor.zero_()
            if fails:
                raise fails
            return type(self).answered(request, success=True)

        return write_weights(original, self.manager, request)

    @staticmethod
    def answered(request, **said):
        return getattr(io_struct, type(request).__name__.replace("Input", "Output"))(message="", **said)


def test_tensors_whose_memory_is_used_again_are_copied(monkeypatch):
    rank = Rank(monkeypatch)
    assert rank.write(io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={})).success
    assert rank.given == [("norm", torch.ones(1))] and rank.drafted == [("fc", torch.ones(1))]
    assert rank.followed == [True] and rank.weights.report()["weights"] == {"updates": 1, "failure": None}


def test_the_drafter_waits_for_the_target_on_all_ranks(monkeypatch):
    failed = Rank.answered(TENSORS, success=False)
    rank = Rank(monkeypatch, Rank.answered(TENSORS, success=True), failed)
    assert rank.write(TENSORS) is failed
    assert rank.drafted == [] and rank.followed == [False]
    assert rank.weights.drafted() == []  # nor is it written with the next ones


@pytest.mark.parametrize(
    ("request_", "barriers"), [(TENSORS, 1), (io_struct.UpdateWeightFromDiskReqInput(model_path="m"), 0)]
)
def test_ranks_meet_where_the_others_wait(monkeypatch, request_, barriers):
    rank = Rank(monkeypatch)
    answer = rank.write(request_, fails=ValueError("misshapen"))
    assert not answer.success and "ValueError: misshapen" in answer.message
    assert len(rank.barriers) == barriers and rank.followed == [False]


@pytest.mark.parametrize("parts", [(), (TENSORS,), (NEW_DRAFTER,), (NEW_DRAFTER, TENSORS)])
def test_parts_are_followed_once_all_have_come(monkeypatch, parts):
    """And temperatures of the drafter before end with any of its weights."""
    rank = Rank(monkeypatch)
    rank.manager._session = object()
    for part in parts:
        assert rank.write(part).success
    assert rank.followed == []

    def end(request):
        rank.manager._session = None
        return Rank.answered(request, success=True)

    for _ in range(2):
        assert write_weights(end, rank.manager, io_struct.EndWeightUpdateReqInput()).success
    assert rank.followed == [bool(parts), False]


def test_a_drafter_that_does_not_fit_leaves_the_temperatures(monkeypatch):
    rank = Rank(monkeypatch)

    def refuse(path):
        raise CheckpointError("of another form")

    rank.weights.drafter.load_new = refuse
    assert not rank.write(NEW_DRAFTER).success
    assert rank.followed == [False] and rank.drafted == []
