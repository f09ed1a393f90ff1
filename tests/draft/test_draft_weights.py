"""Tests of checkpoints that are loaded and saved, among them files that trainers wrote themselves.

A drafter of a part of the vocabulary gives the same numbers for its tokens.
"""

import json
from contextlib import nullcontext

import pytest
import torch
from canonical_drafter import GEMMA
from dspark_kernels import MarkovWalk
from format_exports import REAL
from reference_decoding import markov_step
from safetensors.torch import load_file, save_file

from sglang_dspark.draft.formats import read, read_config, read_content
from sglang_dspark.draft.reduced_vocabulary import FILE, ProposalHeads, load_token_ids, save_token_ids
from sglang_dspark.draft.stored import check_replacement
from sglang_dspark.draft.weights import (
    ResolvedDrafter,
    check_draft_model,
    load_draft_model,
    random_draft_model,
    save_draft_model,
)
from sglang_dspark.errors import CheckpointError
from sglang_dspark.tools.provenance import REPOSITORY

EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def load(path, dtype=torch.float32):
    return load_draft_model(path, dtype=dtype, device="cpu")


def test_all_unfit_tensors_are_named_in_one_error(make_checkpoint):
    path = make_checkpoint(
        drop=("fc.weight", "layers.1.mlp.up_proj.weight"),
        add={
            "layers.2.input_layernorm.weight": torch.ones(24),
            "norm.weight": torch.ones(25),
            "hidden_norm.weight": torch.ones(24, dtype=torch.int32),
        },
    )
    with pytest.raises(CheckpointError) as error:
        load(path)
    message = str(error.value)
    for problem in (
        "missing fc.weight [24, 72]",
        "missing layers.1.mlp.up_proj.weight [40, 24]",
        "unexpected layers.2.input_layernorm.weight",
        "misshapen norm.weight [25], expected [24]",
        "not floating point hidden_norm.weight I32",
    ):
        assert problem in message
    assert str(path) in message


def shard(path, parts=2):
    """Turn a single-file checkpoint into a sharded one."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        save_file({name: tensors[name] for name in names[part::parts]}, path / file)
        weight_map |= dict.fromkeys(names[part::parts], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_a_sharded_checkpoint_loads_like_a_single_file(make_checkpoint):
    single, sharded = make_checkpoint(), make_checkpoint()
    shard(sharded, parts=3)
    expected, got = load(single).state_dict(), load(sharded).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "deeper/model.safetensors", ".."])
def test_an_index_names_files_of_its_folder(make_checkpoint, name):
    path = make_checkpoint()
    index = {"weight_map": shard(path) | {"fc.weight": name}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index.json: weight_map names '.*', which is no file of this folder"):
        load(path)


def test_damaged_shards_are_named(make_checkpoint):
    path = make_checkpoint()
    weight_map = shard(path)
    (path / weight_map["fc.weight"]).rename(path / "elsewhere")
    with pytest.raises(CheckpointError, match=weight_map["fc.weight"]):
        load(path)
    (path / "elsewhere").rename(path / weight_map["fc.weight"])
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost.weight": weight_map["fc.weight"]}}))
    with pytest.raises(CheckpointError, match=r"index.json: lists tensors that its shards do not hold: ghost.weight"):
        load(path)
    for content in ("{}", "[", '{"weight_map": ["fc.weight"]}', '{"weight_map": {"fc.weight": 1}}'):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=r"index.json: .*weight_map"):
            load(path)


def test_absent_and_truncated_files_are_named(make_checkpoint):
    path = make_checkpoint()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        load(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor"):
        load(path)


def test_without_own_embeddings_the_target_must_be_bound(make_checkpoint):
    model = load(make_checkpoint(drop=(EMBED, LM_HEAD)))
    with pytest.raises(CheckpointError, match=r"no embed_tokens.weight: bind the target's"):
        model.embed(torch.tensor([1]))
    with pytest.raises(CheckpointError, match=r"no lm_head.weight: bind the target's"):
        _ = model.lm_head_weight
    embed, lm_head = torch.randn(19, 24), torch.randn(19, 24)
    assert model.bind_target(embed, lm_head) == (EMBED, LM_HEAD)
    assert torch.equal(model.embed(torch.tensor([4, 4, 0])), embed[[4, 4, 0]])
    assert torch.equal(model.lm_head_weight, lm_head)


def test_equal_own_copies_are_dropped_and_different_ones_kept(make_checkpoint):
    path = make_checkpoint()
    stored = load_file(path / "model.safetensors")
    model = load(path)
    target_embed, other_head = stored[EMBED].clone(), stored[LM_HEAD] + 1e-6
    assert model.bind_target(target_embed, other_head) == (EMBED,)
    assert model.embed_tokens is None and model.embed_weight.data_ptr() == target_embed.data_ptr()
    assert torch.equal(model.lm_head_weight, stored[LM_HEAD])
    assert [name for name, _ in model.named_parameters() if name in (EMBED, LM_HEAD)] == [LM_HEAD]


def test_own_copies_are_compared_in_the_targets_dtype(make_checkpoint):
    path = make_checkpoint()
    stored = load_file(path / "model.safetensors")
    model = load(path)
    embed, lm_head = stored[EMBED].bfloat16(), stored[LM_HEAD].bfloat16()
    assert model.bind_target(embed, lm_head) == (EMBED, LM_HEAD)
    assert model.embed(torch.tensor([1])).dtype == torch.float32
    assert model.lm_head_weight.dtype == torch.bfloat16


def test_an_embedding_of_the_target_is_scaled_as_the_target_does(make_checkpoint):
    """A copy of it also; another one of the drafter's own is not."""
    path, token = make_checkpoint(), torch.tensor([5])
    own = load_file(path / "model.safetensors")[EMBED]
    for embed, expected in ((own.clone(), own[token] * 8), (own + 1, own[token])):
        model = load(path)
        model.bind_target(embed, None, embed_scale=8.0)
        torch.testing.assert_close(model.embed(token), expected)


def test_what_cannot_be_read_of_the_target_stays_the_models_own(make_checkpoint):
    path = make_checkpoint()
    stored = load_file(path / "model.safetensors")
    model = load(path)
    assert model.bind_target(stored[EMBED].clone(), None) == (EMBED,)
    assert torch.equal(model.lm_head_weight, stored[LM_HEAD])
    assert model.bind_target(None, stored[LM_HEAD].clone()) == (LM_HEAD,)


def test_weights_that_the_dtype_does_not_reach_are_refused(make_checkpoint):
    path = make_checkpoint(drop=("fc.weight",), add={"fc.weight": torch.full((24, 72), 7e4)})
    load(path, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"fc.weight has values up to 7e\+04.*float16.*pass --dtype bfloat16"):
        load(path, torch.float16)


@pytest.mark.parametrize("which", [0, 1])
def test_a_target_of_another_vocabulary_is_refused(make_checkpoint, which):
    weights = [torch.zeros(19, 24), torch.zeros(19, 24)]
    weights[which] = torch.zeros(20, 24)
    with pytest.raises(CheckpointError, match=r"shape \[20, 24\].*needs \[vocab_size, hidden_size\] = \[19, 24\]"):
        load(make_checkpoint()).bind_target(*weights)


NETWORKS = {head: {"markov_head_type": head} for head in ("vanilla", "gated", "rnn")}
NETWORKS |= {"Gemma": GEMMA, "Gemma, own values": GEMMA | {"attention_k_eq_v": False}}


@pytest.mark.parametrize("keys", NETWORKS.values(), ids=NETWORKS)
def test_a_model_is_its_file_and_a_saved_one_loads_back_identical(make_checkpoint, tmp_path, keys):
    """Every tensor of the file stands under its name, and of all of them a file is written."""
    path = make_checkpoint(num_hidden_layers=1, layer_types=..., **keys)
    model, stored = load(path), load_file(path / "model.safetensors")
    assert model.state_dict().keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    save_draft_model(model, tmp_path / "out" / "saved", include_embeddings=True)
    again, written = load(tmp_path / "out" / "saved"), read(tmp_path / "out" / "saved")
    assert again.config == model.config and (written.unread_keys, written.remarks) == ((), ())
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_embeddings_are_saved_on_request_even_when_they_are_the_targets(make_checkpoint, tmp_path):
    model = load(make_checkpoint(drop=(EMBED, LM_HEAD)))
    tied = torch.randn(19, 24)
    model.bind_target(tied, tied)
    save_draft_model(model, tmp_path / "full", include_embeddings=True)
    save_draft_model(model, tmp_path / "small", include_embeddings=False)
    full, small = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "small"))
    assert torch.equal(full[EMBED], tied) and torch.equal(full[LM_HEAD], tied)
    assert full.keys() - small.keys() == {EMBED, LM_HEAD}
    assert load(tmp_path / "small").embed_tokens is None
    assert json.loads((tmp_path / "full" / "config.json").read_text())["dtype"] == "float32"


def test_half_precision_spares_the_confidence_head_and_the_rotary_table(make_checkpoint):
    path = make_checkpoint()
    model = load(path, torch.bfloat16)
    stored = load_file(path / "model.safetensors")
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    float32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert float32 == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert torch.equal(model.confidence_head.proj.weight, stored["confidence_head.proj.weight"])
    assert model.rotary.inv_freq.dtype == torch.float32
    assert not any("inv_freq" in name for name in model.state_dict())


def test_a_look_finds_what_loading_would(make_checkpoint):
    check_draft_model(make_checkpoint())
    path = make_checkpoint(drop=("fc.weight",))
    with pytest.raises(CheckpointError, match=r"missing fc\.weight"):
        check_draft_model(path)
    (path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_draft_model(path)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_random_weights_of_a_shape(make_checkpoint, head):
    """They need no file of weights, fill every tensor, and are the same on every rank."""
    path = make_checkpoint(markov_head_type=head)
    (path / "model.safetensors").unlink()
    config = read_config(path)
    first, second = (random_draft_model(config, dtype=torch.bfloat16, device="cpu") for _ in range(2))
    assert first.confidence_head.proj.weight.dtype == torch.float32
    assert first.fc.weight.dtype == torch.bfloat16
    tensors = first.state_dict()
    assert EMBED not in tensors and LM_HEAD not in tensors
    for name, tensor in second.state_dict().items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.isfinite().all() and tensor.abs().max() > 0
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    first.bind_target(embedding, embedding)
    assert first.lm_head_weight.shape == (config.vocab_size, config.hidden_size)


IDS = [3, 5, 8, 21, 40]


@pytest.fixture
def model(golden_dir):
    return load_draft_model(golden_dir / "vanilla_g7", dtype=torch.float32, device="cpu")


def test_heads_give_the_same_numbers_for_their_tokens(model):
    hidden, tokens = torch.randn(4, model.config.hidden_size), torch.tensor([1, 7, 21, 50])
    whole, part = ProposalHeads(model, None), ProposalHeads(model, IDS)
    torch.testing.assert_close(part.base_logits(hidden), whole.base_logits(hidden)[:, IDS])
    logits, part_logits = (
        MarkovWalk(heads.weights.markov, hidden[:, None]).corrected(tokens, heads.base_logits(hidden), None)
        for heads in (whole, part)
    )
    torch.testing.assert_close(part_logits, logits[:, IDS])
    bias, _, _ = markov_step(model.markov_head, tokens, hidden, None)
    assert torch.equal(logits, whole.base_logits(hidden) + bias)


def test_file(tmp_path):
    assert load_token_ids(tmp_path, 50) is None
    save_token_ids(tmp_path / FILE, [8, 3, 5])
    assert load_token_ids(tmp_path, 50) == [3, 5, 8]


def test_a_list_elsewhere_takes_the_place_of_the_drafters(golden_dir, make_checkpoint, tmp_path):
    save_token_ids(tmp_path / "list.json", IDS)
    drafter = ResolvedDrafter.read(golden_dir / "vanilla_g7")
    assert (drafter.num_proposed, drafter.proposing(tmp_path / "list.json").token_ids) == (256, IDS)
    assert drafter.with_its_list(drafter).token_ids is None
    assert drafter.proposing(tmp_path / "list.json").with_its_list(drafter).token_ids == IDS
    own = ResolvedDrafter.read(make_checkpoint(draft_vocab_size=4))
    with pytest.raises(CheckpointError, match="has heads for the 4 tokens that it was trained for"):
        own.proposing(tmp_path / "list.json")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"version": 2, "token_ids": [1]}),
        json.dumps({"version": 1, "token_ids": []}),
        json.dumps({"version": 1, "token_ids": [1, 1]}),
        json.dumps({"version": 1, "token_ids": [2, 1]}),
        json.dumps({"version": 1, "token_ids": [1, 50]}),
        json.dumps({"version": 1, "token_ids": [-1, 3]}),
        json.dumps({"version": 1, "token_ids": [1.5]}),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(CheckpointError, match=FILE):
        load_token_ids(tmp_path, 50)


TRAINERS = json.loads((REPOSITORY / "benchmarks" / "results" / "trainers.json").read_text())["trainers"]


@pytest.mark.parametrize(("trainer", "drafter"), REAL)
def test_files_of_trainers_are_read_without_a_question(trainer, drafter):
    kept = REAL[trainer, drafter]
    reading = read_content(kept["config"], origin="config.json", shapes=kept["shapes"])
    assert reading.config == read_content(kept["read"], origin="canonical").config
    assert reading.format == TRAINERS[trainer]["drafters"][drafter]["format"]
    assert not any(remark.doubtful for remark in reading.remarks)


def test_drafters_of_trainers_draft_here_as_they_do_there():
    refused = []
    for trainer, found in TRAINERS.items():
        for drafter, case in found["drafters"].items():
            if "refused" in case:
                refused.append((trainer, drafter))
            else:
                assert max(case["worst_difference"].values()) < 1e-4, (trainer, drafter)
                assert (case["equal_blocks"], case["questions"]) == ("5 of 5", []), (trainer, drafter)
    assert refused == [("speculators", "dspark, anchor does not predict, rnn")]


SERVED = {"model.embed_tokens.weight": (6, 4), "model.layers.0.mlp.weight": (4, 3), "lm_head.weight": (6, 4)}
REPLACEMENTS: dict[str, tuple[dict[str, tuple[int, ...] | None], bool, str]] = {
    "the same": ({}, False, ""),
    "a missing layer": ({"model.layers.0.mlp.weight": None}, True, r"model\.layers\.0\.mlp\.weight is missing"),
    "another shape": ({"model.layers.0.mlp.weight": (4, 2)}, False, r"\[4, 2\], and \[4, 3\]"),
    "a missing head": ({"lm_head.weight": None}, False, r"lm_head\.weight is missing"),
    "a missing head that is the embedding": ({"lm_head.weight": None}, True, ""),
    "a tensor more": ({"model.layers.0.scale": (1,)}, False, ""),
    "other names": (dict.fromkeys(SERVED) | {"layers.0.w2": (4, 3)}, False, ""),
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_a_replacement_has_the_tensors_of_the_served_checkpoint(tmp_path, kind):
    changes, tied, refused = REPLACEMENTS[kind]
    for folder, shapes in (("served", SERVED), ("new", SERVED | changes)):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items() if shape is not None}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=refused) if refused else nullcontext():
        check_replacement(tmp_path / "new", tmp_path / "served", tied=tied)
    check_replacement(tmp_path / "new", tmp_path / "nowhere", tied=tied)
