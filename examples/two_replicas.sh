#!/usr/bin/env bash
# Starts two servers behind SGLang's router, and asks through it. On machines with GPUs, set CUDA_VISIBLE_DEVICES for each.
#
#     pip install sglang-router==0.3.2
#     examples/two_replicas.sh TARGET DRAFT [FLAGS OF SGLANG ...]
set -euo pipefail

ports=("${PORT:=30000}" $((PORT + 1)) $((PORT + 2)))
trap 'kill $(jobs -p)' EXIT
for port in "${ports[@]:1}"; do
    python -m sglang.launch_server --model-path "$1" --port "$port" \
        --speculative-algorithm DSPARK --speculative-draft-model-path "$2" "${@:3}" >"server-$port.log" 2>&1 &
done
python -m sglang_router.launch_router --port "$PORT" --worker-urls "http://127.0.0.1:${ports[1]}" \
    "http://127.0.0.1:${ports[2]}" --policy round_robin >router.log 2>&1 &
for address in "${ports[1]}/health" "${ports[2]}/health" "$PORT/readiness"; do
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$address"; do
        sleep 1
        [ "$(jobs -rp | wc -l)" = 3 ] || { tail ./*.log; exit 1; }
    done
done

# The router drops the field "speculation" of chats; the header arrives.
for question in "Name a river." "Name a mountain." "Name a sea." "Name a desert."; do
    curl --silent "http://127.0.0.1:$PORT/v1/chat/completions" --header 'Content-Type: application/json' \
        --header 'X-Request-Id-Speculation: {"max_verify": 3}' --output /dev/null --write-out "$question HTTP %{http_code}\n" \
        --data "{\"model\": \"default\", \"max_tokens\": 16, \"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]}"
done
for port in "${ports[@]:1}"; do
    echo "replica: $(curl --silent "http://127.0.0.1:$port/dspark/stats" |
        python -c 'import json, sys; print(round(json.load(sys.stdin)["accept_length"], 2))') tokens per step"
done
