"""Lets a ``sitecustomize`` module change modules of the server that it is started with."""

import functools
import importlib.abc
import importlib.util
import itertools
import os
import sys
import time
import types
from pathlib import Path

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
    if name in sys.modules:
        patch(sys.modules[name])
    else:
        sys.meta_path.insert(0, Finder(name, patch))


def patch_worker(patch):
    """Have ``patch`` called with the worker's module as soon as it is imported."""
    patch_when_imported("sglang_dspark.worker.worker", patch)


def offer_random_lengths():
    """Let ``POST /dspark/policy`` take ``{"policy": "random"}`` too, and the step times be known soon."""

    def offer(module):
        from random_policy import RandomPolicy

        def switch_policy(self, fields, original=module.Reports.switch_policy):
            if fields != {"policy": "random"}:
                return original(self, fields)
            schedule = self._driver.schedule
            schedule.policy = RandomPolicy(schedule.max_verify)
            return {"policy": "random"}

        module.Reports.switch_policy = switch_policy

    def measure_briefly(module):
        from sglang_dspark.scheduling import sps_table

        sps_table.MAX_PASSES, module._CONTEXTS, module.LIMIT_S["cpu"] = 1, (64,), 6.0

    patch_when_imported("sglang_dspark.features.reports", offer)
    patch_when_imported("sglang_dspark.engine.measure_steps", measure_briefly)


def offer_a_pace():
    """Let ``POST /dspark/policy`` take ``pace_ms`` with any policy: milliseconds that pass before each step.

    So requests run for as long as a test needs, on machines of all speeds.
    """

    def offer(module):
        def switch_policy(self, fields, original=module.Reports.switch_policy):
            fields = dict(fields)
            keep_pace(self._driver.schedule, fields.pop("pace_ms", 0))
            return original(self, fields)

        module.Reports.switch_policy = switch_policy

    def keep_pace(schedule, pace_ms):
        vars(schedule).pop("choose", None)

        def choose(*args, original=schedule.choose, **kwargs):
            time.sleep(pace_ms / 1e3)
            schedule.invalidate()  # or ``auto`` would learn that steps take so long
            return original(*args, **kwargs)

        if pace_ms:
            schedule.choose = choose

    patch_when_imported("sglang_dspark.features.reports", offer)


def compute_from_copies():
    """Have servers compute linear layers from oneDNN's copies of their weights, however small and fast these are."""

    def patch(module):
        def ways(weights, *, may_copy, same_bits, original=module.fastest_ways):
            if may_copy and not same_bits and str(weights[0].dtype) == "torch.float32":
                return module.Ways([module.Way.COPY], same_bits=False)
            return original(weights, may_copy=may_copy, same_bits=same_bits)

        module.LEAST_BYTES, module.fastest_ways = 0, ways

    patch_when_imported("sglang_dspark.engine.cpu_linear", patch)


def plant_faults():
    """Have whatever only advises fail on servers with ``PLANTED_FAULTS``: two calls of three, one after its work."""

    def plant(module):
        def best_effort(what, instead, original=module.best_effort):
            return lambda function: original(what, instead)(failing(function, what))

        module.best_effort = best_effort

    def failing(function, what):
        calls = itertools.count()

        @functools.wraps(function)
        def planted(*args, **kwargs):
            call = next(calls) % 3 if "PLANTED_FAULTS" in os.environ else 2
            result = None if call == 0 else function(*args, **kwargs)
            if call < 2:
                raise RuntimeError(f"planted in {what}")
            return result

        return planted

    patch_when_imported("sglang_dspark.errors", plant)


def serve_sglangs_own():
    """Let SGLang's own worker serve on a CPU, whole: what it lacks there is given literally, in torch.

    What is exercised is real: its worker, its planner, its draft and verification. What is not: CUDA graphs, hence
    tiers, and its Triton kernels.
    """
    for name, function in (
        ("sglang.srt.arg_groups.choices", "draft_with_torch"),
        ("sglang.srt.arg_groups.speculative_hook", "accept_a_cpu"),
        ("sglang.srt.layers.attention.attention_registry", "verify_with_torch"),
        ("sglang.srt.mem_cache.memory_pool", "copy_no_kv"),
        ("sglang.srt.models.registry", "serve_by_another_name"),
        ("sglang.srt.speculative.dspark_components.dspark_worker_v2", "ignore_streams"),
        ("sglang.kernels.ops.speculative.cache_locs", "find_slots"),
        ("sglang.kernels.ops.speculative.reject_sampling", "sample_with_torch"),
        ("sglang_dspark.features.builtin_worker", "verify_by_request"),
    ):
        patch_when_imported(name, late("stand_ins", function))


def interpret_adapters():
    """Let a server on a CPU serve adapters by kernels, which are interpreted."""

    def offer(module):
        object.__setattr__(module.FEATURE, "flag_rules", ())

    patch_when_imported("sglang_dspark.features.adapters", offer)


def attend_literally():
    """Let a server on a CPU serve targets whose attention SGLang lacks there, see ``literal_attention``.

    Targets without a processor of images serve only text.
    """

    def offer(module):
        module.PREFILL_BACKENDS = {**module.PREFILL_BACKENDS, "cpu": (*module.PREFILL_BACKENDS["cpu"], "intel_amx")}

    def serve_text(module):
        def make(self, model_path, *args, original=module.ModelConfig.__init__, **options):
            reads = (Path(model_path) / "processor_config.json").exists()
            original(self, model_path, *args, **options | ({} if reads else {"enable_multimodal": False}))

        module.ModelConfig.__init__ = make

    patch_when_imported("sglang.srt.configs.model_config", serve_text)
    patch_when_imported("sglang.srt.layers.attention.attention_registry", late("literal_attention", "install"))
    patch_when_imported("sglang_dspark.engine.flags", offer)


def keep_states_of_texts():
    """Let a server on a CPU keep states from the middle of texts, as on a GPU, where steps overlap."""

    def lift(module):
        module._platform_supports_mamba_cache_extra_buffer = lambda: True

    def leave(module):
        module.leave_snapshots_out = lambda args: None

    patch_when_imported("sglang.srt.arg_groups.mamba_hook", lift)
    patch_when_imported("sglang_dspark.features.recurrent", leave)


def complete_cpu():
    """Have a server on a CPU know the quantisation of ``int8_method``, pages, adapters, caches in host memory, masks.

    Its stand-in of SGLang's kernels is that of this working tree, whichever one the environment was switched by. It
    does not wait for a second before it looks whether it listens, nor search all modules for each hook.
    """
    on_cpu.watch_imports()

    def hurry(module):
        module.time = Hurried()

    def search_once(module):
        module._propagate_patch = Bindings()

    def as_on_a_gpu(module):
        module.GPUS = ("cpu", "cuda")

    def mask(module):
        """SGLang masks the tokens of thoughts that no grammar follows only on GPUs."""
        by_grammar = module.XGrammarGrammar.apply_vocab_mask
        module.XGrammarGrammarBackend.apply_vocab_mask = staticmethod(functools.partial(by_grammar, None))

    patch_when_imported("sglang.srt.entrypoints.http_server", hurry)
    patch_when_imported("sglang.srt.plugins.hook_registry", search_once)
    patch_when_imported("sglang.srt.constrained.xgrammar_backend", mask)
    patch_when_imported("sglang.srt.layers.quantization", late("int8_method", "offer"))
    patch_when_imported("sglang.srt.mem_cache.allocator.paged", late("paged_slots", "install"))
    # The first of the modules of adapters that any process imports.
    patch_when_imported("sglang.srt.lora.lora_registry", late("unpinned", "install"))
    patch_when_imported("sglang.srt.utils.torch_memory_saver_adapter", late("memory_saver", "install"))
    patch_when_imported("sglang_dspark.engine.feature", as_on_a_gpu)
    patch_when_imported("sglang.srt.mem_cache.pool_host.mha", late("host_memory", "install_pools"))
    for name in ("sglang.srt.managers.cache_controller", "sglang.srt.mem_cache.l2_transfer"):
        patch_when_imported(name, late("host_memory", "install_streams"))


class Hurried:
    """The module ``time``, with short sleeps."""

    def __getattr__(self, name):
        return getattr(time, name)

    def sleep(self, seconds):
        time.sleep(seconds / 5)


class Bindings:
    """Puts the wrapper of a hooked function where modules have imported the function, as SGLang does.

    For each hook SGLang looks at every name of every module, which takes half of a start. Here a module is searched
    once, for all of SGLang's functions and classes.
    """

    def __init__(self):
        self._searched, self._places = set(), {}

    def __call__(self, original, wrapped, source):
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType) and id(module) not in self._searched:
                self._search(module)
        found = [
            (module, name)
            for module, name in self._places.get(id(original), ())
            if module is not source and vars(module).get(name) is original
        ]
        for module, name in found:
            setattr(module, name, wrapped)
        return len(found)

    def _search(self, module):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            return  # it is just being imported
        self._searched.add(id(module))
        for name, value in list(vars(module).items()):
            # Other packages have objects that import half of themselves if they are asked for their class.
            if issubclass(type(value), types.FunctionType | type) and str(value.__module__).startswith("sglang"):
                self._places.setdefault(id(value), []).append((module, name))


def late(module, function):
    """Return a patch that is defined in a module next to this one, which is imported no earlier than it is applied."""

    def patch(patched):
        getattr(importlib.import_module(module), function)(patched)

    return patch
