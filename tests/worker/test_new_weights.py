"""A drafter whose weights are replaced drafts as one that was loaded so, and its tensors stay where they are."""

import gc

import pytest
import torch
from changed_weights import FILE, trained_drafter
from made_schedule import schedule
from safetensors.torch import load_file, save_file
from sglang_objects import partly
from sglang_objects import worker as target_worker
from stage_loop import CPU, DRAFT, StageLoop

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.int8_layers import in_eight_bits
from sglang_dspark.draft.reduced_vocabulary import FILE as LIST
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads, save_token_ids
from sglang_dspark.draft.weights import EMBEDDING, LM_HEAD, load_draft_model
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.errors import CheckpointError
from sglang_dspark.worker.drafter import Drafter
from sglang_dspark.worker.executors.graphs import ExecutorSelector
from sglang_dspark.worker.no_drafter import NoDrafter
from sglang_dspark.worker.worker import DSparkWorker

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_drafter(tmp_path_factory.mktemp("trained") / "draft")


def loop_of(draft):
    return StageLoop(draft=draft, schedule="static")


def traces_of(loop):
    prompts = [case.prompt_ids for case in loop.golden.cases[:2]]
    loop.serve(prompts, NUM_TOKENS)
    return loop.traces


def by_folder(drafter, folder):
    drafter.load_beside(str(folder))()


def by_names(drafter, folder):
    """They come in two parts, as trainers send them."""
    named = list(load_file(folder / FILE).items())
    drafter.write(named[::2])
    drafter.write(named[1::2])


@pytest.mark.parametrize("update", [by_folder, by_names])
def test_a_replaced_drafter_drafts_as_one_that_was_loaded(trained, update):
    loop = loop_of(DRAFT)
    before = traces_of(loop)
    update(loop.drafter, trained)
    expected = traces_of(StageLoop(draft=trained, schedule="static"))
    assert traces_of(loop) == expected != before
    by_folder(loop.drafter, DRAFT)
    assert traces_of(loop) == before


def addresses(drafter: Drafter):
    heads = drafter.heads.weights
    tensors = [*drafter.model.parameters(), drafter.model.embed_weight, drafter.heads._rows, heads.markov.w2]
    return [tensor.data_ptr() for tensor in tensors]


def test_ten_updates_take_no_memory(trained):
    drafter = loop_of(DRAFT).drafter

    def tensors():
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    before, number = addresses(drafter), tensors()
    for _ in range(5):
        by_folder(drafter, trained)
        by_names(drafter, DRAFT)
    assert addresses(drafter) == before and tensors() == number


@pytest.mark.parametrize("eight_bits", [False, True])
def test_what_was_copied_of_a_reduced_vocabulary_follows(trained, eight_bits):
    model, other = (load_draft_model(folder, dtype=torch.float32, device="cpu") for folder in (DRAFT, trained))
    if eight_bits:
        model.store_in_eight_bits()
        other.store_in_eight_bits()
    ids = [3, 5, 8]
    heads, expected = ProposalHeads(model, ids), ProposalHeads(other, ids)
    head, rows = torch.randn(model.config.vocab_size, model.config.hidden_size), heads._rows
    for own, new in zip(model.parameters(), other.parameters(), strict=True):
        own.copy_(new)
    model.lm_head.weight.copy_(head)
    heads.follow()
    assert heads._rows is rows and rows.equal(in_eight_bits(head[ids]) if eight_bits else head[ids])
    assert heads.weights.markov.w2.equal(expected.weights.markov.w2)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_tokens_of_a_list_that_are_replaced(trained, eight_bits):
    """The heads are those of a list that had the new ones from the start, in these places, also behind an update."""
    model = load_draft_model(DRAFT, dtype=torch.float32, device="cpu")
    if eight_bits:
        model.store_in_eight_bits()
    heads, expected = ProposalHeads(model, [3, 5, 8, 9]), ProposalHeads(model, [3, 7, 8, 200])
    columns = heads.vocabulary.columns
    found = heads._rows, heads.weights.markov.w2
    heads.replace([3, 1], [200, 7])
    for _ in range(2):
        assert all(map(torch.equal, found, (expected._rows, expected.weights.markov.w2)))
        assert columns.equal(expected.vocabulary.columns) and columns is heads.vocabulary.columns
        assert heads.listed.tokens.tolist() == heads.vocabulary.token_ids.tolist() == [3, 7, 8, 200]
        # One more, which the -1 behind a request's tokens finds.
        assert heads.listed.has.nonzero()[0].tolist() == [3, 7, 8, 200, model.config.vocab_size]
        heads.follow()


def test_a_drafter_in_eight_bits_keeps_its_weights(trained):
    drafter = loop_of(DRAFT).drafter
    drafter.model.store_in_eight_bits()
    for update in (by_folder, by_names):
        with pytest.raises(CheckpointError, match=r"draft-quantization=int8 keeps weights .* restart the server"):
            update(drafter, trained)


def changed_file(trained, folder, change):
    """Write the trained drafter with other tensors."""
    tensors = load_file(trained / FILE)
    change(tensors)
    folder.mkdir()
    for name in ("config.json", "golden.json"):
        (folder / name).write_bytes((trained / name).read_bytes())
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def listed(folder):
    save_token_ids(folder / LIST, [3, 5, 8])


def wider(folder):
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"block_size": 7', '"block_size": 5'))


def edited(name, change):
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


NAN = edited("norm.weight", lambda weight: weight * torch.nan)
OTHER_HEAD = edited(LM_HEAD, lambda weight: weight + 1)
REFUSED = {
    "no folder": (None, lambda folder: (folder / FILE).unlink(), FILE),
    "another block": (None, wider, "block_size=5, serving 7"),
    "other tokens": (None, listed, "draft_vocabulary.json"),
    "NaN": (NAN, None, "norm.weight has values that are no finite numbers"),
    "an LM head of its own": (OTHER_HEAD, None, "lm_head.weight is not the target's"),
    "a tensor less": (lambda tensors: tensors.pop("norm.weight"), None, "missing norm.weight"),
}


@pytest.mark.parametrize(("tensors", "files", "named"), REFUSED.values(), ids=REFUSED)
def test_a_folder_that_does_not_fit_leaves_the_old_drafter(trained, tmp_path, tensors, files, named):
    folder = changed_file(trained, tmp_path / "other", tensors or (lambda found: None))
    if files is not None:
        files(folder)
    drafter = loop_of(DRAFT).drafter
    before = [parameter.clone() for parameter in drafter.model.parameters()]
    with pytest.raises(CheckpointError, match=named):
        drafter.load_beside(str(folder))
    assert all(map(torch.equal, drafter.model.parameters(), before))
    assert drafter.describe()["path"] == str(DRAFT)


BAD_TENSORS = {
    "fc.bias": (torch.zeros(3), "unexpected fc.bias"),
    "norm.weight": (torch.zeros(3), "misshapen norm.weight"),
    "hidden_norm.weight": (torch.full((128,), torch.inf), "hidden_norm.weight has values"),
    EMBEDDING: (torch.zeros(256, 128), "embed_tokens.weight is not the target's"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_keeps_the_others_out(trained, name):
    drafter = loop_of(DRAFT).drafter
    before = [parameter.clone() for parameter in drafter.model.parameters()]
    tensor, named = BAD_TENSORS[name]
    with pytest.raises(CheckpointError, match=named):
        drafter.write({**load_file(trained / FILE), name: tensor}.items())
    assert all(map(torch.equal, drafter.model.parameters(), before))


def test_graphs_do_not_outlive_weights_that_moved():
    """They would go on reading where the old ones lie."""
    model, selector = torch.nn.Linear(2, 2), ExecutorSelector(None)
    worker = partly(
        DSparkWorker,
        _target_worker=target_worker(model=model),
        drafter=NoDrafter(DSparkConfig(draft_free=True), 5, CPU),
        control=StepControl(schedule(), None, (), on_gpu=True),
        executors=selector,
    )
    worker.captured_at, selector.captured = worker.addresses(), "graphs"
    model.weight.data.copy_(torch.ones(2, 2))
    worker.weights_changed()
    assert selector.captured == "graphs"
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    worker.weights_changed()
    assert selector.captured is None
