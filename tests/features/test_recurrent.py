"""Tests of recurrent layers: their flags, their cache, and their states after rejected drafts."""

import re
from pathlib import Path

import pytest
import torch
from dspark_kernels import StateRows, causal_conv_rows, kernels_anywhere
from family_targets import written_target
from random_drafter import random_drafter
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_objects import batch, forward, found_by, launch_context, partly, runner, server_args
from stage_loop import RecordedGraph

from sglang_dspark.engine import hooks
from sglang_dspark.engine.flags import MIN_REQUESTS, broken_rules
from sglang_dspark.engine.hooks import install
from sglang_dspark.engine.verify import DSparkVerifyInput
from sglang_dspark.errors import ConfigError
from sglang_dspark.features import recurrent
from sglang_dspark.features.recurrent import FEATURE, check_room, recurrence
from sglang_dspark.features.recurrent import layers as recurrent_layers
from sglang_dspark.features.recurrent.layers import CapturedStates, RecurrentBackend
from sglang_dspark.tools.launch import PLUGIN

HYBRID = {"architecture": "Qwen3_5ForCausalLM"}
CHOSEN = {"mamba_radix_cache_strategy": "extra_buffer"}


def found(**given):
    """Return the message of the check of snapshots, for a start with the golden drafter."""
    return found_by("snapshots of states", launch_context(**{"target": HYBRID} | CHOSEN | given))


def test_snapshots_follow_each_other_no_faster_than_steps_under_overlap():
    assert re.search("--mamba-track-interval=15 and .*; pass 16 or more", found(mamba_track_interval=15))
    assert found(mamba_track_interval=16) is None
    assert found(mamba_track_interval=1, mamba_radix_cache_strategy="no_buffer") is None
    assert found(mamba_track_interval=1, target={}) is None


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"enable_hierarchical_cache": True}, {"enable_hierarchical_cache": False}),
        ({"enable_linear_replayssm_spec": True}, {"enable_linear_replayssm_spec": False}),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, {"mamba_radix_cache_strategy": "extra_buffer"}),
        ({"linear_attn_prefill_backend": "cutedsl"}, {"linear_attn_prefill_backend": "triton"}),
        ({"linear_attn_backend": "flashinfer"}, {"linear_attn_backend": "triton"}),
        ({"linear_attn_decode_backend": "flashinfer"}, {}),
    ],
    ids=str,
)
def test_flags_that_change_only_speed(given, becomes):
    def adjusted(**more):
        context = launch_context(**{"prefill": None, "decode": None} | CHOSEN | given | more)
        return {rule.name: rule.served[0] for rule in broken_rules(context, adjusts=True)}

    assert adjusted(target=HYBRID) == becomes
    assert adjusted() == {}


@pytest.mark.parametrize(("device", "packed"), [("cpu", True), ("cpu", False), ("cuda", True)])
def test_convolutions_that_are_packed_on_a_cpu(monkeypatch, device, packed):
    monkeypatch.setattr(recurrent, "cpu_has_amx_support", lambda: packed)
    found = found_by("recurrent layers", launch_context(target=HYBRID, device=device))
    if device == "cpu" and packed:
        assert found.startswith("--model-path: target architecture Qwen3_5ForCausalLM is not served with DSPARK on cpu")
        assert "for AMX" in found and found.endswith("and run sglang-dspark enable-cpu")
    else:
        assert found is None
    assert found_by("recurrent layers", launch_context(device=device)) is None


TOKENIZER = Path(__file__).parents[1] / "data" / "golden" / "target"


@pytest.fixture
def settled(unhooked, monkeypatch, tmp_path):
    """Resolves the arguments of a server on a CPU, of a target of this class; its own hook is there."""
    load_plugins()
    monkeypatch.setattr(hooks, "install", lambda args, *places: install(args, *{"resolution"}.intersection(places)))
    drafter = random_drafter(tmp_path / "draft", "tiny")

    def settle(*flags, architecture="Qwen3_5ForCausalLM"):
        folder = tmp_path / architecture
        target = folder if folder.exists() else written_target(architecture, folder)
        pair = ("--model-path", str(target), "--speculative-draft-model-path", str(drafter))
        args = prepare_server_args([*pair, "--tokenizer-path", str(TOKENIZER), "--device", "cpu", *PLUGIN, *flags])
        args.resolve_once()
        return args

    return settle


def test_states_are_kept_as_a_cpu_can(settled):
    """SGLang would choose snapshots, and end the start by an assertion."""
    for given in ((), ("--mamba-radix-cache-strategy", "no_buffer"), ("--disable-radix-cache",)):
        args = settled(*given)
        assert FEATURE.is_used(args)
        made = resolving_view(args)
        assert (made.mamba_radix_cache_strategy, made.disable_overlap_schedule) == ("no_buffer", True)
    with pytest.raises(ConfigError, match=r"--mamba-radix-cache-strategy=extra_buffer on cpu: .*; drop the flag"):
        settled("--mamba-radix-cache-strategy", "extra_buffer")
    other = settled(architecture="Qwen3ForCausalLM")
    assert not FEATURE.is_used(other) and not resolving_view(other).disable_overlap_schedule


@pytest.mark.parametrize(("given", "expected"), [((), MIN_REQUESTS), (("--max-running-requests", "5"), 5)])
def test_requests_with_states_are_limited_on_a_cpu(settled, given, expected):
    """Without a limit SGLang does not know how many states it shall make."""
    assert resolving_view(settled(*given)).max_running_requests == expected
    assert resolving_view(settled(*given, architecture="Qwen3ForCausalLM")).max_running_requests in (None, 5)


KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, LAYERS = 1, 2, 5, 3, 4, 2  # few: an interpreted head takes long
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
CHANNELS, SLOTS, REQUESTS, LENGTH = 2 * KEYS + VALUES, 14, 3, 17
OF_REQUEST = torch.tensor([0, 4, 8, 2])  # slot by row of SGLang's table
TRACKS = torch.tensor([[0, 0], [5, 9], [1, 13], [12, 7]])  # likewise, two slots in turns
MOST_ROWS, INTERVAL = 6, 8  # of a request in a step; tokens between two states that are kept
WIDTHS = (CHANNELS, VALUE_HEADS, VALUE_HEADS)


def pool(seed, dtype):
    """States and windows of prompts, [layers, slots, ...]."""
    draw = torch.Generator().manual_seed(seed)
    temporal = torch.randn(LAYERS, SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=draw)
    window = torch.randn(LAYERS, SLOTS, CHANNELS, WIDTH - 1, generator=draw).to(dtype)
    kept = partly(MambaPool, mamba_cache=MambaPool.State(conv=[window], temporal=temporal))
    return partly(
        HybridReqToTokenPool,
        mamba_pool=kept,
        mamba2_layer_index=lambda layer_id: layer_id // 2,
        get_mamba_indices=lambda rows: OF_REQUEST[rows],
        translate_mamba_indices=lambda slots: slots,
    )


def layers():
    draw = torch.Generator().manual_seed(1)
    sizes = {"q_dim": KEYS, "k_dim": KEYS, "v_dim": VALUES}
    sizes |= {"num_q_heads": KEY_HEADS, "num_k_heads": KEY_HEADS, "num_v_heads": VALUE_HEADS}
    weights = {"conv_weights": (CHANNELS, WIDTH), "bias": CHANNELS, "A_log": VALUE_HEADS, "dt_bias": VALUE_HEADS}
    return [
        partly(
            RadixLinearAttention,
            layer_id=2 * i,
            **sizes,
            **{name: torch.randn(shape, generator=draw) for name, shape in weights.items()},
        )
        for i in range(LAYERS)
    ]


def inputs_of(seed):
    """Return the inputs of every request's tokens to each layer, [layers, requests, tokens, ...]."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYERS, REQUESTS, LENGTH, width, generator=draw) for width in WIDTHS]


class Steps:
    """Steps of requests that run eagerly; those of subclasses are replayed.

    Attributes:
        cache: states and windows.
        track_slots: [rows of SGLang's table], where the next state goes.
    """

    def __init__(self, dtype, interval=None):
        kept, self.layers = pool(0, dtype), layers()
        self.cache, self.track_slots = kept.mamba_pool.mamba_cache, TRACKS[:, 0].clone()
        self.backend = RecurrentBackend(partly(GDNAttnBackend, req_to_token_pool=kept), torch.float32, interval)

    def batch(self, requests, seq_lens, indptr, num_rows):
        return forward(
            input_ids=torch.zeros(num_rows, dtype=torch.int64),
            req_pool_indices=requests,
            seq_lens=seq_lens,
            mamba_track_indices=self.track_slots[requests],
            spec_info=partly(DSparkVerifyInput, indptr=indptr),
        )

    def forward(self, batch, parts):
        """Return [layers, N, ...] of rows with inputs ``parts``, [layers, N, ...] each."""
        mixed, a, b = parts
        outputs = [
            self.backend.forward_extend(layer, batch, mixed[i], a[i], b[i])[0] for i, layer in enumerate(self.layers)
        ]
        return torch.stack(outputs)

    def verify(self, parts, requests, sizes, seq_lens):
        """Verify so many rows of these requests; return [layers, N, ...] and what advances the states."""
        indptr = torch.tensor([0, *sizes]).cumsum(0)
        batch = self.batch(torch.tensor(requests), torch.tensor(seq_lens), indptr, sum(sizes))
        self.backend.init_forward_metadata(batch)
        return self.forward(batch, parts), batch.spec_info.advance

    def run(self, parts, requests, sizes, seq_lens, lengths):
        """Verify, and advance by ``lengths`` rows."""
        outputs, advance = self.verify(parts, requests, sizes, seq_lens)
        advance(torch.tensor(lengths))
        return outputs


class SplitSteps(Steps):
    """Replays the smallest verification that has room for a step, and launches what advances the states."""

    fused = False

    def __init__(self, dtype, interval=None, monkeypatch=None):
        super().__init__(dtype, interval)
        monkeypatch.setattr(recurrent_layers, "prepare_mamba_track_for_verify", self.track)
        sizes = [(requests, requests * MOST_ROWS + 2) for requests in (1, 2, 4)]
        self.states = CapturedStates(self.backend, *sizes[-1])
        self.graphs = [self.captured(*size) for size in sizes]

    def track(self, batch):
        batch.mamba_track_indices = self.track_slots[batch.req_pool_indices]

    def captured(self, slots, num_rows):
        """Return a graph, and the buffers that it reads."""
        requests, seq_lens, lengths, indptr = (torch.zeros(slots + i, dtype=torch.int64) for i in (0, 0, 0, 1))
        parts = [torch.full((LAYERS, num_rows, width), torch.nan) for width in WIDTHS]
        batch = self.batch(requests, seq_lens, indptr, num_rows)

        def run():
            self.states.prepare(None, batch)
            outputs = self.forward(batch, parts)
            if self.fused:
                batch.spec_info.advance(lengths)
            return outputs, batch.spec_info.advance

        return RecordedGraph(run), (requests, seq_lens, lengths, indptr, parts)

    def run(self, parts, requests, sizes, seq_lens, lengths):
        graph, buffers = next(found for found in self.graphs if len(found[1][0]) >= len(requests))
        bs, num_rows = len(requests), sum(sizes)
        *of_requests, indptr, inputs = buffers
        for buffer, values in zip(of_requests, (requests, seq_lens, lengths), strict=True):
            buffer[:bs] = torch.tensor(values)
        indptr[1 : bs + 1] = torch.tensor(sizes).cumsum(0)
        indptr[bs + 1 :] = num_rows
        for buffer, part in zip(inputs, parts, strict=True):
            buffer[:, :num_rows] = part
        self.states.stage(batch(req_pool_indices=torch.tensor(requests)))
        outputs, advance = graph.replay()
        if not self.fused:
            advance(torch.tensor(lengths))
        return outputs[:, :num_rows].clone()


class FusedSteps(SplitSteps):
    """Replays verification and commit as one graph."""

    fused = True


def plainly(dtype):
    """Outputs [layers, requests, tokens, ...] of one token after the other, and states and windows before each."""
    steps, outputs, inputs, after = Steps(dtype), [], inputs_of(5), []
    for token in range(LENGTH):
        after.append((steps.cache.temporal.clone(), steps.cache.conv[0].clone()))
        parts = [part[:, :, token] for part in inputs]
        outputs.append(steps.run(parts, [1, 2, 3], [1] * REQUESTS, [token] * REQUESTS, [1] * REQUESTS))
    return torch.stack(outputs, dim=2), [*after, (steps.cache.temporal, steps.cache.conv[0])]


def check(steps, dtype):
    """Serve the requests with drafts, most of them wrong, and compare every output and state, bit for bit."""
    expected, after = plainly(dtype)
    inputs, wrong = inputs_of(5), inputs_of(6)
    draw = torch.Generator().manual_seed(2)
    done, tracked = [0] * REQUESTS, 0
    while min(done) < LENGTH:
        # Requests that are through leave the batch, and the others change their places.
        running = [i for i in torch.randperm(REQUESTS, generator=draw).tolist() if done[i] < LENGTH]
        sizes = [int(torch.randint(1, MOST_ROWS + 1, (), generator=draw)) for _ in running]
        accepted = [int(torch.randint(1, size + 1, (), generator=draw)) for size in sizes]
        right = [min(rows, LENGTH - done[i]) for i, rows in zip(running, accepted, strict=True)]
        parts = []
        for part, other in zip(inputs, wrong, strict=True):
            drafted = [
                torch.cat([part[:, i, done[i] : done[i] + r], other[:, i, : n - r]], dim=1)
                for i, n, r in zip(running, sizes, right, strict=True)
            ]
            parts.append(torch.cat(drafted, dim=1))
        outputs = steps.run(parts, [i + 1 for i in running], sizes, [done[i] for i in running], right)
        for i, r, output in zip(running, right, outputs.split(sizes, dim=1), strict=True):
            assert torch.equal(output[:, :r], expected[:, i, done[i] : done[i] + r])
            before, done[i] = done[i], done[i] + r
            tracked += found_tracked(steps, i + 1, before, done[i], after)
    for i, found in enumerate((steps.cache.temporal, steps.cache.conv[0])):
        assert torch.equal(found[:, OF_REQUEST], after[LENGTH][i][:, OF_REQUEST])
    return tracked


def found_tracked(steps, request, before, now, after):
    """Compare what a request's second slot got, and take turns as SGLang does; whether it was to get anything."""
    interval, slot = steps.backend.track_interval, int(steps.track_slots[request])
    kept = now // interval * interval if interval else 0
    if kept <= before:
        return False
    for found, expected in zip((steps.cache.temporal, steps.cache.conv[0]), after[kept], strict=True):
        assert torch.equal(found[:, slot], expected[:, OF_REQUEST[request]])
    steps.track_slots[request] = TRACKS[request].sum() - slot
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_and_windows_after_rejected_drafts(dtype):
    """Bit for bit: every row is computed alone, so that it does not matter what was verified next to it."""
    assert not check(Steps(dtype), dtype)


def test_states_of_the_radix_cache():
    """Each request leaves one at every multiple of the interval, from the middle of a step."""
    assert check(Steps(torch.float32, INTERVAL), torch.float32) == REQUESTS * (LENGTH // INTERVAL)


def test_nothing_else_is_written():
    """Neither states of others nor those of the padding."""
    steps = Steps(torch.float32, INTERVAL)
    check(steps, torch.float32)
    others = [slot for slot in range(SLOTS) if slot not in (*OF_REQUEST.tolist()[1:], *TRACKS[1:].flatten().tolist())]
    before = pool(0, torch.float32).mamba_pool.mamba_cache
    assert torch.equal(steps.cache.temporal[:, others], before.temporal[:, others])
    assert torch.equal(steps.cache.conv[0][:, others], before.conv[0][:, others])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [FusedSteps, pytest.param(SplitSteps, marks=pytest.mark.thorough)])
def test_captured_steps(monkeypatch, steps):
    """Their sizes take turns, each has tensors of its own, and rows of padding hold NaN."""
    with kernels_anywhere():
        made = steps(torch.float32, INTERVAL, monkeypatch)
        assert check(made, torch.float32) == REQUESTS * (LENGTH // INTERVAL)


def test_a_verification_leaves_states_and_windows_alone():
    steps = Steps(torch.float32)
    steps.verify([part[:, :2].flatten(1, 2)[:, :9] for part in inputs_of(5)], [3, 1], [5, 4], [7, 7])
    before = pool(0, torch.float32).mamba_pool.mamba_cache
    assert torch.equal(steps.cache.temporal, before.temporal)
    assert torch.equal(steps.cache.conv[0], before.conv[0])


def test_rows_of_dummy_forwards():
    """SGLang tunes experts by forwards of its own, with as many rows for every request."""
    steps, parts = Steps(torch.float32), [part[:, :2, :3].flatten(1, 2) for part in inputs_of(5)]
    rows = steps.batch(torch.tensor([3, 1]), None, None, 6)
    rows.mamba_track_indices, rows.spec_info = None, partly(DFlashVerifyInput, draft_token_num=3)
    steps.backend.init_forward_metadata(rows)
    expected, _ = steps.verify(parts, [3, 1], [3, 3], [7, 7])
    assert torch.equal(steps.forward(rows, parts), expected)


def test_the_convolution_is_that_of_the_whole_text():
    draw = torch.Generator().manual_seed(3)
    x, weight = torch.randn(11, 6, generator=draw), torch.randn(6, WIDTH, generator=draw)
    whole = torch.nn.functional.conv1d(x.T[None], weight[:, None], padding=WIDTH - 1, groups=6)[0, :, :11].T
    window = x[: WIDTH - 1].T[None]
    rows = StateRows(torch.tensor([0, 8]), torch.tensor([0]))
    found = causal_conv_rows(x[WIDTH - 1 :], weight, None, window, rows)
    torch.testing.assert_close(found, torch.nn.functional.silu(whole[WIDTH - 1 :]))


def test_prompts_are_sglangs():
    """Whatever is no verification goes to its own backend, and so does what else it is asked."""
    asked = []
    stock = partly(GDNAttnBackend, req_to_token_pool=None, pad_slot_id=64)
    stock.init_forward_metadata, stock.forward_extend = asked.append, lambda **given: given["mixed_qkv"]
    backend = RecurrentBackend(stock, torch.float32)
    prompt = forward(ForwardMode.EXTEND)
    backend.init_forward_metadata(prompt)
    assert asked == [prompt]
    assert backend.forward_extend(None, prompt, "rows", None, None) == "rows"
    assert backend.pad_slot_id == 64


OF_SGLANG = partly(GDNAttnBackend, req_to_token_pool=pool(0, torch.float32))


def test_a_shortage_of_states_ends_the_start():
    """A default may be lowered, a number that was asked for may not."""
    backend = RecurrentBackend(OF_SGLANG, torch.float32)
    full = partly(MHATokenToKVPool, size=1000)
    target = runner(max_running_requests=3, token_to_kv_pool=full, server_args=server_args())
    for asked in (None, 2, 3):
        target.server_args.max_running_requests = asked
        check_room(backend, target)
    target.server_args.max_running_requests = 4
    with pytest.raises(
        ConfigError,
        match=r"^--max-running-requests=4: there is room for 13 recurrent states of 0.00 MB.*"
        r" pass --max-running-requests 3 or less, or make room with --mamba-full-memory-ratio",
    ):
        check_room(backend, target)
    target.token_to_kv_pool.size = 6  # tokens are short, and SGLang says so
    check_room(backend, target)


def test_the_recurrence_is_named():
    """Whichever worker serves it."""
    ours = RecurrentBackend(OF_SGLANG, torch.float32)
    for backend, name in ((ours, "GDN"), (OF_SGLANG, "GDN"), (None, None)):
        both = partly(HybridLinearAttnBackend, linear_attn_backend=backend)
        assert recurrence(runner(attn_backend=both)) == {"recurrence": name}
