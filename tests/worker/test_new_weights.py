"""A drafter whose weights are replaced drafts as one that was loaded so, and its tensors stay where they are."""

import gc
import json
from dataclasses import fields, is_dataclass

import format_exports as exports
import numpy as np
import pytest
import torch
from canonical_drafter import GEMMA, random_tensors
from golden_replay import FILE, trained_drafter
from quantised_drafter import gguf_drafter, quantised_drafter
from safetensors.torch import load_file, save_file
from stage_loop import DATA, DRAFT, StageLoop, golden_network

from sglang_dspark.draft.reduced_vocabulary import FILE as LIST
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads, save_token_ids
from sglang_dspark.draft.weights import EMBEDDING, LM_HEAD, load_draft_model
from sglang_dspark.errors import CheckpointError
from sglang_dspark.worker.drafter import Drafter

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_drafter(tmp_path_factory.mktemp("trained") / "draft")


def loop_of(draft):
    return StageLoop(draft=draft, schedule="static")


def by_folder(drafter, folder):
    drafter.load_new(str(folder))()


def by_names(drafter, folder):
    """They come in two parts, as trainers send them."""
    named = list(load_file(folder / FILE).items())
    drafter.write(named[::2])
    drafter.write(named[1::2])


@pytest.fixture(scope="module")
def network():
    return golden_network()


GOLDEN = json.loads((DRAFT / "config.json").read_text())
HEAD = load_file(DATA / "target" / FILE)["model.embed_tokens.weight"]  # is tied
BY_FILE = {"draft_vocab_size": 6}


def tokens_of(seed):
    """Return six proposed tokens, others for each seed."""
    return [7 * place + seed for place in range(6)]


def exported(export, overrides, seed, folder):
    """Write a drafter of the golden target in a format; returns its tensors by the names that they have there."""
    config = {key: value for key, value in (GOLDEN | overrides).items() if value is not ...}
    content, tensors = export(config, exports.without_embeddings(random_tensors(config, seed)))
    if config.get("draft_vocab_size"):
        tensors |= exports.reduced(tokens_of(seed), config["vocab_size"])
    return stored(folder, content, tensors)


def stored(folder, content, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)
    return tensors


def of_format(export, overrides):
    return lambda seed, folder: exported(export, overrides, seed, folder)


def with_lists(overrides):
    """Have a file next to the drafter list what it proposes. Without ``draft_vocab_size`` no tensor says it."""

    def write(seed, folder):
        tensors = exported(exports.deepspec, overrides, seed, folder)
        kept = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        save_file(kept, folder / FILE)
        save_token_ids(folder / LIST, tokens_of(seed))
        return tensors if overrides else None

    return write


def with_heads(head):
    """An LM head that is the drafter's own, or the target's rows over again."""

    def write(seed, folder):
        config = GOLDEN | BY_FILE
        content, tensors = exports.speculators(config, random_tensors(config, seed))
        ids = tokens_of(seed)
        own = random_tensors(config, seed)[LM_HEAD] if head == "own" else HEAD[ids]
        return stored(folder, content, tensors | exports.reduced(ids, 256) | {LM_HEAD: own})

    return write


def own_embeddings(seed, folder):
    return stored(folder, GOLDEN, random_tensors(GOLDEN, seed))


def quantised(form):
    def write(seed, folder):
        source = folder.with_name(f"{folder.name} in full")
        exported(exports.deepspec, {}, seed, source)
        if form == "GGUF":
            return gguf_drafter(source, folder)
        return quantised_drafter(source, folder, form)

    return write


DRAFTERS = {name: of_format(export, overrides) for name, (export, _, overrides) in exports.CASES.items()} | {
    "neighbouring channels": of_format(exports.neighbours, {}),
    "Gemma 4": of_format(exports.deepspec, GEMMA | {"hidden_act": None}),
    "an own embedding and LM head": own_embeddings,
    "a list in a file": with_lists(BY_FILE),
    "a list of some": with_lists({}),
    "an own LM head with a list": with_heads("own"),
    "the target's LM head with a list": with_heads("target's"),
    "fp8": quantised("fp8 by row"),
    "four bits": quantised("pack-quantized"),
    "GGUF": quantised("GGUF"),
}


def parts_of(found, place="", seen=None):
    """Return all that a drafter holds, by place: tensors and numbers at any depth, derived ones among them."""
    seen = {} if seen is None else seen
    if isinstance(found, torch.Tensor | np.ndarray | int | float | str | bool | None):
        return {place: found}
    if id(found) in seen:
        return {}
    seen[id(found)] = found
    if isinstance(found, dict):
        inner = {str(key): value for key, value in found.items()}
    elif isinstance(found, list | tuple):
        inner = dict(enumerate(found))
    elif is_dataclass(found) and not isinstance(found, type):
        inner = {field.name: getattr(found, field.name) for field in fields(found)} | vars(found)
    elif type(found).__module__.startswith(("sglang_dspark", "dspark_kernels", "torch.nn.modules")):
        inner = vars(found)
    else:
        return {}
    parts = {}
    for name, value in inner.items():
        if name not in LEFT_OUT:
            parts |= parts_of(value, f"{place}.{name}", seen)
    return parts


LEFT_OUT = {"_target", "cache", "_held", "_device", "_backward_hooks", "_forward_hooks"}
"""What belongs to no drafter."""
NAMING = ("_checkpoint", "origin")
"""Where the name of the checkpoint lies."""


def assert_same(drafter, fresh, *, named=True):
    """One drafter holds bit for bit what the other one does, which was started with its checkpoint."""
    held, expected = (
        {at: part for at, part in parts_of(one).items() if named or not any(name in at for name in NAMING)}
        for one in (drafter, fresh)
    )
    assert sum(map(is_tensor, held.values())) > 20
    assert sorted(at for at in held.keys() | expected.keys() if not same(held.get(at), expected.get(at))) == []


def same(one, other):
    if is_tensor(one) and is_tensor(other):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(np.all(one == other))


def addresses(drafter: Drafter):
    return {at: part.data_ptr() for at, part in parts_of(drafter).items() if is_tensor(part)}


@pytest.mark.parametrize("form", DRAFTERS)
def test_all_that_a_drafter_holds_is_the_new_ones(network, tmp_path, form):
    """Of every form, whichever way it comes, and where captured graphs read it."""
    folders = tmp_path / "old", tmp_path / "new"
    tensors = [DRAFTERS[form](seed, folder) for seed, folder in enumerate(folders)]
    loop, old, new = (
        StageLoop(draft=folder, network=network, schedule="static") for folder in (*folders[:1], *folders)
    )
    places = addresses(loop.drafter)
    by_folder(loop.drafter, folders[1])
    assert_same(loop.drafter, new.drafter)
    for one in (loop, old, new):
        one.serve([old.golden.cases[0].prompt_ids], 2)
    assert loop.traces == new.traces != old.traces
    if tensors[0] is not None:
        for named, fresh in zip(tensors, (old, new), strict=True):
            by_parts(loop.drafter, named)
            assert_same(loop.drafter, fresh.drafter, named=False)
    by_folder(loop.drafter, folders[0])
    assert_same(loop.drafter, old.drafter)
    assert addresses(loop.drafter) == places


def is_tensor(part):
    return isinstance(part, torch.Tensor)


def by_parts(drafter, named):
    """What is proposed comes before the rest."""
    listing = {name: tensor for name, tensor in named.items() if name in ("d2t", "t2d", LM_HEAD)}
    rest = [(name, tensor) for name, tensor in named.items() if name not in listing]
    for part in (list(listing.items()), rest[::2], rest[1::2]):
        drafter.write(part)


FOLLOWING = ("DeepSpec", "speculators, reduced vocabulary", "a list in a file", "a list of some")


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("form", FOLLOWING)
def test_all_that_is_read_of_a_target_is_the_new_ones(tmp_path, form, eight_bits):
    DRAFTERS[form](0, tmp_path / "draft")
    loop, target = StageLoop(draft=tmp_path / "draft", schedule="static"), golden_network()
    with torch.no_grad():
        for weight in target.parameters():
            weight.add_(torch.ones_like(weight))
    if eight_bits:
        loop.drafter.model.store_in_eight_bits()
        loop.drafter.heads = ProposalHeads(loop.drafter.model, loop.drafter._checkpoint.token_ids)
    places = addresses(loop.drafter)
    loop.network.load_state_dict(target.state_dict())
    loop.drafter.follow_target()
    fresh = StageLoop(draft=tmp_path / "draft", schedule="static", network=target).drafter
    if eight_bits:
        fresh.model.store_in_eight_bits()
        fresh.heads = ProposalHeads(fresh.model, fresh._checkpoint.token_ids)
    assert_same(loop.drafter, fresh)
    assert addresses(loop.drafter) == places


def test_later_tensors_have_the_names_of_the_new_checkpoint(network, tmp_path):
    """Its taps are in another order, too."""
    tensors = [exported(exports.modelopt, {}, seed, tmp_path / f"{seed}") for seed in range(2)]
    drafter = StageLoop(schedule="static", network=network).drafter
    by_folder(drafter, tmp_path / "0")
    assert drafter.describe()["path"] == str(tmp_path / "0")
    by_parts(drafter, tensors[1])
    assert_same(drafter, StageLoop(draft=tmp_path / "1", schedule="static", network=network).drafter, named=False)


def test_a_drafter_lies_at_home(network, tmp_path, monkeypatch):
    """As the flag may say."""
    exported(exports.deepspec, {}, 0, tmp_path / "0")
    monkeypatch.setenv("HOME", str(tmp_path))
    drafter = StageLoop(schedule="static", network=network).drafter
    by_folder(drafter, "~/0")
    assert drafter.describe()["path"] == str(tmp_path / "0")


def test_an_operators_list_stays(network, tmp_path):
    """Also where a list lies next to the new drafter."""
    save_token_ids(tmp_path / LIST, [3, 5, 8])
    with_lists({})(0, tmp_path / "new")
    drafter = StageLoop(schedule="static", network=network).drafter
    drafter._checkpoint = drafter._checkpoint.proposing(tmp_path / LIST)
    drafter.heads = ProposalHeads(drafter.model, drafter._checkpoint.token_ids)
    by_folder(drafter, tmp_path / "new")
    fresh = load_draft_model(tmp_path / "new", dtype=torch.float32, device="cpu")
    assert drafter.heads.vocabulary.token_ids.tolist() == [3, 5, 8]
    assert drafter.heads.weights.markov.w2.equal(fresh.markov_head.markov_w2.weight[[3, 5, 8]])


@pytest.mark.parametrize("names", [("d2t",), ("t2d",), ("model.d2t", "model.t2d")])
def test_either_tensor_says_what_is_proposed(network, tmp_path, names):
    tensors = [exported(exports.speculators, BY_FILE, seed, tmp_path / f"{seed}") for seed in range(2)]
    drafter = StageLoop(draft=tmp_path / "0", schedule="static", network=network).drafter
    drafter.write([(name, tensors[1][name.removeprefix("model.")]) for name in names])
    assert drafter.model.token_ids.tolist() == tokens_of(1)
    assert drafter.heads.lm_head.weight.equal(network.get_output_embeddings().weight[tokens_of(1)])


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
        drafter.load_new(str(folder))
    assert all(map(torch.equal, drafter.model.parameters(), before))
    assert drafter.describe()["path"] == str(DRAFT)


OFFSETS = torch.arange(0, 12, 2)
BAD_TENSORS = {
    "d2t": (OFFSETS, r"d2t \[6\] should list the same 256 tokens"),
    "norm.weight ": (torch.zeros(128), "unexpected norm.weight "),
    "fc.weight": (torch.zeros(128, 384).to(torch.float8_e4m3fn), "fc.weight is stored as torch.float8_e4m3fn"),
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


BAD_LISTS = {
    "too few": {"d2t": OFFSETS[:5]},
    "past the vocabulary": {"d2t": OFFSETS + 246},
    "negative": {"d2t": OFFSETS - 1},
    "not ascending": {"d2t": OFFSETS.flip(0)},
    "of no number": {"d2t": torch.full((6,), torch.nan)},
    "wrapping": {"d2t": torch.tensor([0, 2**62, -(2**62), 5, 6, 7])},
    "no row": {"d2t": torch.tensor(3)},
    "of another vocabulary": {"t2d": torch.ones(6, dtype=torch.bool)},
    "two lists": exports.reduced(tokens_of(1), 256) | {"d2t": OFFSETS},
}


@pytest.mark.parametrize("sent", BAD_LISTS.values(), ids=BAD_LISTS)
def test_a_list_that_does_not_fit_leaves_the_old_one(network, tmp_path, sent):
    exported(exports.speculators, BY_FILE, 0, tmp_path / "0")
    drafter = StageLoop(draft=tmp_path / "0", schedule="static", network=network).drafter
    with pytest.raises(CheckpointError, match="should list the same 6 tokens of vocab_size=256"):
        drafter.write(sent.items())
    assert drafter.heads.vocabulary.token_ids.tolist() == drafter.model.token_ids.tolist() == tokens_of(0)


def test_an_lm_head_that_belongs_to_another_list_is_refused(network, tmp_path):
    exported(exports.speculators, BY_FILE, 0, tmp_path / "0")
    drafter = StageLoop(draft=tmp_path / "0", schedule="static", network=network).drafter
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the target's"):
        drafter.write({**exports.reduced(tokens_of(1), 256), LM_HEAD: HEAD[tokens_of(0)]}.items())
