"""Loads, saves and replaces the tensors of a drafter.

Other weights for a drafter that serves are checked as a whole, before any of them is written over the old ones.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import Reading, read
from sglang_dspark.draft.formats.checkpoint import open_files
from sglang_dspark.draft.formats.content import DRAFT_TO_TARGET, IS_DRAFTED, TensorRules
from sglang_dspark.draft.model import DraftModel, is_copy
from sglang_dspark.draft.reduced_vocabulary import FILE, load_token_ids, read_token_ids, save_token_ids
from sglang_dspark.draft.stored import FLOATS, SINGLE_FILE, StoredTensors
from sglang_dspark.errors import CheckpointError
from sglang_dspark.files import atomic_write, atomic_write_text


@dataclass(frozen=True)
class ResolvedDrafter:
    """A checked draft checkpoint, without its tensors.

    Attributes:
        path: its folder.
        reading: its format and its configuration.
        token_ids: tokens that it proposes, ascending; None if no file lists them.
        is_listed: whether an operator has listed them.
    """

    path: str
    reading: Reading
    token_ids: list[int] | None
    is_listed: bool = False

    @property
    def config(self) -> DraftConfig:
        """Return the configuration, whatever the format."""
        return self.reading.config

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the small files of a checkpoint, and the names and shapes of its tensors, or raise CheckpointError."""
        reading = read(path)
        return cls(str(path), reading, load_token_ids(path, reading.config.vocab_size))

    def proposing(self, path: str | Path) -> Self:
        """Return the drafter with the tokens that the file at ``path`` lists, in place of a list next to it.

        Raises:
            CheckpointError: the file cannot be read, or the drafter has heads only for some tokens.
        """
        if (own := self.config.draft_vocab_size) is not None:
            raise CheckpointError(f"{self.path} has heads for the {own} tokens that it was trained for, and no others")
        return replace(self, token_ids=read_token_ids(Path(path), self.config.vocab_size), is_listed=True)

    def with_its_list(self, other: Self) -> Self:
        """Return another drafter, with the tokens that an operator has listed for this one."""
        return replace(other, token_ids=self.token_ids, is_listed=True) if self.is_listed else other

    @property
    def num_proposed(self) -> int:
        """Return the number of tokens that it proposes."""
        return self.config.num_proposed if self.token_ids is None else len(self.token_ids)


EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def load_draft_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str, reading: Reading | None = None
) -> DraftModel:
    """Read a checkpoint of any format; the model comes back frozen, its confidence head in float32.

    To train it further, call ``requires_grad_()`` and ``train()`` on it.

    The embedding and the LM head may be absent: the model then needs ``bind_target`` before use.

    Args:
        path: its directory, or a GGUF file.
        reading: of the checkpoint, if it has been read already.

    Raises:
        CheckpointError: config.json is unfit, a file is missing or damaged, or tensors are missing, unexpected,
            misshapen or not floating point; all offending tensors are named in the one message. Or a finite value
            becomes infinite in this dtype.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(path), stack, reading or read(path))
        model = checkpoint.model
        model.to(dtype).to_empty(device=device)
        if model.confidence_head is not None:
            model.confidence_head.float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                stored = checkpoint.tensor(name)
                parameter.copy_(stored)
                if not bool(parameter.isfinite().all()) and bool(stored.isfinite().all()):
                    raise CheckpointError(
                        f"{path}: {name} has values up to {float(stored.abs().max()):.3g}, which the target's dtype "
                        f"{str(parameter.dtype).removeprefix('torch.')} does not reach; pass --dtype bfloat16"
                    )
        ids = checkpoint.token_ids()
        if ids is not None and model.token_ids is not None:
            model.token_ids.copy_(ids)
    return model.freeze()


def listed_tokens(stored: Mapping[str, Tensor], config: DraftConfig, origin: str) -> Tensor | None:
    """Return the ids of the proposed tokens of a reduced vocabulary from its tensors, ascending, on the CPU.

    Args:
        stored: tensors by their names in the file.

    Returns:
        None without such tensors, and if all tokens are proposed.

    Raises:
        CheckpointError: the tensors contradict the configuration or each other.
    """
    given = {name: stored[name].cpu() for name in (DRAFT_TO_TARGET, IS_DRAFTED) if name in stored}
    size, proposed, lists = config.vocab_size, config.num_proposed, []
    if (offsets := given.get(DRAFT_TO_TARGET)) is not None:
        lists.append(offsets.flatten().to(torch.int64) + torch.arange(offsets.numel()))
    if (marks := given.get(IS_DRAFTED)) is not None:
        lists.append(marks.flatten().bool().nonzero().flatten() if marks.numel() == size else torch.arange(0))
    for ids in lists:
        within = len(ids) == proposed and bool((ids >= 0).all() and (ids < size).all())
        if not (within and bool((ids.diff() > 0).all()) and torch.equal(ids, lists[0])):
            named = " and ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
            raise CheckpointError(
                f"{origin}: {named} should list the same {proposed} tokens of vocab_size={size}, ascending; take an "
                "intact checkpoint"
            )
    return lists[0] if lists and config.draft_vocab_size is not None else None


def random_draft_model(config: DraftConfig, *, dtype: torch.dtype, device: torch.device | str) -> DraftModel:
    """Make a frozen drafter of this shape with random weights, which reads the target's embedding and LM head.

    For measuring times: what it proposes is noise. All ranks of a server make the same one.
    """
    with torch.device("meta"):
        model = DraftModel(config, own_embedding=False, own_lm_head=False)
    model.to(dtype).to_empty(device=device)
    if model.confidence_head is not None:
        model.confidence_head.float()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    if model.token_ids is not None:
        model.token_ids.copy_(torch.arange(config.num_proposed))
    return model.freeze()


def check_draft_model(path: str | Path, reading: Reading | None = None) -> frozenset[str]:
    """Look at a checkpoint without reading its weights; raise for what :func:`load_draft_model` does not load.

    Returns:
        Which of :data:`EMBEDDING` and :data:`LM_HEAD` it holds.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(path), stack, reading or read(path))
        checkpoint.token_ids()
        return checkpoint.own


def save_draft_model(model: DraftModel, path: str | Path, include_embeddings: bool) -> None:
    """Write a checkpoint in the canonical form into directory ``path`` (made if needed).

    It has ``config.json``, ``model.safetensors`` and, for a reduced vocabulary, the file of its tokens.
    With ``include_embeddings`` the embedding and LM head in use, own or the target's, are written too, as DeepSpec
    expects; without, the checkpoint is small and needs the target's.
    """
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in (EMBEDDING, LM_HEAD)}
    if include_embeddings:
        tensors |= {EMBEDDING: model.embed_weight, LM_HEAD: model.lm_head_weight}
    # Cloned because frozen K/V weights, and tied target weights, share storage, which safetensors refuses.
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    with atomic_write(path / SINGLE_FILE) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    content = model.config.to_dict() | {"dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    atomic_write_text(path / "config.json", json.dumps(content, indent=2) + "\n")
    if model.token_ids is not None:
        save_token_ids(path / FILE, model.token_ids.tolist())


class _Checkpoint:
    """An open checkpoint whose tensors fit the model of its configuration, which is without memory still.

    Attributes:
        own: of embedding and LM head, those that it holds.
    """

    def __init__(self, folder: Path, stack: ExitStack, reading: Reading) -> None:
        self.folder, self.reading = folder, reading
        self._stored = open_files(folder, stack).tensors or StoredTensors(folder, stack)  # which says that none are
        self._shapes = self._stored.shapes
        self._names = self.reading.rules.names(self._shapes, str(folder))
        self.own = frozenset({EMBEDDING, LM_HEAD} & self._names.keys())
        with torch.device("meta"):
            self.model = DraftModel(
                self.reading.config, own_embedding=EMBEDDING in self.own, own_lm_head=LM_HEAD in self.own
            )
        self._check()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the model, as stored."""
        return self.reading.rules.order(name, self._stored.read(self._names[name]))

    def token_ids(self) -> Tensor | None:
        """Return the ids of the proposed tokens of a reduced vocabulary, ascending; None for all.

        Raises:
            CheckpointError: the checkpoint lacks them or contradicts itself.
        """
        config = self.reading.config
        if DRAFT_TO_TARGET not in self._shapes:
            ids = load_token_ids(self.folder, config.vocab_size)
            if ids is None and config.draft_vocab_size is None:
                return None
            if ids is None or config.draft_vocab_size not in (None, len(ids)):
                raise CheckpointError(
                    f"{self.folder}: draft_vocab_size={config.draft_vocab_size}, but there "
                    f"{'is no list of its tokens (tensor d2t)' if ids is None else f'are {len(ids)} token ids'}; take "
                    "an intact checkpoint"
                )
            return torch.tensor(ids)
        stored = {name: self._stored.read(name) for name in (DRAFT_TO_TARGET, IS_DRAFTED) if name in self._shapes}
        return listed_tokens(stored, config, str(self.folder))

    def _check(self) -> None:
        expected: dict[str, Tensor] = self.model.state_dict()
        names = self._names
        problems = [f"missing {name} {list(expected[name].shape)}" for name in sorted(expected.keys() - names.keys())]
        problems += [f"unexpected {names[name]}" for name in sorted(names.keys() - expected.keys())]
        for name in sorted(expected.keys() & names.keys()):
            shape, dtype = self._shapes[names[name]], self._stored.dtype(names[name])
            if list(shape) != list(expected[name].shape):
                problems.append(f"misshapen {names[name]} {shape}, expected {list(expected[name].shape)}")
            elif dtype not in FLOATS:
                problems.append(f"not floating point {names[name]} {dtype}")
        if problems:
            raise CheckpointError(
                f"{self.folder}: the tensors do not fit config.json: {'; '.join(problems)}. Check that both come from "
                "the same checkpoint, and that it says how tensors are quantised"
            )


TOKEN_IDS = "token_ids"
"""Name of the list of proposed tokens among the tensors of a network."""
_OF_TRAINING = ("origin", "num_anchors")


def check_alike(serving: ResolvedDrafter, other: ResolvedDrafter) -> None:
    """Refuse a drafter whose network is not that of the serving one.

    Raises:
        CheckpointError: names all that differs, with both values.
    """
    different = []
    for name in [field.name for field in fields(DraftConfig) if field.name not in _OF_TRAINING]:
        ours, theirs = getattr(serving.config, name), getattr(other.config, name)
        if ours != theirs and not (name == "num_target_layers" and None in (ours, theirs)):
            different.append(f"{name}={theirs!r}, serving {ours!r}")
    if serving.num_proposed != other.num_proposed:
        different.append(f"proposed tokens ({FILE})={other.num_proposed}, serving {serving.num_proposed}")
    if different:
        raise CheckpointError(
            f"{other.path}: differs from the drafter that serves: {'; '.join(different)}. Only weights can be "
            "replaced: restart the server with this drafter, or train one of the same form"
        )


def fitted(
    model: DraftModel,
    rules: TensorRules,
    given: Mapping[str, Tensor],
    origin: str,
    *,
    head: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return tensors by the names of the network's parameters, and :data:`TOKEN_IDS`; the model stays as it is.

    Args:
        model: serving, its embedding and LM head bound.
        rules: of the checkpoint's format, whose names the tensors have.
        given: some of the network's tensors or all of them. An embedding or LM head that the model reads from its
            target may be among them if it is the target's.
        head: the target's whole LM head, if the model reads the rows of it that its list of tokens names.
        token_ids: the list of tokens, if it is not among the tensors.

    Raises:
        CheckpointError: names all tensors that do not fit.
    """
    parameters, problems = dict(model.named_parameters()), []
    listing = {name.removeprefix("model."): tensor for name, tensor in given.items()}
    token_ids = token_ids if token_ids is not None else listed_tokens(listing, model.config, origin)
    found: dict[str, Tensor] = {} if token_ids is None else {TOKEN_IDS: token_ids}
    rows = model.lm_head_weight if head is None or token_ids is None else head[token_ids.to(head.device)]
    of_target = {EMBEDDING: model.embed_weight, LM_HEAD: rows}
    for name, stored in rules.names(given, origin).items():
        tensor, parameter = given[stored], parameters.get(name)
        if parameter is None and name not in of_target:
            problems.append(f"unexpected {stored} {list(tensor.shape)}")
        elif parameter is None:
            if not is_copy(tensor, of_target[name]):
                problems.append(f"{stored} is not the target's, which the drafter reads in its place")
        elif tensor.shape != parameter.shape:
            problems.append(f"misshapen {stored} {list(tensor.shape)}, expected {list(parameter.shape)}")
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            problems.append(f"{stored} is stored as {tensor.dtype}: send weights that are not quantised")
        elif not bool(tensor.to(parameter.dtype).isfinite().all()):
            problems.append(f"{stored} has values that are no finite numbers in {parameter.dtype}")
        else:
            found[name] = rules.order(name, tensor)
    if problems:
        raise CheckpointError(f"{origin}: {'; '.join(problems)}. Nothing was written: send what the drafter has")
    return found


def whole(
    model: DraftModel, other: DraftModel, origin: str, *, head: Tensor | None, token_ids: Tensor | None
) -> dict[str, Tensor]:
    """Return the tensors of another drafter by the names of the serving one's, as :func:`fitted` does, all of them.

    Raises:
        CheckpointError: some do not fit, or are missing.
    """
    given = dict(other.named_parameters())
    found = fitted(model, TensorRules(), given, origin, head=head, token_ids=token_ids)
    if missing := sorted(dict(model.named_parameters()).keys() - found.keys()):
        raise CheckpointError(
            f"{origin}: has no {', '.join(missing)}, which the drafter that serves has of its own; add it to the "
            "checkpoint, or restart the server with this drafter"
        )
    return found
