"""Choose for each request how much it speculates: the text stays the same, the number of steps changes.

python examples/speculation_per_request.py [URL]
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:30000"
WAYS = {
    "as the server decides": {},
    "at most 2 drafts per step": {"max_verify": 2},
    "no drafts": {"enabled": False},
    "drafts copied from the prompt first": {"preset": "summarization"},
}
QUESTION = "Write this list again, with a full stop after each name: Amsterdam, Berlin, Copenhagen, Dublin, Edinburgh."

client = OpenAI(base_url=f"{URL}/v1", api_key="unused")
texts = set()
for name, speculation in WAYS.items():
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=48,
        extra_body={"speculation": speculation, "return_meta_info": True},
    )
    [choice] = answer.choices
    counts = choice.meta_info["dspark"]
    steps, verified, kept = counts["rounds"], counts["verified_tokens"], counts["accepted_tokens"]
    print(f"{name}: {steps} steps, {verified} drafts verified, {kept} kept")
    texts.add(choice.message.content)
print("texts that differ:", len(texts) - 1)
