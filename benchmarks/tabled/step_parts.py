"""Tables of what steps and their kernels take."""

from __future__ import annotations

from tabled.layout import content_of, section


def step_times() -> str:
    """Return the step times that the server of the sweep measured at its start."""
    table = content_of("sweep/sps.json")
    depth, key = table["drafts"][-1], table["key"]
    rows = [
        [str(users), *(f"{times[0]:.1f}" for times in (verify[0], draft[-1], *verify[1:]))]
        for users, draft, verify in zip(table["requests"], table["draft_ms"], table["verify_ms"], strict=True)
    ]
    header = ["users", "plain step", f"draft {depth}", *(f"verify {drafts}" for drafts in table["drafts"][1:])]
    note = (
        f"Milliseconds with {table['contexts'][0]} tokens of context, as the server measured them at its start: "
        f"{key['dtype']}, {key['threads']} threads of {key['device']}, SGLang {key['sglang']} "
        "([sps.json](sweep/sps.json))."
    )
    return section(header, rows, note)


def attention() -> str:
    """Return the time of attention in a layer of a verification, beside FlashAttention 3 and what it was before."""
    content = content_of("h200/window_attention.json")
    header = ("requests", "context", "splits", "floor", "`window_attention`", "before", "FlashAttention 3")
    times = ("floor_us", "median_us", "before_us", "flash_attention_3_us")
    rows = [
        [str(case["requests"]), f"{case['context']:,}", str(case["splits"]), *(f"{case[name]:.1f}" for name in times)]
        for case in content["cases"]
    ]
    note = (
        "Microseconds for a layer of 32 heads and 8 K/V heads of 128 in bfloat16, 8 rows per request, on an "
        f"{content['hardware']['gpu']} ([window_attention.json](h200/window_attention.json), which says what was "
        "compared)."
    )
    return section(header, rows, note)


def kernels() -> str:
    """Return the time of the kernels of a step of many requests, beside the least possible one and the torch form."""
    content, rows = content_of("h200/kernels.json"), []
    for case in content["cases"]:
        shape = case["shape"]
        requests = shape["bs"] if "bs" in shape else shape["rows"] / 8
        if requests == 64 and shape.get("V", 151936) == 151936 and shape.get("kept", 0) < shape.get("rows", 1):
            floor = f"{case['floor_us']:.1f}" if case["floor_us"] >= 0.1 else "-"
            rows.append([f"`{case['case']}`", f"{case['median_us']:.1f}", floor, f"{case['reference_us']:,.0f}"])
    note = (
        "Microseconds for 64 requests with blocks of 7 drafts and a vocabulary of 151,936 tokens on an "
        f"{content['hardware']['gpu']}; the floor is the least that memory bandwidth and arithmetic allow "
        f"([kernels.json](h200/kernels.json), commit {content['commit']}, Triton {content['versions']['triton']})."
    )
    return section(("kernel", "median", "floor", "torch"), rows, note)
