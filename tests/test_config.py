"""Options: where values come from, and what is refused."""

from argparse import ArgumentParser

import pytest

from sglang_dspark.config import DSparkConfig, add_flags, flag_texts
from sglang_dspark.errors import ConfigError

STATIC = ("--speculative-dspark-schedule", "static")


def resolve(*argv, env=None):
    parser = ArgumentParser()
    add_flags(parser)
    return DSparkConfig.resolve(flag_texts(parser.parse_args(list(argv))), env or {})


def test_default_options():
    config = resolve()
    assert config == DSparkConfig(schedule="auto", block_size=None, verify_len=None, online_calibration=True)
    assert config.gamma(7) == config.max_verify(7) == 7


def test_flag_wins_over_environment():
    env = {"SGLANG_DSPARK_VERIFY_LEN": "2", "SGLANG_DSPARK_BLOCK_SIZE": "5", "SGLANG_DSPARK_SCHEDULE": "static"}
    config = resolve("--speculative-dspark-verify-len", "3", env=env | {"OTHER": "x"})
    assert (config.verify_len, config.block_size) == (3, 5)
    assert config.max_verify(config.gamma(7)) == 3


def test_serving_without_a_drafter():
    assert not resolve().draft_free
    assert resolve("--speculative-dspark-draft-free").gamma(None) == 7
    config = resolve(env={"SGLANG_DSPARK_DRAFT_FREE": "on", "SGLANG_DSPARK_BLOCK_SIZE": "12"})
    assert config.draft_free
    assert config.max_verify(config.gamma(None)) == 12
    assert not resolve("--speculative-dspark-draft-free", "off").draft_free
    with pytest.raises(ConfigError, match="schedule=static needs a drafter"):
        config.with_policy({"policy": "static"})


def test_verify_nothing_is_legal():
    assert resolve(*STATIC, "--speculative-dspark-verify-len=0").max_verify(7) == 0
    assert resolve("--speculative-dspark-schedule", "off").max_verify(7) == 0


@pytest.mark.parametrize(
    ("argv", "env", "named"),
    [
        (["--speculative-dspark-verify-len", "-1"], {}, "--speculative-dspark-verify-len='-1'"),
        (["--speculative-dspark-block-size", "0"], {}, "--speculative-dspark-block-size='0'"),
        (["--speculative-dspark-schedule", "fast"], {}, "auto, early-stop, static"),
        (["--speculative-dspark-verify-len", "2"], {}, "belongs to the policy static, but the policy is auto"),
        ([*STATIC, "--speculative-dspark-confidence-threshold", "0.5"], {}, "belongs to the policy threshold"),
        (["--speculative-dspark-schedule", "threshold"], {}, "needs --speculative-dspark-confidence-threshold"),
        (["--speculative-dspark-confidence-threshold", "1.5"], {}, r"confidence-threshold='1.5': must lie in \[0, 1\]"),
        (["--speculative-dspark-online-calibration", "yes"], {}, "online-calibration='yes': must be on or off"),
        (
            [*STATIC, "--speculative-dspark-draft-free"],
            {},
            "--speculative-dspark-schedule=static needs a drafter",
        ),
        (
            ["--speculative-dspark-draft-free", "--speculative-dspark-confidence-sts-path", "x"],
            {},
            "confidence-sts-path=x needs a drafter",
        ),
        (
            ["--speculative-dspark-draft-free", "--speculative-dspark-simulate-acceptance", "0.5"],
            {},
            r"simulate-acceptance=\(0.5,\) needs a drafter",
        ),
        (
            ["--speculative-dspark-draft-free", "--speculative-dspark-answer-cache", "64"],
            {},
            "answer-cache=64 needs a drafter",
        ),
        (["--speculative-dspark-answer-cache-key", "prompt"], {}, "answer-cache-key=prompt needs .*answer-cache, e.g."),
        (["--speculative-dspark-answer-cache", "0"], {}, "answer-cache='0': must be an integer of at least 1"),
        (["--speculative-dspark-tpot-ms", "0"], {}, r"tpot-ms='0': must lie in \[0.1, 10000\]"),
        (["--speculative-dspark-min-tpot-ms", "0"], {}, "min-tpot-ms='0': must be a number from 0.1, or inf"),
        (["--speculative-dspark-min-tpot-ms", "nan"], {}, "min-tpot-ms='nan': must be a number from 0.1, or inf"),
        (["--speculative-dspark-simulate-acceptance", "0.9,1.5"], {}, "acceptance='0.9,1.5': must all lie in"),
        (["--speculative-dspark-draft-free", "yes"], {}, "draft-free='yes': must be on or off"),
        ([], {"SGLANG_DSPARK_VERIFY_LEN": "many"}, "SGLANG_DSPARK_VERIFY_LEN='many'"),
        ([], {"SGLANG_DSPARK_VERIFYLEN": "3"}, "unknown environment variable SGLANG_DSPARK_VERIFYLEN"),
        ([], {"SGLANG_DSPARK_PORTS": "3"}, "unknown environment variable SGLANG_DSPARK_PORTS"),
        ([], {"SGLANG_DSPARK_SERVICE": "3"}, "unknown environment variable SGLANG_DSPARK_SERVICE="),
        ([], {"SGLANG_DSPARK_SERVICE_HOST_HTTP": "3"}, "unknown environment variable SGLANG_DSPARK_SERVICE_HOST_HTTP"),
        ([], {"SGLANG_DSPARK_PORT_30000_TCP_NAME": "3"}, "unknown environment variable SGLANG_DSPARK_PORT_30000_TCP"),
        ([], {"SGLANG_DSPARK_PORT_HTTP_TCP": "3"}, "unknown environment variable SGLANG_DSPARK_PORT_HTTP_TCP"),
    ],
)
def test_refused_options(argv, env, named):
    with pytest.raises(ConfigError, match=named):
        resolve(*argv, env=env)


def test_variables_of_a_kubernetes_service_are_left_alone():
    """Kubernetes sets them in every pod of a namespace that has a Service ``sglang-dspark``."""
    ports = [f"SGLANG_DSPARK_PORT_{port}" for port in ("30000_TCP", "53_UDP", "7_SCTP")]
    parts = [f"{port}_{part}" for port in ports for part in ("PROTO", "PORT", "ADDR")]
    entrance = ["SGLANG_DSPARK_SERVICE_HOST", "SGLANG_DSPARK_SERVICE_PORT", "SGLANG_DSPARK_SERVICE_PORT_HTTP_2"]
    assert resolve(env=dict.fromkeys([*entrance, "SGLANG_DSPARK_PORT", *ports, *parts], "10.0.0.7")) == resolve()


def test_values_beyond_the_checkpoint():
    with pytest.raises(ConfigError, match="--speculative-dspark-block-size=24 exceeds the 7 drafts of a block"):
        resolve("--speculative-dspark-block-size", "24").gamma(7)
    longest = resolve("--speculative-dspark-block-size", "23")
    assert longest.gamma(7) == 23
    with pytest.raises(ConfigError, match="without a confidence head has no others; pass 7 or less"):
        longest.gamma(7, tail=0)
    with pytest.raises(ConfigError, match="--speculative-dspark-verify-len=6 exceeds the 5 drafts"):
        resolve(*STATIC, "--speculative-dspark-verify-len", "6").max_verify(5)


def test_simulated_acceptance_of_a_block():
    assert resolve().acceptance_profile(5) is None
    config = resolve("--speculative-dspark-simulate-acceptance", "0.9,0.5,0.25")
    assert config.acceptance_profile(5) == (0.9, 0.5, 0.25, 0.25, 0.25)
    assert config.acceptance_profile(3) == (0.9, 0.5, 0.25)
    with pytest.raises(ConfigError, match="acceptance has 3 probabilities, and a block has 2 drafts"):
        config.acceptance_profile(2)


def test_policy_of_a_running_server():
    config = resolve("--speculative-dspark-block-size", "5")
    static = config.with_policy({"policy": "static", "verify_len": 2})
    assert (static.schedule, static.verify_len, static.block_size) == ("static", 2, 5)
    assert static.with_policy({"policy": "auto"}) == config
    assert config.with_policy({"policy": "threshold", "confidence_threshold": 1}).confidence_threshold == 1.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "policy is missing"),
        ({"policy": "fast"}, "policy='fast': must be one of auto, early-stop"),
        ({"policy": 3}, "policy=3: must be one of auto, early-stop"),
        ({"policy": "static", "verify_len": True}, "verify_len=True: must be an integer of at least 0"),
        ({"policy": "static", "verify_len": 1.5}, "verify_len=1.5: must be an integer"),
        ({"policy": "static", "length": 2}, "length is not a field of a policy"),
        ({"policy": "auto", "verify_len": 2}, "belongs to the policy static"),
        ({"policy": "threshold"}, "needs --speculative-dspark-confidence-threshold"),
    ],
)
def test_refused_policies(fields, named):
    with pytest.raises(ConfigError, match=named):
        resolve().with_policy(fields)
