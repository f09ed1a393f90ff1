"""Use SGLang's engine in a program, without HTTP.

python examples/engine.py TARGET DRAFT [FLAGS OF SGLANG ...]
"""

import sys

from sglang.srt.plugins import load_plugins

load_plugins()  # adds the flags of DSPARK to SGLang's parser

from sglang import Engine  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402

if __name__ == "__main__":  # SGLang's processes import this file again
    target, draft, *flags = sys.argv[1:]
    pair = ["--model-path", target, "--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", draft]
    engine = Engine(server_args=prepare_server_args([*pair, *flags]))
    for options in ({}, {"max_verify": 2}, {"enabled": False}):
        parameters = {"temperature": 0, "max_new_tokens": 32, "custom_params": {"dspark": options}}
        answer = engine.generate("The capital of France is", parameters)
        counts = answer["meta_info"]["dspark"]
        print(f"{options}: {counts['rounds']} steps, text {answer['text']!r}")
    engine.shutdown()
