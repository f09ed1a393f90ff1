"""Lets SGLang's own DSPARK serve on a CPU, whole: what it lacks there is given literally, in torch.

Python imports this module at start-up when its folder is on ``PYTHONPATH``. What is exercised is real: its worker, its
planner, its draft and verification. What is not: CUDA graphs, hence tiers, and its Triton kernels.
"""

from patching import complete_cpu, late, offer_random_lengths, patch_when_imported

for name, function in (
    ("sglang.srt.arg_groups.choices", "draft_with_torch"),
    ("sglang.srt.arg_groups.speculative_hook", "accept_a_cpu"),
    ("sglang.srt.layers.attention.attention_registry", "verify_with_torch"),
    ("sglang.srt.mem_cache.memory_pool", "copy_no_kv"),
    ("sglang.srt.models.registry", "serve_by_another_name"),
    ("sglang.srt.speculative.dspark_components.dspark_worker_v2", "ignore_streams"),
    ("sglang.kernels.ops.speculative.cache_locs", "find_slots"),
    ("sglang.kernels.ops.speculative.reject_sampling", "sample_with_torch"),
):
    patch_when_imported(name, late("stand_ins", function))
complete_cpu()
offer_random_lengths()
