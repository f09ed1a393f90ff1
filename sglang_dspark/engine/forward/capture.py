"""Ask SGLang's model of a target for hidden states and for its embedding, whatever its class calls that."""

from operator import attrgetter
from typing import Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from sglang_dspark.draft.families import family_of
from sglang_dspark.engine.sglang_types import ModelRunner, ScheduleBatch


def text_model(runner: ModelRunner) -> Any:
    """Return the model that reads text: the runner's, or a part of it if that one also reads images."""
    family = family_of(runner.model_config.hf_config.architectures)
    return attrgetter(family.text)(runner.model) if family.text else runner.model


def make_capturable(runner: ModelRunner) -> None:
    """Give the runner's model ``set_dflash_layers_to_capture``, and the one that reads text ``get_input_embeddings``.

    All of SGLang's methods take the 0-based layers whose outputs are wanted. Without an argument that of EAGLE3 chooses
    layers of its own, which DSPARK never does.
    """
    family, model, text = family_of(runner.model_config.hf_config.architectures), runner.model, text_model(runner)
    if family.text or family.capture == "eagle3":
        model.set_dflash_layers_to_capture = getattr(text, f"set_{family.capture}_layers_to_capture")
    if family.embedding:
        embedding = attrgetter(family.embedding)(text)
        text.get_input_embeddings = lambda: embedding


def capturing_forward(batch: ScheduleBatch, runner: ModelRunner) -> ForwardBatch:
    """Return the forward of a prefill that returns the tapped hidden states of all its tokens."""
    return ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )
