"""A quantisation that only tests know: int8 weights and activations, exact on any CPU.

It stands for the methods of GPUs, of which a plain CPU runs none. A target asks for it in ``config.json``::

    "quantization_config": {"quant_method": "test_int8", "scales": {"self_attn": "token", "mlp": "tensor", ...}}

A layer is quantised when a part of its name is listed. Weights are quantised by row when they have been loaded, and
activations in every forward: by row of the batch (``token``), with a scale that never changes (``tensor``), or with one
that the largest number of the batch decides (``batch``). Then a row's result depends on all others, padding included.
"""

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig

NAME = "test_int8"
CALIBRATED = 8.0  # the largest number that a scale of a tensor was made for


class Int8Config(QuantizationConfig):
    """The section of ``config.json``."""

    def __init__(self, scales):
        super().__init__()
        self.scales = scales

    @classmethod
    def from_config(cls, config):
        return cls(config["scales"])

    def get_name(self):
        return NAME

    def get_supported_act_dtypes(self):
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls):
        return 0

    @staticmethod
    def get_config_filenames():
        return []

    def get_scaled_act_names(self):
        return []

    def get_quant_method(self, layer, prefix):
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, LinearBase | ParallelLMHead):
            for part in prefix.split("."):
                if part in self.scales:
                    return Int8Method(self.scales[part])
        return None


class Int8Method(LinearMethodBase):
    """One linear layer."""

    def __init__(self, scales):
        self._scales = scales

    def create_weights(self, layer, *sizes, **attributes):
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        UnquantizedLinearMethod().create_weights(layer, *sizes, **attributes)

    def process_weights_after_loading(self, layer):
        codes, scales = quantised(layer.weight.data, "token")
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.scales = torch.nn.Parameter(scales, requires_grad=False)

    def apply(self, layer, x, bias=None):
        codes, scales = quantised(x, self._scales)
        # Sums of products of two bytes are whole numbers that float32 holds: the shape of the batch changes nothing.
        products = codes.float() @ layer.weight.float().T
        out = (products * scales * layer.scales.T).to(x.dtype)
        return out if bias is None else out + bias


def quantised(values, scales):
    """Return int8 codes of ``values`` [..., n], and the scales that multiply them."""
    values = values.float()
    if scales == "tensor":
        largest = torch.full((1, 1), CALIBRATED)
    else:
        largest = values.abs().amax(-1 if scales == "token" else (-2, -1), keepdim=True).clamp(min=1e-8)
    return (values * (127 / largest)).round().clamp(-127, 127).to(torch.int8), largest / 127


def offer(module):
    """Let a server know the method; ``module`` is SGLang's package of quantisations."""
    for methods in (module.QUANTIZATION_METHODS, module.CPU_QUANTIZATION_METHODS):
        methods[NAME] = Int8Config
