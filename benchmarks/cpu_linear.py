"""Time a target's linear layers and LM head on this CPU: each way that servers choose from, by the number of rows.

A verification of N drafts for one request has N + 1 rows. Layers are timed as the checkpoint has them; SGLang joins
some of them, such as those of queries, keys and values. Run it on an idle machine.
"""

import argparse
from pathlib import Path

import torch
from safetensors import safe_open

from sglang_dspark.engine.cpu_linear import ROWS, forms_of, least_seconds
from sglang_dspark.tools import provenance


def weights_of(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the weights [out, in] of a checkpoint's layers and, last, of its LM head, which may be its embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name).to(dtype) for name in opened.keys()}  # noqa: SIM118
    head = tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"]
    layers = [tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")]
    return [*layers, head]


def main() -> None:
    """Print a table for each dtype, and write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder with safetensors files")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, help="JSON file of milliseconds, by dtype, way and number of rows")
    options = parser.parse_args()
    milliseconds: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in options.dtype:
        forms = forms_of(weights_of(options.target, getattr(torch, dtype)), may_copy=True)
        columns: dict[str, dict[str, float]] = {way.value: {} for way in forms}
        print(f"{dtype}, ms by rows", *columns, sep=" | ")
        for rows in ROWS:
            seconds = least_seconds(forms, rows)
            for way, taken in seconds.items():
                columns[way.value][str(rows)] = round(taken * 1e3, 2)
            print(rows, *(f"{taken * 1e3:.1f}" for taken in seconds.values()), sep=" | ", flush=True)
        milliseconds[dtype] = columns
    if options.output:
        provenance.write_json(options.output, {**provenance.record(), "milliseconds": milliseconds})


if __name__ == "__main__":
    main()
