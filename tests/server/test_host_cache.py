"""SGLang's hierarchical cache: a prefix that comes back from host memory brings its draft K/V along."""

from __future__ import annotations

from golden_server import CASES, assert_pool_is_whole, displace, generate, greedy, mixed_bodies, output_ids, policy


def answer_of(server, prompt):
    """Text, drafts and what became of them, and how much of the prompt was cached."""
    [answer] = generate(server, [greedy(prompt, 40, speculation={"trace": True})], 1)
    info = answer["meta_info"]
    drafts = [(entry["draft"], entry["accepted"]) for entry in info["dspark_trace"] if entry is not None]
    return answer["output_ids"], drafts, info["cached_tokens"]


def test_a_prefix_from_host_memory_keeps_its_drafts(host_cache):
    prompt = CASES[1]["prompt_ids"] * 8
    prompt = prompt[:160]
    host_cache.flush_cache()
    with policy(host_cache, "static"):
        text, drafts, cached = answer_of(host_cache, prompt)
        assert cached == 0
        displace(host_cache, 5)
        again, drafts_again, cached = answer_of(host_cache, prompt)
    assert cached >= len(prompt) - 1
    assert (again, drafts_again) == (text, drafts)
    assert sum(accepted for _, accepted in drafts) > len(drafts)
    assert "Allocating draft hierarchical KV host pool" in host_cache.log_path.read_text()


def test_text_equals_the_target_alone(host_cache, plain):
    """Prompts that share a beginning come and go between device and host; no slot is lost."""
    bodies = mixed_bodies(40, seed=41)
    expected = output_ids(plain, bodies)
    for _ in range(2):
        with policy(host_cache, "random"):
            assert output_ids(host_cache, bodies, 8) == expected
    assert_pool_is_whole(host_cache)
