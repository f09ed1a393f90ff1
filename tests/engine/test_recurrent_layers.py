"""States and windows of recurrent layers: after any number of rejected drafts they are those of plain decoding."""

from types import SimpleNamespace

import pytest
import torch
from dspark_kernels import StateRows, causal_conv_rows

from sglang_dspark.engine.forward.recurrent_layers import RecurrentBackend

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, LAYERS = 2, 4, 5, 3, 4, 2
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
CHANNELS, SLOTS, REQUESTS, LENGTH = 2 * KEYS + VALUES, 9, 3, 40
OF_REQUEST = torch.tensor([0, 4, 8, 2])  # slot by row of SGLang's table
VERIFY = SimpleNamespace(is_target_verify=lambda: True)


def pool(seed, dtype):
    """States and windows of prompts, [layers, slots, ...]."""
    draw = torch.Generator().manual_seed(seed)
    temporal = torch.randn(LAYERS, SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=draw)
    window = torch.randn(LAYERS, SLOTS, CHANNELS, WIDTH - 1, generator=draw).to(dtype)
    return SimpleNamespace(
        mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(conv=[window], temporal=temporal)),
        mamba2_layer_index=lambda layer_id: layer_id // 2,
        get_mamba_indices=lambda rows: OF_REQUEST[rows],
        translate_mamba_indices=lambda slots: slots,
    )


def layers():
    draw = torch.Generator().manual_seed(1)
    return [
        SimpleNamespace(
            layer_id=2 * i,
            conv_weights=torch.randn(CHANNELS, WIDTH, generator=draw),
            bias=torch.randn(CHANNELS, generator=draw),
            A_log=torch.randn(VALUE_HEADS, generator=draw),
            dt_bias=torch.randn(VALUE_HEADS, generator=draw),
            q_dim=KEYS,
            k_dim=KEYS,
            v_dim=VALUES,
            num_q_heads=KEY_HEADS,
            num_k_heads=KEY_HEADS,
            num_v_heads=VALUE_HEADS,
        )
        for i in range(LAYERS)
    ]


def inputs_of(seed):
    """Return the inputs of every request's tokens to each layer, [layers, requests, tokens, ...]."""
    draw = torch.Generator().manual_seed(seed)
    shape = (LAYERS, REQUESTS, LENGTH)
    return [torch.randn(*shape, width, generator=draw) for width in (CHANNELS, VALUE_HEADS, VALUE_HEADS)]


def verify(backend, parts, rows, sizes):
    """Run one verification; ``parts`` are the rows' inputs, [layers, N, ...]. Return [layers, N, ...]."""
    indptr = torch.tensor([0, *sizes]).cumsum(0)
    batch = SimpleNamespace(
        forward_mode=VERIFY, req_pool_indices=torch.tensor(rows), spec_info=SimpleNamespace(indptr=indptr)
    )
    backend.init_forward_metadata(batch)
    mixed, a, b = parts
    return torch.stack(
        [backend.forward_extend(layer, batch, mixed[i], a[i], b[i])[0] for i, layer in enumerate(layers())]
    )


def plainly(dtype):
    """Outputs [layers, requests, tokens, ...], states and windows of one token after the other."""
    kept = pool(0, dtype)
    backend, outputs, inputs = RecurrentBackend(SimpleNamespace(req_to_token_pool=kept)), [], inputs_of(5)
    for token in range(LENGTH):
        outputs.append(verify(backend, [part[:, :, token] for part in inputs], [1, 2, 3], [1] * REQUESTS))
        backend.advance(torch.ones(REQUESTS, dtype=torch.int64))
    return torch.stack(outputs, dim=2), kept.mamba_pool.mamba_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_and_windows_after_rejected_drafts(dtype):
    """Bit for bit: every row is computed by itself, so that it does not matter what was verified beside it."""
    expected, cache = plainly(dtype)
    kept, inputs, wrong = pool(0, dtype), inputs_of(5), inputs_of(6)
    backend = RecurrentBackend(SimpleNamespace(req_to_token_pool=kept))
    draw = torch.Generator().manual_seed(2)
    done = [0] * REQUESTS
    while min(done) < LENGTH:
        # Requests that are through leave the batch, and the others change their places.
        running = [i for i in torch.randperm(REQUESTS, generator=draw).tolist() if done[i] < LENGTH]
        sizes = [int(torch.randint(1, 7, (), generator=draw)) for _ in running]
        accepted = [int(torch.randint(1, size + 1, (), generator=draw)) for size in sizes]
        right = [min(rows, LENGTH - done[i]) for i, rows in zip(running, accepted, strict=True)]
        parts = []
        for part, other in zip(inputs, wrong, strict=True):
            drafted = [
                torch.cat([part[:, i, done[i] : done[i] + r], other[:, i, : n - r]], dim=1)
                for i, n, r in zip(running, sizes, right, strict=True)
            ]
            parts.append(torch.cat(drafted, dim=1))
        outputs = verify(backend, parts, [i + 1 for i in running], sizes).split(sizes, dim=1)
        for i, r, output in zip(running, right, outputs, strict=True):
            assert torch.equal(output[:, :r], expected[:, i, done[i] : done[i] + r])
            done[i] += r
        backend.advance(torch.tensor(right))
    after = kept.mamba_pool.mamba_cache
    assert torch.equal(after.temporal, cache.temporal)
    assert torch.equal(after.conv[0], cache.conv[0])


def test_a_verification_leaves_states_and_windows_alone():
    kept = pool(0, torch.float32)
    backend = RecurrentBackend(SimpleNamespace(req_to_token_pool=kept))
    verify(backend, [part[:, :2].flatten(1, 2)[:, :9] for part in inputs_of(5)], [3, 1], [5, 4])
    before = pool(0, torch.float32).mamba_pool.mamba_cache
    assert torch.equal(kept.mamba_pool.mamba_cache.temporal, before.temporal)
    assert torch.equal(kept.mamba_pool.mamba_cache.conv[0], before.conv[0])


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
    stock = SimpleNamespace(
        req_to_token_pool=None,
        init_forward_metadata=asked.append,
        forward_extend=lambda **given: given["mixed_qkv"],
        mamba_chunk_size=64,
    )
    backend = RecurrentBackend(stock)
    prompt = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: False))
    backend.init_forward_metadata(prompt)
    assert asked == [prompt]
    assert backend.forward_extend(None, prompt, "rows", None, None) == "rows"
    assert backend.mamba_chunk_size == 64
