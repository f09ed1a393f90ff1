#!/usr/bin/env bash
# Trains a drafter for a small target on a CPU in about ten minutes, and looks at it. A good one takes more prompts and
# steps: see docs/training.md.
#
#     examples/own_drafter.sh TARGET OUTPUT
set -euo pipefail

target=$1 output=$2
sglang-dspark train --target "$target" --output "$output" --invent "${PROMPTS:-36}" --held-out 4 --max-tokens 64 \
    --layers 1 --block-size 4 --steps "${STEPS:-40}" --batch-rows 4
sglang-dspark doctor --target "$target" --draft "$output/draft"
