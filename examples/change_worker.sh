#!/usr/bin/env bash
# Moves a service from this plugin to another worker and back while clients ask, without losing an answer. SGLang's
# router stands in front of the servers.
#
#     pip install sglang-router==0.3.2
#     examples/change_worker.sh TARGET DRAFT "FLAGS OF THE OTHER SERVER" [FLAGS OF BOTH ...]
#
# The flags of the other server are empty for plain SGLang. For SGLang's own DSPARK they are
# "--speculative-algorithm DSPARK --speculative-draft-model-path DRAFT --speculative-dspark-engine builtin".
set -euo pipefail

target=$1 other=$3
router=http://127.0.0.1:${PORT:=30000}
trap 'kill $(jobs -p) 2>/dev/null' EXIT

serve() { # PORT FLAGS...: start a server, and tell the router when it answers
    python -m sglang.launch_server --model-path "$target" --port "$1" "${@:2}" >"server-$1.log" 2>&1 &
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$1/health"; do
        sleep 1
        kill -0 $! || { tail "server-$1.log"; exit 1; }
    done
    curl --silent --fail --output /dev/null --request POST "$router/workers" \
        --header 'Content-Type: application/json' --data "{\"url\": \"http://127.0.0.1:$1\"}"
    until curl --silent "$router/workers" | grep --quiet ":$1\"[^}]*\"is_healthy\":true"; do sleep 1; done
    echo "serving: port +$(($1 - PORT))"
}

remove() { # PORT: no new requests for a server; it answers those that it has
    id=$(curl --silent "$router/workers" | python -c 'import json, sys
print(*(each["id"] for each in json.load(sys.stdin)["workers"] if each["url"].endswith(":" + sys.argv[1])))' "$1")
    curl --silent --fail --output /dev/null --request DELETE "$router/workers/$id"
    sleep "${DRAIN:-5}" # longer than your longest answer
    pkill --full -- "launch_server.*--port $1 " && echo "ended: port +$(($1 - PORT))"
}

ask() { # users that send the next question when they have an answer
    while true; do
        curl --silent --output /dev/null --write-out '%{http_code}\n' "$router/v1/chat/completions" \
            --header 'Content-Type: application/json' --data '{"model": "default", "max_tokens": 16, "temperature": 0,
            "messages": [{"role": "user", "content": "Name a river."}]}' >>"$answers"
    done
}

python -m sglang_router.launch_router --port "$PORT" >router.log 2>&1 &
until curl --silent --output /dev/null "$router/workers"; do sleep 1; done
plugin="--speculative-algorithm DSPARK --speculative-draft-model-path $2"
answers=$(mktemp)
serve $((PORT + 1)) $plugin "${@:4}"
for _ in 1 2 3 4; do ask & done
serve $((PORT + 2)) $other "${@:4}"
remove $((PORT + 1))
serve $((PORT + 3)) $plugin "${@:4}"
remove $((PORT + 2))
echo "answers: $(wc --lines <"$answers")"
echo "answers that failed: $(grep --count --invert-match 200 "$answers" || true)"
