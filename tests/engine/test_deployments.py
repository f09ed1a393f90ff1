"""The commands of docker/ are those of a server with DSPARK that starts."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_dspark.engine import flags

DOCKER = Path(__file__).parents[2] / "docker"
# What SGLang's controller of two_nodes.yaml tells a worker, and what whoever runs the examples has to choose.
VALUES = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "dspark-two-nodes-0.dspark-two-nodes",
    "TARGET": "my/target",
    "DRAFT": "my/drafter",
}


def commands():
    """Arguments of every server, by where they were found."""
    for path in sorted([*DOCKER.glob("compose*.yaml"), *(DOCKER / "kubernetes").glob("*.yaml")]):
        for place, document in enumerate(yaml.safe_load_all(path.read_text())):
            lists = {tuple(words) for words in argument_lists(document) if "--speculative-algorithm" in words}
            for words in lists:  # one, which several containers may share
                yield pytest.param(words, id=f"{path.name}-{place}")


def argument_lists(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("command", "args"):
                yield [str(word) for word in value]
            else:
                yield from argument_lists(value)
    elif isinstance(node, list):
        for value in node:
            yield from argument_lists(value)


def filled(word):
    """A word without variables, of compose (``${TARGET:-default}``) or of Kubernetes (``$(TARGET)``)."""
    return re.sub(r"\$[({]([A-Z_]+)[^)}]*[)}]", lambda match: VALUES[match[1]], word)


COMMANDS = list(commands())


def test_every_example_has_been_found():
    assert {param.id.split("-")[0] for param in COMMANDS} == {
        "compose.yaml",
        "compose.replicas.yaml",
        "replicas.yaml",
        "two_nodes.yaml",
    }


@pytest.mark.parametrize("words", COMMANDS)
def test_every_flag_is_known_and_served(words):
    parser = ArgumentParser(exit_on_error=False)
    load_plugins()
    ServerArgs.add_cli_args(parser)
    args, unknown = parser.parse_known_args([filled(word) for word in words])
    assert unknown == []
    assert [rule for rule in flags.all_rules() if not rule.serves(args) and rule.name != "lora_backend"] == []
    assert args.speculative_algorithm == "DSPARK"
    if args.nnodes > 1:
        assert args.tp_size % args.nnodes == 0 and ":" in args.dist_init_addr and args.node_rank == 1
