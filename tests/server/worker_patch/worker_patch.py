"""Lets a ``sitecustomize`` module change modules of the server that it is started with."""

import importlib.abc
import importlib.util
import sys

WORKER = "sglang_dspark.worker.worker"
QUANTISATIONS = "sglang.srt.layers.quantization"
ALLOCATOR = "sglang.srt.mem_cache.allocator.paged"
ATTENTION = "sglang.srt.layers.attention.attention_registry"
MODEL_CONFIG = "sglang.srt.configs.model_config"
FLAG_CHECKS = "sglang_dspark.engine.launch.flag_checks"
HOST_POOLS = "sglang.srt.mem_cache.pool_host.mha"
HOST_COPIES = ("sglang.srt.managers.cache_controller", "sglang.srt.mem_cache.l2_transfer")
ADAPTERS = "sglang.srt.lora.lora_registry"  # the first of their modules that any process imports


class Finder(importlib.abc.MetaPathFinder):
    """Calls ``patch`` with one module right after it was loaded."""

    def __init__(self, name, patch):
        self._name, self._patch = name, patch

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._patch(module)

        spec.loader.exec_module = exec_module
        return spec


def patch_worker(patch):
    """Have ``patch`` called with the worker's module as soon as it is imported."""
    sys.meta_path.insert(0, Finder(WORKER, patch))


def interpret_adapters():
    """Let a server on a CPU serve adapters by kernels, which are interpreted."""

    def offer(module):
        module.LORA_BACKENDS = {**module.LORA_BACKENDS, "cpu": module.LORA_BACKENDS["cuda"]}

    sys.meta_path.insert(0, Finder(FLAG_CHECKS, offer))


def serve_text_alone():
    """Let a plain server serve a target that reads images, as DSPARK does: its text, without a processor of images."""

    def install(module):
        def make(self, *args, original=module.ModelConfig.__init__, **options):
            original(self, *args, **options | {"enable_multimodal": False})

        module.ModelConfig.__init__ = make

    sys.meta_path.insert(0, Finder(MODEL_CONFIG, install))


def attend_with_sinks():
    """Let a server on a CPU serve a target with attention sinks, see ``sink_attention``."""

    def install(module):
        import sink_attention

        sink_attention.install(module)

    def offer(module):
        module.PREFILL_BACKENDS = {**module.PREFILL_BACKENDS, "cpu": (*module.PREFILL_BACKENDS["cpu"], "intel_amx")}
        module.SINK_BACKENDS = (*module.SINK_BACKENDS, *module.PREFILL_BACKENDS["cpu"])

    sys.meta_path[:0] = [Finder(ATTENTION, install), Finder(FLAG_CHECKS, offer)]


def complete_cpu():
    """Have a server on a CPU know the quantisation of ``int8_method``, pages, adapters and caches in host memory."""

    def offer(module):
        import int8_method

        int8_method.offer(module)

    def install(module):
        import paged_slots

        paged_slots.install(module)

    def move(module):
        import host_memory

        host_memory.install_streams(module)

    def unpin(module):
        import unpinned

        unpinned.install()

    def allow(module):
        module.HOST_CACHE_DEVICES = ("cpu", "cuda")

    def keep(module):
        import host_memory

        host_memory.install_pools(module)

    sys.meta_path[:0] = [
        Finder(QUANTISATIONS, offer),
        Finder(ALLOCATOR, install),
        Finder(ADAPTERS, unpin),
        Finder(FLAG_CHECKS, allow),
        Finder(HOST_POOLS, keep),
        *(Finder(name, move) for name in HOST_COPIES),
    ]
