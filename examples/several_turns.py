"""Hold a conversation: the K/V of earlier turns comes from the prefix cache, that of the drafter too.

python examples/several_turns.py [URL]
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:30000"
TURNS = ("What is a prime number?", "Name the first five.", "Is one of them even?")

client = OpenAI(base_url=f"{URL}/v1", api_key="unused")
messages: list[dict[str, str]] = []
for turn, question in enumerate(TURNS, 1):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=40, extra_body={"return_meta_info": True}
    )
    [choice] = answer.choices
    messages.append({"role": "assistant", "content": choice.message.content})
    cached, counts = choice.meta_info["cached_tokens"], choice.meta_info["dspark"]
    print(f"turn {turn}: {answer.usage.prompt_tokens} prompt tokens, {cached} of them cached,", end=" ")
    print(f"{counts['accept_length']:.2f} tokens per step")
print("last answer:", choice.message.content)
