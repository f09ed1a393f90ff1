"""Options: where values come from, and what is refused."""

from argparse import ArgumentParser

import pytest

from sglang_dspark.config import DSparkConfig, add_flags, flag_texts
from sglang_dspark.errors import ConfigError


def resolve(*argv, env=None):
    parser = ArgumentParser()
    add_flags(parser)
    return DSparkConfig.resolve(flag_texts(parser.parse_args(list(argv))), env or {})


def test_defaults():
    config = resolve()
    assert config == DSparkConfig(schedule="static", block_size=None, verify_len=None)
    assert config.gamma(7) == 7
    assert config.static_verify_len(7) == 7


def test_flag_wins_over_environment():
    env = {"SGLANG_DSPARK_VERIFY_LEN": "2", "SGLANG_DSPARK_BLOCK_SIZE": "5", "OTHER": "x"}
    config = resolve("--speculative-dspark-verify-len", "3", env=env)
    assert (config.verify_len, config.block_size) == (3, 5)
    assert config.static_verify_len(config.gamma(7)) == 3


def test_verify_nothing_is_legal():
    assert resolve("--speculative-dspark-verify-len=0").static_verify_len(7) == 0


@pytest.mark.parametrize(
    ("argv", "env", "named"),
    [
        (["--speculative-dspark-verify-len", "-1"], {}, "--speculative-dspark-verify-len='-1'"),
        (["--speculative-dspark-block-size", "0"], {}, "--speculative-dspark-block-size='0'"),
        (["--speculative-dspark-schedule", "fast"], {}, "auto, early-stop, static"),
        (["--speculative-dspark-schedule", "auto"], {}, "not served by this release; use static"),
        ([], {"SGLANG_DSPARK_VERIFY_LEN": "many"}, "SGLANG_DSPARK_VERIFY_LEN='many'"),
        ([], {"SGLANG_DSPARK_VERIFYLEN": "3"}, "unknown environment variable SGLANG_DSPARK_VERIFYLEN"),
    ],
)
def test_refusals(argv, env, named):
    with pytest.raises(ConfigError, match=named):
        resolve(*argv, env=env)


def test_values_beyond_the_checkpoint():
    with pytest.raises(ConfigError, match="--speculative-dspark-block-size=8 exceeds the block size 7"):
        resolve("--speculative-dspark-block-size", "8").gamma(7)
    with pytest.raises(ConfigError, match="--speculative-dspark-verify-len=6 exceeds the 5 drafts"):
        resolve("--speculative-dspark-verify-len", "6").static_verify_len(5)
