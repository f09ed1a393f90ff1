"""Get the log-probability of every token, and see that speculation does not change it.

python examples/log_probabilities.py [URL]
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:30000"

client = OpenAI(base_url=f"{URL}/v1", api_key="unused")


def ask(enabled: bool) -> list[tuple[str, float]]:
    """Return the tokens of an answer, each with its log-probability."""
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Name three colours."}],
        temperature=0,
        max_tokens=24,
        logprobs=True,
        top_logprobs=2,
        extra_body={"speculation": {"enabled": enabled}},
    )
    return [(entry.token, entry.logprob) for entry in answer.choices[0].logprobs.content]


drafted, plain = ask(enabled=True), ask(enabled=False)
for token, logprob in drafted[:8]:
    print(f"{token!r}: {logprob:.4f}")
print("tokens that differ:", sum(a != b for (a, _), (b, _) in zip(drafted, plain, strict=True)))
difference = max(abs(a - b) for (_, a), (_, b) in zip(drafted, plain, strict=True))
print("log-probabilities agree to 0.001:", difference < 0.001)
