"""Give a running server new weights, and compare how well the drafter fits the old and the new ones.

    python examples/new_weights.py CHECKPOINT [URL]

CHECKPOINT is a folder with weights of the same model, for instance after a step of fine-tuning.
"""

import json
import sys
from urllib.request import Request, urlopen

from openai import OpenAI

CHECKPOINT = sys.argv[1]
URL = sys.argv[2] if len(sys.argv) > 2 else "http://localhost:30000"

client = OpenAI(base_url=f"{URL}/v1", api_key="unused")


def ask() -> str:
    """Return an answer of the weights that the server has now."""
    messages = [{"role": "user", "content": "Count from one to twenty."}]
    answer = client.chat.completions.create(model="default", messages=messages, temperature=0, max_tokens=48)
    return answer.choices[0].message.content


before = ask()
body = {"model_path": CHECKPOINT, "weight_version": "step-1"}
with urlopen(
    Request(f"{URL}/update_weights_from_disk", json.dumps(body).encode(), {"Content-Type": "application/json"})
) as done:
    print("updated:", json.load(done)["success"])
print("the text has changed:", ask() != before)
with urlopen(f"{URL}/dspark/stats") as answer:
    for version in json.load(answer)["weight_versions"]:
        print(f"weights {version['weight_version']}: {version['accept_length']:.2f} tokens per step")
