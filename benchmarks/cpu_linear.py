"""Time a target's linear layers and LM head on this CPU: each way that servers choose from, by the number of rows.

A verification of N drafts for one request has N + 1 rows. Layers are timed as the checkpoint has them; SGLang joins
some of them, such as those of queries, keys and values. Run it on an idle machine.
"""

from collections.abc import Sequence
from pathlib import Path

import click
import torch
from safetensors import safe_open

from sglang_dspark.engine.cpu_linear import ROWS, forms_of, median_seconds
from sglang_dspark.tools import provenance

DTYPES = ("float32", "bfloat16")


def weights_of(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the weights [out, in] of a checkpoint's layers and, last, of its LM head, which may be its embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name).to(dtype) for name in opened.keys()}  # noqa: SIM118
    head = tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"]
    layers = [tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")]
    return [*layers, head]


@click.command(help=__doc__)
@click.option(
    "--target", type=click.Path(exists=True, path_type=Path), required=True, help="Folder with safetensors files."
)
@click.option(
    "--dtype", "dtypes", multiple=True, default=DTYPES, show_default=True, type=click.Choice([*DTYPES, "float16"])
)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of milliseconds, by dtype, way and rows.")
def main(target: Path, dtypes: Sequence[str], output: Path | None) -> None:
    """Print a table for each dtype, and write the file if one is named."""
    milliseconds: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in dtypes:
        forms = forms_of(weights_of(target, getattr(torch, dtype)), may_copy=True)
        columns: dict[str, dict[str, float]] = {way.value: {} for way in forms}
        print(f"{dtype}, ms by rows", *columns, sep=" | ")
        for rows in ROWS:
            seconds = median_seconds(forms, rows)
            for way, taken in seconds.items():
                columns[way.value][str(rows)] = round(taken * 1e3, 2)
            print(rows, *(f"{taken * 1e3:.1f}" for taken in seconds.values()), sep=" | ", flush=True)
        milliseconds[dtype] = columns
    if output:
        provenance.write_json(output, {**provenance.record(), "milliseconds": milliseconds})


if __name__ == "__main__":
    main()
