"""The sampling rules for one request, in plain Python numbers: what the batched references are compared with.

A drafter written row by row from the formulas, without the package: what the model is compared with.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from canonical_drafter import heads_of
from dspark_kernels import Adjustment, RoundKeys, SamplingBatch
from dspark_kernels.noise import Purpose, exponential, uniform
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class Request:
    """Sampling parameters and noise keys of one request."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    key: int = 0
    position: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


def batch_of(requests: list[Request], seed: int, step: Any, device: Any = "cpu") -> tuple[SamplingBatch, RoundKeys]:
    names = "temperature top_k top_p min_p seed".split()
    rows = SamplingBatch.from_lists(*([getattr(r, name) for r in requests] for name in names), device)
    keys, positions = (
        torch.tensor([getattr(r, name) for r in requests], device=device) for name in ("key", "position")
    )
    return rows, RoundKeys(seed, step, keys, positions)


def literal_distribution(logits: torch.Tensor, request: Request) -> list[float]:
    """Probabilities of one row [V] of logits."""
    scaled = [value / request.temperature for value in logits.tolist()]
    top = max(scaled)
    weights = [math.exp(value - top) for value in scaled]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, mass = [0.0] * len(probs), 0.0
    for rank, token in enumerate(order):
        in_top_k = request.top_k == -1 or rank < request.top_k
        in_min_p = probs[token] >= request.min_p * probs[order[0]]
        if in_top_k and mass <= request.top_p and in_min_p:
            kept[token] = probs[token]
        mass += probs[token]
    total = sum(kept)
    return [weight / total for weight in kept]


def literal_adjust(logits: Sequence[float], adjustment: Adjustment, output: Sequence[int]) -> list[float]:
    """Return one row with penalties, minimum length and biases, after ``output``, the tokens emitted before it."""
    adjusted = []
    for token, logit in enumerate(logits):
        occurrences = output.count(token)
        value = logit - adjustment.frequency * occurrences - (adjustment.presence if occurrences else 0.0)
        if token in adjustment.stop_token_ids and len(output) < adjustment.min_new_tokens:
            value = -math.inf
        if occurrences:
            value = value * adjustment.repetition if value < 0 else value / adjustment.repetition
        adjusted.append(value + adjustment.logit_bias.get(token, 0.0))
    return adjusted


def literal_inverse_cdf(weights: list[float], u: float) -> int:
    threshold = u * sum(weights)
    return next(token for token, reached in enumerate(itertools.accumulate(weights)) if reached > threshold)


def literal_choice(logits: torch.Tensor, request: Request, offset: int) -> int:
    """The one token that a greedy or seeded request may take at ``request.position + offset``."""
    if request.greedy:
        values = logits.tolist()
        return values.index(max(values))
    probs = literal_distribution(logits, request)
    noise = exponential(torch.tensor([request.seed]), torch.tensor([request.position + offset]), len(probs))[0].tolist()
    scores = [math.log(p) - math.log(e) if p > 0 else -math.inf for p, e in zip(probs, noise, strict=True)]
    return scores.index(max(scores))


def literal_draw(logits: torch.Tensor, request: Request, u: float, offset: int) -> int:
    if request.greedy or request.seed is not None:
        return literal_choice(logits, request, offset)
    return literal_inverse_cdf(literal_distribution(logits, request), u)


def literal_uniform(keys: RoundKeys, request: Request, slot: int, purpose: Purpose) -> float:
    return uniform(keys.seed, keys.step, torch.tensor([request.key]), slot, purpose).item()


def literal_accept(
    drafts: list[int],
    verify_len: int,
    logits: torch.Tensor,  # [verify_len + 1, V]
    draft_probs: list[list[float]],  # gamma rows
    request: Request,
    keys: RoundKeys,
) -> list[int]:
    """Accepted drafts, then the bonus token."""
    for i in range(verify_len):
        if request.greedy or request.seed is not None:
            choice = literal_choice(logits[i], request, i)
            if drafts[i] != choice:
                return [*drafts[:i], choice]
            continue
        target = literal_distribution(logits[i], request)
        ratio = target[drafts[i]] / draft_probs[i][drafts[i]]
        if literal_uniform(keys, request, i, Purpose.ACCEPT) >= min(1.0, ratio):
            residual = [max(t - d, 0.0) for t, d in zip(target, draft_probs[i], strict=True)]
            return [*drafts[:i], literal_inverse_cdf(residual, literal_uniform(keys, request, i, Purpose.RESIDUAL))]
    u = literal_uniform(keys, request, verify_len, Purpose.BONUS)
    return [*drafts[:verify_len], literal_draw(logits[verify_len], request, u, verify_len)]


class LiteralDraft:
    """Drafting with python loops over rows, layers and heads; float64. The config is in the canonical form."""

    def __init__(self, path):
        self.config = json.loads((path / "config.json").read_text())
        self.w = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
        self.token_ids = list(range(self.config["vocab_size"]))
        if "draft_vocab_size" in self.config:
            self.token_ids = json.loads((path / "draft_vocabulary.json").read_text())["token_ids"]
        self.is_gemma = "Gemma4DSparkModel" in self.config["architectures"]
        self.head_dim, self.kv_heads, self.has_values = heads_of(self.config)
        self.angles, self.score_factor = self.rotation()

    def rotation(self):
        """Angle per position of each channel pair, by transformers, and what the scores are multiplied with."""
        c, rope, head_dim = self.config, self.config["rope_parameters"], self.head_dim
        rope = rope.get("full_attention", rope)
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        if rope.get("rope_type", "default") == "default":
            angles, factor = [rope["rope_theta"] ** (-2 * i / rotated) for i in range(rotated // 2)], 1.0
        else:
            names = ("hidden_size", "num_attention_heads", "max_position_embeddings")
            hugging_face = LlamaConfig(**{name: c[name] for name in names}, head_dim=head_dim, rope_parameters=rope)
            inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hugging_face, "cpu")
            angles = inv_freq.double().tolist()
        scale = 1.0 if self.is_gemma else head_dim**-0.5
        return angles + [0.0] * (head_dim // 2 - len(angles)), scale * factor**2

    def sees(self, layer, slot, position, context_len):
        """Return whether a slot sees the row at this position, which is of the context or of the block."""
        c = self.config
        sliding = c.get("layer_types", ["full_attention"] * 99)[layer] == "sliding_attention"
        own_position = context_len + slot
        causal = c.get("causal_layers", [sliding] * 99)[layer]
        if causal and position > own_position:
            return False
        if not sliding:
            return True
        if c.get("window_from_anchor"):
            return position >= context_len - c["sliding_window"]
        return position > own_position - c["sliding_window"]

    def rms_norm(self, x, name=None):
        normed = x / torch.sqrt((x * x).mean() + self.config["rms_norm_eps"])
        return normed if name is None else normed * self.w[name]

    def rope(self, x, position):
        half = x.shape[0] // 2
        out = x.clone()
        for i in range(half):
            angle = position * self.angles[i]
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def project(self, x, name):
        """The bias is there for the attention's projections, in some configurations."""
        out = self.w[name + ".weight"] @ x
        return out + self.w[name + ".bias"] if name + ".bias" in self.w else out

    def heads(self, x, name, norm, position):
        """Project a row, split it into heads, and normalise and rotate each one when ``norm`` is given."""
        rows = self.project(x, name.removesuffix(".weight")).split(self.head_dim)
        return rows if norm is None else [self.rope(self.rms_norm(row, norm), position) for row in rows]

    def values(self, x, attn):
        """Those of Gemma are projected as its keys are, in some drafters, and have a norm without weights."""
        rows = self.heads(x, attn + ("v_proj.weight" if self.has_values else "k_proj.weight"), None, None)
        return [self.rms_norm(row) for row in rows] if self.is_gemma else rows

    def embedded(self, token):
        row = self.w["embed_tokens.weight"][token]
        return row * math.sqrt(len(row)) if self.is_gemma else row

    def add_attended(self, row, out, p):
        return row + (self.rms_norm(out, p + "post_attention_layernorm.weight") if self.is_gemma else out)

    def convolved(self, rows, inputs, name, side):
        """Rows of a block, by kernels of which a part follows from the inputs of the sublayer; only DFlash 2's."""
        taps = self.config.get("conv_kernel_size", 0)
        if not taps:
            return rows
        out, group = [], self.config["conv_group_size"]
        for j, row in enumerate(rows):
            dynamic = (self.w[name + ".kernel_projection.weight"] @ inputs[j]).view(2, taps, -1)
            total = torch.zeros_like(row)
            for tap in range(min(taps, j + 1)):
                for channel in range(len(row)):
                    factor = self.w[name + ".base_kernel"][side, tap, channel] + dynamic[side, tap, channel // group]
                    total[channel] += factor * rows[j - tap][channel]
            out.append(total)
        return out

    def with_mlp(self, rows, p):
        """The rows after the second half of a layer."""
        before = "pre_feedforward" if self.is_gemma else "post_attention"
        inputs = [self.rms_norm(row, f"{p}{before}_layernorm.weight") for row in rows]
        outs = [self.mlp(x, p) for x in self.convolved(inputs, inputs, p + "mlp_conv", 0)]
        outs = self.convolved(outs, inputs, p + "mlp_conv", 1)
        if not self.is_gemma:
            return [row + out for row, out in zip(rows, outs, strict=True)]
        outs = [self.rms_norm(out, p + "post_feedforward_layernorm.weight") for out in outs]
        return [(row + out) * self.w[p + "layer_scalar"] for row, out in zip(rows, outs, strict=True)]

    def mlp(self, x, p):
        gate, up = (self.w[f"{p}mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        if not self.is_gemma:
            return self.w[p + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return self.w[p + "mlp.down_proj.weight"] @ (gate * (1 + torch.tanh(inner)) / 2 * up)

    def block_hidden(self, features, anchor):
        c, w = self.config, self.w
        t = len(features)
        context = [self.rms_norm(w["fc.weight"] @ row, "hidden_norm.weight") for row in features]
        rows = [self.embedded(token) for token in [anchor] + [c["mask_token_id"]] * (c["block_size"] - 1)]
        for i in range(c["num_hidden_layers"]):
            p = f"layers.{i}."
            inputs = [self.rms_norm(row, p + "input_layernorm.weight") for row in rows]
            normed = self.convolved(inputs, inputs, p + "attention_conv", 0)
            attn = p + "self_attn."
            keys, values, outs = [], [], []
            for position, row in enumerate(context + normed):
                keys.append(self.heads(row, attn + "k_proj.weight", attn + "k_norm.weight", position))
                values.append(self.values(row, attn))
            for j, row in enumerate(normed):
                queries = self.heads(row, attn + "q_proj.weight", attn + "q_norm.weight", t + j)
                mixed = []
                for head, query in enumerate(queries):
                    kv_head = head // (c["num_attention_heads"] // self.kv_heads)
                    seen = [s for s in range(len(keys)) if self.sees(i, j, s, t)]
                    scores = torch.stack([query @ keys[s][kv_head] for s in seen])
                    weights = (scores * self.score_factor).exp()
                    sinks = w.get(attn + "attention_sink_bias")
                    total = weights.sum() + (0 if sinks is None else sinks[head].exp())
                    mix = sum(weight * values[s][kv_head] for weight, s in zip(weights, seen, strict=True)) / total
                    mixed.append(mix * c.get("attention_value_scale", 1.0))
                outs.append(self.project(torch.cat(mixed), attn + "o_proj"))
            outs = self.convolved(outs, inputs, p + "attention_conv", 1)
            rows = self.with_mlp([self.add_attended(row, out, p) for row, out in zip(rows, outs, strict=True)], p)
        first = 0 if c.get("sample_from_anchor", True) else 1
        return [self.rms_norm(row, "norm.weight") for row in rows[first:]]

    def markov(self, token, hidden, state):
        """Bias [V] and the new rnn state."""
        e, w2 = self.w["markov_head.markov_w1.weight"][token], self.w["markov_head.markov_w2.weight"]
        kind = self.config["markov_head_type"]
        if kind == "gated":
            gate = (
                self.w["markov_head.gate_proj.weight"] @ torch.cat([hidden, e]) + self.w["markov_head.gate_proj.bias"]
            )
            return w2 @ (torch.sigmoid(gate) * e), None
        if kind == "selector":
            return w2 @ (self.w["markov_head.hidden_projection.weight"] @ hidden * e), None
        if kind == "rnn":
            z = torch.cat([state, e, hidden])
            joint = self.w["markov_head.joint_proj.weight"] @ z + self.w["markov_head.joint_proj.bias"]
            gate, candidate, output = joint.split(len(e))
            gate = torch.sigmoid(gate)
            return w2 @ torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
        return w2 @ e, None

    def draft(self, features, anchor):
        c = self.config
        hidden = self.block_hidden(features, anchor)
        token, state = anchor, torch.zeros(c["markov_rank"], dtype=torch.float64)
        tokens, base_logits, logits, confidences = [], [], [], []
        for h in hidden:
            u = self.w["lm_head.weight"] @ h
            u = u * c.get("output_multiplier", 1.0)
            if cap := c.get("final_logit_softcapping"):
                u = cap * torch.tanh(u / cap)
            if number := c.get("selector_top_k"):
                u = torch.where(u >= sorted(u.tolist())[-number], u, -torch.inf)
            bias = torch.zeros_like(u)
            if c["markov_rank"]:
                bias, state = self.markov(token, h, state)
            if c["enable_confidence_head"]:
                reads_markov = c["confidence_head_with_markov"]
                x = torch.cat([h, self.w["markov_head.markov_w1.weight"][token]]) if reads_markov else h
                confidences.append(
                    self.w["confidence_head.proj.weight"][0] @ x + self.w["confidence_head.proj.bias"][0]
                )
            token = self.token_ids[int((u + bias).argmax())]
            tokens.append(token)
            base_logits.append(u)
            logits.append(u + bias)
        return tokens, hidden, base_logits, logits, confidences
