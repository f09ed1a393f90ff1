"""Lets a ``sitecustomize`` module change modules of the server that it is started with."""

import importlib.abc
import importlib.util
import sys

from sglang_dspark import on_cpu


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


def patch_when_imported(name, patch):
    """Have ``patch`` called with the module of this name as soon as it is imported."""
    sys.meta_path.insert(0, Finder(name, patch))


def patch_worker(patch):
    """Have ``patch`` called with the worker's module as soon as it is imported."""
    patch_when_imported("sglang_dspark.worker.worker", patch)


def interpret_adapters():
    """Let a server on a CPU serve adapters by kernels, which are interpreted."""

    def offer(module):
        module.LORA_BACKENDS = {**module.LORA_BACKENDS, "cpu": module.LORA_BACKENDS["cuda"]}

    patch_when_imported("sglang_dspark.engine.launch.flag_checks", offer)


def serve_text_alone():
    """Let a plain server serve a target that reads images, as DSPARK does: its text, without a processor of images."""

    def install(module):
        def make(self, *args, original=module.ModelConfig.__init__, **options):
            original(self, *args, **options | {"enable_multimodal": False})

        module.ModelConfig.__init__ = make

    patch_when_imported("sglang.srt.configs.model_config", install)


def attend_with_sinks():
    """Let a server on a CPU serve a target with attention sinks, see ``sink_attention``."""

    def offer(module):
        module.PREFILL_BACKENDS = {**module.PREFILL_BACKENDS, "cpu": (*module.PREFILL_BACKENDS["cpu"], "intel_amx")}
        module.SINK_BACKENDS = (*module.SINK_BACKENDS, *module.PREFILL_BACKENDS["cpu"])

    patch_when_imported("sglang.srt.layers.attention.attention_registry", _late("sink_attention", "install"))
    patch_when_imported("sglang_dspark.engine.launch.flag_checks", offer)


def complete_cpu():
    """Have a server on a CPU know the quantisation of ``int8_method``, pages, adapters and caches in host memory.

    Its stand-in of SGLang's kernels is that of this working tree, whichever one the environment was switched by.
    """
    on_cpu.watch_imports()

    def allow(module):
        module.HOST_CACHE_DEVICES = module.PAGE_DEVICES = ("cpu", "cuda")

    patch_when_imported("sglang.srt.layers.quantization", _late("int8_method", "offer"))
    patch_when_imported("sglang.srt.mem_cache.allocator.paged", _late("paged_slots", "install"))
    # The first of the modules of adapters that any process imports.
    patch_when_imported("sglang.srt.lora.lora_registry", _late("unpinned", "install"))
    patch_when_imported("sglang_dspark.engine.launch.flag_checks", allow)
    patch_when_imported("sglang.srt.mem_cache.pool_host.mha", _late("host_memory", "install_pools"))
    for name in ("sglang.srt.managers.cache_controller", "sglang.srt.mem_cache.l2_transfer"):
        patch_when_imported(name, _late("host_memory", "install_streams"))


def _late(module, function):
    """Return a patch that is defined in a module beside this one, which is imported no earlier than it is applied."""

    def patch(patched):
        getattr(importlib.import_module(module), function)(patched)

    return patch
